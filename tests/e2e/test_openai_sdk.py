"""The real OpenAI SDK through a real proxy to a simulated llama-swap: what a user does on the first day."""

from __future__ import annotations

import wave
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from harness import Proxy
from simulator_support import Simulator


@pytest.fixture
async def simulator() -> AsyncIterator[Simulator]:
    async with Simulator(time_scale=0.02) as simulator:
        yield simulator


@pytest.fixture
async def proxy(simulator: Simulator) -> AsyncIterator[Proxy]:
    async with Proxy(simulator.url) as proxy:
        yield proxy


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


async def test_plain_chat_answers_with_the_lease_headers(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="chat-a", messages=[{"role": "user", "content": "hello"}]
    )
    assert raw.headers["x-lease-class"] == "llm"
    assert float(raw.headers["x-lease-wait"]) < 5
    assert raw.headers["server-timing"].startswith("lease;dur=")
    assert raw.parse().choices[0].message.content


async def test_streamed_chat_gives_the_same_text_as_the_simulator_alone(
    client: openai.AsyncOpenAI, simulator: Simulator
) -> None:
    async def text(of: openai.AsyncOpenAI) -> list[str]:
        stream = await of.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        return [part.choices[0].delta.content or "" async for part in stream if part.choices]

    async with openai.AsyncOpenAI(base_url=f"{simulator.url}/v1", api_key="none") as bare:
        expected = await text(bare)
    assert await text(client) == expected
    assert len(expected) > 5


async def test_speech_to_a_file_is_a_playable_wave(client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    target = tmp_path / "speech.wav"
    async with client.audio.speech.with_streaming_response.create(
        model="tts-a", voice="alloy", input="Hello.", response_format="wav"
    ) as response:
        assert response.headers["x-lease-class"] == "tts"
        await response.stream_to_file(target)
    with wave.open(str(target)) as audio:
        assert audio.getnframes() > 0


async def test_embeddings_take_no_lease_and_say_so(client: openai.AsyncOpenAI) -> None:
    raw = await client.embeddings.with_raw_response.create(model="embed-a", input=["one", "two"])
    assert raw.headers["x-lease-class"] == "embed"
    assert raw.headers["x-lease-wait"] == "0.000"
    assert len(raw.parse().data) == 2


async def test_transcription_is_classified_by_its_form_field(client: openai.AsyncOpenAI, simulator: Simulator) -> None:
    audio = ("speech.wav", b"RIFF" + bytes(300_000), "audio/wav")
    raw = await client.audio.transcriptions.with_raw_response.create(model="whisper-a", file=audio)
    assert raw.headers["x-lease-class"] == "stt"
    assert raw.parse().text
    assert [each["model"] for each in await simulator.requests()] == ["whisper-a"]


async def test_the_model_list_passes_without_a_lease(client: openai.AsyncOpenAI) -> None:
    raw = await client.models.with_raw_response.list()
    assert "x-lease-class" not in raw.headers
    assert {"chat-a", "tts-a", "embed-a"} <= {model.id for model in raw.parse().data}


async def test_an_unknown_model_is_an_sdk_error_and_leaves_nothing_held(
    client: openai.AsyncOpenAI, proxy: Proxy
) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    await proxy.drained()


async def test_a_request_without_a_model_is_refused_before_it_is_sent(
    client: openai.AsyncOpenAI, simulator: Simulator
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post("/chat/completions", body={"messages": []}, cast_to=object)
    assert caught.value.code == "model_undecidable"
    assert await simulator.requests() == []


async def test_the_simulator_dying_mid_stream_frees_the_lease_for_the_next(
    client: openai.AsyncOpenAI, proxy: Proxy, simulator: Simulator
) -> None:
    """llama-swap hides a dead model server behind a clean end; what it cannot hide is its own death."""
    await simulator.script("chat-a", hold=True)
    stream = await client.chat.completions.create(
        model="chat-a", messages=[{"role": "user", "content": "x"}], stream=True
    )
    assert (await anext(aiter(stream))).choices
    await proxy.until(holders=1)
    simulator._process.kill()
    with pytest.raises((openai.APIError, httpx.TransportError)):
        async for _ in stream:
            pass
    await proxy.drained()
    assert await proxy.metric('gpu_lease_exchanges_total{class="llm",outcome="upstream_truncated"}') == 1
