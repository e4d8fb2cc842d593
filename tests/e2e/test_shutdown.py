"""Case 75: the end of the process as `docker stop` asks for it, in a process of its own. See tests/cases.md."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest

from harness import CHAT, EMBED, Proxy, RawClient, Upstream, after, begun, clients, slow

QUICKLY = 10.0
"""Seconds: enough for an interpreter to end on a busy machine; far below the grace of 30 s and any stream here."""


@pytest.mark.parametrize("policy", ["batch", "fifo"])
async def test_case_75_waiters_get_503_at_once_and_the_stream_runs_to_its_end(policy: str) -> None:
    """The readers among the waiters could run beside the stream once the writer before them has been sent away."""
    end = asyncio.Event()
    settings: dict[str, Any] = {"policy": policy, "switch_after": 0}
    async with Upstream() as upstream, Proxy(upstream.url, **settings) as proxy, clients(proxy.port, 5) as five:
        upstream.by_model = {"chat-a": begun(end)}
        stream, *waiters, late = five
        stream.chat()
        await stream.until(b"data: ")
        for count, client in enumerate(waiters):
            client.chat() if count else client.tts()
            await proxy.until(waiters=count + 1)
        await proxy.logged("upstream_up")
        assert (await proxy.client.get("/-/readyz")).status_code == 200
        proxy.signal()
        for client in waiters:
            refused = await client.answer()
            assert (refused.status, refused.json["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"] == "1"
        ready = await proxy.client.get("/-/readyz")
        assert (ready.status_code, ready.json()["draining"]) == (503, True)
        assert (await proxy.client.get("/-/healthz")).status_code == 200
        assert (await proxy.client.get("/v1/models")).status_code == 200, "what needs no lease is served on"
        late.chat()
        assert (await late.answer()).json["error"]["code"] == "draining"
        embedded = await proxy.client.post("/v1/embeddings", json=EMBED)
        assert (embedded.status_code, embedded.json()["error"]["code"]) == (503, "draining")
        queue = await proxy.until(waiters=0, holders=1)
        assert queue["holders"][0]["id"] == 1
        assert await proxy.metric('gpu_lease_wait_seconds_count{class="llm",outcome="shutdown"}') == 2
        assert await proxy.metric('gpu_lease_rejected_total{reason="draining"}') == 5
        assert not upstream.seen[0].closed.is_set()
        end.set()
        assert b"data: [DONE]" in await stream.rest_of_chunks()
        assert await proxy.exit_code(QUICKLY) == 0
        assert not upstream.of_model("tts-a")
        assert len(upstream.of_model("chat-a")) == 1
        assert_no_traceback(proxy)


def assert_no_traceback(proxy: Proxy) -> None:
    assert not [line for line in proxy.lines if "Traceback" in line or '"exception"' in line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_case_75_an_idle_proxy_ends_at_once(number: int) -> None:
    async with Upstream() as upstream, Proxy(upstream.url) as proxy:
        await proxy.client.get("/-/healthz")
        proxy.signal(number)
        assert await proxy.exit_code(QUICKLY) == 0
        assert_no_traceback(proxy)


async def test_case_75_a_stream_is_cut_when_the_grace_is_over() -> None:
    async with Upstream(slow(1000)) as upstream, Proxy(upstream.url, shutdown_grace=0.3) as proxy:
        async with RawClient(proxy.port) as client:
            client.chat()
            await client.until(b"data: ")
            began = time.monotonic()
            proxy.signal()
            rest = await client.rest(QUICKLY)
            assert not rest.endswith(b"0\r\n\r\n"), "what was cut must not look whole"
            assert await proxy.exit_code(QUICKLY) == 0
            assert time.monotonic() - began >= 0.3
        await asyncio.wait_for(upstream.seen[0].closed.wait(), QUICKLY)
        assert_no_traceback(proxy)


async def test_case_75_a_second_signal_cuts() -> None:
    async with Upstream(slow(1000)) as upstream, Proxy(upstream.url) as proxy, RawClient(proxy.port) as client:
        client.chat()
        await client.until(b"data: ")
        proxy.signal()
        await proxy.logged("draining")
        proxy.signal()
        assert not (await client.rest(QUICKLY)).endswith(b"0\r\n\r\n")
        assert await proxy.exit_code(QUICKLY) == 0
        await asyncio.wait_for(upstream.seen[0].closed.wait(), QUICKLY)
        assert_no_traceback(proxy)


async def test_case_75_open_log_streams_do_not_delay_the_end() -> None:
    """They end only when somebody closes them, and nothing of theirs is lost."""
    async with Upstream(slow(10_000, 1)) as upstream, Proxy(upstream.url) as proxy, clients(proxy.port, 2) as both:
        for client, path in zip(both, (b"/logs/stream", b"/api/events"), strict=True):
            client.send(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            await client.until(b"data: ")
        proxy.signal()
        assert await proxy.exit_code(QUICKLY) == 0
        assert_no_traceback(proxy)


async def test_case_75_a_departed_client_is_not_waited_for() -> None:
    """The last lease ends with its client, and with it the time of grace."""
    async with Upstream() as upstream, Proxy(upstream.url) as proxy, RawClient(proxy.port) as client:
        upstream.script = after(asyncio.Event())
        client.chat()
        await proxy.until(holders=1)
        proxy.signal()
        await proxy.logged("draining")
        client.reset()
        assert await proxy.exit_code(QUICKLY) == 0


async def test_case_75_a_request_whose_body_is_still_coming_is_refused_and_not_begun() -> None:
    async with Upstream() as upstream, Proxy(upstream.url) as proxy, clients(proxy.port, 2) as (holder, client):
        end = asyncio.Event()
        upstream.by_model = {"tts-a": after(end)}
        holder.tts()
        await proxy.until(holders=1)
        body = b'{"model":"chat-a"}'
        fields = b"Host: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\n" + fields)
        client.send(body[:5])
        await proxy.client.post("/v1/chat/completions", json={**CHAT, "model": 1})  # the first has passed the gate
        proxy.signal()
        await proxy.logged("draining")
        client.send(body[5:])
        refused = await client.answer()
        assert (refused.status, refused.json["error"]["code"]) == (503, "draining")
        assert refused.headers["x-lease-class"] == "llm"
        end.set()
        assert (await holder.answer()).status == 200
        assert await proxy.exit_code(QUICKLY) == 0
        assert len(upstream.seen) == 1
