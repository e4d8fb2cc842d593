"""What llama-swap stops to serve a model: a pure function of the model and of what is resident.

The lock never asks "do these models fit together"; it asks the router what a request would make llama-swap stop, and
grants only while nothing of that is in use. Where llama-swap's configuration is not known the class is the unit and
every class stops every other, which makes the lock the plain reader-writer lock of two sides. Where it is known, its
own rule is repeated exactly.

Groups. A model stops the others of its group if the group swaps, and, if its group is exclusive, those of all other
groups that are not persistent. llama-swap asks this for every request, also for one of a model that is loaded.

Matrix. Each named set is an expression of models and stands for all combinations that its alternatives allow. A model
that is loaded stops nothing. For another one llama-swap takes, of the combinations that hold it, the one whose
missing resident models cost least, busy or not, and stops those; a model in no set stops everything. Between equals
the first counts: sets as ordered here, and within a set in the order that `_widest` keeps.

A *unit* is what the router counts: a model id where the configuration is known, a class name where it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import islice
from math import prod
from typing import Literal, Protocol

Mode = Literal["read", "write", "none"]
"""How a lease shares: read leases with each other, a write lease with nothing; none never enters the lock."""

NOTHING: frozenset[str] = frozenset()

DEFAULT_EVICT_COST = 1
"""llama-swap's own."""

_REMEMBERED = 4096  # answers of a matrix; on one host far fewer pairs of (model, what is resident) ever occur


class Router(Protocol):
    """llama-swap's rule for what it stops; must be pure, since the lock asks it again whenever anything changes."""

    def evict(self, unit: str, resident: AbstractSet[str]) -> frozenset[str]:
        """Which of `resident` llama-swap stops to serve `unit`, whether or not `unit` is resident itself."""
        ...


class ModelRouter(Router, Protocol):
    """A router whose units are models, as it comes from llama-swap's configuration."""

    def fits_together(self, units: AbstractSet[str]) -> bool:
        """Whether all of `units` can be resident at once and each be served without another of them being stopped."""
        ...

    def always_resident(self, unit: str) -> bool:
        """Whether no request for another model ever stops `unit`, and none for it stops another."""
        ...

    def resident_sets(self, limit: int = 100) -> list[tuple[str, ...]]:
        """The largest sets of models that stay resident together, at most `limit` of them, for people to read."""
        ...


class ClassRouter:
    """Units are classes, and every class stops every other."""

    def evict(self, unit: str, resident: AbstractSet[str]) -> frozenset[str]:
        """All other classes."""
        return frozenset(resident) - {unit}


def evict_all(router: Router, units: AbstractSet[str], resident: AbstractSet[str]) -> frozenset[str]:
    """The union of what each of `units` stops, all asked against the same `resident`, less `units` themselves."""
    stopped = NOTHING
    for unit in units:
        stopped |= router.evict(unit, resident)
    return stopped - units if stopped else stopped


@dataclass(frozen=True, slots=True)
class Group:
    """Models with one rule. The defaults are llama-swap's, and those of the group of all models in no group."""

    members: frozenset[str]
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False


class GroupRouter:
    """llama-swap's `groups`; every local model must be in exactly one."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self.group_of = {member: group for group in groups for member in group.members}
        self._models = frozenset(self.group_of)
        self._spares = {
            model: frozenset(other for other, its in self.group_of.items() if other == model or not _stops(own, its))
            for model, own in self.group_of.items()
        }

    def evict(self, unit: str, resident: AbstractSet[str]) -> frozenset[str]:
        """All but those it spares. A model that is in no configuration, as after a reload, spares nothing."""
        return frozenset(resident) - self._spares.get(unit, NOTHING) - {unit}

    def fits_together(self, units: AbstractSet[str]) -> bool:
        """Whether each of `units` spares all of them."""
        return all(units <= (self._spares.get(unit, NOTHING) | {unit}) for unit in units)

    def always_resident(self, unit: str) -> bool:
        """Whether it spares every model and every model spares it."""
        return self._spares[unit] == self._models and all(unit in spared for spared in self._spares.values())

    def resident_sets(self, limit: int = 100) -> list[tuple[str, ...]]:
        """The largest sets of models that spare one another."""
        beside = {
            model: frozenset(other for other in spared - {model} if model in self._spares[other])
            for model, spared in self._spares.items()
        }
        found = islice(_cliques(beside, NOTHING, self._models, NOTHING), limit)
        return sorted(tuple(sorted(clique)) for clique in found)


def _stops(own: Group, other: Group) -> bool:
    return own.swap if own is other else own.exclusive and not other.persistent


def _cliques(
    beside: Mapping[str, frozenset[str]], chosen: frozenset[str], open_: frozenset[str], done: frozenset[str]
) -> Iterator[frozenset[str]]:
    """The maximal cliques of a graph (Bron and Kerbosch, 1973, with a pivot)."""
    if not open_ and not done:
        if chosen:
            yield chosen
        return
    pivot = max(sorted(open_ | done), key=lambda model: len(beside[model] & open_))
    for model in sorted(open_ - beside[pivot]):
        near = beside[model]
        yield from _cliques(beside, chosen | {model}, open_ & near, done & near)
        open_, done = open_ - {model}, done | {model}


@dataclass(frozen=True, slots=True)
class Expression:
    """Part of a matrix set: a model, another set (`+name`), all of its parts (`&`), or any of them (`|`)."""

    kind: Literal["model", "set", "all", "any"]
    name: str = ""
    parts: tuple[Expression, ...] = ()


Sets = Mapping[str, Expression]
"""A matrix: its sets by name, in the order in which llama-swap asks them; each stands behind those it refers to."""


def count_expansions(sets: Sets) -> int:
    """How many combinations the sets stand for together, counted without building one."""
    counts: dict[str, int] = {}

    def count(part: Expression) -> int:
        if part.kind in {"model", "set"}:
            return counts[part.name] if part.kind == "set" else 1
        below = [count(each) for each in part.parts]
        return prod(below) if part.kind == "all" else sum(below)

    for name, expression in sets.items():
        counts[name] = count(expression)
    return sum(counts.values())


class MatrixRouter:
    """llama-swap's `matrix` over all local `models`; `costs` are by model."""

    def __init__(self, sets: Sets, costs: Mapping[str, int], models: Iterable[str]) -> None:
        self._sets, self._costs = sets, costs
        self._models = frozenset(models)
        self._mentions: dict[str, frozenset[str]] = {}
        for name, expression in sets.items():
            self._mentions[name] = self._mentioned(expression)
        self.in_no_set = self._models.difference(*self._mentions.values())
        self._answer = lru_cache(_REMEMBERED)(self._solve)

    def evict(self, unit: str, resident: AbstractSet[str]) -> frozenset[str]:
        """What the cheapest combination with `unit` leaves out."""
        return self._answer(unit, frozenset(resident))

    def fits_together(self, units: AbstractSet[str]) -> bool:
        """Whether one combination holds them all; a model in no set fits with itself only."""
        return len(units) <= 1 or self._combinations.covers(units)

    def always_resident(self, unit: str) -> bool:
        """Whether it is in every largest combination, and every model is in some set."""
        return not self.in_no_set and self._combinations.all_hold(unit)

    def resident_sets(self, limit: int = 100) -> list[tuple[str, ...]]:
        """The largest combinations, and each model that is in no set."""
        found = [*self._combinations.largest, *(frozenset({model}) for model in self.in_no_set)]
        return sorted(tuple(sorted(models)) for models in found)[:limit]

    def _mentioned(self, part: Expression) -> frozenset[str]:
        if part.kind in {"model", "set"}:
            return self._mentions[part.name] if part.kind == "set" else frozenset({part.name})
        return NOTHING.union(*map(self._mentioned, part.parts))

    def _solve(self, unit: str, resident: frozenset[str]) -> frozenset[str]:
        if unit in resident:
            return NOTHING
        wanted, *bits = (1 << place for place in range(len(resident) + 1))
        places = {unit: wanted, **dict(zip(sorted(resident), bits, strict=True))}
        price = {places[model]: self._costs.get(model, DEFAULT_EVICT_COST) for model in resident}
        seen: dict[str, list[int]] = {}
        least, kept = None, 0
        for name, expression in self._sets.items():
            if unit in self._mentions[name]:
                for mask in _project(self._sets, expression, places, seen):
                    cost = sum(each for bit, each in price.items() if not mask & bit)
                    if mask & wanted and (least is None or cost < least):
                        least, kept = cost, mask
        return frozenset(model for model in resident if not kept & places[model])

    @cached_property
    def _combinations(self) -> _Combinations:
        expanded: dict[str, set[frozenset[str]]] = {}
        for name, expression in self._sets.items():
            expanded[name] = _expand(expression, expanded)
        return _Combinations(set().union(*expanded.values()))


def _project(sets: Sets, part: Expression, places: Mapping[str, int], seen: dict[str, list[int]]) -> list[int]:
    """The combinations of `part` as bits of the models in `places`, the only ones that matter to a request."""
    if part.kind == "model":
        return [places.get(part.name, 0)]
    if part.kind == "set":
        if part.name not in seen:
            seen[part.name] = _project(sets, sets[part.name], places, seen)
        return seen[part.name]
    below = (_project(sets, each, places, seen) for each in part.parts)
    if part.kind == "any":
        return _widest(mask for masks in below for mask in masks)
    return reduce(lambda left, right: _widest(one | other for one in left for other in right), below, [0])


def _widest(masks: Iterable[int]) -> list[int]:
    """Without those that others contain, the earliest first; one that contains earlier ones comes last.

    llama-swap does this to every part of an expression, which is what decides ties within a set.
    """
    kept: list[int] = []
    for mask in masks:
        if all(mask & ~other for other in kept):
            kept = [other for other in kept if other & ~mask]
            kept.append(mask)
    return kept


def _expand(part: Expression, sets: Mapping[str, set[frozenset[str]]]) -> set[frozenset[str]]:
    if part.kind == "model":
        return {frozenset({part.name})}
    if part.kind == "set":
        return sets[part.name]
    below = [_expand(each, sets) for each in part.parts]
    if part.kind == "any":
        return set().union(*below)
    return reduce(lambda left, right: {one | other for one in left for other in right}, below, {NOTHING})


class _Combinations:
    """The largest of some sets of models, with, for each model, the numbers of those that hold it as a bit mask."""

    def __init__(self, sets: Iterable[frozenset[str]]) -> None:
        self.largest: list[frozenset[str]] = []
        self._holding: dict[str, int] = {}
        for models in sorted(sets, key=len, reverse=True):
            if not self.covers(models):
                for model in models:
                    self._holding[model] = self._holding.get(model, 0) | 1 << len(self.largest)
                self.largest.append(models)

    def covers(self, models: AbstractSet[str]) -> bool:
        """Whether one of them holds all `models`."""
        everywhere = (1 << len(self.largest)) - 1
        return reduce(int.__and__, (self._holding.get(model, 0) for model in models), everywhere) != 0

    def all_hold(self, model: str) -> bool:
        """Whether each of them holds `model`."""
        return self._holding.get(model, 0) == (1 << len(self.largest)) - 1
