"""Bounds, waiting, observers and the snapshot around the lock. The lock's own rule is tested in test_rwlock*.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from structlog.testing import capture_logs

from lease_support import CHAT, EMBED, TTS, Failing, World, settle, what
from proxy.classify import Classification
from proxy.errors import ClientQueueFull, Draining, QueueFull, QueueTimeout, Refusal
from proxy.lease import Hold
from proxy.pages import queue_json
from proxy.rwlock import Lease, Policy
from proxy.tickets import Bounds, Terms
from proxy.windows import UNKNOWN_LOAD, Windows


@pytest.fixture
async def world() -> Any:
    world = World()
    yield world
    for task in world.tasks.values():
        task.cancel()
    await asyncio.gather(*world.tasks.values(), return_exceptions=True)
    world.nothing_is_left()


# -- bounds


async def test_the_queue_holds_max_queue_waiters_and_refuses_the_next(world: World) -> None:
    world.make(max_queue=2)
    await world.start(TTS)
    waiting = [await world.start(TTS) for _ in range(2)]
    refused = await world.start(TTS)
    assert isinstance(await world.error_of(refused), QueueFull)
    assert world.states() == ([1], [hold.ticket.id for hold in waiting])


async def test_the_gate_refuses_before_the_body_is_read_and_admits_once_there_is_room(world: World) -> None:
    world.make(max_queue=1)
    await world.start(TTS)
    world.leases.check_gate("anybody")
    waiter = await world.start(TTS)
    with pytest.raises(QueueFull):
        world.leases.check_gate("anybody")
    await world.cancel(waiter)
    world.leases.check_gate("anybody")


async def test_one_client_cannot_fill_the_queue(world: World) -> None:
    world.make(max_queue_per_client=2)
    await world.start(TTS, "other")
    for _ in range(2):
        await world.start(TTS, "greedy")
    with pytest.raises(ClientQueueFull):
        world.leases.check_gate("greedy")
    assert isinstance(await world.error_of(await world.start(TTS, "greedy")), ClientQueueFull)
    world.leases.check_gate("modest")
    await world.start(TTS, "modest")
    assert len(world.states()[1]) == 3


async def test_held_leases_do_not_count_as_waiting(world: World) -> None:
    world.make(max_queue=1, max_queue_per_client=1)
    for _ in range(3):
        await world.start(CHAT)
    world.leases.check_gate("somebody")


async def test_those_who_come_at_once_through_the_gate_still_meet_the_bound(world: World) -> None:
    """The body is read between the gate and the queue, and meanwhile others arrive."""
    world.make(max_queue=1)
    await world.start(TTS)
    for _ in range(3):
        world.leases.check_gate("somebody")
    results = [await world.start(TTS) for _ in range(3)]
    errors = [await world.error_of(hold) for hold in results[1:]]
    assert [type(error) for error in errors] == [QueueFull, QueueFull]


async def test_a_request_that_can_run_at_once_needs_no_room_in_the_queue(world: World) -> None:
    world.make(max_queue=0, max_queue_per_client=0)
    await world.start(CHAT)
    assert isinstance(await world.error_of(await world.start(TTS)), QueueFull)
    await world.start(CHAT)
    assert world.states() == ([1, 3], [])


async def test_waiting_for_a_slot_counts_like_any_other_wait_for_every_mode(world: World) -> None:
    world.make(slots=1, max_queue=2)
    for kind in (CHAT, EMBED):
        await world.start(kind)
        await world.start(kind)
    assert world.states() == ([1, 3], [2, 4])
    with pytest.raises(QueueFull):
        world.leases.check_gate("anybody")


async def test_an_overlong_wait_is_refused_and_told_apart_from_a_full_queue(world: World) -> None:
    world.make(max_wait=0.01)
    await world.start(TTS)
    waiter = await world.start(CHAT)
    async with asyncio.timeout(5):
        await asyncio.wait([world.task_of(waiter)])
    assert isinstance(await world.error_of(waiter), QueueTimeout)
    assert world.states() == ([1], [])
    assert world.witness.of("waited")[1:] == [("waited", "llm", "timeout", 0.0)]


async def test_the_longest_wait_may_differ_by_class(world: World) -> None:
    world.make(max_wait=0.01)
    world.leases.bounds = Bounds(10, 10, {"llm": 0.01, "tts": 60.0}.__getitem__)
    await world.start(TTS)
    patient, hasty = await world.start(TTS), await world.start(CHAT)
    async with asyncio.timeout(5):
        await asyncio.wait([world.task_of(hasty)])
    assert world.states() == ([1], [patient.ticket.id])


async def test_a_wait_that_ends_in_time_leaves_no_timer_behind(world: World) -> None:
    """`max_wait` is minutes, and a busy proxy has many waits in one."""
    holder, waiter = await world.start(TTS), await world.start(TTS)
    leaver = await world.start(TTS)
    timers = [timer for timer in _timers() if not timer.cancelled()]
    assert len(timers) == 2
    holder.release()
    await world.cancel(leaver)
    assert world.states() == ([waiter.ticket.id], [])
    assert all(timer.cancelled() for timer in timers)


def _timers() -> list[asyncio.TimerHandle]:
    return list(asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]


@pytest.mark.parametrize("switch_after", [0.0, 0.4, 3.0, 30.0, 1000.0])
async def test_a_refusal_names_whole_seconds_from_1_to_60_to_come_back_after(world: World, switch_after: float) -> None:
    world.make(Policy("batch", switch_after, 2000.0), max_queue=0)
    await world.start(TTS)
    assert 1 <= await retry_after(world) <= 60


async def retry_after(world: World) -> int:
    """What a request that is refused now is told."""
    error = await world.error_of(await world.start(TTS))
    assert isinstance(error, Refusal)
    field = dict(error.headers())[b"retry-after"]
    assert field.isdigit()
    return int(field)


@pytest.mark.parametrize("switch_after", [0.0, 3.0, 30.0])
async def test_retry_after_grows_with_the_waiters_ahead(world: World, switch_after: float) -> None:
    seconds = []
    world.make(Policy("batch", switch_after, 2000.0), max_queue=100, max_queue_per_client=100)
    await world.start(TTS)
    for number in range(40):
        world.leases.bounds = Bounds(number, 100, lambda _: 60.0)
        seconds.append(await retry_after(world))
        world.leases.bounds = Bounds(100, 100, lambda _: 60.0)
        await world.start(TTS)
    assert seconds == sorted(seconds)
    assert seconds[0] == max(1, switch_after)
    assert seconds[-1] == {0.0: 4, 3.0: 15, 30.0: 60}[switch_after]


async def test_retry_after_shrinks_while_the_turn_goes_on_which_begins_when_it_is_loaded(world: World) -> None:
    world.make(Policy("batch", 30.0, 90.0), max_queue=0)
    holder, seconds = await world.start(TTS), []
    for loaded in (False, False, True, False, False):
        seconds.append(await retry_after(world))
        if loaded:
            holder.lease.answered()
        world.clock.now += 20
    assert seconds == [30, 30, 30, 10, 1]


async def test_retry_after_follows_the_measured_loads_of_the_turn_and_of_the_first_that_waits_for_another(
    world: World,
) -> None:
    loads = {"tts": 4.0, "llm": 9.0, "embed": 200.0}
    windows = Windows(None, None, 600.0, loads.get).of
    world.make(Policy("batch", windows=windows), max_queue=3)
    await world.start(TTS)
    assert world.leases.retry_after() == 4.0 + UNKNOWN_LOAD
    await world.start(TTS)
    await world.start(CHAT)
    assert world.leases.retry_after() == pytest.approx(13.0 + 2 * 1.3)
    assert world.leases.retry_after(0) == 13.0


async def test_with_nothing_done_yet_there_is_nothing_to_wait_for(world: World) -> None:
    assert world.leases.retry_after() == 0.0


# -- how long a client prefers to wait


@pytest.mark.parametrize(
    ("wait", "seconds"), [(None, None), (0, 0.0), (1, 0.9), (5, 4.5), (10, 9.0), (11, 10.0), (600, 599.0)]
)
def test_a_preferred_wait_ends_a_little_before_it_is_over(wait: int | None, seconds: float | None) -> None:
    assert Terms(wait=wait).patience == seconds


async def test_a_request_is_refused_before_the_wait_that_it_prefers_is_over(world: World) -> None:
    await world.start(TTS)
    patient, hasty = await world.start(CHAT), await world.start(CHAT, terms=Terms(wait=1))
    begun = asyncio.get_running_loop().time()
    async with asyncio.timeout(5):
        await asyncio.wait([world.task_of(hasty)])
    assert asyncio.get_running_loop().time() - begun >= 0.89
    error = await world.error_of(hasty)
    assert isinstance(error, QueueTimeout)
    assert "(Prefer: wait)" in error.message
    assert world.states() == ([1], [patient.ticket.id])


async def test_a_preferred_wait_longer_than_max_wait_changes_nothing(world: World) -> None:
    world.make(max_wait=0.01)
    await world.start(TTS)
    waiter = await world.start(CHAT, terms=Terms(wait=100))
    world.clock.now += 0.01
    async with asyncio.timeout(5):
        await asyncio.wait([world.task_of(waiter)])
    error = await world.error_of(waiter)
    assert isinstance(error, QueueTimeout)
    assert error.message == QueueTimeout.default_message


async def test_wait_0_is_served_at_once_or_not_at_all(world: World) -> None:
    served = await world.start(TTS, terms=Terms(wait=0))
    refused = await world.start(CHAT, terms=Terms(wait=0))
    assert isinstance(await world.error_of(refused), QueueTimeout)
    assert world.states() == ([served.ticket.id], [])
    assert [entry[1:3] for entry in world.witness.of("waited")] == [("tts", "granted"), ("llm", "timeout")]


async def test_a_client_that_leaves_before_its_preferred_wait_is_over_leaves_no_timer(world: World) -> None:
    await world.start(TTS)
    waiter = await world.start(CHAT, terms=Terms(b"x", wait=50))
    timers = [timer for timer in _timers() if not timer.cancelled()]
    assert len(timers) == 1
    await world.leave(waiter)
    assert timers[0].cancelled()
    assert world.states() == ([1], [])


# -- client counters


@pytest.mark.parametrize("ending", ["granted", "cancelled", "granted and cancelled", "timeout", "drained", "full"])
async def test_a_clients_count_is_given_back_however_its_wait_ends(world: World, ending: str) -> None:
    world.make(max_wait=0.01 if ending == "timeout" else 60, max_queue=2)
    holder = await world.start(TTS)
    waiter, other = await world.start(TTS, "counted"), await world.start(TTS, "other")
    assert world.leases._waiting_of == {"counted": 1, "other": 1}
    if ending == "granted":
        holder.release()
    elif ending == "cancelled":
        world.task_of(waiter).cancel()
    elif ending == "granted and cancelled":
        holder.release()
        world.task_of(waiter).cancel()
    elif ending == "timeout":
        await asyncio.wait([world.task_of(waiter), world.task_of(other)])
    elif ending == "drained":
        world.leases.drain()
    else:
        assert isinstance(await world.error_of(await world.start(TTS, "counted")), QueueFull)
        world.task_of(waiter).cancel()
    await settle()
    assert "counted" not in world.leases._waiting_of


# -- what observers are told


async def test_observers_are_told_of_waits_holds_turns_and_swaps_in_order(world: World) -> None:
    chat = await world.start(CHAT)
    chat.lease.answered()
    world.clock.now += 1
    speech = await world.start(TTS)
    world.clock.now += 2
    chat.release()
    await settle()
    world.clock.now += 4
    speech.release()
    assert world.witness.told == [
        ("turn", "llm"),
        ("waited", "llm", "granted", 0.0),
        ("turn ended", "llm", 3.0),
        ("turn", "tts"),
        ("held", "llm", 3.0),
        ("waited", "tts", "granted", 2.0),
        ("swap",),
        ("held", "tts", 4.0),
    ]


async def test_a_wait_is_told_once_and_a_lease_that_never_was_is_not(world: World) -> None:
    await world.start(TTS)
    waiter = await world.start(CHAT)
    world.clock.now += 5
    await world.cancel(waiter)
    assert world.witness.of("waited", "held")[1:] == [("waited", "llm", "cancelled", 5.0)]


async def test_a_grant_that_its_client_did_not_live_to_see_is_a_cancelled_wait(world: World) -> None:
    holder, waiter, third = await world.start(TTS), await world.start(CHAT), await world.start(TTS)
    holder.release()
    world.task_of(waiter).cancel()
    await settle()
    assert [entry[1:3] for entry in world.witness.of("waited")] == [
        ("tts", "granted"),
        ("llm", "cancelled"),
        ("tts", "granted"),
    ]
    assert world.states() == ([third.ticket.id], [])


async def test_a_refusal_at_the_door_is_no_wait(world: World) -> None:
    world.make(max_queue=0)
    await world.start(TTS)
    await world.start(TTS)
    assert len(world.witness.of("waited")) == 1


async def test_a_release_is_told_once_however_often_it_is_called(world: World) -> None:
    holder = await world.start(TTS)
    for _ in range(3):
        holder.release()
    await world.cancel(holder)
    assert len(world.witness.of("held")) == 1


async def test_mode_none_is_told_like_the_others_but_makes_no_turn(world: World) -> None:
    (await world.start(EMBED)).release()
    assert world.witness.told == [("waited", "embed", "granted", 0.0), ("held", "embed", 0.0)]
    assert world.leases.snapshot().turn is None


async def test_an_observer_that_fails_spoils_neither_grants_nor_releases(world: World) -> None:
    world.make(observer=Failing())
    with capture_logs() as logs:
        first, second, third = await world.start(TTS), await world.start(CHAT), await world.start(TTS)
        first.release()
        await settle()
        assert world.states() == ([second.ticket.id], [third.ticket.id])
        await world.cancel(second)
        assert world.states() == ([third.ticket.id], [])
        third.release()
    assert [entry[1] for entry in world.witness.of("turn")] == ["tts", "llm", "tts"], "the other one is still told"
    assert {entry["event"] for entry in logs} == {"observer_failed"}


# -- the log line of a slow wait


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as entries:
        yield entries


async def test_a_slow_wait_is_logged_with_class_model_seconds_and_who_held_the_gpu(
    world: World, logs: list[Any]
) -> None:
    world.make(slow_wait_log=2.0)
    holders = [await world.start(what("llm", model)) for model in ("chat-b", "chat-a", "chat-b")]
    await world.start(TTS)
    world.clock.now += 2.0004
    for holder in holders:
        holder.release()
    await settle()
    assert logs == [
        {
            "event": "slow_wait",
            "log_level": "info",
            "cls": "tts",
            "model": "tts-a",
            "seconds": 2.0,
            "outcome": "granted",
            "held_by": ["chat-a", "chat-b"],
        }
    ]


async def test_a_wait_below_the_limit_is_not_logged(world: World, logs: list[Any]) -> None:
    world.make(slow_wait_log=2.0)
    holder = await world.start(TTS)
    await world.start(CHAT)
    world.clock.now += 1.9
    holder.release()
    await settle()
    assert logs == []


async def test_a_slow_wait_that_ended_without_a_grant_is_logged_too(world: World, logs: list[Any]) -> None:
    world.make(slow_wait_log=2.0, max_wait=0.01)
    await world.start(TTS)
    waiter = await world.start(CHAT)
    world.clock.now += 3
    async with asyncio.timeout(5):
        await asyncio.wait([world.task_of(waiter)])
    assert [(entry["event"], entry["outcome"], entry["seconds"]) for entry in logs] == [("slow_wait", "timeout", 3.0)]


# -- drain


async def test_draining_refuses_all_waiters_and_newcomers_and_lets_holders_end(world: World) -> None:
    holder = await world.start(CHAT)
    waiters = [await world.start(TTS), await world.start(TTS)]
    world.leases.drain()
    assert not world.leases.drained.is_set()
    assert [type(await world.error_of(waiter)) for waiter in waiters] == [Draining, Draining]
    with pytest.raises(Draining):
        world.leases.check_gate("anybody")
    assert isinstance(await world.error_of(await world.start(EMBED)), Draining)
    assert world.states() == ([holder.ticket.id], [])
    holder.release()
    assert world.leases.drained.is_set()
    assert [entry[2] for entry in world.witness.of("waited")] == ["granted", "shutdown", "shutdown"]


@pytest.mark.parametrize("policy", [Policy("fifo"), Policy("batch", 0.0)])
async def test_draining_grants_nobody_who_stood_behind_the_one_just_refused(world: World, policy: Policy) -> None:
    """With the writer gone from the queue, the readers behind it could run beside the one that holds."""
    world.make(policy)
    holder = await world.start(CHAT)
    waiters = [await world.start(kind) for kind in (TTS, CHAT, CHAT)]
    world.leases.drain()
    assert [type(await world.error_of(waiter)) for waiter in waiters] == [Draining] * 3
    assert world.states() == ([holder.ticket.id], [])


async def test_an_idle_proxy_is_drained_at_once(world: World) -> None:
    world.leases.drain()
    assert world.leases.drained.is_set()


async def test_a_lease_of_mode_none_is_waited_for_too(world: World) -> None:
    holder = await world.start(EMBED)
    world.leases.drain()
    assert not world.leases.drained.is_set()
    holder.release()
    assert world.leases.drained.is_set()


async def test_drained_is_seen_when_the_last_lease_was_granted_and_cancelled_in_one_tick(world: World) -> None:
    holder, waiter = await world.start(TTS), await world.start(TTS)
    holder.release()
    world.leases.drain()
    world.task_of(waiter).cancel()
    await settle()
    assert world.leases.drained.is_set()


async def test_a_lease_granted_in_the_tick_of_the_drain_is_not_begun(world: World) -> None:
    holder, waiter = await world.start(TTS), await world.start(TTS)
    holder.release()
    world.leases.drain()
    assert isinstance(await world.error_of(waiter), Draining)
    assert world.leases.drained.is_set()


async def test_drained_is_seen_when_the_last_lease_was_an_orphans(world: World) -> None:
    await asyncio.create_task(_admit_and_end(world, TTS))
    world.leases.drain()
    assert not world.leases.drained.is_set()
    world.leases.sweep()
    assert world.leases.drained.is_set()


# -- orphans and overlong holds


async def _admit_and_end(world: World, classification: Classification) -> None:
    await world.leases.admit(world.leases.hold(classification, "somebody").ticket)


async def test_a_lease_whose_task_has_ended_is_freed_counted_and_told_once(world: World, logs: list[Any]) -> None:
    await asyncio.create_task(_admit_and_end(world, TTS))
    waiter = await world.start(CHAT)
    assert world.states() == ([1], [waiter.ticket.id])
    world.clock.now += 1
    for _ in range(3):
        world.leases.sweep()
    await settle()
    assert world.states() == ([waiter.ticket.id], [])
    assert world.witness.of("orphan", "held") == [("orphan",), ("held", "tts", 1.0)]
    assert [(entry["event"], entry["model"]) for entry in logs] == [("orphan_freed", "tts-a")]


async def test_a_lease_whose_task_still_runs_is_no_orphan_however_long_it_holds(world: World) -> None:
    holder = await world.start(TTS)
    world.clock.now += 1e6
    world.leases.sweep()
    assert world.states() == ([holder.ticket.id], [])
    assert not world.witness.of("orphan", "overlong")


async def test_an_orphan_that_is_released_late_after_all_frees_nobody_elses_lease(world: World) -> None:
    hold = world.leases.hold(TTS, "somebody")
    await asyncio.create_task(_enter(hold))
    waiter = await world.start(TTS)
    world.leases.sweep()
    hold.release()
    hold.release()
    await settle()
    assert world.states() == ([waiter.ticket.id], [])
    assert len(world.witness.of("held")) == 1


async def _enter(hold: Hold) -> None:
    await hold.__aenter__()


async def test_one_orphan_whose_release_fails_does_not_keep_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        await asyncio.create_task(_admit_and_end(world, CHAT))
    release, failing = Lease.release, [1]

    def fail_once(lease: Lease) -> None:
        if failing:
            failing.pop()
            raise RuntimeError("a fault in the release")
        release(lease)

    monkeypatch.setattr(Lease, "release", fail_once)
    with capture_logs() as logs:
        world.leases.sweep()
        assert world.states() == ([1], [])
        world.leases.sweep()
    assert world.states() == ([], [])
    assert world.witness.of("orphan") == [("orphan",), ("orphan",)]
    assert [entry["event"] for entry in logs] == ["sweep_failed", "orphan_freed", "orphan_freed"]


async def test_an_overlong_hold_is_logged_and_counted_once_and_goes_on(world: World, logs: list[Any]) -> None:
    world.make(max_hold=10.0)
    holder = await world.start(CHAT)
    world.clock.now += 10
    world.leases.sweep()
    assert logs == []
    world.clock.now += 1
    for _ in range(3):
        world.leases.sweep()
    assert world.states() == ([holder.ticket.id], [])
    assert world.witness.of("overlong") == [("overlong", "llm")]
    assert [(entry["event"], entry["model"], entry["seconds"]) for entry in logs] == [("overlong_hold", "llm-a", 11.0)]


async def test_without_max_hold_no_hold_is_overlong(world: World, logs: list[Any]) -> None:
    await world.start(CHAT)
    world.clock.now += 1e6
    world.leases.sweep()
    assert logs == []


# -- cancellation at the edges of a hold


async def test_case_07_nothing_is_awaited_between_the_grant_and_the_guarded_block(world: World) -> None:
    """Step by step: the only place where a cancellation can strike is the wait, and there it leaves nothing."""
    holder = await world.start(TTS)
    hold = world.leases.hold(CHAT, "somebody")
    entering = hold.__aenter__()
    entering.send(None)
    holder.release()
    assert world.states() == ([hold.ticket.id], [])
    with pytest.raises(StopIteration):
        entering.send(None)
    hold.release()


@pytest.mark.parametrize("granted", [False, True])
async def test_case_07_a_cancellation_at_the_wait_leaves_nothing_held(world: World, granted: bool) -> None:
    holder, behind = await world.start(TTS), None
    hold = world.leases.hold(CHAT, "somebody")
    entering = hold.__aenter__()
    entering.send(None)
    behind = await world.start(TTS)
    if granted:
        holder.release()
        assert world.states() == ([hold.ticket.id], [behind.ticket.id])
    with pytest.raises(asyncio.CancelledError):
        entering.throw(asyncio.CancelledError())
    holder.release()
    await settle()
    assert world.states() == ([behind.ticket.id], [])


async def test_a_hold_that_was_not_entered_has_no_lease(world: World) -> None:
    hold = world.leases.hold(CHAT, "somebody")
    hold.release()
    with pytest.raises(RuntimeError, match="outside"):
        _ = hold.lease
    assert hold.ticket.waited == 0.0


async def test_a_lease_given_back_inside_the_block_is_free_for_the_next_at_once(world: World) -> None:
    """The upstream's end releases; the block goes on to the client's last byte."""
    async with AsyncExitStack() as stack:
        hold = world.leases.hold(TTS, "somebody")
        await stack.enter_async_context(hold)
        waiter = await world.start(CHAT)
        hold.release()
        assert world.states() == ([waiter.ticket.id], [])
        assert len(world.witness.of("held")) == 1
    assert world.states() == ([waiter.ticket.id], [])


# -- the snapshot, and its JSON form


async def test_the_queue_is_shown_with_exactly_the_agreed_names(world: World) -> None:
    world.make(Policy("batch"))
    await world.start(CHAT)
    world.clock.now += 1.23456
    await world.start(TTS)
    await world.start(what("tts", "tts-a", requested="voice"))
    await world.start(EMBED)
    world.clock.now += 1
    assert queue_json(world.leases) == {
        "policy": "batch",
        "turn": {"class": "llm", "mode": "read", "models": ["llm-a"], "seconds": 2.235},
        "holders": [
            {"id": 1, "class": "llm", "model": "llm-a", "mode": "read", "held_seconds": 2.235, "client": "somebody"},
            {"id": 4, "class": "embed", "model": "embed-a", "mode": "none", "held_seconds": 1.0, "client": "somebody"},
        ],
        "waiters": [
            {
                "id": 2,
                "position": 1,
                "class": "tts",
                "model": "tts-a",
                "mode": "write",
                "waited_seconds": 1.0,
                "client": "somebody",
            },
            {
                "id": 3,
                "position": 2,
                "class": "tts",
                "model": "tts-a",
                "mode": "write",
                "requested": "voice",
                "waited_seconds": 1.0,
                "client": "somebody",
            },
        ],
        "kept": [],
    }


async def test_an_idle_proxy_that_never_worked_has_no_turn(world: World) -> None:
    assert queue_json(world.leases) == {"policy": "fifo", "turn": None, "holders": [], "waiters": [], "kept": []}


async def test_a_turn_outlives_its_leases_and_names_every_model_it_served(world: World) -> None:
    for model in ("chat-b", "chat-a"):
        (await world.start(what("llm", model))).release()
    world.clock.now += 5
    turn = world.leases.snapshot().turn
    assert turn is not None
    assert (turn.class_name, turn.mode, turn.models, turn.seconds) == ("llm", "read", ("chat-a", "chat-b"), 5.0)


async def test_a_new_turn_forgets_the_models_of_the_last(world: World) -> None:
    (await world.start(CHAT)).release()
    await world.start(TTS)
    turn = world.leases.snapshot().turn
    assert turn is not None
    assert (turn.class_name, turn.models) == ("tts", ("tts-a",))


async def test_a_client_that_invents_names_cannot_make_the_turn_grow(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.lease.TURN_MODELS_SHOWN", 5)
    for number in range(20):
        (await world.start(what("llm", f"m{number}"))).release()
    turn = world.leases.snapshot().turn
    assert turn is not None
    assert len(turn.models) == 5


async def test_positions_count_from_1_in_the_order_of_the_queue(world: World) -> None:
    await world.start(TTS)
    waiters = [await world.start(kind) for kind in (CHAT, TTS, CHAT)]
    await world.cancel(waiters[1])
    shown = [(waiter.position, waiter.id) for waiter in world.leases.snapshot().waiters]
    assert shown == [(1, waiters[0].ticket.id), (2, waiters[2].ticket.id)]


def test_the_drained_event_needs_no_loop() -> None:
    """Built before the loop runs, as the application is."""
    made: Callable[[], World] = World
    assert made().leases.snapshot().holders == ()
