"""The live page without a browser: what it says, to whom, who may cancel, and how its events come and end."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from harness import TTS, InProcess, Proxy, RawClient, Upstream, after, answer, clients
from lease_support import CHAT, Clock
from lease_support import TTS as SPEECH
from proxy.errors import Cancelled
from proxy.history import FINISHED_SHOWN, MINUTES, History
from proxy.lease import Hold, Leases
from proxy.live import Hosts
from proxy.live.chart import HEIGHT, WIDTH, rectangles
from proxy.live.html import page
from proxy.live.view import make_view, seconds_text
from proxy.router import ClassRouter
from proxy.rwlock import Policy
from proxy.tickets import Bounds, Terms
from proxy.views import HolderView, WaiterView, shown_client

CLASSES = ("llm", "tts", "embed")

Fields = dict[str, str | None]


class World:
    """Leases with a history, and a clock for both."""

    def __init__(self) -> None:
        self.clock = Clock(6000.0)
        self.history = History(clock=self.clock, wall=self.clock)
        bounds = Bounds(300, 300, lambda _: 600.0)
        self.leases = Leases(ClassRouter(), lambda _: 10, Policy(), bounds, (self.history,), clock=self.clock)

    async def served(self, what: Any, seconds: float, client: str = "10.0.0.1", outcome: str = "ok") -> None:
        """One request that is granted at once, and held for so long."""
        hold = self.leases.hold(what, client)
        async with hold:
            self.clock.now += seconds
            hold.ticket.outcome = outcome

    def view(self) -> dict[str, Any]:
        """What the page would show."""
        return make_view(self.leases, self.history, CLASSES, self.clock)


@pytest.fixture
async def world() -> World:
    return World()


# --- what has been


async def test_the_last_fifty_requests_are_remembered_with_wait_hold_and_outcome(world: World) -> None:
    for index in range(FINISHED_SHOWN + 10):
        await world.served(CHAT, 2.0, outcome="upstream_error" if index % 2 else "ok")
    assert len(world.history.finished) == FINISHED_SHOWN
    newest = world.history.finished[-1]
    assert (newest.id, newest.waited, newest.held, newest.outcome) == (60, 0.0, 2.0, "upstream_error")
    assert newest.at == world.clock.now


async def test_who_leaves_or_is_cancelled_has_a_wait_and_no_hold(world: World) -> None:
    holder = world.leases.hold(SPEECH, "a")
    async with holder:
        waits = [asyncio.create_task(_wait(world.leases, str(index))) for index in range(2)]
        await asyncio.sleep(0)
        world.clock.now += 3
        waits[0].cancel()
        number = next(waiter.id for waiter in world.leases.snapshot().waiters if waiter.client == "1")
        assert world.leases.cancel(number)
        assert not world.leases.cancel(number)
        assert not world.leases.cancel(holder.ticket.id), "what is held is not a waiter"
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert isinstance(results[1], Cancelled)
        assert world.leases.lock.waiting_count == 0
        ended = [(one.outcome, one.waited, one.held) for one in world.history.finished]
        assert ended == [("cancelled", 3.0, None)] * 2
    assert not world.leases.lock.held


async def _wait(leases: Leases, client: str) -> None:
    async with leases.hold(CHAT, client):
        pass


async def test_those_behind_a_cancelled_waiter_are_served_in_that_very_call(world: World) -> None:
    """A reader behind a writer behind a reader: with the writer gone nothing stands before it."""
    world.leases = Leases(ClassRouter(), lambda _: 10, Policy("fifo"), world.leases.bounds, (world.history,))
    async with world.leases.hold(CHAT, "a"):
        writer = asyncio.create_task(_hold_writer(world.leases))
        await asyncio.sleep(0)
        reader = asyncio.create_task(_wait(world.leases, "c"))
        await asyncio.sleep(0)
        assert world.leases.lock.waiting_count == 2
        world.leases.cancel(world.leases.snapshot().waiters[0].id)
        assert (world.leases.lock.waiting_count, len(world.leases.lock.held)) == (0, 2)
        await reader
        with pytest.raises(Cancelled):
            await writer


async def _hold_writer(leases: Leases) -> None:
    async with leases.hold(SPEECH, "b"):
        pass


async def test_a_retry_that_was_moved_to_a_kept_place_can_be_cancelled_in_the_same_tick(world: World) -> None:
    world.leases = Leases(ClassRouter(), lambda _: 10, Policy(), Bounds(9, 9, lambda _: 60.0, keep_place=60.0))
    async with world.leases.hold(SPEECH, "a"):
        first, again = (world.leases.hold(CHAT, "b", Terms(b"same", attempt)) for attempt in (0, 1))
        tasks = [asyncio.create_task(_enter(hold)) for hold in (first, again)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        first.left()
        assert world.leases.cancel(again.ticket.id)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError, Cancelled]
        assert (world.leases.lock.waiting_count, list(world.leases.places.views())) == (0, [])
    assert not world.leases.lock.held


async def _enter(hold: Hold) -> None:
    async with hold:
        pass


async def test_a_kept_place_is_shown_apart(world: World) -> None:
    world.leases = Leases(ClassRouter(), lambda _: 10, Policy(), Bounds(9, 9, lambda _: 60.0, keep_place=60.0))
    async with world.leases.hold(SPEECH, "a"):
        left = world.leases.hold(CHAT, "b", Terms(b"same"))
        task = asyncio.create_task(_enter(left))
        await asyncio.sleep(0)
        task.cancel()
        left.left()
        await asyncio.gather(task, return_exceptions=True)
        tables = world.view()["tables"]
        (row,) = tables["kept"]
        assert (row["cells"][:2], row["cancel"], tables["waiters"]) == (["llm-a", "llm"], None, [])
        assert "Kept places" in page(world.view())


async def test_an_hour_is_sixty_minutes_whatever_happens_in_them(world: World) -> None:
    for _ in range(500):
        await world.served(SPEECH, 7.0)
        await world.served(CHAT, 20.0)
    minutes = world.history.hour(world.leases.turn())
    assert [minute.number for minute in minutes] == list(
        range(minutes[-1].number - MINUTES + 1, minutes[-1].number + 1)
    )
    for minute in minutes[:-1]:
        assert sum(minute.seconds.values()) == pytest.approx(60)
    assert sum(minute.waits for minute in minutes) == pytest.approx(2 * 3600 / 27, abs=6)
    drawn = rectangles(minutes, CLASSES)
    assert all(
        x >= 0 and y >= 0 and x + width <= WIDTH and y + height <= HEIGHT + 1 for _, x, y, width, height in drawn
    )


async def test_a_quiet_hour_leaves_only_the_turn(world: World) -> None:
    await world.served(CHAT, 5.0)
    world.clock.now += 2 * 3600
    minutes = world.history.hour(world.leases.turn())
    assert len(minutes) == MINUTES
    assert {minute.waits for minute in minutes} == {0}
    assert world.history.hour(None)[0].seconds == {}
    assert sum(minute.seconds["llm"] for minute in minutes) == pytest.approx(59 * 60 + world.clock.now % 60)


# --- what is shown


@pytest.mark.parametrize(
    ("client", "shown"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("fe80::1", "fe80::1"),
        ("key-0123456789abcdef", "key-012345"),
        ("owner-fedcba9876543210", "owner-fedcba"),
    ],
)
def test_a_client_is_an_address_or_the_beginning_of_a_digest(client: str, shown: str) -> None:
    assert shown_client(client) == shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (9.99, "9 s"), (59.9, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"), (3720, "1 h 02 min")],
)
def test_seconds_are_whole(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


async def test_case_77_names_are_escaped_and_shortened(world: World) -> None:
    evil = "<script>alert(1)</script>\"'&\n" + "x" * 500
    what = CHAT.__class__(**{field: getattr(CHAT, field) for field in CHAT.__slots__} | {"model": evil})
    await world.served(what, 1.0)
    text = page(world.view())
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;" in text
    assert "x" * 100 not in text


async def test_an_idle_page_stays_the_same(world: World) -> None:
    await world.served(CHAT, 1.0)
    world.clock.now = 6030.0
    before = world.view()
    world.clock.now += 0.5
    assert world.view() == before


async def test_five_hundred_waiters_are_one_page_of_bounded_size(world: World) -> None:
    world.leases.bounds = Bounds(600, 600, lambda _: 600.0)
    long = CHAT.__class__(**{field: getattr(CHAT, field) for field in CHAT.__slots__} | {"model": "m" * 5000})
    async with world.leases.hold(SPEECH, "a"):
        waits = [asyncio.create_task(world.leases.hold(long, str(index)).__aenter__()) for index in range(500)]
        await asyncio.sleep(0)
        view = world.view()
        assert len(view["tables"]["waiters"]) == 500
        assert len(json.dumps(view)) < 500 * 250
        assert len(page(view)) < 500 * 600
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


# --- over HTTP


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as upstream:
        yield upstream


@pytest.fixture
async def proxy(upstream: Upstream) -> AsyncIterator[InProcess]:
    async with InProcess(upstream.url) as proxy:
        yield proxy


async def queued(proxy: InProcess, client: RawClient) -> int:
    """The number of a speech request that waits."""
    leases = proxy.app.leases
    before = {waiter.id for waiter in leases.snapshot().waiters}
    client.tts()
    await proxy.until(lambda: len(leases.snapshot().waiters) > len(before))
    (number,) = {waiter.id for waiter in leases.snapshot().waiters} - before
    return number


async def cancel(proxy: InProcess, number: object, **fields: str | None) -> httpx.Response:
    """What `/-/cancel` answers to a request with these fields; None leaves one out."""
    host = f"127.0.0.1:{proxy.port}"
    given: Fields = {"host": host, "origin": f"http://{host}", "content-type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in fields.items()}
    headers = {name: value for name, value in given.items() if value is not None}
    return await proxy.client.post("/-/cancel", content=json.dumps({"id": number}), headers=headers)


async def test_the_page_and_its_files_may_run_nothing_that_is_not_theirs(proxy: InProcess) -> None:
    for path, content_type in (
        ("/-/", "text/html; charset=utf-8"),
        ("/-/page.js", "text/javascript; charset=utf-8"),
        ("/-/page.css", "text/css; charset=utf-8"),
        ("/-/page.svg", "image/svg+xml"),
    ):
        response = await proxy.client.get(path)
        assert (response.status_code, response.headers["content-type"]) == (200, content_type)
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    text = (await proxy.client.get("/-/")).text
    assert not re.search(r"<script(?! src=\"/-/page.js\" defer></script>)|<style|\son\w+=|\sstyle=|https?://", text)


async def test_a_cancelled_waiter_gets_503_and_is_told_not_to_come_again(upstream: Upstream, proxy: InProcess) -> None:
    end = asyncio.Event()
    upstream.script = after(end)
    async with clients(proxy.port, 3) as (holder, first, second):
        holder.tts()
        await proxy.until(lambda: len(proxy.app.leases.lock.held) == 1)
        number, _ = await queued(proxy, first), await queued(proxy, second)
        response = await cancel(proxy, number)
        assert (response.status_code, response.json()) == (200, {"id": number, "cancelled": True})
        refused = await first.answer()
        assert (refused.status, refused.json["error"]["code"]) == (503, "cancelled")
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
        assert not list(proxy.app.leases.places.views()), "no place is kept for it"
        again = await cancel(proxy, number)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "waiter_not_found")
        end.set()
        assert [(await each.answer()).status for each in (holder, second)] == [200, 200]
        assert len(upstream.of_model("tts-a")) == 2
        assert proxy.metric("gpu_lease_wait_seconds_count", **{"class": "tts", "outcome": "cancelled"}) == 1
        await proxy.idle()


async def test_a_stream_that_is_kept_alive_is_cancelled_by_an_error_event(upstream: Upstream) -> None:
    end = asyncio.Event()
    upstream.script = after(end)
    settings = {"keepalive_after": 0, "keepalive_every": 0.05}
    async with InProcess(upstream.url, **settings) as proxy, clients(proxy.port, 2) as (holder, stream):
        holder.tts()
        await proxy.until(lambda: len(proxy.app.leases.lock.held) == 1)
        stream.chat()
        await stream.until(b": queued")
        (waiter,) = proxy.app.leases.snapshot().waiters
        await cancel(proxy, waiter.id)
        rest = await stream.rest()
        assert b'"code": "cancelled"' in rest
        assert not rest.endswith(b"0\r\n\r\n")
        end.set()
        await holder.answer()
        await proxy.idle()


async def test_a_websocket_that_waits_is_cancelled_too(upstream: Upstream, proxy: InProcess) -> None:
    end = asyncio.Event()
    upstream.script = after(end)
    async with RawClient(proxy.port) as holder:
        holder.tts()
        await proxy.until(lambda: len(proxy.app.leases.lock.held) == 1)
        socket = asyncio.create_task(_connect(f"ws://127.0.0.1:{proxy.port}/upstream/chat-a/ws"))
        await proxy.until(partial(_waiting, proxy, 1))
        await cancel(proxy, proxy.app.leases.snapshot().waiters[0].id)
        with pytest.raises(InvalidStatus) as refused:
            await socket
        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["x-should-retry"] == "false"
        end.set()
        await holder.answer()
        await proxy.idle()


async def _connect(url: str) -> None:
    async with connect(url, proxy=None):
        pass


async def test_who_leaves_while_being_cancelled_leaves_nothing(upstream: Upstream, proxy: InProcess) -> None:
    end = asyncio.Event()
    upstream.script = after(end)
    async with clients(proxy.port, 3) as (holder, first, second):
        holder.tts()
        await proxy.until(lambda: len(proxy.app.leases.lock.held) == 1)
        numbers = [await queued(proxy, client) for client in (first, second)]
        first.reset()
        proxy.app.leases.cancel(numbers[0])
        proxy.app.leases.cancel(numbers[1])
        second.reset()
        end.set()
        await holder.answer()
        await proxy.idle()
        assert not list(proxy.app.leases.places.views())


REFUSED: list[tuple[Fields, str]] = [
    ({"origin": "http://evil.example"}, "action_forbidden"),
    ({"origin": "null"}, "action_forbidden"),
    ({"origin": None}, "action_forbidden"),
    ({"origin": "http://127.0.0.1"}, "action_forbidden"),
    ({"host": "evil.example", "origin": "http://evil.example"}, "action_forbidden"),
    ({"host": "127.0.0.1.evil.example", "origin": "http://127.0.0.1.evil.example"}, "action_forbidden"),
    ({"x_forwarded_for": "10.0.0.7"}, "action_forbidden"),
    ({"content_type": "text/plain"}, "bad_action"),
    ({"content_type": "application/x-www-form-urlencoded"}, "bad_action"),
    ({"content_type": None}, "bad_action"),
]


@pytest.mark.parametrize(("fields", "code"), REFUSED)
async def test_a_foreign_request_cancels_nothing(
    upstream: Upstream, proxy: InProcess, fields: Fields, code: str
) -> None:
    end = asyncio.Event()
    upstream.script = after(end)
    async with clients(proxy.port, 2) as (holder, waiter):
        holder.tts()
        await proxy.until(lambda: len(proxy.app.leases.lock.held) == 1)
        number = await queued(proxy, waiter)
        response = await cancel(proxy, number, **fields)
        assert (response.status_code, response.json()["error"]["code"]) == ({"bad_action": 400}.get(code, 403), code)
        assert response.headers["x-should-retry"] == "false"
        assert proxy.metric("gpu_lease_rejected_total", reason=code) == 1
        assert proxy.app.leases.lock.waiting_count == 1
        end.set()
        assert (await waiter.answer()).status == 200


@pytest.mark.parametrize("number", [None, "1", 1.5, True, [1], {"id": 1}, -1, 10**30])
async def test_only_a_number_can_be_cancelled(proxy: InProcess, number: object) -> None:
    response = await cancel(proxy, number)
    whole = isinstance(number, int) and not isinstance(number, bool)
    assert response.json()["error"]["code"] == ("waiter_not_found" if whole else "bad_action")


@pytest.mark.parametrize("body", [b"", b"{", b"1", b"[" * 1000, b'{"id": 1}' + b" " * 2000, b"\xff"])
async def test_what_is_no_action_is_refused_whatever_it_is(proxy: InProcess, body: bytes) -> None:
    host = f"127.0.0.1:{proxy.port}"
    fields = {"origin": f"http://{host}", "content-type": "application/json"}
    response = await proxy.client.post("/-/cancel", content=body, headers=fields)
    assert response.json()["error"]["code"] == "bad_action"


async def test_with_keys_a_key_is_needed_and_takes_the_place_of_an_origin(upstream: Upstream) -> None:
    async with InProcess(upstream.url, api_keys=["secret"], allowed_hosts=["gpu.example"]) as proxy:
        assert (await cancel(proxy, 1)).status_code == 401
        key = {"authorization": "Bearer secret"}
        cases: list[tuple[Fields, int]] = [
            ({"origin": None}, 404),
            ({"origin": None, "x_forwarded_for": "10.0.0.7"}, 404),
            ({"origin": "http://evil.example"}, 403),
            ({"host": "gpu.example", "origin": "https://gpu.example"}, 404),
            ({"host": "other.example", "origin": None}, 403),
        ]
        for fields, status in cases:
            assert (await cancel(proxy, 1, **key, **fields)).status_code == status, fields


@pytest.mark.parametrize("running", [False, True])
async def test_a_job_is_cancelled_by_its_number_and_its_id_is_shown_nowhere(
    upstream: Upstream, proxy: InProcess, running: bool
) -> None:
    end = asyncio.Event()
    upstream.script = after(end)
    leases = proxy.app.leases
    async with RawClient(proxy.port) as holder:
        if not running:
            holder.tts()
            await proxy.until(lambda: len(leases.lock.held) == 1)
        made = await proxy.client.post("/v1/audio/speech", json=TTS, headers={"prefer": "respond-async"})
        job_id, location = made.json()["id"], made.headers["location"]
        if running:
            await upstream.wait_for(lambda seen: len(seen) == 1)
        snapshot = leases.snapshot()
        views: list[HolderView | WaiterView] = [*snapshot.holders, *snapshot.waiters]
        (job,) = [view for view in views if view.is_job]
        shown = (await proxy.client.get("/-/")).text + (await proxy.client.get("/-/queue")).text
        assert job_id not in shown
        assert f"{job.id} (job)" in shown
        assert (await cancel(proxy, job.id)).status_code == 200
        assert (await proxy.client.get(location)).json()["status"] == "cancelled"
        end.set()
    await proxy.idle()


# --- the events


async def events(client: RawClient, count: int) -> list[dict[str, Any]]:
    """The next so many views."""
    views: list[dict[str, Any]] = []
    while len(views) < count:
        line = await client.until(b"\n\n", within=10)
        views += [json.loads(data) for data in re.findall(rb"^data: (.*)$", line, re.MULTILINE)]
    return views


async def test_events_tell_what_changed_and_are_coalesced(
    upstream: Upstream, proxy: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.live.feed.EVERY", 0.2)
    end = asyncio.Event()
    upstream.script = after(end)
    async with clients(proxy.port, 21) as (watcher, *others):
        watcher.send(b"GET /-/events HTTP/1.1\r\nHost: test\r\n\r\n")
        assert b"text/event-stream" in await watcher.head()
        (first,) = await events(watcher, 1)
        assert first["summary"] == "0 on the GPU, 0 waiting"
        begun = time.monotonic()
        for count, client in enumerate(others):
            client.tts()
            await proxy.until(partial(_waiting, proxy, count))
        seen = await events(watcher, 1)
        while seen[-1]["summary"] != "1 on the GPU, 19 waiting":
            seen += await events(watcher, 1)
        assert len(seen) <= (time.monotonic() - begun) / 0.2 + 2, "twenty arrivals are not twenty events"
        assert len(proxy.app.leases.snapshot().holders) == 1, "the watcher counts as nothing"
        end.set()
        for client in others:
            await client.answer()
    await proxy.idle()


def _waiting(proxy: InProcess, count: int) -> bool:
    return proxy.app.leases.lock.waiting_count == count


async def test_watchers_share_one_look(proxy: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    snapshot = proxy.app.leases.snapshot

    def counted() -> Any:
        nonlocal looks
        looks += 1
        return snapshot()

    monkeypatch.setattr("proxy.live.feed.EVERY", 30.0)
    monkeypatch.setattr(proxy.app.leases, "snapshot", counted)
    async with clients(proxy.port, 10) as ten:
        for client in ten:
            client.send(b"GET /-/events HTTP/1.1\r\nHost: test\r\n\r\n")
        for client in ten:
            await client.until(b"data: ")
    assert looks == 1


async def test_events_end_with_the_proxy_and_do_not_hold_it_up(upstream: Upstream) -> None:
    end = asyncio.Event()
    upstream.script = after(end)
    async with Proxy(upstream.url) as proxy, clients(proxy.port, 2) as (watcher, holder):
        holder.tts()
        await proxy.until(holders=1)
        watcher.send(b"GET /-/events HTTP/1.1\r\nHost: test\r\n\r\n")
        await watcher.until(b"1 on the GPU, 0 waiting")
        proxy.signal()
        await watcher.until(b"1 on the GPU, 0 waiting, shutting down")
        end.set()
        assert (await watcher.rest(10)).endswith(b"0\r\n\r\n"), "the stream ends well"
        assert await proxy.exit_code(10) == 0
        assert not [line for line in proxy.lines if "Traceback" in line]


async def test_a_quiet_stream_gives_signs_of_life(proxy: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.live.feed.EVERY", 0.01)
    monkeypatch.setattr("proxy.live.feed.QUIET", 0.05)
    async with RawClient(proxy.port) as client:
        client.send(b"GET /-/events HTTP/1.1\r\nHost: test\r\n\r\n")
        await client.until(b": nothing new")


async def test_head_of_the_events_ends(proxy: InProcess) -> None:
    response = await proxy.client.head("/-/events")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream")


# --- names of hosts


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:9393", "LOCALHOST.", "a.localhost", "127.0.0.1:80", "[::1]:9393", "192.168.1.7"),
        *("gpu-lease-proxy:9393", "tower", "tower.local", "gpu.example.org", "GPU.example.org:443"),
    ],
)
def test_hosts_that_nobody_else_can_have(host: str) -> None:
    assert Hosts(["gpu.example.org"], own="Tower").has(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        ":80",
        "evil.example",
        "127.0.0.1.evil.example",
        "127.1.x",
        "localhost.evil.example",
        "other.local",
        "[::1",
        ".",
    ],
)
def test_hosts_that_a_foreign_name_service_could_point_here(host: str) -> None:
    hosts = Hosts(["gpu.example.org"], own="tower")
    assert hosts.has(host) is (host == "[::1")  # which is one all the same


# --- a port of their own


async def test_with_an_admin_port_the_first_one_has_only_what_clients_and_probes_need(upstream: Upstream) -> None:
    upstream.script = answer(b"llama-swap")
    async with Proxy(upstream.url, admin_port=0) as proxy:
        admin = (await proxy.logged("listening"))["admin_url"]
        for path in ("/-/", "/-/queue", "/-/metrics", "/-/page.js", "/-/events", "/-/%71ueue"):
            refused = await proxy.client.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "page_not_found"), path
        assert (await proxy.client.post("/-/cancel", json={"id": 1})).status_code == 404
        assert (await proxy.client.get("/-/healthz")).status_code == 200
        assert (await proxy.client.get("/-/readyz")).status_code in {200, 503}
        assert (await proxy.client.get("/-/jobs/none")).json()["error"]["code"] == "job_not_found"
        assert (await proxy.client.get("/v1/models")).status_code == 200
        async with httpx.AsyncClient(base_url=admin, trust_env=False) as client:
            for path in ("/-/", "/-/queue", "/-/metrics", "/-/healthz", "/-/page.css"):
                assert (await client.get(path)).status_code == 200, path
            for path in ("/", "/v1/models", "/health", "/upstream/chat-a/", "//-/queue"):
                refused = await client.get(path)
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "page_not_found"), path
            assert (await client.post("/v1/audio/speech", json=TTS)).status_code == 404
            upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
            upgrade["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="
            assert (await client.get("/upstream/chat-a/ws", headers=upgrade)).status_code == 501
        assert [seen.target for seen in upstream.seen] == [b"/v1/models"]


@pytest.mark.parametrize("name", ["\ud800", "a\x00b", "\u202eabc", "é" * 300])
async def test_case_77_any_name_at_all_can_be_shown(upstream: Upstream, proxy: InProcess, name: str) -> None:
    upstream.script = answer(b"{}")
    body = json.dumps({"model": name, "messages": []}).encode()
    fields = {"content-type": "application/json"}
    await proxy.client.post("/v1/chat/completions", content=body, headers=fields)
    for path in ("/-/", "/-/queue"):
        assert (await proxy.client.get(path)).status_code == 200, path
    async with RawClient(proxy.port) as client:
        client.send(b"GET /-/events HTTP/1.1\r\nHost: test\r\n\r\n")
        await events(client, 1)
