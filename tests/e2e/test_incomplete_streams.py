"""Case 31: llama-swap ends the stream of an engine that died as if it were whole. See tests/cases.md."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from wire_support import EACH_PARSER

from harness import CHAT, SSE, Proxy, RawClient, Upstream, chunk, event, hang, raw

DONE = chunk(b"data: [DONE]\n\n")
END = b"0\r\n\r\n"
EVENTS = b"".join(chunk(event(number)) for number in range(3))
STOP = chunk(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n')
SERIES = 'gpu_lease_incomplete_streams_total{class="llm"}'
CHAT_PATH = "/v1/chat/completions"

both_parsers = pytest.mark.parametrize("parser", EACH_PARSER)


def stream(*parts: bytes, head: bytes = SSE) -> Any:
    return raw(head + b"".join(parts) + END, close=False)


@both_parsers
@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/completions", "/upstream/chat-a/v1/chat/completions"])
async def test_case_31_half_an_answer_is_counted_told_and_cut(parser: str, path: str) -> None:
    async with Upstream(stream(EVENTS)) as upstream, Proxy(upstream.url, http_parser=parser) as proxy:
        async with RawClient(proxy.port) as client:
            client.post(path, CHAT)
            await client.head()
            got = await client.rest()
        assert not got.endswith(END), "what is not whole must not look whole"
        sent = b"".join(event(number) for number in range(3))
        text = b"".join(line for line in got.split(b"\r\n") if line.startswith(b"data:") or line.endswith(b"\n\n"))
        assert text.startswith(sent)
        error = json.loads(text.removeprefix(sent).removeprefix(b"data: "))["error"]
        assert (error["code"], error["type"]) == ("incomplete_stream", "server_error")
        assert await proxy.metric(SERIES) == 1
        logged = await proxy.logged("incomplete_stream")
        assert (logged["cls"], logged["model"]) == ("llm", "chat-a")
        assert logged["seconds"] >= 0
        await proxy.drained(upstream)
        assert not [line for line in proxy.lines if "Traceback" in line or '"exception"' in line]


async def test_case_31_where_it_is_not_to_be_told_the_bytes_pass_as_they_are() -> None:
    async with Upstream(stream(EVENTS)) as upstream, Proxy(upstream.url, flag_incomplete=False) as proxy:
        response = await proxy.client.post(CHAT_PATH, json=CHAT)
        assert response.content == b"".join(event(number) for number in range(3))
        assert await proxy.metric(SERIES) == 1
        await proxy.logged("incomplete_stream")
        await proxy.drained(upstream)


async def test_case_31_an_sdk_raises_rather_than_return_half_an_answer() -> None:
    async with Upstream(stream(EVENTS)) as upstream, Proxy(upstream.url) as proxy:
        sdk = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="x", max_retries=0)
        async with sdk:
            got = await sdk.chat.completions.create(
                model="chat-a", messages=[{"role": "user", "content": "x"}], stream=True
            )
            with pytest.raises(openai.APIError, match="not whole"):
                async for _ in got:
                    pass
        await proxy.drained(upstream)


@pytest.mark.parametrize("said", [EVENTS, b""])
async def test_case_31_half_an_answer_behind_a_head_that_was_sent_early_is_told_once(said: bytes) -> None:
    settings: dict[str, Any] = {"keepalive_after": 0.05, "keepalive_every": 0.05}
    async with Upstream(hang(0.3, stream(said))) as upstream, Proxy(upstream.url, **settings) as proxy:
        async with RawClient(proxy.port) as client:
            client.chat()
            got = await client.rest()
        assert b": queued" in got
        assert got.count(b'"error"') == got.count(b'"incomplete_stream"') == 1
        assert got.count(b'"chat.completion.chunk"') == said.count(b'"chat.completion.chunk"')
        assert not got.endswith(END)
        assert await proxy.metric(SERIES) == 1
        await proxy.drained(upstream)


WHOLE = {
    "done": (CHAT_PATH, stream(EVENTS, DONE)),
    "finish_reason": (CHAT_PATH, stream(EVENTS, STOP)),
    "responses": ("/v1/responses", stream(EVENTS)),
    "messages": ("/v1/messages", stream(EVENTS)),
    "gzip": (CHAT_PATH, stream(EVENTS, head=SSE[:-2] + b"Content-Encoding: gzip\r\n\r\n")),
    "no stream": (CHAT_PATH, stream(EVENTS, head=SSE.replace(b"event-stream", b"plain"))),
    "an error": (CHAT_PATH, stream(EVENTS, head=SSE.replace(b"200 OK", b"500 No"))),
}


@both_parsers
async def test_case_31_what_is_whole_or_cannot_be_judged_passes_as_it_is(parser: str) -> None:
    async with Upstream() as upstream, Proxy(upstream.url, http_parser=parser) as proxy:
        for name, (path, script) in WHOLE.items():
            upstream.script = script
            async with RawClient(proxy.port) as client:
                client.post(path, CHAT)
                assert (await client.rest_of_chunks()).endswith(END), name
        upstream.script = raw(SSE, close=False)
        async with RawClient(proxy.port) as client:
            client.send(b"HEAD /upstream/chat-a/v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await client.rest()).startswith(b"HTTP/1.1 200")
        assert await proxy.metric(SERIES) == 0
        assert await proxy.metric('gpu_lease_exchanges_total{class="llm",outcome="ok"}') == len(WHOLE)
        await proxy.drained(upstream)
