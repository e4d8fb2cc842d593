"""Models that fail, unloading, reloading, and the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import httpx
import pytest

from llama_swap_support import BARE, LlamaSwap
from proxy.simulator.__main__ import main
from simulator_support import SCALE, SMALL, Simulator, ask, send, states, until

if TYPE_CHECKING:
    from pathlib import Path

Bare = type[Simulator] | type[LlamaSwap]


# Models that fail.


async def test_a_failed_load_answers_500_and_has_cost_the_model_that_was_there() -> None:
    async with Simulator(SMALL, time_scale=SCALE) as simulator:
        await send(simulator, "chat", "a")
        await simulator.script("b", fail_load=1)
        answer = await send(simulator, "chat", "b")
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert await states(simulator) == {}
        assert (await send(simulator, "chat", "b")).status_code == 200


async def test_a_server_that_dies_in_mid_stream_looks_like_a_clean_end() -> None:
    async with Simulator(SMALL, time_scale=SCALE) as simulator:
        await simulator.script("a", fail="die_mid_stream", fail_after=2, fail_times=1)
        path, body = ask("chat", "a", stream=True)
        answer = await simulator.client.post(path, json=body)
        assert answer.status_code == 200
        assert answer.text.count("data: ") == 2
        assert "[DONE]" not in answer.text
        assert await states(simulator) == {}
        assert "[DONE]" in (await simulator.client.post(path, json=body)).text


async def test_a_server_that_dies_before_its_head_makes_an_empty_502() -> None:
    async with Simulator(SMALL, time_scale=SCALE) as simulator:
        answer = await send(simulator, "chat", "a", headers={"x-sim-fail": "die_before_headers"})
        assert (answer.status_code, answer.content) == (502, b"")
        refused = await send(simulator, "chat", "a", headers={"x-sim-fail": "503"})
        assert refused.status_code == 503
        assert "src" not in refused.json()


# Unloading and reloading.


@pytest.mark.parametrize("bare", BARE)
async def test_unloading_ends_a_stream_cleanly_and_refuses_those_that_wait_for_the_model(bare: Bare) -> None:
    async with bare(SMALL, time_scale=SCALE) as upstream:
        await upstream.script("a", hold=True)
        plain = send(upstream, "chat", "a")
        await upstream.wait_running("a")
        path, body = ask("chat", "a", stream=True)
        async with upstream.client.stream("POST", path, json=body) as stream:
            pieces = stream.aiter_text()
            first = await anext(pieces)
            waiting = send(upstream, "chat", "b")
            await upstream.wait_queued("b")
            answer = await upstream.client.get("/unload")
            assert (answer.status_code, answer.text) == (200, "OK")
            assert await states(upstream) == {}
            assert (await waiting).status_code == 500
            if bare is Simulator:  # the servers behind a real llama-swap do not end with its processes here
                assert (await plain).status_code == 502
                assert "[DONE]" not in "".join([first, *[piece async for piece in pieces]])
            await upstream.script("a", hold=False)
        await plain


async def test_unloading_one_model_leaves_the_others() -> None:
    async with Simulator(SMALL, time_scale=SCALE) as simulator:
        await send(simulator, "chat", "a")
        await send(simulator, "embed", "e")
        assert (await simulator.client.post("/api/models/unload/a")).text == "OK"
        assert await states(simulator) == {"e": "ready"}
        assert (await simulator.client.post("/api/models/unload/nobody")).status_code == 404
        assert (await simulator.client.post("/api/models/unload")).json() == {"msg": "ok"}
        assert await states(simulator) == {}


async def test_unloading_a_model_that_is_being_loaded_refuses_its_waiters() -> None:
    async with Simulator(SMALL, time_scale=SCALE) as simulator:
        waiting = send(simulator, "chat", "a")
        await until(simulator, {"a": "starting"})
        await simulator.client.get("/unload")
        assert (await waiting).status_code == 500
        assert await states(simulator) == {}
        assert (await send(simulator, "chat", "a")).status_code == 200


async def test_a_reload_stops_every_model_cuts_streams_cleanly_and_takes_the_new_configuration() -> None:
    async with Simulator(SMALL, time_scale=SCALE) as simulator, contextlib.AsyncExitStack() as feeds:
        await simulator.script("a", hold=True)
        path, body = ask("chat", "a", stream=True)
        stream = asyncio.create_task(simulator.client.post(path, json=body))
        await simulator.wait_running("a")
        waiting = send(simulator, "chat", "b")
        await simulator.wait_queued("b")
        events = await feeds.enter_async_context(simulator.client.stream("GET", "/api/events"))
        feed = asyncio.create_task(events.aread())
        await simulator.reload(SMALL.replace("  e:", "  f:").replace("& e", "& f"))
        assert "[DONE]" not in (await stream).text
        assert (await waiting).status_code == 500
        assert b"modelStatus" in await feed, "it has ended"
        assert await states(simulator) == {}
        answers = [await send(simulator, "embed", model) for model in ("e", "f")]
        assert [each.status_code for each in answers] == [404, 200]
        await simulator.reload(SMALL)
        assert (await send(simulator, "embed", "e")).status_code == 200


async def test_a_broken_configuration_leaves_the_old_one(capfd: pytest.CaptureFixture[str]) -> None:
    async with Simulator(SMALL, time_scale=SCALE) as simulator:
        await simulator.reload("[", wait=False)
        said = ""
        async with asyncio.timeout(10):
            while "the old configuration stays" not in said:
                assert (await send(simulator, "embed", "e")).status_code == 200
                said += capfd.readouterr().err


# The process.


async def test_a_broken_configuration_ends_the_start_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("models: {a: {name: '${env.NOT_SET_ANYWHERE}'}}")
    assert main(["--config", str(broken)]) == 2
    said = capsys.readouterr().err
    assert said == "simulator: environment variable 'NOT_SET_ANYWHERE' is not set\n"


async def test_sigterm_cuts_what_runs_and_exits_with_0(capfd: pytest.CaptureFixture[str]) -> None:
    async with Simulator(SMALL, time_scale=SCALE) as simulator:
        await simulator.script("a", hold=True)
        path, body = ask("chat", "a", stream=True)
        running = asyncio.create_task(simulator.client.post(path, json=body))
        await simulator.wait_running("a")
        waiting = send(simulator, "chat", "b")
        await simulator.wait_queued("b")
        async with asyncio.timeout(3):
            assert await simulator.terminate() == 0
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        for result in results:  # cut off, or a 500 where not even the head was out
            assert isinstance(result, httpx.RemoteProtocolError | httpx.Response)
            assert isinstance(result, httpx.RemoteProtocolError) or result.status_code == 500
    assert capfd.readouterr().err == ""
