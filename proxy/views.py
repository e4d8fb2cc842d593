"""What can be seen of the queue at one moment: frozen, and all in seconds, for `/-/queue`, the metrics and people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from proxy.rwlock import Lease
from proxy.tickets import tickets_of


@dataclass(frozen=True, slots=True)
class HolderView:
    """A held lease, as `/-/queue` shows it; seconds."""

    id: int
    class_name: str
    model: str
    requested: str
    mode: str
    held_seconds: float


@dataclass(frozen=True, slots=True)
class WaiterView:
    """A waiter, as `/-/queue` shows it; `position` counts from 1."""

    id: int
    position: int
    class_name: str
    model: str
    requested: str
    mode: str
    waited_seconds: float
    client_timeout: float | None = None
    """What its client says of its own patience; seconds."""


@dataclass(frozen=True, slots=True)
class KeptView:
    """The place of a waiter whose client left, as `/-/queue` shows it; seconds."""

    class_name: str
    model: str
    requested: str
    mode: str
    waited_seconds: float
    """Since its first arrival."""
    seconds_left: float
    """How long the same request may still come back to it."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """The current turn."""

    class_name: str
    mode: str
    models: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All there is to see at one moment."""

    policy: str
    turn: TurnView | None
    holders: tuple[HolderView, ...]
    waiters: tuple[WaiterView, ...]
    kept: tuple[KeptView, ...] = ()


def holders_of(held: list[Lease], now: float) -> Iterator[HolderView]:
    """The requests that hold these leases."""
    for ticket in tickets_of(held):
        what, lease = ticket.classification, ticket.lease
        since = now if lease is None or lease.granted is None else lease.granted
        yield HolderView(ticket.id, what.class_name, what.model, what.requested, what.mode, now - since)


def waiters_of(waiting: list[Lease], now: float) -> Iterator[WaiterView]:
    """The requests that wait for these leases, which are all in queue order."""
    for position, ticket in enumerate(tickets_of(waiting), 1):
        what, lease = ticket.classification, ticket.lease
        since = now if lease is None else lease.arrived
        names = (what.class_name, what.model, what.requested, what.mode)
        yield WaiterView(ticket.id, position, *names, now - since, ticket.terms.client_timeout)
