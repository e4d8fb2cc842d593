"""One connection to the upstream, and the order of events on it.

The parser is httptools; what is written here is the order of events, because a lease hangs on it. The *whole request
sent*, the *response head* and the *end of the response body* are each reported synchronously, in the very callback
in which the socket told us, so that no await and no slow client stands between an upstream's end and the release of
its lease. Closing is synchronous and idempotent for the same reason.

An exchange goes through these states, each left by exactly one event:

    IDLE ── request written ──► HEAD ── response head parsed ──► BODY ── last byte ──► IDLE (reused) or closed
                                  └────────────── any failure or cancellation ───────► closed, never reused

The connection belongs to its exchange until the last of these events and to the pool after it. Whoever gives up in the
tick of the last byte finds his exchange over and touches nothing, for the connection may be another's already.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import httptools
import httpx

from proxy.framing import Framing, RawHeaders, request_head
from proxy.response_body import ReadAhead, ResponseBody

IDLE_SECONDS = 60.0
"""An idle connection older than this is not used again; llama-swap itself never closes one."""

MAX_HEAD = 1024 * 1024
"""Bytes of a response head, interim ones included: far above any real one, and what a runaway upstream may cost."""


class Pool(Protocol):
    """Where a connection comes from and goes back to."""

    ahead: ReadAhead
    encrypted: bool

    def put_back(self, connection: Connection) -> None:
        """The connection's exchange is over and it may be used again."""
        ...

    def forget(self, connection: Connection) -> None:
        """The connection is closed."""
        ...


@dataclass(slots=True, eq=False)
class _Exchange:
    """One request and its answer, as far as they have come. The callbacks are those of `upstream.Transport`."""

    body: ResponseBody
    head: asyncio.Future[httpx.Response]
    is_head_request: bool
    on_sent: Callable[[], None] | None = None
    on_head: Callable[[int], None] | None = None
    on_end: Callable[[Exception | None], None] | None = None
    fields: RawHeaders = field(default_factory=list)
    head_size: int = 0
    upload: asyncio.Task[None] | None = None
    written: bool = False
    sent: bool = False

    def arrived(self, status: int) -> None:
        """The response head is whole."""
        if self.on_head is not None:
            self.on_head(status)
        if self.on_end is not None:
            self.body.on_end(self.on_end)
        if not self.head.done():
            self.head.set_result(httpx.Response(status, headers=self.fields, stream=self.body))

    def ends_at_close(self) -> bool:
        """Whether the end of the connection is the end of the body (RFC 9112, section 6.3, rule 8)."""
        names = {name.lower(): value.lower() for name, value in self.fields}
        return b"content-length" not in names and b"chunked" not in names.get(b"transfer-encoding", b"")

    def stop_upload(self) -> None:
        """Send no more; does nothing when it is the upload that asks."""
        if self.upload is not None and self.upload is not asyncio.current_task():
            self.upload.cancel()


class Connection(asyncio.Protocol):
    """One socket and, while an exchange is on, its parser."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._parser: Any = None
        self._now: _Exchange | None = None
        self._drained: asyncio.Future[None] | None = None
        self._reading_paused = False
        self.closed = False
        self.idle_since = 0.0

    # -- the exchange

    async def exchange(self, request: httpx.Request) -> httpx.Response:
        """Send `request` and return at the response head; the body follows in the response's stream."""
        method: bytes = request.extensions.get("method") or request.method.encode()
        head: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()
        now = self._now = _Exchange(ResponseBody(self, self._pool.ahead), head, method == b"HEAD")
        now.on_sent, now.on_head, now.on_end = map(request.extensions.get, ("on_sent", "on_head", "on_end"))
        self._parser = httptools.HttpResponseParser(self)
        try:
            self._send(method, request, now)
            return await head
        except BaseException:
            head.cancel()  # its error, if it has one that nobody waited for, is not to be reported as lost
            now.body.close()
            raise

    def _send(self, method: bytes, request: httpx.Request, now: _Exchange) -> None:
        target: bytes = request.extensions.get("target") or request.url.raw_path
        head = request_head(method, target, request.headers.raw)
        framing = Framing(request.headers.raw)
        if isinstance(request.stream, httpx.ByteStream):
            body = framing.piece(b"".join(request.stream)) + framing.end()
            self._transport.write(head + body)
            self._note_written(now)
        else:
            self._transport.write(head)
            stream = cast("httpx.AsyncByteStream", request.stream)
            now.upload = asyncio.get_running_loop().create_task(self._write_body(stream, framing, now))

    async def _write_body(self, stream: httpx.AsyncByteStream, framing: Framing, now: _Exchange) -> None:
        try:
            async for data in stream:
                self._transport.write(framing.piece(data))
                if self._drained is not None:
                    await self._drained
            self._transport.write(framing.end())
            self._note_written(now)
        except Exception as error:
            # The body's source failed: what the upstream has is not a request, so it must not be left waiting.
            if self._now is now:
                self._fail(error)

    def _note_written(self, now: _Exchange) -> None:
        now.written = True
        if self._drained is None:
            self._note_sent(now)

    def _note_sent(self, now: _Exchange) -> None:
        now.sent = True
        if now.on_sent is not None:
            now.on_sent()

    # -- flow control

    def pause_reading(self) -> None:
        """The consumer is behind."""
        if not self._reading_paused and not self.closed:
            self._reading_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """The consumer has caught up."""
        if self._reading_paused and not self.closed:
            self._reading_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Not everything went to the socket at once (asyncio)."""
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Everything has gone to the socket (asyncio)."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)
        now = self._now
        if now is not None and now.written and not now.sent:
            self._note_sent(now)

    # -- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected (asyncio). With no bytes allowed in its buffer, the transport tells when the last one has left."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived (asyncio)."""
        now = self._now
        if now is None:
            self.abort()  # an answer that nobody asked for: the connection cannot be trusted
            return
        now.head_size += 0 if now.head.done() else len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(httpx.ReadError(f"a callback failed: {error.__context__!r}"))
            raise
        except (httptools.HttpParserUpgrade, httptools.HttpParserError) as error:
            self._fail(httpx.RemoteProtocolError(f"the upstream's answer is not HTTP: {error}"))
        if now.head_size > MAX_HEAD and not now.head.done():
            self._fail(httpx.RemoteProtocolError("the head of the upstream's answer is too large"))

    def eof_received(self) -> None:
        """The peer sends no more (asyncio). Whether it would still read does not matter then."""
        self._peer_ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone (asyncio)."""
        if exc is not None:
            self._read_last_words()
        self._peer_ended(exc)

    def _read_last_words(self) -> None:
        """Read what came before the reset: an early refusal of a large body would be lost behind the failed write."""
        if self._pool.encrypted:
            return
        with contextlib.suppress(OSError):
            while self._now is not None and (data := os.read(self._fileno(), 65536)):
                self.data_received(data)

    def _peer_ended(self, exc: Exception | None) -> None:
        self.closed = True
        self._pool.forget(self)
        now = self._now
        if exc is None and now is not None and now.head.done() and now.ends_at_close():
            self._finish()
        else:
            self._fail(httpx.ReadError(str(exc) if exc else "the upstream closed the connection too early"))

    def _fileno(self) -> int:
        number: int = self._transport.get_extra_info("socket").fileno()
        return number

    def reusable(self) -> bool:
        """Whether another request may be sent; an idle socket that is readable has been closed by its peer."""
        if self.closed or self._transport.is_closing() or time.monotonic() - self.idle_since > IDLE_SECONDS:
            return False
        poll = select.poll()
        poll.register(self._fileno(), select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """Close at once, whatever is under way. Synchronous and idempotent."""
        self._fail(httpx.ReadError("the exchange was given up"))

    def _fail(self, error: Exception) -> None:
        now = self._end_exchange(stay=False)
        if now is None:
            return
        if not now.head.done():
            now.head.set_exception(error)
        now.body.end(error)

    def _finish(self) -> None:
        """The response is complete: back to the pool, unless either side wants the connection closed."""
        now = self._now
        if now is not None:
            self._end_exchange(stay=self._may_stay(now))
            now.body.end()

    def _may_stay(self, now: _Exchange) -> bool:
        # After HEAD not: the parser cannot be told that the body announced does not follow.
        return not self.closed and now.sent and not now.is_head_request and bool(self._parser.should_keep_alive())

    def _end_exchange(self, *, stay: bool) -> _Exchange | None:
        now, self._now = self._now, None
        if stay:
            self.resume_reading()
            self._pool.put_back(self)
            return now
        # Not `close`, which would first wait for a peer that does not read to take what is still to be written.
        self.closed = True
        self._transport.abort()
        if now is not None:
            now.stop_upload()
        return now

    # -- the parser (httptools)

    def on_message_begin(self) -> None:
        """A response, final or 1xx, begins; one more than was asked for condemns the connection."""
        if self._now is None:
            self.abort()
        else:
            self._now.fields = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or a trailer, which is dropped."""
        if self._now is not None and not self._now.head.done():
            self._now.fields.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """The head is whole; an interim 1xx is skipped. No server could pass on a status outside of RFC 9110's."""
        now, status = self._now, self._parser.get_status_code()
        if now is None or now.head.done() or 100 <= status < 200:
            return
        if not 200 <= status < 600:
            self._fail(httpx.RemoteProtocolError(f"the upstream answered with the status {status}"))
            return
        now.arrived(status)
        if now.is_head_request:
            self._finish()

    def on_body(self, data: bytes) -> None:
        """A piece of the body, without chunk framing."""
        if self._now is not None:
            self._now.body.push(data)

    def on_message_complete(self) -> None:
        """The last byte of the response, or of an interim 1xx."""
        if self._now is not None and self._now.head.done():
            self._finish()
