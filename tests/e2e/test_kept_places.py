"""A client that gives up and comes back, and one that says how long it will wait; see tests/cases.md.

The proxy runs as users start it. What counts is the order in which the upstream sees requests, and how often.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

from harness import CHAT, TTS, Proxy, RawClient, Upstream, after, answer, clients

CHAT_PATH = "/v1/chat/completions"
NEWCOMER = CHAT | {"messages": [{"role": "user", "content": "newcomer"}]}
COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "chat-a",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
}

ONE_AT_A_TIME: dict[str, Any] = {"slots": 1}
"""Two chats for one model then run one after another, so that their order shows under every policy."""

PATIENCE = 1.0
"""Seconds after which the impatient clients here give up: long enough for one answer on a busy machine."""


async def until(proxy: Proxy, true: Callable[[dict[str, Any]], bool], within: float = 20.0) -> dict[str, Any]:
    """The queue once `true` of it."""
    async with asyncio.timeout(within):
        while not true(queue := await proxy.queue()):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        return queue


async def until_kept(proxy: Proxy, count: int) -> dict[str, Any]:
    return await until(proxy, lambda queue: len(queue["kept"]) == count)


@contextlib.asynccontextmanager
async def behind_speech(**settings: Any) -> AsyncIterator[tuple[Upstream, Proxy, asyncio.Event]]:
    """A proxy whose GPU a long speech job has until the event is set."""
    end = asyncio.Event()
    async with Upstream() as upstream, Proxy(upstream.url, **settings) as proxy, RawClient(proxy.port) as speech:
        upstream.by_model = {"tts-a": after(end), "chat-a": answer(json.dumps(COMPLETION).encode())}
        speech.tts()
        await proxy.until(holders=1)
        yield upstream, proxy, end
        end.set()
        assert (await speech.answer()).status == 200
        await proxy.drained(upstream)


class Watcher:
    """Looks at the queue all the time: how many of our waiters there were at once, and the numbers they had."""

    def __init__(self, proxy: Proxy, ours: Callable[[dict[str, Any]], bool]) -> None:
        self._proxy, self._ours = proxy, ours
        self.most = 0
        self.ids: list[int] = []

    async def until_tries(self, count: int) -> dict[str, Any]:
        """The queue when so many of our tries have waited in turn and the last of them waits."""

        def enough(queue: dict[str, Any]) -> bool:
            waiting = [waiter for waiter in queue["waiters"] if self._ours(waiter)]
            self.most = max(self.most, len(waiting))
            self.ids += [waiter["id"] for waiter in waiting if waiter["id"] not in self.ids]
            return len(self.ids) >= count and bool(waiting)

        return await until(self._proxy, enough)


# -- the impatient client


@pytest.mark.parametrize("policy", ["batch", "fifo"])
async def test_case_71_the_openai_sdk_with_a_short_timeout_is_served_once_and_before_who_came_later(
    policy: str,
) -> None:
    async with (
        behind_speech(policy=policy, **ONE_AT_A_TIME) as (upstream, proxy, end),
        openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=5, timeout=PATIENCE) as sdk,
        RawClient(proxy.port) as newcomer,
    ):
        chat = asyncio.ensure_future(
            sdk.chat.completions.with_raw_response.create(
                model="chat-a", messages=[{"role": "user", "content": "impatient"}]
            )
        )
        queue = await until_kept(proxy, 1)
        assert queue["waiters"] == []
        newcomer.post(CHAT_PATH, NEWCOMER)
        watcher = Watcher(proxy, lambda waiter: "client_timeout_seconds" in waiter)
        queue = await watcher.until_tries(2)
        first, second = queue["waiters"]
        assert first["client_timeout_seconds"] == PATIENCE
        assert first["waited_seconds"] > second["waited_seconds"]
        assert "client_timeout_seconds" not in second
        end.set()
        response = await chat
        assert response.parse().choices[0].message.content == "hello"
        assert float(response.headers["x-lease-wait"]) > 2 * PATIENCE, "since the first try"
        assert (await newcomer.answer()).status == 200
        assert watcher.most == 1
        asked = [seen.json["messages"][0]["content"] for seen in upstream.of_model("chat-a")]
        assert asked == ["impatient", "newcomer"]


async def impatient(port: int, tries: int, *fields: str) -> int | None:
    """Sends CHAT again and again as SDKs do; the status of the try that got an answer in time."""
    for attempt in range(tries):
        async with RawClient(port) as client:
            client.chat(*fields, f"X-Stainless-Retry-Count: {attempt}")
            with contextlib.suppress(TimeoutError):
                return (await client.answer(within=PATIENCE)).status
        await asyncio.sleep(0.1)
    return None


@pytest.mark.parametrize(("keep_place", "order"), [("60s", ["x", "newcomer"]), ("0", ["newcomer", "x"])])
async def test_case_71_a_storm_of_retries_has_one_waiter_and_one_request_upstream(
    keep_place: str, order: list[str]
) -> None:
    """And without `keep_place` the newcomer is first, so it is the kept place that decides."""
    async with (
        behind_speech(keep_place=keep_place, **ONE_AT_A_TIME) as (upstream, proxy, end),
        RawClient(proxy.port) as newcomer,
    ):
        chat = asyncio.create_task(impatient(proxy.port, 6))
        watcher = Watcher(proxy, lambda waiter: True)
        await watcher.until_tries(1)
        newcomer.post(CHAT_PATH, NEWCOMER)
        await watcher.until_tries(4)
        end.set()
        assert await chat == 200
        assert (await newcomer.answer()).status == 200
        assert watcher.most <= 2, "the newcomer and one try"
        assert [seen.json["messages"][0]["content"] for seen in upstream.of_model("chat-a")] == order


async def test_a_client_that_gave_up_for_good_is_never_served_and_leaves_only_a_place() -> None:
    async with behind_speech(keep_place="60s") as (upstream, proxy, _):
        assert await impatient(proxy.port, 1) is None
        queue = await until_kept(proxy, 1)
        (place,) = queue["kept"]
        assert {key: place[key] for key in ("class", "model", "mode")} == {
            "class": "llm",
            "model": "chat-a",
            "mode": "read",
        }
        assert place["waited_seconds"] > 0.5
        assert 0 < place["seconds_left"] <= 60
        assert queue["waiters"] == []
        assert await proxy.metric('gpu_lease_waiting{class="llm"}') == 0
        assert not upstream.of_model("chat-a")


async def test_places_end_by_themselves() -> None:
    async with behind_speech(keep_place="200ms") as (_, proxy, _):
        async with RawClient(proxy.port) as client:
            client.chat()
            await proxy.until(waiters=1)
        await until_kept(proxy, 1)
        await until_kept(proxy, 0)


async def test_another_key_body_or_query_is_another_request() -> None:
    settings: dict[str, Any] = {"api_keys": ["one", "two"]}
    end = asyncio.Event()
    async with Upstream() as upstream, Proxy(upstream.url, **settings) as proxy, clients(proxy.port, 6) as raw:
        holder, first, *others, same = raw
        proxy.client.headers["x-api-key"] = "one"
        upstream.by_model = {"tts-a": after(end)}
        holder.tts("X-Api-Key: one")
        await proxy.until(holders=1)
        first.chat("X-Api-Key: one")
        await proxy.until(waiters=1)
        first.close()
        await until_kept(proxy, 1)
        others[0].chat("X-Api-Key: two")
        others[1].post(CHAT_PATH, NEWCOMER, "X-Api-Key: one")
        others[2].post(f"{CHAT_PATH}?a=1", CHAT, "X-Api-Key: one")
        queue = await proxy.until(waiters=3)
        assert len(queue["kept"]) == 1
        same.chat("Authorization: Bearer one", "X-Other: field")
        queue = await proxy.until(waiters=4)
        assert queue["kept"] == []
        waited = [waiter["waited_seconds"] for waiter in queue["waiters"]]
        assert waited == sorted(waited, reverse=True)
        assert queue["waiters"][0]["id"] == max(waiter["id"] for waiter in queue["waiters"])
        end.set()
        for client in (holder, *others, same):
            assert (await client.answer()).status == 200
        await proxy.drained(upstream)


async def test_two_live_copies_have_a_place_each() -> None:
    async with behind_speech(**ONE_AT_A_TIME) as (upstream, proxy, end), clients(proxy.port, 4) as raw:
        first, copy, returned, third = raw
        first.chat()
        await proxy.until(waiters=1)
        copy.chat()
        queue = await proxy.until(waiters=2)
        ids = [waiter["id"] for waiter in queue["waiters"]]
        first.close()
        await until_kept(proxy, 1)
        returned.chat()
        queue = await proxy.until(waiters=2)
        assert queue["kept"] == []
        assert [waiter["id"] for waiter in queue["waiters"]] == [ids[1] + 1, ids[1]]
        third.chat()
        queue = await proxy.until(waiters=3)
        assert queue["waiters"][2]["waited_seconds"] < queue["waiters"][1]["waited_seconds"]
        copy.close()
        returned.close()
        await until_kept(proxy, 1)
        third.close()
        await proxy.until(waiters=0)
        assert len((await proxy.queue())["kept"]) == 1, "one place for all of them"
        end.set()
        await upstream.quiet(within=5)


async def test_a_retry_that_is_faster_than_the_news_of_its_clients_departure_gets_the_place() -> None:
    async with behind_speech(**ONE_AT_A_TIME) as (upstream, proxy, end), clients(proxy.port, 3) as raw:
        first, newcomer, retry = raw
        first.chat("X-Stainless-Retry-Count: 0")
        await proxy.until(waiters=1)
        newcomer.post(CHAT_PATH, NEWCOMER)
        await proxy.until(waiters=2)
        retry.chat("X-Stainless-Retry-Count: 1")
        queue = await proxy.until(waiters=3)
        ids = [waiter["id"] for waiter in queue["waiters"]]
        first.close()
        queue = await proxy.until(waiters=2)
        assert queue["kept"] == []
        assert [waiter["id"] for waiter in queue["waiters"]] == [ids[2], ids[1]]
        end.set()
        for client in (retry, newcomer):
            assert (await client.answer()).status == 200
        assert [seen.json["messages"][0]["content"] for seen in upstream.of_model("chat-a")] == ["x", "newcomer"]


@pytest.mark.parametrize("returns", [1, 2])
async def test_clients_that_come_back_and_leave_for_good_leave_nothing_held(returns: int) -> None:
    async with behind_speech(**ONE_AT_A_TIME) as (upstream, proxy, end):
        for _ in range(returns + 1):
            async with RawClient(proxy.port) as client:
                client.chat()
                await proxy.until(waiters=1)
                client.reset()
            await until_kept(proxy, 1)
        end.set()
        await upstream.quiet(within=5)
        queue = await proxy.until(waiters=0, holders=0)
        assert len(queue["kept"]) == 1
        assert not upstream.of_model("chat-a")


async def test_a_client_that_leaves_once_it_is_served_keeps_no_place() -> None:
    never = asyncio.Event()
    async with behind_speech() as (upstream, proxy, end):
        upstream.by_model["chat-a"] = after(never)
        async with RawClient(proxy.port) as client:
            client.chat()
            await proxy.until(waiters=1)
            end.set()
            await upstream.wait_for(lambda seen: len(seen) == 2)
            client.close()
        queue = await proxy.until(waiters=0, holders=0)
        assert queue["kept"] == []


async def test_kept_places_do_not_delay_the_end_of_the_proxy() -> None:
    end = asyncio.Event()
    async with Upstream() as upstream, Proxy(upstream.url) as proxy:
        upstream.by_model = {"tts-a": after(end)}
        async with clients(proxy.port, 2) as (holder, waiter):
            holder.tts()
            await proxy.until(holders=1)
            waiter.chat()
            await proxy.until(waiters=1)
            waiter.close()
            await until_kept(proxy, 1)
            proxy.signal()
            end.set()
            assert (await holder.answer()).status == 200
        assert await proxy.exit_code(within=20) == 0


# -- the client that says how long it will wait


async def test_prefer_wait_is_a_503_in_time_with_retry_after_and_no_place() -> None:
    async with behind_speech() as (upstream, proxy, _):
        async with clients(proxy.port, 2) as (hasty, patient):
            began = time.monotonic()
            hasty.chat("Prefer: wait=2")
            patient.chat("Prefer: wait=60")
            refused = await hasty.answer()
            assert refused.status == 503
            assert time.monotonic() - began >= 1
            assert refused.json["error"]["code"] == "queue_timeout"
            assert "Prefer" in refused.json["error"]["message"]
            assert refused.headers["preference-applied"] == "wait=2"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert 1.7 < float(refused.headers["x-lease-wait"]) < 2
            queue = await proxy.until(waiters=1)
            assert queue["kept"] == []
        assert not upstream.of_model("chat-a")


async def test_prefer_wait_0_is_served_at_once_or_refused_at_once() -> None:
    async with behind_speech() as (upstream, proxy, end):
        async with clients(proxy.port, 1) as (client,):
            client.chat("Prefer: wait=0")
            refused = await client.answer()
            assert (refused.status, refused.headers["preference-applied"]) == (503, "wait=0")
            end.set()
            await proxy.until(holders=0)
            client.chat("Prefer: wait=0")
            served = await client.answer()
            assert (served.status, served.headers["preference-applied"]) == (200, "wait=0")
        assert len(upstream.of_model("chat-a")) == 1


async def test_a_request_that_is_served_in_the_time_it_prefers_is_told_so_and_others_are_not() -> None:
    async with behind_speech() as (_, proxy, end), clients(proxy.port, 2) as (prefers, other):
        prefers.chat("Prefer: wait=30, respond-sync")
        other.chat()
        await proxy.until(waiters=2)
        end.set()
        served = await prefers.answer()
        assert (served.status, served.headers["preference-applied"]) == (200, "wait=30")
        assert "preference-applied" not in (await other.answer()).headers


async def test_a_stream_that_prefers_to_be_refused_in_time_is_kept_silent_until_then() -> None:
    """Else its 200 would be out before the refusal."""
    settings = {"keepalive_after": "50ms", "keepalive_every": "50ms"}
    async with behind_speech(**settings) as (_, proxy, _), clients(proxy.port, 2) as (hasty, other):
        hasty.chat("Prefer: wait=1")
        other.chat()
        refused = await hasty.answer()
        assert (refused.status, refused.json["error"]["code"]) == (503, "queue_timeout")
        assert b": queued" in await other.until(b": queued")


async def test_a_client_that_leaves_before_its_preferred_wait_is_over_leaves_nothing_held() -> None:
    async with behind_speech() as (upstream, proxy, _):
        async with RawClient(proxy.port) as client:
            client.chat("Prefer: wait=30")
            await proxy.until(waiters=1)
        await until_kept(proxy, 1)
        assert not upstream.of_model("chat-a")


# -- refusals that no retry can mend


async def test_what_cannot_be_mended_by_a_retry_says_so() -> None:
    async with Upstream() as upstream, Proxy(upstream.url, max_body=1000) as proxy:
        for path, body, status in (
            (CHAT_PATH, {"messages": []}, 400),
            (CHAT_PATH, CHAT | {"pad": "x" * 2000}, 413),
        ):
            response = await proxy.client.post(path, json=body)
            assert (response.status_code, response.headers["x-should-retry"]) == (status, "false")
            assert "retry-after" not in response.headers
        assert (await proxy.client.post("/v1/audio/speech", json=TTS)).headers.get("x-should-retry") is None
        await proxy.drained(upstream)
