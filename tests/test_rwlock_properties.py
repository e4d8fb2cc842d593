"""The lock beside the rule of docs/design.md (`rwlock_reference.py`), and the promises of that document.

Hypothesis drives both with the same events and compares everything after each: who holds, the queue, the turn, R.
The promises are checked at every single grant, by a lock that looks before it gives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.router import ClassRouter, Mode, Router, evict_all
from proxy.rwlock import Claim, FairRWLock, Lease, Place, Policy, Turn
from rwlock_reference import Reference, Request, SetRouter, TableRouter

UNITS = "abcd"
Owner: TypeAlias = tuple[int, Claim]
Pair: TypeAlias = tuple[str, frozenset[str]]

units = st.sampled_from(UNITS)
subsets = st.frozensets(units)
modes = st.sampled_from([*get_args(Mode), "read", "read"])  # most of the rule is about reads
seconds = st.sampled_from([0.0, 1.0, 2.0, 4.0, 9.0])  # few values, so that bounds are met exactly
slot_tables = st.fixed_dictionaries({unit + which: st.sampled_from([1, 2, 10]) for unit in UNITS for which in "12n"})
anyone = st.integers(0, 10**6)

tables = st.builds(TableRouter, st.dictionaries(units, subsets))
set_lists = st.lists(st.frozensets(units, min_size=1, max_size=3), min_size=1, max_size=5).map(tuple)
costs = st.dictionaries(units, st.integers(1, 5))
routers = st.one_of(st.just(ClassRouter()), tables, st.builds(SetRouter, set_lists, costs))


def _partition(places: list[int]) -> tuple[frozenset[str], ...]:
    """Disjoint sets: unit number n is in the set number `places[n]`."""
    members = ({unit for unit, place in zip(UNITS, places, strict=True) if place == each} for each in range(4))
    return tuple(frozenset(each) for each in members if each)


partitions = st.lists(st.integers(0, 3), min_size=4, max_size=4).map(_partition)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    switch_after = draw(seconds)
    return Policy(draw(st.sampled_from(["batch", "batch", "fifo"])), switch_after, switch_after + draw(seconds))


@st.composite
def claims(draw: st.DrawFn, within: frozenset[str] = frozenset(UNITS)) -> Claim:
    several = draw(st.sampled_from([1, 1, 1, 2]))
    wanted = draw(st.frozensets(st.sampled_from(sorted(within)), min_size=1, max_size=several))
    which = draw(st.sampled_from("12"))
    return Claim(draw(modes), wanted, frozenset(unit + which for unit in wanted))


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class WatchedLock(FairRWLock):
    """Looks at every grant before it is given, and asks again after every decision."""

    def _grant(self) -> None:
        super()._grant()
        held = self.held
        super()._grant()
        assert self.held == held, "promise 2: what may be granted is granted in the same call"

    def _give(self, lease: Lease, turn: Turn | None) -> None:
        self.check_slots(lease)
        self.check_order(lease)
        if turn is not None:
            self.check_exclusion(lease)
            self.check_max_turn(lease, turn)
        super()._give(lease, turn)

    def check_slots(self, lease: Lease) -> None:
        in_use = Counter(model for each in self.held for model in each.claim.models)
        assert all(in_use[model] < self._slots(model) for model in lease.claim.models), "promise 1: slots"

    def check_order(self, lease: Lease) -> None:
        same = [each.number for each in self.waiting if each.claim == lease.claim]
        assert lease.number == min(same), "promise 4: overtaken by a later one of its own kind"

    def check_exclusion(self, lease: Lease) -> None:
        held = [each for each in self.held if each.claim.mode != "none"]
        if held:
            assert {each.claim.mode for each in (*held, lease)} == {"read"}, "promise 1: a write lease is alone"
        in_use = {unit for each in held for unit in each.claim.units}
        assert in_use.isdisjoint(self.stopped_by(lease.claim, self.resident)), "promise 1: stops a model in use"

    def check_max_turn(self, lease: Lease, turn: Turn) -> None:
        if self._policy.kind == "fifo" or turn.begun_by == lease.owner:
            return
        others = [each for each in self.waiting if each.claim.mode != "none" and not self.takes(turn, each)]
        if others:
            loaded = min(self._clock() if turn.loaded is None else turn.loaded, turn.begun + self._policy.max_turn)
            end = max(loaded, others[0].arrived) + self._policy.max_turn
            assert self._clock() < end, "promise 4: a turn gave something past max_turn"

    def stopped_by(self, claim: Claim, resident: frozenset[str]) -> frozenset[str]:
        return evict_all(self._residency.router, claim.units, resident)

    def takes(self, turn: Turn, lease: Lease) -> bool:
        """Whether `lease` belongs to `turn`; its own models do not count as resident, or it would stop nothing."""
        others = (self.resident | turn.units) - lease.claim.units
        return turn.mode == lease.claim.mode and turn.units.isdisjoint(self.stopped_by(lease.claim, others))


class LockBesideRule(RuleBasedStateMachine):
    """What both machines below share: the events of one request, the clock, the comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pairs: list[tuple[Lease, Request]] = []
        self.places: list[tuple[Place, Request]] = []

    def start(self, router: Router, policy: Policy, slots: dict[str, int]) -> None:
        self.lock = WatchedLock(router, slots.__getitem__, policy, clock=self.clock, on_turn=self.turn_began)
        self.reference = Reference(router, slots.__getitem__, policy, self.clock)

    def turn_began(self, turn: Turn) -> None:
        """Watched where turns are bounded."""

    def enter(self, claim: Claim, place: Place | None = None, by_rule: Request | None = None) -> None:
        lease = self.lock.request(claim, owner=(len(self.pairs), claim), place=place)
        self.pairs.append((lease, self.reference.arrive(claim, by_rule)))

    def tell(self, resident: frozenset[str], age: float) -> None:
        asked = self.clock.now - age
        self.lock.report(resident, asked=asked)
        self.reference.report(resident, asked)

    @rule(which=anyone)
    def release_or_cancel(self, which: int) -> None:
        self.both([each for each in self.pairs if each[1].ended is False], which, Lease.release, self.reference.end)

    @rule(which=anyone)
    def release(self, which: int) -> None:
        self.both(self.holders(), which, Lease.release, self.reference.end)

    @rule(which=anyone)
    def leave_and_keep_the_place(self, which: int) -> None:
        """Mostly of a waiter; a holder has no place to keep."""
        among = [each for each in self.pairs if each[0].waiting] or self.pairs
        if among:
            lease, request = among[which % len(among)]
            place, by_rule = lease.keep(), self.reference.keep(request)
            assert (place is None) == (by_rule is None)
            if place is not None and by_rule is not None:
                self.places.append((place, by_rule))

    @rule(which=anyone, passed=seconds)
    def come_back(self, which: int, passed: float) -> None:
        self.clock.now += passed
        kept = [each for each in self.places if each[1] in self.reference.away]
        if kept:
            place, by_rule = kept[which % len(kept)]
            self.enter(place.claim, place, by_rule)

    @rule(which=anyone, wants=anyone)
    def come_back_too_late_or_for_something_else(self, which: int, wants: int) -> None:
        """Mostly to a place that was forgotten or taken up."""
        if self.places:
            place, by_rule = self.places[which % len(self.places)]
            self.enter(self.places[wants % len(self.places)][0].claim, place, by_rule)

    @rule(which=anyone)
    def forget(self, which: int) -> None:
        if self.places:
            place, by_rule = self.places[which % len(self.places)]
            self.lock.forget_place(place)
            self.reference.forget(by_rule)

    @rule(which=anyone)
    def sent(self, which: int) -> None:
        self.both(self.holders(), which, Lease.sent, self.reference.sent)

    @rule(which=anyone)
    def answered(self, which: int) -> None:
        self.both(self.holders(), which, Lease.answered, self.reference.answered)

    @rule(which=anyone)
    def fail(self, which: int) -> None:
        self.both(self.holders(), which, Lease.fail, self.reference.fail)

    @rule(passed=seconds)
    def everybody_is_served(self, passed: float) -> None:
        """A common round: all holders are answered, take their time and go."""
        holders = self.holders()
        for lease, request in holders:
            lease.answered()
            self.reference.answered(request)
        self.clock.now += passed
        for lease, request in holders:
            lease.release()
            self.reference.end(request)

    @rule(which=anyone)
    def events_after_the_end(self, which: int) -> None:
        self.both([each for each in self.pairs if each[1].ended], which, _everything, self.reference.end)

    @rule(passed=seconds)
    def time_passes(self, passed: float) -> None:
        self.clock.now += passed

    def holders(self) -> list[tuple[Lease, Request]]:
        return [each for each in self.pairs if each[1].held and not each[1].ended]

    def both(
        self,
        among: list[tuple[Lease, Request]],
        which: int,
        real: Callable[[Lease], None],
        by_rule: Callable[[Request], None],
    ) -> None:
        if among:
            lease, request = among[which % len(among)]
            real(lease)
            by_rule(request)

    @invariant()
    def they_agree(self) -> None:
        lock, reference = self.lock, self.reference
        owners = {request: lease.owner for lease, request in self.pairs}
        kept = [each for places in lock._places.values() for each in places.values()]
        assert sorted(each.key for each in kept) == sorted(each.key for each in reference.away)
        for_slots = [each for each in lock.waiting if each.claim.mode == "none"]
        queue = [each for each in lock.waiting if each.claim.mode != "none"]
        assert [each.owner for each in lock.held] == [owners[each] for each in reference.holders]
        assert [each.granted for each in lock.held] == [each.granted_at for each in reference.holders]
        assert [each.owner for each in queue] == [owners[each] for each in reference.queue]
        assert [each.owner for each in for_slots] == [owners[each] for each in reference.slot_queue]
        assert (lock.resident, lock.uncertain) == (reference.resident, reference.uncertain)

    @invariant()
    def they_agree_on_the_turn(self) -> None:
        turn, expected = self.lock.turn, self.reference.turn
        if turn is None or expected is None:
            assert turn is None
            assert expected is None
            return
        assert (turn.mode, turn.units, turn.begun) == (expected.mode, expected.models, expected.begun)
        assert turn.loaded == expected.loaded
        owners = {request.number: lease.owner for lease, request in self.pairs}
        assert turn.begun_by == owners[expected.begun_by]

    @invariant()
    def nothing_is_lost(self) -> None:
        """Promises 2, 5 and 6: a free lock has an empty queue, and an ended lease leaves nothing in the books."""
        lock, leases = self.lock, [each for each in self.lock.held if each.claim.mode != "none"]
        assert lock.held or not lock.waiting
        assert lock.waiting_count == len(lock.waiting)
        assert all(lock._places.values()), "nothing stays of a place that is gone"
        assert lock._slots_in_use == Counter(model for each in lock.held for model in each.claim.models)
        assert lock._residency.in_use == Counter(unit for each in leases for unit in each.claim.units)
        assert lock._residency.loading == sum(each.loading for each in leases)
        swaps = [each.effect for each in leases if each.loading and each.effect.moves]
        assert lock._residency._swapping == Counter(unit for each in swaps for unit in each.units)
        assert lock._residency._stopping == Counter(unit for each in swaps for unit in each.stops)
        assert lock._residency.proved <= lock._residency.in_use.keys() <= lock.resident

    def teardown(self) -> None:
        while self.pairs and self.lock.held:
            self.lock.held[-1].release()
        assert not self.pairs or not self.lock.waiting


def _everything(lease: Lease) -> None:
    for event in (lease.sent, lease.answered, lease.fail, lease.release):
        event()


class AnyConfiguration(LockBesideRule):
    """Any router, either policy, and a new configuration at any time."""

    @initialize(router=routers, policy=policies(), slots=slot_tables)
    def begin(self, router: Router, policy: Policy, slots: dict[str, int]) -> None:
        self.start(router, policy, slots)

    @rule(crowd=st.lists(claims(), min_size=1, max_size=5))
    def arrive(self, crowd: list[Claim]) -> None:
        for claim in crowd:
            self.enter(claim)

    @rule(resident=subsets, age=seconds)
    def report(self, resident: frozenset[str], age: float) -> None:
        self.tell(resident, age)

    @rule(router=routers, policy=policies(), slots=slot_tables, restarted=st.booleans())
    def reconfigure(self, router: Router, policy: Policy, slots: dict[str, int], restarted: bool) -> None:
        self.lock.reconfigure(router, slots.__getitem__, policy, restarted=restarted)
        self.reference.reconfigure(router, slots.__getitem__, policy, restarted=restarted)

    @rule(unit=units, age=seconds)
    def ready(self, unit: str, age: float) -> None:
        since = self.clock.now - age
        self.lock.ready(unit, since=since)
        self.reference.ready(unit, since)


class DisjointSets(LockBesideRule):
    """No two sets share a model: `batch` bounds turns, and time alone never grants.

    Given some `switch_after`: without any, who arrives while the turn loads may pass at the next event.
    """

    @initialize(groups=partitions, switch_after=seconds.filter(bool), more=seconds, slots=slot_tables)
    def begin(
        self, groups: tuple[frozenset[str], ...], switch_after: float, more: float, slots: dict[str, int]
    ) -> None:
        self.groups = groups
        self.begun: defaultdict[int, Counter[Pair]] = defaultdict(Counter)
        self.start(
            SetRouter(tuple(group | {"n"} for group in groups), {}),
            Policy("batch", switch_after, switch_after + more),
            slots,
        )
        self.lock.takes = self.same_pair  # type: ignore[method-assign]

    @rule(data=st.data(), size=st.integers(1, 5))
    def arrive(self, data: st.DataObject, size: int) -> None:
        for _ in range(size):
            claim = data.draw(claims(data.draw(st.sampled_from(self.groups))))
            if claim.mode == "none":  # a model has one mode: its slots are not shared with leases
                claim = Claim("none", frozenset("n"), frozenset(f"{unit}n" for unit in claim.units))
            self.enter(claim)

    @rule(data=st.data(), age=seconds)
    def report(self, data: st.DataObject, age: float) -> None:
        """llama-swap never has models of two sets loaded, so neither does its report beside what is in use."""
        possible = [group for group in self.groups if self.lock._residency.in_use.keys() <= group]
        self.tell(data.draw(st.sampled_from([frozenset[str](), *possible])), age)

    @rule(passed=seconds)
    def time_passes(self, passed: float) -> None:
        super().time_passes(passed)
        held = self.lock.held
        self.lock._grant()
        assert self.lock.held == held, "time alone only withdraws permission"

    def turn_began(self, turn: Turn) -> None:
        """Who comes back to a place goes on counting where it left."""
        pair = self.pair_of(turn.begun_by)
        away = [each for places in self.lock._places.values() for each in places.values()]
        everybody: list[Lease | Place] = [*self.lock.waiting, *away]
        for each in everybody:
            if self.pair_with(each.claim) == pair:
                self.begun[each.number].clear()
        for waiter in self.lock.waiting:
            if waiter.claim.mode != "none" and waiter.owner != turn.begun_by:
                self.begun[waiter.number][pair] += self.pair_with(waiter.claim) != pair
                assert self.begun[waiter.number][pair] <= 1, "promise 4: a pair began two turns past a waiter"

    def same_pair(self, turn: Turn, lease: Lease) -> bool:
        return self.pair_of(turn.begun_by) == self.pair_of(lease.owner)

    def pair_of(self, owner: object) -> Pair:
        assert isinstance(owner, tuple)
        return self.pair_with(owner[1])

    def pair_with(self, claim: Claim) -> Pair:
        return claim.mode, next(group for group in self.groups if claim.units - {"n"} <= group)


TestAnyConfiguration = AnyConfiguration.TestCase
TestAnyConfiguration.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestDisjointSets = DisjointSets.TestCase
TestDisjointSets.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
