"""The sets of a matrix: from llama-swap's expressions of models to trees, in the order in which they are asked.

`|` binds weaker than `&`; `+name` stands for another set. Sets are asked in the order of their names, where
numbers count as numbers (`s9` before `s10`), except that a set comes after those that it refers to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cmp_to_key
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Expression:
    """A leaf (`model`), a reference (`set_name`), or `parts` joined by `kind`."""

    kind: str  # "model", "set", "&" or "|"
    name: str = ""
    parts: tuple[Expression, ...] = ()


@dataclass(frozen=True, slots=True)
class Matrix:
    sets: Mapping[str, Expression]  # in the order in which they are asked
    costs: Mapping[str, int]


def read_matrix(
    sets: Mapping[str, str], variables: Mapping[str, str], costs: Mapping[str, int], models: frozenset[str]
) -> Matrix:
    """A matrix from its texts.

    Raises:
        ValueError: for whatever llama-swap refuses: a syntax error, an unknown name, a circle of references.
    """
    if not sets:
        raise ValueError("matrix must define at least one set")

    def resolve(name: str) -> str:
        model = variables.get(name, name)
        if model not in models:
            raise ValueError(f"unknown var or model {name!r}")
        return model

    parsed: dict[str, Expression] = {}
    for name in sorted(sets, key=cmp_to_key(compare_set_names)):
        parsed[name] = _Parser(sets[name], resolve=resolve, sets=sets).parse()
    if any(cost <= 0 for cost in costs.values()):
        raise ValueError("an evict_cost must be a positive integer")
    return Matrix(_references_first(parsed), {resolve(name): cost for name, cost in costs.items()})


def _references_first(sets: Mapping[str, Expression]) -> dict[str, Expression]:
    ordered: dict[str, Expression] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(f"circular reference detected involving set {name!r}")
        if name not in ordered:
            for reference in _references(sets[name]):
                visit(reference, (*path, name))
            ordered[name] = sets[name]

    for name in sets:
        visit(name, ())
    return ordered


def _references(expression: Expression) -> list[str]:
    if expression.kind == "set":
        return [expression.name]
    return [name for part in expression.parts for name in _references(part)]


class _Parser:
    """A name is letters, digits, `_`, `-` and `.`."""

    TOKEN = re.compile(r"\s*(?:(?P<name>\+?[\w.-]+)|(?P<sign>[&|()]))")

    def __init__(self, text: str, *, resolve: Callable[[str], str], sets: Mapping[str, str]) -> None:
        self.tokens = self._tokens(text.strip())
        self.resolve = resolve
        self.sets = sets

    def _tokens(self, text: str) -> list[str]:
        tokens, position = [], 0
        while position < len(text):
            match = self.TOKEN.match(text, position)
            if match is None:
                raise ValueError(f"unexpected character {text[position]!r} in {text!r}")
            tokens.append(match["name"] or match["sign"])
            position = match.end()
        return [*tokens, ""]

    def parse(self) -> Expression:
        expression = self._joined("|")
        if self.tokens[0]:
            raise ValueError(f"unexpected {self.tokens[0]!r}")
        return expression

    def _joined(self, sign: str) -> Expression:
        parts = []
        while True:
            parts.append(self._joined("&") if sign == "|" else self._atom())
            if self.tokens[0] != sign:
                return parts[0] if len(parts) == 1 else Expression(sign, parts=tuple(parts))
            self.tokens.pop(0)

    def _atom(self) -> Expression:
        word = self.tokens.pop(0) if self.tokens[0] else ""
        if word == "(":
            inner = self._joined("|")
            if self.tokens.pop(0) != ")":
                raise ValueError("missing closing parenthesis")
            return inner
        if not word or word in "&|)+":
            raise ValueError(f"unexpected {word or 'end'!r}")
        if word.startswith("+"):
            if word[1:] not in self.sets:
                raise ValueError(f"reference to undefined set {word[1:]!r}")
            return Expression("set", word[1:])
        return Expression("model", self.resolve(word))


def compare_set_names(left: str, right: str) -> int:
    """llama-swap's order of set names: alphabetical, but numbers count as numbers, and letters come last."""
    in_number = False
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one == other:
            in_number = one.isdigit()
            continue
        if one.isalpha() and other.isalpha():
            return -1 if one < other else 1
        if one.isalpha() or other.isalpha():
            letters_first = in_number
            return -1 if one.isalpha() == letters_first else 1
        return _compare_numbers(left, right, place)
    return len(left) - len(right)


def _compare_numbers(left: str, right: str, place: int) -> int:
    """Two names that differ first at `place`, where neither has a letter."""
    inside = re.search(r"[1-9]\d*$", left[:place])  # a number goes on here, so that leading zeros count
    lead = "1" if inside and "0" in {left[place], right[place]} else "0"
    ones, others = (re.sub(r"\D.*", "", name[place:], flags=re.DOTALL) for name in (left, right))
    by_size = (int(lead + ones), len(ones), left[place]), (int(lead + others), len(others), right[place])
    return -1 if by_size[0] < by_size[1] else 1
