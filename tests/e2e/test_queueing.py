"""Why this proxy exists, measured: the same traffic on llama-swap alone and with the proxy before it.

The rows are those of docs/design.md's "Why a proxy at all", scaled down. Every test runs on the simulator and, with the
mark `llama_swap`, on a real llama-swap with a slower clock. What is asserted are orders, counts and bounds that a busy
machine keeps; `pytest -rP` shows the tables.

While llama-swap's configuration is unknown to the proxy the class is the unit, so only one chat model takes part here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import pytest
import pytest_asyncio
from queueing_support import (
    BACK_ENDS,
    DISORDER,
    QUICK,
    SLACK,
    Call,
    Overlapping,
    Pace,
    Scene,
    Seen,
    Stage,
    eventually,
    gathered,
    table,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

BRISK = Pace(interval=0.015)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BACK_ENDS)
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    async with Stage(request.param) as stage:
        yield stage


both_policies = pytest.mark.parametrize("policy", ["fifo", "batch"])
# Who has the GPU, and who wants it.
both_ways = pytest.mark.parametrize(
    ("running", "waiting"), [("q27", "tts"), ("tts", "q27")], ids=["speech behind chat", "chat behind speech"]
)


# -- a request behind a long one of the other kind


@dataclass(frozen=True, slots=True)
class Behind:
    """A long request, and two clients behind it: one whose patience is shorter than that, and one who waits."""

    long: Call
    impatient: Call
    patient: Call

    def tell(self, title: str, seen: Seen) -> None:
        """Prints where the time of the patient one has gone."""
        assert self.impatient.ended is not None
        gave_up, total = self.impatient.ended - self.impatient.sent, (self.patient.first_byte or 0) - self.patient.sent
        waited = f"X-Lease-Wait {self.patient.lease_wait:.2f} s, at llama-swap {seen.age:.2f} s"
        rows = [("impatient", f"no byte in {gave_up:.2f} s"), ("patient", f"first byte after {total:.2f} s", waited)]
        table(title, rows)


async def behind(scene: Scene, running: str, waiting: str) -> Behind:
    """The long one ends only after the others have waited longer than any request may grow old by itself."""
    patience = scene.back_end.age_limit
    await scene.back_end.hold(running)
    long = scene.clients.start(running)
    await long.begun.wait()
    patient, impatient = scene.clients.start(waiting), scene.clients.start(waiting, timeout=patience)
    await scene.until_there(3)
    await impatient.done()
    await asyncio.sleep(0.2 * patience)
    await scene.back_end.let_go(running)
    await gathered([long, patient])
    assert (long.status, impatient.status, patient.status) == (200, None, 200)
    assert impatient.first_byte is None
    return Behind(long, impatient, patient)


@both_ways
async def test_bare_the_wait_falls_inside_the_upstream_request(stage: Stage, running: str, waiting: str) -> None:
    async with stage.bare(running, pace=QUICK) as scene:
        calls = await behind(scene, running, waiting)
        long, patient = await scene.back_end.seen(calls.long, calls.patient)
        calls.tell(f"{waiting} behind {running}, bare", patient)
        assert patient.age > scene.back_end.age_limit
        assert patient.arrived < long.finished < first_byte(patient)


@both_ways
async def test_through_the_proxy_the_wait_falls_outside_of_it(stage: Stage, running: str, waiting: str) -> None:
    async with stage.proxied(running, pace=QUICK) as scene:
        limit = scene.back_end.age_limit
        calls = await behind(scene, running, waiting)
        long, patient = seen = await scene.back_end.seen(calls.long, calls.patient)
        calls.tell(f"{waiting} behind {running}, through the proxy", patient)
        assert max(each.age for each in seen) <= limit
        assert -0.05 < patient.arrived - long.finished < SLACK, "it is sent when the long one is over, and at once"
        assert calls.patient.lease_wait >= limit
        assert calls.long.lease_wait == 0
        # Whoever gives up at the proxy has never been at llama-swap.
        assert set(await scene.back_end.journal()) == {each.tag for each in seen}
        assert await scene.back_end.loads() == {waiting: 1}


def first_byte(seen: Seen) -> float:
    """When it came."""
    assert seen.first_byte is not None
    return seen.first_byte


# -- requests that overlap


@both_ways
@pytest.mark.slow
async def test_bare_a_request_behind_overlapping_ones_is_never_served(stage: Stage, running: str, waiting: str) -> None:
    async with stage.bare(running) as scene:
        async with Overlapping(scene.clients, running) as crowd:
            starving = scene.clients.start(waiting)
            await crowd.served(8)
            assert not starving.begun.is_set()
        assert (await starving.done()).status == 200

        *served, last = await scene.back_end.seen(*crowd.calls, starving)
        assert {each.status for each in served} == {200}
        assert first_byte(last) > max(each.finished for each in served), "it is served when the others stop"
        passed = sum(call.sent > starving.sent for call in crowd.calls)
        table(f"{waiting} behind 2 overlapping clients of {running}, bare", [(f"{passed} passed it", "never served")])


@both_ways
@both_policies
async def test_through_the_proxy_it_is_served_within_the_bound(
    stage: Stage, running: str, waiting: str, policy: str
) -> None:
    async with stage.proxied(running, policy=policy, pace=BRISK) as scene:
        # It waits for those that may pass it, then for the two that are there.
        passing = stage.switch_after if policy == "batch" else 0
        bound = passing + 2 * scene.back_end.pace.turn + SLACK
        async with Overlapping(scene.clients, running) as crowd:
            waiter = await scene.clients.call(waiting, timeout=2 * bound + scene.back_end.age_limit)
        calls = [*crowd.calls, waiter]
        passed = [
            call
            for call in crowd.calls
            if call.sent > waiter.sent and (call.first_byte or 0) < (waiter.first_byte or 0)
        ]
        table(
            f"{waiting} behind 2 overlapping clients of {running}, {policy}",
            [(f"{len(passed)} passed it", f"waited {waiter.lease_wait:.2f} s", f"{len(crowd.calls)} served in all")],
        )
        assert {call.status for call in calls} == {200}
        assert waiter.lease_wait <= bound
        assert all(call.sent <= waiter.sent + passing + DISORDER for call in passed)


# -- chat and speech in turn


@dataclass(frozen=True, slots=True)
class Alternation:
    """What twenty requests came to; `oldest` is the age of one at its first byte, and `age_limit` what it may be."""

    loads: int
    seconds: float
    statuses: set[int | None]
    oldest: float
    age_limit: float


async def alternate(scenery: AbstractAsyncContextManager[Scene]) -> Alternation:
    """Ten chats and ten speeches in turn, with the chat model loaded, all there before the first of them ends."""
    async with scenery as scene:
        await scene.back_end.hold("q27")
        begun = time.monotonic()
        calls: list[Call] = []
        for number in range(1, 21):
            calls.append(scene.clients.start("q27" if number % 2 else "tts"))
            await scene.until_there(number)
        await scene.back_end.let_go("q27")
        await gathered(calls)
        seconds = time.monotonic() - begun
        loads = (await scene.back_end.loads()).total()
        oldest = max(each.age for each in await scene.back_end.seen(*calls))
        return Alternation(loads, seconds, {call.status for call in calls}, oldest, scene.back_end.age_limit)


@pytest.mark.slow
async def test_alternating_requests_cost_one_load_bare_nineteen_in_strict_order_and_three_at_most_in_turns(
    stage: Stage,
) -> None:
    scenes = (
        stage.bare("q27", pace=QUICK),
        stage.proxied("q27", policy="fifo", pace=QUICK),
        stage.proxied("q27", policy="batch", pace=QUICK),
    )
    alone, fifo, batch = rows = [await alternate(each) for each in scenes]
    table(
        "chat and speech in turn, ten each",
        [
            (f"{name:16}", f"{row.loads:2} loads", f"{row.seconds:5.1f} s", f"oldest inside {row.oldest:.2f} s")
            for name, row in zip(("llama-swap alone", "behind fifo", "behind batch"), rows, strict=True)
        ],
    )
    assert [row.statuses for row in rows] == [{200}] * 3
    assert (alone.loads, fifo.loads) == (1, 19)
    assert batch.loads <= 3
    assert fifo.seconds > 1.5 * batch.seconds
    assert max(fifo.oldest, batch.oldest) <= fifo.age_limit


# -- slots


async def twenty(scene: Scene) -> list[Call]:
    """Twenty requests at once for one model, of which none ends before all are there."""
    await scene.back_end.hold("q27")
    calls = [scene.clients.start("q27") for _ in range(20)]
    if scene.proxy is None:
        await eventually(lambda: sum(call.ended is not None for call in calls) == 10)
    else:
        await scene.proxy.until(holders=10, waiters=10)
    await scene.back_end.until_inside(10)
    await scene.back_end.let_go("q27")
    return await gathered(calls)


async def test_bare_ten_of_twenty_requests_at_once_are_refused(stage: Stage) -> None:
    async with stage.bare("q27", pace=QUICK) as scene:
        statuses = sorted(call.status or 0 for call in await twenty(scene))
        table("20 requests at once, bare", [statuses])
        assert statuses == [200] * 10 + [429] * 10


async def test_through_the_proxy_all_twenty_are_served_ten_at_a_time(stage: Stage) -> None:
    async with stage.proxied("q27", pace=QUICK) as scene:
        calls = await twenty(scene)
        seen = await scene.back_end.seen(*calls)
        table("20 requests at once, through the proxy", [sorted(call.status or 0 for call in calls)])
        assert [call.status for call in calls] == [200] * 20
        assert [each.status for each in seen] == [200] * 20
        assert sum(call.lease_wait == 0 for call in calls) == 10
        assert await scene.back_end.loads() == {}


# -- embeddings


async def test_embeddings_are_not_delayed_while_chat_and_speech_alternate(stage: Stage) -> None:
    async with stage.proxied("e", "q27", policy="fifo", pace=QUICK) as scene:
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(one_after_another(scene, model, 5)) for model in ("q27", "tts")]
            embeddings = await one_after_another(scene, "e", 15)
        waited = [call.lease_wait for task in others for call in task.result()]
        seen = await scene.back_end.seen(*embeddings)
        oldest, loads = max(each.age for each in seen), (await scene.back_end.loads()).total()
        table(
            "15 embeddings beside alternating chat and speech",
            [(f"{loads} loads", f"the others waited {max(waited):.2f} s at most", f"oldest embedding {oldest:.2f} s")],
        )
        assert loads >= 2
        assert max(waited) > 0
        assert [(call.status, call.lease_class, call.lease_wait) for call in embeddings] == [(200, "embed", 0)] * 15
        assert oldest <= scene.back_end.pace.work + SLACK / 2


async def one_after_another(scene: Scene, model: str, count: int) -> list[Call]:
    """So many requests of one client."""
    return [await scene.clients.call(model) for _ in range(count)]
