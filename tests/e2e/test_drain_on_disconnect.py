"""Case 16: with `on_disconnect: drain` the work of a client that has left is read to its end. See tests/cases.md."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from test_cancellation import (
    GRACE,
    Scene,
    both_classes_work,
    scene_at,
    waiting_for_a_slot,
    waiting_for_its_turn,
)
from test_slow_readers import SMALL, SlowClient, flood, nothing_is_left
from wire_support import EACH_PARSER

from harness import CHAT, TTS, InProcess, Proxy, RawClient, Script, Seen, Upstream, after, begun, head, raw
from simulator_support import Simulator

CLASSES = {name: {"on_disconnect": "drain"} for name in ("llm", "tts", "embed")}
both_parsers = pytest.mark.parametrize("parser", EACH_PARSER)
both_ways = pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset], ids=["FIN", "RST"])


@both_parsers
@both_ways
async def test_case_16_a_chat_waits_for_speech_that_goes_on_without_its_client(
    parser: str, leave: Callable[[RawClient], None]
) -> None:
    done = asyncio.Event()
    settings: dict[str, Any] = {"http_parser": parser, "classes": CLASSES}
    async with Upstream() as upstream, Proxy(upstream.url, **settings) as proxy, RawClient(proxy.port) as client:
        upstream.by_model = {"tts-a": after(done)}
        client.tts()
        await upstream.wait_for(bool)
        leave(client)
        chat = asyncio.create_task(proxy.client.post("/v1/chat/completions", json=CHAT))
        await proxy.until(waiters=1, holders=1)
        await asyncio.sleep(1.2)  # longer than the watchdog for leases without a task takes
        await proxy.until(waiters=1, holders=1)
        assert not upstream.seen[0].closed.is_set()
        assert not chat.done()
        done.set()
        assert (await chat).status_code == 200
        assert await proxy.metric('gpu_lease_exchanges_total{class="tts",outcome="ok"}') == 1
        assert await proxy.metric("gpu_lease_orphans_total") == 0
        await proxy.drained(upstream)


@both_parsers
@both_ways
async def test_case_16_by_default_speech_ends_with_its_client(parser: str, leave: Callable[[RawClient], None]) -> None:
    async with (
        Upstream() as upstream,
        Proxy(upstream.url, http_parser=parser) as proxy,
        RawClient(proxy.port) as client,
    ):
        upstream.by_model = {"tts-a": after(asyncio.Event())}
        client.tts()
        await upstream.wait_for(bool)
        leave(client)
        assert (await proxy.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        await asyncio.wait_for(upstream.seen[0].closed.wait(), 5)
        await proxy.drained(upstream)


async def test_case_16_a_job_of_the_engines_own_has_no_lease_and_is_not_known_here() -> None:
    """`/v1/audio/speech/long` is no route of llama-swap, which answers 404 and loads nothing."""
    async with Simulator() as simulator, Proxy(simulator.url, classes=CLASSES) as proxy:
        response = await proxy.client.post("/v1/audio/speech/long", json=TTS)
        assert response.status_code == 404
        assert "x-lease-class" not in response.headers
        assert (await simulator.totals())["loads"] == 0
        for name in ("llm", "tts", "embed"):
            assert await proxy.metric(f'gpu_lease_exchanges_total{{class="{name}",outcome="ok"}}') == 0


# --- every place where a client can leave


Place = Callable[[Scene], Awaitable[None]]


async def before_the_head(scene: Scene) -> None:
    """The upstream works and has not answered."""
    scene.upstream.script = after(scene.end)
    scene.client.tts()
    await scene.upstream.wait_for(bool)


async def in_the_stream(scene: Scene) -> None:
    """Something has come."""
    scene.upstream.script = begun(scene.end)
    scene.client.chat()
    await scene.client.until(b"data: ")


async def held_up(scene: Scene) -> None:
    """The buffer is full and the upstream waits."""
    scene.upstream.script = flood
    scene.client.tts()
    scene.client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await scene.proxy.until(lambda: bool(scene.proxy.app._transport.ahead.held_back))


async def stalled(scene: Scene) -> None:
    """The client was cut, and what still comes is read for nobody."""
    scene.upstream.script = almost_all(scene.end)
    scene.client.tts()
    scene.client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await scene.upstream.wait_for(bool)
    ahead = scene.proxy.app._transport.ahead
    await scene.proxy.until(lambda: bool(ahead.held_back))
    (body,) = ahead.held_back
    body._stalled()
    await scene.proxy.until(lambda: not ahead.held_back and not ahead.used)
    assert scene.held == 1


def almost_all(go: asyncio.Event) -> Script:
    """An answer whose last byte waits."""

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("200 OK", "Content-Type: audio/wav", "Content-Length: 40000000") + bytes(39_999_999))
        await writer.drain()
        await after(go, raw(b"x", close=False))(seen, reader, writer)

    return script


PLACES = [before_the_head, in_the_stream, held_up]
every_place = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


async def left(scene: Scene, leave: Callable[[RawClient], None]) -> None:
    """Return once the server knows that the client has gone."""
    leave(scene.client)
    server = scene.proxy.server.server_state
    await scene.proxy.until(lambda: not server.connections)


@every_place
@both_ways
async def test_a_client_that_leaves_changes_nothing_until_the_end(
    place: Place, leave: Callable[[RawClient], None]
) -> None:
    async with scene_at(place, classes=CLASSES) as scene:
        await left(scene, leave)
        if place is not held_up:
            for _ in range(10):
                await asyncio.sleep(0)
            scene.proxy.app.leases.sweep()
            assert scene.held == 1
            assert not scene.upstream.seen[0].closed.is_set()
        scene.end.set()
        await nothing_is_left(scene)
        name = "llm" if place is in_the_stream else "tts"
        assert scene.proxy.metric("gpu_lease_exchanges_total", **{"class": name, "outcome": "ok"}) == 1
        await both_classes_work(scene)


@pytest.mark.parametrize("place", [waiting_for_its_turn, waiting_for_a_slot], ids=lambda place: place.__name__)
@both_ways
async def test_a_waiter_whose_client_leaves_leaves_the_queue_at_once(
    place: Place, leave: Callable[[RawClient], None]
) -> None:
    async with scene_at(place, classes=CLASSES) as scene:
        held = scene.held
        leave(scene.client)
        await scene.state(held=held)
        await scene.upstream.stop()  # ends the work of those that hold
        await nothing_is_left(scene)


@pytest.mark.parametrize("place", [before_the_head, in_the_stream], ids=lambda place: place.__name__)
async def test_a_stopping_server_waits_for_the_work_of_a_client_that_left(place: Place) -> None:
    async with scene_at(place, classes=CLASSES) as scene:
        await left(scene, RawClient.reset)
        scene.proxy.signal()
        await asyncio.sleep(0.1)
        assert scene.held == 1
        assert not scene.proxy._task.done()
        scene.end.set()
        await scene.proxy.ended()
        await nothing_is_left(scene)
        assert not scene.upstream.seen[0].closed.is_set() or place is before_the_head


@pytest.mark.parametrize("place", [before_the_head, in_the_stream, stalled], ids=lambda place: place.__name__)
@pytest.mark.parametrize("signals", [1, 2])
async def test_the_end_of_the_server_ends_the_work_of_a_client_that_left(place: Place, signals: int) -> None:
    async with scene_at(place, classes=CLASSES, shutdown_grace=GRACE) as scene:
        if place is not stalled:
            await left(scene, RawClient.reset)
        for _ in range(signals):
            scene.proxy.signal()
        await (scene.proxy.ended() if signals == 1 else scene.proxy.cut())
        await nothing_is_left(scene)
        assert scene.upstream.seen[0].closed.is_set()


async def test_around_the_grant_a_client_that_leaves_was_a_waiter_or_has_its_work_done() -> None:
    """The departure is told some ticks before the grant, in the same, or after. What is held counts, not who knows."""
    served = list[bool]()
    for ticks, release_first in ((4, False), (2, False), (0, False), (0, True), (1, True), (2, True), (4, True)):
        async with (
            Upstream() as upstream,
            InProcess(upstream.url, classes=CLASSES) as proxy,
            RawClient(proxy.port) as holder,
            RawClient(proxy.port) as waiter,
        ):
            done = asyncio.Event()
            upstream.by_model = {"tts-a": after(done)}
            holder.tts()
            await upstream.wait_for(bool)
            waiter.chat()
            await proxy.until(lambda: proxy.app.leases.lock.waiting_count == 1)
            cycle = cycle_of(proxy, "/v1/chat/completions")
            steps: list[Callable[[], None]] = [proxy.app.leases.lock.held[0].release, partial(disconnect, cycle)]
            first, second = steps if release_first else reversed(steps)
            first()
            for _ in range(ticks):
                await asyncio.sleep(0)
            second()
            done.set()
            await proxy.idle()
            served.append(bool(upstream.of_model("chat-a")))
            ok = proxy.metric("gpu_lease_exchanges_total", **{"class": "llm", "outcome": "ok"})
            assert len(upstream.of_model("chat-a")) == ok
    assert served == [False, False, True, True, True, True, True]


def cycle_of(proxy: InProcess, path: str) -> Any:
    """The server's side of a request."""
    cycles = [connection.cycle for connection in proxy.server.server_state.connections]  # type: ignore[union-attr]
    return next(cycle for cycle in cycles if cycle is not None and cycle.scope["path"] == path)


def disconnect(cycle: Any) -> None:
    """What the server does when the connection is lost."""
    cycle.disconnected = True
    cycle.message_event.set()


# --- a client that stays and does not read


@both_parsers
async def test_a_stalled_client_is_cut_and_the_work_goes_on_to_its_end(parser: str) -> None:
    settings: dict[str, Any] = {"http_parser": parser, "classes": CLASSES, "stall_timeout": 0.3, **SMALL}
    go = asyncio.Event()
    async with Upstream() as upstream, Proxy(upstream.url, **settings) as proxy, SlowClient(proxy.port) as client:
        upstream.by_model = {"tts-a": almost_all(go)}
        await client.post("/v1/audio/speech", TTS)
        await proxy.logged("client_stalled")
        await proxy.until(holders=1)
        assert not upstream.seen[0].closed.is_set()
        go.set()
        assert (await proxy.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert await proxy.metric('gpu_lease_exchanges_total{class="tts",outcome="ok"}') == 1
        assert len(await client.rest()) < 40_000_000
        await proxy.drained(upstream)
