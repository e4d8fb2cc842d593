"""What llama-swap stops in order to serve a model: a pure function of its routing rules and of what is loaded.

Groups. A request for a model stops the rest of its own group if the group swaps, and, if its group is
exclusive, every model of any other group that is not persistent. Models in no group form a default group.

Matrix. Each named set is an expression (see `matrix.py`) and stands for all combinations of models that its
alternatives allow. For a model that is not loaded llama-swap takes, of all
combinations that hold it, the one that leaves out the cheapest loaded models, and stops those. Who is busy
plays no part. A model in no set stops everything.

Ties. The first of the cheapest combinations wins, in the order of the sets and, within an expression, in the
written one, with a subtlety: seen through the models that matter (the wanted one and the loaded ones), a
combination that adds nothing to an earlier one is dropped, and one that adds to earlier ones replaces them,
at the end. That happens in every part of an expression before the parts are combined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.simulator.matrix import Expression, Matrix

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from proxy.simulator.config import Config

DEFAULT_GROUP = "(default)"
DEFAULT_COST = 1


@dataclass(frozen=True, slots=True)
class Group:
    members: frozenset[str]
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False


Router = Matrix | dict[str, Group]
Combination = frozenset[str]


def stopped_by(config: Config, model: str, resident: Iterable[str]) -> set[str]:
    """The models of `resident` that llama-swap stops to serve a request for `model`."""
    if isinstance(config.router, Matrix):
        return _stopped_by_matrix(config.router, model, frozenset(resident))
    return _stopped_by_groups(config.router, model, frozenset(resident))


def _stopped_by_groups(groups: Mapping[str, Group], model: str, resident: frozenset[str]) -> set[str]:
    group_of = {member: group for group in groups.values() for member in group.members}
    own = group_of[model]
    stopped = set()
    for other in resident - {model}:
        same = group_of[other] is own
        if (same and own.swap) or (not same and own.exclusive and not group_of[other].persistent):
            stopped.add(other)
    return stopped


def _stopped_by_matrix(matrix: Matrix, model: str, resident: frozenset[str]) -> set[str]:
    if model in resident:
        return set()

    def cost(combination: Combination) -> int:
        return sum(matrix.costs.get(other, DEFAULT_COST) for other in resident - combination)

    relevant = resident | {model}
    candidates = [
        combination
        for expression in matrix.sets.values()
        for combination in _combinations(matrix, expression, relevant)
        if model in combination
    ]
    chosen = min(candidates, key=cost, default=frozenset())  # the first of the cheapest
    return set(resident - chosen)


def _combinations(matrix: Matrix, expression: Expression, relevant: Combination) -> list[Combination]:
    """What `expression` allows, as far as `relevant` models go, in the order in which ties are decided."""
    if expression.kind == "model":
        return [frozenset({expression.name}) & relevant]
    if expression.kind == "set":
        return _combinations(matrix, matrix.sets[expression.name], relevant)
    parts = [_combinations(matrix, part, relevant) for part in expression.parts]
    if expression.kind == "|":
        return _maximal(combination for part in parts for combination in part)
    joined: list[Combination] = [frozenset()]
    for part in parts:
        joined = _maximal(left | right for left in joined for right in part)
    return joined


def _maximal(combinations: Iterable[Combination]) -> list[Combination]:
    kept: list[Combination] = []
    for new in combinations:
        if not any(new <= old for old in kept):
            kept = [old for old in kept if not old <= new]
            kept.append(new)
    return kept
