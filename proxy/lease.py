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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol

import structlog

from proxy.classify import Classification
from proxy.errors import ClientQueueFull, Draining, QueueFull, QueueTimeout
from proxy.router import Router
from proxy.rwlock import Claim, FairRWLock, Lease, Policy, Turn
from proxy.views import HolderView, Snapshot, TurnView, WaiterView

log = structlog.get_logger("gpu_lease_proxy")

WaitOutcome = Literal["granted", "cancelled", "timeout", "shutdown"]

TURN_MODELS_SHOWN = 200
"""Model names remembered of one turn: as many as the metrics may label, far more than anyone reads."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may wait: numbers of requests, and seconds."""

    max_queue: int
    max_queue_per_client: int
    max_wait: Callable[[str], float]
    max_hold: float | None = None
    slow_wait_log: float = 2.0


@dataclass(slots=True, eq=False)
class Ticket:
    """One request for the GPU. `client` is who it counts against; times are seconds of the lock's clock."""

    id: int
    classification: Classification
    client: str
    task: asyncio.Task[object] | None = None
    lease: Lease | None = None
    behind: tuple[str, ...] = ()
    """Models that held the GPU when the wait began; empty where there was none."""
    overlong: bool = False

    @property
    def class_name(self) -> str:
        """The class whose label this request carries."""
        return self.classification.class_name

    @property
    def waited(self) -> float:
        """Seconds from arrival to grant, or to the end of the wait; 0 while it still waits."""
        if (lease := self.lease) is None:
            return 0.0
        until = lease.granted if lease.granted is not None else lease.ended
        return until - lease.arrived if until is not None else 0.0


class Observer(Protocol):
    """Told of everything that happens to leases; must not block. What it raises is logged and goes no further."""

    def wait_ended(self, ticket: Ticket, outcome: WaitOutcome, seconds: float) -> None:
        """A ticket was granted, or gave up waiting."""
        ...

    def lease_ended(self, ticket: Ticket, seconds: float) -> None:
        """A lease was released after being held for `seconds`."""
        ...

    def turn_ended(self, class_name: str, seconds: float) -> None:
        """A turn that lasted `seconds` was followed by another."""
        ...

    def turn_begun(self, class_name: str) -> None:
        """A turn began."""
        ...

    def swap(self) -> None:
        """A grant made llama-swap stop a model."""
        ...

    def orphan_freed(self) -> None:
        """A lease whose task had ended was taken back."""
        ...

    def hold_overlong(self, class_name: str) -> None:
        """A lease has been held for more than `max_hold`."""
        ...


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
        self.policy = policy
        self.draining = False
        self.drained = asyncio.Event()
        """Set once no lease is left after `drain`."""
        self.on_doubt: Callable[[], None] = lambda: None
        """Called when what is resident has become uncertain: a report is needed soon."""
        self.on_first_answer: Callable[[str, float], None] = lambda model, seconds: None
        """Called with the model and the seconds of the first answer of a turn that had to load."""
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

    def hold(self, classification: Classification, client: str) -> Hold:
        """A context manager that waits for a lease and gives it back."""
        return Hold(self, Ticket(next(self._ids), classification, client))

    def _check_open(self) -> None:
        if self.draining:
            raise Draining

    def _check_room(self, client: str, more: int) -> None:
        if self.lock.waiting_count + more > self.bounds.max_queue:
            raise QueueFull(retry_after=self.retry_after())
        if self._waiting_of[client] + more > self.bounds.max_queue_per_client:
            raise ClientQueueFull(retry_after=self.retry_after())

    def retry_after(self) -> float:
        """Seconds after which a refused client may try again: half a turn is when the queue is likely shorter."""
        return self.policy.window(frozenset(), frozenset())[0] / 2

    async def admit(self, ticket: Ticket) -> Lease:
        """Wait for the lease of `ticket`; nothing is held when this raises.

        Raises Draining, QueueFull, ClientQueueFull, QueueTimeout, or what cancelled the wait.
        """
        self._check_open()
        ticket.task = asyncio.current_task()
        what = ticket.classification
        claim = Claim(what.mode, what.units, what.models)
        lease = ticket.lease = self.lock.request(claim, ticket)
        outcome: WaitOutcome = "cancelled"
        try:
            if lease.waiting:
                await self._wait(ticket, lease)
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
                self._wait_ended(ticket, lease, outcome)
        return lease

    async def _wait(self, ticket: Ticket, lease: Lease) -> None:
        self._waiting_of[ticket.client] += 1
        ticket.behind = tuple(sorted({holder.model for holder in self._holders()})) or ("a load under way",)
        max_wait = self.bounds.max_wait(ticket.class_name)
        timer = asyncio.get_running_loop().call_later(max_wait, self._time_out, lease)
        try:
            self._check_room(ticket.client, 0)
            await lease.wait()
            self._check_open()  # it may have been granted only because those before it were refused
        except BaseException:
            lease.release()
            raise
        finally:
            timer.cancel()
            self._waiting_of[ticket.client] -= 1
            if not self._waiting_of[ticket.client]:
                del self._waiting_of[ticket.client]

    def _time_out(self, lease: Lease) -> None:
        lease.refuse(QueueTimeout(retry_after=self.retry_after()))

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

    def drain(self) -> None:
        """Refuse all waiters and newcomers from now on; held leases run on."""
        self.draining = True
        for lease in self.lock.waiting:
            lease.refuse(Draining())
        self._note_drained()

    def sweep(self) -> None:
        """Take back leases whose task has ended, and report those held for too long. Run about every second."""
        for ticket in list(_tickets(self.lock.held)):
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
            log.error("orphan_freed", cls=ticket.class_name, model=ticket.classification.model)
            self._tell(lambda observer: observer.orphan_freed())
            self.ended(ticket)
        elif not ticket.overlong:
            self._check_hold(ticket, self._clock() - lease.granted)

    def _check_hold(self, ticket: Ticket, held: float) -> None:
        if self.bounds.max_hold is None or held <= self.bounds.max_hold:
            return
        ticket.overlong = True
        log.warning("overlong_hold", cls=ticket.class_name, model=ticket.classification.model, seconds=round(held, 1))
        self._tell(lambda observer: observer.hold_overlong(ticket.class_name))

    def reconfigure(self, router: Router, slots: Callable[[str], int]) -> None:
        """llama-swap's configuration has changed, for which it stops every model; waiters and holders live on."""
        self.lock.reconfigure(router, slots, self.policy, restarted=True)
        self.on_doubt()

    def _on_first_answer(self, lease: Lease, seconds: float) -> None:
        if isinstance(lease.owner, Ticket):
            self.on_first_answer(lease.owner.classification.model, seconds)

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
        policy = self.policy.kind
        return Snapshot(policy, self.turn(), tuple(self._holders()), tuple(self._waiters()))

    def turn(self) -> TurnView | None:
        """The turn now."""
        if self._turn is None:
            return None
        turn, class_name = self._turn
        held = {t.classification.model for t in _tickets(self.lock.held) if t.lease and t.lease.turn is turn}
        models = tuple(sorted(self._turn_models | held))
        return TurnView(class_name, turn.mode, models, self._clock() - turn.begun)

    def _holders(self) -> Iterator[HolderView]:
        now = self._clock()
        for ticket in _tickets(self.lock.held):
            what, lease = ticket.classification, ticket.lease
            since = now if lease is None or lease.granted is None else lease.granted
            yield HolderView(ticket.id, what.class_name, what.model, what.requested, what.mode, now - since)

    def _waiters(self) -> Iterator[WaiterView]:
        now = self._clock()
        for position, ticket in enumerate(_tickets(self.lock.waiting), 1):
            what, lease = ticket.classification, ticket.lease
            since = now if lease is None else lease.arrived
            names = (what.class_name, what.model, what.requested, what.mode)
            yield WaiterView(ticket.id, position, *names, now - since)


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

    def release(self) -> None:
        """Give the lease back now, from anywhere; later calls do nothing."""
        lease = self._lease
        if lease is not None and lease.held:
            lease.release()
            self.leases.ended(self.ticket)


def _tickets(leases: list[Lease]) -> Iterator[Ticket]:
    return (lease.owner for lease in leases if isinstance(lease.owner, Ticket))
