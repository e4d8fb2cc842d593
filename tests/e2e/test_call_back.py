"""A server behind llama-swap that asks the proxy for another model while it answers, which docs/clients.md forbids.

It waits for a lease that its own request keeps from being granted. Nobody can know that the two belong together, so
the wait ends where every wait does, at `max_wait`, and then everything goes on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from harness import CHAT, TTS, Proxy, RawClient, Script, Seen, Upstream, answer

MAX_WAIT = 1.0

CHAT_PATH = "/v1/chat/completions"


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as upstream:
        yield upstream


@pytest.fixture
async def proxy(upstream: Upstream) -> AsyncIterator[Proxy]:
    async with Proxy(upstream.url, max_wait=MAX_WAIT, keepalive_after=0.1, keepalive_every=0.1) as proxy:
        yield proxy


def calling_back(proxy: Proxy, path: str, body: dict[str, Any], got: list[httpx.Response]) -> Script:
    """A model server that needs another model's answer for its own, and gives both away together."""

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        response = await proxy.client.post(path, json=body)
        got.append(response)
        status = "200 OK" if response.is_success else "500 Internal Server Error"
        await answer(response.content, status)(seen, reader, writer)

    return script


async def test_a_speech_server_that_calls_back_gets_a_queue_timeout_and_nothing_hangs(
    proxy: Proxy, upstream: Upstream
) -> None:
    got: list[httpx.Response] = []
    upstream.by_model["tts-a"] = calling_back(proxy, CHAT_PATH, CHAT | {"stream": False}, got)
    response = await proxy.client.post("/v1/audio/speech", json=TTS)
    assert [each.status_code for each in got] == [503]
    assert got[0].json()["error"]["code"] == "queue_timeout"
    assert (response.status_code, response.content) == (500, got[0].content)
    assert not upstream.of_model("chat-a")
    await proxy.drained(upstream)


async def test_a_streamed_call_back_ends_with_an_error_event(proxy: Proxy, upstream: Upstream) -> None:
    told = bytearray()

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with RawClient(proxy.port) as inner:
            inner.chat()
            told.extend(await inner.rest())
        await answer(b"no text to read", "500 Internal Server Error")(seen, reader, writer)

    upstream.by_model["tts-a"] = script
    response = await proxy.client.post("/v1/audio/speech", json=TTS)
    assert response.status_code == 500
    assert b": queued\n\n" in told
    errors = [json.loads(line.removeprefix(b"data: ")) for line in told.splitlines() if line.startswith(b"data: ")]
    assert [error["error"]["code"] for error in errors] == ["queue_timeout"]
    await proxy.drained(upstream)


async def test_a_chat_server_that_calls_back_for_speech_is_no_better_off(proxy: Proxy, upstream: Upstream) -> None:
    got: list[httpx.Response] = []
    upstream.by_model["chat-a"] = calling_back(proxy, "/v1/audio/speech", TTS, got)
    response = await proxy.client.post(CHAT_PATH, json=CHAT | {"stream": False})
    assert response.status_code == 500
    assert [each.json()["error"]["code"] for each in got] == ["queue_timeout"]
    await proxy.drained(upstream)


async def test_requests_of_others_wait_for_the_call_back_and_are_then_served(proxy: Proxy, upstream: Upstream) -> None:
    """It is the whole house that pays: nobody else gets the GPU while it waits for itself."""
    got: list[httpx.Response] = []
    upstream.by_model["tts-a"] = calling_back(proxy, CHAT_PATH, CHAT | {"stream": False}, got)
    async with RawClient(proxy.port) as speaker, RawClient(proxy.port) as other:
        speaker.tts()
        await proxy.until(waiters=1, holders=1)
        other.post(CHAT_PATH, CHAT | {"model": "chat-b", "stream": False})
        await proxy.until(waiters=2, holders=1)
        assert (await speaker.answer()).status == 500
        assert (await other.answer()).status == 200
    assert [each.status_code for each in got] == [503]
    await proxy.drained(upstream)


async def test_the_call_back_is_served_when_the_client_of_the_outer_request_leaves(
    proxy: Proxy, upstream: Upstream
) -> None:
    """Its departure frees the lease, for which nothing else had to end."""
    got: list[httpx.Response] = []
    upstream.by_model["tts-a"] = calling_back(proxy, CHAT_PATH, CHAT | {"stream": False}, got)
    async with RawClient(proxy.port) as speaker:
        speaker.tts()
        await proxy.until(waiters=1, holders=1)
        speaker.reset()
    await upstream.wait_for(lambda seen: any(b'"chat-a"' in each.body for each in seen))
    await proxy.drained()
    await upstream.quiet(within=2)
    assert [each.status_code for each in got] == [200]
    await proxy.drained(upstream)
