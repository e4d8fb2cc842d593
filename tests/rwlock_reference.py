"""The whole rule of docs/design.md, as naive as it reads: one list of waiters, every question asked anew.

The lock must do the same as this. Written from the rule alone; nothing is taken from the lock but the shape of a
claim and of a policy. What the rule leaves open is marked `Open:` with the choice made.

Beside it two routers that stand for any configuration of llama-swap: a table (groups) and a list of sets (matrix).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from proxy.router import ClassRouter, Router
from proxy.rwlock import Claim, Policy


@dataclass(frozen=True)
class TableRouter:
    """Serving a unit stops the units of its row, also when it is resident already; so do llama-swap's groups."""

    stops: Mapping[str, frozenset[str]]

    def evict(self, unit: str, resident: AbstractSet[str]) -> frozenset[str]:
        return frozenset(resident & self.stops.get(unit, frozenset())) - {unit}


@dataclass(frozen=True)
class SetRouter:
    """llama-swap's matrix: of the sets that hold the unit, the first that leaves out the cheapest residents.

    A resident unit stops nothing.
    """

    sets: tuple[frozenset[str], ...]
    costs: Mapping[str, int]

    def evict(self, unit: str, resident: AbstractSet[str]) -> frozenset[str]:
        if unit in resident:
            return frozenset()
        outside = [frozenset(resident - each) for each in self.sets if unit in each]
        return min(outside, key=self._cost, default=frozenset(resident))

    def _cost(self, units: frozenset[str]) -> int:
        return sum(self.costs.get(unit, 1) for unit in units)


def sets(*names: str, **costs: int) -> SetRouter:
    """`sets("ab", "bc", a=2)`: two sets of one-letter units, and what it costs to stop `a`."""
    return SetRouter(tuple(frozenset(each) for each in names), costs)


@dataclass(eq=False)
class Request:
    claim: Claim
    number: int
    key: int
    arrived: float
    queued_when_the_turn_began: bool = False
    held: bool = False
    ended: bool = False
    loading: bool = False
    needs_load: bool = False
    stops: frozenset[str] = frozenset()
    failed: bool = False
    heard: bool = False
    turn: RuleTurn | None = None
    granted_at: float = 0.0


@dataclass(eq=False)
class RuleTurn:
    mode: str
    models: frozenset[str]
    begun: float
    begun_by: int
    loaded: float | None


class Reference:
    """`models` of the rule are a claim's units; only slots are counted by model."""

    def __init__(self, router: Router, slots: Callable[[str], int], policy: Policy, clock: Callable[[], float]) -> None:
        self.router, self.slots, self.policy, self.clock = router, slots, policy, clock
        self.queue: list[Request] = []
        self.slot_queue: list[Request] = []
        self.holders: list[Request] = []
        self.away: list[Request] = []
        self.turn: RuleTurn | None = None
        self.resident: frozenset[str] = frozenset()
        self.uncertain = False
        self.proved: frozenset[str] = frozenset()
        self.moved = float("-inf")
        self.given_up: list[Request] = []
        self.next = 0

    # -- events

    def arrive(self, claim: Claim, place: Request | None = None) -> Request:
        """Open: a place that was kept for another claim is lost by this."""
        if place in self.away and place.claim == claim:
            request = replace(place)
        else:
            request = Request(claim, number := self._next(), number, self.clock())
        self.forget(place)
        queue = self.slot_queue if claim.mode == "none" else self.queue
        queue.append(request)
        queue.sort(key=lambda each: each.key)
        self.grant()
        return request

    def keep(self, request: Request) -> Request | None:
        """A waiter leaves, and its place is kept: all that the rule knows of it, and no place in any queue."""
        if request.held or request.ended:
            return None
        self.away.append(place := replace(request))
        self.end(request)
        return place

    def forget(self, place: Request | None) -> None:
        self.away = [each for each in self.away if each is not place]

    def end(self, request: Request) -> None:
        """A release of a holder, a cancel of a waiter."""
        if request.ended:
            return
        request.ended = True
        for place in (self.queue, self.slot_queue, self.holders):
            if request in place:
                place.remove(request)
        if request.held and request.turn and (request.loading or request.failed):
            self.resident -= request.claim.units - self.in_use()
            self._doubt()
        if request.held and request.turn and request.loading and (request.needs_load or request.stops):
            self.given_up.append(request)
        if not self.in_use():
            self.given_up = []
        if request.held and not request.turn and request.failed:
            self.resident -= request.claim.units - self.in_use() - self._beside()
            self.moved = self.clock()
        self.proved &= self.in_use()
        if request.held and request.turn and request.loading:
            self._lose_loads(request.claim.units)
        self.grant()

    def sent(self, request: Request) -> None:
        if request.held and not request.needs_load and not request.stops:
            self._end_of_load(request)

    def answered(self, request: Request) -> None:
        if request.held and not request.ended and request.turn:
            request.heard = True
            if not request.failed:
                self.proved |= request.claim.units
                self.given_up = [each for each in self.given_up if not each.claim.units <= self.proved]
        self._turn_loaded(request)
        self._end_of_load(request)

    def ready(self, unit: str, since: float) -> None:
        """llama-swap's report that a model is ready: an answer to all that wait for that load."""
        for each in self.holders.copy():
            if each.loading and each.needs_load and unit in each.claim.units and each.granted_at <= since:
                self.answered(each)

    def fail(self, request: Request) -> None:
        if request.held and not request.ended and not request.failed:
            request.failed = request.heard = True
            if request.turn:
                self._doubt()
                self.proved -= request.claim.units
                self.given_up = [each for each in self.given_up if not each.claim.units <= request.claim.units]
                self._lose_loads(request.claim.units)
        self._turn_loaded(request)
        self._end_of_load(request)

    def report(self, resident: AbstractSet[str], asked: float) -> None:
        """Open: a report that is older than R's last change, or that comes while a failed lease is held, is ignored."""
        if any(each.loading or each.failed for each in self._leases()) or asked <= self.moved:
            return
        resident = frozenset(resident) | self.in_use() | self._beside()
        self.given_up = []
        changes = self.uncertain or resident != self.resident
        self.resident, self.uncertain = resident, False
        if self.turn and not self.turn.models <= resident:
            self.turn.loaded = None
        if changes:
            self.grant()

    def reconfigure(
        self, router: Router, slots: Callable[[str], int], policy: Policy, *, restarted: bool = False
    ) -> None:
        """Open: a restart stops every model, so R is only what is in use, and in doubt."""
        self.router, self.slots, self.policy = router, slots, policy
        if restarted:
            self.resident, self.proved, self.given_up = self.in_use(), frozenset(), []
            self._doubt()
            self._lose_loads(self.in_use())
        self.grant()

    # -- the words of the rule

    def in_use(self) -> frozenset[str]:
        return union(each.claim.units for each in self._leases())

    def evict(self, claim: Claim, resident: frozenset[str]) -> frozenset[str]:
        return union(self.router.evict(unit, resident) for unit in claim.units) - claim.units

    def free(self, claim: Claim) -> bool:
        return all(
            sum(model in each.claim.models for each in self.holders) < self.slots(model) for model in claim.models
        )

    def can(self, claim: Claim) -> bool:
        held = self._leases()
        if not self.free(claim):
            return False
        if not held:
            return True
        return (
            claim.mode == "read"
            and all(each.claim.mode == "read" for each in held)
            and not self.evict(claim, self.resident) & self.in_use()
            and not (not claim.units <= self.resident and any(each.loading for each in held))
            and (not self.uncertain or claim.units <= self.in_use())
            and not self.meets_a_swap(claim)
        )

    def meets_a_swap(self, claim: Claim) -> bool:
        """Beyond the rule: the claim would stop what a swap under way is stopping; its own swap it just joins.

        A load that was given up may be under way still, and then nobody knows when: it is not to be stopped either.
        """
        swaps = [each for each in self._leases() if each.loading and (each.needs_load or each.stops)]
        moving = union(each.stops for each in swaps) | union(each.stops | each.claim.units for each in self.given_up)
        joins = claim.units <= union(each.claim.units for each in swaps)
        return not joins and bool(self.evict(claim, self.resident | moving) & moving)

    def in_turn(self, claim: Claim) -> bool:
        """Beyond the rule: as if the claim's own models were not resident, or a matrix would stop nothing."""
        if self.turn is None or self.turn.mode != claim.mode:
            return False
        return not self.evict(claim, (self.resident | self.turn.models) - claim.units) & self.turn.models

    # -- the rule

    def grant(self) -> None:
        while self._grant_slot():
            pass
        while self.queue and (self._fifo() if self.policy.kind == "fifo" else self._batch()):
            pass

    def _grant_slot(self) -> bool:
        """Open: requests of mode none that share a model come in arrival order, each as soon as its slots are free."""
        for each in self.slot_queue:
            if self.free(each.claim):
                self.slot_queue.remove(each)
                each.held, each.granted_at = True, self.clock()
                if not each.claim.units <= self.resident and not self._counts_classes():
                    self.resident |= each.claim.units
                    self.moved = self.clock()
                self.holders.append(each)
                return True
        return False

    def _fifo(self) -> bool:
        """Open: a turn begun under fifo forgets who was queued when an earlier one began."""
        head = self.queue[0]
        if not self.can(head.claim):
            return False
        if not self.in_turn(head.claim):
            self._begin_turn(head)
            for each in self.queue + self.away:
                each.queued_when_the_turn_began = False
        self._hold(head)
        return True

    def _batch(self) -> bool:
        other = next((each for each in self.queue if not self.in_turn(each.claim)), None)
        if other is None:
            return self._grant_first(self.queue)
        if self.turn is not None:
            now, max_turn = self.clock(), self.policy.max_turn
            loaded = min(now if self.turn.loaded is None else self.turn.loaded, self.turn.begun + max_turn)
            since = max(loaded, other.arrived)
            if now < since + max_turn:
                mine = [each for each in self.queue if self._is_mine(each, other, since)]
                if self._grant_first(mine):
                    return True
                if mine and mine[0].key < other.key:
                    return False
        if self.can(other.claim):
            self._switch(other)
            return True
        return False

    def _is_mine(self, each: Request, other: Request, since: float) -> bool:
        return self.in_turn(each.claim) and (
            each.key < other.key or each.queued_when_the_turn_began or each.arrived < since + self.policy.switch_after
        )

    def _grant_first(self, requests: list[Request]) -> bool:
        for each in requests:
            if self.can(each.claim):
                self._hold(each)
                return True
        return False

    def _switch(self, other: Request) -> None:
        old = [each for each in self.queue + self.away if self.in_turn(each.claim)]
        self._begin_turn(other)
        self._hold(other)
        for each in sorted(old, key=lambda each: each.key):
            if not self.in_turn(each.claim):
                each.key = self._next()
        self.queue.sort(key=lambda each: each.key)
        for each in self.queue + self.away:
            each.queued_when_the_turn_began = self.in_turn(each.claim)

    def _begin_turn(self, first: Request) -> None:
        warm = first.claim.units <= self.resident
        now = self.clock()
        self.turn = RuleTurn(
            first.claim.mode, self.in_use() | first.claim.units, now, first.number, now if warm else None
        )

    def _hold(self, request: Request) -> None:
        """Beyond the rule: in doubt, only a model in use that has answered is known to need no load."""
        assert self.turn is not None
        self.queue.remove(request)
        units = request.claim.units
        request.held = request.loading = True
        request.granted_at = self.clock()
        request.turn = self.turn
        request.needs_load = not units <= (self.proved if self.uncertain else self.resident)
        request.stops = self.evict(request.claim, self.resident)
        self.turn.models |= units
        if request.needs_load or request.stops:
            self.resident = (self.resident - request.stops) | units
            self.moved = self.clock()
        self.holders.append(request)

    # -- what follows from an event

    def _leases(self) -> list[Request]:
        return [each for each in self.holders if each.claim.mode != "none"]

    def _beside(self) -> frozenset[str]:
        """Beyond the rule: models whose requests take no lease are of R; of a class nobody knows what it stops."""
        if self._counts_classes():
            return frozenset()
        return union(each.claim.units for each in self.holders if each.claim.mode == "none")

    def _counts_classes(self) -> bool:
        return isinstance(self.router, ClassRouter)

    def _doubt(self) -> None:
        self.uncertain = True
        self.moved = self.clock()

    def _lose_loads(self, units: frozenset[str]) -> None:
        """Beyond the rule: whoever still waits for a first answer of the same models may be loading them now."""
        for each in self._leases():
            if not each.heard and each.claim.units & (units - self.proved):
                each.needs_load = each.loading = True

    def _turn_loaded(self, request: Request) -> None:
        turn = request.turn
        if turn and not request.ended and turn.loaded is None:
            turn.loaded = min(self.clock(), turn.begun + self.policy.max_turn)

    def _end_of_load(self, request: Request) -> None:
        if not request.held or request.ended or not request.turn:
            return
        if request.loading and (request.needs_load or request.stops):
            self.moved = self.clock()
        request.loading = False
        self.grant()

    def _next(self) -> int:
        self.next += 1
        return self.next - 1


def union(names: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*names)
