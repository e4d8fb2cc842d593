"""Leases for requests: bounds, waiting, watching and telling, around the lock.

The lock decides who may run; this module decides who may wait, for how long, and lets others look on. A request is a
`Ticket`. It enters through `Leases.hold`, an asynchronous context manager: on entry it waits for its grant, on exit
the lease is released synchronously before anything else. Observers (metrics, the live page) are told what happened;
the gauges they show are read from the lock itself, so they cannot drift.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import structlog

from proxy.classify import Classification
from proxy.errors import Cancelled, ClientQueueFull, Draining, QueueFull, QueueTimeout
from proxy.places import Moved, Places
from proxy.router import NOTHING, Router
from proxy.rwlock import Claim, FairRWLock, Lease, Policy, Turn
from proxy.tickets import NO_TERMS, Bounds, Observer, Terms, Ticket, WaitOutcome, tickets_of
from proxy.views import Snapshot, TurnView, holders_of, waiters_of

log = structlog.get_logger("gpu_lease_proxy")

TURN_MODELS_SHOWN = 200
"""Model names remembered of one turn: as many as the metrics may label, far more than anyone reads."""

WAITERS_PER_WINDOW = 10
"""Waiters that one window is taken to serve: as many as run at once of one model where nothing else is set."""


class Leases:
    """The one place where requests wait for the GPU. Belongs to one event loop."""

    def __init__(
        self,
        router: Router,
        slots: Callable[[str], int],
        policy: Policy,
        bounds: Bounds,
        observers: tuple[Observer, ...] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = FairRWLock(
            router, slots, policy, clock=clock, on_turn=self._on_turn, on_first_answer=self._on_first_answer
        )
        self.bounds = bounds
        self.places = Places(self.lock, clock, bounds.keep_place, bounds.max_queue)
        self.policy = policy
        self.draining = False
        self.drained = asyncio.Event()
        """Set once no lease is left after `drain`."""
        self.on_doubt: Callable[[], None] = lambda: None
        """Called when what is resident has become uncertain: a report is needed soon."""
        self.on_first_answer: Callable[[Classification, float], None] = lambda what, seconds: None
        """Called with the request and the seconds of the first answer of a turn that had to load."""
        self._observers = observers
        self._clock = clock
        self._ids = itertools.count(1)
        self._waiting_of: Counter[str] = Counter()
        self._turn: tuple[Turn, str] | None = None
        self._turn_models: set[str] = set()

    # -- the gate and the way in

    def check_gate(self, client: str) -> None:
        """Refuse before one body byte is read: raises Draining, QueueFull or ClientQueueFull."""
        self._check_open()
        self._check_room(client, 1)

    def hold(
        self,
        classification: Classification,
        client: str,
        terms: Terms = NO_TERMS,
        *,
        request_id: str = "",
        is_job: bool = False,
        bounded: bool = True,
    ) -> Hold:
        """A context manager that waits for a lease and gives it back; the bounds refuse only what is `bounded`."""
        ticket = Ticket(next(self._ids), classification, client, terms, bounded=bounded)
        ticket.request_id, ticket.is_job = request_id, is_job
        return Hold(self, ticket)

    def _check_open(self) -> None:
        if self.draining:
            raise Draining

    def _check_room(self, client: str, more: int) -> None:
        ahead = self.lock.waiting_count + more - 1
        if ahead >= self.bounds.max_queue:
            raise QueueFull(retry_after=self.retry_after(ahead))
        if self._waiting_of[client] + more > self.bounds.max_queue_per_client:
            raise ClientQueueFull(retry_after=self.retry_after(ahead))

    def retry_after(self, ahead: int | None = None) -> float:
        """Seconds after which a refused client may try again, with `ahead` waiters before it; None: all there are.

        What is left of the turn's `switch_after`, and a tenth of `switch_after`, at least of 1 s, for each of them:

            max(0, switch_after - seconds since the turn was loaded) + ahead * max(1, switch_after) / 10

        A turn that is still loading has its whole window left. `switch_after` is that of the turn and of the first
        waiter for other units, so with `auto` it follows the measured loads. On the wire it is whole seconds, 1 to 60.
        """
        turn, ahead = self.lock.turn, self.lock.waiting_count if ahead is None else ahead
        here = turn.units if turn is not None else NOTHING
        claims = (lease.claim.units for lease in self.lock.waiting)
        switch_after, _ = self.policy.window(here, next((units for units in claims if not units <= here), NOTHING))
        age = self._clock() - turn.loaded if turn is not None and turn.loaded is not None else 0.0
        left = max(0.0, switch_after - age) if turn is not None else 0.0
        return left + ahead * max(1.0, switch_after) / WAITERS_PER_WINDOW

    async def admit(self, ticket: Ticket) -> Lease:
        """Wait for the lease of `ticket`; nothing is held when this raises.

        Raises Draining, QueueFull, ClientQueueFull, QueueTimeout, or what cancelled the wait.
        """
        self._check_open()
        ticket.task = asyncio.current_task()
        lease = ticket.lease = self._enter(ticket)
        outcome: WaitOutcome = "cancelled"
        try:
            if lease.waiting:
                lease = await self._wait(ticket)
            outcome = "granted"
        except QueueTimeout:
            outcome = "timeout"
            raise
        except Draining:
            outcome = "shutdown"
            raise
        except (QueueFull, ClientQueueFull):
            ticket.lease = None  # it never waited
            raise
        finally:
            if ticket.lease is not None:
                self._wait_ended(ticket, ticket.lease, outcome)
        return lease

    def _enter(self, ticket: Ticket) -> Lease:
        """Into the queue, to the place that was kept for it if there is one; where there is no room, it stays kept."""
        if self.places.has(ticket.terms.identity):
            self._check_room(ticket.client, 1)
        what = ticket.classification
        claim = Claim(what.mode, what.units, what.models)
        place = self.places.take(ticket, claim, self.bounds.max_wait(ticket.class_name))
        return self.lock.request(claim, ticket, place)

    async def _wait(self, ticket: Ticket) -> Lease:
        """Wait with the lease that `ticket` has; returns the one that was granted, which can be another."""
        self._waiting_of[ticket.client] += 1
        self.places.began(ticket)
        held = {holder.classification.model for holder in tickets_of(self.lock.held)}
        ticket.behind = tuple(sorted(held)) or ("a load under way",)
        patience, left = ticket.terms.patience, ticket.deadline - self._clock()
        wait = left if patience is None else min(left, patience)
        timer = asyncio.get_running_loop().call_later(wait, self._time_out, ticket)
        try:
            if ticket.bounded:
                self._check_room(ticket.client, 0)
            lease = await _granted(ticket)
            self._check_open()  # it may have been granted only because those before it were refused
        except BaseException:
            if ticket.lease is not None:
                ticket.lease.release()
            raise
        finally:
            timer.cancel()
            self.places.ended(ticket)
            self._waiting_of[ticket.client] -= 1
            if not self._waiting_of[ticket.client]:
                del self._waiting_of[ticket.client]
        return lease

    def _time_out(self, ticket: Ticket) -> None:
        if ticket.lease is None:
            return
        after, terms = self.retry_after(self.lock.waiting_count - 1), ticket.terms
        preferred = terms.patience is not None and self._clock() < ticket.deadline
        message = f"The GPU was not free within the {terms.wait} s that this request prefers to wait (Prefer: wait)."
        ticket.lease.refuse(QueueTimeout(message if preferred else None, retry_after=after))

    def _wait_ended(self, ticket: Ticket, lease: Lease, outcome: WaitOutcome) -> None:
        until = lease.granted if outcome == "granted" else lease.ended
        seconds = (until if until is not None else self._clock()) - lease.arrived
        what = ticket.classification
        if ticket.behind and seconds >= self.bounds.slow_wait_log:
            names = {"cls": what.class_name, "model": what.model, "held_by": list(ticket.behind)}
            log.info("slow_wait", seconds=round(seconds, 3), outcome=outcome, **names)
        self._tell(lambda observer: observer.wait_ended(ticket, outcome, seconds))
        if outcome != "granted":
            self._note_drained()
            return
        if lease.stops:
            self._tell(lambda observer: observer.swap())
        if len(self._turn_models) < TURN_MODELS_SHOWN and lease.turn is self.lock.turn:
            self._turn_models.add(what.model)

    def ended(self, ticket: Ticket) -> None:
        """Tell the observers of a lease that was just released."""
        lease = ticket.lease
        if lease is None or lease.granted is None or lease.ended is None:
            return
        self._note_drained()
        if self.lock.uncertain:
            self.on_doubt()
        seconds = lease.ended - lease.granted
        self._tell(lambda observer: observer.lease_ended(ticket, seconds))
        ticket.task = lease.owner = None  # or ticket, lease and task would wait for the garbage collection

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        """Tell all observers. Called inside grants and releases, which no observer may spoil."""
        for observer in self._observers:
            try:
                tell(observer)
            except Exception:
                log.exception("observer_failed")

    def _note_drained(self) -> None:
        if self.draining and not self.lock.held:
            self.drained.set()

    # -- from outside

    def cancel(self, number: int) -> bool:
        """Take the waiter of that number out of the queue: its wait raises Cancelled. False where none has it."""
        for ticket in tickets_of(self.lock.waiting):
            if ticket.id == number and ticket.lease is not None:
                ticket.lease.refuse(Cancelled())
                return True
        return False

    def drain(self) -> None:
        """Refuse all waiters and newcomers from now on; held leases run on."""
        self.draining = True
        self.places.clear()
        for lease in self.lock.waiting:
            lease.refuse(Draining())
        self._note_drained()

    def sweep(self) -> None:
        """Take back leases whose task has ended, report those held for too long, and forget places whose time is over.

        Run about every second.
        """
        self.places.sweep()
        for ticket in list(tickets_of(self.lock.held)):
            try:
                self._check(ticket)
            except Exception:
                log.exception("sweep_failed", cls=ticket.class_name)

    def _check(self, ticket: Ticket) -> None:
        lease = ticket.lease
        if lease is None or lease.granted is None:
            return
        if ticket.task is not None and ticket.task.done():
            lease.release()
            log.error("orphan_freed", **_named(ticket))
            self._tell(lambda observer: observer.orphan_freed())
            self.ended(ticket)
        elif not ticket.overlong:
            self._check_hold(ticket, self._clock() - lease.granted)

    def _check_hold(self, ticket: Ticket, held: float) -> None:
        if self.bounds.max_hold is None or held <= self.bounds.max_hold:
            return
        ticket.overlong = True
        log.warning("overlong_hold", **_named(ticket), seconds=round(held, 1))
        self._tell(lambda observer: observer.hold_overlong(ticket.class_name))

    def reconfigure(self, router: Router, slots: Callable[[str], int]) -> None:
        """llama-swap's configuration has changed, for which it stops every model; waiters and holders live on."""
        self.lock.reconfigure(router, slots, self.policy, restarted=True)
        self.on_doubt()

    def _on_first_answer(self, lease: Lease, seconds: float) -> None:
        if isinstance(lease.owner, Ticket):
            self.on_first_answer(lease.owner.classification, seconds)

    def _on_turn(self, turn: Turn) -> None:
        now = self._clock()
        if self._turn is not None:
            before, ended = self._turn
            self._tell(lambda observer: observer.turn_ended(ended, now - before.begun))
        begun = turn.begun_by.class_name if isinstance(turn.begun_by, Ticket) else ""
        self._turn = (turn, begun)
        self._turn_models = set()
        self._tell(lambda observer: observer.turn_begun(begun))

    # -- looking on

    def snapshot(self) -> Snapshot:
        """All holders and waiters now."""
        lock, now = self.lock, self._clock()
        holders, waiters = tuple(holders_of(lock.held, now)), tuple(waiters_of(lock.waiting, now))
        return Snapshot(self.policy.kind, self.turn(), holders, waiters, tuple(self.places.views()))

    def turn(self) -> TurnView | None:
        """The turn now."""
        if self._turn is None:
            return None
        turn, class_name = self._turn
        held = {t.classification.model for t in tickets_of(self.lock.held) if t.lease and t.lease.turn is turn}
        models = tuple(sorted(self._turn_models | held))
        return TurnView(class_name, turn.mode, models, self._clock() - turn.begun)


@dataclass(slots=True)
class Hold:
    """`async with leases.hold(…) as ticket`: the lease is held inside the block, at most until `release`."""

    leases: Leases
    ticket: Ticket
    _lease: Lease | None = field(default=None, init=False)

    async def __aenter__(self) -> Ticket:
        """Wait for the grant; see `Leases.admit` for what it raises."""
        self._lease = await self.leases.admit(self.ticket)
        return self.ticket

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Release; nothing is awaited."""
        self.release()

    @property
    def lease(self) -> Lease:
        """The lease itself; only inside the block."""
        if self._lease is None:
            raise RuntimeError("no lease is held outside of the block")
        return self._lease

    @property
    def is_held(self) -> bool:
        """Whether the lease is held now: from the very grant on, though its task may not know of it yet."""
        return (lease := self.ticket.lease) is not None and lease.held

    def left(self) -> None:
        """The client is gone, and nobody else will end this wait: where it still waits, its place is kept."""
        self.leases.places.keep(self.ticket)

    def release(self) -> None:
        """Give the lease back now, from anywhere; later calls do nothing."""
        lease = self._lease
        if lease is not None and lease.held:
            lease.release()
            self.leases.ended(self.ticket)


def _named(ticket: Ticket) -> dict[str, str]:
    """A request in a log line that is not written on its own way."""
    return {"request_id": ticket.request_id, "cls": ticket.class_name, "model": ticket.classification.model}


async def _granted(ticket: Ticket) -> Lease:
    """The lease of `ticket` once it is granted; it may be moved to another place while it waits."""
    while (lease := ticket.lease) is not None:
        try:
            await lease.wait()
        except Moved:
            continue
        return lease
    raise RuntimeError("a request without a lease cannot wait")
