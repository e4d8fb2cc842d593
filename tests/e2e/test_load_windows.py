"""`switch_after: auto` follows the loads it measures: swaps and waits beside a fixed window, for three lengths of load.

The scenario is a home evening in which each second takes `SCALE` of one: the simulator's times and all constants of the
windows are scaled alike. Read-aloud is one streamed chat of which each sentence goes to speech as soon as it is
complete; the agents are three, on models of which each excludes the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from known_support import Asked, arriving, asked, clients_of, table, written

from harness import InProcess
from proxy import follow, windows
from simulator_support import Simulator, ask

SCALE = 0.02
SENTENCES = 12
ORDER = "abaacabc"
LOADS = (0.1, 1.0, 5.0)
FIXED = {"switch_after": 30.0, "max_turn": 90.0}
SLACK = 2.0


def config(load: float) -> str:
    """Chat and speech exclude each other, and the agents' models each other."""
    chat = f"{{simulator: {{load: {load}, stop: 0.3, work: 0.3, chunks: {SENTENCES}, chunk_interval: 0.7}}}}"
    speech = f"{{simulator: {{load: {load}, stop: 0.3, work: 0.3, chunks: 2, chunk_interval: 0.2}}}}"
    models = "\n".join(f"  {name}: {speech if name == 'tts' else chat}" for name in ("q27", "tts", "a", "b", "c"))
    return f"models:\n{models}\nmatrix: {{sets: {{one: q27 | tts | a | b | c}}}}\n"


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every constant of the windows in scaled seconds; what llama-swap says is asked for as often as that asks."""
    for name in ("UNKNOWN_LOAD", "SHORTEST", "LONGEST", "SHORTEST_TURN"):
        monkeypatch.setattr(windows, name, getattr(windows, name) * SCALE)
    for name in ("RECONNECT_SECONDS", "DOUBT_SECONDS"):
        monkeypatch.setattr(follow, name, getattr(follow, name) * SCALE)


@dataclass(frozen=True, slots=True)
class Stage:
    """A simulator, a client of the proxy before it, and the proxy."""

    simulator: Simulator
    client: httpx.AsyncClient
    proxy: InProcess


@contextlib.asynccontextmanager
async def stage(load: float, path: Path, **settings: Any) -> AsyncIterator[Stage]:
    async with (
        Simulator(written(path, config(load)), time_scale=SCALE) as simulator,
        InProcess(simulator.url, llama_swap_config=path, max_wait=540, **settings) as proxy,
        clients_of(f"http://127.0.0.1:{proxy.port}") as client,
    ):
        await proxy.until(lambda: proxy.metric("gpu_lease_upstream_up") == 1)
        yield Stage(simulator, client, proxy)
        totals = await simulator.totals()
        assert (totals["queued_inside"], totals["stopped_busy"]) == (0, 0), totals
        await proxy.idle()


async def read_aloud(client: httpx.AsyncClient, times: int) -> list[Asked]:
    """A streamed chat, each of whose sentences is sent to speech when it is complete; the next when all is said."""
    calls: list[Asked] = []
    for _ in range(times):
        speech: list[asyncio.Task[Asked]] = []
        call = Asked("chat", "q27")
        path, body = ask("chat", "q27", stream=True)
        async with client.stream("POST", path, json=body, timeout=60) as answer:
            async for line in answer.aiter_lines():
                call.first_byte = call.first_byte or time.monotonic()
                if '"content"' in line:
                    speech.append(asyncio.create_task(asked(client, "speech", "tts")))
        call.status, call.ended = answer.status_code, time.monotonic()
        assert len(speech) == SENTENCES
        calls += [call, *await asyncio.gather(*speech)]
    return calls


def row(work: str, load: float, window: str, loads: int, calls: list[Asked]) -> list[object]:
    """One line of the table, in seconds of the evening."""
    waits = [each.waited / SCALE for each in calls]
    total = (max(each.ended for each in calls) - min(each.sent for each in calls)) / SCALE
    return [work, load, window, loads, sum(waits) / len(waits), max(waits), total]


HEAD = ("", "load", "window", "loads", "mean wait", "worst", "in all")


Evening = dict[str, tuple[list[Asked], int]]
"""By kind of work: what its clients saw, and the loads."""


async def evening(load: float, window: dict[str, float], path: Path, *, times: int) -> Evening:
    """Both kinds of work, one after the other."""
    done: Evening = {}
    async with stage(load, path, **{name: seconds * SCALE for name, seconds in window.items()}) as here:
        for name in ("read-aloud", "agents"):
            await here.simulator.reset()
            if name == "agents":
                calls = await arriving(here.client, ORDER * times, 3 * SCALE)
            else:
                calls = await read_aloud(here.client, times)
            assert {each.status for each in calls} == {200}
            done[name] = (calls, (await here.simulator.totals())["loads"])
        if not window:
            measured = (await here.client.get("/-/queue")).json()["load_seconds"]
            assert set(measured) == {"q27", "tts", "a", "b", "c"}
            # Both ends are told on their way: a fifth less than the load is the jitter of two messages.
            assert all(0.8 * load * SCALE <= seconds <= load * SCALE + SLACK for seconds in measured.values()), measured
    return done


async def compared(loads: tuple[float, ...], path: Path, *, times: int) -> None:
    """The table, and what must hold of it."""
    rows = []
    for load in loads:
        fixed = await evening(load, FIXED, path, times=times)
        auto = await evening(load, {}, path, times=times)
        for name in fixed:
            for window, (calls, count) in (("fixed 30 s", fixed[name]), ("auto", auto[name])):
                rows.append(row(name, load, window, count, calls))
        # Read-aloud needs each model once each time, and no window can make it more.
        assert fixed["read-aloud"][1] == auto["read-aloud"][1] == 2 * times
        # The agents need three loads at least; a window that gave up each turn at once would need one a request.
        assert 3 <= auto["agents"][1] <= len(ORDER) * times * 2 / 3
    table(f"Seconds of an evening played {1 / SCALE:.0f} times as fast", HEAD, rows)


@pytest.mark.slow
async def test_with_auto_loads_and_waits_stay_beside_those_of_a_fixed_window(scaled: None, tmp_path: Path) -> None:
    await compared((1.0,), tmp_path / "llama-swap.yaml", times=1)


@pytest.mark.slow
async def test_the_whole_table_for_three_lengths_of_load(scaled: None, tmp_path: Path) -> None:
    await compared(LOADS, tmp_path / "llama-swap.yaml", times=5)


async def test_a_wildly_wrong_measurement_moves_the_window_no_further_than_its_bounds(
    scaled: None, tmp_path: Path
) -> None:
    async with stage(1.0, tmp_path / "llama-swap.yaml") as here:
        assert (await asked(here.client, "chat", "q27")).status == 200
        policy, times = here.proxy.app.leases.policy, here.proxy.app.leases.policy.windows
        assert times is not None
        for wrong in (0.0, 1e-9, 1e9, float("inf")):
            for model in ("q27", "tts"):
                here.proxy.app._follower._sink._record(model, wrong)  # type: ignore[attr-defined]
            switch_after, max_turn = policy.window(frozenset({"q27"}), frozenset({"tts"}))
            assert windows.SHORTEST <= switch_after <= windows.LONGEST
            assert switch_after <= max_turn <= 540 / 2
        async with asyncio.timeout(20):
            chats = [asked(here.client, "chat", "q27") for _ in range(3)]
            done = await asyncio.gather(*chats, *(asked(here.client, "speech", "tts") for _ in range(3)))
        assert {each.status for each in done} == {200}
