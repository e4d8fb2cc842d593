"""An HTTP/1.1 client for one origin, behind httpx's transport interface.

What was sent is known exactly: `httpx.ConnectError` and `httpx.ConnectTimeout` mean that not one byte of the request
left, and the caller may try again; any other error means that it may have arrived (a POST is then never repeated).
The target and all fields are written as the bytes they are given as. There is no limit on connections, since a pool
limit would be a second queue in front of the GPU. What happens on each of them is told in `connection.py`.
"""

from __future__ import annotations

import asyncio
import ssl
import time

import httpx

from proxy.connection import IDLE_SECONDS, Connection
from proxy.response_body import ReadAhead


class Transport(httpx.AsyncBaseTransport):
    """Connections to one origin.

    A request's extensions may hold `method` and `target` (raw bytes, written as they are) and callbacks: `on_sent()`
    once the whole request has been handed to the socket, `on_head(status)` when the response head has arrived and
    `on_end(error or None)` when after that the body has ended. They are called in the socket's own event.
    `ahead` bounds what is read of all bodies before it is asked for.

    Raises `httpx.ConnectError` and `httpx.ConnectTimeout` when nothing was sent, `httpx.LocalProtocolError` for a
    request that is not sound, and `httpx.ReadError` or `httpx.RemoteProtocolError` for what the upstream did.
    """

    def __init__(self, origin: str, *, connect_timeout: float = 5.0, ahead: ReadAhead | None = None) -> None:
        url = httpx.URL(origin)
        self._host = url.host
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._connect_timeout = connect_timeout
        self._idle: dict[Connection, None] = {}
        self._closed = False
        self.encrypted = self._ssl is not None
        self.ahead = ahead or ReadAhead()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send on an idle connection or a new one; a cancellation closes it."""
        connection = self._take() or await self._connect()
        return await connection.exchange(request)

    def put_back(self, connection: Connection) -> None:
        """The connection's exchange is over and it may be used again."""
        if self._closed:
            connection.abort()
            return
        now = connection.idle_since = time.monotonic()
        self._idle[connection] = None
        oldest = next(iter(self._idle))
        if now - oldest.idle_since > IDLE_SECONDS:
            oldest.abort()

    def forget(self, connection: Connection) -> None:
        """The connection is closed."""
        self._idle.pop(connection, None)

    def _take(self) -> Connection | None:
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.reusable():
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("connecting to the upstream took too long") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return connection

    async def aclose(self) -> None:
        """Close the idle connections; those in use close with their exchange."""
        self._closed = True
        while self._idle:
            self._idle.popitem()[0].abort()
