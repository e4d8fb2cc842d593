"""What the proxy is for: the same evening on a simulated llama-swap alone, behind `fifo` and behind `batch`.

Every second of the evening takes `swap_scale` seconds, here, in the simulator and in the proxy's windows. A client's
wait ends with the first byte of the model; a comment that keeps a stream alive is none, but it does end a *silence*,
and only a silence makes a client give up. A client that would have given up counts as a burnt timeout, and goes on.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import httpx

from bench.peers import MissingError, Peer, Ports, ours, started
from bench.processes import cores, first_line, free_port, running
from bench.workloads import Size

SENTENCES = 12
CHAT = f"{{load: 15, stop: 0.5, work: 0.5, chunks: {SENTENCES}, chunk_interval: 0.5}}"
TTS = "{load: 6, stop: 0.5, work: 1, chunks: 2, chunk_interval: 0.5}"
CONFIG = "models:\n" + "".join(f"  {name}: {{cmd: x, simulator: {CHAT}}}\n" for name in ("chat", "a", "b", "c"))
CONFIG += f"  tts: {{cmd: x, simulator: {TTS}}}\n"

SWITCH_AFTER, MAX_TURN, KEEPALIVE = 30.0, 90.0, 3.0
PATIENCE = (60, 120)
"""Seconds of the evening after which clients give up: of a home-made one, and of a patient one."""

ORDER = "abaacabc"
CROWD_SECONDS = 240.0
ALONE, FIFO, BATCH = "llama-swap alone", "fifo", "batch"


@dataclass(slots=True, eq=False)
class Call:
    """One request as its client saw it; times of the loop."""

    kind: str
    sent: float = field(default_factory=time.monotonic)
    first: float = 0.0
    ended: float = 0.0
    silence: float = 0.0
    status: int = 0
    half_through: asyncio.Event = field(default_factory=asyncio.Event)


class Clients:
    """Whoever asks llama-swap or the proxy."""

    def __init__(self, client: httpx.AsyncClient, scale: float, rounds: int) -> None:
        self._client, self.scale, self.rounds = client, scale, rounds
        self.calls: list[Call] = []

    async def pause(self, seconds: float) -> None:
        """Seconds of the evening."""
        await asyncio.sleep(seconds * self.scale)

    def start(self, model: str, on_event: Callable[[], None] = lambda: None) -> tuple[Call, asyncio.Task[None]]:
        """Send a request."""
        call = Call("speech" if model == "tts" else "chat")
        self.calls.append(call)
        return call, asyncio.create_task(self._run(call, model, on_event))

    async def _run(self, call: Call, model: str, on_event: Callable[[], None]) -> None:
        messages = [{"role": "user", "content": "x"}]
        body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
        path = "/v1/chat/completions"
        if call.kind == "speech":
            path, body = "/v1/audio/speech", {"model": model, "input": "x", "voice": "v"}
        heard, events = call.sent, 0
        async with self._client.stream("POST", path, json=body) as answer:
            async for piece in answer.aiter_raw():
                now = time.monotonic()
                call.silence, heard = max(call.silence, now - heard), now
                if piece.startswith(b":"):
                    continue
                call.first = call.first or now
                for _ in range(piece.count(b'"content":')):
                    events += 1
                    on_event()
                if events >= SENTENCES // 2:
                    call.half_through.set()
        call.status, call.ended = answer.status_code, time.monotonic()
        call.half_through.set()


# -- the evening


async def alternating(clients: Clients) -> None:
    """A chat and a speech in turn, one every two seconds."""
    tasks = []
    for number in range(20 * clients.rounds):
        tasks.append(clients.start("tts" if number % 2 else "chat")[1])
        await clients.pause(2)
    await asyncio.gather(*tasks)


async def agents(clients: Clients) -> None:
    """Three agents on three models, A B A A C A B C, one every four seconds."""
    tasks = []
    for model in ORDER * clients.rounds:
        tasks.append(clients.start(model)[1])
        await clients.pause(4)
    await asyncio.gather(*tasks)


async def read_aloud(clients: Clients) -> None:
    """A chat whose sentences go to speech while it streams; the next when all has been said."""
    for _ in range(2 * clients.rounds):
        speech: list[asyncio.Task[None]] = []
        _, chat = clients.start("chat", lambda said=speech: said.append(clients.start("tts")[1]))  # type: ignore[misc]
        await chat
        await asyncio.gather(*speech)


async def starvation(clients: Clients) -> None:
    """Chats that always overlap for four minutes, and one speech that comes when they have begun."""
    tasks, over = [], time.monotonic() + CROWD_SECONDS * clients.scale
    while time.monotonic() < over:
        call, task = clients.start("chat")
        tasks.append(task)
        if len(tasks) == 3:
            tasks.append(clients.start("tts")[1])
        await call.half_through.wait()
    await asyncio.gather(*tasks)


SCENES: dict[str, Callable[[Clients], Awaitable[None]]] = {
    "alternating": alternating,
    "A B A A C A B C": agents,
    "read-aloud": read_aloud,
    "starvation": starvation,
}


@dataclass(frozen=True, slots=True)
class Evening:
    """What a scene came to, in seconds of the evening; waits by kind of request: (mean, 95th percentile)."""

    loads: int
    makespan: float
    waits: dict[str, tuple[float, float]]
    burnt: tuple[int, ...]
    requests: int
    failed: int


def _came_to(calls: Iterable[Call], loads: int, scale: float) -> Evening:
    calls = list(calls)
    waits = {}
    for kind in ("chat", "speech"):
        if own := [(call.first - call.sent) / scale for call in calls if call.kind == kind and call.first]:
            worst = quantiles(own, n=20, method="inclusive")[-1] if len(own) > 1 else own[0]
            waits[kind] = (fmean(own), worst)
    makespan = (max(call.ended for call in calls) - min(call.sent for call in calls)) / scale
    burnt = tuple(sum(call.silence / scale > limit for call in calls) for limit in PATIENCE)
    return Evening(loads, makespan, waits, burnt, len(calls), sum(call.status != 200 for call in calls))


# -- the stage


async def measure_swaps(size: Size) -> dict[str, dict[str, Evening]]:
    """By scene and way. Every scene begins with the chat model loaded and nothing under way."""
    found: dict[str, dict[str, Evening]] = {scene: {} for scene in SCENES}
    for way in (ALONE, FIFO, BATCH):
        async with _stage(way, size) as (simulator, url), _client(url) as client:
            for scene, play in SCENES.items():
                clients = Clients(client, size.swap_scale, size.swap_rounds)
                await clients.start("chat")[1]
                await simulator.delete("/_sim/log")
                clients.calls.clear()
                await play(clients)
                loads = (await simulator.get("/_sim/log")).json()["totals"]["loads"]
                found[scene][way] = _came_to(clients.calls, loads, size.swap_scale)
    return found


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None), trust_env=False)


@asynccontextmanager
async def _stage(way: str, size: Size) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A simulator's client, and where clients go."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        config = directory / "config.yaml"
        config.write_text(CONFIG)
        command = [sys.executable, "-m", "proxy.simulator", "--config", str(config)]
        command += ["--time-scale", str(size.swap_scale)]
        process = stack.enter_context(
            running(command, directory / "simulator.log", core=cores()[1], env=os.environ, stdout=-1)
        )
        url = first_line(process.stdout).removeprefix("listening on ")
        async with _client(url) as simulator:
            if way != ALONE:
                url = await _proxy(way, size, url, config, directory, stack)
            yield simulator, url


async def _proxy(way: str, size: Size, upstream: str, config: Path, directory: Path, stack: ExitStack) -> str:
    scale, port = size.swap_scale, free_port()
    windows = {"switch_after": SWITCH_AFTER * scale, "max_turn": MAX_TURN * scale}
    alive = {"keepalive_after": KEEPALIVE * scale, "keepalive_every": KEEPALIVE * scale}
    start = ours("httptools", policy=way, slots=10, llama_swap_config=config, **windows, **alive)
    ports = Ports(port, int(upstream.rsplit(":", 1)[1]))
    stack.enter_context(started(Peer(way, start), ports, directory))
    url = f"http://127.0.0.1:{port}"
    async with _client(url) as client:
        for _ in range(200):
            with suppress(httpx.TransportError):
                if (await client.get("/-/readyz")).status_code == 200:
                    return url
            await asyncio.sleep(0.1)
    raise MissingError("the proxy did not start")
