"""A fair reader-writer lock that knows what a grant makes llama-swap stop.

Why it is fair. Every request that may enter gets an arrival number, its *key*, and waits in one queue. After every
event one synchronous function, `_grant`, gives out whatever may be given, so nothing that could run is ever left
asleep (*no lost wake-up*) and no decision is spread over tasks. Under the policy `fifo` only the head of the queue
may be given, which is the order of tokio's RwLock. Under `batch` the queue is cut into *turns*: stretches of grants
between which llama-swap needs no swap. Requests of the current turn may pass a waiter of another one, but only for
`switch_after` after that waiter could have been served, and a turn gives nothing past `max_turn`; what is left of it
then moves behind everybody who waited (*turns alternate*). Time alone never grants: it only withdraws permission,
so the lock needs no timer.

Why it is safe. `can` holds back every grant that would make llama-swap stop a model in use (*exclusion*), that would
exceed a model's slots, or that would start a load while another is under way. What is loaded, and when that is in
doubt, is kept by `residency.py`.

Ownership is a `Lease` object, not a task: it is marked as holder before its waiter is woken, and `release` is
synchronous, idempotent and valid from anywhere. A cancellation that arrives with the grant is a release.

Waiters with equal claims differ only in age, so they share a *lane*: every decision looks at the heads of the lanes,
and the cost of a grant does not grow with the number of waiters.

A waiter that has to leave may *keep its place* and come back to it. While it is away it holds up nobody, so whoever
could run does; but what a new turn does to the order of the waiters it does to the places too, or coming back would
undo that sets take turns.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from proxy.claims import NO_CLAIMS, Claim, Lease, Place, Policy, Turn
from proxy.residency import Residency, subtract
from proxy.router import NOTHING, Router

__all__ = ["Claim", "FairRWLock", "Lease", "Place", "Policy", "Turn"]


@dataclass(slots=True, eq=False)
class _Lane:
    """Waiters with equal claims, oldest first."""

    claim: Claim
    waiters: list[Lease] = field(default_factory=list)

    @property
    def head(self) -> Lease:
        return self.waiters[0]

    def enter(self, lease: Lease) -> None:
        """Whoever comes back to a kept place is older than those at the end."""
        insort(self.waiters, lease, key=_number)

    def leave(self, lease: Lease) -> None:
        del self.waiters[bisect_left(self.waiters, lease.number, key=_number)]


class FairRWLock:
    """The lock. All methods are synchronous and must be called from the event loop's thread.

    `slots` gives the number of requests a model may have upstream at once; `on_turn` is told of every new turn, and
    `on_first_answer` of the first answer of a turn that had to load, with the seconds since that lease's grant.
    """

    def __init__(
        self,
        router: Router,
        slots: Callable[[str], int],
        policy: Policy,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_turn: Callable[[Turn], None] = lambda turn: None,
        on_first_answer: Callable[[Lease, float], None] = lambda lease, seconds: None,
    ) -> None:
        self._residency = Residency(router, clock)
        self._slots, self._policy = slots, policy
        self._clock, self._on_turn, self._on_first_answer = clock, on_turn, on_first_answer
        self._next_number = 0
        self._waiting = self._writers = 0
        self._lanes: dict[Claim, _Lane] = {}
        self._free_lanes: dict[Claim, _Lane] = {}
        self._places: dict[Claim, dict[int, Place]] = {}
        self._held: dict[int, Lease] = {}
        self._slots_in_use: Counter[str] = Counter()
        self._turn: Turn | None = None

    # -- what the outside sees

    @property
    def held(self) -> list[Lease]:
        """All leases held, mode none included, oldest grant first."""
        return list(self._held.values())

    @property
    def waiting(self) -> list[Lease]:
        """All waiters in queue order, those that wait only for a slot included."""
        lanes = (*self._lanes.values(), *self._free_lanes.values())
        return sorted((lease for lane in lanes for lease in lane.waiters), key=_key)

    @property
    def waiting_count(self) -> int:
        """Number of waiters."""
        return self._waiting

    @property
    def turn(self) -> Turn | None:
        """The current turn; None before the first grant."""
        return self._turn

    @property
    def resident(self) -> frozenset[str]:
        """R: the units that are loaded once all granted leases have loaded."""
        return self._residency.resident

    @property
    def uncertain(self) -> bool:
        """Whether R is in doubt after a failed or abandoned load."""
        return self._residency.uncertain

    # -- events

    def request(self, claim: Claim, owner: object = None, place: Place | None = None) -> Lease:
        """Enter the queue; the lease may be held on return. Await `Lease.wait` and always `Lease.release` it.

        A `place` kept by a request of the same claim is taken up where it was left, and can be taken up once; one
        that was forgotten, or is another claim's, is worth nothing.
        """
        returns = place is not None and self._take(place) and place.claim == claim
        if place is None or not returns:
            number = self._number()
            place = Place(claim, number, number, self._clock())
        lease = Lease(self, place, owner)
        self._enter_queue(lease)
        self._grant()
        if lease.granted is not None and not returns:
            lease.granted = lease.arrived  # it did not wait, however long the decision took
        return lease

    def forget_place(self, place: Place) -> None:
        """Nobody will come back to this kept place; later calls do nothing."""
        self._take(place)

    def report(self, resident: AbstractSet[str], *, asked: float) -> None:
        """What llama-swap says is resident, `asked` for at that time of the lock's clock."""
        if not self._residency.report(resident, asked=asked):
            return
        if self._turn is not None and not self._residency.holds(self._turn.units):
            self._turn.loaded = None  # something of it was unloaded behind our back: its next answer will tell
        self._grant()

    def ready(self, unit: str, *, since: float) -> None:
        """llama-swap reports that a load of `unit`, which began after `since`, is done."""
        for lease in self.held:
            loading = lease.loading and lease.cold and unit in lease.claim.units
            if loading and lease.granted is not None and lease.granted <= since:
                lease.answered()

    def reconfigure(
        self, router: Router, slots: Callable[[str], int], policy: Policy, *, restarted: bool = False
    ) -> None:
        """Use a new rule; held leases and the queue live on. `restarted`: llama-swap has stopped every model."""
        self._residency.router, self._slots, self._policy = router, slots, policy
        if restarted:
            self._residency.forget()
            self._lose_loads(frozenset(self._residency.in_use))
        self._grant()

    def _end(self, lease: Lease) -> None:
        lease.ended = self._clock()
        if lease.granted is None:
            self._leave_queue(lease)
            lease.wake()
        else:
            self._leave_holders(lease)
        self._grant()

    def _keep(self, lease: Lease) -> Place:
        place = Place(lease.claim, lease.number, lease.key, lease.arrived)
        self._places.setdefault(place.claim, {})[place.number] = place  # first: a turn may begin with its leaving
        self._end(lease)
        return place

    def _fail(self, lease: Lease) -> None:
        lease.failed = lease.heard = True
        if lease.turn is not None:
            self._residency.fail(lease.claim.units)
            self._lose_loads(lease.claim.units)
        self._settle(lease, heard=True)

    def _settle(self, lease: Lease, *, heard: bool) -> None:
        turn = lease.turn
        if not lease.held or turn is None:
            return
        if heard:
            lease.heard = True
            self._note_loaded(lease, turn)
            if not lease.failed:
                self._residency.answered(lease.claim.units)
        if lease.loading:
            lease.loading = False
            self._residency.settle(lease.effect)
        self._grant()

    def _note_loaded(self, lease: Lease, turn: Turn) -> None:
        """The first word of a lease of this turn: until then the turn was loading."""
        now = self._clock()
        if turn.loaded is None:
            turn.loaded = min(now, turn.begun + self._policy.window(turn.units, NOTHING)[1])
            if lease.cold and not lease.failed and lease.granted is not None:
                self._on_first_answer(lease, now - lease.granted)

    def _lose_loads(self, units: frozenset[str]) -> None:
        """Loads of `units` may not come: whoever needs one of them and was not answered yet may be loading it now."""
        units -= self._residency.proved
        for lease in self._held.values():
            if lease.turn is not None and not lease.heard and not units.isdisjoint(lease.claim.units):
                if lease.loading:
                    self._residency.end(lease.effect)
                lease.effect = replace(lease.effect, cold=True)
                lease.loading = True
                self._residency.begin(lease.effect)

    # -- bookkeeping

    def _number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def _lanes_of(self, claim: Claim) -> dict[Claim, _Lane]:
        return self._free_lanes if claim.mode == "none" else self._lanes

    def _enter_queue(self, lease: Lease) -> None:
        lanes = self._lanes_of(lease.claim)
        lane = lanes.get(lease.claim)
        if lane is None:
            lane = lanes[lease.claim] = _Lane(lease.claim)
        lane.enter(lease)
        self._waiting += 1

    def _leave_queue(self, lease: Lease) -> None:
        lanes = self._lanes_of(lease.claim)
        lane = lanes[lease.claim]
        lane.leave(lease)
        self._waiting -= 1
        if not lane.waiters:
            del lanes[lease.claim]

    def _take(self, place: Place) -> bool:
        """Take a kept place out of the books; False where it is not, or no longer, in them."""
        places = self._places.get(place.claim, {})
        if places.get(place.number) is not place:
            return False
        del places[place.number]
        if not places:
            del self._places[place.claim]
        return True

    def _leave_holders(self, lease: Lease) -> None:
        del self._held[lease.number]
        subtract(self._slots_in_use, lease.claim.models)
        if lease.turn is None:
            self._residency.end_visit(lease.claim.units, failed=lease.failed)
            return
        self._writers -= lease.claim.mode == "write"
        self._residency.leave(lease.effect, loading=lease.loading, failed=lease.failed)
        if lease.loading:
            lease.loading = False
            self._lose_loads(lease.claim.units)

    def _give(self, lease: Lease, turn: Turn | None) -> None:
        """Make `lease` a holder inside `turn` (None for mode none), and only then wake it."""
        self._leave_queue(lease)
        lease.granted = self._clock()
        self._held[lease.number] = lease
        self._slots_in_use.update(lease.claim.models)
        if turn is None:
            self._residency.visit(lease.claim.units)
        else:
            lease.turn = turn
            lease.loading = True
            lease.effect = self._residency.enter(lease.claim.units)
            self._writers += lease.claim.mode == "write"
            turn.units |= lease.claim.units
        lease.wake()

    # -- the rule

    def _grant(self) -> None:
        """Give whatever may be given. Runs after every event; the only place where anything is granted."""
        while self._free_lanes and self._step_free():
            pass
        step = self._step_batch if self._policy.kind == "batch" else self._step_fifo
        while self._lanes and step():
            pass

    def _step_free(self) -> bool:
        ready = [lane.head for lane in self._free_lanes.values() if self._free(lane.claim)]
        if ready:
            self._give(min(ready, key=_key), None)
        return bool(ready)

    def _step_fifo(self) -> bool:
        head = min((lane.head for lane in self._lanes.values()), key=_key)
        if not self._can(head.claim):
            return False
        turn = self._turn
        if turn is None or not self._in_turn(head.claim, turn):
            turn = self._begin_turn(head)
        self._give(head, turn)
        return True

    def _step_batch(self) -> bool:
        turn = self._turn
        if turn is None:
            return self._switch_to(min((lane.head for lane in self._lanes.values()), key=_key))
        ours, other = self._split(turn)
        if other is None:
            return self._give_first(ours, turn)
        now = self._clock()
        switch_after, max_turn = self._policy.window(turn.units, other.claim.units)
        loaded = min(now if turn.loaded is None else turn.loaded, turn.begun + max_turn)
        since = max(loaded, other.arrived)
        if now < since + max_turn:
            mine = [lease for lease in ours if self._may_pass(lease, other, turn, since + switch_after)]
            if self._give_first(mine, turn):
                return True
            if mine and mine[0].key < other.key:
                return False
        return self._switch_to(other)

    def _split(self, turn: Turn) -> tuple[list[Lease], Lease | None]:
        """The heads of the lanes of this turn in queue order, and the first waiter of another turn."""
        ours: list[Lease] = []
        other: Lease | None = None
        for lane in self._lanes.values():
            head = lane.head
            if self._in_turn(lane.claim, turn):
                ours.append(head)
            elif other is None or head.key < other.key:
                other = head
        return sorted(ours, key=_key), other

    def _give_first(self, leases: list[Lease], turn: Turn) -> bool:
        """Give the first that can; a full slot holds up only its own model."""
        for lease in leases:
            if self._can(lease.claim):
                self._give(lease, turn)
                return True
        return False

    def _may_pass(self, lease: Lease, other: Lease, turn: Turn, deadline: float) -> bool:
        queued = lease.number < turn.first_number and lease.claim in turn.queued
        return lease.key < other.key or queued or lease.arrived < deadline

    def _switch_to(self, other: Lease) -> bool:
        """Begin the next turn with `other`; what is left of the old one moves behind everybody, in order."""
        if not self._can(other.claim):
            return False
        before = NO_CLAIMS if self._turn is None else self._claims_in(self._turn)
        turn = self._begin_turn(other)
        self._give(other, turn)
        turn.queued = self._claims_in(turn)
        self._move_behind(before - turn.queued)
        return True

    def _claims_in(self, turn: Turn) -> frozenset[Claim]:
        """The claims of this turn of which somebody waits or has kept a place."""
        return frozenset(claim for claim in {*self._lanes, *self._places} if self._in_turn(claim, turn))

    def _move_behind(self, claims: AbstractSet[Claim]) -> None:
        """Move the waiters and the kept places of `claims` behind everybody, in order."""
        left: list[Lease | Place] = []
        for claim in claims:
            left += self._lanes[claim].waiters if claim in self._lanes else ()
            left += self._places.get(claim, {}).values()
        for each in sorted(left, key=_key):
            each.key = self._number()

    def _begin_turn(self, first: Lease) -> Turn:
        now, units = self._clock(), first.claim.units
        self._turn = turn = Turn(
            mode=first.claim.mode,
            begun_by=first.owner,
            begun=now,
            units=frozenset(self._residency.in_use) | units,
            first_number=self._next_number,
            loaded=now if self._residency.holds(units) else None,
        )
        self._on_turn(turn)
        return turn

    def _free(self, claim: Claim) -> bool:
        return all(self._slots_in_use[model] < self._slots(model) for model in claim.models)

    def _can(self, claim: Claim) -> bool:
        """Whether a grant now keeps slots and exclusion."""
        if not self._free(claim):
            return False
        if not self._residency.in_use:
            return True
        return not self._writers and claim.mode != "write" and self._residency.may_join(claim.units)

    def _in_turn(self, claim: Claim, turn: Turn) -> bool:
        """Whether `turn` can take a grant for `claim` without a swap of its own models."""
        return turn.mode == claim.mode and self._residency.spares(claim.units, turn.units)


def _key(of: Lease | Place) -> int:
    return of.key


def _number(of: Lease) -> int:
    return of.number
