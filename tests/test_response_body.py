"""Reading ahead: bounded for each body and for all together, resumed without fail, and with an end to patience."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.response_body import PIECE, ReadAhead, ResponseBody
from test_lock_with_simulator import in_virtual_time

PATIENCE = 60.0


@dataclass(eq=False)
class Upstream:
    """A body and the upstream that feeds it, one read at a time and only while it is read."""

    ahead: ReadAhead
    paused: bool = False
    aborted: bool = False
    given: bytes = b""
    stalled: list[float] = field(default_factory=list)
    """When its consumer has stalled."""
    body: ResponseBody = field(init=False)

    def __post_init__(self) -> None:
        self.body = ResponseBody(self, self.ahead)
        self.body.on_stall = lambda: self.stalled.append(asyncio.get_running_loop().time())

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False

    def abort(self) -> None:
        self.aborted = True
        self.body.end(httpx.ReadError("given up"))

    def give(self, *pieces: int) -> None:
        """Pieces of these sizes, all in one read."""
        assert not self.paused
        for size in pieces:
            data = random.Random(len(self.given)).randbytes(size)
            self.given += data
            self.body.push(data)

    async def take(self) -> bytes:
        return await anext(self.body)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on a clock that jumps."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        in_virtual_time(test(*args, **kwargs))

    return run


# --- pieces


async def test_small_pieces_are_taken_together_and_large_ones_cut() -> None:
    upstream = Upstream(ReadAhead())
    upstream.give(*[10_000] * 10, 2 * PIECE + 1, 10, 10)
    sizes = [len(await upstream.take()) for _ in range(5)]
    assert sizes == [60_000, 40_000, PIECE, PIECE, 21]
    assert not upstream.body._chunks


async def test_a_piece_that_is_neither_is_not_copied() -> None:
    ahead = ReadAhead()
    body = ResponseBody(Upstream(ahead), ahead)
    data = bytes(PIECE)
    body.push(data)
    assert await anext(body) is data


# --- the two bounds


async def test_one_body_is_read_on_as_soon_as_it_holds_no_more_than_its_bound() -> None:
    upstream = Upstream(ReadAhead(each=80_000))
    upstream.give(40_000, 40_000)
    assert not upstream.paused
    upstream.give(40_000, 40_000)
    assert upstream.paused
    await upstream.take()
    assert upstream.paused
    await upstream.take()
    assert not upstream.paused


async def test_when_all_is_full_each_body_is_read_as_its_own_consumer_reads() -> None:
    ahead = ReadAhead(each=1_000_000, together=100_000)
    one, two, three = (Upstream(ahead) for _ in range(3))
    one.give(40_000)
    two.give(65_000)
    assert (one.paused, two.paused) == (False, True)
    one.give(40_000)
    assert one.paused
    three.give(40_000)
    assert three.paused, "one read is never refused, and is all"
    for _ in range(5):
        await three.take()
        assert not three.paused, "whoever has taken all may be read again, whatever others hold"
        three.give(40_000)
        assert three.paused
    assert ahead.used <= ahead.together + 3 * 65_000


async def test_room_that_comes_back_is_for_all_who_were_held_back() -> None:
    ahead = ReadAhead(each=1_000_000, together=100_000)
    hog, *others = (Upstream(ahead) for _ in range(4))
    hog.give(50_000, 50_000)
    for other in others:
        other.give(1000)
    assert [other.paused for other in others] == [True] * 3
    await hog.take()
    assert [other.paused for other in (hog, *others)] == [False] * 4
    assert not ahead.held_back


@pytest.mark.parametrize("how", ["closed", "broken", "ended and closed"])
async def test_a_body_that_goes_makes_room_for_the_others(how: str) -> None:
    ahead = ReadAhead(each=1_000_000, together=250_000)
    hog, other = Upstream(ahead), Upstream(ahead)
    hog.give(300_000)
    other.give(10)
    assert other.paused
    if how == "broken":
        hog.body.end(httpx.ReadError("broken"))
        assert other.paused, "what came is still there to be read"
    elif how == "ended and closed":
        hog.body.end()
    hog.body.close()
    assert not other.paused
    assert ahead.used == 10
    assert hog.aborted is (how == "closed")
    assert not ahead.held_back
    hog.body.close()
    assert ahead.used == 10


async def test_an_ended_body_holds_its_room_until_it_is_read() -> None:
    ahead = ReadAhead(together=100_000)
    ended, other = Upstream(ahead), Upstream(ahead)
    ended.give(200_000)
    ended.body.end()
    other.give(10)
    assert other.paused
    assert b"".join([piece async for piece in ended.body]) == ended.given
    assert ended.body.exhausted
    assert not other.paused
    assert ahead.used == 10


@given(st.data())
def test_whatever_happens_nobody_is_forgotten_and_the_count_returns_to_zero(data: st.DataObject) -> None:
    ahead = ReadAhead(each=data.draw(st.integers(0, 300)), together=data.draw(st.integers(0, 600)))

    async def play() -> None:
        upstreams = [Upstream(ahead) for _ in range(4)]
        for _ in range(data.draw(st.integers(0, 60))):
            await step(data, data.draw(st.sampled_from(upstreams)))
            check(ahead, upstreams)
        for upstream in upstreams:
            upstream.body.close()
        assert ahead.used == 0
        assert not ahead.held_back

    asyncio.run(play())


async def step(data: st.DataObject, upstream: Upstream) -> None:
    match data.draw(st.sampled_from(["give", "give", "take", "end", "break", "close"])):
        case "give" if not upstream.paused and not upstream.body.ended:
            upstream.give(*data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3)))
        case "take" if upstream.body._chunks:
            await upstream.take()
        case "end":
            upstream.body.end()
        case "break":
            upstream.body.end(httpx.ReadError("broken"))
        case "close":
            upstream.body.close()


def check(ahead: ReadAhead, upstreams: list[Upstream]) -> None:
    """Who is held back has something to take, so that a consumer that reads always brings the next byte."""
    assert ahead.used == sum(upstream.body._size for upstream in upstreams)
    for upstream in upstreams:
        body = upstream.body
        if body.ended:
            assert body not in ahead.held_back
            assert body._timer is None
            continue
        full = body._size > ahead.each or (body._size > 0 and ahead.used > ahead.together)
        assert full or not upstream.paused, "nobody waits for room that is there"
        assert (body in ahead.held_back) is upstream.paused is (body._timer is not None)
        assert not upstream.paused or body._chunks


# --- patience


@virtual
async def test_a_consumer_that_takes_nothing_of_a_full_body_has_stalled() -> None:
    upstream = Upstream(ReadAhead(each=100, patience=PATIENCE))
    upstream.give(100)
    await asyncio.sleep(10 * PATIENCE)
    assert not upstream.stalled, "while the upstream is read nobody waits for this consumer"
    upstream.give(1)
    await asyncio.sleep(PATIENCE - 1)
    assert not upstream.stalled
    await asyncio.sleep(2)
    assert len(upstream.stalled) == 1
    upstream.body.close()


@virtual
async def test_whoever_takes_something_in_time_has_all_the_time_again() -> None:
    upstream = Upstream(ReadAhead(each=100, patience=PATIENCE))
    upstream.give(*[PIECE] * 20)
    for _ in range(19):
        await asyncio.sleep(PATIENCE - 1)
        await upstream.take()
        assert upstream.paused
    assert not upstream.stalled
    await asyncio.sleep(PATIENCE + 1)
    assert len(upstream.stalled) == 1
    upstream.body.close()


@virtual
async def test_what_others_take_is_not_ones_own_reading() -> None:
    ahead = ReadAhead(each=100_000, together=150_000, patience=PATIENCE)
    lazy, busy = Upstream(ahead), Upstream(ahead)
    lazy.give(110_000)
    for _ in range(10):
        await asyncio.sleep(PATIENCE / 9)
        busy.give(60_000)
        await busy.take()
    assert (len(lazy.stalled), busy.stalled) == (1, [])
    lazy.body.close()


@virtual
async def test_a_body_held_back_for_others_has_the_same_patience() -> None:
    ahead = ReadAhead(together=100, patience=PATIENCE)
    hog, other = Upstream(ahead), Upstream(ahead)
    hog.give(200)
    hog.body.end()
    other.give(1)
    await asyncio.sleep(PATIENCE + 1)
    assert (hog.stalled, len(other.stalled)) == ([], 1), "an ended body has nobody waiting behind it"
    other.body.close()


@virtual
@pytest.mark.parametrize("how", ["end", "close", "read on"])
async def test_patience_ends_with_what_it_was_for(how: str) -> None:
    upstream = Upstream(ReadAhead(each=100, patience=PATIENCE))
    upstream.give(200)
    assert upstream.paused
    if how == "end":
        upstream.body.end()
    elif how == "close":
        upstream.body.close()
    else:
        await upstream.take()
    await asyncio.sleep(2 * PATIENCE)
    assert not upstream.stalled
    upstream.body.close()


# --- for nobody


async def test_discarding_reads_on_to_the_end_and_holds_nothing() -> None:
    ahead = ReadAhead(each=100)
    upstream = Upstream(ahead)
    upstream.give(1000)
    discarding = asyncio.create_task(upstream.body.discard())
    for _ in range(10):
        await asyncio.sleep(0)
        upstream.give(1000)
    upstream.body.end(httpx.ReadError("broken"))
    await discarding
    assert ahead.used == 0
