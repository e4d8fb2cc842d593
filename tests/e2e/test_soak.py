"""Case 84: fifty clients do everything at once, for a long time, and nothing of it stays; see tests/cases.md.

The crowd asks for every class, streamed or not, leaves at random moments, reads slowly, sends rubbish; llama-swap fails
in the middle of answers, is restarted and given another configuration under it. After a warm-up, and again at the end,
everybody stops for a moment: then nothing is held or waits, and tasks, threads, descriptors and memory of the proxy's
process are the same both times. SOAK_SECONDS is how long it takes, 60 in CI; 1800 by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from heartbeat_support import BLOCKED, Heartbeat
from known_support import table
from soak_support import APART, PAIRED, Crowd, LlamaSwap, memory_of, threads_of
from wire_support import descriptors, until

from harness import Proxy
from proxy.follow import RECONNECT_SECONDS

CLIENTS = 50
SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))


@dataclass(frozen=True)
class Rest:
    """What the proxy has while nobody asks for anything."""

    tasks: int
    threads: int
    descriptors: int
    megabytes: float


@dataclass(frozen=True)
class Scene:
    """The proxy, llama-swap and the crowd."""

    proxy: Proxy
    llama_swap: LlamaSwap
    heartbeat: Heartbeat
    crowd: Crowd
    spool_dir: Path

    async def trouble(self, random: Random) -> None:
        """Restarts and new configurations, until cancelled."""
        for what in itertools.cycle(("restart", "reload", "reload and tell")):
            await asyncio.sleep(random.uniform(0.2, 1.0))
            if what == "restart":
                # Half a restart would leave nobody to restart.
                await asyncio.shield(asyncio.ensure_future(self.llama_swap.restart()))
                continue
            await self.llama_swap.reload(random.choice((APART, PAIRED)))
            if what == "reload and tell":
                self.proxy.signal(signal.SIGHUP)

    async def busy(self, seconds: float, random: Random) -> None:
        """That long, everything at once."""
        troubling = asyncio.create_task(self.trouble(random))
        try:
            await self.crowd.run(CLIENTS, time.monotonic() + seconds)
        finally:
            troubling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await troubling

    async def rest(self) -> Rest:
        """Nothing is held, waits or is kept; what the proxy has then."""
        await self.proxy.until(waiters=0, holders=0, within=30)  # jobs go on without the clients that gave them
        await self.proxy.drained()
        text = (await self.proxy.client.get("/-/metrics")).text
        gauges = re.findall(r"^(gpu_lease_(?:held|waiting|\w*buffer\w*|orphans_total)\S*) (\S+)$", text, re.MULTILINE)
        assert len(gauges) >= 11
        assert {name: value for name, value in gauges if float(value)} == {}
        await self.llama_swap.restart()  # closes the connections that were kept for the next request
        await asyncio.sleep(RECONNECT_SECONDS * 1.2)  # and of those for the proxy's own questions nobody tells
        await until(lambda: not any(name.startswith(str(self.spool_dir)) for name in descriptors(self.proxy)))
        return await self._measured()

    async def _measured(self) -> Rest:
        assert self.proxy.process is not None
        pid = self.proxy.process.pid
        tasks = await self.heartbeat.tasks()
        return Rest(tasks, threads_of(pid), len(descriptors(self.proxy)), round(memory_of(pid) / 2**20, 1))


@dataclass(frozen=True)
class Soaked:
    """What the proxy has after a warm-up of a third of the time, and at the end, and what happened until then."""

    warm: Rest
    end: Rest
    counts: Counter[str]
    blocked: float
    """Seconds."""


async def soak(tmp_path: Path, seconds: float, seed: int) -> Soaked:
    """That many seconds of everything."""
    heartbeat, random = Heartbeat(tmp_path), Random(seed)
    spool_dir = tmp_path / "spool"
    spool_dir.mkdir()
    async with (
        LlamaSwap(tmp_path) as llama_swap,
        Proxy(
            llama_swap.url,
            env=heartbeat.environment,
            traced=False,
            llama_swap_config=str(llama_swap.path),
            spool_dir=str(spool_dir),
            switch_after=0.1,
            max_turn=0.5,
            response_buffer="256KiB",
            stall_timeout="1s",
            keepalive_after="50ms",
            keepalive_every="20ms",
            job_ttl="1s",
            classes={"embed": {"on_disconnect": "drain"}},
        ) as proxy,
    ):
        await heartbeat.begin()
        scene = Scene(proxy, llama_swap, heartbeat, Crowd(proxy.port, seed), spool_dir)
        await scene.busy(seconds / 3, random)
        warm = await scene.rest()
        await scene.busy(seconds * 2 / 3, random)
        end = await scene.rest()
        assert await proxy.metric('gpu_lease_rejected_total{reason="internal_error"}') == 0
        assert not [line for line in proxy.lines if "Traceback" in line or "internal_error" in line]
        blocked = await heartbeat.longest()
    rows = [(n, what) for what, n in sorted(scene.crowd.counts.items())]
    table(f"{scene.crowd.counts.total()} requests in {seconds:g} s, loop blocked for {blocked * 1000:.0f} ms at most",
          ("count", "what"), rows)  # fmt: skip
    print(f"  warm: {warm}\n  end:  {end}")
    return Soaked(warm, end, scene.crowd.counts, blocked)


@pytest.mark.slow
async def test_case_84_three_seconds_of_everything_leave_nothing(tmp_path: Path) -> None:
    soaked = await soak(tmp_path, 3, seed=1)
    assert {"200", "left"} <= soaked.counts.keys()
    assert soaked.end.tasks <= soaked.warm.tasks
    assert soaked.end.descriptors <= soaked.warm.descriptors + 3


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 2 + 120)
async def test_case_84_a_long_time_of_everything_leaves_nothing(tmp_path: Path) -> None:
    soaked = await soak(tmp_path, SECONDS, seed=2)
    assert {"200", "200 broken off", "202", "400", "502", "left"} <= soaked.counts.keys()
    assert soaked.end.tasks <= soaked.warm.tasks
    assert soaked.end.threads <= soaked.warm.threads
    assert soaked.end.descriptors <= soaked.warm.descriptors + 3
    assert soaked.end.megabytes <= soaked.warm.megabytes * 1.2
    assert soaked.blocked < BLOCKED * 2  # a collection of so much garbage alone takes most of it
