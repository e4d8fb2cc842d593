"""What happens around a swap: who waits for whom, clients that leave, selectors."""

from __future__ import annotations

import asyncio

import pytest

from llama_swap_support import BARE, LlamaSwap
from simulator_support import SCALE, SMALL, Hog, Simulator, ask, send, served, states, until

Bare = type[Simulator] | type[LlamaSwap]


# Clients that leave.


@pytest.mark.parametrize("bare", BARE)
async def test_a_load_whose_client_has_left_is_completed_and_the_next_request_waits_for_it(bare: Bare) -> None:
    async with bare(SMALL, time_scale=SCALE) as upstream:
        leaving = send(upstream, "chat", "a")
        await until(upstream, {"a": "starting"})
        leaving.cancel()
        await asyncio.wait({leaving})
        answer = await send(upstream, "chat", "b")
        assert answer.status_code == 200
        log = await upstream.log()
        assert log["totals"]["loads_by_model"] == {"a": 1, "b": 1}
        assert served(log, "a") == []


@pytest.mark.parametrize("bare", BARE)
async def test_a_client_that_leaves_in_mid_stream_makes_way_at_once(bare: Bare) -> None:
    async with bare(SMALL, time_scale=SCALE) as upstream:
        await upstream.script("a", hold=True)
        path, body = ask("chat", "a", stream=True)
        async with upstream.client.stream("POST", path, json=body) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            waiting = send(upstream, "chat", "b")
            await upstream.wait_queued("b")
        assert (await waiting).status_code == 200
        (left,) = served(await upstream.log(), "a")
        assert left["cancelled"]
        assert left["status"] == 200


# Who waits for whom.


@pytest.mark.parametrize("bare", BARE)
async def test_a_model_that_is_resident_beside_all_never_waits_and_stops_nobody(bare: Bare) -> None:
    async with bare(SMALL, time_scale=SCALE) as upstream:
        async with Hog(upstream.client, upstream, "chat", "a"):
            answers = [await send(upstream, "embed", "e") for _ in range(5)]
        assert {each.status_code for each in answers} == {200}
        assert (await upstream.log())["totals"]["loads_by_model"] == {"a": 1, "e": 1}


@pytest.mark.parametrize("bare", BARE)
async def test_models_that_do_not_exclude_each_other_are_loaded_at_the_same_time(bare: Bare) -> None:
    async with bare(SMALL, time_scale=SCALE) as upstream:
        tasks = [send(upstream, "chat", "a"), send(upstream, "embed", "e")]
        await until(upstream, {"a": "starting", "e": "starting"})
        assert {each.status_code for each in await asyncio.gather(*tasks)} == {200}


@pytest.mark.parametrize("bare", BARE)
@pytest.mark.slow
async def test_with_overlapping_sets_the_busy_model_is_waited_for_though_an_idle_one_could_go(bare: Bare) -> None:
    overlapping = SMALL.replace("{all: (a | b) & e}", "{r: e & b, s: a & b, t: a & e}")
    async with bare(overlapping, time_scale=SCALE) as upstream:
        await send(upstream, "embed", "e")
        async with Hog(upstream.client, upstream, "chat", "a") as hog:
            waiting = send(upstream, "chat", "b")
            await upstream.wait_queued("b")
            await hog.until(hog.served + 12)
            assert not waiting.done()
            assert await states(upstream) == {"a": "ready", "e": "ready"}
        assert (await waiting).status_code == 200
        assert await states(upstream) == {"b": "ready", "e": "ready"}


@pytest.mark.parametrize("bare", BARE)
async def test_a_request_for_a_loaded_model_of_an_exclusive_group_stops_its_neighbours(bare: Bare) -> None:
    grouped = SMALL.replace(
        "matrix: {sets: {all: (a | b) & e}}",
        """
groups:
  one: {members: [a]}
  two: {members: [b], exclusive: false}
""",
    )
    async with bare(grouped, time_scale=SCALE) as upstream:
        await send(upstream, "chat", "a")
        await send(upstream, "chat", "b")
        assert await states(upstream) == {"a": "ready", "b": "ready"}
        await send(upstream, "chat", "a")
        assert await states(upstream) == {"a": "ready"}
        assert (await upstream.log())["totals"]["loads_by_model"] == {"a": 1, "b": 1}


@pytest.mark.parametrize("bare", BARE)
async def test_spillover_fills_one_target_before_it_wakes_the_next_and_then_takes_the_least_busy(
    bare: Bare,
) -> None:
    spilling = (
        SMALL.replace("(a | b) & e", "a & b & e")
        + """
selectors: {any: {strategy: spillover, targets: [a, b], settings: {spillover: 2}}}
"""
    )
    async with bare(spilling, time_scale=SCALE) as upstream:
        await upstream.script("a", hold=True)
        await upstream.script("b", hold=True)
        tasks = []
        for a, b in [(1, 0), (2, 0), (2, 1), (2, 2), (3, 2), (3, 3)]:
            tasks.append(send(upstream, "chat", "any"))
            await upstream.wait_running("a", a)
            await upstream.wait_running("b", b)
        await upstream.script("a", hold=False)
        await upstream.script("b", hold=False)
        assert {each.status_code for each in await asyncio.gather(*tasks)} == {200}


@pytest.mark.parametrize("bare", BARE)
async def test_a_limit_of_its_own_replaces_the_default_one(bare: Bare) -> None:
    limited = SMALL.replace("  e: {", "  e: {concurrencyLimit: 3, ")
    async with bare(limited, time_scale=SCALE) as upstream:
        answers = await asyncio.gather(*(send(upstream, "embed", "e") for _ in range(5)))
        assert sorted(each.status_code for each in answers) == [200, 200, 200, 429, 429]


@pytest.mark.parametrize("bare", BARE)
async def test_a_warm_selector_takes_the_first_of_its_targets_that_is_ready(bare: Bare) -> None:
    warm = SMALL + "selectors: {any: {strategy: warm, targets: [a, b, e], unlisted: true}}\n"
    async with bare(warm, time_scale=SCALE) as upstream:
        await send(upstream, "embed", "e")
        await send(upstream, "embed", "any")
        assert await states(upstream) == {"e": "ready"}
        await send(upstream, "chat", "b")
        await send(upstream, "chat", "any")
        assert await states(upstream) == {"b": "ready", "e": "ready"}
        assert "any" not in (await upstream.client.get("/v1/models")).text


async def test_spillover_has_no_target_while_all_are_being_stopped() -> None:
    alone = "models: {a: {simulator: {stop: 5}}}\nselectors: {any: {strategy: spillover, targets: [a]}}\n"
    async with Simulator(alone, time_scale=SCALE) as simulator:
        assert (await send(simulator, "embed", "any")).status_code == 200
        assert '"spillover": 1' in (await simulator.client.get("/v1/models")).text
        unloading = asyncio.create_task(simulator.client.get("/unload"))
        await until(simulator, {"a": "stopping"})
        answer = await send(simulator, "embed", "any")
        assert answer.status_code == 503
        assert "no available spillover targets" in answer.text
        await unloading


async def test_a_client_that_leaves_before_its_body_is_sent_leaves_nothing_behind() -> None:
    async with Simulator(SMALL, time_scale=SCALE) as simulator:
        host, port = simulator.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        await writer.drain()
        assert await simulator.requests() != []
        writer.close()
        async with asyncio.timeout(10):
            while not (await simulator.requests())[0]["cancelled"]:
                pass
        assert (await simulator.requests())[0]["model"] is None
        assert (await simulator.state())["swaps"] == {}
