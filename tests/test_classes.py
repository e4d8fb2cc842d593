"""The order of evidence for a class, and which of a model's names counts."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.classes import BUILT_IN_PATTERNS, ClassRules, Patterns
from proxy.llama_swap import Capabilities
from proxy.settings import BUILT_IN_CLASSES, Settings

SPEECH = Capabilities(frozenset({"text"}), frozenset({"audio"}))
HEARING = Capabilities(frozenset({"audio", "text"}), frozenset({"text"}))


def rules(**models: list[str]) -> ClassRules:
    return ClassRules(Settings.model_validate({"classes": {name: {"models": each} for name, each in models.items()}}))


# Each row takes away the best evidence of the row before.
ORDER: list[tuple[dict[str, list[str]], list[str], Capabilities | None, str | None, tuple[str, str, bool]]] = [
    ({"stt": ["x"], "llm": ["*"]}, ["x", "flux"], SPEECH, "embed", ("stt", "classes.stt.models has x", False)),
    ({"llm": ["*"]}, ["x", "flux"], SPEECH, "stt", ("llm", "classes.llm.models has *", False)),
    ({}, ["x", "flux"], SPEECH, "stt", ("tts", "capabilities in llama-swap's configuration", False)),
    ({}, ["x", "flux"], None, "stt", ("image", "built-in pattern *flux*", False)),
    ({}, ["x"], None, "stt", ("stt", "stt route", True)),
    ({}, ["x"], None, None, ("llm", "default_class", True)),
]


@pytest.mark.parametrize(("models", "names", "capabilities", "hint", "expected"), ORDER)
def test_settings_then_capabilities_then_built_in_patterns_then_the_route_then_the_default(
    models: dict[str, list[str]],
    names: list[str],
    capabilities: Capabilities | None,
    hint: str | None,
    expected: tuple[str, str, bool],
) -> None:
    assert rules(**models).decide(names, capabilities, hint) == expected


def test_capabilities_that_leave_more_than_one_class_are_no_evidence() -> None:
    assert rules().decide(["whisper"], HEARING, None)[0] == "stt"
    assert rules().decide(["chat"], Capabilities(), "tts")[:2] == ("tts", "tts route")


@pytest.mark.parametrize(
    ("models", "names", "expected"),
    [
        ({}, ["whisper", "kokoro"], "stt"),
        ({}, ["kokoro", "whisper"], "tts"),
        ({}, ["plain", "whisper"], "stt"),
        ({"tts": ["a"], "stt": ["b"]}, ["b", "a"], "stt"),
        ({"tts": ["a*"], "stt": ["b*"]}, ["b1", "a1"], "stt"),
        ({"tts": ["alias"], "llm": ["*"]}, ["id", "alias"], "tts"),
        ({"tts": ["alias-*"], "llm": ["i*"]}, ["id", "alias-1"], "llm"),
    ],
)
def test_the_id_counts_before_an_alias_and_an_exact_name_before_any_pattern(
    models: dict[str, list[str]], names: list[str], expected: str
) -> None:
    assert rules(**models).decide(names, None, None)[0] == expected


def test_patterns_find_the_best_entry_with_the_pattern_that_fits() -> None:
    patterns = Patterns({"*": 1, "a*": 2, "ab?": 3, "abc": 4, "[x]y": 5})
    found = {name: patterns.find(name) for name in ("abc", "abd", "ad", "xy", "[x]y", "")}
    expected = {"abc": ("abc", 4), "abd": ("ab?", 3), "ad": ("a*", 2), "xy": ("[x]y", 5), "": ("*", 1)}
    assert found == expected | {"[x]y": ("[x]y", 5)}
    assert patterns.find() is None
    assert Patterns[int]({}).find("a") is None


def test_names_in_settings_are_classes_models_and_slots_without_patterns() -> None:
    values: dict[str, Any] = {"classes": {"tts": {"models": ["a", "b*"]}}, "slots": {"c": 1, "a": 2, "*": 3}}
    assert ClassRules(Settings.model_validate(values)).literals == ("a", "c")


def test_every_built_in_pattern_is_of_a_built_in_class_and_says_so() -> None:
    assert set(BUILT_IN_PATTERNS) <= set(BUILT_IN_CLASSES)
    for name, patterns in BUILT_IN_PATTERNS.items():
        for pattern in patterns:
            example = f"author/{pattern.replace('*', '')}".upper()
            assert rules().decide([example], None, None)[0] == name, pattern
