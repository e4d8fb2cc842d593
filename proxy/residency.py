"""R: what llama-swap has loaded once every granted lease has loaded, and what may join it.

R is a belief, kept from what the lock grants and corrected by what llama-swap reports. A grant makes it
`(R - evict) + units`; it never loses a unit of a held lease. When a lease ends while it is still loading, or its
upstream fails, nobody knows what is loaded: its units leave R with it, and R is *uncertain* until a report that was
asked for afterwards arrives while nothing is loading and no failed lease is held. Only units that are in use already
may join a doubtful R, and only of those that have answered, the *proved* ones, is it known that they need no load.

One load at a time belongs to it: two loads under way at once can each stop the other's model inside llama-swap,
which was measured as requests queued there although each grant alone was right. For the same reason nobody may join
who would stop a model that a load under way is stopping already: llama-swap's groups ask that of every request, also
of one whose model is resident, and R, which is ahead of llama-swap, does not show it. A load that was given up goes
on all the same, so it counts as under way until its models answer, the doubt ends, or nothing is in use.

Models whose requests take no lease are of R too, for llama-swap's solver sees them when it decides what to stop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from proxy.router import NOTHING, ClassRouter, Router, evict_all


@dataclass(frozen=True, slots=True)
class Effect:
    """What a grant for `units` sets going in llama-swap: perhaps a load of them (`cold`), and the end of `stops`."""

    units: frozenset[str]
    cold: bool = False
    stops: frozenset[str] = NOTHING

    @property
    def moves(self) -> bool:
        """Whether it is a swap: something is loaded or stopped."""
        return self.cold or bool(self.stops)


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
        self._swapping: Counter[str] = Counter()
        self._stopping: Counter[str] = Counter()
        """The units of the swaps under way, and those that they stop."""
        self._given_up: set[Effect] = set()
        """Loads whose leases have ended, which may be under way still."""
        self._beside: Counter[str] = Counter()
        """The units of mode none in use."""
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
        """Whether `units` can be served now beside everything in use: nothing of that stops, one load, no doubt."""
        in_use = self.in_use.keys()
        if self.loading and not self.holds(units):
            return False
        if self.uncertain and not units <= in_use:
            return False
        return in_use.isdisjoint(self.evicts(units)) and not self._collides(units)

    def _collides(self, units: frozenset[str]) -> bool:
        """Whether `units` would get in the way of a swap under way; whoever wants the very units of one just joins."""
        if units <= self._swapping.keys():
            return False
        moving = frozenset(self._stopping).union(*(effect.units | effect.stops for effect in self._given_up))
        return bool(moving) and not moving.isdisjoint(evict_all(self.router, units, self.resident | moving))

    def visit(self, units: frozenset[str]) -> None:
        """A grant for `units` of mode none."""
        self._beside.update(units)
        if not units & self._visitors() <= self.resident:
            self.resident |= units
            self._changed = self._clock()

    def end_visit(self, units: frozenset[str], *, failed: bool) -> None:
        """A lease of mode none ended, perhaps after its upstream failed."""
        subtract(self._beside, units)
        if failed:
            self.resident -= units - self.in_use.keys() - self._visitors()
            self._changed = self._clock()

    def _visitors(self) -> AbstractSet[str]:
        """The units of mode none in use. Not of classes: whether one of those stops another is not known."""
        return NOTHING if isinstance(self.router, ClassRouter) else self._beside.keys()

    def enter(self, units: frozenset[str]) -> Effect:
        """A grant for `units`: returns what it sets going."""
        cold = not units <= (self.proved if self.uncertain else self.resident)
        effect = Effect(units, cold, self.evicts(units))
        self.in_use.update(units)
        self.begin(effect)
        if effect.moves:
            self.resident = (self.resident - effect.stops) | units
            self._changed = self._clock()
        return effect

    def answered(self, units: frozenset[str]) -> None:
        """A lease on `units` was answered: they are loaded for as long as they are in use."""
        self.proved |= units
        self._given_up = {effect for effect in self._given_up if not effect.units <= self.proved}

    def begin(self, effect: Effect) -> None:
        """`effect` is under way, perhaps once more."""
        self.loading += 1
        if effect.moves:
            self._swapping.update(effect.units)
            self._stopping.update(effect.stops)

    def end(self, effect: Effect) -> None:
        """`effect` is no longer under way."""
        self.loading -= 1
        if effect.moves:
            subtract(self._swapping, effect.units)
            subtract(self._stopping, effect.stops)

    def settle(self, effect: Effect) -> None:
        """A lease has finished loading."""
        self.end(effect)
        if effect.moves:
            self._changed = self._clock()

    def fail(self, units: frozenset[str]) -> None:
        """The upstream of a held lease failed: R is in doubt, and no report helps until that lease has ended."""
        self.failed += 1
        self.proved -= units
        self._given_up = {effect for effect in self._given_up if not effect.units <= units}
        self._doubt()

    def leave(self, effect: Effect, *, loading: bool, failed: bool) -> None:
        """A lease ended, perhaps while it was still loading, or after its upstream failed."""
        units = effect.units
        subtract(self.in_use, units)
        self.proved = self.proved.intersection(self.in_use)
        self.failed -= failed
        if loading:
            self.end(effect)
        if loading or failed:
            self.resident -= units - self.in_use.keys()
            self._doubt()
        if loading and effect.moves:
            self._given_up.add(effect)
        if not self.in_use:
            self._given_up.clear()

    def forget(self) -> None:
        """llama-swap stopped every model: only what is in use may be there still, until a report says what is."""
        self.resident = frozenset(self.in_use)
        self.proved = NOTHING
        self._given_up.clear()
        self._doubt()

    def report(self, resident: AbstractSet[str], *, asked: float) -> bool:
        """Take llama-swap's word, `asked` for at that time, for R; False where it is stale or may not last."""
        if self.loading or self.failed or asked <= self._changed:
            return False
        self.uncertain = False
        self._given_up.clear()
        self.resident = frozenset(resident).union(self.in_use, self._visitors())
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
