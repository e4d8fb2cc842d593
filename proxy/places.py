"""Places kept for requests whose client went away: the same request that comes back stands where it stood.

Clients with a timeout shorter than the queue send the same request again and again. Without this they would begin at
the end each time, and never be served. A kept place is a sort key, not a waiter: it blocks nobody, it reserves no room
in the queue, and it ends by itself.

A request is known by a digest of what it is (`Terms.identity`). Two that are alike and live are two waiters with a
place each: a place is used up by the first that takes it. Of two that have left one place is kept, the older one. A
retry can overtake the news of its own client's departure; where its SDK counts the tries, it gets the place then.
There is no timer for each place; whoever looks at one sees whether its time is over, and a sweep drops the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from proxy.classify import Classification
from proxy.rwlock import Claim, FairRWLock, Lease, Place
from proxy.tickets import Ticket
from proxy.views import KeptView

FRESH_WAITS = 3
"""Returns that start a new `max_wait`: one more than the SDKs send again by default. Any number of them would let a
client that nobody reads stay in the queue for ever."""


class Moved(Exception):
    """Ends the wait of a lease whose request waits on with another: `Ticket.lease`."""


@dataclass(slots=True)
class Kept:
    """One kept place, with what its request takes along; times are seconds of the lock's clock."""

    place: Place
    classification: Classification
    until: float
    returns: int
    deadline: float


class Places:
    """The kept places of one lock: for `seconds` each, at most `most` of them."""

    def __init__(self, lock: FairRWLock, clock: Callable[[], float], seconds: float, most: int) -> None:
        self._lock, self._clock = lock, clock
        self._seconds, self._most = seconds, most
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._again: dict[tuple[bytes, int], Ticket] = {}

    # -- waiters that their clients say to have sent before

    def began(self, ticket: Ticket) -> None:
        """`ticket` waits."""
        if ticket.terms.identity is not None and ticket.terms.attempt:
            self._again.setdefault((ticket.terms.identity, ticket.terms.attempt), ticket)

    def ended(self, ticket: Ticket) -> None:
        """`ticket` waits no longer."""
        if ticket.terms.identity is not None:
            key = (ticket.terms.identity, ticket.terms.attempt)
            if self._again.get(key) is ticket:
                del self._again[key]

    # -- places

    def keep(self, ticket: Ticket) -> None:
        """The client of `ticket` has left: if it waits it leaves the queue, and its place is kept."""
        identity, lease = ticket.terms.identity, ticket.lease
        if identity is None or not self._seconds or lease is None or (place := lease.keep()) is None:
            return
        again = self._again.get((identity, ticket.terms.attempt + 1))
        if again is not None and (there := again.lease) is not None and there.waiting and there.claim == place.claim:
            self._hand_over(place, ticket, again, there)
            return
        kept = Kept(place, ticket.classification, 0.0, ticket.returns, ticket.deadline)
        other = self._kept.pop(identity, None)
        if other is not None:
            kept, other = (kept, other) if place.number < other.place.number else (other, kept)
            self._lock.forget_place(other.place)
        kept.until = self._clock() + self._seconds
        self._kept[identity] = kept
        while len(self._kept) > self._most:
            self._drop(next(iter(self._kept)))

    def has(self, identity: bytes | None) -> bool:
        """Whether there is a place for this request to come back to."""
        return identity is not None and self._alive(identity) is not None

    def take(self, ticket: Ticket, claim: Claim, max_wait: float) -> Place | None:
        """The place that `ticket` comes back to, used up by this; sets its deadline, `max_wait` seconds for most."""
        now, identity = self._clock(), ticket.terms.identity
        ticket.deadline = now + max_wait
        kept = None if identity is None else self._alive(identity)
        if identity is None or kept is None:
            return None
        del self._kept[identity]
        if kept.place.claim != claim:
            self._lock.forget_place(kept.place)  # its name stands for another model by now
            return None
        ticket.returns = kept.returns + 1
        if ticket.returns > FRESH_WAITS:
            ticket.deadline = kept.deadline
        return kept.place

    def sweep(self) -> None:
        """Drop the places whose time is over."""
        for identity in list(self._kept):
            if self._alive(identity) is not None:
                return  # the others were left later

    def clear(self) -> None:
        """Nobody will come back."""
        for identity in list(self._kept):
            self._drop(identity)

    def views(self) -> Iterator[KeptView]:
        """All of them for the snapshot, in queue order."""
        now = self._clock()
        for kept in sorted(self._kept.values(), key=lambda kept: kept.place.key):
            if kept.until > now:
                what = kept.classification
                names = (what.class_name, what.model, what.requested, what.mode)
                yield KeptView(*names, now - kept.place.arrived, kept.until - now)

    def _alive(self, identity: bytes) -> Kept | None:
        kept = self._kept.get(identity)
        if kept is not None and kept.until <= self._clock():
            self._drop(identity)
            return None
        return kept

    def _drop(self, identity: bytes) -> None:
        self._lock.forget_place(self._kept.pop(identity).place)

    def _hand_over(self, place: Place, left: Ticket, again: Ticket, before: Lease) -> None:
        """Put `again`, which waits with `before`, where `left` was. It never is without a place, for others to pass."""
        after = self._lock.request(place.claim, again, place)
        if before.held:
            after.release()
            return
        again.lease, again.returns = after, left.returns + 1
        before.refuse(Moved())
