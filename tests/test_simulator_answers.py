"""The simulated model servers' answers, read by the clients that people use, and how requests are read."""

from __future__ import annotations

import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proxy.simulator import create_app, default_config, parse_config, stopped_by
from proxy.simulator.tolerant_json import first_value
from simulator_support import Simulator, ask, send_raw

VECTORS = Path(__file__).parent / "vectors" / "json_model.jsonl"
WORDS = "chat-a says word1 word2 word3"
CHUNKS = {"x-sim-chunks": "4"}


async def test_the_openai_sdk_reads_every_answer() -> None:
    async with (
        Simulator(time_scale=0.01) as simulator,
        openai.AsyncOpenAI(base_url=f"{simulator.url}/v1", api_key="x", default_headers=CHUNKS) as client,
    ):
        messages: Any = [{"role": "user", "content": "x"}]
        chat = await client.chat.completions.create(model="gpt-4o", messages=messages)
        assert (chat.model, chat.choices[0].message.content) == ("gpt-4o", WORDS)
        stream = await client.chat.completions.create(model="chat-a", messages=messages, stream=True)
        parts = [chunk.choices[0] async for chunk in stream]
        assert "".join(part.delta.content or "" for part in parts) == WORDS
        assert parts[-1].finish_reason == "stop"

        text = await client.completions.create(model="chat-a", prompt="x")
        assert text.choices[0].text == WORDS
        texts = await client.completions.create(model="chat-a", prompt="x", stream=True)
        assert "".join([part.choices[0].text async for part in texts]) == WORDS

        response = await client.responses.create(model="chat-a", input="x")
        assert response.output_text == WORDS
        events = [event async for event in await client.responses.create(model="chat-a", input="x", stream=True)]
        assert [event.type for event in events][:2] == ["response.created", "response.output_text.delta"]
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == WORDS

        vectors = await client.embeddings.create(model="embed-a", input=["x", "y"], encoding_format="float")
        assert [len(each.embedding) for each in vectors.data] == [8, 8]
        heard = await client.audio.transcriptions.create(model="whisper-a", file=("a.wav", b"x"))
        assert heard.text == "whisper-a heard you"
        plain = await client.audio.transcriptions.create(
            model="whisper-a", file=("a.wav", b"x"), response_format="text"
        )
        assert plain == "whisper-a heard you\n"
        image = await client.images.generate(model="chat-b", prompt="x")
        assert image.data is not None
        assert base64.b64decode(image.data[0].b64_json or "").startswith(b"\x89PNG")
        listed = {model.id async for model in client.models.list()}
        assert listed == {"chat-a", "chat-b", "vision-a", "tts-a", "whisper-a", "embed-a"}
        with pytest.raises(openai.NotFoundError, match="no router for requested model"):
            await client.chat.completions.create(model="nobody", messages=messages)


async def test_speech_is_a_wave_file_that_grows_with_its_chunks() -> None:
    async with Simulator(time_scale=0.01) as simulator:
        path, body = ask("speech", "tts-a")
        answer = await simulator.client.post(path, json=body, headers=CHUNKS)
        assert answer.headers["content-type"] == "audio/wav"
        with wave.open(io.BytesIO(answer.content)) as sound:
            assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (1, 2, 24_000)
            assert sound.getnframes() == 4 * 2_400


async def test_anthropic_messages_stream_their_events_in_order() -> None:
    async with Simulator(time_scale=0.01) as simulator:
        body = {"model": "chat-a", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        whole = (await simulator.client.post("/v1/messages", json=body, headers=CHUNKS)).json()
        assert whole["content"] == [{"type": "text", "text": WORDS}]
        answer = await simulator.client.post("/v1/messages", json={**body, "stream": True}, headers=CHUNKS)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert [event["type"] for event in events] == [
            "message_start", "content_block_start", *["content_block_delta"] * 4, "content_block_stop",
            "message_delta", "message_stop",
        ]  # fmt: skip
        assert "".join(event["delta"]["text"] for event in events[2:-3]) == WORDS
        counted = await simulator.client.post("/v1/messages/count_tokens", json=body)
        assert counted.json() == {"input_tokens": 5}


async def test_event_streams_arrive_piece_by_piece_and_ask_not_to_be_buffered() -> None:
    async with Simulator(time_scale=1) as simulator:
        await simulator.script("chat-a", load=0, work=0, chunks=3, chunk_interval=0, hold=True)
        path, body = ask("chat", "chat-a", stream=True)
        async with simulator.client.stream("POST", path, json=body) as answer:
            assert answer.headers["x-accel-buffering"] == "no"
            assert answer.headers["x-sim-model"] == "chat-a"
            pieces, text = answer.aiter_text(), ""
            while text.count("data: ") < 3:
                text += await anext(pieces)
            assert "[DONE]" not in text
            await simulator.script("chat-a", hold=False)
            text += "".join([piece async for piece in pieces])
        assert text.endswith("data: [DONE]\n\n")


OTHERS: dict[str, dict[str, Any]] = {
    "/v1/rerank": {"results": [{"index": 0, "relevance_score": 1.0}, {"index": 1, "relevance_score": 0.5}]},
    "/v1/audio/voices": {"voices": ["alloy", "echo"]},
    "/completion": {"content": WORDS, "stop": True},
    "/v/completions": {"object": "text_completion"},
    "/sdapi/v1/txt2img": {"images": []},
    "/audioapi/v1/tasks/run": {"model": "chat-a"},
    "/upstream/chat-a/v1/completions": {"object": "text_completion"},
    "/upstream/gpt-4o/a%2Fb%20c?d=%7E": {"model": "chat-a", "method": "POST", "target": "/a%2Fb%20c?d=%7E"},
    "/upstream/chat%2Da/": {"model": "chat-a", "method": "POST", "target": "/"},
    "/upstream/chat-a/health": {"model": "chat-a", "method": "POST", "target": "/health"},
}


async def test_the_other_answers_and_the_echo_of_what_no_api_has() -> None:
    async with Simulator(time_scale=0) as simulator:
        body = json.dumps({"model": "chat-a", "documents": ["x", "y"]}).encode()
        headers = {"Content-Type": "application/json", **CHUNKS}
        for target, expected in OTHERS.items():
            answer = await send_raw(simulator.url, "POST", target, headers, body)
            assert answer.status == 200, target
            value = json.loads(answer.body)
            assert {key: value[key] for key in expected} == expected


async def test_a_streamed_llama_cpp_completion_ends_with_stop() -> None:
    async with Simulator(time_scale=0) as simulator:
        body = {"model": "chat-a", "prompt": "x", "stream": True}
        answer = await simulator.client.post("/completion", json=body, headers=CHUNKS)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
        assert [event["stop"] for event in events] == [False] * 4 + [True]


async def test_a_model_on_a_peer_is_answered_for_without_a_load() -> None:
    peers = 'peers: {far: {proxy: "http://127.0.0.1:9", models: [there, both]}, away: {models: [both]}}\n'
    async with Simulator("models: {a: {}}\n" + peers, time_scale=0) as simulator:
        answers = [
            await simulator.client.post("/v1/embeddings", json={"model": name, "input": "x"})
            for name in ("there", "far/there", "far/both", "away/both", "both")
        ]
        assert [each.status_code for each in answers] == [200, 200, 200, 200, 404]
        assert (await simulator.totals())["loads"] == 0
        assert (await simulator.client.get("/running")).json() == {"running": []}


async def test_it_runs_in_the_process_of_another_program_too() -> None:
    transport = httpx.ASGITransport(app=create_app(default_config(), time_scale=0))
    async with httpx.AsyncClient(transport=transport, base_url="http://simulated") as client:
        path, body = ask("embed", "embed-a")
        assert (await client.post(path, json=body)).status_code == 200
        assert (await client.get("/_sim/log")).json()["totals"]["loads"] == 1


def test_in_the_default_configuration_five_models_exclude_each_other_and_one_is_beside_all() -> None:
    config = default_config()
    large = {"chat-a", "chat-b", "vision-a", "tts-a", "whisper-a"}
    for model in large:
        assert stopped_by(config, model, {*large, "embed-a"} - {model}) == large - {model}
        assert stopped_by(config, "embed-a", {model}) == set()


def test_the_json_reader_finds_what_llama_swaps_own_parser_finds() -> None:
    wrong = []
    for line in VECTORS.read_text(encoding="utf-8").splitlines():
        vector = json.loads(line)
        found = first_value(base64.b64decode(vector["body_b64"]), "model")
        text = found if isinstance(found, str) else "" if found is None else str(found).lower()
        if text.encode("utf-8", "surrogateescape") != base64.b64decode(vector["model_b64"]):
            wrong.append(vector["name"])
    assert wrong == []


def test_macros_and_the_environment_stand_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMULATED_KEY", "secret")
    config = parse_config("""
# ${env.NOT_SET_ANYWHERE} in a comment does no harm
macros: {size: big, both: "${size}-one"}
apiKeys: ["${env.SIMULATED_KEY}"]
models:
  a:
    macros: {size: small}
    aliases: ["${MODEL_ID}-${size}", "${both}", no]
    concurrencyLimit: 7
    filters: {setParamsByID: {"${MODEL_ID}:high": {}, a: {}}}
""")
    assert config.api_keys == ("secret",)
    assert config.models["a"].aliases == ("a-small", "small-one", "no", "a:high")
    assert config.models["a"].limit == 7
