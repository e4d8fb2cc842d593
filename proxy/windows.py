"""How long a turn may go on while somebody of another turn waits.

A switch costs two loads: away, and back again. `auto` lets newcomers pass for about that long, so that switching
costs at most half of the time, whatever the models weigh; `max_turn` then bounds what a long queue can take. Both are
kept between bounds that no measurement, however wrong, can move them out of.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

UNKNOWN_LOAD = 15.0
"""Seconds assumed for a model whose load has not been measured: a mid-sized model from a fast disk."""

SHORTEST, LONGEST = 1.0, 300.0
"""Seconds between which `switch_after: auto` stays."""

TURN_FACTOR = 4
"""`max_turn: auto` is this many times `switch_after`."""

SHORTEST_TURN = 60.0
"""Seconds: below the timeouts of common clients a turn need not end."""


@dataclass(frozen=True, slots=True)
class Windows:
    """`switch_after` and `max_turn` in seconds, None for auto; `load` gives a unit's last measured load."""

    switch_after: float | None
    max_turn: float | None
    max_wait: float
    load: Callable[[str], float | None]

    def of(self, turn: AbstractSet[str], other: AbstractSet[str]) -> tuple[float, float]:
        """(switch_after, max_turn) for the units of the turn and those of the first waiter of another one."""
        switch_after = self.switch_after
        if switch_after is None:
            switch_after = min(max(SHORTEST, self._longest(turn) + self._longest(other)), LONGEST)
        if self.max_turn is not None:
            return min(switch_after, self.max_turn), self.max_turn
        max_turn = min(max(TURN_FACTOR * switch_after, SHORTEST_TURN), self.max_wait / 2)
        return switch_after, max(max_turn, switch_after)

    def _longest(self, units: AbstractSet[str]) -> float:
        loads = [UNKNOWN_LOAD if (seconds := self.load(unit)) is None else seconds for unit in units]
        return max(loads, default=UNKNOWN_LOAD)
