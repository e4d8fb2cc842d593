"""What the lock deals in: what a request claims, where it stands in the queue, what it holds, and in which turn.

A `Claim` is what is asked for, a `Place` is where it stands, a `Lease` is both on the way through: it waits, is held,
and ends. All that these can do is tell the lock, which decides (`rwlock.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, Protocol

from proxy.residency import Effect
from proxy.router import Mode


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request asks for: how it shares, which units it makes resident, which models' slots it takes."""

    mode: Mode
    units: frozenset[str]
    models: frozenset[str]


NO_CLAIMS: frozenset[Claim] = frozenset()


@dataclass(frozen=True, slots=True)
class Policy:
    """Who may pass whom. `switch_after` and `max_turn` are seconds and matter under `batch` only.

    Where there are `windows`, they give both, for the units of a turn and those of the first waiter of another one.
    """

    kind: Literal["batch", "fifo"] = "batch"
    switch_after: float = 30.0
    max_turn: float = 90.0
    windows: Callable[[AbstractSet[str], AbstractSet[str]], tuple[float, float]] | None = None

    def window(self, turn: AbstractSet[str], other: AbstractSet[str]) -> tuple[float, float]:
        """(switch_after, max_turn) for a turn with these units, while that other waits."""
        return (self.switch_after, self.max_turn) if self.windows is None else self.windows(turn, other)


@dataclass(slots=True, eq=False)
class Turn:
    """A stretch of grants of one mode of which none stops a model of another; it outlives its leases."""

    mode: Mode
    begun_by: object
    begun: float
    units: frozenset[str]
    first_number: int
    queued: frozenset[Claim] = NO_CLAIMS
    """Arrivals of these claims with a number below `first_number` were queued, or kept a place, when it began."""
    loaded: float | None = None
    """When what it began with was there; at most `max_turn` after the begin."""


@dataclass(slots=True, eq=False)
class Place:
    """Where a request stands in the queue; times are seconds of the lock's clock.

    `key` is the order in the queue: the arrival's `number`, until a turn's end moves it behind everybody.
    """

    claim: Claim
    number: int
    key: int
    arrived: float


class _Lock(Protocol):
    """What a lease tells its lock."""

    def _keep(self, lease: Lease) -> Place: ...

    def _end(self, lease: Lease) -> None: ...

    def _settle(self, lease: Lease, *, heard: bool) -> None: ...

    def _fail(self, lease: Lease) -> None: ...


class Lease:
    """One request's place in the queue and then its right to the GPU, until `release`.

    `owner` is whatever the caller wants to find again in a snapshot. Times are seconds of the lock's clock.
    """

    __slots__ = (
        "_lock",
        "_refusal",
        "_wake",
        "arrived",
        "claim",
        "effect",
        "ended",
        "failed",
        "granted",
        "heard",
        "key",
        "loading",
        "number",
        "owner",
        "turn",
    )

    def __init__(self, lock: _Lock, place: Place, owner: object) -> None:
        self._lock = lock
        self._wake: asyncio.Future[None] | None = None
        self._refusal: Exception | None = None
        self.claim = place.claim
        self.owner = owner
        self.number, self.key = place.number, place.key
        self.arrived = place.arrived
        self.granted: float | None = None
        self.ended: float | None = None
        self.turn: Turn | None = None
        self.effect = Effect(place.claim.units)
        self.loading = False
        self.failed = False
        self.heard = False

    def __repr__(self) -> str:
        state = "ended" if self.ended is not None else "held" if self.held else "waiting"
        return f"<Lease {self.number} {self.claim.mode} {sorted(self.claim.units)} {state}>"

    @property
    def cold(self) -> bool:
        """Whether its models may have to be loaded for it."""
        return self.effect.cold

    @property
    def stops(self) -> frozenset[str]:
        """What its grant makes llama-swap stop."""
        return self.effect.stops

    @property
    def held(self) -> bool:
        """Granted and not released."""
        return self.granted is not None and self.ended is None

    @property
    def waiting(self) -> bool:
        """Still in the queue."""
        return self.granted is None and self.ended is None

    async def wait(self) -> None:
        """Return once granted. A cancellation, also one in the tick of the grant, leaves nothing held.

        Raises what `refuse` was given, and RuntimeError where the lease was released before this returned.
        """
        if self.waiting:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            except BaseException:
                self.release()
                raise
        if not self.held:
            raise self._refusal or RuntimeError("the lease was released before its wait was over")

    def release(self) -> None:
        """Give the lease back, or leave the queue. Synchronous, idempotent, valid from any task."""
        if self.ended is None:
            self._lock._end(self)

    def keep(self) -> Place | None:
        """Leave the queue as by `release`, but keep the place for a request to come; None if it does not wait.

        A cancellation releases as soon as its task runs: whoever cancels has to keep the place in the same tick.
        """
        return self._lock._keep(self) if self.waiting else None

    def refuse(self, error: Exception) -> None:
        """Take a waiter out of the queue and raise `error` where it waits; nothing happens to one already granted."""
        if self.waiting:
            self._refusal = error
            self.release()

    def sent(self) -> None:
        """The request has been sent whole: one that needed no load and stops nothing no longer counts as loading."""
        if not self.effect.moves:
            self._lock._settle(self, heard=False)

    def answered(self) -> None:
        """The upstream's head below 500 has arrived, or its model was reported ready: what it needed is loaded."""
        self._lock._settle(self, heard=True)

    def fail(self) -> None:
        """The upstream failed (500 and above, or no answer): its models count as resident only until the release."""
        if self.held and not self.failed:
            self._lock._fail(self)

    def wake(self) -> None:
        """Called once the lease is held, or has ended: nobody may sleep on a lease that left the queue."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
