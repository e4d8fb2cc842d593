"""The lock, one race or promise a test; `Bench.state` shows the whole lock as a list that reads like the story."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from random import Random

import pytest

from proxy.router import ClassRouter, Router
from proxy.rwlock import Claim, FairRWLock, Lease, Place, Policy, Turn
from rwlock_reference import TableRouter, sets

VECTORS = Path(__file__).parent / "vectors"

CHAT = Claim("read", frozenset({"llm"}), frozenset({"chat-a"}))
CHAT_B = Claim("read", frozenset({"llm"}), frozenset({"chat-b"}))
SPEECH = Claim("write", frozenset({"tts"}), frozenset({"tts-a"}))
IMAGE = Claim("read", frozenset({"image"}), frozenset({"flux"}))
EMBED = Claim("none", frozenset({"embed"}), frozenset({"embed-a"}))

both_policies = pytest.mark.parametrize("kind", ["fifo", "batch"])


def read(*models: str) -> Claim:
    return Claim("read", frozenset(models), frozenset(models))


def write(*models: str) -> Claim:
    return Claim("write", frozenset(models), frozenset(models))


class Bench:
    """A lock under a clock that only the test moves; leases are found by the name they asked with."""

    def __init__(
        self,
        kind: str = "batch",
        *,
        router: Router | None = None,
        switch_after: float = 30.0,
        max_turn: float = 90.0,
        slots: int = 10,
        **of_models: int,
    ) -> None:
        self.now = 0.0
        self.turns: list[Turn] = []
        policy = Policy("fifo" if kind == "fifo" else "batch", switch_after, max_turn)
        self.lock = FairRWLock(
            router or ClassRouter(),
            lambda model: of_models.get(model, slots),
            policy,
            clock=lambda: self.now,
            on_turn=self.turns.append,
        )

    def ask(self, name: str, claim: Claim, *, at: float | None = None, place: Place | None = None) -> Lease:
        self.now = self.now if at is None else at
        return self.lock.request(claim, owner=name, place=place)

    def warm(self, name: str, claim: Claim) -> Lease:
        """A lease that has its model loaded already."""
        lease = self.ask(name, claim)
        lease.answered()
        return lease

    def state(self) -> list[str]:
        held = [f"{each.owner} {'loads' if each.loading else 'holds'}" for each in self.lock.held]
        return held + [f"{each.owner} waits" for each in self.lock.waiting] + ["in doubt"] * self.lock.uncertain

    def resident(self) -> str:
        return "+".join(sorted(self.lock.resident))

    def turn(self) -> str:
        turn = self.lock.turn
        return f"{turn.mode} {'+'.join(sorted(turn.units))}" if turn else "none"


# -- cases.md, part A


@both_policies
def test_case_01_readers_behind_a_writer_that_leaves_are_served_at_once(kind: str) -> None:
    bench = Bench(kind, switch_after=0.0)
    bench.warm("R1", CHAT)
    writer = bench.ask("W", SPEECH)
    bench.ask("R2", CHAT, at=0.1)
    assert bench.state() == ["R1 holds", "W waits", "R2 waits"]
    writer.release()
    assert bench.state() == ["R1 holds", "R2 loads"]


class CountingRouter:
    """Any models fit; counts how often it is asked."""

    asked = 0

    def evict(self, unit: str, resident: AbstractSet[str]) -> frozenset[str]:
        self.asked += 1
        return frozenset()


class CountingLock(FairRWLock):
    """Counts what is given and what comes back."""

    given = back = 0

    def _give(self, lease: Lease, turn: Turn | None) -> None:
        super()._give(lease, turn)
        self.given += 1
        modes = [each.claim.mode for each in self.held]
        assert "write" not in modes or len(modes) == 1

    def _leave_holders(self, lease: Lease) -> None:
        super()._leave_holders(lease)
        self.back += 1


async def _visit(lock: FairRWLock, claim: Claim, ticks: int) -> None:
    lease = lock.request(claim)
    try:
        await lease.wait()
        assert lease.held
        for _ in range(ticks):
            await asyncio.sleep(0)
    finally:
        lease.release()
        lease.release()


async def _random_visits(random: Random) -> CountingLock:
    now = 0.0
    policy = Policy("fifo" if random.random() < 0.5 else "batch", 1.0, 3.0)
    lock = CountingLock(ClassRouter(), lambda model: 2, policy, clock=lambda: now)
    tasks: list[asyncio.Task[None]] = []
    for _ in range(random.randint(3, 14)):
        now += random.choice((0.0, 0.5, 2.0))
        what = random.random()
        if what < 0.5 or not tasks:
            visit = _visit(lock, random.choice((CHAT, CHAT_B, SPEECH)), random.randrange(3))
            tasks.append(asyncio.ensure_future(visit))
        elif what < 0.75:
            random.choice(tasks).cancel()
        elif what < 0.85 and lock.held:  # the grant and the cancel fall into one tick
            lock.held[0].release()
            random.choice(tasks).cancel()
        else:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    return lock


async def test_case_02_ten_thousand_random_schedules_of_cancels_leave_nothing_behind() -> None:
    for seed in range(10_000):
        lock = await _random_visits(Random(seed))
        assert (lock.held, lock.waiting, lock.given - lock.back) == ([], [], 0), f"seed {seed}"


async def test_case_03_a_lease_is_released_by_another_task_than_its_owner() -> None:
    bench = Bench()

    async def handler() -> None:
        lease = bench.ask("R1", CHAT)
        await asyncio.wait_for(lease.wait(), 1)
        await asyncio.create_task(body(lease))

    async def body(lease: Lease) -> None:
        lease.release()

    await asyncio.create_task(handler())
    assert bench.state() == ["in doubt"]


TICK = 1 / 16  # exact in binary, so that bounds are met exactly


class Crowd:
    """A fixed number of clients, each asking again as soon as it is served; `seconds` is how long a request takes."""

    def __init__(self, bench: Bench, claim: Claim, size: int, seconds: float) -> None:
        self.bench, self.claim, self.seconds = bench, claim, seconds
        self.leases = [bench.ask("crowd", claim) for _ in range(size)]

    def step(self) -> None:
        for place, lease in enumerate(self.leases):
            lease.answered()
            if lease.granted is not None and self.bench.now >= lease.granted + self.seconds:
                lease.release()
                self.leases[place] = self.bench.ask("crowd", self.claim)


def _wait_of_one(bench: Bench, crowd: Crowd, claim: Claim) -> float:
    one: Lease | None = None
    for tick in range(400):
        bench.now = tick * TICK
        crowd.step()
        if bench.now == 1.0:
            one = bench.ask("one", claim)
        if one is not None and one.granted is not None:
            return one.granted - one.arrived
    raise AssertionError("starved")


@both_policies
def test_case_04_one_chat_is_served_among_steady_speech(kind: str) -> None:
    bench = Bench(kind, switch_after=2.0, max_turn=6.0)
    wait = _wait_of_one(bench, Crowd(bench, SPEECH, 4, 0.2), CHAT)
    assert wait <= (2.0 if kind == "batch" else 0.0) + 4 * (0.2 + TICK)
    assert len(bench.turns) == 2


@both_policies
def test_case_04_one_speech_is_served_among_steady_chats(kind: str) -> None:
    bench = Bench(kind, switch_after=2.0, max_turn=6.0)
    wait = _wait_of_one(bench, Crowd(bench, CHAT, 5, 1.0), SPEECH)
    assert wait <= (2.0 if kind == "batch" else 0.0) + 1.0 + TICK
    assert len(bench.turns) == 2


@both_policies
def test_case_05_new_chats_pass_a_waiting_writer_for_switch_after_at_most(kind: str) -> None:
    bench = Bench(kind, switch_after=2.0, max_turn=6.0, slots=100)
    first = bench.warm("R1", CHAT)
    bench.ask("W", SPEECH)
    chats = [bench.ask(f"C{number}", CHAT, at=number / 20) for number in range(50)]
    passed = [chat for chat in chats if chat.held]
    assert [chat.arrived for chat in passed] == ([number / 20 for number in range(40)] if kind == "batch" else [])
    for lease in (first, *passed):
        lease.release()
    assert bench.state()[:1] == ["W loads"]
    assert bench.state().count("W waits") == 0


@pytest.mark.parametrize("ticks", range(5))
async def test_case_07_a_cancel_at_any_await_around_the_grant_leaves_nothing_held(ticks: int) -> None:
    bench = Bench()
    holder = bench.warm("W", SPEECH)
    task = asyncio.create_task(_visit(bench.lock, CHAT, 2))
    await asyncio.sleep(0)
    holder.release()
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert (bench.lock.held, bench.lock.waiting) == ([], [])
    assert bench.ask("next", SPEECH).held


async def test_case_17_the_lease_of_a_dead_task_can_be_taken_back_once() -> None:
    bench = Bench("fifo")

    async def dies() -> Lease:
        lease = bench.warm("orphan", SPEECH)
        await lease.wait()
        return lease

    lease = await asyncio.create_task(dies())
    bench.ask("R", CHAT)
    bench.ask("W", SPEECH)
    assert bench.state() == ["orphan holds", "R waits", "W waits"]
    lease.release()
    assert bench.state() == ["R loads", "W waits"]
    lease.release()
    assert bench.state() == ["R loads", "W waits"]


def test_case_17_a_release_whose_path_raises_has_given_the_lease_back_all_the_same() -> None:
    bench = Bench()
    lease = bench.warm("W", SPEECH)
    bench.ask("R", CHAT)

    def broken(turn: Turn) -> None:
        raise ValueError("an observer that must not raise")

    bench.lock._on_turn = broken
    with pytest.raises(ValueError, match="must not raise"):
        lease.release()
    assert bench.state() == ["R waits"]
    lease.release()
    bench.lock.reconfigure(ClassRouter(), lambda model: 10, Policy())
    assert bench.state() == ["R loads"]


# -- waiting, cancelling, refusing


async def test_a_waiter_returns_from_wait_as_a_holder() -> None:
    bench = Bench()
    first = bench.warm("W1", SPEECH)
    second = bench.ask("W2", SPEECH)
    task = asyncio.create_task(second.wait())
    await asyncio.sleep(0)
    assert bench.state() == ["W1 holds", "W2 waits"]
    first.release()
    assert bench.state() == ["W2 loads"]
    assert not task.done()
    await task
    assert second.held


async def test_wait_after_the_grant_returns_without_giving_up_the_loop() -> None:
    bench = Bench()
    lease = bench.ask("R", CHAT)
    with pytest.raises(StopIteration):
        lease.wait().send(None)
    assert bench.state() == ["R loads"]


async def test_cancel_while_waiting_leaves_the_queue_and_wakes_those_behind() -> None:
    bench = Bench("fifo")
    bench.warm("R1", CHAT)
    writer = asyncio.create_task(bench.ask("W", SPEECH).wait())
    reader = asyncio.create_task(bench.ask("R2", CHAT).wait())
    await asyncio.sleep(0)
    assert bench.state() == ["R1 holds", "W waits", "R2 waits"]
    writer.cancel()
    await asyncio.wait([writer])
    assert bench.state() == ["R1 holds", "R2 loads"]
    await reader


async def test_cancel_in_the_tick_of_the_grant_passes_the_lease_on() -> None:
    bench = Bench("fifo")
    first = bench.warm("W1", SPEECH)
    second = asyncio.create_task(bench.ask("W2", SPEECH).wait())
    third = asyncio.create_task(bench.ask("R3", CHAT).wait())
    await asyncio.sleep(0)
    first.release()
    assert bench.state() == ["W2 loads", "R3 waits"]
    second.cancel()
    await asyncio.wait([second])
    assert second.cancelled()
    assert bench.state() == ["R3 loads", "in doubt"]
    await third


async def test_cancel_just_before_the_grant_in_the_same_tick_passes_the_lease_on() -> None:
    bench = Bench("fifo")
    first = bench.warm("W1", SPEECH)
    second = asyncio.create_task(bench.ask("W2", SPEECH).wait())
    bench.ask("R3", CHAT)
    await asyncio.sleep(0)
    second.cancel()
    first.release()
    assert bench.state() == ["W2 loads", "R3 waits"]
    await asyncio.wait([second])
    assert bench.state() == ["R3 loads", "in doubt"]


async def test_a_timeout_in_the_tick_of_the_grant_passes_the_lease_on() -> None:
    bench = Bench("fifo")
    first = bench.warm("W1", SPEECH)
    second = bench.ask("W2", SPEECH)
    bench.ask("R3", CHAT)

    async def wait_briefly() -> None:
        async with asyncio.timeout(0) as timeout:
            timeout.reschedule(asyncio.get_running_loop().time())
            first.release()
            await second.wait()
            await asyncio.sleep(1)

    with pytest.raises(TimeoutError):
        await wait_briefly()
    second.release()
    assert bench.state() == ["R3 loads", "in doubt"]


def test_release_twice_is_one_release() -> None:
    bench = Bench()
    one, two = bench.warm("R1", CHAT), bench.warm("R2", CHAT)
    one.release()
    one.release()
    assert bench.state() == ["R2 holds"]
    two.release()
    assert bench.state() == []


def test_the_first_time_of_release_is_kept() -> None:
    bench = Bench()
    lease = bench.warm("R1", CHAT)
    bench.now = 3.0
    lease.release()
    bench.now = 5.0
    lease.release()
    assert (lease.granted, lease.ended) == (0.0, 3.0)


async def test_refuse_raises_where_the_waiter_waits_and_serves_those_behind() -> None:
    bench = Bench("fifo")
    bench.warm("R1", CHAT)
    writer = bench.ask("W", SPEECH)
    bench.ask("R2", CHAT)
    task = asyncio.create_task(writer.wait())
    await asyncio.sleep(0)
    writer.refuse(LookupError("too long"))
    assert bench.state() == ["R1 holds", "R2 loads"]
    with pytest.raises(LookupError, match="too long"):
        await task


async def test_refuse_before_wait_raises_from_wait_instead_of_sleeping_for_ever() -> None:
    bench = Bench()
    bench.warm("W1", SPEECH)
    lease = bench.ask("W2", SPEECH)
    lease.refuse(LookupError("draining"))
    with pytest.raises(LookupError, match="draining"):
        await asyncio.wait_for(lease.wait(), 1)


async def test_refuse_and_cancel_in_one_tick_leave_nothing() -> None:
    bench = Bench()
    bench.warm("W1", SPEECH)
    lease = bench.ask("W2", SPEECH)
    task = asyncio.create_task(lease.wait())
    await asyncio.sleep(0)
    lease.refuse(LookupError("draining"))
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert bench.state() == ["W1 holds"]


async def test_refuse_of_a_granted_lease_changes_nothing() -> None:
    bench = Bench()
    first = bench.warm("W1", SPEECH)
    second = bench.ask("W2", SPEECH)
    task = asyncio.create_task(second.wait())
    await asyncio.sleep(0)
    first.release()
    second.refuse(LookupError("too late"))
    assert bench.state() == ["W2 loads"]
    await task
    second.release()
    second.refuse(LookupError("much too late"))
    assert bench.lock.held == []


async def test_a_waiter_that_another_task_releases_does_not_sleep_for_ever() -> None:
    bench = Bench()
    bench.warm("W1", SPEECH)
    lease = bench.ask("W2", SPEECH)
    task = asyncio.create_task(lease.wait())
    await asyncio.sleep(0)
    lease.release()
    assert bench.state() == ["W1 holds"]
    with pytest.raises(RuntimeError, match="released"):
        await asyncio.wait_for(task, 1)


async def test_wait_on_a_lease_that_has_ended_is_an_error() -> None:
    bench = Bench()
    lease = bench.warm("W1", SPEECH)
    lease.release()
    with pytest.raises(RuntimeError, match="released"):
        await lease.wait()


def test_a_lease_says_what_it_is() -> None:
    bench = Bench()
    first, second = bench.ask("W1", SPEECH), bench.ask("W2", SPEECH)
    assert [repr(each) for each in (first, second)] == [
        "<Lease 0 write ['tts'] held>",
        "<Lease 1 write ['tts'] waiting>",
    ]
    second.release()
    assert repr(second) == "<Lease 1 write ['tts'] ended>"


# -- kept places


def kept(lease: Lease) -> Place:
    place = lease.keep()
    assert place is not None
    return place


@both_policies
def test_who_comes_back_to_its_place_goes_before_those_who_came_later(kind: str) -> None:
    bench = Bench(kind)
    holder = bench.warm("W1", SPEECH)
    place = kept(bench.ask("W2", SPEECH, at=1.0))
    bench.ask("W3", SPEECH, at=2.0)
    back = bench.ask("W2 again", SPEECH, at=3.0, place=place)
    assert bench.state() == ["W1 holds", "W2 again waits", "W3 waits"]
    bench.now = 5.0
    holder.release()
    assert bench.state() == ["W2 again loads", "W3 waits"]
    assert (back.arrived, back.granted) == (1.0, 5.0), "it has waited since it first came"


@both_policies
def test_while_a_place_is_kept_newcomers_are_served(kind: str) -> None:
    bench = Bench(kind)
    bench.warm("R1", CHAT)
    place = kept(bench.ask("W", SPEECH))
    assert (bench.state(), bench.lock.waiting_count) == (["R1 holds"], 0)
    bench.ask("R2", CHAT, at=50.0)
    assert bench.state() == ["R1 holds", "R2 loads"], "after switch_after of a waiter this one would wait"
    bench.ask("W again", SPEECH, at=51.0, place=place)
    bench.ask("R3", CHAT)
    assert bench.state() == ["R1 holds", "R2 loads", "W again waits", "R3 waits"]


def test_who_keeps_its_place_serves_those_behind_in_the_same_call() -> None:
    bench = Bench("fifo")
    bench.warm("R1", CHAT)
    writer = bench.ask("W", SPEECH)
    bench.ask("R2", CHAT)
    place = kept(writer)
    assert (bench.state(), writer.ended) == (["R1 holds", "R2 loads"], 0.0)
    assert writer.keep() is None
    writer.release()
    writer.refuse(ValueError())
    assert bench.ask("W again", SPEECH, place=place).number == writer.number


def test_who_comes_back_and_is_served_at_once_has_waited_from_its_first_arrival() -> None:
    bench = Bench()
    holder = bench.warm("W1", SPEECH)
    place = kept(bench.ask("W2", SPEECH, at=1.0))
    holder.release()
    back = bench.ask("W2 again", SPEECH, at=4.0, place=place)
    assert (back.arrived, back.granted) == (1.0, 4.0)


def test_only_a_waiter_has_a_place_to_keep() -> None:
    bench = Bench()
    holder = bench.warm("W", SPEECH)
    assert holder.keep() is None
    assert bench.state() == ["W holds"]
    holder.release()
    assert holder.keep() is None


def test_a_place_is_taken_up_once() -> None:
    bench = Bench()
    bench.warm("W1", SPEECH)
    place = kept(bench.ask("W2", SPEECH))
    bench.ask("W3", SPEECH)
    bench.ask("W2 again", SPEECH, place=place)
    bench.ask("W2 a third time", SPEECH, place=place)
    assert bench.state() == ["W1 holds", "W2 again waits", "W3 waits", "W2 a third time waits"]


def test_a_place_can_be_kept_again_and_again() -> None:
    bench = Bench()
    bench.warm("W1", SPEECH)
    first = kept(bench.ask("W2", SPEECH, at=1.0))
    second = kept(bench.ask("W2 again", SPEECH, at=2.0, place=first))
    bench.ask("W3", SPEECH)
    bench.lock.forget_place(first)
    assert bench.ask("W2 a third time", SPEECH, at=3.0, place=second).arrived == 1.0
    assert bench.state() == ["W1 holds", "W2 a third time waits", "W3 waits"]


def test_who_comes_back_to_a_forgotten_place_is_a_newcomer() -> None:
    bench = Bench()
    bench.warm("W1", SPEECH)
    place = kept(bench.ask("W2", SPEECH))
    bench.ask("W3", SPEECH)
    bench.lock.forget_place(place)
    bench.lock.forget_place(place)
    back = bench.ask("W2 again", SPEECH, at=7.0, place=place)
    assert (back.arrived, bench.state()) == (7.0, ["W1 holds", "W3 waits", "W2 again waits"])


def test_who_comes_back_for_something_else_is_a_newcomer_and_its_place_is_gone() -> None:
    bench = Bench()
    bench.warm("W1", SPEECH)
    place = kept(bench.ask("C1", CHAT))
    bench.ask("W2", SPEECH)
    bench.ask("C1 wants b", CHAT_B, place=place)
    bench.ask("C1 again", CHAT, place=place)
    assert bench.state() == ["W1 holds", "W2 waits", "C1 wants b waits", "C1 again waits"]


def test_a_kept_place_moves_behind_everybody_with_the_turn_it_was_kept_in() -> None:
    bench = Bench(switch_after=0.0, max_turn=1.0, slots=1)
    first = bench.warm("C1", CHAT)
    waiters = [bench.ask(f"C{number}", CHAT) for number in (2, 3, 4)]
    places = [kept(waiters[0]), kept(waiters[2])]
    bench.ask("S", SPEECH)
    bench.ask("I", IMAGE)
    bench.now = 1.0
    first.release()
    assert bench.state() == ["S loads", "I waits", "C3 waits"]
    bench.ask("C5", CHAT)
    for name, place in zip(("C2 again", "C4 again"), places, strict=True):
        bench.ask(name, CHAT, place=place)
    assert bench.state() == ["S loads", "I waits", "C2 again waits", "C3 waits", "C4 again waits", "C5 waits"]


def test_the_turn_that_begins_as_a_place_is_kept_moves_that_place_too() -> None:
    bench = Bench(router=sets("ab", "ax"), a=1)
    bench.warm("X", read("x")).release()
    bench.warm("A", read("a"))
    blocks = bench.ask("A+X", read("a", "x"))
    bench.ask("B", read("b"))
    bench.ask("C", read("c"))
    assert bench.state() == ["A holds", "A+X waits", "B waits", "C waits"]
    place = kept(blocks)
    assert bench.state() == ["A holds", "B loads", "C waits"]
    bench.ask("A+X again", read("a", "x"), place=place)
    assert bench.state() == ["A holds", "B loads", "C waits", "A+X again waits"]


def test_who_kept_its_place_as_the_turn_began_counts_as_queued_then() -> None:
    bench = Bench(switch_after=0.0, max_turn=9.0)
    first = bench.warm("C", CHAT)
    bench.ask("S1", SPEECH)
    bench.ask("I", IMAGE)
    place = kept(bench.ask("S2", SPEECH))
    first.release()
    bench.lock.held[0].answered()
    bench.ask("S3", SPEECH, at=1.0)
    bench.ask("S2 again", SPEECH, place=place)
    assert bench.state() == ["S1 holds", "I waits", "S2 again waits", "S3 waits"]
    bench.lock.held[0].release()
    assert bench.state() == ["S2 again loads", "I waits", "S3 waits"]
    bench.lock.held[0].answered()
    bench.lock.held[0].release()
    assert bench.state() == ["I loads", "S3 waits"]


def test_mode_none_keeps_its_place_too() -> None:
    bench = Bench(slots=1)
    bench.ask("E1", EMBED)
    place = kept(bench.ask("E2", EMBED))
    bench.ask("E3", EMBED)
    bench.ask("E2 again", EMBED, place=place)
    assert bench.state() == ["E1 holds", "E2 again waits", "E3 waits"]


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_whoever_cancels_a_waiter_can_keep_its_place_in_the_same_tick(cancel_first: bool) -> None:
    bench = Bench("fifo")
    bench.warm("R1", CHAT)
    writer = bench.ask("W", SPEECH)
    task = asyncio.create_task(writer.wait())
    await asyncio.sleep(0)
    bench.ask("R2", CHAT)
    if cancel_first:
        task.cancel()
    place = kept(writer)
    task.cancel()
    await asyncio.wait([task])
    assert (task.cancelled(), bench.state()) == (True, ["R1 holds", "R2 loads"])
    assert bench.ask("W again", SPEECH, place=place).number == writer.number


async def test_a_waiter_cancelled_in_the_tick_of_its_grant_has_no_place_to_keep_and_gives_the_lease_back() -> None:
    bench = Bench("fifo")
    first = bench.warm("W1", SPEECH)
    second = bench.ask("W2", SPEECH)
    task = asyncio.create_task(second.wait())
    await asyncio.sleep(0)
    first.release()
    task.cancel()
    assert second.keep() is None
    await asyncio.wait([task])
    assert bench.lock.held == []


async def test_keeping_the_place_from_outside_does_not_leave_the_waiter_asleep() -> None:
    bench = Bench()
    bench.warm("W1", SPEECH)
    lease = bench.ask("W2", SPEECH)
    task = asyncio.create_task(lease.wait())
    await asyncio.sleep(0)
    kept(lease)
    with pytest.raises(RuntimeError, match="released before"):
        await asyncio.wait_for(task, 1)


def test_the_cost_of_a_decision_grows_neither_with_the_waiters_nor_with_the_places() -> None:
    """Counted as questions asked of the router, which is where the time goes."""

    def asked(others: int) -> int:
        router = CountingRouter()
        bench = Bench(router=router, slots=1)
        bench.warm("A1", read("a"))
        places = [kept(bench.ask("place", read("a"))) for _ in range(others)]
        waiters = [bench.ask("waiter", read("a")) for _ in range(others)]
        router.asked = 0
        bench.ask("back", read("a"), place=places[others // 2])
        kept(waiters[others // 2])
        bench.lock.forget_place(places[0])
        bench.lock.held[0].release()
        return router.asked

    assert asked(5) == asked(500) > 0


# -- fifo


def _schedules() -> Iterator[tuple[int, list[str], list[str]]]:
    with (VECTORS / "tokio_rwlock.jsonl").open() as lines:
        for number, line in enumerate(lines, 1):
            schedule = json.loads(line)
            yield number, schedule["ops"].split(), schedule["holders"].split()


class Replay:
    """One schedule of tokio's lock; a granted waiter is seen as a holder once its task has run."""

    def __init__(self) -> None:
        self.bench = Bench("fifo", slots=1_000)
        self.leases: dict[str, Lease] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.running: set[str] = set()

    async def run(self, op: str) -> str:
        kind, number = op[0], op[1:]
        if kind in "RW":
            claim = CHAT if kind == "R" else SPEECH
            self.leases[number] = self.bench.ask(kind.lower() + number, claim)
            self.tasks[number] = asyncio.create_task(self._wait(number))
            if self.leases[number].held:
                self.running.add(number)
        elif kind == "X":
            await self._leave(number)
        else:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.running |= {number for number, lease in self.leases.items() if lease.held}
        return self._holders()

    async def _wait(self, number: str) -> None:
        await self.leases[number].wait()

    async def _leave(self, number: str) -> None:
        self.tasks[number].cancel()
        self.leases[number].release()
        self.running.discard(number)

    def _holders(self) -> str:
        held = sorted((int(number), self.leases[number]) for number in self.running)
        return ",".join(str(lease.owner) for _, lease in held) or "-"


async def test_fifo_grants_exactly_as_tokio_does() -> None:
    replayed = 0
    for number, ops, holders in _schedules():
        replay = Replay()
        assert [await replay.run(op) for op in ops] == holders, f"schedule {number}"
        assert replay.bench.lock.held == []
        replayed += 1
    assert replayed == 500


def test_fifo_and_batch_part_ways_when_arrivals_alternate() -> None:
    order = {}
    for kind in ("fifo", "batch"):
        bench = Bench(kind)
        leases = [bench.ask(name, SPEECH if name[0] == "S" else CHAT) for name in ("C1", "S1", "C2", "S2", "C3")]
        granted: list[str] = []
        while bench.lock.held:
            granted.append(str(bench.lock.held[0].owner))
            bench.lock.held[0].answered()
            bench.lock.held[0].release()
        assert all(lease.ended is not None for lease in leases)
        order[kind] = (granted, len(bench.turns))
    assert order == {"fifo": (["C1", "S1", "C2", "S2", "C3"], 5), "batch": (["C1", "C2", "C3", "S1", "S2"], 2)}


def test_under_fifo_turns_are_only_for_show() -> None:
    bench = Bench("fifo", max_turn=0.0, switch_after=0.0)
    first = bench.warm("R1", CHAT)
    bench.ask("W", SPEECH)
    bench.ask("R2", CHAT)
    assert bench.turn() == "read llm"
    first.release()
    assert (bench.turn(), bench.state()) == ("write tts", ["W loads", "R2 waits"])
    assert [each.key for each in bench.lock.waiting] == [2]


# -- batch: who may pass, and for how long


def test_a_newcomer_passes_until_switch_after_and_not_at_it() -> None:
    bench = Bench()
    bench.warm("R1", CHAT)
    bench.ask("W", SPEECH, at=5.0)
    bench.ask("R2", CHAT, at=34.9)
    bench.ask("R3", CHAT, at=35.0)
    assert bench.state() == ["R1 holds", "R2 loads", "W waits", "R3 waits"]


def test_the_window_counts_from_loaded_and_not_from_the_begin_of_the_turn() -> None:
    bench = Bench()
    first = bench.ask("R1", CHAT)
    bench.ask("W", SPEECH, at=1.0)
    bench.now = 50.0
    first.answered()
    bench.ask("R2", CHAT, at=79.9)
    bench.ask("R3", CHAT, at=80.0)
    assert bench.state() == ["R1 holds", "R2 loads", "W waits", "R3 waits"]


def test_a_turn_that_does_not_load_counts_as_loaded_at_max_turn() -> None:
    bench = Bench()
    bench.ask("R1", CHAT)
    bench.ask("W", SPEECH)
    for name, at in (("R2", 89.0), ("R3", 119.9), ("R4", 120.0)):
        bench.ask(name, CHAT, at=at)
    assert bench.state() == ["R1 loads", "R2 loads", "R3 loads", "W waits", "R4 waits"]


def test_loaded_is_set_once_and_never_later_than_max_turn() -> None:
    bench = Bench()
    first, second = bench.ask("R1", CHAT), bench.ask("R2", CHAT)
    turn = bench.turns[0]
    bench.now = 95.0
    first.answered()
    assert turn.loaded == 90.0
    bench.now = 96.0
    second.answered()
    assert turn.loaded == 90.0


def test_a_failed_upstream_opens_the_window_and_a_cancel_does_not() -> None:
    bench = Bench()
    first, second = bench.ask("R1", CHAT), bench.ask("R2", CHAT)
    bench.now = 4.0
    first.release()
    assert bench.turns[0].loaded is None
    bench.now = 6.0
    second.fail()
    assert bench.turns[0].loaded == 6.0


def test_a_turn_without_a_load_is_loaded_when_it_begins() -> None:
    bench = Bench("fifo", router=sets("ab"))
    for claim in (read("a"), write("b"), read("a")):
        bench.warm("X", claim).release()
    assert [turn.loaded for turn in bench.turns] == [0.0, 0.0, 0.0]
    bench.now = 7.0
    bench.ask("W", write("b"))
    assert (bench.turns[-1].begun, bench.turns[-1].loaded) == (7.0, 7.0)


def test_the_answer_of_an_older_turn_does_not_open_the_window_of_this_one() -> None:
    bench = Bench("fifo", router=sets("ax", "bx"))
    bench.warm("A", read("a")).release()
    old = bench.warm("X", read("x"))
    bench.ask("B", read("b"))
    assert bench.turn() == "read b+x"
    old.answered()
    assert bench.turns[-1].loaded is None


def test_who_was_queued_when_the_turn_began_may_pass_after_the_window() -> None:
    bench = Bench()
    chat = bench.warm("R1", CHAT)
    jobs = [bench.ask(f"S{number}", SPEECH) for number in range(3)]
    chat.release()
    jobs[0].answered()
    bench.ask("R2", CHAT, at=1.0)
    bench.ask("S-new", SPEECH, at=31.0)
    bench.now = 60.0
    jobs[0].release()
    assert bench.state() == ["S1 loads", "S2 waits", "R2 waits", "S-new waits"]
    jobs[1].release()
    assert bench.state() == ["S2 loads", "R2 waits", "S-new waits", "in doubt"]
    jobs[2].release()
    assert bench.state() == ["R2 loads", "S-new waits", "in doubt"]


def test_who_was_queued_when_the_turn_began_may_pass_without_any_window() -> None:
    bench = Bench(switch_after=0.0)
    chat = bench.warm("R1", CHAT)
    for name, claim in (("S1", SPEECH), ("I", IMAGE), ("S2", SPEECH)):
        bench.ask(name, claim)
    chat.release()
    bench.ask("S3", SPEECH)
    assert bench.state() == ["S1 loads", "I waits", "S2 waits", "S3 waits"]
    bench.lock.held[0].answered()
    bench.lock.held[0].release()
    assert bench.state() == ["S2 loads", "I waits", "S3 waits"]
    bench.lock.held[0].answered()
    bench.lock.held[0].release()
    assert bench.state() == ["I loads", "S3 waits"]


def test_who_is_ahead_of_the_other_turn_goes_first_without_any_window() -> None:
    bench = Bench(switch_after=0.0, slots=1)
    first = bench.warm("A1", CHAT)
    bench.ask("A2", CHAT)
    bench.ask("S", SPEECH)
    first.release()
    assert bench.state() == ["A2 loads", "S waits"]


def test_idle_models_that_a_grant_stops_do_not_end_the_turn() -> None:
    bench = Bench(router=sets("ax", "ab", b=2))
    bench.warm("X", read("x")).release()
    bench.warm("X", write("x")).release()
    bench.warm("A", read("a"))
    assert (bench.turn(), bench.resident()) == ("read a", "a+x")
    bench.ask("B", read("b"))
    assert (bench.turn(), bench.resident()) == ("read a+b", "a+b")
    assert len(bench.turns) == 3


def test_nobody_of_a_turn_passes_once_max_turn_is_over_and_the_rest_moves_behind_everybody() -> None:
    bench = Bench()
    jobs = [bench.ask(f"S{number}", SPEECH) for number in range(4)]
    jobs[0].answered()
    bench.ask("R1", CHAT, at=1.0)
    bench.now = 90.9
    jobs[0].release()
    assert bench.state() == ["S1 loads", "S2 waits", "S3 waits", "R1 waits"]
    bench.ask("I1", IMAGE)
    bench.now = 91.0
    jobs[1].answered()
    jobs[1].release()
    assert bench.state() == ["R1 loads", "I1 waits", "S2 waits", "S3 waits"]
    assert [each.arrived for each in bench.lock.waiting] == [90.9, 0.0, 0.0]


def test_three_classes_take_turns() -> None:
    bench = Bench(switch_after=0.0, max_turn=1.0)
    for claim in (CHAT, SPEECH, IMAGE) * 3:
        bench.ask("somebody", claim)
    for _ in range(6):
        for lease in bench.lock.held:
            lease.answered()
            bench.ask("again", lease.claim)
        bench.now += 2.0
        for lease in bench.lock.held:
            lease.release()
    assert [min(turn.units) for turn in bench.turns] == ["llm", "tts", "image", "llm", "tts", "image", "llm"]


def test_leftovers_keep_their_order_and_stay_ahead_of_later_ones_of_their_kind() -> None:
    bench = Bench(switch_after=0.0, max_turn=1.0, slots=1)
    for name in ("A1", "A2", "A3"):
        bench.warm(name, CHAT)
    bench.ask("B1", CHAT_B).answered()
    bench.ask("B2", CHAT_B)
    bench.ask("S1", SPEECH)
    bench.ask("B3", CHAT_B)
    assert bench.state() == ["A1 holds", "B1 holds", "A2 waits", "A3 waits", "B2 waits", "S1 waits", "B3 waits"]
    bench.now = 1.0
    for lease in bench.lock.held:
        lease.release()
    assert bench.state() == ["S1 loads", "A2 waits", "A3 waits", "B2 waits", "B3 waits"]
    bench.ask("A4", CHAT)
    bench.lock.held[0].answered()
    bench.lock.held[0].release()
    assert bench.state() == ["A2 loads", "B2 loads", "A3 waits", "B3 waits", "A4 waits"]


def test_leftovers_that_the_next_turn_takes_too_keep_their_place() -> None:
    bench = Bench(router=sets("ax", "bx"), switch_after=0.0, max_turn=1.0, x=1)
    first = bench.warm("A1", read("a"))
    bench.warm("X1", read("x"))
    for name, claim in (("X2", read("x")), ("B1", read("b")), ("B2", write("b"))):
        bench.ask(name, claim)
    assert (bench.turn(), bench.state()) == ("read a+x", ["A1 holds", "X1 holds", "X2 waits", "B1 waits", "B2 waits"])
    bench.now = 1.0
    first.release()
    assert (bench.turn(), bench.state()) == ("read b+x", ["X1 holds", "B1 loads", "X2 waits", "B2 waits"])


def test_the_flag_of_an_earlier_turn_is_cleared_when_the_next_begins() -> None:
    bench = Bench(switch_after=0.0, max_turn=9.0)
    first = bench.warm("C1", CHAT)
    jobs = [bench.ask(f"S{number}", SPEECH) for number in range(2)]
    first.release()
    jobs[0].answered()
    bench.ask("C2", CHAT)
    bench.now = 9.0
    jobs[0].release()
    assert bench.state() == ["C2 loads", "S1 waits"]
    bench.lock.held[0].answered()
    bench.ask("I", IMAGE)
    bench.lock.held[0].release()
    assert bench.state() == ["S1 loads", "I waits"]
    bench.ask("C3", CHAT)
    bench.ask("S2", SPEECH)
    jobs[1].answered()
    jobs[1].release()
    assert bench.state() == ["I loads", "C3 waits", "S2 waits"]


def test_a_waiter_that_passes_nobody_holds_back_the_next_turn_while_its_slot_is_full() -> None:
    bench = Bench(router=sets("ab", "ax"), a=1)
    bench.warm("X", read("x")).release()
    holder = bench.warm("A1", read("a"))
    bench.ask("A2", read("a"))
    bench.ask("B", read("b"), at=1.0)
    assert bench.turn() == "read a+x"
    assert bench.state() == ["A1 holds", "A2 waits", "B waits"]
    bench.now = 91.0
    assert bench.state() == ["A1 holds", "A2 waits", "B waits"], "no timer: it is granted at the next event"
    bench.ask("A3", read("a"))
    assert bench.state() == ["A1 holds", "B loads", "A2 waits", "A3 waits"]
    holder.release()
    assert bench.state() == ["B loads", "A2 loads", "A3 waits"]


def test_a_waiter_that_would_pass_does_not_hold_back_the_next_turn_while_its_slot_is_full() -> None:
    bench = Bench(router=sets("ab", "ax"), a=1)
    busy = bench.warm("X", read("x"))
    bench.warm("A1", read("a"))
    bench.ask("B", read("b"))
    bench.ask("A2", read("a"))
    assert bench.state() == ["X holds", "A1 holds", "B waits", "A2 waits"]
    busy.release()
    assert bench.state() == ["A1 holds", "B loads", "A2 waits"]


def test_readers_and_writers_do_not_mix_even_where_their_models_fit() -> None:
    bench = Bench(router=sets("ab"))
    reader = bench.warm("R1", read("a"))
    bench.ask("W1", write("b"))
    assert bench.state() == ["R1 holds", "W1 waits"]
    reader.release()
    bench.lock.held[0].answered()
    bench.ask("R2", read("a"))
    bench.ask("W2", write("a"))
    assert bench.state() == ["W1 holds", "R2 waits", "W2 waits"]


def test_a_waiting_writer_of_the_turn_is_not_passed_by_another_turn() -> None:
    bench = Bench()
    writers = [bench.warm("W1", SPEECH), bench.ask("W2", SPEECH)]
    bench.ask("R", CHAT, at=20.0)
    assert bench.state() == ["W1 holds", "W2 waits", "R waits"]
    writers[0].release()
    assert bench.state() == ["W2 loads", "R waits"]


# -- what llama-swap stops


def test_of_overlapping_sets_the_solver_decides_and_not_what_would_fit() -> None:
    """Any two of a, b, x fit; a is hogged, x idle but resident: a request for b stops a, so it may not run beside a."""
    bench = Bench(router=sets("xb", "ab", "ax"))
    bench.warm("X", read("x")).release()
    hog = bench.warm("A1", read("a"))
    bench.ask("B", read("b"), at=1.0)
    assert bench.state() == ["A1 holds", "B waits"]
    second = bench.ask("A2", read("a"), at=30.9)
    bench.ask("A3", read("a"), at=31.0)
    assert bench.state() == ["A1 holds", "A2 loads", "B waits", "A3 waits"]
    hog.release()
    second.sent()
    second.release()
    assert bench.state() == ["B loads", "A3 waits"]
    assert bench.resident() == "b+x"
    assert bench.lock.held[0].stops == {"a"}


def test_a_resident_model_does_not_slip_into_the_turn_of_another_that_it_would_stop_if_it_were_not() -> None:
    """llama-swap's matrix stops nothing for a resident model; a and b would share a turn and b's clients hog it."""
    bench = Bench(router=sets("a", "b"))
    bench.warm("B0", read("b")).release()
    bench.ask("A0", read("a"), at=1.0).release()
    bench.now = 3.0
    bench.lock.report({"b"}, asked=2.0)
    assert (bench.turn(), bench.resident()) == ("read a", "b")
    bench.warm("B1", read("b"))
    assert bench.turn() == "read b"
    bench.ask("A1", read("a"))
    bench.ask("B2", read("b"), at=33.0)
    assert bench.state() == ["B1 holds", "A1 waits", "B2 waits"]


def test_a_resident_model_that_stops_a_busy_neighbour_waits_too() -> None:
    bench = Bench(router=TableRouter({"a": frozenset("b")}))
    bench.warm("A0", read("a")).release()
    other = bench.warm("B", read("b"))
    bench.ask("A", read("a"))
    assert bench.resident() == "a+b"
    assert bench.state() == ["B holds", "A waits"]
    other.release()
    assert bench.state() == ["A loads"]
    bench.lock.held[0].sent()
    assert bench.state() == ["A loads"], "it stops a model: only the answer ends that"
    bench.lock.held[0].answered()
    assert (bench.state(), bench.resident()) == (["A holds"], "a")


def test_models_that_fit_share_a_turn_and_load_one_after_another() -> None:
    bench = Bench(router=sets("abc"))
    first = bench.ask("A", read("a"))
    bench.ask("B", read("b"))
    bench.ask("A2", read("a"))
    assert bench.state() == ["A loads", "A2 loads", "B waits"]
    first.answered()
    assert bench.state() == ["A holds", "A2 loads", "B waits"]
    bench.lock.held[1].sent()
    assert (bench.state(), bench.turn()) == (["A holds", "A2 holds", "B loads"], "read a+b")


def test_a_request_for_several_models_takes_a_slot_of_each_and_stops_none_of_its_own() -> None:
    bench = Bench(router=sets("a", "b", "c"), a=1, b=1)
    both = bench.warm("AB", read("a", "b"))
    assert (len(both.stops), bench.resident()) == (0, "a+b")
    bench.ask("A", read("a"))
    bench.ask("C", read("c"))
    assert bench.state() == ["AB holds", "A waits", "C waits"]
    assert bench.turn() == "read a+b", "a alone would stop b: it belongs to another turn"
    both.release()
    assert bench.state() == ["A loads", "C waits"]


# -- slots and mode none


def test_a_full_slot_holds_up_only_its_own_model() -> None:
    bench = Bench(slots=1)
    first = bench.warm("A1", CHAT)
    bench.ask("A2", CHAT)
    bench.ask("B1", CHAT_B)
    assert bench.state() == ["A1 holds", "B1 loads", "A2 waits"]
    first.release()
    assert bench.state() == ["B1 loads", "A2 loads"]


def test_under_fifo_a_full_slot_holds_up_everybody_behind() -> None:
    bench = Bench("fifo", slots=1)
    bench.warm("A1", CHAT)
    bench.ask("A2", CHAT)
    bench.ask("B1", CHAT_B)
    assert bench.state() == ["A1 holds", "A2 waits", "B1 waits"]


def test_mode_none_is_never_delayed_by_another_model_and_begins_no_turn() -> None:
    bench = Bench()
    bench.warm("W1", SPEECH)
    bench.ask("W2", SPEECH)
    lease = bench.ask("E", EMBED)
    assert bench.state() == ["W1 holds", "E holds", "W2 waits"]
    for event in (lease.sent, lease.answered, lease.fail, lease.release):
        event()
    assert (bench.state(), bench.turn(), len(bench.turns)) == (["W1 holds", "W2 waits"], "write tts", 1)


def test_a_model_of_mode_none_counts_where_llama_swap_decides_what_to_stop() -> None:
    """With c loaded the cheapest for b is to stop d; without it, to stop a."""
    bench = Bench(router=sets("a", "bd", "acd", "abc", "bcd", a=3, c=3, d=3))
    visit = bench.ask("C", Claim("none", frozenset("c"), frozenset("c")))
    visit.release()
    first = bench.warm("A", read("a"))
    bench.warm("D", read("d"))
    first.release()
    bench.ask("B", read("b"))
    assert (bench.state(), bench.resident()) == (["D holds", "B waits"], "a+c+d")


def test_a_model_of_mode_none_whose_upstream_fails_is_not_of_r() -> None:
    bench = Bench(router=sets("abc"))
    visit = bench.ask("C", Claim("none", frozenset("c"), frozenset("c")))
    assert bench.resident() == "c"
    visit.fail()
    visit.release()
    assert (bench.resident(), bench.state()) == ("", [])


def test_a_resident_model_waits_while_a_load_still_stops_what_it_would_stop_too() -> None:
    """Exclusive groups: a and b each stop z."""
    bench = Bench(router=TableRouter({"a": frozenset("z"), "b": frozenset("z")}))
    bench.warm("B1", read("b"))
    bench.warm("Z", read("z")).release()
    load = bench.ask("A1", read("a"))
    bench.ask("B2", read("b"))
    bench.ask("A2", read("a"))
    assert bench.state() == ["B1 holds", "A1 loads", "A2 loads", "B2 waits"]
    load.answered()
    assert bench.state() == ["B1 holds", "A1 holds", "A2 loads", "B2 loads"]


def test_mode_none_waits_in_its_own_queue_for_a_slot() -> None:
    bench = Bench(slots=1)
    first, second = bench.ask("E1", EMBED), bench.ask("E2", EMBED)
    bench.ask("E3", EMBED)
    assert bench.state() == ["E1 holds", "E2 waits", "E3 waits"]
    second.release()
    assert bench.state() == ["E1 holds", "E3 waits"]
    bench.ask("W", SPEECH)
    assert bench.state() == ["E1 holds", "W loads", "E3 waits"]
    first.release()
    assert bench.state() == ["W loads", "E3 holds"]


def test_slots_of_one_model_are_shared_by_mode_none_and_leases() -> None:
    bench = Bench(slots=1)
    plain = Claim("none", CHAT.units, CHAT.models)
    first = bench.ask("none", plain)
    bench.ask("R", CHAT)
    assert bench.state() == ["none holds", "R waits"]
    first.release()
    assert bench.state() == ["R loads"]
    bench.ask("none", plain)
    assert bench.state() == ["R loads", "none waits"]


def test_mode_none_keeps_arrival_order_between_claims_that_share_a_model() -> None:
    bench = Bench(slots=1)
    one, two = Claim("none", EMBED.units, frozenset("e")), Claim("none", EMBED.units, frozenset("ef"))
    leases = [bench.ask("E1", one), bench.ask("E2", one), bench.ask("EF", two), bench.ask("E3", one)]
    leases[0].release()
    assert bench.state() == ["E2 holds", "EF waits", "E3 waits"]
    leases[1].release()
    assert bench.state() == ["EF holds", "E3 waits"]


# -- loading, doubt, reports


def test_a_cold_lease_loads_until_its_answer_and_not_until_it_is_sent() -> None:
    bench = Bench(router=sets("ab"))
    cold = bench.ask("A1", read("a"))
    cold.sent()
    assert bench.state() == ["A1 loads"]
    cold.answered()
    warm = bench.ask("A2", read("a"))
    assert bench.state() == ["A1 holds", "A2 loads"]
    warm.sent()
    assert bench.state() == ["A1 holds", "A2 holds"]


def test_the_end_of_a_lease_that_still_loads_puts_r_in_doubt() -> None:
    bench = Bench(router=sets("ab"))
    bench.warm("A", read("a"))
    bench.ask("B1", read("b"), at=1.0).release()
    assert (bench.state(), bench.resident()) == (["A holds", "in doubt"], "a")
    bench.ask("B2", read("b"))
    bench.ask("A2", read("a"))
    assert bench.state() == ["A holds", "A2 loads", "B2 waits", "in doubt"]
    bench.now = 2.0
    bench.lock.report({"a", "b"}, asked=1.5)
    assert bench.state() == ["A holds", "A2 loads", "B2 waits", "in doubt"], "nobody knows while something loads"
    bench.lock.held[1].sent()
    bench.lock.report({"a", "b"}, asked=1.0)
    assert bench.state() == ["A holds", "A2 holds", "B2 waits", "in doubt"], "asked before it was in doubt"
    bench.lock.report({"a", "b"}, asked=1.5)
    assert bench.state() == ["A holds", "A2 holds", "B2 loads"]


def test_a_model_that_another_lease_holds_stays_in_r_when_a_load_is_given_up() -> None:
    bench = Bench(router=sets("ab"))
    first, second = bench.ask("A1", read("a")), bench.ask("A2", read("a"))
    first.release()
    assert (bench.state(), bench.resident()) == (["A2 loads", "in doubt"], "a")
    second.release()
    assert (bench.state(), bench.resident()) == (["in doubt"], "")


def test_a_failed_upstream_puts_r_in_doubt_at_once_and_its_model_leaves_with_the_lease() -> None:
    bench = Bench(router=sets("ab"))
    bench.warm("A", read("a"))
    broken = bench.ask("B1", read("b"), at=1.0)
    broken.fail()
    bench.ask("B2", read("b"), at=2.0)
    assert (bench.state(), bench.resident()) == (["A holds", "B1 holds", "B2 loads", "in doubt"], "a+b")
    bench.now = 3.0
    bench.lock.report({"a"}, asked=2.5)
    broken.release()
    assert (bench.state(), bench.resident()) == (["A holds", "B2 loads", "in doubt"], "a+b")
    bench.lock.held[1].release()
    assert (bench.state(), bench.resident()) == (["A holds", "in doubt"], "a")


def test_no_report_ends_a_doubt_while_a_lease_with_a_failed_upstream_is_held() -> None:
    """Its model stays in R for as long as the lease is held, but is not loaded: R would be believed and wrong."""
    bench = Bench(router=sets("abc"))
    bench.warm("A", read("a"))
    broken = bench.ask("B", read("b"))
    broken.fail()
    broken.fail()
    bench.ask("C", read("c"))
    bench.now = 2.0
    bench.lock.report({"a"}, asked=1.0)
    assert bench.state() == ["A holds", "B holds", "C waits", "in doubt"]
    broken.release()
    bench.now = 4.0
    bench.lock.report({"a"}, asked=1.0)
    assert bench.state() == ["A holds", "C waits", "in doubt"]
    bench.lock.report({"a"}, asked=3.0)
    assert (bench.state(), bench.resident()) == (["A holds", "C loads"], "a+c")


def test_the_model_of_a_failed_upstream_leaves_r_when_its_last_lease_ends() -> None:
    bench = Bench(router=sets("ab"))
    bench.warm("A", read("a"))
    broken = bench.ask("B", read("b"), at=1.0)
    broken.fail()
    assert bench.resident() == "a+b"
    broken.release()
    assert (bench.state(), bench.resident()) == (["A holds", "in doubt"], "a")


def test_whoever_joined_a_load_that_is_given_up_counts_as_loading_until_its_own_answer() -> None:
    bench = Bench(router=sets("ab"))
    first, second = bench.ask("A1", read("a")), bench.ask("A2", read("a"))
    second.sent()
    bench.ask("B", read("b"))
    assert bench.state() == ["A1 loads", "A2 holds", "B waits"]
    first.release()
    second.sent()
    bench.now = 2.0
    bench.lock.report(set(), asked=1.0)
    assert bench.state() == ["A2 loads", "B waits", "in doubt"], "asked before A2 began the load anew"
    second.answered()
    assert bench.state() == ["A2 holds", "B waits", "in doubt"]
    bench.now = 4.0
    bench.lock.report({"a"}, asked=3.0)
    assert bench.state() == ["A2 holds", "B loads"]


def test_whoever_joined_a_load_that_fails_counts_as_loading_until_its_own_answer() -> None:
    bench = Bench(router=sets("ab"))
    first, second = bench.ask("A1", read("a")), bench.ask("A2", read("a"))
    second.sent()
    first.fail()
    assert bench.state() == ["A1 holds", "A2 loads", "in doubt"]
    second.fail()
    assert bench.state() == ["A1 holds", "A2 holds", "in doubt"]


def test_a_lost_load_of_a_model_that_has_answered_concerns_nobody_else() -> None:
    bench = Bench(router=sets("ab"))
    bench.warm("A1", read("a"))
    leaves, stays = bench.ask("A2", read("a")), bench.ask("A3", read("a"))
    stays.sent()
    leaves.release()
    assert bench.state() == ["A1 holds", "A3 holds", "in doubt"]


def test_in_doubt_only_a_model_that_answers_in_use_is_known_to_need_no_load() -> None:
    bench = Bench(router=sets("ab"))
    bench.warm("A1", read("a"))
    bench.ask("B", read("b")).release()
    known = bench.ask("A2", read("a"))
    known.sent()
    assert bench.state() == ["A1 holds", "A2 holds", "in doubt"]
    for lease in bench.lock.held:
        lease.release()
    unknown = bench.ask("A3", read("a"))
    unknown.sent()
    assert (bench.state(), bench.resident()) == (["A3 loads", "in doubt"], "a")
    unknown.answered()
    assert bench.state() == ["A3 holds", "in doubt"]


def test_with_nothing_held_a_doubt_delays_nobody() -> None:
    bench = Bench(router=sets("ab"))
    bench.ask("A", read("a")).release()
    assert bench.state() == ["in doubt"]
    bench.ask("B", read("b"))
    assert bench.state() == ["B loads", "in doubt"]


def test_with_classes_as_the_unit_a_doubt_changes_nothing() -> None:
    bench = Bench()
    bench.warm("R1", CHAT)
    bench.ask("R2", CHAT).release()
    bench.ask("R3", CHAT_B).fail()
    bench.ask("R4", CHAT)
    assert bench.state() == ["R1 holds", "R3 holds", "R4 loads", "in doubt"]


def test_a_report_changes_r_also_without_a_doubt() -> None:
    bench = Bench(router=sets("xb", "ab", "ax"))
    bench.warm("X", read("x")).release()
    bench.warm("A", read("a"))
    bench.ask("B", read("b"))
    assert bench.state() == ["A holds", "B waits"]
    bench.now = 1.0
    bench.lock.report({"a"}, asked=0.5)
    assert bench.state() == ["A holds", "B loads"]


def test_a_report_that_was_asked_for_before_the_last_load_is_stale() -> None:
    bench = Bench(router=sets("ab"))
    bench.now = 1.0
    lease = bench.ask("A", read("a"))
    bench.lock.report(set(), asked=1.5)
    bench.now = 2.0
    lease.answered()
    lease.release()
    bench.lock.report(set(), asked=1.5)
    assert bench.resident() == "a"
    bench.now = 3.0
    bench.lock.report(set(), asked=2.5)
    assert bench.resident() == ""


def test_late_news_of_an_ended_lease_changes_nothing() -> None:
    bench = Bench(router=sets("ab"))
    lease = bench.ask("A", read("a"))
    lease.release()
    turn = bench.turns[0]
    bench.lock.report({"a"}, asked=1.0)
    for event in (lease.sent, lease.answered, lease.fail, lease.release):
        event()
    assert (turn.loaded, bench.state()) == (None, [])


def test_a_load_reported_ready_is_the_answer_for_the_lease_that_needed_it() -> None:
    bench = Bench(router=sets("abc"))
    bench.ask("A1", read("a"), at=1.0)
    bench.ask("A2", read("a"), at=2.0)
    bench.ask("B", read("b"))
    bench.lock.ready("a", since=0.9)
    bench.lock.ready("b", since=2.0)
    assert bench.state() == ["A1 loads", "A2 loads", "B waits"]
    bench.lock.ready("a", since=1.0)
    assert (bench.state(), bench.turns[0].loaded) == (["A1 holds", "A2 loads", "B waits"], 2.0)
    bench.lock.ready("a", since=2.0)
    assert bench.state() == ["A1 holds", "A2 loads", "B waits"], "A2 only joined: it waits until it is sent"
    bench.lock.held[1].sent()
    assert bench.state() == ["A1 holds", "A2 holds", "B loads"]


def test_a_turn_whose_model_was_unloaded_behind_our_back_is_loading_again() -> None:
    bench = Bench(router=sets("a", "b"))
    bench.warm("A1", read("a")).release()
    bench.now = 10.0
    bench.lock.report(set(), asked=9.0)
    assert bench.turns[0].loaded is None
    again = bench.ask("A2", read("a"))
    bench.now = 14.0
    again.answered()
    assert bench.turns[0].loaded == 14.0


def test_the_first_answer_of_a_turn_that_had_to_load_is_told_once() -> None:
    bench = Bench()
    told: list[tuple[object, float]] = []
    bench.lock._on_first_answer = lambda lease, passed: told.append((lease.owner, passed))
    first, second = bench.ask("R1", CHAT), bench.ask("R2", CHAT)
    bench.now = 5.0
    first.answered()
    second.answered()
    assert told == [("R1", 5.0)]


def test_news_of_a_waiter_changes_nothing() -> None:
    bench = Bench()
    bench.warm("W", SPEECH)
    waiter = bench.ask("R", CHAT)
    for event in (waiter.sent, waiter.answered, waiter.fail):
        event()
    assert bench.state() == ["W holds", "R waits"]


# -- a new configuration


def test_reconfigure_keeps_leases_and_queue_and_applies_the_new_policy_at_once() -> None:
    bench = Bench("fifo")
    bench.warm("R1", CHAT)
    bench.ask("W", SPEECH)
    bench.ask("R2", CHAT)
    assert bench.state() == ["R1 holds", "W waits", "R2 waits"]
    bench.lock.reconfigure(ClassRouter(), lambda model: 10, Policy("batch"))
    assert bench.state() == ["R1 holds", "R2 loads", "W waits"]
    bench.lock.reconfigure(ClassRouter(), lambda model: 10, Policy("fifo"))
    bench.ask("R3", CHAT)
    assert bench.state() == ["R1 holds", "R2 loads", "W waits", "R3 waits"]


def test_reconfigure_with_more_slots_wakes_those_that_waited_for_one() -> None:
    bench = Bench(slots=1)
    bench.warm("A1", CHAT)
    bench.ask("E1", EMBED)
    bench.ask("A2", CHAT)
    bench.ask("E2", EMBED)
    assert bench.state() == ["A1 holds", "E1 holds", "A2 waits", "E2 waits"]
    bench.lock.reconfigure(ClassRouter(), lambda model: 2, Policy())
    assert bench.state() == ["A1 holds", "E1 holds", "E2 holds", "A2 loads"]


def test_after_a_restart_only_a_report_or_an_answer_tells_what_is_loaded() -> None:
    bench = Bench(router=sets("ab"))
    bench.warm("A1", read("a"))
    bench.warm("B", read("b")).release()
    waiting_to_be_sent = bench.ask("A2", read("a"))
    bench.lock.reconfigure(sets("ab"), lambda model: 10, Policy(), restarted=True)
    waiting_to_be_sent.sent()
    bench.ask("B2", read("b"), at=2.0)
    assert (bench.state(), bench.resident()) == (["A1 holds", "A2 loads", "B2 waits", "in doubt"], "a")
    waiting_to_be_sent.answered()
    bench.now = 4.0
    bench.lock.report({"a"}, asked=3.0)
    assert bench.state() == ["A1 holds", "A2 holds", "B2 loads"]


def test_windows_are_asked_for_the_units_of_the_turn_and_of_the_one_that_waits() -> None:
    asked: list[tuple[str, str]] = []

    def windows(turn: AbstractSet[str], other: AbstractSet[str]) -> tuple[float, float]:
        asked.append(("+".join(turn), "+".join(other)))
        return 3.0, 8.0

    bench = Bench()
    bench.lock.reconfigure(ClassRouter(), lambda model: 10, Policy(windows=windows))
    bench.warm("R1", CHAT)
    bench.ask("W", SPEECH)
    bench.ask("R2", CHAT, at=2.9)
    bench.ask("R3", CHAT, at=3.0)
    assert bench.state() == ["R1 holds", "R2 loads", "W waits", "R3 waits"]
    assert asked[-1] == ("llm", "tts")


def test_reconfigure_with_a_new_router_decides_anew_who_fits() -> None:
    bench = Bench(router=sets("a", "b"))
    bench.warm("A", read("a"))
    bench.ask("B", read("b"))
    assert bench.state() == ["A holds", "B waits"]
    bench.lock.reconfigure(sets("ab"), lambda model: 10, Policy())
    assert bench.state() == ["A holds", "B loads"]


def test_reconfigure_with_fewer_slots_takes_nothing_back() -> None:
    bench = Bench()
    leases = [bench.warm(f"R{number}", CHAT) for number in range(3)]
    bench.lock.reconfigure(ClassRouter(), lambda model: 1, Policy())
    bench.ask("R3", CHAT)
    assert bench.state() == ["R0 holds", "R1 holds", "R2 holds", "R3 waits"]
    leases[0].release()
    leases[1].release()
    assert bench.state() == ["R2 holds", "R3 waits"]
    leases[2].release()
    assert bench.state() == ["R3 loads"]
