"""With llama-swap's own configuration nothing else needs to be set: who runs beside whom, who waits, and how long.

Every test but those named bare goes through the proxy, and ends with the simulated llama-swap's word that nothing
waited inside it and that it stopped no model in use.
"""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from known_support import Asked, arriving, asked, clients_of, known, table

from simulator_support import Hog, Simulator, served

MODELS = """
models:
  q27: {simulator: {load: 2, stop: 0.4, work: 0.4, chunks: 6, chunk_interval: 0.4}}
  vis: {simulator: {load: 2, stop: 0.4, work: 0.4, chunks: 6, chunk_interval: 0.4}}
  tts: {simulator: {load: 1, stop: 0.2, work: 0.2, chunks: 4, chunk_interval: 0.2}}
  kokoro: {simulator: {load: 1, stop: 0.2, work: 0.2, chunks: 4, chunk_interval: 0.2}}
  e: {simulator: {load: 1, work: 0.2}}
"""
HOME = f"""{MODELS}
routing:
  router:
    use: matrix
    settings:
      matrix:
        sets:
          one: (q27 | vis | tts) & e
          two: q27 & kokoro & e
"""
EMBED = {"embed": {"models": ["e"]}}
SCALE = 0.05
LOAD = 2.4 * SCALE
REQUEST = 2.8 * SCALE
SLACK = 1.5
"""Seconds that a busy machine may add."""

SWITCH_AFTER, MAX_TURN = 0.4, 1.2


@pytest.mark.parametrize("policy", ["batch", "fifo"])
async def test_a_hogged_model_starves_nobody_and_what_is_always_resident_never_waits(policy: str) -> None:
    settings = {"policy": policy, "classes": EMBED, "switch_after": SWITCH_AFTER, "max_turn": MAX_TURN}
    async with known(HOME, time_scale=SCALE, **settings) as pair, clients_of(pair.url) as client:
        async with Hog(client, pair.simulator, "chat", "q27", turn=REQUEST) as hog:
            waiting = asyncio.create_task(asked(client, "chat", "vis"))
            embeddings = [await asked(client, "embed", "e") for _ in range(5)]
            vis = await waiting
            await hog.until(hog.served + 2)
            embeddings += [await asked(client, "embed", "e") for _ in range(5)]
        assert (vis.status, vis.lease_class, hog.failed) == (200, "llm", [])
        assert vis.waited <= MAX_TURN + LOAD + REQUEST + LOAD + SLACK
        assert {each.status for each in embeddings} == {200}
        assert max(each.lease_wait for each in embeddings) == 0
        inside = served(await pair.simulator.log(), "e")
        assert max(each["waited"] for each in inside) < SLACK
        await pair.untroubled()


@pytest.mark.slow
async def test_bare_a_hogged_model_starves_the_other_one_for_ever() -> None:
    async with Simulator(HOME, time_scale=SCALE) as simulator:
        async with Hog(simulator.client, simulator, "chat", "q27") as hog:
            waiting = asyncio.create_task(asked(simulator.client, "chat", "vis"))
            await simulator.wait_queued("vis")
            await hog.until(hog.served + 30)
            assert not waiting.done()
        assert (await waiting).status == 200


async def test_speech_that_the_matrix_keeps_beside_a_chat_model_runs_beside_it() -> None:
    async with known(HOME, time_scale=SCALE, classes=EMBED) as pair, clients_of(pair.url) as client:
        chat = asyncio.create_task(asked(client, "chat", "q27", x_sim_hold="chat"))
        await pair.simulator.wait_running("q27")
        speech = await asyncio.gather(*(asked(client, "speech", "kokoro") for _ in range(3)))
        queue = await pair.proxy.queue()
        assert [(each["model"], each["mode"]) for each in queue["holders"]] == [("q27", "read")]
        assert {each.status for each in speech} == {200}
        spoken = served(await pair.simulator.log(), "kokoro")
        assert max(each["started"] for each in spoken) < min(each["finished"] for each in spoken), "side by side"

        other = asyncio.create_task(asked(client, "speech", "tts"))  # which is resident beside no chat model
        (waiter,) = (await pair.proxy.until(waiters=1))["waiters"]
        assert (waiter["model"], waiter["mode"]) == ("tts", "write")
        assert not chat.done()
        await pair.simulator.release("chat")
        assert {(await chat).status, (await other).status} == {200}
        assert (await pair.simulator.totals())["loads_by_model"] == {"q27": 1, "kokoro": 1, "tts": 1}
        await pair.untroubled()


async def test_twenty_requests_at_once_for_one_model_are_all_served_ten_at_a_time() -> None:
    async with known(HOME, time_scale=SCALE, classes=EMBED) as pair, clients_of(pair.url) as client:
        await pair.simulator.script("q27", hold=True)
        calls = [asyncio.create_task(asked(client, "chat", "q27")) for _ in range(20)]
        await pair.simulator.wait_running("q27", 10)
        await pair.proxy.until(waiters=10, holders=10)
        assert (await pair.simulator.state())["running"] == {"q27": 10}
        await pair.simulator.script("q27", hold=False)
        assert [each.status for each in await asyncio.gather(*calls)] == [200] * 20
        await pair.untroubled()


async def test_case_73_fifteen_chats_and_fifteen_embeddings_at_once_meet_no_limit_of_llama_swap() -> None:
    limited = HOME.replace("e: {simulator", "e: {concurrencyLimit: 4, simulator")
    async with known(limited, time_scale=SCALE, classes=EMBED) as pair, clients_of(pair.url) as client:
        kinds = [("chat", "q27"), ("embed", "e")] * 15
        calls = await asyncio.gather(*(asked(client, *kind) for kind in kinds))
        assert [each.status for each in calls] == [200] * 30
        inside = (await pair.simulator.log())["requests"]
        assert [each["status"] for each in inside] == [200] * 30, "llama-swap itself refused one above its limit"
        await pair.untroubled()


# Three agents on three models of which each excludes the others.

AGENTS = """
models:
  a: {simulator: {load: 6, stop: 1, work: 2, chunks: 8, chunk_interval: 1}}
  b: {simulator: {load: 6, stop: 1, work: 2, chunks: 8, chunk_interval: 1}}
  c: {simulator: {load: 6, stop: 1, work: 2, chunks: 8, chunk_interval: 1}}
"""
AGENTS_SCALE = 0.02
ORDER = "abaacabc" * 2
EVERY = 4 * AGENTS_SCALE
AGENT_LOAD, AGENT_REQUEST = 7 * AGENTS_SCALE, 10 * AGENTS_SCALE


def summary(name: str, calls: list[Asked], loads: int) -> list[object]:
    """A row of the table: loads, waits, and how long all of it took."""
    waits = sorted(each.waited for each in calls)
    worst = {model: max(each.waited for each in calls if each.model == model) for model in "abc"}
    total = max(each.ended for each in calls) - min(each.sent for each in calls)
    return [name, loads, sum(waits) / len(waits), waits[math.ceil(0.95 * len(waits)) - 1], *worst.values(), total]


@pytest.mark.slow
async def test_three_agents_on_three_models_need_at_most_twice_the_loads_of_a_bare_llama_swap() -> None:
    rows, loads, calls = [], {}, {}
    async with Simulator(AGENTS, time_scale=AGENTS_SCALE) as simulator:
        calls["bare"] = await arriving(simulator.client, ORDER, EVERY)
        loads["bare"] = (await simulator.totals())["loads"]
    switch_after, max_turn = 2 * AGENT_LOAD, 8 * AGENT_LOAD
    for policy in ("fifo", "batch"):
        settings = {"policy": policy, "switch_after": switch_after, "max_turn": max_turn}
        async with known(AGENTS, time_scale=AGENTS_SCALE, **settings) as pair, clients_of(pair.url) as client:
            calls[policy] = await arriving(client, ORDER, EVERY)
            loads[policy] = (await pair.simulator.totals())["loads"]
            await pair.untroubled()
    for name, made in calls.items():
        assert {each.status for each in made} == {200}
        rows.append(summary(name, made, loads[name]))
    head = ("", "loads", "mean wait", "p95", "worst a", "worst b", "worst c", "in all")
    table(f"Three agents, {ORDER.upper()}, one every {EVERY:.2f} s, loads of {AGENT_LOAD:.2f} s", head, rows)
    assert loads["batch"] <= 2 * loads["bare"]
    assert loads["batch"] < loads["fifo"]
    # Two other turns at most, and its own: each has a load, its window, and the request that still runs.
    bound = 2 * (AGENT_LOAD + max_turn + AGENT_REQUEST) + AGENT_LOAD + AGENT_REQUEST
    assert max(each.waited for each in calls["batch"]) <= bound + SLACK


# The configuration changes under way.


async def test_a_model_that_is_added_while_others_run_is_served_without_a_restart() -> None:
    async with known(HOME, time_scale=SCALE, classes=EMBED) as pair, clients_of(pair.url) as client:
        assert (await asked(client, "chat", "late")).status == 404
        await asyncio.sleep(1)  # it looks at the file for an unknown name once a second
        added = HOME.replace("  e: {", "  late: {}\n  e: {").replace("(q27 |", "(late | q27 |")
        await pair.simulator.reload(added)
        begun = time.monotonic()
        call = await asked(client, "chat", "late")
        assert (call.status, call.lease_class) == (200, "llm")
        assert time.monotonic() - begun < 2 + SLACK
        await pair.untroubled()
