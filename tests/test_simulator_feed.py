"""What is told of what happens inside: the event feed, the loading state, our own journal."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from llama_swap_support import BARE, LlamaSwap
from simulator_support import SCALE, SMALL, Simulator, ask, send, states

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Bare = type[Simulator] | type[LlamaSwap]


async def _messages(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    kind = ""
    async for line in answer.aiter_lines():
        if line.startswith("data:"):
            envelope = json.loads(line.removeprefix("data:"))
            yield envelope["type"], json.loads(envelope["data"])
        elif line:
            kind = line
            assert kind == "event:message"


@pytest.mark.parametrize("bare", BARE)
async def test_the_feed_shows_each_state_of_each_model_and_the_active_profile(bare: Bare) -> None:
    profiled = SMALL + "profiles: {night: {pins: {a: b}}}\n"
    async with bare(profiled, time_scale=SCALE) as upstream:
        async with upstream.client.stream("GET", "/api/events") as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            assert answer.headers["x-accel-buffering"] == "no"
            messages = _messages(answer)
            seen: list[tuple[str, ...]] = []
            profiles: list[str | None] = []
            keys: set[str] = set()
            tasks: list[asyncio.Task[httpx.Response]] = []
            async for kind, data in messages:
                if kind == "modelStatus":
                    keys = set(data[0])
                    seen.append(tuple(f"{each['id']} {each['state']}" for each in data if each["state"] != "stopped"))
                    if len(tasks) == 0:
                        tasks.append(send(upstream, "chat", "a"))
                    elif len(tasks) == 1 and seen[-1] == ("a ready",):
                        tasks.append(send(upstream, "chat", "b"))
                    elif seen[-1] == ("b ready",):
                        await upstream.client.put("/api/profiles/active", json={"name": "night"})
                elif kind == "profileChanged":
                    profiles.append(data["active"])
                    if data["active"]:
                        break
        order = [(), ("a starting",), ("a ready",), ("a stopping",), ("b starting",), ("b ready",)]
        distinct = list(dict.fromkeys(each for each in seen if each))
        assert seen[0] == ()
        # A real llama-swap takes its snapshots a little late, so that a short state may be missing.
        assert distinct == [each for each in order if each in distinct]
        assert {("a ready",), ("b ready",)} <= set(distinct)
        assert bare is LlamaSwap or distinct == order[1:]
        assert profiles == [None, "night"]
        assert keys == {"id", "name", "description", "state", "unlisted", "peerID"}
        await asyncio.gather(*tasks)


async def test_feeds_do_not_end_and_stand_in_nobodys_way() -> None:
    async with Simulator(SMALL, time_scale=SCALE) as simulator, contextlib.AsyncExitStack() as feeds:
        endings = []
        for path in ("/logs/stream", "/logs/stream/a", "/api/events"):
            answer = await feeds.enter_async_context(simulator.client.stream("GET", path))
            endings.append(asyncio.create_task(answer.aread()))
        assert (await send(simulator, "chat", "a")).status_code == 200
        assert (await send(simulator, "chat", "b")).status_code == 200
        assert [each.done() for each in endings] == [False] * 3
        assert [each["path"] for each in await simulator.requests()] == [ask("chat", "a")[0]] * 2
        for each in endings:
            each.cancel()
        await asyncio.wait(endings)


async def test_with_loading_state_a_streamed_chat_hears_of_the_load_before_its_first_word() -> None:
    async with Simulator(SMALL + "sendLoadingState: true\n", time_scale=SCALE) as simulator:
        path, body = ask("chat", "a", stream=True)
        async with simulator.client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            pieces = answer.aiter_text()
            first = await anext(pieces)
            assert "reasoning_content" in first
            assert "a" not in [each for each, state in (await states(simulator)).items() if state == "ready"]
            rest = "".join([piece async for piece in pieces])
        assert "a says" in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert "reasoning_content" not in (await simulator.client.post(path, json=body)).text


async def test_the_journal_tells_a_load_from_a_wait() -> None:
    async with Simulator(SMALL, time_scale=SCALE) as simulator:
        await simulator.script("a", hold=True)
        first = send(simulator, "chat", "a", headers={"x-request-id": "one", "authorization": "Bearer secret"})
        await simulator.wait_running("a")
        second = send(simulator, "chat", "b")
        await simulator.wait_queued("b")
        await simulator.script("a", hold=False)
        await asyncio.gather(first, second)
        (a, b), totals = await simulator.requests(), await simulator.totals()
        assert a["headers"]["x-request-id"] == "one"
        assert "authorization" not in a["headers"]
        assert (a["model"], a["loads"], a["queued"], a["status"]) == ("a", True, False, 200)
        assert a["load"] == pytest.approx(4 * SCALE, abs=0.15)
        assert a["waited"] == pytest.approx(0, abs=0.1)
        assert a["arrived"] < a["started"] < a["first_byte"] <= a["finished"]
        assert (b["model"], b["loads"], b["queued"]) == ("b", True, True)
        assert b["started"] - b["arrived"] == pytest.approx(b["waited"] + b["load"])
        assert totals == {
            "loads": 2, "loads_by_model": {"a": 1, "b": 1}, "evictions": 1, "stopped_busy": 0,
            "queued_inside": 1, "max_queued_inside": 1,
        }  # fmt: skip
        await simulator.reset()
        assert (await simulator.log())["requests"] == []


async def test_a_script_that_names_no_model_or_no_key_is_refused_as_a_whole() -> None:
    async with Simulator(SMALL, time_scale=SCALE) as simulator:
        all_wrong: list[Any] = [{"a": {"load": 0}, "nobody": {}}, {"a": {"lode": 1}}, [], {"a": 5}]
        for wrong in all_wrong:
            answer = await simulator.client.post("/_sim/script", json=wrong)
            assert answer.status_code == 400, wrong
