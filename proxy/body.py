"""The request body: read whole before the queue, kept cheaply while it waits.

It must be read whole, since uvicorn reports a departed client only once the body has been read, and a dead request
would be granted the GPU. Up to `MEMORY_LIMIT` it stays in memory, above that it goes to a file, and what all waiting
bodies take together is bounded. The model name is read on the way, so no second pass is made.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx
from starlette.types import Message, Receive

from proxy.errors import BodyTimeout, BodyTooLarge, ClientGone, SpoolFull
from proxy.model_name import NameReader

MEMORY_LIMIT = 1024 * 1024
"""Bytes of one body that are kept in memory: above nearly every text request, below a picture or a recording."""

SHOWN_AT_ONCE = 32 * 1024
"""Bytes that are searched for the name in one turn of the loop: of the densest JSON, 10 ms of them."""

READ_CHUNK = 256 * 1024
"""Bytes read back from the file at once: large enough that the thread hop costs nothing beside the copy."""


class Spool:
    """What the bodies of all requests may take together, in memory and on disk."""

    def __init__(self, limit: int, directory: Path | None) -> None:
        self.limit = limit
        self.directory = directory
        self.used = 0
        self.retry_after: Callable[[], float] = lambda: 1.0
        """Seconds after which there may be room."""

    def take(self, size: int) -> None:
        """Count `size` more bytes; raises SpoolFull."""
        if self.used + size > self.limit:
            raise SpoolFull(retry_after=self.retry_after())
        self.used += size


class Body(httpx.AsyncByteStream):
    """One request body. Use as a context manager: its memory, file and share of the spool end with the block."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._memory: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._in_memory = 0
        self._closed = False
        self._hash = hashlib.sha256()
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._closed = True
        self._spool.used -= self.size
        self.size = 0
        self._memory.clear()
        if self._file is not None:
            self._file.close()

    async def read(
        self, receive: Receive, limit: int, reader: NameReader | None = None, *, timeout: float | None = None
    ) -> None:
        """Read all of it, at most `limit` bytes, showing each piece to `reader`.

        Raises BodyTooLarge, SpoolFull (also when the disk is), BodyTimeout when nothing comes for `timeout` seconds, or
        ClientGone when the client leaves before the end.
        """
        more = True
        while more:
            message = await receive_within(receive, timeout)
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            if chunk:
                await self._add(chunk, limit)
                if reader is not None:
                    await _show(reader, chunk)

    async def _add(self, chunk: bytes, limit: int) -> None:
        if self.size + len(chunk) > limit:
            raise BodyTooLarge
        self._spool.take(len(chunk))
        self.size += len(chunk)
        self._hash.update(chunk)
        self._memory.append(chunk)
        self._in_memory += len(chunk)
        if self._in_memory > MEMORY_LIMIT:
            await self._spill()

    async def _spill(self) -> None:
        try:
            await asyncio.to_thread(self._write_out)
        except OSError as error:
            message = f"A large request body cannot be stored (setting spool_dir): {error.strerror}."
            raise SpoolFull(message, retry_after=self._spool.retry_after()) from error

    def _write_out(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._spool.directory, prefix="gpu-lease-")  # noqa: SIM115
        self._file.writelines(self._memory)
        self._file.flush()
        self._memory.clear()
        self._in_memory = 0
        if self._closed:  # the task was cancelled and has left the block while this thread was writing
            self._file.close()

    @property
    def digest(self) -> bytes:
        """The SHA-256 of what has been read."""
        return self._hash.digest()

    async def json(self) -> Any:
        """The body as JSON, None where it is none."""
        data = b"".join([piece async for piece in self.stream()])
        try:
            return json.loads(data)
        except ValueError:
            return None

    def stream(self) -> httpx.AsyncByteStream:
        """The body as an httpx stream, from its start; may be called again for a second try."""
        if self._file is not None:
            return self
        whole = b"".join(self._memory)
        self._memory[:] = [whole]
        return httpx.ByteStream(whole)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._file is not None:
            await asyncio.to_thread(self._file.seek, 0)
            while chunk := await asyncio.to_thread(self._file.read, READ_CHUNK):
                yield chunk
        for chunk in self._memory:
            yield chunk


async def _show(reader: NameReader, chunk: bytes) -> None:
    """Show `chunk` to `reader`, and let others run meanwhile: the server may have gathered a good deal."""
    reader.feed(chunk[:SHOWN_AT_ONCE])
    for at in range(SHOWN_AT_ONCE, len(chunk), SHOWN_AT_ONCE):
        await asyncio.sleep(0)
        reader.feed(chunk[at : at + SHOWN_AT_ONCE])


async def receive_within(receive: Receive, timeout: float | None) -> Message:
    """The next message from the client; raises BodyTimeout when it does not come within that many seconds."""
    try:
        async with asyncio.timeout(timeout):
            return await receive()
    except TimeoutError:
        raise BodyTimeout from None


class Passing(httpx.AsyncByteStream):
    """The body of a request that takes no lease: handed on piece by piece, while the client sends it."""

    def __init__(self, receive: Receive, timeout: float | None = None) -> None:
        self._receive, self._timeout = receive, timeout
        self.read = asyncio.Event()
        """Set once the client has sent everything."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The pieces; raises ClientGone when the client leaves before the end, and BodyTimeout when it stands still."""
        more = True
        while more:
            message = await receive_within(self._receive, self._timeout)
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            if not more:
                self.read.set()
            yield message.get("body", b"")
