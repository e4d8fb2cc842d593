"""The expressions of a matrix: how they are read, counted and ordered, and what is refused, with which words."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import SettingsError
from proxy.llama_swap import parse
from proxy.llama_swap.expressions import ExpressionError, in_order
from proxy.llama_swap.expressions import parse as parse_expression
from proxy.router import Expression, count_expansions
from proxy.simulator.matrix import compare_set_names


def read(text: str) -> Expression:
    return parse_expression(text, lambda name: name)


def shown(part: Expression) -> str:
    if part.kind in {"model", "set"}:
        return f"+{part.name}" if part.kind == "set" else part.name
    sign = "&" if part.kind == "all" else "|"
    return f"({sign.join(map(shown, part.parts))})"


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("a", "a"),
        (" a & b ", "(a&b)"),
        ("a&b|c", "((a&b)|c)"),
        ("a & (b | c)", "(a&(b|c))"),
        ("((a))", "a"),
        ("a | b | c & d", "(a|b|(c&d))"),
        ("+one & a", "(+one&a)"),
        ("qwen3.5-27b_q4 & é", "(qwen3.5-27b_q4&é)"),
        ("a\n& b", "(a&b)"),
    ],
)
def test_an_expression_is_read(text: str, meaning: str) -> None:
    assert shown(read(text)) == meaning


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a model is expected at the end"),
        ("a &", "a model is expected at the end"),
        ("& a", "a model is expected before '&'"),
        ("a b", "'b' is not expected there"),
        ("(a | b", "a closing parenthesis is missing"),
        ("a)", "')' is not expected there"),
        ("()", "a model is expected before ')'"),
        ("a ! b", "'!' must not stand in it"),
        ("+ a", "'+' must not stand in it"),
        ("a/b", "'/' must not stand in it"),
        ("(" * 60 + "a" + ")" * 60, "nested too deeply"),
    ],
)
def test_an_expression_that_llama_swap_refuses_is_refused(text: str, why: str) -> None:
    with pytest.raises(ExpressionError, match="^.*" + why.replace("(", r"\(").replace(")", r"\)").replace("+", r"\+")):
        read(text)


def ordered(**sets: str) -> list[str]:
    return list(in_order({name: read(text) for name, text in sets.items()}))


def test_sets_are_asked_by_name_and_each_behind_those_that_it_refers_to() -> None:
    assert ordered(c="a", b="a", a="a") == ["a", "b", "c"]
    assert ordered(s10="a", s9="a", s="a", s_="a", sa="a") == ["s", "s_", "s9", "s10", "sa"]
    assert ordered(a="+c & +b", b="x", c="x") == ["c", "b", "a"]
    assert ordered(a="+b", b="+c | x", c="x") == ["c", "b", "a"]


@given(st.lists(st.text("ab_-.019Zé", min_size=1, max_size=6), unique=True, min_size=2, max_size=8))
def test_the_order_of_names_is_the_simulator_s(names: list[str]) -> None:
    expected = sorted(names, key=functools.cmp_to_key(compare_set_names))
    assert list(in_order({name: read("a") for name in names})) == expected


def test_expansions_are_counted_without_being_built() -> None:
    wide = Expression("any", parts=tuple(Expression("model", str(place)) for place in range(100)))
    deep = Expression("all", parts=(wide,) * 20)
    assert count_expansions({"s": deep}) == 100**20
    sets = {"a": read("x | y"), "b": read("+a & (p | q | +a)")}
    assert count_expansions(sets) == 2 + 2 * 4


def problems(names: str, sets: dict[str, str] | None, **more: Any) -> list[str]:
    config = {"models": {name: {} for name in names}, "matrix": {"sets": sets, **more}}
    with pytest.raises(SettingsError) as caught:
        parse(yaml.safe_dump(config, sort_keys=False), {})
    return [problem.removeprefix("llama-swap's configuration: ") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("sets", "more", "expected"),
    [
        (None, {}, "matrix.sets: it must hold at least one set"),
        ({"s": "nobody & a"}, {}, "matrix.sets.s: in 'nobody & a': 'nobody' is neither a model nor one of the vars"),
        ({"s": "a & +t"}, {}, "matrix.sets: the set 's' refers to +t, which there is not"),
        ({"s": "+s"}, {}, "matrix.sets: the set 's' refers to itself, by way of itself"),
        ({"s": "+t", "t": "+s"}, {}, "matrix.sets: the set 's' refers to itself, by way of t"),
        ({"s": "a"}, {"vars": {"v": "x"}}, "matrix.vars.v: 'x' is not one of the models"),
        (
            {"s": "a"},
            {"vars": {"v_1": "a"}},
            "matrix.vars: 'v_1' must be letters, digits, - and . only, at most 32",
        ),
        ({"s": "a"}, {"evict_costs": {"a": 0}}, "matrix.evict_costs.a: it must be at least 1"),
        ({"s": "a"}, {"evict_costs": {"x": 1}}, "matrix.evict_costs: 'x' is neither a model nor one of the vars"),
        (
            {"s": "a"},
            {"evict_costs": {"a": "two"}},
            "matrix.evict_costs.a: it must be a whole number, not 'two'",
        ),
    ],
)
def test_what_is_wrong_with_a_matrix_is_said_in_one_sentence(
    sets: dict[str, str] | None, more: dict[str, Any], expected: str
) -> None:
    assert expected in problems("ab", sets, **more)


def test_a_matrix_that_stands_for_too_many_combinations_is_refused_before_any_is_built() -> None:
    ten = "(a | b | c | d | e | f | g | h | i | j)"
    assert problems("abcdefghij", {"s": " & ".join([ten] * 9)}) == [
        "matrix.sets: the sets stand for 1000000000 combinations; at most 10000 can be compared"
    ]


def test_every_mistake_is_named_at_once() -> None:
    assert len(problems("a", {"s": "a &", "t": "x"}, evict_costs={"y": 1})) == 3
