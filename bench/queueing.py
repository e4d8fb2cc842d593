"""This proxy's queue: memory of each waiter in two waves, and what it costs to drain it.

A speech request that the upstream holds has the GPU alone; chats queue behind it until all are there; then it is let
go, and they are served as many at a time as one model has slots. Draining is compared with the same requests at 64
connections that never queue, on a process of the same kind.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx

from bench.client import Load
from bench.measuring import answers, repetition
from bench.peers import OURS, OURS_H11, MissingError, Peer, Ports, ours, started
from bench.processes import cpu_seconds, free_port, memory
from bench.workloads import Size, chat, post

WAVES = 2
SLOTS = 10
"""llama-swap's own default."""

LIMIT = 60.0


@dataclass(slots=True)
class Drained:
    """Medians over fresh processes. Memory in bytes per waiter beyond its body, CPU in seconds per request."""

    waves: list[list[float]] = field(default_factory=lambda: [[] for _ in range(WAVES)])
    drains: list[float] = field(default_factory=list)
    small: list[float] = field(default_factory=list)
    waiters: int = 0

    def memory(self, wave: int) -> float:
        """Bytes per waiter in that wave, beyond what the process had before the first."""
        return median(self.waves[wave])

    @property
    def drain(self) -> float:
        """CPU seconds per request from the release to the last answer."""
        return median(self.drains)

    @property
    def ratio(self) -> float:
        """The same as a multiple of a request that does not queue."""
        return self.drain / median(self.small)


async def measure_queue(size: Size, upstream_port: int) -> dict[str, Drained]:
    """Both parsers, in turn."""
    found = {OURS_H11: Drained(waiters=size.waiters), OURS: Drained(waiters=size.waiters)}
    for _ in range(size.drains):
        for (name, into), parser in zip(found.items(), ("h11", "httptools"), strict=True):
            async with _proxy(Peer(name, ours(parser)), upstream_port) as (port, pid):
                into.small.append(
                    (await repetition(Load(port, chat("json")(False), 64, size.seconds), 1, pid)).per_unit
                )
            async with _proxy(Peer(name, ours(parser, slots=SLOTS)), upstream_port) as (port, pid):
                await _waves(into, size, port, pid, upstream_port)
    return found


@asynccontextmanager
async def _proxy(peer: Peer, upstream_port: int) -> AsyncIterator[tuple[int, int]]:
    """A fresh process that has served a while; its port and process id."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = free_port()
        process = stack.enter_context(started(peer, Ports(port, upstream_port), directory))
        await answers(port, peer.start_limit, process)
        await Load(port, chat("json")(False), 16, 0.3).run()
        yield port, process.pid


async def _waves(into: Drained, size: Size, port: int, pid: int, upstream_port: int) -> None:
    request = chat("json")(False)
    body = len(request.partition(b"\r\n\r\n")[2])
    async with httpx.AsyncClient(trust_env=False) as client:
        await _waiting(client, port, 0)
        before = memory(pid)
        for wave in range(WAVES):
            speech = asyncio.create_task(Load(port, post("/v1/audio/speech", "hold", SPEECH), 1, once=True).run())
            await _until(client, port, 'gpu_lease_held{class="tts"}', 1)
            crowd = asyncio.create_task(Load(port, request, size.waiters, once=True).run())
            await _waiting(client, port, size.waiters)
            into.waves[wave].append((memory(pid) - before) / size.waiters - body)
            cpu = cpu_seconds(pid)
            await client.get(f"http://127.0.0.1:{upstream_port}/release")
            failed = [taken.failed for taken in await asyncio.gather(speech, crowd)]
            into.drains.append((cpu_seconds(pid) - cpu) / size.waiters)
            if any(failed):
                print(f"  queue: {failed} failed", file=sys.stderr)


SPEECH = b'{"model":"speech","input":"x","voice":"v"}'


async def _waiting(client: httpx.AsyncClient, port: int, count: int) -> None:
    await _until(client, port, 'gpu_lease_waiting{class="llm"}', count)


async def _until(client: httpx.AsyncClient, port: int, series: str, value: float) -> None:
    """Return once the proxy's series has this value. Raises MissingError after a minute."""
    try:
        async with asyncio.timeout(LIMIT):
            while True:
                text = (await client.get(f"http://127.0.0.1:{port}/-/metrics")).text
                if f"\n{series} {value:.1f}\n" in text:
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise MissingError(f"{series} never became {value}") from None
