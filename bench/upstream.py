"""The upstream, a process of its own: it answers at once what a request's token asks for.

    bench-json       1 KB of JSON
    bench-sse-N      N events, each a write of its own, as fast as they go
    bench-paced-N    N events, one every 10 ms, each with the time at which it was written
    bench-bytes-N    N bytes
    bench-hold       1 KB of JSON, once `GET /release` has been asked for

What a llama-swap is asked for by a proxy that knows it is answered too: its health, what runs, its events.

`python -m bench.upstream` prints its port. Events are stamped with the monotonic clock, which all processes of a
machine share.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import ClassVar, cast

import uvloop

from bench.http import TOKEN, Message, chunk

PACE = 0.010
"""Seconds between two events of a paced stream: a fast model's token rate."""

_WANTED = re.compile(TOKEN + rb"(json|sse|paced|bytes|hold)(?:-(\d+))?")
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def plain(body: bytes, kind: bytes = b"application/json") -> bytes:
    """A whole answer."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body)


def completion() -> bytes:
    """A chat completion of 1 KB."""
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "chat",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * 780}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    return json.dumps(value).encode()


def event(stamp: int = 0) -> bytes:
    """One chat event of about 200 bytes, stamped with nanoseconds."""
    return b'data: {"t":%d,"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"chat",' % stamp + (
        b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
    )


JSON = plain(completion())
EVENT = chunk(event())


class Upstream(asyncio.Protocol):
    """One connection."""

    held: ClassVar[list[Upstream]] = []
    released: ClassVar[bool] = False
    streams: ClassVar[int] = 0

    def __init__(self) -> None:
        self._message = Message()
        self._wanted: re.Match[bytes] | None = None
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._writable = asyncio.Event()
        self._writable.set()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone: whatever was to be written is not."""
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """The peer is behind."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Some of a request. What is wanted stands in its head, or in a piece of a small body."""
        if self._wanted is None:
            self._wanted = _WANTED.search(data)
        message = self._message
        if message.feed(data):
            wanted, self._wanted, self._message = self._wanted, None, Message()
            self._answer(message.head, wanted)

    def _answer(self, head: bytes, wanted: re.Match[bytes] | None) -> None:
        if wanted is None:
            self._transport.write(_llama_swap(head))
            return
        kind, number = wanted[1], int(wanted[2] or 0)
        if kind == b"json":
            self._transport.write(JSON)
        elif kind == b"bytes":
            self._transport.write(_bytes(number))
        elif kind == b"hold":
            Upstream.held.append(self)
        else:
            write = self._flat_out if kind == b"sse" else self._paced
            self._task = asyncio.get_running_loop().create_task(write(number))

    async def _flat_out(self, count: int) -> None:
        self._transport.write(SSE)
        for _ in range(count):
            self._transport.write(EVENT)
            await asyncio.sleep(0)  # one event a turn of the loop, so that streams advance side by side
            if not self._writable.is_set():
                await self._writable.wait()
        self._transport.write(END)

    async def _paced(self, count: int) -> None:
        # Streams that begin together are spread over the pace, as those of different clients would be.
        Upstream.streams += 1
        self._transport.write(SSE)
        begin = time.monotonic() + PACE * (Upstream.streams % 10) / 10
        for number in range(count):
            await asyncio.sleep(begin + number * PACE - time.monotonic())
            self._transport.write(chunk(event(time.monotonic_ns())))
        self._transport.write(END)

    def let_go(self) -> None:
        """End `bench-hold`."""
        self._transport.write(JSON)


def _bytes(number: int, _kept: dict[int, bytes] = {}) -> bytes:  # noqa: B006 - a cache
    if number not in _kept:
        _kept[number] = plain(b"x" * number, b"application/octet-stream")
    return _kept[number]


def _llama_swap(head: bytes) -> bytes:
    target = head.split(b" ", 2)[1]
    if target == b"/release":
        held, Upstream.held = Upstream.held, []
        for each in held:
            each.let_go()
    if target == b"/running":
        return plain(b'{"running":[{"model":"chat","state":"ready"}]}')
    if target == b"/api/events":
        return SSE
    return plain(b"{}")


async def serve(started: Callable[[int], None]) -> None:
    """Serve until cancelled, on a free port, of which `started` is told."""
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0, backlog=4096)
    started(server.sockets[0].getsockname()[1])
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(lambda port: print(port, flush=True)))
