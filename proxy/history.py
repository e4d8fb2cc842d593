"""What has been: the requests that ended last, and the last hour minute by minute. An observer of leases.

All of it is bounded: fifty requests, and sixty minutes with one number for each class, whatever happens in them. It is
lost when the proxy ends; Prometheus is for what must stay.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from proxy.tickets import Ticket, WaitOutcome
from proxy.views import TurnView, shown_client

FINISHED_SHOWN = 50
MINUTES = 60


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has ended. Times are seconds, `at` in Unix time; `held` is None where nothing was granted.

    `outcome` is that of its wait, or, where it was granted, that of its exchange with llama-swap.
    """

    id: int
    class_name: str
    model: str
    requested: str
    client: str
    is_job: bool
    outcome: str
    waited: float
    held: float | None
    at: float


@dataclass(slots=True)
class Minute:
    """What happened in one minute of the lock's clock, which is `number` since its beginning."""

    number: int
    waits: int = 0
    longest: float = 0.0
    turns: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """How long turns of each class lasted in it."""


class History:
    """Remembers. `clock` is the lock's, `wall` the wall clock."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock, self._wall = clock, wall
        self._minutes: deque[Minute] = deque(maxlen=MINUTES)
        self.finished: deque[Finished] = deque(maxlen=FINISHED_SHOWN)
        """The newest last."""

    # -- observer of leases

    def wait_ended(self, ticket: Ticket, outcome: WaitOutcome, seconds: float) -> None:
        """See `tickets.Observer`."""
        minute = self._now()
        minute.waits += 1
        minute.longest = max(minute.longest, seconds)
        if outcome != "granted":
            self._finish(ticket, outcome, seconds, None)

    def lease_ended(self, ticket: Ticket, seconds: float) -> None:
        """See `tickets.Observer`."""
        self._finish(ticket, ticket.outcome, ticket.waited, seconds)

    def turn_ended(self, class_name: str, seconds: float) -> None:
        """See `tickets.Observer`."""
        self._now()
        _spread(list(self._minutes), class_name, self._clock() - seconds, self._clock())

    def turn_begun(self, class_name: str) -> None:
        """See `tickets.Observer`."""
        self._now().turns += 1

    def swap(self) -> None:
        """Nothing is remembered of it."""

    def orphan_freed(self) -> None:
        """Nothing is remembered of it."""

    def hold_overlong(self, class_name: str) -> None:
        """Nothing is remembered of it."""

    # -- looking back

    def hour(self, turn: TurnView | None) -> list[Minute]:
        """The last sixty minutes, the one under way last; `turn` is the turn now."""
        self._now()
        minutes = [Minute(m.number, m.waits, m.longest, m.turns, dict(m.seconds)) for m in self._minutes]
        if turn is not None:
            now = self._clock()
            _spread(minutes, turn.class_name, now - turn.seconds, now)
        return minutes

    def _now(self) -> Minute:
        """The minute under way. Those in which nothing happened are made here, so that there is no gap."""
        number = int(self._clock() // 60)
        first = self._minutes[-1].number + 1 if self._minutes else number - MINUTES + 1
        for each in range(max(first, number - MINUTES + 1), number + 1):
            self._minutes.append(Minute(each))
        return self._minutes[-1]

    def _finish(self, ticket: Ticket, outcome: str, waited: float, held: float | None) -> None:
        what = ticket.classification
        names = (what.class_name, what.model, what.requested, shown_client(ticket.client), ticket.is_job)
        self.finished.append(Finished(ticket.id, *names, outcome, waited, held, self._wall()))


def _spread(minutes: list[Minute], class_name: str, begun: float, ended: float) -> None:
    """Count the seconds between `begun` and `ended` for the minutes that they fall into."""
    for minute, seconds in _overlaps(minutes, begun, ended):
        minute.seconds[class_name] = minute.seconds.get(class_name, 0.0) + seconds


def _overlaps(minutes: list[Minute], begun: float, ended: float) -> Iterator[tuple[Minute, float]]:
    for minute in reversed(minutes):
        start = minute.number * 60.0
        if start + 60.0 <= begun:
            return
        seconds = min(ended, start + 60.0) - max(begun, start)
        if seconds > 0:
            yield minute, seconds
