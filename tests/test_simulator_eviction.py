"""What is stopped to serve a model: the rules of groups and matrix, and a real llama-swap's word on random ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
import yaml

from llama_swap_support import LlamaSwap
from proxy.simulator import ConfigError, parse_config, stopped_by


def models(names: str) -> dict[str, dict[str, Any]]:
    return {name: {} for name in names}


def matrix(names: str, sets: dict[str, str], **more: Any) -> str:
    return yaml.safe_dump({"models": models(names), "matrix": {"sets": sets, **more}}, sort_keys=False)


def groups(names: str, **by_name: dict[str, Any]) -> str:
    return yaml.safe_dump({"models": models(names), "groups": by_name}, sort_keys=False)


def stops(config: str, model: str, resident: str) -> str:
    return "".join(sorted(stopped_by(parse_config(config), model, resident)))


IN_GROUPS = groups(
    "abcdxyz",
    swaps={"members": ["a", "b"]},
    together={"members": ["c", "d"], "swap": False, "exclusive": False},
    stays={"members": ["x"], "persistent": True, "exclusive": False},
)


@pytest.mark.parametrize(
    ("model", "resident", "stopped"),
    [
        ("a", "b", "b"),
        ("c", "d", ""),
        ("a", "cdxyz", "cdyz"),
        ("c", "abxyz", ""),
        ("x", "abcdyz", ""),
        ("y", "z", "z"),
        ("y", "abcdx", "abcd"),
        ("a", "ac", "c"),
        ("a", "a", ""),
    ],
)
def test_groups_stop_their_own_rest_and_if_exclusive_all_that_is_not_persistent(
    model: str, resident: str, stopped: str
) -> None:
    assert stops(IN_GROUPS, model, resident) == stopped


def test_with_no_routing_at_all_every_model_excludes_every_other() -> None:
    assert stops(yaml.safe_dump({"models": models("abc")}), "a", "bc") == "bc"


@pytest.mark.parametrize(
    ("sets", "model", "resident", "stopped"),
    [
        pytest.param({"s": "(a | b | c) & e"}, "a", "be", "b", id="one of several, beside one for all"),
        pytest.param({"s": "(a | b | c) & e"}, "e", "b", "", id="the one for all stops nothing"),
        pytest.param({"s": "a & b", "t": "a & c"}, "c", "ab", "b", id="the set that keeps the loaded one"),
        pytest.param({"r": "x & b", "s": "a & b", "t": "a & x"}, "b", "ax", "a", id="the first set, not the idle"),
        pytest.param({"s": "a & b"}, "x", "ab", "ab", id="a model in no set stops everything"),
        pytest.param({"s": "a & b"}, "a", "ax", "", id="a loaded model stops nothing"),
        pytest.param({"s": "a & b"}, "a", "x", "x", id="a model in no set is stopped by all"),
        pytest.param({"s": "a | b", "t": "+s & c"}, "c", "ab", "b", id="a reference"),
        pytest.param({"s": "a & b | c & d"}, "a", "bcd", "cd", id="and binds closer than or"),
        pytest.param({"z": "a & b", "y": "a & c"}, "a", "bc", "b", id="ties go to the first name, not the first set"),
        pytest.param({"s10": "a & b", "s9": "a & c"}, "a", "bc", "b", id="where numbers are numbers"),
        pytest.param({"a1": "a & b", "a_": "a & c"}, "a", "bc", "b", id="other signs before digits"),
        pytest.param({"ab": "a & b", "a_": "a & c"}, "a", "bc", "b", id="letters last"),
        pytest.param({"s1_": "a & b", "s1y": "a & c"}, "a", "bc", "b", id="but first after a digit"),
        pytest.param({"s": "+t & a", "t": "b | c", "u": "x"}, "a", "bc", "c", id="then to the order as written"),
        pytest.param({"a": "+b | c & d", "b": "a & d"}, "d", "ac", "c", id="a set comes after those it refers to"),
        pytest.param({"s": "(x | c | x & y) & y & t"}, "t", "xcy", "x", id="and adding alternatives come last"),
    ],
)
def test_a_matrix_keeps_what_it_can_of_the_loaded_models(
    sets: dict[str, str], model: str, resident: str, stopped: str
) -> None:
    assert stops(matrix("abcdextyz", sets), model, resident) == stopped


def test_costs_are_those_of_loaded_models_left_out_and_may_be_given_by_variable() -> None:
    sets = {"s": "one & two", "t": "one & c"}
    variables = {"one": "a", "two": "b"}
    cheap = matrix("abc", sets, vars=variables)
    dear = matrix("abc", sets, vars=variables, evict_costs={"c": 2})
    dearest = matrix("abc", sets, vars=variables, evict_costs={"c": 2, "two": 3})
    assert [stops(each, "a", "bc") for each in (cheap, dear, dearest)] == ["c", "b", "c"]
    assert stops(dearest, "a", "c") == ""


ROUTER = {"settings": {"matrix": {"sets": {"s": "a & b"}}}}


@pytest.mark.parametrize(
    ("routing", "stopped"),
    [({"use": "matrix", **ROUTER}, ""), (ROUTER, "b"), ({"use": "group", **ROUTER}, "b")],
)
def test_a_matrix_under_routing_counts_only_if_it_is_used(routing: dict[str, Any], stopped: str) -> None:
    config = yaml.safe_dump({"models": models("ab"), "routing": {"router": routing}})
    assert stops(config, "a", "b") == stopped


@pytest.mark.parametrize(
    "broken",
    [
        matrix("ab", {}),
        matrix("ab", {"s": "a &"}),
        matrix("ab", {"s": "(a | b"}),
        matrix("ab", {"s": "a b"}),
        matrix("ab", {"s": "a ! b"}),
        matrix("ab", {"s": ""}),
        matrix("ab", {"s": "+"}),
        matrix("ab", {"s": "nobody"}),
        matrix("ab", {"s": "+t"}),
        matrix("ab", {"s": "+t", "t": "+s"}),
        matrix("ab", {"s": "a"}, evict_costs={"a": 0}),
        matrix("ab", {"s": "a"}, evict_costs={"c": 1}),
        groups("ab", g={"members": ["a"]}, h={"members": ["a"]}),
        groups("ab", g={"members": ["c"]}),
        matrix("ab", {"s": "a"}) + "groups: {g: {members: [a]}}\n",
        matrix("ab", {"s": "a"}) + "routing: {router: {use: group}}\n",
        "models: {a: {}}\nrouting: {router: {use: matrix}}\n",
        "models: {a: {simulator: {lode: 1}}}\n",
        "models: {a: {name: '${env.NO_SUCH_VARIABLE_AT_ALL}'}}\n",
        "models: {a: {}}\nselectors: {s: {strategy: best, targets: [a]}}\n",
        "models: {a: {}}\nselectors: {s: {strategy: pin}}\n",
        "[",
        "just text",
    ],
)
def test_a_configuration_that_llama_swap_refuses_is_refused(broken: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(broken)


# On a real llama-swap.

NAMES = ["a1", "a2", "a10", "b", "B", "z", "s", "s10", "s9", "s_", "10", "9", "x1y", "x10", "a_b", "A1"]


def _expression(rng: random.Random, members: list[str], earlier: list[str], depth: int = 0) -> str:
    if depth >= 3 or rng.random() < 0.35:
        refers = earlier and rng.random() < 0.2
        return "+" + rng.choice(earlier) if refers else rng.choice(members)
    sign = rng.choice("&|")
    parts = [_expression(rng, members, earlier, depth + 1) for _ in range(rng.randint(2, 3))]
    return "(" + f" {sign} ".join(parts) + ")"


def _set(rng: random.Random, members: list[str], earlier: list[str]) -> str:
    if rng.random() < 0.5:  # small sets, which often tie
        return " & ".join(rng.sample(members, rng.randint(2, 3)))
    return _expression(rng, members, earlier)


def random_config(rng: random.Random) -> str:
    members = list("abcdef")[: rng.randint(3, 6)]
    names = rng.sample(NAMES, rng.randint(1, 5))
    if rng.random() < 0.3:
        shuffled = rng.sample(members, len(members))
        flags = ("swap", "exclusive", "persistent")
        parts = {"g": shuffled[:2], "h": shuffled[2:4]}
        return groups(
            "".join(members),
            **{
                name: {"members": part, **{flag: rng.random() < 0.5 for flag in flags if rng.random() < 0.7}}
                for name, part in parts.items()
                if part
            },
        )
    sets = {name: _set(rng, members, names[:place]) for place, name in enumerate(names)}
    shuffled_sets = dict(rng.sample(list(sets.items()), len(sets)))
    dear = {name: rng.randint(1, 3) for name in rng.sample(members, 2)} if rng.random() < 0.5 else {}
    return matrix("".join(members), shuffled_sets, evict_costs=dear)


@pytest.mark.llama_swap
@pytest.mark.parametrize("seed", range(25))
async def test_random_matrices_and_groups_stop_the_same_models_in_a_real_llama_swap(seed: int) -> None:
    rng = random.Random(seed)
    text = random_config(rng)
    config = parse_config(text)
    async with LlamaSwap(text, time_scale=0.0, slow_loads=False) as llama_swap:
        resident: set[str] = set()
        for _ in range(40):
            model = rng.choice(list(config.models))
            wanted = stopped_by(config, model, resident)
            answer = await llama_swap.client.post("/v1/embeddings", json={"model": model, "input": "x"})
            assert answer.status_code == 200
            listed = (await llama_swap.client.get("/running")).json()["running"]
            now = {each["model"] for each in listed}
            assert resident - now == wanted, (text, model, resident)
            resident = now
