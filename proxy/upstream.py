"""An HTTP/1.1 client for one origin, behind httpx's transport interface.

The parser is httptools; what is written here is the order of events, because a lease hangs on it. The *whole request
sent*, the *response head* and the *end of the response body* are each reported synchronously, in the very callback
in which the socket told us, so that no await and no slow client stands between an upstream's end and the release of
its lease. Closing is synchronous and idempotent for the same reason.

An exchange on a connection goes through these states, each left by exactly one event:

    IDLE ── request written ──► HEAD ── response head parsed ──► BODY ── last byte ──► IDLE (reused) or closed
                                  └────────────── any failure or cancellation ───────► closed, never reused

What was sent is known exactly: `httpx.ConnectError` and `httpx.ConnectTimeout` mean that not one byte of the request
left, and the caller may try again; any other error means that it may have arrived (a POST is then never repeated).
The target and all fields are written as the bytes they are given as. There is no limit on connections, since a pool
limit would be a second queue in front of the GPU.
"""

from __future__ import annotations

import asyncio
import select
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import httptools
import httpx

RawHeaders = list[tuple[bytes, bytes]]

IDLE_SECONDS = 60.0
"""An idle connection older than this is not used again; llama-swap itself never closes one."""

LAST_CHUNK = b"0\r\n\r\n"


class ResponseBody(httpx.AsyncByteStream):
    """The raw bytes of a response body, read ahead of the consumer into at most `limit` bytes."""

    def __init__(self, connection: _Connection, limit: int) -> None:
        self._connection = connection
        self._limit = limit
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._error: Exception | None = None
        self._ended = False
        self._on_end: Callable[[Exception | None], None] | None = None
        self._wake: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the upstream is done with this body, whatever of it is still unread."""
        return self._ended

    def on_end(self, callback: Callable[[Exception | None], None]) -> None:
        """Call back once, synchronously, when the upstream body has ended: with None, or with what broke it."""
        if self._ended:
            callback(self._error)
        else:
            self._on_end = callback

    def push(self, data: bytes) -> None:
        """Bytes from the socket."""
        self._chunks.append(data)
        self._size += len(data)
        if self._size > self._limit:
            self._connection.pause_reading()
        self._notify()

    def end(self, error: Exception | None = None) -> None:
        """The upstream has finished, or failed with `error`."""
        if self._ended:
            return
        self._ended, self._error = True, error
        if self._on_end is not None:
            self._on_end(error)
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """All that has arrived, as soon as it has; raises `httpx.ReadError` where the upstream broke off."""
        while True:
            if self._chunks:
                data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
                self._chunks.clear()
                self._size = 0
                self._connection.resume_reading()
                yield data
            elif self._error is not None:
                raise self._error
            elif self._ended:
                return
            else:
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake

    def close(self) -> None:
        """Stop reading; closes the connection unless the body has ended."""
        if not self._ended:
            self._connection.abort()

    async def aclose(self) -> None:
        """`close`, for httpx."""
        self.close()


class _Connection(asyncio.Protocol):
    """One socket and, while an exchange is on, its parser."""

    def __init__(self, pool: Transport) -> None:
        self._pool = pool
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._parser: Any = None
        self._head: asyncio.Future[httpx.Response] | None = None
        self._body: ResponseBody | None = None
        self._upload: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._headers: RawHeaders = []
        self._no_body = self._reading_paused = False
        self.closed = False
        self.idle_since = 0.0

    # -- the exchange

    async def exchange(self, request: httpx.Request) -> httpx.Response:
        """Send `request` and return at the response head; the body follows in the response's stream."""
        method: bytes = request.extensions.get("method") or request.method.encode()
        self._no_body = method == b"HEAD"
        self._parser = httptools.HttpResponseParser(self)
        self._body = ResponseBody(self, self._pool.buffer_limit)
        head: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()
        self._head, self._upload = head, None
        on_sent: Callable[[], None] = request.extensions.get("on_sent") or _nothing
        self._send(method, request, on_sent)
        return await head

    def _send(self, method: bytes, request: httpx.Request, on_sent: Callable[[], None]) -> None:
        target: bytes = request.extensions.get("target") or request.url.raw_path
        lines = [b"%b %b HTTP/1.1\r\n" % (method, target)]
        lines += [b"%b: %b\r\n" % (name, value) for name, value in request.headers.raw]
        lines.append(b"\r\n")
        chunked = "transfer-encoding" in request.headers
        if isinstance(request.stream, httpx.ByteStream):
            data = b"".join(request.stream)
            lines.append(_chunk(data) + LAST_CHUNK if chunked else data)
            self._transport.write(b"".join(lines))
            on_sent()
        else:
            self._transport.write(b"".join(lines))
            stream = cast("httpx.AsyncByteStream", request.stream)
            self._upload = asyncio.get_running_loop().create_task(self._write_body(stream, chunked, on_sent))

    async def _write_body(self, stream: httpx.AsyncByteStream, chunked: bool, on_sent: Callable[[], None]) -> None:
        try:
            async for chunk in stream:
                self._transport.write(_chunk(chunk) if chunked else chunk)
                if self._drained is not None:
                    await self._drained
                if self.closed:
                    return
            if chunked:
                self._transport.write(LAST_CHUNK)
            on_sent()
        except Exception as error:
            # The body's source failed: what the upstream has is not a request, so it must not be left waiting.
            self._fail(error)

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
        """The socket is behind (asyncio)."""
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """The socket has caught up (asyncio)."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # -- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected (asyncio)."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived (asyncio)."""
        if self._body is None:
            self.abort()  # an answer that nobody asked for: the connection cannot be trusted
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(httpx.RemoteProtocolError("the upstream switched protocols without being asked"))
        except httptools.HttpParserError as error:
            self._fail(httpx.RemoteProtocolError(f"the upstream's answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone (asyncio). A body without a length of its own ends here, and rightly so."""
        self.closed = True
        self._pool.forget(self)
        self.resume_writing()
        pending = self._head is not None and not self._head.done()
        if exc is None and not pending and self._ends_at_close():
            self._finish()
        else:
            self._fail(httpx.ReadError(str(exc) if exc else "the upstream closed the connection too early"))

    def reusable(self) -> bool:
        """Whether another request may be sent; an idle socket that is readable has been closed by its peer."""
        if self.closed or time.monotonic() - self.idle_since > IDLE_SECONDS:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """Close at once, whatever is under way. Synchronous and idempotent."""
        self._fail(httpx.ReadError("the exchange was given up"))

    def _fail(self, error: Exception) -> None:
        self.closed = True
        body, self._body = self._body, None
        if self._upload is not None and self._upload is not asyncio.current_task():
            self._upload.cancel()
        if self._transport is not None:
            self._transport.abort()
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        if body is not None:
            body.end(error)

    def _finish(self) -> None:
        """The response is complete: back to the pool, unless either side wants the connection closed."""
        body, self._body = self._body, None
        sent = self._upload is None or self._upload.done()
        if self.closed or not sent or self._no_body or not self._parser.should_keep_alive():
            self._close(sent=sent)
        else:
            self.resume_reading()
            self._pool.put_back(self)
        if body is not None:
            body.end()

    def _close(self, *, sent: bool) -> None:
        self.closed = True
        if not sent and self._upload is not None:
            self._upload.cancel()
        self._transport.close()

    def _ends_at_close(self) -> bool:
        names = {name.lower(): value.lower() for name, value in self._headers}
        return b"content-length" not in names and b"chunked" not in names.get(b"transfer-encoding", b"")

    # -- the parser (httptools)

    def on_message_begin(self) -> None:
        """A response, final or 1xx, begins; one more than was asked for condemns the connection."""
        self._headers = []
        if self._body is None:
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or a trailer, which is dropped."""
        if self._head is not None and not self._head.done():
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is whole; an interim 1xx is skipped."""
        status = self._parser.get_status_code()
        if status < 200 or self._head is None or self._head.done() or self._body is None:
            return
        self._head.set_result(httpx.Response(status, headers=self._headers, stream=self._body))
        if self._no_body:
            self._finish()

    def on_body(self, data: bytes) -> None:
        """A piece of the body, without chunk framing."""
        if self._body is not None:
            self._body.push(data)

    def on_message_complete(self) -> None:
        """The last byte of the response, or of an interim 1xx."""
        if self._body is not None and self._parser.get_status_code() >= 200:
            self._finish()


class Transport(httpx.AsyncBaseTransport):
    """Connections to one origin.

    A request's extensions may hold `method` and `target` (raw bytes, written as they are) and `on_sent` (called once
    the whole request has been handed to the socket). Raises `httpx.ConnectError` and `httpx.ConnectTimeout` when
    nothing was sent, `httpx.ReadError` or `httpx.RemoteProtocolError` afterwards.
    """

    def __init__(self, origin: str, *, connect_timeout: float = 5.0, buffer_limit: int = 1024 * 1024) -> None:
        url = httpx.URL(origin)
        self._host = url.host
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._connect_timeout = connect_timeout
        self._idle: dict[_Connection, None] = {}
        self.buffer_limit = buffer_limit

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send on an idle connection or a new one; a cancellation closes it."""
        connection = self._take() or await self._connect()
        try:
            return await connection.exchange(request)
        except BaseException:
            connection.abort()
            raise

    def put_back(self, connection: _Connection) -> None:
        """The connection's exchange is over and it may be used again."""
        now = connection.idle_since = time.monotonic()
        self._idle[connection] = None
        oldest = next(iter(self._idle))
        if now - oldest.idle_since > IDLE_SECONDS:
            oldest.abort()

    def forget(self, connection: _Connection) -> None:
        """The connection is closed."""
        self._idle.pop(connection, None)

    def _take(self) -> _Connection | None:
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.reusable():
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("connecting to the upstream took too long") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return connection

    async def aclose(self) -> None:
        """Close the idle connections; those in use close with their exchange."""
        while self._idle:
            self._idle.popitem()[0].abort()


def _chunk(data: bytes) -> bytes:
    """`data` as a chunk (RFC 9112, section 7.1); an empty one would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _nothing() -> None:
    pass
