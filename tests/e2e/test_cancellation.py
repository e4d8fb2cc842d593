"""Every place where a request can stand when its client leaves or the server ends, and what the lock looks like after.

The rows are the awaits of `gateway.py`, `lease.py` and `forward.py` in which a lease is held or waited for; the
columns are an orderly close, a reset, and the end of the server, whose grace is too short for what is under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness import CHAT, EMBED, TTS, InProcess, RawClient, Seen, Upstream, answer, hang, head, slow

GRACE = 0.05
LARGE = {**CHAT, "x": "x" * 12_000_000}
"""More than the buffers of two sockets take together, so that sending it comes to a halt."""


@dataclass
class Scene:
    """A proxy, an upstream, and the client that will leave."""

    proxy: InProcess
    upstream: Upstream
    client: RawClient
    stack: contextlib.AsyncExitStack
    end: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end the upstream's work, at places that say so."""

    @property
    def held(self) -> int:
        return len(self.proxy.app.leases.lock.held)

    @property
    def waiting(self) -> int:
        return self.proxy.app.leases.lock.waiting_count

    async def other(self) -> RawClient:
        """One more client."""
        return await self.stack.enter_async_context(RawClient(self.proxy.port))

    async def state(self, held: int, waiting: int = 0) -> None:
        """Return once that many requests hold and wait."""
        await self.proxy.until(lambda: (self.held, self.waiting) == (held, waiting))


async def reading_its_body(scene: Scene) -> None:
    """No lease yet, but a place in the spool."""
    scene.client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
    scene.client.send(b"x" * 50_000)
    await scene.proxy.until(lambda: scene.proxy.app._entrance.spool.used == 50_000)


async def waiting_for_its_turn(scene: Scene) -> None:
    """Behind a writer."""
    scene.upstream.script = hang()
    (await scene.other()).tts()
    await scene.state(held=1)
    scene.client.chat()
    await scene.state(held=1, waiting=1)


async def waiting_for_a_slot(scene: Scene) -> None:
    """Mode none, which never enters the lock."""
    scene.upstream.script = hang()
    for count in range(10):
        (await scene.other()).post("/v1/embeddings", EMBED)
        await scene.state(held=count + 1)
    scene.client.post("/v1/embeddings", EMBED)
    await scene.state(held=10, waiting=1)


async def connecting(scene: Scene) -> None:
    """To a listener whose queue is full: no answer to the handshake of TCP."""
    await scene.upstream.stop()
    scene.stack.push_async_callback(scene.upstream.restart)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deaf.bind(("127.0.0.1", scene.upstream.port))
    deaf.listen(0)
    scene.stack.callback(deaf.close)
    for _ in range(3):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(deaf.getsockname())
        scene.stack.callback(filler.close)
    scene.client.chat()
    await scene.state(held=1)
    await asyncio.sleep(0.02)  # nothing tells that a connection is not being made


async def retrying(scene: Scene) -> None:
    """llama-swap refuses connections."""
    await scene.upstream.stop()
    scene.client.chat()
    await scene.state(held=1)
    scene.stack.push_async_callback(scene.upstream.restart)


async def sending_its_body(scene: Scene) -> None:
    """A large one, from its file, to an upstream that does not read."""
    scene.upstream.reads_bodies.clear()
    scene.client.post("/v1/chat/completions", LARGE)
    await scene.state(held=1)
    await scene.upstream.wait_for_head(b"/v1/chat/completions")
    scene.stack.callback(scene.upstream.reads_bodies.set)


async def waiting_for_the_head(scene: Scene) -> None:
    """Prompt processing."""
    scene.upstream.script = hang()
    scene.client.tts()
    await scene.upstream.wait_for(bool)


async def streaming(scene: Scene) -> None:
    """Some events have come, the next has not."""
    scene.upstream.script = slow(100)
    scene.client.chat()
    await scene.client.until(b"data: ")


async def sending_to_a_full_socket(scene: Scene) -> None:
    """The client has stopped reading, and all buffers up to the upstream are full."""

    async def flood(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("200 OK", "Content-Type: audio/wav", "Content-Length: 50000000"))
        writer.write(b"x" * 50_000_000)
        await writer.drain()

    scene.upstream.script = flood
    scene.client.tts()
    await scene.upstream.wait_for(bool)
    scene.client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    flows = [getattr(connection, "flow", None) for connection in scene.proxy.server.server_state.connections]
    await scene.proxy.until(lambda: any(flow is not None and flow.write_paused for flow in flows))


async def shutting_down(scene: Scene) -> None:
    """The stream runs on in the time of grace."""
    await streaming(scene)
    scene.proxy.signal()
    assert scene.proxy.app.leases.draining


PLACES: list[Callable[[Scene], Awaitable[None]]] = [
    reading_its_body,
    waiting_for_its_turn,
    waiting_for_a_slot,
    connecting,
    retrying,
    sending_its_body,
    waiting_for_the_head,
    streaming,
    sending_to_a_full_socket,
    shutting_down,
]

every_place = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


@contextlib.asynccontextmanager
async def scene_at(place: Callable[[Scene], Awaitable[None]], **settings: Any) -> AsyncIterator[Scene]:
    """A client that stands at `place`. What the place needs is undone at the end."""
    async with (
        Upstream() as upstream,
        InProcess(upstream.url, **settings) as proxy,
        RawClient(proxy.port) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        scene = Scene(proxy, upstream, client, stack)
        await place(scene)
        yield scene


@every_place
@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset], ids=["FIN", "RST"])
async def test_a_client_that_leaves_holds_nothing(
    place: Callable[[Scene], Awaitable[None]], leave: Callable[[RawClient], None]
) -> None:
    async with scene_at(place) as scene:
        before = scene.held, scene.waiting
        leave(scene.client)
        if place in {waiting_for_its_turn, waiting_for_a_slot}:
            await scene.state(held=before[0])
        await scene.stack.aclose()
        await scene.proxy.idle()
        await scene.upstream.quiet(within=2)
        if place is shutting_down:
            await scene.proxy.ended()
            return
        await both_classes_work(scene)


async def both_classes_work(scene: Scene) -> None:
    scene.upstream.script = answer()
    for path, body in (("/v1/audio/speech", TTS), ("/v1/chat/completions", CHAT)):
        assert (await scene.proxy.client.post(path, json=body, timeout=2)).status_code == 200
    await scene.proxy.idle()


@every_place
async def test_the_end_of_the_server_holds_nothing(place: Callable[[Scene], Awaitable[None]]) -> None:
    async with scene_at(place, shutdown_grace=GRACE) as scene:
        if place is not shutting_down:
            scene.proxy.signal()
        await scene.proxy.ended()
        await scene.proxy.idle()
        await scene.upstream.quiet(within=2)
        assert not scene.proxy.server.server_state.tasks


@every_place
async def test_a_second_signal_cuts_and_holds_nothing(place: Callable[[Scene], Awaitable[None]]) -> None:
    async with scene_at(place) as scene:
        if place is not shutting_down:
            scene.proxy.signal()
        scene.proxy.signal()
        await scene.proxy.cut()
        await scene.proxy.idle()
        await scene.upstream.quiet(within=2)
