"""The request body: what it takes, what it may take, and that everything is given back on every way out."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import random
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from proxy.body import MEMORY_LIMIT, READ_CHUNK, Body, Passing, Spool
from proxy.errors import BodyTooLarge, ClientGone, SpoolFull

MEGABYTE = 1024 * 1024
GONE: Message = {"type": "http.disconnect"}


class Sender:
    """The client's side of `receive`; counts how often it was asked."""

    def __init__(self, *messages: Message) -> None:
        self._messages = iter(messages)
        self.asked = 0

    async def __call__(self) -> Message:
        self.asked += 1
        return next(self._messages)


def sending(*pieces: bytes, end: Message | None = None) -> Sender:
    """A client that sends `pieces`, and then all of it has come, or `end`."""
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    return Sender(*messages, end or {"type": "http.request", "body": b"", "more_body": False})


def in_pieces(data: bytes, size: int = 65536) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


class Reader:
    """Stands in for the reader of the name."""

    def __init__(self) -> None:
        self.read = b""

    def feed(self, chunk: bytes) -> None:
        self.read += chunk


async def all_of(stream: httpx.AsyncByteStream) -> bytes:
    return b"".join([piece async for piece in stream])


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    """A spool of 10 MB, of which nothing may be left, on disk or in the count."""
    before = open_in(tmp_path)
    spool = Spool(10 * MEGABYTE, tmp_path)
    yield spool
    assert spool.used == 0
    assert open_in(tmp_path) == before
    assert not list(tmp_path.iterdir())


def open_in(directory: Path) -> int:
    """How many files in `directory` are open; they need not have a name."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{number}").startswith(str(directory))
    return count


@pytest.mark.parametrize("size", [0, 1, 65536, MEMORY_LIMIT, MEMORY_LIMIT + 1, 3 * MEGABYTE, 9 * MEGABYTE + 7])
async def test_a_body_is_given_as_it_came_as_often_as_it_is_asked_for(size: int, spool: Spool) -> None:
    data = random.Random(size).randbytes(size)
    reader = Reader()
    with Body(spool) as body:
        await body.read(sending(*in_pieces(data)), 10 * MEGABYTE, reader)  # type: ignore[arg-type]
        assert body.size == spool.used == size
        assert reader.read == data
        for _ in range(2):
            assert await all_of(body.stream()) == data
        assert isinstance(body.stream(), httpx.ByteStream) is (size <= MEMORY_LIMIT)


async def test_a_large_body_is_on_disk_and_not_in_memory(spool: Spool, tmp_path: Path) -> None:
    with Body(spool) as body:
        await body.read(sending(*in_pieces(bytes(9 * MEGABYTE))), 10 * MEGABYTE)
        assert open_in(tmp_path) == 1
        assert sum(map(len, body._memory)) <= MEMORY_LIMIT
        largest = 0
        async for piece in body.stream():
            largest = max(largest, len(piece))
        assert largest <= READ_CHUNK


async def test_a_small_body_is_not_written(spool: Spool, tmp_path: Path) -> None:
    with Body(spool) as body:
        await body.read(sending(*in_pieces(bytes(MEMORY_LIMIT))), 10 * MEGABYTE)
        assert open_in(tmp_path) == 0


@pytest.mark.parametrize("size", [0, 1000, MEMORY_LIMIT + 1000])
async def test_the_digest_is_that_of_the_bytes_however_they_came(size: int, spool: Spool) -> None:
    data = random.Random(size).randbytes(size)
    for pieces in ([data], in_pieces(data, 700)):
        with Body(spool) as body:
            await body.read(sending(*pieces), 10 * MEGABYTE)
            assert body.digest == hashlib.sha256(data).digest()


@pytest.mark.parametrize("limit", [0, 10, 2 * MEGABYTE])
async def test_a_body_above_its_limit_is_refused_and_read_no_further(limit: int, spool: Spool) -> None:
    client = sending(*in_pieces(bytes(limit)), b"x", b"y", b"z")
    with pytest.raises(BodyTooLarge), Body(spool) as body:
        await body.read(client, limit)
    assert client.asked == len(in_pieces(bytes(limit))) + 1


async def test_all_bodies_together_are_bounded_and_what_one_gives_back_another_may_take(spool: Spool) -> None:
    with Body(spool) as first:
        await first.read(sending(*in_pieces(bytes(6 * MEGABYTE))), 10 * MEGABYTE)
        with pytest.raises(SpoolFull), Body(spool) as second:
            await second.read(sending(*in_pieces(bytes(6 * MEGABYTE))), 10 * MEGABYTE)
        assert spool.used == 6 * MEGABYTE
        with Body(spool) as third:
            await third.read(sending(*in_pieces(bytes(4 * MEGABYTE))), 10 * MEGABYTE)
            assert spool.used == 10 * MEGABYTE
    with Body(spool) as fourth:
        await fourth.read(sending(*in_pieces(bytes(10 * MEGABYTE))), 10 * MEGABYTE)


@pytest.mark.parametrize("size", [0, 10, 3 * MEGABYTE])
async def test_a_client_that_leaves_in_the_middle(size: int, spool: Spool) -> None:
    with pytest.raises(ClientGone), Body(spool) as body:
        await body.read(sending(*in_pieces(bytes(size)), end=GONE), 10 * MEGABYTE)


async def test_an_error_of_the_reader(spool: Spool) -> None:
    class Failing:
        def feed(self, chunk: bytes) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Body(spool) as body:
        await body.read(sending(b"x"), 10, Failing())  # type: ignore[arg-type]


async def test_a_disk_that_is_full_is_a_full_spool(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("proxy.body.tempfile.TemporaryFile", full)
    with pytest.raises(SpoolFull, match="No space left on device"), Body(spool) as body:
        await body.read(sending(*in_pieces(bytes(2 * MEGABYTE))), 10 * MEGABYTE)


async def test_giving_up_while_the_file_is_made(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread goes on when its task is cancelled, and makes a file for a body that is no more."""
    making, go, made = threading.Event(), threading.Event(), list[Any]()
    genuine = Body._write_out

    def write_out(self: Body) -> None:
        making.set()
        go.wait(5)
        genuine(self)
        made.append(self._file)

    monkeypatch.setattr(Body, "_write_out", write_out)

    async def read() -> None:
        with Body(spool) as body:
            await body.read(sending(*in_pieces(bytes(2 * MEGABYTE))), 10 * MEGABYTE)

    reading = asyncio.create_task(read())
    await asyncio.to_thread(making.wait, 5)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert spool.used == 0
    go.set()
    async with asyncio.timeout(5):
        while not made:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert made[0].closed


async def test_giving_up_while_it_is_read_back(spool: Spool) -> None:
    async def send() -> None:
        with Body(spool) as body:
            await body.read(sending(*in_pieces(bytes(9 * MEGABYTE))), 10 * MEGABYTE)
            async for _ in body.stream():
                started.set()
                await asyncio.sleep(0)

    started = asyncio.Event()
    task = asyncio.create_task(send())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- bodies that are handed on while they come


async def test_a_passing_body_is_handed_on_piece_by_piece() -> None:
    given = asyncio.Queue[Message]()
    passing = Passing(given.get)
    pieces: AsyncIterator[bytes] = aiter(passing)
    for piece in (b"a", b"b"):
        given.put_nowait({"type": "http.request", "body": piece, "more_body": True})
        assert await anext(pieces) == piece
        assert not passing.read.is_set()
    given.put_nowait({"type": "http.request", "body": b"c"})
    assert await anext(pieces) == b"c"
    assert passing.read.is_set(), "from now on somebody else may ask whether the client has left"
    with pytest.raises(StopAsyncIteration):
        await anext(pieces)


async def test_a_passing_body_ends_when_its_client_leaves() -> None:
    passing = Passing(sending(b"a", end=GONE))
    with pytest.raises(ClientGone):
        await all_of(passing)
    assert not passing.read.is_set()
