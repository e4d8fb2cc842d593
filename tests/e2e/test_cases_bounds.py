"""What may wait and what is told to those that may not, with the proxy as users start it; see tests/cases.md."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from typing import Any

import pytest

from harness import CHAT, EMBED, TTS, Answer, InProcess, Proxy, RawClient, Upstream, after, answer, begun, clients, raw

CHAT_PATH = "/v1/chat/completions"


def assert_refusal(answer: Answer, code: str, *, anthropic: bool = False) -> None:
    """The whole form of a 503: the error object, and when to come back."""
    assert answer.status == 503
    assert answer.headers["content-type"] == "application/json"
    assert re.fullmatch(r"[1-9]|[1-5]\d|60", answer.headers["retry-after"])
    body = answer.json
    if anthropic:
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message", "code"}
        assert body["error"]["type"] == "overloaded_error"
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["type"] == "server_error"
    assert body["error"]["code"] == code
    assert body["error"]["message"]


async def test_case_70_the_queue_is_bounded_in_length_and_in_time_and_says_which() -> None:
    """Two wait and are sent away after `max_wait`; the third is sent away at once. Then they may come again."""
    end = asyncio.Event()
    async with Upstream() as upstream, Proxy(upstream.url, max_queue=2, max_wait=1) as proxy:
        upstream.by_model = {"tts-a": after(end)}
        async with clients(proxy.port, 4) as (holder, first, second, third):
            holder.tts()
            await proxy.until(holders=1)
            began = time.monotonic()
            first.chat()
            second.tts()
            await proxy.until(waiters=2)
            third.chat()
            refused = await third.answer()
            assert time.monotonic() - began < 1, "at once: long before the two are"
            assert_refusal(refused, "queue_full")
            assert refused.headers["connection"] == "close"
            for client, class_name in ((first, "llm"), (second, "tts")):
                refused = await client.answer()
                assert_refusal(refused, "queue_timeout")
                assert 1 <= time.monotonic() - began < 5
                assert refused.headers["x-lease-class"] == class_name
                assert 1 <= float(refused.headers["x-lease-wait"]) < 5
                assert "connection" not in refused.headers, "the body was read, so the connection can go on"
            queue = await proxy.until(waiters=0, holders=1)
            assert queue["holders"][0]["model"] == "tts-a"
            first.chat()
            await proxy.until(waiters=1)
            end.set()
            assert (await first.answer()).status == (await holder.answer()).status == 200
        for reason, count in (("queue_full", 1), ("queue_timeout", 2), ("client_queue_full", 0)):
            assert await proxy.metric(f'gpu_lease_rejected_total{{reason="{reason}"}}') == count
        assert len(upstream.seen) == 2
        await proxy.drained(upstream)


async def test_case_70_one_client_by_key_cannot_take_the_whole_queue() -> None:
    end = asyncio.Event()
    settings: dict[str, Any] = {"max_queue_per_client": 1, "api_keys": ["greedy", "modest"]}
    async with Upstream() as upstream, Proxy(upstream.url, **settings) as proxy:
        proxy.client.headers["x-api-key"] = "modest"
        upstream.by_model = {"tts-a": after(end)}
        async with clients(proxy.port, 4) as (holder, waiter, third, other):
            holder.tts("X-Api-Key: greedy")
            await proxy.until(holders=1)
            waiter.chat("X-Api-Key: greedy")
            await proxy.until(waiters=1)
            third.chat("Authorization: Bearer greedy")
            assert_refusal(await third.answer(), "client_queue_full")
            other.chat("X-Api-Key: modest")
            await proxy.until(waiters=2)
            end.set()
            for client in (holder, waiter, other):
                assert (await client.answer()).status == 200
        await proxy.drained(upstream)


async def test_case_70_one_client_by_address_cannot_take_the_whole_queue() -> None:
    """Addresses as a trusted proxy reports them."""
    end = asyncio.Event()
    async with Upstream() as upstream, Proxy(upstream.url, max_queue_per_client=1) as proxy:
        upstream.by_model = {"tts-a": after(end)}
        async with clients(proxy.port, 4) as (holder, waiter, third, other):
            holder.tts("X-Forwarded-For: 192.0.2.1")
            await proxy.until(holders=1)
            waiter.chat("X-Forwarded-For: 192.0.2.1")
            await proxy.until(waiters=1)
            third.chat("X-Forwarded-For: 192.0.2.1")
            assert_refusal(await third.answer(), "client_queue_full")
            other.chat("X-Forwarded-For: 192.0.2.2")
            await proxy.until(waiters=2)
            end.set()
            for client in (holder, waiter, other):
                assert (await client.answer()).status == 200
        await proxy.drained(upstream)


async def test_case_70_a_refusal_that_leaves_the_body_unread_closes_the_connection() -> None:
    """And reaches clients that go on sending, in the shape of their API."""
    end = asyncio.Event()
    async with Upstream() as upstream, Proxy(upstream.url, max_queue=1) as proxy:
        upstream.by_model = {"tts-a": after(end)}
        async with clients(proxy.port, 2) as (holder, waiter):
            holder.tts()
            await proxy.until(holders=1)
            waiter.chat()
            await proxy.until(waiters=1)
            head = "Host: x\r\nContent-Type: application/json\r\n"
            for path, length, body in (
                (CHAT_PATH, "Content-Length: 12", b"{}          "),
                ("/v1/messages", "Transfer-Encoding: chunked", b"2\r\n{}\r\n0\r\n\r\n"),
            ):
                async with RawClient(proxy.port) as client:
                    client.send(f"POST {path} HTTP/1.1\r\n{head}{length}\r\n\r\n".encode())
                    refused = await client.answer()
                    assert_refusal(refused, "queue_full", anthropic=path == "/v1/messages")
                    assert refused.headers["connection"] == "close"
                    client.send(body)
                    assert await client.rest() == b""
            large = {**CHAT, "x": "x" * 5_000_000}
            response = await proxy.client.post(CHAT_PATH, json=large)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
            end.set()
            assert (await holder.answer()).status == (await waiter.answer()).status == 200
        assert len(upstream.seen) == 2
        await proxy.drained(upstream)


async def test_case_70_a_refused_client_that_never_sends_its_body_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.reply.DISCARD_SECONDS", 0.05)
    async with Upstream() as upstream, InProcess(upstream.url, max_body=10) as proxy, RawClient(proxy.port) as client:
        client.send(f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n".encode())
        refused = await client.answer()
        assert (refused.status, refused.json["error"]["code"]) == (413, "body_too_large")
        assert await client.rest(within=1) == b""
        await proxy.until(lambda: not proxy.server.server_state.tasks)
        await proxy.idle()


@pytest.mark.parametrize("anthropic", [False, True])
async def test_case_70_a_wait_that_is_over_is_told_in_the_shape_of_the_api(anthropic: bool) -> None:
    end = asyncio.Event()
    classes = {"llm": {"max_wait": 0.05}}
    async with Upstream() as upstream, Proxy(upstream.url, classes=classes, switch_after=0.2) as proxy:
        upstream.by_model = {"tts-a": after(end)}
        async with clients(proxy.port, 3) as (holder, patient, hasty):
            holder.tts()
            await proxy.until(holders=1)
            patient.tts()
            await proxy.until(waiters=1)
            hasty.post("/v1/messages" if anthropic else CHAT_PATH, CHAT)
            refused = await hasty.answer()
            assert_refusal(refused, "queue_timeout", anthropic=anthropic)
            assert refused.headers["retry-after"] == "1"
            await proxy.until(waiters=1, holders=1)
            end.set()
            assert (await patient.answer()).status == 200
        await proxy.drained(upstream)


async def test_every_answer_to_a_model_route_tells_of_its_lease_and_no_other_does() -> None:
    """Mode none, errors of the upstream and of the proxy once the class is known included."""
    async with Upstream() as upstream, Proxy(upstream.url) as proxy:

        async def told(path: str, body: dict[str, Any]) -> tuple[int, str | None]:
            fields = (response := await proxy.client.post(path, json=body)).headers
            assert len({name in fields for name in ("x-lease-class", "x-lease-wait", "server-timing")}) == 1
            if "x-lease-wait" in fields:
                assert re.fullmatch(r"\d+\.\d{3}", fields["x-lease-wait"])
                assert re.fullmatch(r"lease;dur=\d+\.\d", fields["server-timing"])
            return response.status_code, fields.get("x-lease-class")

        assert await told(CHAT_PATH, CHAT) == (200, "llm")
        assert await told("/v1/audio/speech", TTS) == (200, "tts")
        assert await told("/v1/embeddings", EMBED) == (200, "embed")
        assert await told(CHAT_PATH, {"messages": []}) == (400, None), "the class is not known"
        upstream.script = answer(b"{}", "429 Too Many Requests")
        assert await told(CHAT_PATH, CHAT) == (429, "llm")
        upstream.script = raw(b"")
        assert await told("/v1/embeddings", EMBED) == (502, "embed")
        upstream.script = answer()
        assert not any(name.startswith("x-lease") for name in (await proxy.client.get("/v1/models")).headers)
        await proxy.drained(upstream)


async def test_the_wait_that_is_told_is_the_one_that_was() -> None:
    end = asyncio.Event()
    async with Upstream() as upstream, Proxy(upstream.url) as proxy:
        upstream.by_model = {"chat-a": begun(end)}
        async with clients(proxy.port, 2) as (holder, waiter):
            holder.chat()
            await holder.until(b"data: ")
            before = time.monotonic()
            waiter.tts()
            await proxy.until(waiters=1)
            seen = time.monotonic()
            await asyncio.sleep(0.1)
            least = time.monotonic() - seen
            end.set()
            fields = (await waiter.answer()).headers
            assert fields["x-lease-class"] == "tts"
            assert least - 0.001 <= float(fields["x-lease-wait"]) <= time.monotonic() - before
            told = float(fields["server-timing"].removeprefix("lease;dur=")) / 1000
            assert told == pytest.approx(float(fields["x-lease-wait"]), abs=0.001)
        await proxy.drained(upstream)


# -- 76


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [(["--workers", "2"], {}, "--workers"), ([], {"WEB_CONCURRENCY": "2"}, "WEB_CONCURRENCY")],
    ids=["option", "environment"],
)
async def test_case_76_more_than_one_worker_is_refused_at_the_start(
    arguments: list[str], environment: dict[str, str], named: str
) -> None:
    """Two workers would be two locks, which is none."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GPU_LEASE_", "WEB_CONC"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "serve", *arguments),
        env={**kept, "GPU_LEASE_UPSTREAM_URL": "http://127.0.0.1:9", "GPU_LEASE_LISTEN_PORT": "0", **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(10):
        output, errors = await process.communicate()
    assert process.returncode == 2
    assert output == b""
    (line,) = errors.decode().splitlines()
    assert named in line
    assert "one process" in line
