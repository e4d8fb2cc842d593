"""The router that llama-swap takes: `groups` or a `matrix`, under `routing.router` or, in older files, at top level.

With neither, and for models that are in no group, there is a group of the rest, of which one is loaded at a time and
which stops everything that is not persistent. A matrix under `routing.router.settings` counts only with `use: matrix`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from proxy.llama_swap.expressions import ExpressionError, in_order, parse
from proxy.llama_swap.fields import Fields
from proxy.llama_swap.model import LocalModel
from proxy.router import Expression, Group, GroupRouter, MatrixRouter, Sets, count_expansions

MOST_EXPANSIONS = 10_000
"""Combinations of models that a matrix may stand for. Homes have dozens; more could not be compared in a moment."""

Routing = tuple[Literal["matrix", "groups", "default"], GroupRouter | MatrixRouter]

_DEFAULT_GROUP = "(default)"
_VARIABLE = re.compile(r"[a-zA-Z0-9.-]{1,32}")


def read_routing(raw: Mapping[str, Any], models: Mapping[str, LocalModel], fields: Fields) -> Routing:
    """The router of a configuration, and which kind it is."""
    matrix, groups, at = _chosen(raw, fields)
    if matrix is not None and groups:
        fields.wrong("matrix", "it must not stand beside groups; keep one of them")
    if matrix is not None:
        return "matrix", _matrix(matrix, f"{at}matrix", models, fields)
    return ("groups" if groups else "default"), _groups(groups, f"{at}groups", models, fields)


def _chosen(raw: Mapping[str, Any], fields: Fields) -> tuple[Any, dict[str, Any], str]:
    """(the matrix that counts or None, the groups, where they stand)"""
    router = fields.mapping(fields.mapping(raw.get("routing"), "routing").get("router"), "routing.router")
    settings = fields.mapping(router.get("settings"), "routing.router.settings")
    use = fields.text(router.get("use"), "routing.router.use", needed=True)
    matrix, groups = raw.get("matrix"), fields.mapping(raw.get("groups"), "groups")
    below = "routing.router.settings."
    inner_matrix, inner_groups = settings.get("matrix"), fields.mapping(settings.get("groups"), f"{below}groups")
    if matrix is not None or groups:
        if use or inner_matrix is not None or inner_groups:
            fields.wrong("routing.router", "it must not stand beside a matrix or groups at top level; move them there")
        return matrix, groups, ""
    if use not in {"", "group", "matrix"}:
        fields.wrong("routing.router.use", f"it must be group or matrix, not {use!r}")
    if use == "matrix" and inner_matrix is None:
        fields.wrong("routing.router.use", "it is matrix, but routing.router.settings.matrix is not there")
    if use != "matrix" and inner_matrix is not None:
        fields.note(f"{below}matrix", "llama-swap passes it over without `use: matrix` in routing.router")
    return (inner_matrix, {}, below) if use == "matrix" else (None, inner_groups, below)


def _groups(raw: dict[str, Any], at: str, models: Mapping[str, LocalModel], fields: Fields) -> GroupRouter:
    aliases = {alias for model in models.values() for alias in model.aliases}
    groups: dict[str, Group] = {}
    owner: dict[str, str] = {}
    for name, value in fields.items(raw, at):
        members = fields.texts(fields.mapping(value, f"{at}.{name}").get("members"), f"{at}.{name}", needed=True)
        for member in members:
            if owner.setdefault(member, name) != name or members.count(member) > 1:
                fields.wrong(f"{at}.{name}", f"{member!r} must stand in one group only, and once")
            elif member not in models and member in aliases:
                fields.note(f"{at}.{name}", f"{member!r} is an alias, which llama-swap passes over here")
            elif member not in models:
                fields.wrong(f"{at}.{name}", f"{member!r} is not one of the models")
        if name == _DEFAULT_GROUP:
            fields.wrong(f"{at}.{name}", "llama-swap needs this name for the models in no group; take another")
        groups[name] = _group(value, frozenset(members) & frozenset(models), f"{at}.{name}", fields)
    rest = Group(frozenset(models) - frozenset(owner))
    return GroupRouter([*groups.values(), rest])


def _group(raw: Any, members: frozenset[str], at: str, fields: Fields) -> Group:
    values = fields.mapping(raw, at)
    fields.unknown(values, frozenset({"swap", "exclusive", "persistent", "members"}), at)
    return Group(
        members,
        swap=fields.flag(values.get("swap"), f"{at}.swap", default=True, needed=True),
        exclusive=fields.flag(values.get("exclusive"), f"{at}.exclusive", default=True, needed=True),
        persistent=fields.flag(values.get("persistent"), f"{at}.persistent", default=False, needed=True),
    )


def _matrix(raw: Any, at: str, models: Mapping[str, LocalModel], fields: Fields) -> MatrixRouter:
    values = fields.mapping(raw, at)
    fields.unknown(values, frozenset({"vars", "evict_costs", "sets"}), at)
    variables = {
        name: fields.text(model, f"{at}.vars.{name}", needed=True)
        for name, model in fields.items(values.get("vars"), f"{at}.vars")
    }
    for name, model in variables.items():
        if not _VARIABLE.fullmatch(name):
            fields.wrong(f"{at}.vars", f"{name!r} must be letters, digits, - and . only, at most 32")
        if model not in models:
            fields.wrong(f"{at}.vars.{name}", f"{model!r} is not one of the models")

    def resolve(name: str) -> str | None:
        return variables.get(name, name if name in models else None)

    sets = _sets(values.get("sets"), f"{at}.sets", resolve, fields)
    costs = {}
    for name, value in fields.items(values.get("evict_costs"), f"{at}.evict_costs"):
        cost = fields.whole(value, f"{at}.evict_costs.{name}", 0, needed=True)
        meant = resolve(name)
        if meant is None:
            fields.wrong(f"{at}.evict_costs", f"{name!r} is neither a model nor one of the vars")
        elif cost < 1:
            fields.wrong(f"{at}.evict_costs.{name}", "it must be at least 1")
        else:
            costs[meant] = cost
    return MatrixRouter(sets, costs, models)


def _sets(raw: Any, at: str, resolve: Any, fields: Fields) -> Sets:
    given = fields.mapping(raw, at)
    if not given:
        fields.wrong(at, "it must hold at least one set")
    sets: dict[str, Expression] = {}
    for name, value in given.items():
        text = fields.text(value, f"{at}.{fields.text(name, at, needed=True)}", needed=True)
        try:
            sets[name] = parse(text, resolve)
        except ExpressionError as error:
            fields.wrong(f"{at}.{name}", f"in {text!r}: {error}")
    if len(sets) < len(given):
        return {}
    try:
        ordered = in_order(sets)
    except ExpressionError as error:
        fields.wrong(at, str(error))
        return {}
    count = count_expansions(ordered)
    if count > MOST_EXPANSIONS:
        fields.wrong(at, f"the sets stand for {count} combinations; at most {MOST_EXPANSIONS} can be compared")
        return {}
    return ordered
