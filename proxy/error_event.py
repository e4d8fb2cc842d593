"""A failure on a stream whose head is out: the API's own error event.

A status cannot be given any more, and a clean end would be a silent empty answer to most clients. Each API has one
event that its SDKs raise for. What the upstream said of the failure stays as it was said, as far as it can be read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from proxy.errors import ANTHROPIC_TYPES, Refusal, anthropic_type

ERROR_LIMIT = 64 * 1024
"""Bytes of an upstream's error that are read: no real one is near it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What is told of a failure. `status` is what it would have been answered with, `type` is OpenAI's word for it."""

    status: int
    message: str
    type: str
    code: str | int | None
    anthropic_type: str


def refused(error: Refusal) -> Failure:
    """The proxy's own answer."""
    return Failure(error.status, error.message, error.type, error.code, anthropic_type(error.status))


def answered(status: int, body: bytes) -> Failure:
    """The upstream's answer with a status of 400 or above, of whose body this much is known."""
    said = _said(body)
    text = said.get("message")
    if not isinstance(text, str) or not text:
        text = body.decode(errors="replace").strip() or f"llama-swap answered with the status {status}, without a word."
    kind, code = said.get("type"), said.get("code")
    usual = "server_error" if status >= 500 else "invalid_request_error"
    known = isinstance(kind, str) and kind in ANTHROPIC_TYPES
    return Failure(
        status,
        text,
        kind if isinstance(kind, str) else usual,
        code if isinstance(code, str | int) else None,
        str(kind) if known else anthropic_type(status),
    )


def _said(body: bytes) -> dict[str, Any]:
    """The error object in a body: OpenAI's, Anthropic's, or a plain one; empty where there is none."""
    try:
        root = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    error = root.get("error", root) if isinstance(root, dict) else None
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, dict) else {}


def error_event(api: str, failure: Failure) -> bytes:
    """The event that tells a client of `api`, one of `routes.TEXT_APIS`, of the failure."""
    error = {"message": failure.message, "type": failure.type, "param": None, "code": failure.code}
    if api == "messages":
        inner = {"type": failure.anthropic_type, "message": failure.message, "code": failure.code}
        return b"event: error\n" + _data({"type": "error", "error": inner})
    if api == "responses":
        # The API's event is flat; the SDKs raise only for what holds an `error` object too.
        flat = {"type": "error", "code": failure.code, "message": failure.message, "param": None, "sequence_number": 0}
        return b"event: error\n" + _data({**flat, "error": error})
    return _data({"error": error})


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"
