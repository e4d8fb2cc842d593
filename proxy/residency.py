"""R: what llama-swap has loaded once every granted lease has loaded, and what may join it.

R is a belief, kept from what the lock grants and corrected by what llama-swap reports. A grant makes it
`(R - evict) + units`; it never loses a unit of a held lease. When a lease ends while it is still loading, or its
upstream fails, nobody knows what is loaded: its units leave R, and R is *uncertain* until a report that was asked
for afterwards arrives while nothing is loading. Only units that are in use already may join a doubtful R.

One load at a time belongs to it: two loads under way at once can each stop the other's model inside llama-swap,
which was measured as requests queued there although each grant alone was right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from proxy.router import NOTHING, Router, evict_all


class Residency:
    """R, the units in use and the loads under way. Pure bookkeeping: it decides nothing but what may join."""

    def __init__(self, router: Router, clock: Callable[[], float]) -> None:
        self.router = router
        self.resident = NOTHING
        self.uncertain = False
        self.in_use: Counter[str] = Counter()
        self.loading = 0
        self._clock = clock
        self._changed = float("-inf")

    def holds(self, units: AbstractSet[str]) -> bool:
        """Whether no load is needed to serve `units`."""
        return units <= self.resident

    def evicts(self, units: frozenset[str], also: frozenset[str] = NOTHING) -> frozenset[str]:
        """What llama-swap stops of R, and of `also` if it were resident, to serve `units`."""
        return evict_all(self.router, units, self.resident | also)

    def may_join(self, units: frozenset[str]) -> bool:
        """Whether `units` can be served beside everything in use: no unit in use stops, one load, no doubt."""
        in_use = self.in_use.keys()
        if self.loading and not self.holds(units):
            return False
        if self.uncertain and not units <= in_use:
            return False
        return in_use.isdisjoint(self.evicts(units))

    def enter(self, units: frozenset[str]) -> tuple[bool, frozenset[str]]:
        """A grant for `units`: returns whether it needs a load, and what it makes llama-swap stop."""
        cold, stops = not self.holds(units), self.evicts(units)
        self.in_use.update(units)
        self.loading += 1
        if cold or stops:
            self.resident = (self.resident - stops) | units
            self._changed = self._clock()
        return cold, stops

    def settle(self, *, moved: bool) -> None:
        """A lease has finished loading; `moved` says that it changed what is resident."""
        self.loading -= 1
        if moved:
            self._changed = self._clock()

    def leave(self, units: frozenset[str], *, in_doubt: bool) -> None:
        """A lease on `units` ended; `in_doubt`: while it was loading, or after its upstream failed."""
        subtract(self.in_use, units)
        if in_doubt:
            self.resident -= units - self.in_use.keys()
            self.doubt()

    def doubt(self) -> None:
        """Nobody knows what is loaded, until a report that is asked for after this."""
        self.uncertain = True
        self._changed = self._clock()

    def report(self, resident: AbstractSet[str], *, asked: float) -> bool:
        """Take llama-swap's word, `asked` for at that time, for R; False where the word is stale or loads are on."""
        if self.loading or asked <= self._changed:
            return False
        self.uncertain = False
        self.resident = frozenset(resident) | self.in_use.keys()
        return True


def subtract(counter: Counter[str], names: AbstractSet[str]) -> None:
    """Take one of each name, so that a name at zero is gone and the counter cannot grow."""
    for name in names:
        counter[name] -= 1
        if counter[name] <= 0:
            del counter[name]
