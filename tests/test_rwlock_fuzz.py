"""Random schedules of the lock in front of a model of llama-swap, with random routers, slots, loads and cancels.

llama-swap is modelled beside the lock: what it stops for a request is what its router says, busy or not; a request
that would stop a busy model, or whose swap would collide with one under way, waits *inside*, which is what the lock is
there to prevent. A load goes on when its request is cancelled; the next one may have to wait that out.

A failure names its seed; `Schedule(seed).run()` repeats it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import pytest

from proxy.router import Mode, Router
from proxy.rwlock import Claim, FairRWLock, Lease, Place, Policy, Turn
from rwlock_reference import SetRouter, TableRouter

FEW, MANY = 5_000, 100_000
ENDS = ("leaves", "leaves with the grant", "leaves its load", "leaves its stream", "gets 500", "comes back")
FATES = ("served",) * 5 + ENDS


class Visit:
    """One client's request: what it wants, and where it is."""

    def __init__(self, number: int, claim: Claim, model: str, fate: str) -> None:
        self.number, self.claim, self.model, self.fate = number, claim, model, fate
        self.lease: Lease | None = None
        self.inside = self.served = self.gone = False

    def __repr__(self) -> str:
        return f"<{self.number} {self.claim.mode} {self.model} {self.fate}>"


@dataclass(eq=False)
class Swap:
    """A load under way, the models that it stops, and who waits for it."""

    model: str
    stops: frozenset[str]
    wanted: list[Visit]


class LlamaSwap:
    """llama-swap's scheduler: who is served, who joins a swap, who begins one, and who waits inside."""

    def __init__(self, schedule: Schedule, router: Router) -> None:
        self.schedule, self.router = schedule, router
        self.states: dict[str, str] = {}
        self.swaps: dict[str, Swap] = {}
        self.serving: Counter[str] = Counter()
        self.admitted: Counter[str] = Counter()
        self.queue: list[Visit] = []

    def receive(self, visit: Visit) -> None:
        visit.inside = True
        self.admitted[visit.model] += 1
        if visit.claim.mode == "none":
            self._serve(visit)
        else:
            self._route(visit)

    def leave(self, visit: Visit) -> None:
        """The answer is complete, or the client is gone; a load that nobody wants any more goes on."""
        visit.inside = False
        self.admitted[visit.model] -= 1
        self.serving[visit.model] -= visit.served
        for place in (self.queue, *(swap.wanted for swap in self.swaps.values())):
            if visit in place:
                place.remove(visit)
        if not self.serving[visit.model]:
            self._drain()

    def resident(self) -> frozenset[str] | None:
        """What a report tells; None while anything is on its way."""
        there = {model: state for model, state in self.states.items() if state != "stopped"}
        return frozenset(there) if set(there.values()) <= {"ready"} and not self.swaps else None

    def _route(self, visit: Visit) -> None:
        if swap := self.swaps.get(visit.model):
            swap.wanted.append(visit)
            return
        there = {model for model, state in self.states.items() if state != "stopped"} | self.swaps.keys()
        ready = self.states.get(visit.model) == "ready"
        stops = self._stops(visit.model, frozenset(there))
        blocking = [swap for swap in self.swaps.values() if self._collide(visit.model, stops, swap)]
        if blocking:
            self._wait_inside(visit, blocking)
        elif ready and not stops:
            self._serve(visit)
        else:
            self._begin(visit, stops)

    def _stops(self, model: str, there: frozenset[str]) -> frozenset[str]:
        """A matrix stops nothing for a model that is there; groups are asked on every request."""
        if isinstance(self.router, SetRouter) and model in there:
            return frozenset()
        return self.router.evict(model, there)

    def _collide(self, model: str, stops: frozenset[str], swap: Swap) -> bool:
        return swap.model in stops or model in swap.stops or bool(stops & swap.stops)

    def _wait_inside(self, visit: Visit, blocking: list[Swap]) -> None:
        behind = [swap.model for swap in blocking if swap.wanted]
        assert not behind, f"{visit} queues inside behind the load of {behind}"
        self.queue.append(visit)

    def _begin(self, visit: Visit, stops: frozenset[str]) -> None:
        busy = {model for model in stops if self.serving[model]}
        assert not busy, f"{visit} queues inside: it must stop {busy}"
        self.schedule.check_not_in_use(visit, stops)
        swap = self.swaps[visit.model] = Swap(visit.model, stops, [visit])
        self.states |= dict.fromkeys(stops, "stopping")
        if isinstance(self.router, SetRouter):
            self.schedule.later(self.schedule.random.choice((0.0, 0.05, 1.0)), partial(self._load, swap))
        else:
            self._load(swap)

    def _load(self, swap: Swap) -> None:
        self.states |= dict.fromkeys(swap.stops, "stopped")
        if self.states.get(swap.model) == "ready":
            self._loaded(swap, works=True)
            return
        self.states[swap.model] = "starting"
        works = self.schedule.random.random() < 0.9
        seconds = self.schedule.random.choice((0.25, 1.0, 5.0, 20.0))
        self.schedule.later(seconds, partial(self._loaded, swap, works=works))

    def _loaded(self, swap: Swap, *, works: bool) -> None:
        del self.swaps[swap.model]
        self.states[swap.model] = "ready" if works else "stopped"
        for visit in swap.wanted:
            if works:
                self._serve(visit)
            else:
                self.schedule.fail(visit)
        self._drain()

    def _serve(self, visit: Visit) -> None:
        visit.served = True
        self.serving[visit.model] += 1
        self.schedule.serve(visit)

    def _drain(self) -> None:
        self.queue, queue = [], self.queue
        for visit in queue:
            self._route(visit)


class CheckedLock(FairRWLock):
    """Tells of every grant, and looks before it gives."""

    schedule: Schedule

    def _give(self, lease: Lease, turn: Turn | None) -> None:
        self.schedule.check_grant(lease, turn)
        super()._give(lease, turn)
        self.schedule.new.append(lease)


class Schedule:
    """One random run from an empty GPU to an empty GPU."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.now = 0.0
        self.number = 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.new: list[Lease] = []
        self.asking = False
        self.models = "abcdef"[: random.randint(2, 6)]
        self.modes: dict[str, Mode] = {model: random.choice(("read", "read", "read", "write")) for model in self.models}
        router = self.a_router()
        self.slots = {model: random.choice((1, 2, 10)) for model in (*self.models, "embed")}
        switch_after = random.choice((0.0, 2.0, 10.0, 30.0))
        policy = Policy(random.choice(("batch", "batch", "fifo")), switch_after, switch_after * random.choice((1, 3)))
        self.policy = policy
        self.lock = CheckedLock(router, self.slots.__getitem__, policy, clock=lambda: self.now)
        self.lock.schedule = self
        self.swap = LlamaSwap(self, router)
        self.visits = [self.a_visit(number) for number in range(random.randint(4, 16))]

    # -- what is random

    def a_router(self) -> Router:
        some = partial(self.random.sample, self.models)
        if self.random.random() < 0.3:
            return TableRouter({each: frozenset(some(self.random.randint(0, 2))) for each in self.models})
        sets = tuple(frozenset(some(self.random.randint(1, min(3, len(self.models))))) for _ in range(5))
        return SetRouter(sets, {each: self.random.choice((1, 1, 2, 5)) for each in self.models})

    def a_visit(self, number: int) -> Visit:
        model = self.random.choice(self.models)
        mode: Mode = self.modes[model]
        if self.random.random() < 0.1:
            model, mode = "embed", "none"
        claim = Claim(mode, frozenset({model}), frozenset({model}))
        visit = Visit(number, claim, model, self.random.choice(FATES))
        self.later(self.random.choice((0.0, 0.5, 3.0)) * self.random.randint(0, 10), partial(self.arrive, visit))
        return visit

    # -- the life of a visit

    def arrive(self, visit: Visit) -> None:
        visit.lease = self.lock.request(visit.claim, owner=visit)
        if visit.fate == "leaves":
            self.later(self.random.choice((0.0, 1.0, 10.0)), partial(self.cancel, visit))
        if visit.fate == "comes back":
            self.later(self.random.choice((0.0, 1.0, 10.0)), partial(self.go_away, visit))

    def go_away(self, visit: Visit) -> None:
        """A waiter's client leaves, to come back; sometimes too late for its place, or not at all."""
        place = visit.lease.keep() if visit.lease is not None else None
        if place is None:
            return
        if self.random.random() < 0.2:
            self.later(self.random.choice((0.0, 3.0)), partial(self.lock.forget_place, place))
        if self.random.random() < 0.1:
            visit.gone = True
        else:
            self.later(self.random.choice((0.0, 1.0, 10.0)), partial(self.come_back, visit, place))

    def come_back(self, visit: Visit, place: Place) -> None:
        registered = self.lock._places.get(place.claim, {}).get(place.number) is place
        visit.lease = self.lock.request(visit.claim, owner=visit, place=place)
        assert (visit.lease.number == place.number) == registered, "a kept place is taken up, a forgotten one is not"

    def granted(self, visit: Visit) -> None:
        if visit.fate == "leaves with the grant":
            self.cancel(visit)
        else:
            self.later(self.random.choice((0.0, 0.0, 0.01, 0.5)), partial(self.send, visit))

    def send(self, visit: Visit) -> None:
        if visit.gone or visit.lease is None:
            return
        self.swap.receive(visit)
        if visit.inside:
            visit.lease.sent()
        if visit.fate == "leaves its load":
            self.later(self.random.choice((0.0, 0.2, 3.0)), partial(self.cancel, visit))

    def serve(self, visit: Visit) -> None:
        """llama-swap hands the request to its model."""
        if visit.fate == "gets 500":
            self.fail(visit)
            return
        self.later(self.random.choice((0.0, 0.1)), partial(self.answer, visit))

    def answer(self, visit: Visit) -> None:
        if visit.gone or visit.lease is None:
            return
        visit.lease.answered()
        end = self.cancel if visit.fate == "leaves its stream" else self.finish
        self.later(self.random.choice((0.0, 0.2, 1.0, 8.0)), partial(end, visit))

    def fail(self, visit: Visit) -> None:
        if visit.lease is not None:
            visit.lease.fail()
            self.later(self.random.choice((0.0, 0.0, 2.0)), partial(self.finish, visit))

    def cancel(self, visit: Visit) -> None:
        if visit.lease is not None and visit.lease.ended is None:
            self.finish(visit)

    def finish(self, visit: Visit) -> None:
        if visit.gone or visit.lease is None:
            return
        visit.gone = True
        if visit.inside:
            self.swap.leave(visit)
        visit.lease.release()

    # -- reports

    def ask(self) -> None:
        """Reads what is loaded; what is still on its way is not reported, so it asks again."""
        self.asking = False
        asked, seen = self.now, self.swap.resident()
        if seen is not None:
            self.later(self.random.choice((0.0, 0.05, 1.0)), partial(self.lock.report, seen, asked=asked))

    def ask_again_while_in_doubt(self) -> None:
        if self.lock.uncertain and not self.asking and not all(visit.gone for visit in self.visits):
            self.asking = True
            self.later(self.random.choice((0.01, 0.7, 4.0)), self.ask)

    # -- the run

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.events, (self.now + seconds, self.number, event))

    def run(self) -> None:
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()
            while self.new:
                lease = self.new.pop(0)
                assert isinstance(lease.owner, Visit)
                self.granted(lease.owner)
            self.check()
            self.ask_again_while_in_doubt()
        assert all(visit.gone for visit in self.visits), "somebody was never served"
        assert (self.lock.held, self.lock.waiting, +self.swap.admitted, self.swap.queue) == ([], [], Counter(), [])

    # -- promises

    def check(self) -> None:
        lock = self.lock
        assert lock._held or not lock.waiting_count, "a free lock has an empty queue"
        assert all(count <= self.slots[model] for model, count in self.swap.admitted.items()), "429"

    def check_not_in_use(self, visit: Visit, stops: frozenset[str]) -> None:
        used = {lease.claim for lease in self.lock.held if lease.claim.units & stops}
        assert not used, f"{visit} stops {sorted(stops)}, which {used} holds"

    def check_grant(self, lease: Lease, turn: Turn | None) -> None:
        waiting = self.lock.waiting
        older = [each for each in waiting if each.claim == lease.claim and each.number < lease.number]
        assert not older, "overtaken by a later one of its own kind"
        if turn is None:
            return
        held = [each for each in self.lock.held if each.turn is not None]
        assert not held or {each.claim.mode for each in (*held, lease)} == {"read"}, "a write is not alone"
        queue = [each for each in waiting if each.claim.mode != "none"]
        if self.policy.kind == "fifo":
            assert queue[0] is lease, "out of order under fifo"
        elif turn.begun_by is not lease.owner:
            self.check_max_turn(queue, turn)

    def check_max_turn(self, queue: list[Lease], turn: Turn) -> None:
        others = (each for each in queue if not self.in_turn(each, turn))
        if first := next(others, None):
            loaded = min(self.now if turn.loaded is None else turn.loaded, turn.begun + self.policy.max_turn)
            assert self.now < max(loaded, first.arrived) + self.policy.max_turn, "a turn gave past max_turn"

    def in_turn(self, lease: Lease, turn: Turn) -> bool:
        (wanted,) = lease.claim.units
        evicted = self.swap.router.evict(wanted, (self.lock.resident | turn.units) - {wanted})
        return turn.mode == lease.claim.mode and turn.units.isdisjoint(evicted)


def run(seeds: range) -> None:
    for seed in seeds:
        try:
            Schedule(seed).run()
        except Exception as error:
            raise AssertionError(f"Schedule({seed}): {error}") from error


@pytest.mark.parametrize("part", range(4))
def test_random_schedules_never_queue_inside_llama_swap(part: int) -> None:
    run(range(part * FEW // 4, (part + 1) * FEW // 4))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(20))
def test_many_random_schedules_never_queue_inside_llama_swap(part: int) -> None:
    run(range(FEW + part * MANY // 20, FEW + (part + 1) * MANY // 20))
