"""The simulator is honest: what was measured on a bare llama-swap happens on it too.

Each row of the table of measurements that this proxy exists for is replayed here, twenty times as fast, by
its order and its counts. `test_simulator_*.py` hold the single facts. With the mark `llama_swap` the same
tests run on a real llama-swap.
"""

from __future__ import annotations

import asyncio
import itertools

import httpx
import pytest

from llama_swap_support import BARE, LlamaSwap
from simulator_support import Hog, Simulator, ask, served

MODELS = """
models:
  q27:
    simulator: {load: 2, stop: 0.5, work: 0.2, chunks: 10, chunk_interval: 0.1}
  vis:
    simulator: {load: 2, stop: 0.5, work: 0.2, chunks: 10, chunk_interval: 0.1}
  tts:
    simulator: {load: 2, stop: 0.5, work: 0.2, chunks: 10, chunk_interval: 0.1}
  e:
    simulator: {load: 1, work: 0.1}
"""
MATRIX = (
    MODELS
    + """
routing:
  router:
    use: matrix
    settings:
      matrix:
        sets: {all: (q27 | vis | tts) & e}
"""
)
GROUPS = (
    MODELS
    + """
groups:
  one: {swap: true, exclusive: true, members: [q27, vis, tts]}
"""
)
PRIORITIES = (
    MATRIX
    + """
  scheduler: {use: fifo, settings: {fifo: {priority: {tts: 10}}}}
"""
)
# Twenty times as fast as what was measured.
SCALE = 0.05


Bare = type[Simulator] | type[LlamaSwap]


@pytest.mark.parametrize("bare", BARE)
@pytest.mark.parametrize(
    ("running", "waiting"), [(("chat", "q27"), ("speech", "tts")), (("speech", "tts"), ("chat", "q27"))]
)
async def test_a_request_behind_the_other_kind_gets_no_byte_until_that_has_ended(
    bare: Bare, running: tuple[str, str], waiting: tuple[str, str]
) -> None:
    async with bare(MATRIX, time_scale=SCALE) as upstream:
        await upstream.script(running[1], hold=True)
        path, body = ask(*running, stream=True)
        long_turn = asyncio.create_task(upstream.client.post(path, json=body))
        await upstream.wait_running(running[1])

        path, body = ask(*waiting)
        with pytest.raises(httpx.ReadTimeout):
            await upstream.client.post(path, json=body, timeout=0.2)
        await upstream.wait_queued()
        patient = asyncio.create_task(upstream.client.post(path, json=body))
        await upstream.wait_queued(waiting[1])
        assert not patient.done()
        await upstream.script(running[1], hold=False)
        assert (await long_turn).status_code == 200
        assert (await patient).status_code == 200

        log = await upstream.log()
        (before,) = served(log, running[1])
        (after,) = served(log, waiting[1])  # one: whoever leaves the queue is dropped, and costs no load
        assert after["started"] > before["finished"]
        assert log["totals"]["loads_by_model"] == {running[1]: 1, waiting[1]: 1}


@pytest.mark.parametrize("bare", BARE)
@pytest.mark.parametrize(
    ("config", "hogging", "waiting"),
    [
        pytest.param(MATRIX, ("chat", "q27"), ("speech", "tts"), id="speech behind chats"),
        pytest.param(MATRIX, ("speech", "tts"), ("chat", "q27"), id="a chat behind speech"),
        pytest.param(GROUPS, ("chat", "q27"), ("speech", "tts"), id="with the group router"),
        pytest.param(PRIORITIES, ("chat", "q27"), ("speech", "tts"), id="with a priority for speech"),
        pytest.param(MATRIX, ("chat", "q27"), ("chat", "vis"), id="one chat model behind another"),
    ],
)
async def test_while_requests_overlap_another_model_is_never_served_and_then_at_once(
    bare: Bare, config: str, hogging: tuple[str, str], waiting: tuple[str, str]
) -> None:
    async with bare(config, time_scale=SCALE) as upstream:
        async with Hog(upstream.client, upstream, *hogging) as hog:
            path, body = ask(*waiting)
            starving = asyncio.create_task(upstream.client.post(path, json=body))
            await upstream.wait_queued(waiting[1])
            await hog.until(hog.served + 24)
            assert not starving.done()
        assert (await starving).status_code == 200

        log = await upstream.log()
        (starved,) = served(log, waiting[1])
        last = max(each["finished"] for each in served(log, hogging[1]))
        assert hog.failed == []
        assert starved["started"] > last
        assert starved["started"] - last < 1.5, "it is served as soon as the others stop"
        assert log["totals"]["loads_by_model"] == {hogging[1]: 1, waiting[1]: 1}


@pytest.mark.parametrize("bare", BARE)
async def test_of_twenty_requests_at_once_for_one_model_ten_are_refused_at_once(bare: Bare) -> None:
    async with bare(MATRIX, time_scale=SCALE) as upstream:
        await upstream.script("q27", hold=True)
        path, body = ask("chat", "q27")
        tasks = [asyncio.create_task(upstream.client.post(path, json=body)) for _ in range(20)]
        first_ten = [await each for each in itertools.islice(asyncio.as_completed(tasks), 10)]
        assert {each.status_code for each in first_ten} == {429}
        assert {each.headers["retry-after"] for each in first_ten} == {"1"}
        assert {each.json()["error"]["code"] for each in first_ten} == {"concurrency_limit"}
        await upstream.wait_running("q27", 10)
        await upstream.script("q27", hold=False)
        answers = await asyncio.gather(*tasks)
        assert sorted(each.status_code for each in answers) == [200] * 10 + [429] * 10


@pytest.mark.parametrize("bare", BARE)
async def test_queued_requests_count_against_the_limit_as_running_ones_do(bare: Bare) -> None:
    async with bare(MATRIX, time_scale=SCALE) as upstream:
        await upstream.script("q27", hold=True)
        path, body = ask("chat", "q27")
        running = asyncio.create_task(upstream.client.post(path, json=body))
        await upstream.wait_running("q27")
        path, body = ask("speech", "tts")
        speech = [asyncio.create_task(upstream.client.post(path, json=body)) for _ in range(11)]
        done, waiting = await asyncio.wait(speech, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status_code for task in done] == [429]
        await upstream.wait_queued(*["tts"] * 10)
        await upstream.script("q27", hold=False)
        assert {each.status_code for each in await asyncio.gather(running, *waiting)} == {200}


@pytest.mark.parametrize("bare", BARE)
async def test_of_alternating_requests_those_for_the_loaded_model_overtake_and_one_load_is_enough(
    bare: Bare,
) -> None:
    async with bare(MATRIX, time_scale=SCALE) as upstream:
        chat, speech = ask("chat", "q27"), ask("speech", "tts")
        await upstream.client.post(chat[0], json=chat[1])
        await upstream.reset()
        await upstream.script("q27", hold=True)
        tasks = []
        for pair in range(1, 11):
            tasks.append(asyncio.create_task(upstream.client.post(chat[0], json=chat[1])))
            await upstream.wait_running("q27", pair)
            tasks.append(asyncio.create_task(upstream.client.post(speech[0], json=speech[1])))
        await upstream.wait_queued(*["tts"] * 10)
        await upstream.script("q27", hold=False)
        answers = await asyncio.gather(*tasks)

        assert [each.status_code for each in answers] == [200] * 20
        log = await upstream.log()
        assert log["totals"]["loads_by_model"] == {"tts": 1}
        chats, speeches = served(log, "q27"), served(log, "tts")
        assert max(each["finished"] for each in chats) < min(each["started"] for each in speeches)
