"""The cases of cases.md, with llama-swap's configuration known: names, auth, health under load, reloads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from known_support import Pair, asked, clients_of, eventually, known, written

from harness import InProcess, RawClient, Upstream
from simulator_support import RawAnswer, Simulator, send_raw

CONFIG = """
models:
  chat-a: {aliases: [gpt-4o, openai/chat-a], simulator: {load: 0.2, work: 0.1, chunks: 2, chunk_interval: 0.1}}
  chat-b: {simulator: {load: 0.2, work: 0.1, chunks: 2, chunk_interval: 0.1}}
  team/chat: {simulator: {load: 0.2, work: 0.1}}
  tts-a: {simulator: {load: 0.2, work: 0.1, chunks: 2, chunk_interval: 0.1}}
  embed-a: {simulator: {load: 0.2, work: 0.1}}
  sd-a: {capabilities: {out: [image]}, simulator: {load: 0.2, work: 0.1}}
  comfyui_auto: {simulator: {load: 0.2, work: 0.1}}
selectors:
  fast: {strategy: pin, targets: [chat-b]}
profiles:
  night: {pins: {gpt-4o: tts-a, day-only: ""}}
matrix:
  vars: {slashed: team/chat}
  sets: {all: (chat-a | chat-b | slashed | tts-a | sd-a | comfyui_auto) & embed-a}
"""
SCALE = 0.05
JSON = {"Content-Type": "application/json"}


def body(model: str) -> bytes:
    return b'{"model":"%s","input":"x","messages":[]}' % model.encode()


async def sent(pair: Pair, method: str, target: str, data: bytes = b"", **headers: str) -> RawAnswer:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return await send_raw(pair.url, method, target, fields, data)


async def class_of(pair: Pair, method: str, target: str, data: bytes = b"", **headers: str) -> str:
    """`status class`, or the status alone where there was no lease."""
    answer = await sent(pair, method, target, data, **headers)
    return f"{answer.status} {answer.headers.get('x-lease-class', '')}".strip()


# --- case 58


async def test_case_58_names_are_resolved_before_the_class_is_decided() -> None:
    chat = ("POST", "/v1/chat/completions")
    async with known(CONFIG, time_scale=SCALE) as pair, clients_of(pair.url) as client:
        for name in ("gpt-4o", "openai/chat-a", "team/chat", "fast"):
            assert await class_of(pair, *chat, body(name), content_type="application/json") == "200 llm"
        assert (await client.put("/api/profiles/active", json={"name": "night"})).status_code == 200
        assert await class_of(pair, *chat, body("gpt-4o"), content_type="application/json") == "200 tts"
        assert (await client.put("/api/profiles/active", json={"name": "nobody"})).status_code == 404
        assert await class_of(pair, *chat, body("gpt-4o"), content_type="application/json") == "200 tts"
        assert (await client.put("/api/profiles/active", json={"name": None})).status_code == 200
        assert await class_of(pair, *chat, body("gpt-4o"), content_type="application/json") == "200 llm"
        # By somebody who does not go through the proxy, which hears of it as an event.
        await pair.simulator.client.put("/api/profiles/active", json={"name": "night"})

        async def pinned() -> bool:
            return await class_of(pair, *chat, body("gpt-4o"), content_type="application/json") == "200 tts"

        await eventually(pinned)
        await pair.untroubled()


@pytest.mark.parametrize("accept", ["*/*", "text/plain, */*", "text/html"])
async def test_case_58_an_unknown_name_gets_llama_swaps_own_answer_also_while_others_wait(accept: str) -> None:
    async with known(CONFIG, time_scale=SCALE) as pair, clients_of(pair.url) as client:
        holding = asyncio.create_task(asked(client, "speech", "tts-a", x_sim_hold="held"))
        await pair.proxy.until(holders=1)
        waiting = asyncio.create_task(asked(client, "chat", "chat-a"))
        await pair.proxy.until(waiters=1)
        for target, name in (("/v1/chat/completions", "Chat-A"), ("/v1/audio/speech", " chat-a "), ("/rerank", "x")):
            headers = {**JSON, "Accept": accept}
            here = await send_raw(pair.url, "POST", target, headers, body(name))
            there = await send_raw(pair.simulator.url, "POST", target, headers, body(name))
            assert (here.status, here.body) == (there.status, there.body) == (404, there.body)
            assert here.headers["content-type"].split(";")[0] == there.headers["content-type"].split(";")[0]
        paths = [each["path"] for each in await pair.simulator.requests()]
        assert paths.count("/rerank") == 1, "the proxy answered by itself"
        await pair.simulator.release("held")
        assert {(await holding).status, (await waiting).status} == {200}
        await pair.untroubled()


async def test_case_58_without_a_configuration_the_listing_gives_names_and_unknown_ones_take_the_default() -> None:
    async with (
        Simulator(CONFIG, time_scale=SCALE) as simulator,
        InProcess(simulator.url) as proxy,
        clients_of(f"http://127.0.0.1:{proxy.port}") as client,
    ):
        await proxy.until(lambda: proxy.app._knowledge.classifier.catalog is not None)
        call = await client.post("/v1/audio/speech", json={"model": "openai/chat-a", "input": "x"})
        assert call.headers["x-lease-class"] == "tts"  # nothing but the route is known of its class
        unknown = await client.post("/v1/chat/completions", json={"model": "nobody", "messages": []})
        assert (unknown.status_code, unknown.headers["x-lease-class"]) == (404, "llm")
        labels = {"class": "llm", "model": "other", "code": "404"}
        assert proxy.metric("gpu_lease_requests_total", **labels) == 1
        await proxy.idle()


# --- case 59


async def test_case_59_whatever_loads_is_leased_and_nothing_else_also_while_speech_holds_the_gpu() -> None:
    async with known(CONFIG, time_scale=SCALE) as pair, clients_of(pair.url) as client:
        assert await class_of(pair, "GET", "/v1/audio/voices?model=tts-a") == "200 tts"
        assert await class_of(pair, "GET", "/props?model=chat-b") == "200 llm"
        assert await class_of(pair, "GET", "/upstream/tts-a/health") == "200 tts"
        assert await class_of(pair, "GET", "/comfyui/") == "200 image"
        data = body("sd-a")
        assert await class_of(pair, "POST", "/sdapi/v1/txt2img", data, content_type="application/json") == "200 image"
        holding = asyncio.create_task(asked(client, "speech", "tts-a", x_sim_hold="held"))
        await pair.proxy.until(holders=1)
        for path in ("/v1/models", "/health", "/metrics", "/running", "/ui/", "/upstream/chat-a/x.css", "/comfyui/x"):
            answer = await sent(pair, "GET", path)
            assert (answer.status in {200, 409}, "x-lease-class" in answer.headers) == (True, False)
        async with client.stream("GET", "/api/events") as events:
            assert "modelStatus" in await anext(line async for line in events.aiter_lines() if "modelStatus" in line)
            assert len((await pair.proxy.queue())["holders"]) == 1
        assert not holding.done()
        await pair.simulator.release("held")
        assert (await holding).status == 200
        await pair.untroubled()


# --- cases 63 and 64

TYPES = [
    (None, "", "400"),
    ("text/plain", "", "400"),
    ("Application/JSON", "", "400"),
    ("application/vnd.x+json", "", "400"),
    ("application/json;charset=utf-8", "", "200 tts"),
    (None, "?model=chat-a", "200 llm"),
    ("text/plain", "?model=chat-a", "200 llm"),
    ("Application/JSON", "?model=chat-a", "200 llm"),
    ("application/json;charset=utf-8", "?model=chat-a", "200 tts"),
]
PATHS = [
    ("/v1/audio/speech", "200 tts"),
    ("/v1/audio/speech/", "404"),
    ("/audio/speech", "404"),
    ("/v/audio/speech", "404"),
    ("/v/embeddings", "200 tts"),
    ("//v1/audio/speech", "307"),
    ("/v1/audio/../audio/speech", "307"),
]


async def test_case_63_the_content_type_decides_where_the_name_is_read() -> None:
    async with known(CONFIG, time_scale=0.005) as pair:
        for content_type, query, expected in TYPES:
            await pair.simulator.reset()
            fields = {"content_type": content_type} if content_type else {}
            found = await class_of(pair, "POST", f"/v1/chat/completions{query}", body("tts-a"), **fields)
            assert (content_type, query, found) == (content_type, query, expected)
            ran = [each["model"] for each in await pair.simulator.requests()]
            assert ran == {"400": [], "200 tts": ["tts-a"], "200 llm": ["chat-a"]}[expected]
        await pair.untroubled()


async def test_case_64_a_path_is_leased_or_refused_by_llama_swap_and_never_speaks_unleased() -> None:
    async with known(CONFIG, time_scale=0.005) as pair:
        for path, expected in PATHS:
            await pair.simulator.reset()
            found = await class_of(pair, "POST", path, body("tts-a"), content_type="application/json")
            assert (path, found) == (path, expected)
            ran = [each["model"] for each in await pair.simulator.requests() if each["started"] is not None]
            assert ran == (["tts-a"] if expected == "200 tts" else [])
        await pair.untroubled()


# --- case 44


async def test_case_44_a_preflight_passes_without_a_key_and_without_a_lease() -> None:
    keyed = f"apiKeys: [sesame]\n{CONFIG}"
    headers = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
    async with known(keyed, time_scale=SCALE, api_keys=["ours"]) as pair:
        for path in ("/v1/chat/completions", "/v1/audio/speech", "/upstream/tts-a/x", "/nowhere", "/v1/models"):
            here = await send_raw(pair.url, "OPTIONS", path, headers)
            there = await send_raw(pair.simulator.url, "OPTIONS", path, headers)
            assert here.status == there.status == 204
            allowed = [name for name in there.headers if name.startswith("access-control-")]
            assert allowed
            assert {name: here.headers[name] for name in allowed} == {name: there.headers[name] for name in allowed}
            assert "x-lease-class" not in here.headers
        assert await pair.simulator.requests() == []
        pair.proxy.client.headers["Authorization"] = "Bearer ours"
        await pair.untroubled()


# --- case 80


async def test_case_80_its_own_pages_answer_while_a_hundred_wait() -> None:
    settings = {"max_queue_per_client": 200}
    async with known(CONFIG, time_scale=SCALE, **settings) as pair, clients_of(pair.url) as client:
        holding = asyncio.create_task(asked(client, "speech", "tts-a", x_sim_hold="held"))
        await pair.proxy.until(holders=1)
        waiting = [asyncio.create_task(asked(client, "chat", "chat-a")) for _ in range(100)]
        await pair.proxy.until(waiters=100, within=20)
        for path in ("/-/healthz", "/-/readyz", "/-/metrics", "/-/queue"):
            times = []
            for _ in range(5):
                begin = time.monotonic()
                answer = await pair.proxy.client.get(path)
                times.append(time.monotonic() - begin)
                assert answer.status_code == 200
                assert "x-lease-class" not in answer.headers
            assert min(times) < 0.1
        assert (await asked(client, "embed", "embed-a")).lease_wait == 0
        await pair.simulator.release("held")
        assert {each.status for each in await asyncio.gather(holding, *waiting)} == {200}
        await pair.untroubled()


# --- case 81

MULTIPART = {"Content-Type": "multipart/form-data; boundary=xx"}
PARTS = b'--xx\r\nContent-Disposition: form-data; name="model"\r\n\r\ntts-a\r\n--xx--\r\n'


@pytest.mark.parametrize("ours", [False, True])
async def test_case_81_a_key_reaches_llama_swap_or_is_replaced_and_is_never_logged(ours: bool, tmp_path: Path) -> None:
    config = written(tmp_path / "llama-swap.yaml", f"apiKeys: [sesame, second]\n{CONFIG}")
    settings: dict[str, Any] = {"llama_swap_config": config} | ({"api_keys": ["our-own"]} if ours else {})
    key, arrives = (b"our-own", b"Bearer sesame") if ours else (b"second", b"Bearer second")
    async with Upstream() as upstream, InProcess(upstream.url, **settings) as proxy:
        for headers, data in ((JSON, body("tts-a")), (MULTIPART, PARTS)):
            for field in (f"Bearer {key.decode()}", None):
                given = {**headers, "Authorization": field} if field else headers
                url = f"http://127.0.0.1:{proxy.port}"
                answer = await send_raw(url, "POST", "/v1/audio/transcriptions", given, data)
                assert answer.status == (200 if field else 401)
                if field is None:
                    continue
                assert answer.headers["x-lease-class"] == "tts"
                assert dict(upstream.seen[-1].headers)[b"authorization"] == arrives
        assert len(upstream.seen) == 2
        await proxy.idle()


async def test_case_81_with_llama_swaps_keys_its_own_401_comes_before_the_body_is_read() -> None:
    async with known(f"apiKeys: [sesame]\n{CONFIG}", time_scale=SCALE) as pair:
        async with RawClient(pair.proxy.port) as raw:
            raw.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                b"Content-Length: 1000000\r\n\r\n{"
            )
            answer = await raw.answer()
        there = await send_raw(pair.simulator.url, "POST", "/v1/chat/completions", JSON, body("tts-a"))
        assert (answer.status, answer.body) == (there.status, there.body) == (401, there.body)
        assert answer.headers["www-authenticate"] == there.headers["www-authenticate"]
        for name, value in (
            ("Authorization", "Bearer sesame"),
            ("Authorization", "Basic eDpzZXNhbWU="),
            ("X-Api-Key", "sesame"),
        ):
            given = await send_raw(pair.url, "POST", "/v1/audio/speech", {**JSON, name: value}, body("tts-a"))
            assert (given.status, given.headers["x-lease-class"]) == (200, "tts")

        async def measured() -> bool:
            return "tts-a" in (await _queue(pair, "sesame"))["load_seconds"]

        await eventually(measured)  # for its own questions carry the first of the keys
        assert "sesame" not in "\n".join(pair.proxy.lines)


async def _queue(pair: Pair, key: str) -> dict[str, Any]:
    answer = await pair.proxy.client.get("/-/queue", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    queue: dict[str, Any] = answer.json()
    return queue


# --- case 83


async def test_case_83_a_reload_keeps_what_is_held_and_what_waits_and_counts_from_then_on() -> None:
    async with known(CONFIG, time_scale=SCALE, watch_config=False) as pair, clients_of(pair.url) as client:
        holding = asyncio.create_task(asked(client, "speech", "tts-a", x_sim_hold="held"))
        await pair.proxy.until(holders=1)
        waiting = [asyncio.create_task(asked(client, "chat", model)) for model in ("chat-a", "chat-b")]
        before = await pair.proxy.until(waiters=2)
        written(pair.config, CONFIG.replace("(chat-a | chat-b", "(chat-a & chat-b"))
        pair.proxy.signal(1)

        async def read_again() -> bool:
            return [line.get("event") for line in pair.proxy.log].count("names_from") == 2

        await eventually(read_again)
        after = await pair.proxy.queue()
        for kind in ("holders", "waiters"):
            assert [each["id"] for each in after[kind]] == [each["id"] for each in before[kind]]
            assert [(each["class"], each["mode"]) for each in after[kind]] == [
                (each["class"], each["mode"]) for each in before[kind]
            ]
        await pair.simulator.release("held")
        assert {each.status for each in await asyncio.gather(holding, *waiting)} == {200}
        await pair.proxy.until(waiters=0, holders=0)


async def test_case_83_llama_swaps_reload_stops_every_model_and_the_next_requests_load_again() -> None:
    async with known(CONFIG, time_scale=SCALE) as pair, clients_of(pair.url) as client:
        assert (await asked(client, "chat", "chat-a")).status == 200
        cut = asyncio.create_task(asked(client, "chat", "chat-a", x_sim_hold="never"))
        await pair.simulator.wait_running("chat-a")
        # The reload cuts the stream cleanly, and leaves nothing loaded; the proxy sees the same new file by itself.
        changed = CONFIG.replace("models:\n", "models:\n  chat-c: {}\n", 1).replace("(chat-a |", "(chat-c | chat-a |")
        await pair.simulator.reload(changed)
        with pytest.raises(httpx.RemoteProtocolError):  # which shows as half an answer, though its end was clean
            await cut

        async def served(model: str) -> bool:
            with contextlib.suppress(httpx.RemoteProtocolError):
                return (await asked(client, "chat", model)).status == 200
            return False

        await eventually(lambda: served("chat-a"))  # one that meets the reload itself is cut off with it, as bare
        assert [(await asked(client, "chat", model)).status for model in ("tts-a", "chat-b")] == [200] * 2
        await eventually(lambda: served("chat-c"))
        await pair.untroubled()


async def test_case_83_a_broken_file_keeps_the_old_configuration() -> None:
    async with known(CONFIG, time_scale=SCALE) as pair, clients_of(pair.url) as client:
        written(pair.config, "models: [")
        pair.proxy.signal(1)
        assert (await pair.proxy.logged("llama_swap_config_broken"))["kept"]
        call = await asked(client, "chat", "gpt-4o")
        assert (call.status, call.lease_class) == (200, "llm")


@pytest.mark.parametrize("hours", [1, -1])
async def test_case_83_a_step_of_the_wall_clock_moves_no_wait_and_times_nobody_out(
    hours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(tmp_path / "llama-swap.yaml", CONFIG)
    async with (
        Simulator(config, time_scale=SCALE) as simulator,
        InProcess(simulator.url, llama_swap_config=config, max_wait=60) as proxy,
        clients_of(f"http://127.0.0.1:{proxy.port}") as client,
    ):
        holding = asyncio.create_task(asked(client, "speech", "tts-a", x_sim_hold="held"))
        await simulator.wait_running("tts-a")
        waiting = asyncio.create_task(asked(client, "chat", "chat-a"))
        await proxy.until(lambda: proxy.app.leases.lock.waiting_count == 1)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
        await asyncio.sleep(1.2)  # one sweep of what is held, and one look at what is resident
        queue = (await client.get("/-/queue")).json()
        assert 0 <= queue["waiters"][0]["waited_seconds"] < 30
        assert 0 <= queue["holders"][0]["held_seconds"] < 30
        await simulator.release("held")
        spoken, chat = await asyncio.gather(holding, waiting)
        assert spoken.status == chat.status == 200
        assert 0 < chat.lease_wait < 30
        await proxy.idle()


def test_the_cases_are_told_in_words() -> None:
    told = (Path(__file__).parents[1] / "cases.md").read_text(encoding="utf-8")
    for number in (44, 58, 59, 63, 64, 73, 80, 81, 83):
        assert f"**{number}. " in told
