"""Following llama-swap: a scripted one that breaks off, repeats, merges, loses or has nothing; and the simulator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from proxy import follow
from proxy.follow import Follower
from proxy.loads import Load
from simulator_support import SCALE, SMALL, Simulator, send


def envelope(kind: str, data: Any) -> bytes:
    """One message as llama-swap writes it: JSON text inside JSON."""
    return b"event:message\ndata:" + json.dumps({"type": kind, "data": json.dumps(data)}).encode() + b"\n\n"


def states(**by_model: str) -> bytes:
    return envelope("modelStatus", [{"id": model, "state": state} for model, state in by_model.items()])


class Feed(httpx.AsyncByteStream):
    """A stream of events that goes on until it is ended or broken."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.closed = asyncio.Event()

    def say(self, *parts: bytes) -> None:
        for part in parts:
            self._parts.put_nowait(part)

    def end(self) -> None:
        self._parts.put_nowait(None)

    def fail(self) -> None:
        self._parts.put_nowait(httpx.ReadError("broken"))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            if isinstance(part, Exception):
                raise part
            yield part

    async def aclose(self) -> None:
        self.closed.set()


@dataclass
class LlamaSwap(httpx.AsyncBaseTransport):
    """A scripted one. `answers` gives the body of each path that it has; each visit of its events opens a feed."""

    answers: dict[str, Any] = field(default_factory=dict)
    events: bool = True
    asked: list[str] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    running: dict[str, str] = field(default_factory=dict)
    hold: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.hold.set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if path == "/api/events" and self.events:
            feed = Feed()
            self.feeds.append(feed)
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=feed)
        if path == "/running" and "/running" not in self.answers:
            now = [{"model": model, "state": state} for model, state in self.running.items()]
            await self.hold.wait()
            return httpx.Response(200, json={"running": now})
        answer = self.answers.get(path, 404)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer) if isinstance(answer, int) else httpx.Response(200, json=answer)

    def count(self, path: str) -> int:
        return self.asked.count(path)


@dataclass
class Told:
    """A sink that writes everything down."""

    reports: list[dict[str, str]] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    profiles: list[str | None] = field(default_factory=list)
    listings: list[Any] = field(default_factory=list)
    doubt: bool = False

    def running(self, states: Mapping[str, str], asked: float) -> None:
        self.reports.append(dict(states))
        self.asked.append(asked)

    def loaded(self, load: Load) -> None:
        self.loads.append(load)

    def profile(self, name: str | None) -> None:
        self.profiles.append(name)

    def listing(self, models: Any) -> None:
        self.listings.append(models)

    def in_doubt(self) -> bool:
        return self.doubt


async def until(true: Callable[[], bool], within: float = 5.0) -> None:
    async with asyncio.timeout(within):
        while not true():  # noqa: ASYNC110 - a mock has no event for every question
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def following(
    transport: httpx.AsyncBaseTransport, *, listing: bool = False, url: str = "http://llama-swap"
) -> AsyncIterator[tuple[Follower, Told]]:
    told = Told()
    async with httpx.AsyncClient(transport=transport, base_url=url) as client:
        follower = Follower(client, told, listing=listing)
        task = asyncio.create_task(follower.run())
        try:
            yield follower, told
            assert not task.done(), "only a cancellation ends it"
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RECONNECT_SECONDS", 0.01)
    monkeypatch.setattr(follow, "DOUBT_SECONDS", 0.01)


# -- the stream


async def test_a_load_is_told_once_from_the_old_models_stop_however_often_a_state_is_repeated() -> None:
    async with following(there := LlamaSwap()) as (_, told):
        await until(lambda: bool(there.feeds))
        (feed,) = there.feeds
        feed.say(states(a="ready", b="stopped"), states(a="ready", b="stopped"))
        feed.say(states(a="stopping", b="stopped"), states(a="stopped", b="starting"))
        feed.say(states(a="stopped", b="starting"), states(a="stopped", b="ready"), states(a="stopped", b="ready"))
        await until(lambda: bool(told.loads))
        feed.say(states(a="stopped", b="ready"))
        await asyncio.sleep(0.02)
        assert [load.model for load in told.loads] == ["b"]
        assert told.loads[0].began <= told.loads[0].starting <= told.loads[0].ready


async def test_each_change_is_followed_by_a_question_and_only_the_answer_counts() -> None:
    async with following(there := LlamaSwap()) as (_, told):
        await until(lambda: told.reports == [{}] and bool(there.feeds))
        await asyncio.sleep(0.05)  # the first look that the stream causes is over
        there.running = {"a": "ready"}
        there.feeds[0].say(states(a="ready", b="ready"))
        await until(lambda: told.reports[-1] == {"a": "ready"})


async def test_messages_in_pieces_logs_and_rubbish_do_no_harm() -> None:
    async with following(there := LlamaSwap()) as (_, told):
        await until(lambda: bool(there.feeds))
        whole = states(a="starting")
        there.feeds[0].say(envelope("logData", {"data": "x" * 100_000}), b": ping\n\n", whole[:20], whole[20:])
        rubbish = [b"data: {\n\n", b"data: []\n\n", b"data: 5\n\n", b'data: {"type":"modelStatus","data":5}\n\n']
        odd: list[Any] = [None, {}, [1, None], [{"id": "far", "state": "ready", "peerID": "p"}]]
        there.feeds[0].say(*rubbish, *(envelope("modelStatus", each) for each in odd), envelope("profileChanged", []))
        there.feeds[0].say(b"event:message\ndata:\xff\xfe\n\n", envelope("unheard-of", {}))
        there.feeds[0].say(states(a="stopped"), states(a="starting"), states(a="ready"))
        await until(lambda: bool(told.loads))
        assert [load.model for load in told.loads] == ["a"]
        assert told.profiles == []
        assert len(there.feeds) == 1


@pytest.mark.parametrize("how", ["end", "fail"])
async def test_it_listens_again_and_does_not_measure_what_it_has_missed(how: str, quick: None) -> None:
    async with following(there := LlamaSwap()) as (_, told):
        await until(lambda: bool(there.feeds))
        there.feeds[0].say(states(a="starting"))
        looks = there.count("/running")
        await until(lambda: there.count("/running") > looks)
        getattr(there.feeds[0], how)()
        await until(lambda: len(there.feeds) == 2)
        there.feeds[1].say(*(states(a="ready", b=state) for state in ("stopped", "starting", "ready")))
        await until(lambda: bool(told.loads))
        assert [load.model for load in told.loads] == ["b"]
        assert there.feeds[0].closed.is_set()


async def test_a_load_that_is_under_way_when_it_begins_to_listen_is_not_measured(quick: None) -> None:
    async with following(there := LlamaSwap()) as (_, told):
        await until(lambda: bool(there.feeds))
        there.feeds[0].say(states(a="starting", b="stopped"), states(a="ready", b="stopped"))
        there.feeds[0].say(states(a="ready", b="starting"), states(a="ready", b="ready"))
        await until(lambda: bool(told.loads))
        assert [load.model for load in told.loads] == ["b"]


async def test_a_break_of_the_stream_is_followed_by_a_look_at_what_is_resident(quick: None) -> None:
    async with following(there := LlamaSwap()) as (_, told):
        await until(lambda: told.reports == [{}] and bool(there.feeds))
        await asyncio.sleep(0.02)
        there.running = {"a": "ready"}  # a message of it was lost
        there.feeds[0].end()
        await until(lambda: told.reports[-1] == {"a": "ready"})


# -- what is resident


async def test_while_a_model_moves_nothing_is_reported_and_it_asks_again_soon(quick: None) -> None:
    there = LlamaSwap(running={"a": "starting", "b": "ready"})
    async with following(there) as (_, told):
        await until(lambda: there.count("/running") >= 4)
        assert told.reports == []
        there.running = {"a": "ready", "b": "stopping"}
        seen = there.count("/running")
        await until(lambda: there.count("/running") >= seen + 3)
        assert told.reports == []
        there.running = {"a": "ready"}
        await until(lambda: told.reports == [{"a": "ready"}])


async def test_a_report_carries_the_time_of_the_question_and_not_of_the_answer() -> None:
    there = LlamaSwap()
    there.hold.clear()
    async with following(there) as (_, told):
        await until(lambda: "/running" in there.asked)
        await asyncio.sleep(0.05)
        answered = time.monotonic()
        there.hold.set()
        await until(lambda: bool(told.reports))
        assert told.asked[0] <= answered - 0.04


async def test_doubt_makes_it_look_at_once_and_then_often_until_it_is_over(quick: None) -> None:
    async with following(there := LlamaSwap(events=False)) as (follower, told):
        await until(lambda: told.reports == [{}])
        await asyncio.sleep(0.05)
        looks = there.count("/running")
        await asyncio.sleep(0.1)
        assert there.count("/running") == looks, "without a doubt it does not ask all the time"
        told.doubt = True
        follower.look()
        await until(lambda: there.count("/running") >= looks + 5)
        told.doubt = False
        await asyncio.sleep(0.05)
        looks = there.count("/running")
        await asyncio.sleep(0.1)
        assert there.count("/running") == looks


# -- a llama-swap that has none of it, or is not there

NOTHING: list[Any] = [404, 401, 500, httpx.ConnectError("refused"), {"running": None}, [], "text", {"running": [5]}]


@pytest.mark.parametrize("answer", NOTHING, ids=str)
async def test_whatever_it_answers_instead_is_taken_for_nothing(answer: Any, quick: None) -> None:
    there = LlamaSwap({"/running": answer, "/api/profiles": answer}, events=False)
    async with following(there) as (follower, told):
        for looks in range(1, 4):
            follower.look()
            await until(lambda looks=looks: there.count("/running") >= looks)  # type: ignore[misc]
        await asyncio.sleep(0.02)
        assert [report for report in told.reports if report] == []
        assert [profile for profile in told.profiles if profile] == []


async def test_a_missing_stream_is_not_asked_for_all_the_time_but_a_refused_connection_is_tried_again(
    quick: None,
) -> None:
    async with following(missing := LlamaSwap(events=False)):
        await asyncio.sleep(0.1)
        assert missing.count("/api/events") == 1
    there = LlamaSwap({"/api/events": httpx.ConnectError("refused")}, events=False)
    async with following(there) as (_, told):
        await until(lambda: there.count("/api/events") >= 3)
        there.events = True
        await until(lambda: bool(there.feeds))
        there.feeds[0].say(states(a="stopped"), states(a="starting"), states(a="ready"))
        await until(lambda: bool(told.loads))


async def test_an_answer_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    monkeypatch.setattr(follow, "ASK_SECONDS", 0.02)
    there = LlamaSwap()
    there.hold.clear()
    async with following(there) as (follower, told):
        await until(lambda: there.count("/running") == 1)
        follower.look()
        await until(lambda: there.count("/running") == 2)
        there.hold.set()
        follower.look()
        await until(lambda: told.reports == [{}] or bool(told.reports))


# -- profiles and the listing


async def test_the_profile_is_asked_for_at_the_start_and_followed() -> None:
    there = LlamaSwap({"/api/profiles": {"active": "day", "profiles": []}})
    async with following(there) as (_, told):
        await until(lambda: told.profiles == ["day"] and bool(there.feeds))
        there.feeds[0].say(*(envelope("profileChanged", {"active": name}) for name in ("night", None)))
        await until(lambda: told.profiles == ["day", "night", None])


async def test_profiles_and_the_listing_are_asked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "ABSENT_SECONDS", 0.01)
    monkeypatch.setattr(follow, "LISTING_SECONDS", 0.01)
    there = LlamaSwap({"/api/profiles": {"active": None}, "/v1/models": {"data": []}})
    async with following(there, listing=True) as (_, told):
        await until(lambda: len(told.profiles) > 2 and len(told.listings) > 2)
    async with following(there := LlamaSwap({"/v1/models": {"data": []}})) as (_, told):
        await until(lambda: bool(told.reports))
        assert "/v1/models" not in there.asked


# -- the simulator


async def test_the_simulator_is_followed_through_loads_a_reload_and_a_change_of_profile(quick: None) -> None:
    profiled = SMALL + "profiles: {night: {pins: {x: a}}}\n"
    async with (
        Simulator(profiled, time_scale=SCALE) as simulator,
        following(httpx.AsyncHTTPTransport(), url=simulator.url) as (_, told),
    ):
        await until(lambda: told.reports == [{}] or bool(told.reports))
        await send(simulator, "chat", "a")
        await send(simulator, "chat", "b")
        await until(lambda: len(told.loads) == 2)
        first, second = told.loads
        assert (first.model, second.model) == ("a", "b")
        assert first.seconds >= 4 * SCALE * 0.9
        assert second.seconds >= 4.5 * SCALE * 0.9, "with the stop of the model before"
        await until(lambda: told.reports[-1] == {"b": "ready"})
        await simulator.client.put("/api/profiles/active", json={"name": "night"})
        await until(lambda: told.profiles[-1:] == ["night"])
        await simulator.reload(profiled)
        await until(lambda: told.reports[-1] == {})
        await until(lambda: told.profiles[-1] is None)
        await send(simulator, "chat", "a")
        await until(lambda: len(told.loads) == 3)
        await simulator.client.get("/unload")
        await until(lambda: told.reports[-1] == {})
