"""Notice a chat stream that ends as if it were whole and is not.

llama-swap hides the death of an engine: its stream of events stops, and then ends well. SDKs return such half an answer
as a whole one. A whole one has the line `data: [DONE]`, or at least one `finish_reason` that is not null. The bytes are
searched for either as they pass, never copied and never framed anew; where a piece ends inside of what is looked for,
its last bytes are looked at again with the first of the next.

Text that a model wrote cannot be mistaken for either. In a JSON string a line break and a quote are escaped, so no line
begins there, and a quote that opens a key has no backslash before it.
"""

from __future__ import annotations

import re
import time
from typing import Protocol

import structlog
from starlette.types import Message, Send

from proxy.error_event import error_event, refused
from proxy.errors import CutStream, IncompleteStream

log = structlog.get_logger("gpu_lease_proxy")

APIS = frozenset({"chat/completions", "completions"})
"""The APIs whose streams end that way."""

_BLANKS = rb"[ \t]{0,8}"
_DONE = re.compile(rb"[\r\n]data:" + _BLANKS + rb"\[DONE\]")
_FINISHED = re.compile(rb'"finish_reason"(?<=[^\\]"finish_reason")' + _BLANKS + b":" + _BLANKS + rb"[^ \tn]")

OVERLAP = 48
"""Bytes of both sides of a border that are searched together: more than either pattern can match, its look back
included. A `finish_reason` with more than eight blanks before its value is one that nobody writes."""

_BLANK_LINE = (b"\n\n", b"\n\r\n", b"\r\r", b"\n\r")


class LastEvent:
    """Whether a stream of events, given in pieces, has had its last one."""

    def __init__(self) -> None:
        self.seen = False
        self._tail = b"\n\n"

    def feed(self, data: bytes) -> None:
        """The next bytes."""
        if self.seen:
            return
        self.seen = _is_in(self._tail + data[:OVERLAP]) or (len(data) > OVERLAP and _is_in(data))
        self._tail = data[-OVERLAP:] if len(data) >= OVERLAP else (self._tail + data)[-OVERLAP:]

    def gap(self) -> bytes:
        """What must come before another event, wherever a stream without its last one has stopped."""
        if self._tail.endswith(_BLANK_LINE):
            return b""
        return b"\n" if self._tail.endswith(b"\n") else b"\n\n"


def _is_in(data: bytes) -> bool:
    return _FINISHED.search(data) is not None or (b"[DONE]" in data and _DONE.search(data) is not None)


class Account(Protocol):
    """Where incomplete streams are counted."""

    def stream_incomplete(self, class_name: str) -> None:
        """A stream ended well on the wire, but without its last event."""
        ...


class Completion:
    """An ASGI `send` before another, for an answer of one of `APIS` that may be a stream.

    With `flag`, an incomplete stream is followed by the API's error event, and CutStream is raised, so that the server
    ends it broken off. Seconds in the log count from here.
    """

    def __init__(self, send: Send, account: Account, class_name: str, model: str, *, flag: bool) -> None:
        self._send, self._account = send, account
        self._class_name, self._model = class_name, model
        self._flag, self._begun = flag, time.monotonic()
        self._last_event: LastEvent | None = None
        self._fixed_length = False

    async def __call__(self, message: Message) -> None:
        """Pass a message on. Raises CutStream after an incomplete stream."""
        if message["type"] == "http.response.start":
            self._look_at_head(message)
        elif self._last_event is not None:
            self._last_event.feed(message.get("body", b""))
            if not message.get("more_body", False) and not self._last_event.seen:
                await self._end(message, self._last_event)
                return
        await self._send(message)

    def _look_at_head(self, message: Message) -> None:
        fields = dict(message["headers"])
        is_stream = fields.get(b"content-type", b"").lower().startswith(b"text/event-stream")
        coded = fields.get(b"content-encoding", b"identity").strip().lower() not in {b"", b"identity"}
        if message["status"] == 200 and is_stream and not coded and fields.get(b"content-length") != b"0":
            self._last_event = LastEvent()
            self._fixed_length = b"content-length" in fields

    async def _end(self, message: Message, last_event: LastEvent) -> None:
        self._account.stream_incomplete(self._class_name)
        seconds = round(time.monotonic() - self._begun, 3)
        log.warning("incomplete_stream", cls=self._class_name, model=self._model, seconds=seconds)
        if not self._flag or self._fixed_length:
            await self._send(message)
            return
        event = error_event("chat/completions", refused(IncompleteStream()))
        body = message.get("body", b"") + last_event.gap() + event
        await self._send({**message, "body": body, "more_body": True})
        raise CutStream
