"""R: what llama-swap has loaded once every granted lease has loaded, and what may join it.

R is a belief, kept from what the lock grants and corrected by what llama-swap reports. A grant makes it
`(R - evict) + units`; it never loses a unit of a held lease. When a lease ends while it is still loading, or its
upstream fails, nobody knows what is loaded: its units leave R with it, and R is *uncertain* until a report that was
asked for afterwards arrives while nothing is loading and no failed lease is held. Only units that are in use already
may join a doubtful R, and only of those that have answered, the *proved* ones, is it known that they need no load.

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
        self.failed = 0
        self.proved: frozenset[str] = NOTHING
        """Units in use that have answered: they are loaded, whatever else is in doubt."""
        self._clock = clock
        self._changed = float("-inf")

    def holds(self, units: AbstractSet[str]) -> bool:
        """Whether no load is needed to serve `units`."""
        return units <= self.resident

    def evicts(self, units: frozenset[str]) -> frozenset[str]:
        """What llama-swap stops of R to serve `units`."""
        return evict_all(self.router, units, self.resident)

    def spares(self, units: frozenset[str], turn: frozenset[str]) -> bool:
        """Whether loading `units` would stop nothing of `turn`, were all of that resident beside R.

        Loading: llama-swap's matrix stops nothing for a model that is resident, so one that a report put into R
        would slip into a turn that it cannot share.
        """
        return turn.isdisjoint(evict_all(self.router, units, (self.resident | turn) - units))

    def may_join(self, units: frozenset[str]) -> bool:
        """Whether `units` can be served beside everything in use: no unit in use stops, one load, no doubt."""
        in_use = self.in_use.keys()
        if self.loading and not self.holds(units):
            return False
        if self.uncertain and not units <= in_use:
            return False
        return in_use.isdisjoint(self.evicts(units))

    def enter(self, units: frozenset[str]) -> tuple[bool, frozenset[str]]:
        """A grant for `units`: returns whether it may need a load, and what it makes llama-swap stop."""
        cold, stops = not units <= (self.proved if self.uncertain else self.resident), self.evicts(units)
        self.in_use.update(units)
        self.loading += 1
        if cold or stops:
            self.resident = (self.resident - stops) | units
            self._changed = self._clock()
        return cold, stops

    def answered(self, units: frozenset[str]) -> None:
        """A lease on `units` was answered: they are loaded for as long as they are in use."""
        self.proved |= units

    def load_again(self) -> None:
        """A lease that had finished loading, or never needed to, may be loading now."""
        self.loading += 1

    def settle(self, *, moved: bool) -> None:
        """A lease has finished loading; `moved` says that it changed what is resident."""
        self.loading -= 1
        if moved:
            self._changed = self._clock()

    def fail(self, units: frozenset[str]) -> None:
        """The upstream of a held lease failed: R is in doubt, and no report helps until that lease has ended."""
        self.failed += 1
        self.proved -= units
        self._doubt()

    def leave(self, units: frozenset[str], *, loading: bool, failed: bool) -> None:
        """A lease on `units` ended, perhaps while it was still loading, or after its upstream failed."""
        subtract(self.in_use, units)
        self.proved = self.proved.intersection(self.in_use)
        self.loading -= loading
        self.failed -= failed
        if loading or failed:
            self.resident -= units - self.in_use.keys()
            self._doubt()

    def forget(self) -> None:
        """llama-swap stopped every model: only what is in use may be there still, until a report says what is."""
        self.resident = frozenset(self.in_use)
        self.proved = NOTHING
        self._doubt()

    def report(self, resident: AbstractSet[str], *, asked: float) -> bool:
        """Take llama-swap's word, `asked` for at that time, for R; False where it is stale or may not last."""
        if self.loading or self.failed or asked <= self._changed:
            return False
        self.uncertain = False
        self.resident = frozenset(resident).union(self.in_use)
        return True

    def _doubt(self) -> None:
        self.uncertain = True
        self._changed = self._clock()


def subtract(counter: Counter[str], names: AbstractSet[str]) -> None:
    """Take one of each name, so that a name at zero is gone and the counter cannot grow."""
    for name in names:
        counter[name] -= 1
        if counter[name] <= 0:
            del counter[name]
