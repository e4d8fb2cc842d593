"""What waits for the GPU: one request as a ticket, on what terms it waits, and who is told of it.

A ticket outlives its lease's states: it is what observers, the live page and the places kept for a retry know of a
request. Nothing here decides anything; `lease.py` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from proxy.classify import Classification
from proxy.rwlock import Lease

WaitOutcome = Literal["granted", "cancelled", "timeout", "shutdown"]

MARGIN = 1.0
"""Seconds before the end of a preferred wait at which it is refused: the way of the answer, on a busy machine too."""

MARGIN_SHARE = 0.1
"""The margin is at most this share of the preferred wait, so that a short one is still a wait."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may wait: numbers of requests, and seconds."""

    max_queue: int
    max_queue_per_client: int
    max_wait: Callable[[str], float]
    max_hold: float | None = None
    slow_wait_log: float = 2.0
    keep_place: float = 0.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request says of its own waiting."""

    identity: bytes | None = None
    """Equal for a request and its retry: a digest, and all that is remembered of it."""
    attempt: int = 0
    """How many times its client says to have sent it before."""
    wait: int | None = None
    """The seconds after which its client prefers a refusal (RFC 7240, section 4.3)."""
    client_timeout: float | None = None
    """The seconds after which its client says that it gives up; shown, not acted on."""

    @property
    def patience(self) -> float | None:
        """Seconds in the queue after which a refusal still arrives before the preferred wait is over."""
        return None if self.wait is None else self.wait - min(MARGIN, self.wait * MARGIN_SHARE)


NO_TERMS = Terms()


@dataclass(slots=True, eq=False)
class Ticket:
    """One request for the GPU. `client` is who it counts against; times are seconds of the lock's clock."""

    id: int
    classification: Classification
    client: str
    terms: Terms = NO_TERMS
    task: asyncio.Task[object] | None = None
    lease: Lease | None = None
    behind: tuple[str, ...] = ()
    """Models that held the GPU when the wait began; empty where there was none."""
    overlong: bool = False
    returns: int = 0
    """How many times its client has left the queue and come back."""
    deadline: float = 0.0
    """When `max_wait` is over."""
    request_id: str = ""
    """The request's name in the log."""
    is_job: bool = False
    """Whether the proxy itself runs it, for a client that asks later."""
    outcome: str = "cancelled"
    """How what was done under its lease ended; nobody says so where it was cut short."""
    bounded: bool = True
    """Whether it may be refused because too many wait. What waited before a restart may not."""

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


def tickets_of(leases: list[Lease]) -> Iterator[Ticket]:
    """The requests that these leases belong to."""
    return (lease.owner for lease in leases if isinstance(lease.owner, Ticket))
