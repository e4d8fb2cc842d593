"""What the tests with a known configuration share: the simulator and the proxy, both reading the same file.

async with known(CONFIG) as pair:
    ...requests to pair.proxy.client; what came of them is in pair.simulator...
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness import Proxy
from simulator_support import Simulator, ask, client_of


@dataclass(frozen=True, slots=True)
class Pair:
    """A simulated llama-swap and a proxy before it that has read the same configuration file."""

    simulator: Simulator
    proxy: Proxy
    config: Path

    @property
    def url(self) -> str:
        """Where clients go."""
        return f"http://127.0.0.1:{self.proxy.port}"

    async def untroubled(self) -> None:
        """Asserts that nothing waited inside, no model was stopped in use, and that nothing is held any more."""
        totals = await self.simulator.totals()
        assert (totals["queued_inside"], totals["stopped_busy"]) == (0, 0), totals
        await self.proxy.until(waiters=0, holders=0)
        assert await self.proxy.metric("gpu_lease_orphans_total") == 0


@contextlib.asynccontextmanager
async def known(config: str, *, time_scale: float = 0.05, **settings: Any) -> AsyncIterator[Pair]:
    """Both, started; `settings` are the proxy's."""
    with tempfile.TemporaryDirectory() as directory:
        path = written(Path(directory, "llama-swap.yaml"), config)
        async with (
            Simulator(path, time_scale=time_scale) as simulator,
            Proxy(simulator.url, llama_swap_config=str(path), **settings) as proxy,
        ):
            yield Pair(simulator, proxy, path)


def written(path: Path, config: str) -> Path:
    """`path`, with that configuration in it."""
    path.write_text(config, encoding="utf-8")
    return path


@dataclass(slots=True, eq=False)
class Asked:
    """One request as its client saw it; times are those of the event loop."""

    kind: str
    model: str
    sent: float = field(default_factory=time.monotonic)
    first_byte: float = 0.0
    ended: float = 0.0
    status: int = 0
    lease_wait: float = 0.0
    lease_class: str = ""

    @property
    def waited(self) -> float:
        """Seconds to the first byte."""
        return self.first_byte - self.sent

    @property
    def took(self) -> float:
        """Seconds to the last byte."""
        return self.ended - self.sent


async def asked(client: httpx.AsyncClient, kind: str, model: str, *, stream: bool = True, **headers: str) -> Asked:
    """Sends a request of that kind and reads its whole answer."""
    path, body = ask(kind, model, stream=stream)
    call = Asked(kind, model)
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.stream("POST", path, json=body, headers=fields, timeout=60) as answer:
        call.lease_wait = float(answer.headers.get("x-lease-wait", 0))
        call.lease_class = answer.headers.get("x-lease-class", "")
        async for _ in answer.aiter_raw():
            call.first_byte = call.first_byte or time.monotonic()
    call.status, call.ended = answer.status_code, time.monotonic()
    return call


@contextlib.asynccontextmanager
async def clients_of(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Clients without a limit of their own."""
    async with client_of(url) as client:
        yield client


async def arriving(client: httpx.AsyncClient, order: Iterable[str], every: float, kind: str = "chat") -> list[Asked]:
    """Requests for these models in this order, one `every` so many seconds, each until its end."""
    begin, tasks = time.monotonic(), []
    for place, model in enumerate(order):
        await asyncio.sleep(max(0.0, begin + place * every - time.monotonic()))
        tasks.append(asyncio.create_task(asked(client, kind, model)))
    return await asyncio.gather(*tasks)


async def eventually(true: Callable[[], Awaitable[bool]], limit: float = 5.0) -> None:
    """Returns once `true` is."""
    async with asyncio.timeout(limit):
        while not await true():  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.02)


def table(title: str, head: Sequence[object], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table, for whoever reads the output of a test."""
    lines = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
