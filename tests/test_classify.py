"""Classes: what decides them, and that no guess ends in a request that does not wait."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.classify import BUILT_IN_PATTERNS, Classification, Classifier, NameIn, Route, match_route
from proxy.settings import BUILT_IN_CLASSES, Settings

BODY = Route(NameIn.BODY)


def classifier(**values: Any) -> Classifier:
    return Classifier(Settings.model_validate(values))


def classify(name: str, route: Route = BODY, **values: Any) -> Classification:
    return classifier(**values).classify(route, name)


def class_of(name: str, route: Route = BODY, **values: Any) -> str:
    return classify(name, route, **values).class_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3-8b", "llm"),
        ("gpt-4o", "llm"),
        ("vision-a", "llm"),
        ("", "llm"),
        ("tts-a", "tts"),
        ("Qwen3-TTS-12Hz", "tts"),
        ("kokoro", "tts"),
        ("hexgrad/Kokoro-82M", "tts"),
        ("chatterbox-turbo", "tts"),
        ("piper-en", "tts"),
        ("Orpheus-3b", "tts"),
        ("embed-a", "embed"),
        ("nomic-embed-text", "embed"),
        ("BAAI/bge-m3", "embed"),
        ("qwen3-reranker", "embed"),
        ("whisper-large-v3", "stt"),
        ("nvidia/parakeet-tdt", "stt"),
        ("FLUX.1-schnell", "image"),
        ("sdxl-turbo", "image"),
        ("sd-1.5", "image"),
        ("comfyui_auto", "image"),
        # not at the start, where a pattern wants the start
        ("my-kokoro-chat", "llm"),
        ("bsd-chat", "llm"),
        ("cabbage-bge-chat", "llm"),
    ],
)
def test_names_of_well_known_models(name: str, expected: str) -> None:
    assert class_of(name) == expected


@pytest.mark.parametrize("name", ["tts-embed", "embed-tts", "whisper-embed", "flux-rerank", "embed/kokoro"])
def test_where_built_in_patterns_disagree_the_class_that_does_not_wait_comes_last(name: str) -> None:
    assert list(BUILT_IN_PATTERNS)[-1] == "embed"
    assert classify(name).mode != "none"


def test_your_names_beat_your_patterns_and_a_longer_pattern_beats_a_shorter_one() -> None:
    classes = {
        "llm": {"models": ["*", "big-*"]},
        "tts": {"models": ["big-voice*", "speaker"]},
        "embed": {"models": ["big-voice-index", "[e]*"]},
    }
    found = {
        name: class_of(name, classes=classes) for name in ("speaker", "big-voice-2", "big-voice-index", "big-x", "e1")
    }
    assert found == {"speaker": "tts", "big-voice-2": "tts", "big-voice-index": "embed", "big-x": "llm", "e1": "embed"}


def test_your_patterns_beat_all_built_in_ones_which_go_on_to_decide_the_rest() -> None:
    classes = {"llm": {"models": ["whisper-chat"]}, "stt": {"models": ["ear-*"]}}
    found = [class_of(name, classes=classes) for name in ("whisper-chat", "whisper-large", "ear-1", "kokoro")]
    assert found == ["llm", "stt", "stt", "tts"]


@pytest.mark.parametrize("name", ["Speaker", "speaker ", " speaker", "speakers", "a/speaker", "speaker\n", "SPEAKER"])
def test_your_names_are_compared_exactly_as_llama_swap_does(name: str) -> None:
    assert class_of(name, classes={"tts": {"models": ["speaker"]}}) == "llm"


def test_a_name_with_brackets_is_still_a_name() -> None:
    assert class_of("model[1]", classes={"tts": {"models": ["model[1]"]}}) == "tts"


@pytest.mark.parametrize(
    ("method", "path", "expected", "evidence"),
    [
        ("POST", "/v1/audio/speech", "tts", "tts route"),
        ("GET", "/v1/audio/voices", "tts", "tts route"),
        ("POST", "/v1/audio/transcriptions", "stt", "stt route"),
        ("POST", "/v1/images/edits", "image", "image route"),
        ("POST", "/v1/embeddings", "llm", "default_class"),
        ("POST", "/v1/rerank", "llm", "default_class"),
        ("POST", "/v1/chat/completions", "llm", "default_class"),
    ],
)
def test_an_unknown_name_takes_the_class_of_the_route_and_never_mode_none(
    method: str, path: str, expected: str, evidence: str
) -> None:
    found = classify("mystery", match_route(method, path.encode()))
    assert (found.class_name, found.evidence) == (expected, evidence)
    assert found.mode != "none"


@pytest.mark.parametrize(
    ("method", "path", "name", "expected"),
    [
        ("POST", "/v1/embeddings", "tts-a", "tts"),
        ("POST", "/v1/audio/speech", "chat-a", "tts"),
        ("POST", "/v1/audio/speech", "whisper", "stt"),
        ("GET", "/v1/audio/voices", "tts-a", "tts"),
        ("GET", "/props", "chat-b", "llm"),
        ("POST", "/sdapi/v1/txt2img", "unknown", "image"),
        ("GET", "/upstream/tts-a/health", None, "tts"),
        ("POST", "/upstream/mystery/v1/audio/speech", None, "tts"),
        ("GET", "/comfyui/", None, "image"),
    ],
)
def test_case_59_the_resolved_model_decides_and_not_the_path(
    method: str, path: str, name: str | None, expected: str
) -> None:
    route = match_route(method, path.encode())
    assert classifier().classify(route, name).class_name == expected


def test_default_class_and_own_classes() -> None:
    values: dict[str, Any] = {"default_class": "vision", "classes": {"vision": {"models": ["qwen-vl"]}}}
    assert [class_of(name, **values) for name in ("mystery", "qwen-vl", "kokoro")] == ["vision", "vision", "tts"]
    assert classifier(**values).class_names == (*BUILT_IN_CLASSES, "vision")


@pytest.mark.parametrize(
    ("lease", "modes"),
    [
        ("auto", {"llm": "read", "tts": "write", "embed": "none", "stt": "read", "image": "read", "own": "read"}),
        *((mode, dict.fromkeys([*BUILT_IN_CLASSES, "own"], mode)) for mode in ("read", "write", "none")),
    ],
)
def test_modes(lease: str, modes: dict[str, str]) -> None:
    classes = {name: {"lease": lease, "models": [f"{name}-1"]} for name in modes}
    found = classifier(classes=classes)
    assert {name: found.classify(BODY, f"{name}-1").mode for name in modes} == modes


def test_a_classification_says_everything_that_the_lock_and_the_metrics_need() -> None:
    found = classify("speaker", classes={"tts": {"models": ["speaker"]}}, slots={"speaker": 3})
    assert found == Classification(
        requested="speaker",
        model="speaker",
        class_name="tts",
        mode="write",
        units=frozenset({"tts"}),
        slots=3,
        label="speaker",
        evidence="classes.tts.models has speaker",
    )


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (4, {"a": 4, "big-1": 4, "big-voice": 4}),
        ({"a": 1, "big-*": 2, "big-voice*": 3}, {"a": 1, "big-1": 2, "big-voice": 3, "x": 10, "A": 10}),
        ({"*": 5, "a": 1}, {"a": 1, "x": 5}),
    ],
)
def test_slots_by_name_then_by_longest_pattern_then_llama_swaps_default(slots: Any, expected: dict[str, int]) -> None:
    found = classifier(slots=slots)
    assert {name: found.slots(name) for name in expected} == expected
    assert {name: found.classify(BODY, name).slots for name in expected} == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/upstream/author/model/v1/x", "author/model"),
        ("/upstream/author%2Fmodel/v1/x", "author/model"),
        ("/upstream/author/%2Fmodel/x", "author/model"),
        ("/upstream/author/model/deep/x", "author/model/deep"),
        ("/upstream/author/model-2/x", "author"),
        ("/upstream/author/modelx", "author"),
        ("/upstream/other/model/x", "other"),
        ("/upstream/Author/model/x", "Author"),
    ],
)
def test_below_upstream_the_longest_name_that_the_settings_know_is_the_model(path: str, expected: str) -> None:
    classes = {"tts": {"models": ["author/model", "author/*"]}, "stt": {"models": ["author/model/deep", "author"]}}
    route = match_route("GET", path.encode())
    assert classifier(classes=classes).classify(route, route.name).requested == expected


def test_only_names_from_the_settings_become_labels_of_metrics() -> None:
    classes = {"tts": {"models": ["speaker", "voice-*"]}}
    found = classifier(classes=classes, slots={"*": 3, "qwen": 4})
    assert found.known_models == ("speaker", "qwen")
    labels = [found.classify(BODY, name).label for name in ("speaker", "qwen", "voice-1", "voice-*", "x", 'a"\nb')]
    assert labels == ["speaker", "qwen", "other", "other", "other", "other"]


def test_at_most_200_labels() -> None:
    names = [f"m{number}" for number in range(300)]
    found = classifier(classes={"tts": {"models": names}})
    assert len({found.classify(BODY, name).label for name in names}) == 201


def invented_names() -> Iterator[str]:
    yield from (f"{number}-{'x' * 200}" for number in range(10_000))
    yield from (f"{number}{'long' * 2**18}" for number in range(50))


def test_invented_names_do_not_grow_the_memory() -> None:
    found = classifier()
    tracemalloc.start()
    try:
        for name in invented_names():
            assert found.classify(BODY, name).label == "other"
            assert found.slots(name) == 10
        assert tracemalloc.get_traced_memory()[0] < 4 * 2**20
    finally:
        tracemalloc.stop()


def test_a_hostile_name_takes_no_time_to_match() -> None:
    patterns = ["*a*a*a*a*a*a*b", "a*" * 30 + "b"]
    assert class_of("a" * 20_000, classes={"tts": {"models": patterns}}) == "llm"
