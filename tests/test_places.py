"""Places kept for requests whose client went away. The lock's side of it is tested in test_rwlock*.py."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lease_support import CHAT, EMBED, TTS, World, settle, what
from proxy.errors import Draining, QueueFull, QueueTimeout
from proxy.lease import Hold
from proxy.pages import queue_json
from proxy.places import FRESH_WAITS
from proxy.rwlock import Policy
from proxy.tickets import Terms

SAME, OTHER = Terms(b"same"), Terms(b"other")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    world.make(keep_place=60.0)
    yield world
    for task in world.tasks.values():
        task.cancel()
    await asyncio.gather(*world.tasks.values(), return_exceptions=True)
    world.nothing_is_left()


def kept(world: World) -> list[Any]:
    """The list `kept` of the snapshot."""
    shown: list[Any] = queue_json(world.leases)["kept"]
    return shown


def again(attempt: int, identity: bytes = b"same") -> Terms:
    return Terms(identity, attempt)


# -- coming back


@pytest.mark.parametrize("policy", [Policy("fifo"), Policy("batch")])
async def test_a_request_that_comes_back_is_before_those_that_came_after_it_and_has_waited_since_then(
    world: World, policy: Policy
) -> None:
    world.make(policy, keep_place=60.0)
    holder = await world.start(TTS)
    first = await world.start(CHAT, terms=SAME)
    world.clock.now += 5
    newcomer = await world.start(what("llm", "llm-b"), terms=OTHER)
    await world.leave(first)
    world.clock.now += 5
    returned = await world.start(CHAT, terms=SAME)
    assert world.states() == ([1], [returned.ticket.id, newcomer.ticket.id])
    assert [waiter.waited_seconds for waiter in world.leases.snapshot().waiters] == [10.0, 5.0]
    holder.release()
    await settle()
    assert returned.ticket.waited == 10.0
    assert ("waited", "llm", "granted", 10.0) in world.witness.told


async def test_the_client_that_is_away_holds_up_nobody_and_reserves_no_room(world: World) -> None:
    world.make(max_queue=1, keep_place=60.0)
    holder = await world.start(TTS)
    await world.leave(await world.start(TTS, terms=SAME))
    assert kept(world) == [
        {"class": "tts", "model": "tts-a", "mode": "write", "waited_seconds": 0.0, "seconds_left": 60.0}
    ]
    assert world.leases.lock.waiting_count == 0
    world.leases.check_gate("anybody")
    newcomer = await world.start(CHAT)
    holder.release()
    await settle()
    assert world.states() == ([newcomer.ticket.id], [])


async def test_what_is_shown_of_a_place_is_how_long_ago_it_began_and_how_long_it_is_kept(world: World) -> None:
    await world.start(TTS)
    waiter = await world.start(what("tts", "tts-a", requested="voice"), terms=SAME)
    world.clock.now += 4
    await world.leave(waiter)
    world.clock.now += 10
    names = {"class": "tts", "model": "tts-a", "mode": "write", "requested": "voice"}
    assert kept(world) == [{**names, "waited_seconds": 14.0, "seconds_left": 50.0}]


async def test_a_place_is_over_after_keep_place_and_each_absence_counts_from_its_own_beginning(world: World) -> None:
    world.make(max_wait=1000.0, keep_place=60.0)
    await world.start(TTS)
    waiter = await world.start(CHAT, terms=SAME)
    for _ in range(5):
        await world.leave(waiter)
        world.clock.now += 59.9
        waiter = await world.start(CHAT, terms=SAME)
    assert world.leases.snapshot().waiters[0].waited_seconds == pytest.approx(5 * 59.9)
    await world.leave(waiter)
    world.clock.now += 60
    assert kept(world) == []
    await world.start(CHAT, terms=SAME)
    assert world.leases.snapshot().waiters[0].waited_seconds == 0.0


async def test_places_whose_time_is_over_are_swept_and_only_those(world: World) -> None:
    await world.start(TTS)
    for terms in (SAME, OTHER):
        await world.leave(await world.start(CHAT, terms=terms))
        world.clock.now += 31
    world.leases.sweep()
    assert list(world.leases.places._kept) == [b"other"]
    world.places_agree()
    world.clock.now += 31
    world.leases.sweep()
    assert not world.leases.places._kept
    assert not world.leases.lock._places


async def test_waiting_for_a_slot_is_a_place_too(world: World) -> None:
    world.make(slots=1, keep_place=60.0)
    holder = await world.start(EMBED)
    first, second = await world.start(EMBED, terms=SAME), await world.start(EMBED, terms=OTHER)
    await world.leave(first)
    returned = await world.start(EMBED, terms=SAME)
    assert world.states()[1] == [returned.ticket.id, second.ticket.id]
    holder.release()
    await settle()
    assert world.states() == ([returned.ticket.id], [second.ticket.id])


async def test_a_request_that_finds_the_gpu_free_at_its_return_is_served_and_has_waited_all_the_time(
    world: World,
) -> None:
    holder = await world.start(TTS)
    await world.leave(await world.start(CHAT, terms=SAME))
    holder.release()
    world.clock.now += 7
    returned = await world.start(CHAT, terms=SAME)
    assert world.states() == ([returned.ticket.id], [])
    assert returned.ticket.waited == 7.0
    assert kept(world) == []


async def test_a_name_that_stands_for_another_model_by_now_comes_back_to_nothing(world: World) -> None:
    await world.start(TTS)
    await world.leave(await world.start(CHAT, terms=SAME))
    world.clock.now += 5
    await world.start(TTS, terms=SAME)
    assert world.leases.snapshot().waiters[0].waited_seconds == 0.0
    assert kept(world) == []
    world.places_agree()


# -- what keeps a place, and what does not


@pytest.mark.parametrize(
    "ending", ["cancelled", "granted", "granted, then left", "timeout", "drained", "full", "off", "no identity"]
)
async def test_only_a_client_that_leaves_while_it_waits_keeps_a_place(world: World, ending: str) -> None:
    world.make(max_wait=0.01 if ending == "timeout" else 60, max_queue=2, keep_place=0 if ending == "off" else 60.0)
    holder = await world.start(TTS)
    waiter = await world.start(TTS, terms=Terms() if ending == "no identity" else SAME)
    if ending == "cancelled":
        await world.cancel(waiter)
    elif ending in {"granted", "granted, then left"}:
        holder.release()
        if ending == "granted, then left":
            await world.leave(waiter)
    elif ending == "timeout":
        await asyncio.wait([world.task_of(waiter)])
        assert isinstance(world.task_of(waiter).exception(), QueueTimeout)
    elif ending == "drained":
        world.leases.drain()
        assert isinstance(await world.error_of(waiter), Draining)
    elif ending == "full":
        await world.start(TTS)
        refused = await world.start(TTS, terms=OTHER)
        assert isinstance(await world.error_of(refused), QueueFull)
        await world.leave(refused)
    else:
        await world.leave(waiter)
        assert world.states() == ([1], [])
    assert kept(world) == []
    world.places_agree()


async def test_a_client_that_leaves_keeps_its_place_and_its_count_is_given_back(world: World) -> None:
    await world.start(TTS)
    waiter = await world.start(CHAT, "counted", SAME)
    world.clock.now += 3
    await world.leave(waiter)
    assert world.states() == ([1], [])
    assert "counted" not in world.leases._waiting_of
    assert world.witness.of("waited")[1:] == [("waited", "llm", "cancelled", 3.0)]
    assert len(kept(world)) == 1


async def test_draining_forgets_the_places(world: World) -> None:
    await world.start(TTS)
    await world.leave(await world.start(CHAT, terms=SAME))
    world.leases.drain()
    assert kept(world) == []
    assert not world.leases.lock._places


# -- bounds


async def test_there_are_at_most_max_queue_places_and_the_oldest_goes(world: World) -> None:
    world.make(max_queue=3, keep_place=60.0)
    await world.start(TTS)
    for number in range(5):
        await world.leave(await world.start(what("llm", f"m{number}"), terms=Terms(b"%d" % number)))
        world.places_agree()
    assert [place["model"] for place in kept(world)] == ["m2", "m3", "m4"]


async def test_a_full_queue_refuses_one_that_comes_back_like_any_other_and_its_place_stays(world: World) -> None:
    world.make(max_queue=1, keep_place=60.0)
    await world.start(TTS)
    await world.leave(await world.start(CHAT, terms=SAME))
    newcomer = await world.start(TTS)
    world.clock.now += 10
    assert isinstance(await world.error_of(await world.start(CHAT, terms=SAME)), QueueFull)
    assert [place["seconds_left"] for place in kept(world)] == [50.0]
    await world.cancel(newcomer)
    await world.start(CHAT, terms=SAME)
    assert world.leases.snapshot().waiters[0].waited_seconds == 10.0


async def test_the_first_three_returns_start_a_new_max_wait_and_later_ones_keep_the_last_deadline(
    world: World,
) -> None:
    assert FRESH_WAITS == 3
    await world.start(TTS)
    waiter = await world.start(CHAT, terms=SAME)
    deadlines = [waiter.ticket.deadline - 100]
    for _ in range(5):
        await world.leave(waiter)
        world.clock.now += 10
        waiter = await world.start(CHAT, terms=SAME)
        deadlines.append(waiter.ticket.deadline - 100)
    assert deadlines == [60, 70, 80, 90, 90, 90]
    assert waiter.ticket.returns == 5


async def test_one_that_comes_back_after_its_last_deadline_is_served_at_once_or_refused_at_once(world: World) -> None:
    world.make(keep_place=1000.0)
    holder = await world.start(TTS)
    waiter = await world.start(CHAT, terms=SAME)
    for seconds in (1, 1, 1, 100):
        await world.leave(waiter)
        world.clock.now += seconds
        waiter = await world.start(CHAT, terms=SAME)
    assert isinstance(await world.error_of(waiter), QueueTimeout)
    assert kept(world) == []
    waiter = await world.start(CHAT, terms=SAME)
    assert world.states() == ([1], [waiter.ticket.id]), "after the refusal it is a newcomer"
    assert waiter.ticket.returns == 0
    for seconds in (1, 1, 1, 100):
        await world.leave(waiter)
        if seconds == 100:
            holder.release()
        world.clock.now += seconds
        waiter = await world.start(CHAT, terms=SAME)
    assert world.states() == ([waiter.ticket.id], [])


# -- two live copies


async def test_a_copy_that_comes_while_the_first_waits_is_a_newcomer(world: World) -> None:
    await world.start(TTS)
    first, between = await world.start(CHAT, terms=SAME), await world.start(TTS)
    copy = await world.start(CHAT, terms=SAME)
    assert world.states()[1] == [hold.ticket.id for hold in (first, between, copy)]
    await world.leave(first)
    returned, third = await world.start(CHAT, terms=SAME), await world.start(CHAT, terms=SAME)
    assert world.states()[1] == [hold.ticket.id for hold in (returned, between, copy, third)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_of_two_copies_that_have_left_the_older_place_is_kept_from_the_last_departure_on(
    world: World, order: tuple[int, int]
) -> None:
    await world.start(TTS)
    copies = [await world.start(CHAT, terms=SAME)]
    world.clock.now += 1
    copies.append(await world.start(CHAT, terms=SAME))
    for number in order:
        world.clock.now += 10
        await world.leave(copies[number])
    assert [(place["waited_seconds"], place["seconds_left"]) for place in kept(world)] == [(21.0, 60.0)]
    world.places_agree()
    await world.start(CHAT, terms=SAME)
    await world.start(CHAT, terms=SAME)
    assert [waiter.waited_seconds for waiter in world.leases.snapshot().waiters] == [21.0, 0.0]


# -- a retry that overtakes the news of its own departure


async def start_race(world: World) -> tuple[Hold, Hold, Hold]:
    """The first try, somebody behind it, and the second try, which is there before the first has left."""
    await world.start(TTS)
    first = await world.start(CHAT, terms=again(0))
    world.clock.now += 5
    between = await world.start(TTS, terms=OTHER)
    return first, between, await world.start(CHAT, terms=again(1))


async def test_a_retry_that_is_there_already_gets_the_place_of_the_try_that_leaves(world: World) -> None:
    first, between, second = await start_race(world)
    assert world.states()[1] == [hold.ticket.id for hold in (first, between, second)]
    await world.leave(first)
    assert world.states()[1] == [second.ticket.id, between.ticket.id]
    assert [waiter.waited_seconds for waiter in world.leases.snapshot().waiters] == [5.0, 0.0]
    assert kept(world) == [], "its own is given up"
    assert second.ticket.returns == 1
    for task in (world.task_of(second), world.task_of(between)):
        assert not task.done()
    await world.leave(second)
    third = await world.start(CHAT, terms=again(2))
    assert world.states()[1] == [third.ticket.id, between.ticket.id]
    world.tasks[1].cancel()
    await settle()
    assert world.states() == ([third.ticket.id], [between.ticket.id])


async def test_a_copy_that_does_not_say_that_it_is_the_next_try_gets_no_place_of_another(world: World) -> None:
    await world.start(TTS)
    first = await world.start(CHAT, terms=again(0))
    between = await world.start(TTS)
    copies = [await world.start(CHAT, terms=again(attempt)) for attempt in (0, 2)]
    copies.append(await world.start(TTS, terms=again(1)))
    copies.append(await world.start(CHAT, terms=again(1, b"other")))
    await world.leave(first)
    assert world.states()[1] == [hold.ticket.id for hold in (between, *copies)]
    assert len(kept(world)) == 1


@pytest.mark.parametrize("how", ["cancel", "leave"])
async def test_a_retry_that_ends_in_the_tick_in_which_it_gets_the_place_leaves_nothing(world: World, how: str) -> None:
    first, between, second = await start_race(world)
    world.task_of(first).cancel()
    first.left()
    world.task_of(second).cancel()
    if how == "leave":
        second.left()
    await settle()
    assert world.states() == ([1], [between.ticket.id])
    assert len(kept(world)) == (how == "leave")
    world.places_agree()
    world.tasks[1].cancel()
    await settle()
    assert world.states() == ([between.ticket.id], [])


async def test_a_retry_that_gets_a_place_and_is_granted_in_one_tick_is_granted_once(world: World) -> None:
    first, between, second = await start_race(world)
    world.task_of(first).cancel()
    first.left()
    world.tasks[1].cancel()
    await settle()
    assert world.states() == ([second.ticket.id], [between.ticket.id])
    assert [entry[1:3] for entry in world.witness.of("waited")] == [
        ("tts", "granted"),
        ("llm", "cancelled"),
        ("llm", "granted"),
    ]


async def test_a_retry_that_was_granted_in_this_tick_needs_no_other_place(world: World) -> None:
    world.make(slots=1, keep_place=60.0)
    await world.start(TTS)
    first, copy = await world.start(CHAT, terms=again(0)), await world.start(CHAT, terms=again(0))
    await world.leave(first)
    second = await world.start(CHAT, terms=again(1))
    world.tasks[1].cancel()
    await asyncio.sleep(0)
    assert world.states() == ([second.ticket.id], [copy.ticket.id])
    turns = len(world.witness.of("turn"))
    await world.leave(copy)
    assert world.states() == ([second.ticket.id], [])
    assert len(kept(world)) == 1
    assert len(world.witness.of("turn")) == turns
    world.places_agree()


async def test_a_retry_in_the_place_of_its_first_try_still_has_its_own_timeout(world: World) -> None:
    world.make(max_wait=0.05, keep_place=60.0)
    first, between, second = await start_race(world)
    await world.leave(first)
    async with asyncio.timeout(5):
        await asyncio.wait([world.task_of(hold) for hold in (between, second)])
    assert isinstance(await world.error_of(second), QueueTimeout)
    assert world.states() == ([1], [])


# -- at random


@pytest.mark.parametrize("seed", range(20))
async def test_at_random_no_place_is_shared_lost_or_left_behind(world: World, seed: int) -> None:
    dice = random.Random(seed)
    world.make(Policy(dice.choice(["fifo", "batch"])), max_queue=6, keep_place=20.0)
    live: list[Hold] = []
    for _ in range(150):
        act = dice.choice(["come", "come", "leave", "leave", "cancel", "release", "later", "sweep"])
        live = [hold for hold in live if not world.task_of(hold).done()]
        if act == "come":
            kind = dice.choice([CHAT, TTS, EMBED])
            terms = again(dice.randrange(3), b"%s%d" % (kind.model.encode(), dice.randrange(3)))
            live.append(await world.start(kind, terms=terms))
        elif act == "later":
            world.clock.now += dice.random() * 10
        elif act == "sweep":
            world.leases.sweep()
        elif live:
            hold = dice.choice(live)
            if act == "leave":
                world.task_of(hold).cancel()
                hold.left()
            else:
                world.task_of(hold).cancel()
            if dice.random() < 0.7:
                await settle()
        lock = world.leases.lock
        world.places_agree()
        numbers = [lease.number for lease in (*lock.waiting, *lock.held)]
        numbers += [place.place.number for place in world.leases.places._kept.values()]
        assert len(numbers) == len(set(numbers)), "a place is one request's"
    for task in world.tasks.values():
        task.cancel()
