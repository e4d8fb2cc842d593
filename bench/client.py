"""The load generator: connections that send prepared bytes and note when answers begin and end.

It runs in the bench's own process. A `Load` is a closed loop: each of its connections sends its next request in the
call that brought the end of the answer before, until the time is over.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from bench.http import Message

_STAMP = re.compile(rb'\{"t":(\d+),')

PATIENCE = 60.0
"""Seconds after which an answer that has not ended counts as failed."""


@dataclass(slots=True)
class Taken:
    """What a load came to; times are seconds, `delays` those of stamped events on their way."""

    done: int = 0
    failed: int = 0
    first_bytes: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)

    def join(self, other: Taken) -> None:
        """Add another's."""
        self.done += other.done
        self.failed += other.failed
        self.first_bytes += other.first_bytes
        self.delays += other.delays


class Connection(asyncio.Protocol):
    """One connection to a proxy. `on_end` is called with whether the answer was a 200 that ended well."""

    def __init__(self, taken: Taken, *, stamps: bool = False) -> None:
        self._taken, self._stamps = taken, stamps
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._message: Message | None = None
        self._first = True
        self._sent = 0.0
        self.on_end: Callable[[bool], None] = lambda well: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)

    def send(self, request: bytes) -> None:
        """Send the next request."""
        self._message, self._first = Message(), True
        self._sent = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Some of an answer."""
        message = self._message
        if message is None:
            return
        if self._first:
            self._first = False
            self._taken.first_bytes.append(time.perf_counter() - self._sent)
        if self._stamps:
            now = time.monotonic_ns()
            self._taken.delays += [(now - int(stamp)) / 1e9 for stamp in _STAMP.findall(data)]
        if message.feed(data, answer=True):
            self._end(message)

    def _end(self, message: Message) -> None:
        self._message = None
        well = message.head.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200"))
        if well:
            self._taken.done += 1
        else:
            self._taken.failed += 1
        self.on_end(well)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed: an answer under way has failed."""
        if self._message is not None:
            self._message = None
            self._taken.failed += 1
            self.on_end(False)

    def close(self) -> None:
        """Leave."""
        self._message = None
        self._transport.abort()


async def connect(port: int, taken: Taken, *, stamps: bool = False) -> Connection:
    """A connection to a proxy on this machine."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(taken, stamps=stamps), "127.0.0.1", port)
    return connection


async def ask(port: int, request: bytes) -> Taken:
    """One request on a connection of its own, to its end."""
    return await Load(port, request, 1, once=True).run()


class Load:
    """`streams` connections in a closed loop for `seconds`, or with one request each (`once`).

    Every `stamped`th connection notes the delays of stamped events; 0: none.
    """

    def __init__(
        self, port: int, request: bytes, streams: int, seconds: float = 0.0, *, once: bool = False, stamped: int = 0
    ) -> None:
        self._port, self._request, self._streams = port, request, streams
        self._seconds, self._once, self._stamped = seconds, once, stamped
        self._until = 0.0
        self._open = 0
        self._over = asyncio.Event()
        self.taken = Taken()

    async def run(self) -> Taken:
        """Run it to its end; failed connections stop."""
        numbers = range(self._streams)
        stamps = [bool(self._stamped) and number % self._stamped == 0 for number in numbers]
        connections = [await connect(self._port, self.taken, stamps=each) for each in stamps]
        self._open = len(connections)
        self._until = time.perf_counter() + self._seconds
        for connection in connections:
            connection.on_end = self._next(connection)
            connection.send(self._request)
        try:
            async with asyncio.timeout(self._seconds + PATIENCE):
                await self._over.wait()
        except TimeoutError:
            self.taken.failed += self._open
        for connection in connections:
            connection.close()
        return self.taken

    def _next(self, connection: Connection) -> Callable[[bool], None]:
        def on_end(well: bool) -> None:
            if well and not self._once and time.perf_counter() < self._until:
                connection.send(self._request)
                return
            self._open -= 1
            if not self._open:
                self._over.set()

        return on_end
