"""What can be seen of the queue at one moment: frozen, and all in seconds, for `/-/queue`, the metrics and people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from proxy.rwlock import Lease
from proxy.tickets import tickets_of

DIGITS_SHOWN = 6
"""Of a key's digest: enough to tell a household's keys apart, too few to try keys by."""


@dataclass(frozen=True, slots=True)
class HolderView:
    """A held lease, as `/-/queue` shows it; seconds."""

    id: int
    class_name: str
    model: str
    requested: str
    mode: str
    held_seconds: float
    client: str = ""
    is_job: bool = False


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
    client: str = ""
    is_job: bool = False


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


def shown_client(client: str) -> str:
    """A client's name for people: its address, or the beginning of its key's digest; never a key."""
    kind, dash, digest = client.partition("-")
    return kind + dash + digest[:DIGITS_SHOWN] if dash and kind in {"key", "owner"} else client


def holders_of(held: list[Lease], now: float) -> Iterator[HolderView]:
    """The requests that hold these leases."""
    for ticket in tickets_of(held):
        what, lease = ticket.classification, ticket.lease
        since = now if lease is None or lease.granted is None else lease.granted
        names = (what.class_name, what.model, what.requested, what.mode)
        yield HolderView(ticket.id, *names, now - since, shown_client(ticket.client), ticket.is_job)


def waiters_of(waiting: list[Lease], now: float) -> Iterator[WaiterView]:
    """The requests that wait for these leases, which are all in queue order."""
    for position, ticket in enumerate(tickets_of(waiting), 1):
        what, lease = ticket.classification, ticket.lease
        since = now if lease is None else lease.arrived
        names = (what.class_name, what.model, what.requested, what.mode)
        who = (shown_client(ticket.client), ticket.is_job)
        yield WaiterView(ticket.id, position, *names, now - since, ticket.terms.client_timeout, *who)
