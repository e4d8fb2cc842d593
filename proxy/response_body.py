"""A response body, read ahead of its consumer: the upstream's work must not last as long as a slow client reads.

What has come and was not taken is kept here, and reading from the upstream goes on while there is room. Room has two
bounds, one for each body and one for all of them together. Where the second is reached, bodies that hold anything are
read no further until it has been taken; one that holds nothing may always be read, so every body goes on as fast as
its own consumer, and none waits for another's. When room comes back, all that were held back read on.

A body that is held back has the upstream waiting, and with it whoever wants the GPU next. So its consumer has limited
patience: it is told to have *stalled* when it has taken nothing for that long.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import httpx

PIECE = 64 * 1024
"""Bytes that are taken at once. A server accepts any piece whole, and asks for the next when that has gone out: with
larger ones it would be a second buffer, and a slow client would seem to take nothing for long."""


class Source(Protocol):
    """Where a body comes from."""

    def pause_reading(self) -> None:
        """Read no further for now."""
        ...

    def resume_reading(self) -> None:
        """Read on."""
        ...

    def abort(self) -> None:
        """Give the exchange up."""
        ...


class ReadAhead:
    """The bounds: bytes of `each` body, bytes of all `together`, and seconds of `patience` with a full one."""

    def __init__(self, each: int = 16 * 1024 * 1024, together: int = 256 * 1024 * 1024, patience: float = 60.0) -> None:
        self.each, self.together, self.patience = each, together, patience
        self.used = 0
        """Bytes that all bodies hold now."""
        self.held_back: dict[ResponseBody, None] = {}
        """The bodies whose upstream is not read now."""

    def lacks_room(self, size: int) -> bool:
        """Whether a body that holds `size` bytes must not be read further."""
        return size > self.each or (size > 0 and self.used > self.together)

    def count(self, change: int) -> None:
        """A body has grown or shrunk."""
        before = self.used
        self.used += change
        if before > self.together >= self.used:
            for body in list(self.held_back):
                body.flow()


class ResponseBody(httpx.AsyncByteStream):
    """The raw bytes of a response body. The bounds are kept but for what one read of the socket gives."""

    def __init__(self, connection: Source, ahead: ReadAhead) -> None:
        self._connection, self._ahead = connection, ahead
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._error: Exception | None = None
        self._ended = False
        self._on_end: Callable[[Exception | None], None] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.on_stall: Callable[[], None] = lambda: None
        """Called when the body was held back and its consumer took nothing for `ReadAhead.patience`."""

    @property
    def ended(self) -> bool:
        """Whether the upstream is done with this body, whatever of it is still unread."""
        return self._ended

    @property
    def exhausted(self) -> bool:
        """Whether the body has ended well and all of it has been read."""
        return self._ended and self._error is None and not self._chunks

    # -- from the upstream

    def on_end(self, callback: Callable[[Exception | None], None]) -> None:
        """Call back once, synchronously, when the upstream body has ended: with None, or with what broke it."""
        if self._ended:
            callback(self._error)
        else:
            self._on_end = callback

    def push(self, data: bytes) -> None:
        """Bytes from the socket."""
        if len(data) <= PIECE:
            self._chunks.append(data)
        else:
            self._chunks.extend(data[start : start + PIECE] for start in range(0, len(data), PIECE))
        self._count(len(data))
        self._notify()

    def end(self, error: Exception | None = None) -> None:
        """The upstream has finished, or failed with `error`."""
        if self._ended:
            return
        self._ended, self._error = True, error
        self._let_go()
        self._notify()
        if self._on_end is not None:
            self._on_end(error)

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # -- flow control

    def flow(self) -> None:
        """Read on where there is room, and no further where there is none."""
        if self._ended:
            return
        if self._ahead.lacks_room(self._size):
            if self not in self._ahead.held_back:
                self._ahead.held_back[self] = None
                self._connection.pause_reading()
                self._start_timer()
        elif self in self._ahead.held_back:
            self._let_go()
            self._connection.resume_reading()

    def _count(self, change: int) -> None:
        self._size += change
        self._ahead.count(change)
        self.flow()

    def _let_go(self) -> None:
        self._ahead.held_back.pop(self, None)
        self._stop_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._ahead.patience, self._stalled)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stalled(self) -> None:
        self._timer = None
        self.on_stall()

    # -- to the consumer

    def __aiter__(self) -> AsyncIterator[bytes]:
        """What has arrived, as soon as it has; raises `httpx.ReadError` where the upstream broke off."""
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        data = self._take()
        self._count(-len(data))
        if self._timer is not None:
            self._start_timer()
        return data

    def _take(self) -> bytes:
        chunks = self._chunks
        pieces = [chunks.popleft()]
        size = len(pieces[0])
        while chunks and size + len(chunks[0]) <= PIECE:
            size += len(chunks[0])
            pieces.append(chunks.popleft())
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def discard(self) -> None:
        """Read to the end, whatever that is, for nobody."""
        with contextlib.suppress(httpx.HTTPError):
            async for _ in self:
                pass

    def close(self) -> None:
        """Keep nothing and read nothing more; closes the connection unless the body has ended."""
        if not self._ended:
            self._connection.abort()
        self._chunks.clear()
        self._count(-self._size)

    async def aclose(self) -> None:
        """`close`, for httpx."""
        self.close()
