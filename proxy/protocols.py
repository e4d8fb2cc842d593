"""uvicorn's two HTTP protocols, bounded and mended.

Both get a time and a size for a request's head, without which a client that sends one byte a minute keeps a socket
for ever, and one that never ends its head fills the memory. What else is here is httptools': its parser is twice as
fast as h11, and the protocol around it has faults that show on a wire:

- a client of HTTP/1.0 is sent chunks (RFC 9112, section 7.1: it cannot read them);
- a client that leaves while a request of its waits behind another is noticed by the last of them only;
- a request that asks for an upgrade it does not get loses its body (RFC 9110, section 7.8: it goes on as it is);
- the trailers of a body become fields of its head, the scheme, authority and `#` of a target are dropped;
- a 304 that tells the length of the 200 is waited for in full;
- what cannot be read behind a request is refused before, or inside, that one's answer.

Each is mended where the server asks the subclass, and none by a change to what it imports.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import h11
import httptools
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from proxy.errors import HeadTimeout, HeadTooLarge, Refusal
from proxy.pacing import Paced

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

FRAMING = (b"content-length", b"transfer-encoding")

DISCARD_SECONDS = 2.0
"""How long a refused client may go on sending: closing with bytes unread is a reset, which can destroy the answer
before the client has read it (RFC 9112, section 9.6)."""


class HeadBounds:
    """What both protocols have in common: `head_timeout` seconds and `max_head` bytes for the head of a request."""

    head_timeout = 10.0
    max_head = 64 * 1024
    on_refused: Callable[[Refusal], None] = staticmethod(lambda error: None)

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    _head_timer: asyncio.TimerHandle | None = None
    _head_begun = False
    refused = False
    """Whether this connection has had its last answer: what still arrives is dropped."""

    def expect_head(self, *, begun: bool) -> None:
        """A head is awaited, of which something has come if `begun`. The clock runs from the first call on."""
        self._head_begun = begun
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout, self._head_is_late)

    def head_is_whole(self) -> None:
        """No head is awaited any more."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._head_begun:
            self.refuse(HeadTimeout())
        else:
            self.transport.close()  # nobody asked anything: a browser's connection in reserve

    def refuse(self, error: Refusal) -> None:
        """Answer without the application, and close."""
        self.head_is_whole()
        if self.transport.is_closing():
            return
        self.on_refused(error)
        content_type, body = error.render(anthropic=False, accept=b"")
        status = b"HTTP/1.1 %d %b\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
        fields = b"content-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (content_type, len(body))
        self.transport.write(status + fields + body)
        self.transport.write_eof()
        self.refused = True
        self._head_timer = self.loop.call_later(DISCARD_SECONDS, self.transport.close)


class _LargeHead(h11.RemoteProtocolError):
    """The head of a request is larger than `max_head`."""


class _BoundedConnection(h11.Connection):
    """h11's, which looks at the size of a head only while that is incomplete: one that waited in a pipeline is not."""

    def __init__(self, max_head: int) -> None:
        super().__init__(h11.SERVER, max_head - 1)
        self._max_head = max_head

    def next_event(self) -> Any:
        """What has come (h11). Raises _LargeHead."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            request_line = len(event.method) + len(event.target) + len("  HTTP/1.1\r\n")
            if request_line + sum(len(name) + len(value) + 4 for name, value in event.headers) + 2 > self._max_head:
                raise _LargeHead("the head of the request is too large")
        return event


class BoundedH11(HeadBounds, Paced, H11Protocol):
    """uvicorn's protocol on h11."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _BoundedConnection(self.max_head)
        self._head_full = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected (asyncio)."""
        super().connection_made(transport)
        self.expect_head(begun=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone (asyncio)."""
        self.head_is_whole()
        super().connection_lost(exc)

    def parse(self, data: bytes | memoryview) -> None:
        """Take bytes that have arrived. Of a head at most `max_head` are ever shown to h11."""
        while self.conn.their_state is h11.IDLE and data and self._reads():
            room = max(1, self.max_head - len(self.conn.trailing_data[0]))
            piece, data = data[:room], data[room:]
            self._head_full = len(piece) == room
            H11Protocol.data_received(self, piece)  # type: ignore[arg-type]
        if data and self._reads():
            self._head_full = False
            H11Protocol.data_received(self, data)  # type: ignore[arg-type]
        if not self._reads():
            return
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self.expect_head(begun=True)
        else:
            self.head_is_whole()

    def _reads(self) -> bool:
        return not self.refused and not self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        """h11 could make nothing of what came."""
        self.head_is_whole()
        error = sys.exc_info()[1]
        too_large = self._head_full and isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431
        if too_large or isinstance(error, _LargeHead):
            self.refuse(HeadTooLarge())
            return
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.close()  # an answer has begun, or is one to a HEAD


class BoundedHttpTools(HeadBounds, Paced, HttpToolsProtocol):
    """uvicorn's protocol on httptools, mended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cycles: deque[RequestResponseCycle] = deque()
        self._in_head = self._after_head = False
        self._head_size = 0
        self._ended_here = False
        self._upgrade_declined = False
        self._resuming = False
        self._last_word: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected (asyncio)."""
        super().connection_made(transport)
        self.expect_head(begun=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone (asyncio), and every request of its must know."""
        self.head_is_whole()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def parse(self, data: bytes | memoryview) -> None:
        """Take bytes that have arrived."""
        if self.refused or self._last_word is not None:
            return
        self._unset_keepalive_if_required()
        before, self._ended_here = self._head_size, False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._after_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._fail(error)
        else:
            self._look_at_head(0 if self._ended_here else before + len(data))

    def _look_at_head(self, size: int) -> None:
        """A head that is not whole yet has `size` bytes, those left out that came in one piece with an earlier end."""
        if self._ended_here or not self._in_head:
            self.head_is_whole()
        if not self._in_head:
            self._head_size = 0
            return
        self._head_size = size
        if size > self.max_head:
            self._end_with(lambda: self.refuse(HeadTooLarge()))
        elif all(cycle.response_complete for cycle in self._cycles):
            self.expect_head(begun=True)

    def _fail(self, error: httptools.HttpParserError) -> None:
        if isinstance(too_large := error.__context__, HeadTooLarge):
            self._end_with(lambda: self.refuse(too_large))
        else:
            self.logger.warning("Invalid HTTP request received.")
            self._end_with(lambda: self.send_400_response("Invalid HTTP request received."))

    def _end_with(self, last_word: Callable[[], None]) -> None:
        """Nothing more can be read here; `last_word` says so after the answers to earlier requests (section 9.3.2)."""
        self.head_is_whole()
        self._last_word = last_word
        self._end_if_answered()

    def _end_if_answered(self) -> None:
        if self._last_word is None:
            return
        unanswered = [cycle for cycle in self._cycles if not cycle.response_complete]
        if any(not cycle.more_body for cycle in unanswered):
            return
        if any(cycle.response_started for cycle in unanswered):
            self.transport.close()  # it is the body of this very request that cannot be read
        else:
            self._last_word()

    def on_response_complete(self) -> None:
        """An answer is out whole: the next request has its turn (uvicorn)."""
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        self._end_if_answered()
        if not self.refused:
            super().on_response_complete()

    def _after_upgrade(self, rest: bytes | memoryview) -> None:
        if self._should_upgrade():
            self.head_is_whole()
            self.handle_websocket_upgrade()
        else:
            self._resume(rest)

    def _resume(self, rest: bytes | memoryview) -> None:
        """Parse on after a head that asked for an upgrade in vain: `rest` is that request's body, and what follows.

        The parser holds the connection for upgraded; a new one is told the framing of that body, and takes over.
        """
        fields = b"".join(name + b": " + value + b"\r\n" for name, value in self.headers if name in FRAMING)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._upgrade_declined, self._resuming = False, True
        self.parse(b"POST / HTTP/1.1\r\n" + fields + b"\r\n" + rest)

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        """A request begins."""
        if not self._resuming:
            self._in_head, self._after_head = True, False
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        if not self._resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or a trailer, which is dropped: what comes after the body must not decide about it."""
        if not self._resuming and not self._after_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole. The application runs only after this call, so its scope can still be set right."""
        if self._resuming:
            self._resuming = False
            return
        self._in_head, self._after_head, self._ended_here = False, True, True
        request_line = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n")
        if request_line + sum(len(name) + len(value) + 4 for name, value in self.headers) + 2 > self.max_head:
            raise HeadTooLarge
        self._upgrade_declined = self.parser.should_upgrade() and not self._should_upgrade()
        super().on_headers_complete()
        if self.parser.should_upgrade() and not self._upgrade_declined:
            return
        self.scope["raw_path"], _, self.scope["query_string"] = self.url.partition(b"?")
        self.cycle.__class__ = Cycle
        self._cycles.append(self.cycle)

    def on_message_complete(self) -> None:
        """The request is whole, unless it is one whose body the parser passed over."""
        self._ended_here = True
        if not self._upgrade_declined:
            super().on_message_complete()


class Cycle(RequestResponseCycle):
    """One request and its answer. The server makes it; it becomes one of these before its application runs."""

    until_close = False
    """Whether the end of the connection is the end of the body (RFC 9112, section 6.3, rule 8)."""

    async def send(self, message: ASGISendEvent) -> None:
        """ASGI. Called with the head first and then with pieces of the body."""
        if message["type"] == "http.response.start":
            names = {name for name, _ in message.get("headers", ())}
            if self.scope["http_version"] == "1.0" and not self.response_started and b"content-length" not in names:
                self.until_close, self.chunked_encoding = True, False
            await super().send(message)
            if message["status"] in {204, 304}:
                self.expected_content_length = 0
            return
        if self.until_close and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def protocol_for(
    parser: str, *, head_timeout: float, max_head: int, on_refused: Callable[[Refusal], None]
) -> type[asyncio.Protocol]:
    """The protocol class on that parser, h11 or httptools, with these bounds."""
    base = {"h11": BoundedH11, "httptools": BoundedHttpTools}[parser]
    bounds = {"head_timeout": head_timeout, "max_head": max_head, "on_refused": staticmethod(on_refused)}
    return type(base.__name__, (base,), bounds)
