"""Case 15: a client that reads slowly, or not at all, does not hold the GPU. See tests/cases.md.

The clients here have small socket buffers of their own and read only what a test tells them to, so that what is not
read stays at the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

import pytest
from test_cancellation import GRACE, Scene, both_classes_work, scene_at
from wire_support import EACH_PARSER

from harness import CHAT, SSE, TTS, InProcess, Proxy, RawClient, Script, Seen, Upstream, chunk, head, linger
from proxy.response_body import ReadAhead

MEGABYTE = 1024 * 1024
AUDIO = random.Random(15).randbytes(5_000_000)
FLOOD = 50_000_000
"""Bytes: more than all sockets and buffers between the upstream and a client take."""

READ = 256 * 1024
"""Bytes that one read of a socket may give beyond a bound."""

both_parsers = pytest.mark.parametrize("parser", EACH_PARSER)


class SlowClient:
    """A socket whose receiving side is small and read by hand."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.got = b""

    async def __aenter__(self) -> Self:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)
        await asyncio.get_running_loop().sock_connect(self._socket, ("127.0.0.1", self._port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    async def post(self, path: str, body: dict[str, Any]) -> None:
        """Send a request, the only one on this connection."""
        data = json.dumps(body).encode()
        fields = f"Host: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        request = f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + data
        await asyncio.get_running_loop().sock_sendall(self._socket, request)

    async def read(self, count: int) -> bytes:
        """Read at most so many bytes; none at the end."""
        data = await asyncio.get_running_loop().sock_recv(self._socket, count)
        self.got += data
        return data

    async def keep_reading(self, count: int, every: float) -> None:
        """Read so many bytes at a time, until the end."""
        while await self.read(count):  # noqa: ASYNC110
            await asyncio.sleep(every)

    async def rest(self, within: float = 20.0) -> bytes:
        """The body to its end, however that comes, read as fast as can be."""
        pieces = [self.got]
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MEGABYTE)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(within):
                while data := await loop.sock_recv(self._socket, MEGABYTE):
                    pieces.append(data)
        return b"".join(pieces).partition(b"\r\n\r\n")[2]

    def stop_sending(self) -> None:
        """Close this half of the connection."""
        self._socket.shutdown(socket.SHUT_WR)

    def leave(self, *, reset: bool) -> None:
        """Close the connection."""
        if reset:
            linger_of(self._socket)
        self._socket.close()


def linger_of(sock: socket.socket) -> None:
    class Writer:
        def get_extra_info(self, name: str) -> socket.socket:
            return sock

    linger(Writer())  # type: ignore[arg-type]


def produced(data: bytes, seconds: float = 0.2, *, pieces: int = 20, close: bool = True) -> Script:
    """An answer of these bytes, made in so many seconds where nobody holds it up."""

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("200 OK", "Content-Type: audio/wav", f"Content-Length: {len(data)}", "Connection: close"))
        size = -(-len(data) // pieces)
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
            await asyncio.sleep(seconds / pieces)
        raise ConnectionResetError  # a close behind the last byte

    return script


def stream_of(events: int, size: int) -> tuple[bytes, Script]:
    """A whole chat stream as it is on the wire after its head, and its script."""
    wire = b"".join(chunk(b'data: {"x":"%b"}\n\n' % (b"x" * size)) for _ in range(events))
    wire += chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + wire)
        await writer.drain()

    return wire, script


def text_of(wire: bytes) -> bytes:
    """A chunked body without its framing."""
    pieces, at = [b""], 0
    while at < len(wire):
        start = wire.index(b"\r\n", at) + 2
        at = start + int(wire[at:start], 16) + 2
        pieces.append(wire[start : at - 2])
    return b"".join(pieces)


# --- the lease ends with the upstream's work


@both_parsers
async def test_case_15_audio_that_is_read_at_a_kibibyte_a_second_does_not_keep_a_chat_waiting(parser: str) -> None:
    async with (
        Upstream() as upstream,
        Proxy(upstream.url, http_parser=parser) as proxy,
        SlowClient(proxy.port) as slow,
    ):
        upstream.by_model = {"tts-a": produced(AUDIO)}
        await slow.post("/v1/audio/speech", TTS)
        await upstream.wait_for(bool)
        reading = asyncio.create_task(slow.keep_reading(1024, 1.0))
        try:
            async with asyncio.timeout(5):
                chat = await proxy.client.post("/v1/chat/completions", json=CHAT)
            assert chat.status_code == 200
            assert float(chat.headers["x-lease-wait"]) > 0, "it came while the speech held the GPU"
            assert len(slow.got) < 50_000
        finally:
            reading.cancel()
        assert await slow.rest() == AUDIO
        await proxy.drained(upstream)


@both_parsers
async def test_case_15_a_client_that_reads_its_chat_only_as_it_speaks_can_speak(parser: str) -> None:
    """A voice pipeline: its chat stream is not read until the speech for the first sentence is there."""
    async with (
        Upstream() as upstream,
        Proxy(upstream.url, http_parser=parser) as proxy,
        SlowClient(proxy.port) as pipeline,
    ):
        wire, script = stream_of(3000, 1000)
        upstream.by_model = {"chat-a": script}
        await pipeline.post("/v1/chat/completions", CHAT)
        await upstream.wait_for(bool)
        async with asyncio.timeout(5):
            speech = await proxy.client.post("/v1/audio/speech", json=TTS)
        assert speech.status_code == 200
        assert not pipeline.got
        assert text_of(await pipeline.rest()) == text_of(wire)
        await proxy.drained(upstream)


@contextlib.asynccontextmanager
async def inside(parser: str, **settings: Any) -> AsyncIterator[tuple[Upstream, InProcess, ReadAhead]]:
    """An upstream, a proxy in this process, and what it reads ahead."""
    async with Upstream() as upstream, InProcess(upstream.url, http_parser=parser, **settings) as proxy:
        yield upstream, proxy, proxy.app._transport.ahead


@both_parsers
async def test_case_15_all_answers_together_are_bounded_and_each_reaches_its_client_whole(parser: str) -> None:
    settings = {"max_response_buffers": MEGABYTE, "max_queue_per_client": 100}
    async with inside(parser, **settings) as (upstream, proxy, ahead), contextlib.AsyncExitStack() as stack:
        wire, upstream.script = stream_of(8000, 1000)
        slow = [await stack.enter_async_context(SlowClient(proxy.port)) for _ in range(6)]
        for client in slow:
            await client.post("/v1/chat/completions", CHAT)
        await proxy.until(lambda: len(ahead.held_back) == 6, within=10)
        assert ahead.used <= MEGABYTE + 6 * READ
        assert len(proxy.app.leases.lock.held) == 6
        one, *others = slow
        assert text_of(await one.rest()) == text_of(wire), "it goes on though the others keep all room"
        assert ahead.used <= MEGABYTE + 6 * READ
        assert [text_of(await client.rest()) for client in others] == [text_of(wire)] * 5
        await proxy.idle()
        assert (ahead.used, len(ahead.held_back)) == (0, 0)


# --- the end of patience


def flood(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Awaitable[None]:
    return produced(bytes(FLOOD), 0, pieces=200)(seen, reader, writer)


SMALL: dict[str, Any] = {"response_buffer": 100_000}


@both_parsers
@pytest.mark.parametrize("half_closed", [False, True])
async def test_case_15_a_client_that_reads_nothing_is_cut_and_the_gpu_is_free(parser: str, half_closed: bool) -> None:
    """A server whose own buffer is full does not tell of a client that has stopped sending and reading."""
    async with (
        Upstream() as upstream,
        Proxy(upstream.url, http_parser=parser, stall_timeout=0.5, **SMALL) as proxy,
        SlowClient(proxy.port) as client,
    ):
        upstream.by_model = {"tts-a": flood}
        await client.post("/v1/audio/speech", TTS)
        await upstream.wait_for(bool)
        if half_closed:
            await asyncio.sleep(0.2)
            client.stop_sending()
        chat = await proxy.client.post("/v1/chat/completions", json=CHAT, timeout=10)
        assert chat.status_code == 200
        stalled = await proxy.logged("client_stalled")
        assert (stalled["cls"], stalled["model"], stalled["path"]) == ("tts", "tts-a", "/v1/audio/speech")
        await asyncio.wait_for(upstream.seen[0].closed.wait(), 5)
        assert await proxy.metric('gpu_lease_exchanges_total{class="tts",outcome="cancelled"}') == 1
        assert 0 < len(await client.rest()) < FLOOD
        await proxy.drained(upstream)
        assert not [line for line in proxy.lines if "Traceback" in line or '"exception"' in line]


@both_parsers
async def test_a_client_that_reads_slowly_from_a_full_buffer_is_not_cut(parser: str) -> None:
    async with (
        Upstream() as upstream,
        Proxy(upstream.url, http_parser=parser, stall_timeout=1.5, **SMALL) as proxy,
        SlowClient(proxy.port) as client,
    ):
        upstream.by_model = {"tts-a": produced(AUDIO * 3, 0)}
        await client.post("/v1/audio/speech", TTS)
        loop = asyncio.get_running_loop()
        end = loop.time() + 4
        while loop.time() < end:
            for _ in range(16):
                await client.read(32 * 1024)
            await asyncio.sleep(0.1)
        assert (await proxy.queue())["holders"], "its answer is far from being read"
        assert await client.rest() == AUDIO * 3
        assert not [entry for entry in proxy.log if entry.get("event") == "client_stalled"]
        await proxy.drained(upstream)


async def test_a_stalled_client_without_a_lease_is_cut_too() -> None:
    async with (
        Upstream(flood) as upstream,
        Proxy(upstream.url, stall_timeout=0.3, **SMALL) as proxy,
        SlowClient(proxy.port) as client,
    ):
        await client.post("/unload", {})
        assert (await proxy.logged("client_stalled"))["path"] == "/unload"
        await asyncio.wait_for(upstream.seen[0].closed.wait(), 5)
        assert len(await client.rest()) < FLOOD
        await proxy.drained(upstream)


# --- every way out of a full buffer


async def held_up(scene: Scene) -> None:
    """The upstream waits for a client that does not read."""
    scene.upstream.script = flood
    scene.client.tts()
    scene.client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await scene.proxy.until(lambda: bool(scene.proxy.app._transport.ahead.held_back))
    assert scene.held == 1


async def after_the_upstreams_end(scene: Scene) -> None:
    """All of the answer is here, and the client does not read it."""
    scene.upstream.script = produced(bytes(12_000_000), 0)
    scene.client.tts()
    scene.client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await scene.upstream.wait_for(bool)
    await scene.upstream.quiet(within=5)
    await scene.state(held=0)
    await scene.proxy.until(lambda: scene.proxy.app._transport.ahead.used > 0)


Place = Callable[[Scene], Awaitable[None]]
every_place = pytest.mark.parametrize("place", [held_up, after_the_upstreams_end], ids=lambda place: place.__name__)


async def nothing_is_left(scene: Scene) -> None:
    ahead = scene.proxy.app._transport.ahead
    await scene.proxy.idle()
    await scene.upstream.quiet(within=2)
    await scene.proxy.until(lambda: not ahead.used)
    assert not ahead.held_back


@every_place
@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset], ids=["FIN", "RST"])
async def test_a_client_that_leaves_a_full_buffer_holds_nothing(
    place: Place, leave: Callable[[RawClient], None]
) -> None:
    async with scene_at(place) as scene:
        leave(scene.client)
        await nothing_is_left(scene)
        await both_classes_work(scene)


@every_place
@pytest.mark.parametrize("signals", [1, 2])
async def test_the_end_of_the_server_leaves_no_buffer(place: Place, signals: int) -> None:
    async with scene_at(place, shutdown_grace=GRACE) as scene:
        for _ in range(signals):
            scene.proxy.signal()
        await (scene.proxy.ended() if signals == 1 else scene.proxy.cut())
        await nothing_is_left(scene)


async def test_a_stalled_client_that_leaves_in_that_tick_holds_nothing() -> None:
    for ticks in range(4):
        async with scene_at(held_up) as scene:
            (body,) = scene.proxy.app._transport.ahead.held_back
            body._stalled()
            for _ in range(ticks):
                await asyncio.sleep(0)
            for task in list(scene.proxy.server.server_state.tasks):
                task.cancel()
            await nothing_is_left(scene)
            await both_classes_work(scene)
