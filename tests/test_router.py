"""What llama-swap stops: its rules one by one, and the simulator's answers, which were written apart from ours."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_swap_support import LlamaSwap
from proxy.errors import SettingsError
from proxy.llama_swap import LlamaSwapConfig, parse
from proxy.router import ClassRouter, Expression, Group, GroupRouter, MatrixRouter, evict_all
from proxy.simulator import parse_config, stopped_by


def config_of(names: str, **more: Any) -> LlamaSwapConfig:
    text = yaml.safe_dump({"models": {name: {} for name in names}, **more}, sort_keys=False)
    return parse(text, {})


def matrix(names: str, sets: dict[str, str], **more: Any) -> MatrixRouter:
    router = config_of(names, matrix={"sets": sets, **more}).router
    assert isinstance(router, MatrixRouter)
    return router


def groups(names: str, **by_name: dict[str, Any]) -> GroupRouter:
    router = config_of(names, groups=by_name).router
    assert isinstance(router, GroupRouter)
    return router


def stops(router: GroupRouter | MatrixRouter, model: str, resident: str) -> str:
    return "".join(sorted(router.evict(model, frozenset(resident))))


# Classes.


def test_every_class_stops_every_other() -> None:
    assert ClassRouter().evict("llm", {"llm", "tts", "embed"}) == {"tts", "embed"}


def test_several_units_stop_what_each_of_them_stops_but_not_one_another() -> None:
    router = matrix("abcd", {"s": "a & b", "t": "c & d"})
    assert evict_all(router, {"a", "b"}, {"a", "c", "d"}) == {"c", "d"}
    assert evict_all(router, {"a", "c"}, {"a"}) == frozenset()


# Groups.

IN_GROUPS = groups(
    "abcdxyz",
    swaps={"members": ["a", "b"]},
    together={"members": ["c", "d"], "swap": False, "exclusive": False},
    stays={"members": ["x"], "persistent": True, "exclusive": False},
)


@pytest.mark.parametrize(
    ("model", "resident", "stopped"),
    [
        pytest.param("a", "b", "b", id="the others of a group that swaps"),
        pytest.param("c", "d", "", id="not those of one that does not"),
        pytest.param("a", "cdxyz", "cdyz", id="of other groups what is not persistent"),
        pytest.param("c", "abxyz", "", id="nothing of them if it is not exclusive"),
        pytest.param("x", "abcdyz", "", id="and a persistent group likewise"),
        pytest.param("y", "z", "z", id="models in no group are a group that swaps"),
        pytest.param("y", "abcdx", "abcd", id="and is exclusive, and is not persistent"),
        pytest.param("a", "ac", "c", id="also on a request for a model that is resident"),
        pytest.param("a", "a", "", id="itself never"),
        pytest.param("nobody", "ax", "ax", id="a model that has vanished stops everything"),
        pytest.param("a", "an", "n", id="one that has vanished is stopped"),
    ],
)
def test_groups(model: str, resident: str, stopped: str) -> None:
    assert stops(IN_GROUPS, model, resident) == stopped


def test_with_no_routing_at_all_every_model_excludes_every_other() -> None:
    config = config_of("abc")
    assert config.routing == "default"
    assert stops(config.router, "a", "abc") == "bc"
    assert config.router.resident_sets() == [("a",), ("b",), ("c",)]


def test_models_of_groups_are_always_resident_only_if_nothing_is_stopped_on_either_side() -> None:
    flags = {"swap": False, "exclusive": False, "persistent": True}
    assert groups("abe", always={"members": ["e"], **flags}).always_resident("e")
    assert not groups("abe", always={"members": ["e", "b"], **flags, "swap": True}).always_resident("e")
    assert not groups("abe", always={"members": ["e"], **flags, "exclusive": True}).always_resident("e")
    assert not groups("abe", always={"members": ["e"], **flags, "persistent": False}).always_resident("e")
    assert groups("e").always_resident("e")


def test_models_of_groups_fit_together_if_each_spares_the_others() -> None:
    assert IN_GROUPS.fits_together({"c", "d", "x"})
    assert IN_GROUPS.fits_together({"a", "x"})
    assert not IN_GROUPS.fits_together({"a", "c"})  # c spares a, but a does not spare c
    assert not IN_GROUPS.fits_together({"a", "b"})
    assert IN_GROUPS.resident_sets() == [("a", "x"), ("b", "x"), ("c", "d", "x"), ("x", "y"), ("x", "z")]
    assert len(IN_GROUPS.resident_sets(limit=2)) == 2


# Matrix.


@pytest.mark.parametrize(
    ("sets", "model", "resident", "stopped"),
    [
        pytest.param({"s": "(a | b | c) & e"}, "a", "be", "b", id="one of several, beside one for all"),
        pytest.param({"s": "(a | b | c) & e"}, "e", "b", "", id="the one for all stops nothing"),
        pytest.param({"s": "a & b", "t": "a & c"}, "c", "ab", "b", id="the set that keeps what is resident"),
        pytest.param({"r": "x & b", "s": "a & b", "t": "a & x"}, "b", "ax", "a", id="the first set, busy or not"),
        pytest.param({"s": "a & b"}, "x", "ab", "ab", id="a model in no set stops everything"),
        pytest.param({"s": "a & b"}, "a", "ax", "", id="a resident model stops nothing, whatever is beside it"),
        pytest.param({"s": "a & b"}, "a", "x", "x", id="a model in no set is stopped by all"),
        pytest.param({"s": "a | b", "t": "+s & c"}, "c", "ab", "b", id="a reference"),
        pytest.param({"s": "a & b | c & d"}, "a", "bcd", "cd", id="and binds closer than or"),
        pytest.param({"z": "a & b", "y": "a & c"}, "a", "bc", "b", id="ties go to the first name, not the first set"),
        pytest.param({"s10": "a & b", "s9": "a & c"}, "a", "bc", "b", id="where numbers are numbers"),
        pytest.param({"s": "+t & a", "t": "b | c", "u": "x"}, "a", "bc", "c", id="then to the order as written"),
        pytest.param({"a": "+b | c & d", "b": "a & d"}, "d", "ac", "c", id="a set comes behind those it refers to"),
        pytest.param({"s": "(x | c | x & y) & y & t"}, "t", "xcy", "x", id="wider alternatives come last"),
        pytest.param({"s": "a & a"}, "a", "b", "b", id="a model twice"),
    ],
)
def test_matrix(sets: dict[str, str], model: str, resident: str, stopped: str) -> None:
    assert stops(matrix("abcdextyz", sets), model, resident) == stopped


def test_costs_are_those_of_resident_models_left_out_and_may_be_given_by_variable() -> None:
    sets, variables = {"s": "one & two", "t": "one & c"}, {"one": "a", "two": "b"}
    cheap = matrix("abc", sets, vars=variables)
    dear = matrix("abc", sets, vars=variables, evict_costs={"c": 2})
    dearest = matrix("abc", sets, vars=variables, evict_costs={"c": 2, "two": 3})
    assert [stops(each, "a", "bc") for each in (cheap, dear, dearest)] == ["c", "b", "c"]


def test_a_model_of_a_matrix_is_always_resident_if_it_is_in_every_largest_set_and_every_model_in_some_set() -> None:
    assert matrix("abe", {"s": "(a | b) & e"}).always_resident("e")
    assert matrix("abe", {"s": "(a | b) & e", "t": "a", "u": "b"}).always_resident("e")
    assert not matrix("abe", {"s": "(a | b) & e", "t": "a & b"}).always_resident("e")
    assert not matrix("abxe", {"s": "(a | b) & e"}).always_resident("e")  # x is in no set and stops e
    assert not matrix("abe", {"s": "(a | b) & e"}).always_resident("a")


def test_models_of_a_matrix_fit_together_if_one_combination_holds_them() -> None:
    router = matrix("abxyz", {"r": "x & b", "s": "a & b", "t": "a & x"})
    assert router.fits_together({"a", "x"})
    assert not router.fits_together({"a", "b", "x"})
    assert router.fits_together({"y"})
    assert not router.fits_together({"y", "a"})
    assert router.resident_sets() == [("a", "b"), ("a", "x"), ("b", "x"), ("y",), ("z",)]
    assert router.resident_sets(limit=1) == [("a", "b")]


def test_the_largest_matrix_that_is_allowed_is_looked_through_in_a_moment() -> None:
    parts = [Expression("any", parts=tuple(Expression("model", f"{row}{column}") for column in range(10)))
             for row in "abcd"]  # fmt: skip
    models = [part.name for row in parts for part in row.parts]
    router = MatrixRouter({"s": Expression("all", parts=tuple(parts))}, {}, models)
    assert len(router.resident_sets(limit=20_000)) == 10_000
    assert not router.always_resident("a0")
    assert router.evict("a0", {"a1", "b0", "c0", "d0"}) == {"a1"}


# The simulator's word, on random configurations.

MODELS = "abcdefg"
SET_NAMES = ("a1", "a2", "a10", "b", "B", "s", "s10", "s9", "s_", "10", "9", "x1y", "x10", "s01", "s.2", "é", "0", "00")


@st.composite
def expressions(draw: st.DrawFn, names: str, earlier: list[str], depth: int = 0) -> str:
    if depth >= 3 or draw(st.integers(0, 2)) == 0:
        if earlier and draw(st.integers(0, 3)) == 0:
            return "+" + draw(st.sampled_from(earlier))
        return draw(st.sampled_from(names))
    parts = [draw(expressions(names, earlier, depth + 1)) for _ in range(draw(st.integers(2, 3)))]
    return "(" + f" {draw(st.sampled_from('&|'))} ".join(parts) + ")"


@st.composite
def matrices(draw: st.DrawFn) -> str:
    names = MODELS[: draw(st.integers(3, 7))]
    set_names = draw(st.lists(st.sampled_from(SET_NAMES), min_size=1, max_size=5, unique=True))
    sets = {name: draw(expressions(names, set_names[:place])) for place, name in enumerate(set_names)}
    costs = draw(st.dictionaries(st.sampled_from(names), st.integers(1, 3), max_size=3))
    shuffled = {name: sets[name] for name in draw(st.permutations(set_names))}
    return yaml.safe_dump(
        {"models": {name: {} for name in names}, "matrix": {"sets": shuffled, "evict_costs": costs}}, sort_keys=False
    )


@st.composite
def groupings(draw: st.DrawFn) -> str:
    names = MODELS[: draw(st.integers(2, 7))]
    placed = {name: draw(st.sampled_from(["g", "h", "i", None])) for name in names}
    found: dict[str, dict[str, Any]] = {}
    for group in ("g", "h", "i"):
        members = [name for name in names if placed[name] == group]
        flags = draw(st.dictionaries(st.sampled_from(["swap", "exclusive", "persistent"]), st.booleans()))
        if members:
            found[group] = {"members": members, **flags}
    return yaml.safe_dump({"models": {name: {} for name in names}, "groups": found})


def agreed(text: str) -> LlamaSwapConfig | None:
    """The configuration, or None where it is too large for us, which the simulator does not mind."""
    try:
        return parse(text, {})
    except SettingsError as error:
        if any("combinations" not in problem for problem in error.problems):
            raise
        return None


@settings(max_examples=100, deadline=None)
@given(st.one_of(matrices(), groupings()), st.data())
def test_the_router_is_the_simulator_s(text: str, data: st.DataObject) -> None:
    config, oracle = agreed(text), parse_config(text)
    if config is None:
        return
    names = sorted(config.models)
    chosen = data.draw(st.randoms(use_true_random=False))
    for _ in range(20):
        model, resident = chosen.choice(names), frozenset(chosen.sample(names, chosen.randint(0, len(names))))
        assert config.router.evict(model, resident) == stopped_by(oracle, model, resident), (model, resident)


@settings(max_examples=60, deadline=None)
@given(st.one_of(matrices(), groupings()), st.data())
def test_what_is_said_to_fit_together_and_to_stay_is_so_whatever_is_asked_for(text: str, data: st.DataObject) -> None:
    config = agreed(text)
    if config is None:
        return
    names, router = sorted(config.models), config.router
    always = {name for name in names if router.always_resident(name)}
    resident: frozenset[str] = frozenset()
    for model in data.draw(st.lists(st.sampled_from(names), max_size=20)):
        stopped = router.evict(model, resident)
        assert not stopped & always
        assert not (stopped and model in always)
        resident = resident - stopped | {model}
    for chosen in map(frozenset, router.resident_sets()):
        assert router.fits_together(chosen)
        assert not any(router.evict(model, chosen) for model in chosen)
        assert not any(router.fits_together(chosen | {other}) for other in set(names) - chosen)
        assert always <= chosen


@pytest.mark.llama_swap
@pytest.mark.parametrize("text", [
    pytest.param("{models: {a: {}, b: {}, c: {}}, matrix: {sets: {s10: a & b, s9: a & c}}}", id="matrix"),
    pytest.param("{models: {a: {}, b: {}, c: {}}, groups: {g: {exclusive: false, members: [a, b]}}}", id="groups"),
])  # fmt: skip
async def test_a_real_llama_swap_stops_the_same(text: str) -> None:
    config = parse(text, {})
    resident: frozenset[str] = frozenset()
    async with LlamaSwap(text, time_scale=0.0, slow_loads=False) as llama_swap:
        for model in "abcacbaccbab":
            wanted = config.router.evict(model, resident)
            answer = await llama_swap.client.post("/v1/embeddings", json={"model": model, "input": "x"})
            assert answer.status_code == 200
            now = {each["model"] for each in (await llama_swap.client.get("/running")).json()["running"]}
            assert resident - now == wanted, (model, resident)
            resident = frozenset(now)


def test_groups_are_read_with_llama_swap_s_defaults() -> None:
    assert Group(frozenset("a")) == Group(frozenset("a"), swap=True, exclusive=True, persistent=False)
