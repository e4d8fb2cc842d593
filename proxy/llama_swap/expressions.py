"""The expressions of a matrix, from text to `Expression`.

    any  = all { "|" all }          all  = atom { "&" atom }          atom = name | "+" name | "(" any ")"

A name is made of letters, digits, `_`, `-` and `.`, and may follow another thing without a space.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cmp_to_key
from typing import Any

from proxy.llama_swap.go_yaml import NonText
from proxy.router import Expression, Sets

_TOKEN = re.compile(r"\s*(?:(?P<ref>\+[\w.-]+)|(?P<name>[\w.-]+)|(?P<sign>[&|()])|(?P<wrong>\S))")


class ExpressionError(ValueError):
    """An expression, or what the expressions refer to, is not as llama-swap wants it; says why."""


def parse(text: str, resolve: Callable[[str], str | None]) -> Expression:
    """The expression in `text`; `resolve` gives the model that a name means. Raises ExpressionError."""
    parser = _Parser(text, resolve)
    expression = parser.either()
    if parser.word:
        raise ExpressionError(f"{parser.word!r} is not expected there")
    return expression


class _Parser:
    def __init__(self, text: str, resolve: Callable[[str], str | None]) -> None:
        self._tokens = _tokens(text)
        self._resolve = resolve
        self._depth = 0
        self._next()

    def _next(self) -> None:
        self.word = next(self._tokens, "")

    def either(self) -> Expression:
        return self._joined("|", lambda: self._joined("&", self._atom))

    def _joined(self, sign: str, part: Callable[[], Expression]) -> Expression:
        parts = [part()]
        while self.word == sign:
            self._next()
            parts.append(part())
        return parts[0] if len(parts) == 1 else Expression("all" if sign == "&" else "any", parts=tuple(parts))

    def _atom(self) -> Expression:
        word = self.word
        self._next()
        if word == "(":
            return self._inner()
        if word in {"", "&", "|", ")"}:
            raise ExpressionError(f"a model is expected {f'before {word!r}' if word else 'at the end'}")
        if word.startswith("+"):
            return Expression("set", word[1:])
        model = self._resolve(word)
        if model is None:
            raise ExpressionError(f"{word!r} is neither a model nor one of the vars")
        return Expression("model", model)

    def _inner(self) -> Expression:
        self._depth += 1
        if self._depth > 50:  # Python's stack must outlast it; nobody writes so many
            raise ExpressionError("its parentheses are nested too deeply")
        expression = self.either()
        if self.word != ")":
            raise ExpressionError("a closing parenthesis is missing")
        self._depth -= 1
        self._next()
        return expression


def _tokens(text: str) -> Iterator[str]:
    for match in _TOKEN.finditer(text.strip()):
        if match["wrong"]:
            raise ExpressionError(f"{match['wrong']!r} must not stand in it")
        yield match["ref"] or match["name"] or match["sign"]


def in_order(sets: Mapping[str, Expression]) -> Sets:
    """The sets in the order in which llama-swap asks them: by name, but each behind those that it refers to.

    Raises ExpressionError for a reference to nothing, or in a circle.
    """
    ordered: dict[str, Expression] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ExpressionError(f"the set {name!r} refers to itself, by way of {' and '.join(path[1:]) or 'itself'}")
        if name in ordered:
            return
        for reference in _references(sets[name]):
            if reference not in sets:
                raise ExpressionError(f"the set {name!r} refers to +{reference}, which there is not")
            visit(reference, (*path, name))
        ordered[name] = sets[name]

    for name in sorted(sets, key=cmp_to_key(_compare)):
        visit(name, ())
    return ordered


def _references(part: Expression) -> Iterator[str]:
    if part.kind == "set":
        yield part.name
    for each in part.parts:
        yield from _references(each)


def _compare(one: str, other: str) -> int:
    """llama-swap's order of names, which is its YAML library's: `s9` before `s10`, and `s_` before `sa`.

    Names that were written as numbers come first.
    """
    if isinstance(one, NonText) or isinstance(other, NonText):
        return _sign(_rank(one), _rank(other))
    place = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return len(one) - len(other)
    left, right = one[place], other[place]
    if left.isalpha() and right.isalpha():
        return _sign(left, right)
    if left.isalpha() or right.isalpha():
        behind_digit = place > 0 and _is_digit(one[place - 1])
        return -1 if left.isalpha() == behind_digit else 1
    return _sign(_number_at(one, place, {left, right}), _number_at(other, place, {left, right}))


def _number_at(name: str, place: int, at_place: set[str]) -> tuple[int, int, str]:
    """What decides between two names of which neither has a letter there: the number that goes on, then the sign.

    A zero counts as a figure only if the number began before it.
    """
    end = place
    while end < len(name) and _is_digit(name[end]):
        end += 1
    begun = re.search(r"\d*$", name[:place], re.ASCII)
    lead = "1" if "0" in at_place and begun and begun[0].strip("0") else ""
    return int(lead + name[place:end] or "0"), end, name[place]


def _is_digit(character: str) -> bool:
    return "0" <= character <= "9"


def _rank(name: str) -> tuple[int, float]:
    value = name.value if isinstance(name, NonText) else None
    return (0, float(value)) if isinstance(value, int | float) else (1, 0.0)


def _sign(one: Any, other: Any) -> int:
    return int(one > other) - int(one < other)
