"""Which model a request names: where llama-swap looks, and what it takes from there.

A body is JSON if its Content-Type *contains* `application/json`, in lower case; then the query string does
not count. Any other body is read as a form, and there a query string does count: before the fields of a
multipart form, after those of an urlencoded one. A GET is read by its query alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from proxy.simulator.tolerant_json import first_value


@dataclass(frozen=True, slots=True)
class Reading:
    model: str
    stream: bool
    body: dict[str, Any]  # the JSON object, or the form's fields, as far as they could be read
    rewritten: bool = True  # whether profile pins and selectors apply: only where the name can be replaced (measured)


def read_request(method: str, query: bytes, content_type: str, body: bytes) -> Reading:
    in_query = _urlencoded(query)
    if method == "GET":
        return _from_fields(in_query)
    if "application/json" in content_type:
        return _from_json(body)
    if "multipart/form-data" in content_type:
        fields = _multipart(content_type, body)
        beaten = any(name == "model" for name, _ in in_query)
        return _from_fields([] if fields is None else in_query + fields, rewritten=not beaten)
    if method in {"POST", "PUT", "PATCH"} and _media_type(content_type) == "application/x-www-form-urlencoded":
        return _from_fields(_urlencoded(body) + in_query, rewritten=False)
    return _from_fields(in_query, rewritten=False)


def _from_fields(pairs: list[tuple[str, str]], *, rewritten: bool = True) -> Reading:
    first: dict[str, str] = {}
    for name, value in pairs:
        first.setdefault(name, value)
    return Reading(first.get("model", ""), first.get("stream") == "true", dict(first), rewritten)


def _urlencoded(text: bytes) -> list[tuple[str, str]]:
    """Pairs of a query string; one with a bare `;` or a broken escape is dropped, as Go does."""
    pairs = []
    for part in text.split(b"&"):
        if not part or b";" in part or re.search(rb"%(?![0-9A-Fa-f]{2})", part):
            continue
        name, _, value = part.partition(b"=")
        pairs.append((_unescape(name), _unescape(value)))
    return pairs


def _unescape(text: bytes) -> str:
    return unquote_to_bytes(text.replace(b"+", b" ")).decode("utf-8", "surrogateescape")


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _multipart(content_type: str, body: bytes) -> list[tuple[str, str]] | None:
    """The fields that are not files, or None if this is no multipart form."""
    boundary = re.search(r'boundary="?([^";,]+)"?', content_type)
    if boundary is None or _media_type(content_type) != "multipart/form-data":
        return None
    delimiter = b"--" + boundary[1].encode("latin-1")
    fields = []
    for part in body.split(delimiter)[1:]:
        head, found, value = part.partition(b"\r\n\r\n")
        disposition = re.search(rb"(?im)^content-disposition:(.*)$", head)
        if not found or disposition is None:
            continue
        name = re.search(rb'[;\s]name="?([^";]*)"?', disposition[1])
        if name is not None and b"filename=" not in disposition[1]:
            fields.append((name[1].decode("utf-8", "replace"), value.removesuffix(b"\r\n").decode("utf-8", "replace")))
    return fields


def _from_json(body: bytes) -> Reading:
    model = first_value(body, "model")
    if isinstance(model, bool):
        model = "true" if model else "false"
    return Reading(model or "", first_value(body, "stream") is True, _object(body))


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
