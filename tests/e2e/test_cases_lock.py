"""Cases of the lock with the proxy as users start it; tests/cases.md says what each number is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from harness import (
    CHAT,
    TTS,
    InProcess,
    Proxy,
    RawClient,
    Script,
    Seen,
    Upstream,
    after,
    answer,
    begun,
    clients,
    hang,
    raw,
    slow,
)
from proxy.lease import Hold
from proxy.rwlock import Lease

POLICIES: dict[str, dict[str, Any]] = {
    "fifo": {"policy": "fifo"},
    "batch": {"policy": "batch"},
    "batch without passing": {"policy": "batch", "switch_after": 0},
}

LEAVE = {"FIN": RawClient.close, "RST": RawClient.reset}

every_policy = pytest.mark.parametrize("policy", POLICIES)
both_policies = pytest.mark.parametrize("policy", ["fifo", "batch"])


@contextlib.asynccontextmanager
async def stack(**settings: Any) -> AsyncIterator[tuple[Upstream, Proxy]]:
    """A scripted upstream and a proxy before it."""
    async with Upstream() as upstream, Proxy(upstream.url, **settings) as proxy:
        yield upstream, proxy


def arrived(model: str, count: int = 1) -> Callable[[list[Seen]], bool]:
    """Whether `count` requests for `model` have come to the upstream."""
    return lambda seen: sum(f'"{model}"'.encode() in each.body for each in seen) >= count


async def events_of(client: RawClient, count: int) -> None:
    """Read the head and `count` events of a stream."""
    await client.head()
    for _ in range(count):
        await client.until(b"data: ")


# -- 1


async def a_writer_that_leaves_wakes_the_readers_behind_it(
    upstream: Upstream, proxy: Proxy, leave: Callable[[RawClient], None], *fields: str
) -> None:
    upstream.script = slow(100)
    before = len(upstream.of_model("chat-a"))
    async with clients(proxy.port, 3) as (first, writer, second):
        first.chat(*fields)
        await upstream.wait_for(arrived("chat-a", before + 1))
        writer.tts(*fields)
        await proxy.until(waiters=1, holders=1)
        second.chat(*fields)
        # Under `batch` with time to pass, the second reader may be there before the writer; else it waits behind it.
        await proxy.until_all(3)
        left = time.monotonic()
        leave(writer)
        await upstream.wait_for(arrived("chat-a", before + 2))
        assert upstream.of_model("chat-a")[-1].arrived - left < 0.5
        await events_of(second, 1)
        assert not upstream.of_model("chat-a")[before].closed.is_set(), "the first reader must still be streaming"
        assert not upstream.of_model("tts-a")
        await proxy.until(waiters=0, holders=2)


@every_policy
async def test_case_01_a_cancelled_writer_does_not_leave_the_readers_behind_it_asleep(policy: str) -> None:
    async with stack(**POLICIES[policy]) as (upstream, proxy):
        for leave in LEAVE.values():
            await a_writer_that_leaves_wakes_the_readers_behind_it(upstream, proxy, leave)
            await proxy.until(waiters=0, holders=0)
        await proxy.drained(upstream)


# -- 4


class Traffic:
    """Clients that ask again and again, and note when."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._tasks: list[asyncio.Task[None]] = []
        self.sent: dict[int, float] = {}
        self.statuses: set[int] = set()

    def keep(self, count: int, path: str, body: dict[str, Any]) -> None:
        """Keep `count` requests under way until `stop`."""
        self._tasks += [asyncio.create_task(self._repeat(path, body)) for _ in range(count)]

    async def _repeat(self, path: str, body: dict[str, Any]) -> None:
        while True:
            number = len(self.sent)
            self.sent[number] = time.monotonic()
            response = await self._proxy.client.post(path, json={**body, "number": number})
            self.statuses.add(response.status_code)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


STREAM = slow(1, 0.05)
SPEECH = hang(0.05)


@pytest.mark.parametrize(
    ("crowd", "single", "count"), [("tts-a", "chat-a", 4), ("chat-a", "tts-a", 5)], ids=["chat", "speech"]
)
@both_policies
async def test_case_04_steady_traffic_of_one_class_does_not_starve_the_other(
    policy: str, crowd: str, single: str, count: int
) -> None:
    """Only those that arrived before it, or under `batch` within `switch_after` of it, are served before it."""
    switch_after = 0.4
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "chat-a": ("/v1/chat/completions", CHAT),
        "tts-a": ("/v1/audio/speech", TTS),
    }
    async with stack(policy=policy, switch_after=switch_after, max_turn=1.2, max_wait=5) as (upstream, proxy):
        upstream.by_model = {"chat-a": STREAM, "tts-a": SPEECH}
        traffic = Traffic(proxy)
        traffic.keep(count, *requests[crowd])
        await upstream.wait_for(arrived(crowd, 2 * count))
        response = await proxy.client.post(requests[single][0], json=requests[single][1])
        assert response.status_code == 200
        served = upstream.of_model(single)[0].arrived
        in_queue = served - float(response.headers["x-lease-wait"]) + 0.001  # at the latest
        await upstream.wait_for(arrived(crowd, len(upstream.of_model(crowd)) + 2 * count))
        turns = {name: await proxy.metric(f'gpu_lease_turns_total{{class="{name}"}}') for name in ("llm", "tts")}
        await traffic.stop()
        passed = [seen.json["number"] for seen in upstream.of_model(crowd) if in_queue < seen.arrived < served]
        latest = max((traffic.sent[number] for number in passed), default=in_queue)
        assert latest <= in_queue + (switch_after if policy == "batch" else 0)
        assert sorted(turns.values()) == [1, 2], "one turn of the crowd before it, one after it"
        assert traffic.statuses == {200}
        await proxy.drained(upstream)


# -- 5


@both_policies
async def test_case_05_readers_overtake_a_waiting_writer_only_as_long_as_the_batch_lasts(policy: str) -> None:
    switch_after = 0.3
    settings = {"policy": policy, "switch_after": switch_after, "slots": 100, "max_queue": 100}
    async with stack(**settings, max_queue_per_client=100) as (upstream, proxy):
        end = asyncio.Event()
        upstream.by_model = {"chat-a": begun(end)}
        async with clients(proxy.port, 52) as (first, writer, *readers):
            first.chat()
            await upstream.wait_for(arrived("chat-a"))
            writer.tts()
            await proxy.until(waiters=1)
            writer_seen = time.monotonic()
            sent = []
            for number, reader in enumerate(readers):
                sent.append(time.monotonic())
                reader.post("/v1/chat/completions", {**CHAT, "number": number})
                await asyncio.sleep(0.02)
            await proxy.until_all(52)
            end.set()
            for client in (first, *readers):
                assert b"[DONE]" in await client.rest_of_chunks()
            assert (await writer.answer()).status == 200
        order = [seen.json for seen in upstream.seen]
        place = next(number for number, body in enumerate(order) if body["model"] == "tts-a")
        early = [body["number"] for body in order[1:place]]
        assert all(sent[number] <= writer_seen + (switch_after if policy == "batch" else 0) for number in early)
        assert len(early) < 50, "and the cap was met"
        assert (len(early) > 0) is (policy == "batch")
        await proxy.drained(upstream)


# -- 7


async def test_case_07_clients_that_leave_just_as_they_are_granted_hold_nothing() -> None:
    """The departure is swept over the moment of the grant, a fraction of a millisecond at a time."""
    async with stack() as (upstream, proxy):
        for step in range(10):
            end = asyncio.Event()
            upstream.by_model = {"tts-a": after(end), "chat-a": hang()}
            async with clients(proxy.port, 3) as (holder, leaver, behind):
                holder.tts()
                await proxy.until(holders=1)
                leaver.chat()
                await proxy.until(waiters=1)
                behind.tts()
                await proxy.until(waiters=2)
                end.set()
                await asyncio.sleep(step * 0.0004)
                LEAVE["RST" if step % 2 else "FIN"](leaver)
                assert (await behind.answer()).status == 200
                await proxy.until(waiters=0, holders=0, within=2)
        await proxy.drained(upstream)


async def test_case_07_a_departure_in_the_very_tick_of_the_grant_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put in where no outside client can aim: after the lock has given the lease, before its task runs again."""
    wake, struck = Lease.wake, 0

    def wake_and_strike(lease: Lease) -> None:
        nonlocal struck
        wake(lease)
        if lease._wake is not None and lease.claim.mode == "read":
            struck += 1
            lease.owner.task.cancel()  # type: ignore[attr-defined]

    async with Upstream() as upstream, InProcess(upstream.url) as proxy, clients(proxy.port, 3) as three:
        monkeypatch.setattr(Lease, "wake", wake_and_strike)
        end = asyncio.Event()
        upstream.by_model = {"tts-a": after(end)}
        lock = proxy.app.leases.lock
        for client, count in zip(three, (0, 1, 2), strict=True):
            client.chat() if count == 1 else client.tts()
            await proxy.until(lambda count=count: len(lock.held) + lock.waiting_count == count + 1)  # type: ignore[misc]
        end.set()
        assert (await three[2].answer()).status == 200
        assert struck == 1
        assert not upstream.of_model("chat-a")
        await proxy.idle()


# -- 8, 10, 12


async def test_case_08_a_stream_that_is_reset_frees_its_lease_before_anything_is_awaited() -> None:
    async with stack() as (upstream, proxy):
        upstream.script = slow(100)
        async with RawClient(proxy.port) as client:
            client.chat()
            await events_of(client, 3)
            client.reset()
            await proxy.until(holders=0, waiters=0, within=1)
            await asyncio.wait_for(upstream.seen[0].closed.wait(), 2.5)
        await proxy.drained(upstream)


async def an_unanswered_chat_that_is_given_up(upstream: Upstream, proxy: Proxy, leave: str, *fields: str) -> None:
    upstream.script = hang()
    before = len(upstream.seen)
    async with RawClient(proxy.port) as client:
        client.post("/v1/chat/completions", {**CHAT, "stream": False}, *fields)
        await upstream.wait_for(lambda seen: len(seen) > before)
        await proxy.until(holders=1)
        LEAVE[leave](client)
        await asyncio.wait_for(upstream.seen[before].closed.wait(), 2.5)
        await proxy.until(holders=0, waiters=0, within=2)


async def test_case_10_a_client_that_leaves_before_the_answer_ends_the_generation() -> None:
    async with stack() as (upstream, proxy):
        for leave in LEAVE:
            await an_unanswered_chat_that_is_given_up(upstream, proxy, leave)
        await proxy.drained(upstream)


async def test_case_11_nothing_in_the_whole_stack_hides_a_departure() -> None:
    """Cases 1 and 10 with keys, the JSON log and the metrics at work."""
    async with stack(api_keys=["secret"], log_format="json", slow_wait_log=0) as (upstream, proxy):
        proxy.client.headers["authorization"] = "Bearer secret"
        key = "Authorization: Bearer secret"
        for leave in LEAVE:
            await an_unanswered_chat_that_is_given_up(upstream, proxy, leave, key)
        await a_writer_that_leaves_wakes_the_readers_behind_it(upstream, proxy, RawClient.close, key)
        await proxy.drained(upstream)


async def test_case_12_a_lease_ends_with_its_exchange_however_that_ends() -> None:
    async with stack() as (upstream, proxy):

        async def normal(client: RawClient) -> None:
            assert b"data: [DONE]" in await client.rest_of_chunks()

        async def reset(client: RawClient) -> None:
            await events_of(client, 1)
            await proxy.until(holders=1)
            client.reset()

        async def upstream_death(client: RawClient) -> None:
            got = await client.rest()
            assert got.startswith(b"HTTP/1.1 200")
            assert not got.endswith(b"0\r\n\r\n")

        endings: list[tuple[Script, Callable[[RawClient], Awaitable[None]]]] = [
            (slow(3), normal),
            (slow(100), reset),
            (slow(3, end=b""), upstream_death),
            (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 40, reset=True), upstream_death),
        ]
        for script, ending in endings:
            upstream.script = script
            async with RawClient(proxy.port) as client:
                client.chat()
                await ending(client)
                await proxy.until(holders=0, waiters=0, within=1)
        await proxy.drained(upstream)


# -- 9


@pytest.mark.parametrize("leave", LEAVE)
async def test_case_09_a_client_that_leaves_before_its_body_is_read_is_never_granted(leave: str) -> None:
    async with stack() as (upstream, proxy):
        end = asyncio.Event()
        upstream.by_model = {"tts-a": after(end)}
        async with clients(proxy.port, 3) as (holder, half, whole):
            holder.tts()
            await upstream.wait_for(arrived("tts-a"))
            fields = "Host: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
            half.send(f"POST /v1/chat/completions HTTP/1.1\r\n{fields}".encode() + b'{"model":"chat-a","x":"')
            half.send(b"x" * 200_000)
            whole.post("/v1/chat/completions", {**CHAT, "x": "x" * 200_000})
            await half.writer.drain()
            await proxy.until(waiters=1, holders=1)
            LEAVE[leave](half)
            LEAVE[leave](whole)
            await proxy.until(waiters=0, holders=1, within=1)
            end.set()
            assert (await holder.answer()).status == 200
        assert len(upstream.seen) == 1, "of those that left nothing may reach the upstream"
        await proxy.drained(upstream)
        assert [seen.json["model"] for seen in upstream.seen] == ["tts-a", "tts-a", "chat-a"]


# -- 17


async def test_case_17_a_fault_in_the_release_leaves_an_orphan_that_is_freed_and_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, faulty = Hold.release, True

    def fail(hold: Hold) -> None:
        if faulty:
            raise RuntimeError("a fault in the release path")
        release(hold)

    async with Upstream(hang()) as upstream, InProcess(upstream.url) as proxy, clients(proxy.port, 2) as (one, two):
        monkeypatch.setattr(Hold, "release", fail)
        lock = proxy.app.leases.lock
        one.tts()
        await upstream.wait_for(arrived("tts-a"))
        two.chat()
        await proxy.until(lambda: lock.waiting_count == 1)
        with capture_logs() as logs:
            one.reset()
            await upstream.wait_for(arrived("chat-a"), within=10)
        faulty = False
        assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["internal_error", "orphan_freed"]
        assert [entry["model"] for entry in logs if entry["event"] == "orphan_freed"] == ["tts-a"]
        proxy.app.leases.sweep()
        assert proxy.metric("gpu_lease_orphans_total") == 1
        assert proxy.metric("gpu_lease_hold_seconds_count", **{"class": "tts"}) == 1
        two.close()
        await proxy.idle()


async def test_case_17_a_fault_at_the_upstreams_end_is_mended_by_the_end_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, faults = Hold.release, [1]

    def fail_once(hold: Hold) -> None:
        if faults:
            faults.pop()
            raise RuntimeError("a fault in the release path")
        release(hold)

    async with Upstream() as upstream, InProcess(upstream.url) as proxy, RawClient(proxy.port) as client:
        monkeypatch.setattr(Hold, "release", fail_once)
        client.tts()
        assert (await client.answer()).status == 200
        assert not faults
        await proxy.idle()
        assert proxy.metric("gpu_lease_orphans_total") == 0


async def test_case_17_a_killed_task_gives_its_lease_back_by_itself() -> None:
    async with Upstream(hang()) as upstream, InProcess(upstream.url) as proxy, RawClient(proxy.port) as client:
        client.tts()
        await upstream.wait_for(arrived("tts-a"))
        (ticket,) = (lease.owner for lease in proxy.app.leases.lock.held)
        ticket.task.cancel()  # type: ignore[attr-defined]
        await proxy.idle()
        await asyncio.wait_for(upstream.seen[0].closed.wait(), 2.5)
        proxy.app.leases.sweep()
        assert proxy.metric("gpu_lease_orphans_total") == 0


async def test_case_17_an_overlong_hold_is_logged_and_counted_but_not_ended() -> None:
    async with stack(max_hold=0.1) as (upstream, proxy):
        end = asyncio.Event()
        upstream.script = after(end, answer(b'{"long":"answer"}'))
        async with RawClient(proxy.port) as client:
            client.chat()
            entry = await proxy.logged("overlong_hold")
            assert (entry["cls"], entry["model"], entry["level"]) == ("llm", "chat-a", "warning")
            await proxy.until(holders=1)
            end.set()
            assert (await client.answer()).json == {"long": "answer"}
        assert await proxy.metric('gpu_lease_overlong_holds_total{class="llm"}') == 1
        assert await proxy.metric("gpu_lease_orphans_total") == 0
        await proxy.drained(upstream)
