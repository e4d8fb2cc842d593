"""Classes: what decides them, and that no guess ends in a request that does not wait."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.classes import BUILT_IN_PATTERNS
from proxy.classify import MOST_LABELS, Classification, Classifier
from proxy.errors import UnknownModel
from proxy.llama_swap import catalog_from_listing, parse
from proxy.routes import NameIn, Route, match_route
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
        models=frozenset({"speaker"}),
        label="speaker",
        evidence="classes.tts.models has speaker",
        reason="classes.tts.lease is auto",
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
    yield from (f"{number}-{'x' * 200}" for number in range(4_000))
    yield from (f"{number}{'long' * 2**18}" for number in range(8))


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


# --- with llama-swap's configuration


def knowing(config: str, **values: Any) -> Classifier:
    return Classifier(Settings.model_validate(values), config=parse(config, {}))


def asked(
    method: str,
    path: str,
    found: Classifier,
    name: str | None = None,
    profile: str | None = None,
    *,
    rewritten: bool = True,
) -> str:
    """What a request comes to: the model and its class, or why there is none."""
    route = found.refine(match_route(method, path.encode()), profile)
    if route.name_in is NameIn.NOWHERE:
        return "no lease"
    try:
        what = found.classify(route, name, profile, rewritten=rewritten)
    except UnknownModel as error:
        return error.message
    return f"{what.model} {what.class_name}"


HOME = """
models:
  q27: {aliases: [gpt-4o], filters: {setParamsByID: {"q27:high": {}}}, capabilities: {in: [text], out: [text]}}
  vis: {unlisted: true}
  speaker: {aliases: [voice], capabilities: {in: [text], out: [audio]}, concurrencyLimit: 1}
  plain: {cmd: "whisper-server --port 1 -m kokoro-tts.gguf"}
  ears: {aliases: [whisper-1]}
  e: {aliases: [text-embedding-3-small], concurrencyLimit: 25}
matrix:
  sets: {home: "(q27 | vis | speaker | plain | ears) & e"}
"""


@pytest.mark.parametrize(
    ("name", "model", "class_name", "evidence"),
    [
        ("q27", "q27", "llm", "capabilities in llama-swap's configuration"),
        ("gpt-4o", "q27", "llm", "capabilities in llama-swap's configuration"),
        ("q27:high", "q27", "llm", "capabilities in llama-swap's configuration"),
        ("vis", "vis", "llm", "default_class"),
        ("voice", "speaker", "tts", "capabilities in llama-swap's configuration"),
        ("ears", "ears", "stt", "built-in pattern *whisper*"),
        ("e", "e", "embed", "built-in pattern *embed*"),
    ],
)
def test_a_name_is_resolved_and_the_class_is_that_of_the_model_by_any_of_its_names(
    name: str, model: str, class_name: str, evidence: str
) -> None:
    found = knowing(HOME).classify(BODY, name)
    assert (found.requested, found.model, found.class_name, found.evidence) == (name, model, class_name, evidence)
    assert (found.units, found.models, found.label) == (frozenset({model}), frozenset({model}), model)


def test_the_server_that_a_command_starts_is_no_evidence() -> None:
    assert asked("POST", "/v1/completions", knowing(HOME), "plain") == "plain llm"


def test_settings_win_over_capabilities_by_id_and_by_alias() -> None:
    found = knowing(HOME, classes={"stt": {"models": ["voice"]}, "vision": {"models": ["q*"]}})
    assert [found.classify(BODY, name).class_name for name in ("speaker", "gpt-4o")] == ["stt", "vision"]


def test_the_route_decides_only_where_nothing_else_does() -> None:
    found = knowing(HOME)
    assert asked("POST", "/v1/audio/speech", found, "vis") == "vis tts"
    assert asked("POST", "/v1/audio/speech", found, "q27") == "q27 llm"
    assert found.classify(match_route("POST", b"/v1/audio/speech"), "vis").mode == "write"
    assert found.classify(BODY, "vis").mode == "read"


def test_case_58_names_are_compared_exactly_and_an_unknown_one_is_llama_swaps_404() -> None:
    found = knowing(HOME)
    for name in ("Q27", " q27", "q27 ", "q27:low", "nobody", "x" * 100_000):
        with pytest.raises(UnknownModel) as caught:
            found.classify(BODY, name)
        assert caught.value.render(anthropic=False, accept=b"application/json, text/plain, */*") == (
            b"text/plain",
            b"llama-swap: no router for requested model",
        )
        assert caught.value.render(anthropic=True, accept=b"*/*") == (
            b"application/json",
            b'{"src":"llama-swap","error":{"message":"no router for requested model",'
            b'"type":"invalid_request_error","param":null,"code":"not_found"}}',
        )
    assert asked("GET", "/upstream/nobody/x", found) == "model not found"
    assert asked("GET", "/upstream/nobody", found) == "model not found"
    assert asked("GET", "/comfyui/", found) == "no router for requested model"


# --- modes


def modes(config: str, **values: Any) -> dict[str, str]:
    found = knowing(config, **values)
    return {model: found.classify(BODY, model).mode for model in found.config.models} if found.config else {}


def test_what_is_always_resident_needs_no_lease_and_speech_writes_where_no_chat_is_beside_it() -> None:
    assert modes(HOME) == {
        "q27": "read",
        "vis": "read",
        "speaker": "write",
        "plain": "read",
        "ears": "read",
        "e": "none",
    }
    assert knowing(HOME).classify(BODY, "e").reason.startswith("always resident")
    assert knowing(HOME).mode_warnings() == []


TOGETHER = "models: {chat: {}, other: {}, kokoro: {}}\nmatrix: {sets: {a: other, b: chat & kokoro}}"


def test_speech_beside_a_chat_model_reads_and_says_beside_which() -> None:
    found = knowing(TOGETHER).classify(BODY, "kokoro")
    assert (found.mode, found.reason) == ("read", "can be resident beside chat")


def test_speech_beside_chat_models_that_take_no_lease_writes() -> None:
    always = "models: {chat: {}, kokoro: {}, piper: {}}\nmatrix: {sets: {a: (kokoro | piper) & chat}}"
    assert modes(always) == {"chat": "none", "kokoro": "write", "piper": "write"}
    assert modes(TOGETHER, classes={"llm": {"lease": "none"}})["kokoro"] == "write"


def test_an_embedding_that_is_not_always_resident_reads_with_a_warning() -> None:
    config = "models: {chat: {}, my-embed: {}}"
    assert modes(config)["my-embed"] == "read"
    (warning,) = knowing(config).mode_warnings()
    assert warning.startswith("my-embed is not always resident")


@pytest.mark.parametrize("lease", ["read", "write", "none"])
def test_a_lease_that_is_set_wins(lease: str) -> None:
    found = modes(HOME, classes={name: {"lease": lease} for name in BUILT_IN_CLASSES})
    assert set(found.values()) == {lease}


def test_a_lease_of_none_for_what_is_not_always_resident_is_warned_of() -> None:
    assert len(knowing(HOME, classes={"tts": {"lease": "none"}}).mode_warnings()) == 1
    assert knowing(HOME, classes={"embed": {"lease": "none"}}).mode_warnings() == []


# --- slots


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (None, {"q27": 10, "speaker": 1, "e": 25, "gone": 10}),
        (4, {"q27": 4, "speaker": 4, "e": 4, "gone": 4}),
        ({"e": 2, "s*": 3}, {"q27": 10, "speaker": 3, "e": 2}),
        ({"voice": 7, "*": 2}, {"q27": 2, "speaker": 7, "e": 2}),
    ],
)
def test_slots_are_llama_swaps_own_unless_they_are_set_for_any_of_the_models_names(
    slots: Any, expected: dict[str, int]
) -> None:
    found = knowing(HOME, **({} if slots is None else {"slots": slots}))
    assert {model: found.slots(model) for model in expected} == expected


# --- selectors, profiles, peers

CHOICE = """
models: {a: {}, b: {}, c: {}, kokoro: {}, my-embed: {}}
matrix: {sets: {one: a & b & my-embed, two: a & kokoro & my-embed, three: c & my-embed}}
selectors:
  first: {strategy: pin, targets: [b, c]}
  near: {strategy: warm, targets: [b, a]}
  spill: {strategy: spillover, targets: [a, b]}
  apart: {strategy: warm, targets: [a, c]}
  mixed: {strategy: warm, targets: [my-embed, a]}
  abroad: {strategy: spillover, targets: [there/far, a]}
  away: {strategy: pin, targets: [there/far]}
profiles:
  night: {pins: {c: a, a: near, b: '', extra: c, near: b}}
peers:
  there: {proxy: http://there, models: [far, whisper-far]}
  other: {proxy: http://other, models: [twice]}
  third: {proxy: http://third, models: [twice]}
"""


@pytest.mark.parametrize(
    ("selector", "mode", "models"),
    [
        ("first", "read", {"b"}),
        ("near", "read", {"a", "b"}),
        ("spill", "read", {"a", "b"}),
        ("apart", "write", {"a", "c"}),
        ("mixed", "read", {"a", "my-embed"}),
        ("abroad", "read", {"a"}),
        ("away", "none", set()),
    ],
)
def test_a_selector_takes_a_lease_for_all_that_it_may_choose(selector: str, mode: str, models: set[str]) -> None:
    found = knowing(CHOICE).classify(BODY, selector)
    assert (found.mode, set(found.models), found.units) == (mode, models, found.models)
    assert found.requested == selector


def test_a_selector_whose_targets_exclude_one_another_writes_and_says_why() -> None:
    found = knowing(CHOICE).classify(BODY, "apart")
    assert found.reason == "apart may choose any of its targets, which cannot all be resident at once"
    relaxed = knowing(CHOICE, classes={"llm": {"lease": "none"}}).classify(BODY, "apart")
    assert relaxed.mode == "none"


def test_selectors_are_no_names_under_upstream() -> None:
    assert asked("GET", "/upstream/near/x", knowing(CHOICE)) == "model not found"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("c", "a llm"),
        ("extra", "c llm"),
        ("b", "no router for requested model"),
        ("near", "b llm"),
        ("my-embed", "my-embed embed"),
    ],
)
def test_a_profile_pins_names_and_switches_names_off_while_it_is_active(name: str, model: str) -> None:
    assert asked("POST", "/v1/completions", knowing(CHOICE), name, "night") == model


def test_a_pin_may_lead_to_a_selector_and_counts_under_upstream_too() -> None:
    found = knowing(CHOICE)
    assert found.classify(BODY, "a", "night").models == {"a", "b"}
    assert found.classify(BODY, "a").models == {"a"}
    assert found.classify(BODY, "a", "no such profile").models == {"a"}
    assert asked("GET", "/upstream/c/x", found, profile="night") == "a llm"
    assert asked("GET", "/upstream/extra/x", found, profile="night") == "c llm"
    assert asked("GET", "/upstream/extra/x", found) == "model not found"
    assert asked("GET", "/upstream/b/x", found, profile="night") == "model not found"


@pytest.mark.parametrize(
    ("name", "full", "class_name"),
    [
        ("there/far", "there/far", "llm"),
        ("far", "there/far", "llm"),
        ("whisper-far", "there/whisper-far", "stt"),
        ("other/twice", "other/twice", "llm"),
    ],
)
def test_a_model_of_a_peer_takes_no_lease_and_no_slot(name: str, full: str, class_name: str) -> None:
    found = knowing(CHOICE).classify(BODY, name)
    assert found == Classification(
        requested=name,
        model=full,
        class_name=class_name,
        mode="none",
        units=frozenset(),
        models=frozenset(),
        label=full,
        evidence=found.evidence,
        reason="a peer serves it",
    )


def test_a_bare_name_that_two_peers_have_is_unknown() -> None:
    assert asked("POST", "/v1/completions", knowing(CHOICE), "twice") == "no router for requested model"


@pytest.mark.parametrize(
    ("name", "profile", "as_sent"),
    [
        ("c", "night", "c llm"),
        ("a", "night", "a llm"),
        ("b", "night", "b llm"),
        ("near", None, "no router for requested model"),
        ("extra", "night", "no router for requested model"),
        ("far", None, "there/far llm"),
    ],
)
def test_where_llama_swap_cannot_rewrite_the_name_neither_selectors_nor_pins_count(
    name: str, profile: str | None, as_sent: str
) -> None:
    assert asked("POST", "/v1/completions", knowing(CHOICE), name, profile, rewritten=False) == as_sent


# --- labels


def test_labels_are_ids_also_of_names_that_stand_for_them() -> None:
    found = knowing(CHOICE, classes={"tts": {"models": ["speaker"]}})
    labels = [found.classify(BODY, name, "night").label for name in ("c", "extra", "first", "far", "kokoro")]
    assert labels == ["a", "c", "b", "there/far", "kokoro"]


def test_at_most_200_labels_whatever_the_configuration_has() -> None:
    names = [f"m{number}" for number in range(300)]
    found = knowing(f"models: {{{', '.join(f'{name}: {{aliases: [{name}-x]}}' for name in names)}}}")
    labels = {found.classify(BODY, f"{name}-x").label for name in names}
    assert len(labels) == MOST_LABELS + 1
    assert "other" in labels


# --- paths under /upstream

PATHS = """
models: {q: {aliases: [x y]}, a: {}, a/b: {}, a/b/c: {}, deep/er: {}}
upstream: {ignorePaths: ['^/static/', '\\.map$']}
peers: {there: {proxy: http://there, models: [far]}}
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/upstream/q/v1/chat/completions", "q llm"),
        ("/upstream/q/", "q llm"),
        ("/upstream/q", "no lease"),
        ("/upstream/x%20y/z", "q llm"),
        # the longest id, however its slashes are written
        ("/upstream/a/x", "a llm"),
        ("/upstream/a/b/x", "a/b llm"),
        ("/upstream/a%2Fb/x", "a/b llm"),
        ("/upstream/a%2fb%2Fc/x", "a/b/c llm"),
        ("/upstream/a/b/c/", "a/b/c llm"),
        ("/upstream/a/bc/x", "a llm"),
        ("/upstream/deep/er/x", "deep/er llm"),
        # without a slash behind the id llama-swap only redirects
        ("/upstream/a/b", "no lease"),
        ("/upstream/a%2Fb", "no lease"),
        ("/upstream/a/b/c", "no lease"),
        ("/upstream/deep/er", "no lease"),
        ("/upstream/deep/x", "model not found"),
        ("/upstream/deep", "model not found"),
        # its own ignorePaths take the place of the default ones
        ("/upstream/q/static/app", "no lease"),
        ("/upstream/q/x/static/app", "q llm"),
        ("/upstream/a/b/static/app", "no lease"),
        ("/upstream/q/app.map", "no lease"),
        ("/upstream/q/app.js", "q llm"),
        ("/upstream/q/props.json", "q llm"),
        ("/upstream/nobody/app.map", "model not found"),
        # a peer loads nothing, whatever is asked of it
        ("/upstream/there/far/x", "there/far llm"),
        ("/upstream/far/app.map", "there/far llm"),
        ("/upstream/q/v1/audio/speech", "q tts"),
        # no path of a model
        ("/upstream", "no lease"),
        ("/upstream/", "no lease"),
        ("/upstream/q//x", "no lease"),
        ("/upstream/q/../a/x", "no lease"),
    ],
)
def test_case_59_below_upstream_the_configuration_says_whether_a_path_loads_and_which_model(
    path: str, expected: str
) -> None:
    assert asked("GET", path, knowing(PATHS)) == expected


@pytest.mark.parametrize("method", ["POST", "PUT", "HEAD", "DELETE", "OPTIONS"])
def test_below_upstream_every_method_but_options_loads(method: str) -> None:
    assert asked(method, "/upstream/a/b/app.js", knowing(PATHS)) == ("no lease" if method == "OPTIONS" else "a/b llm")


@pytest.mark.parametrize("path", ["/upstream/q/app.js", "/upstream/q/x.json", "/upstream/q/a/b.txt"])
def test_below_upstream_the_default_ignored_paths_load_nothing(path: str) -> None:
    assert asked("GET", path, knowing("models: {q: {}}")) == "no lease"


def test_refining_keeps_what_else_a_route_says() -> None:
    route = match_route("POST", b"/upstream/a/b/v1/messages")
    refined = knowing(PATHS).refine(route)
    assert (refined.name, refined.anthropic, refined.keyless) == ("a/b", True, False)
    assert classifier().refine(route) is route
    assert knowing(PATHS).refine(BODY) is BODY


# --- with llama-swap's listing alone


def listed(**values: Any) -> Classifier:
    llama_swap: dict[str, dict[str, Any]] = {
        "q27": {"aliases": ["gpt-4o"]},
        "deep/er": {},
        "speaker": {},
        "there/far": {"type": "model", "peerID": "there"},
        "any": {"type": "selector", "strategy": "warm", "targets": ["q27", "speaker"]},
        "one": {"type": "selector", "strategy": "pin", "targets": ["speaker"]},
    }
    data = [{"id": name, "meta": {"llamaswap": each}} for name, each in llama_swap.items()]
    data[2]["architecture"] = {"input_modalities": ["text"], "output_modalities": ["audio"]}
    return Classifier(Settings.model_validate(values), catalog=catalog_from_listing({"data": data}))


@pytest.mark.parametrize(
    ("name", "model", "class_name", "mode", "units", "models"),
    [
        ("q27", "q27", "llm", "read", {"llm"}, {"q27"}),
        ("gpt-4o", "q27", "llm", "read", {"llm"}, {"q27"}),
        ("speaker", "speaker", "tts", "write", {"tts"}, {"speaker"}),
        ("there/far", "there/far", "llm", "none", set(), set()),
        ("one", "speaker", "tts", "write", {"tts"}, {"speaker"}),
        ("any", "q27", "llm", "write", {"llm", "tts"}, {"q27", "speaker"}),
        # unlisted
        ("my-embed", "my-embed", "embed", "none", {"embed"}, {"my-embed"}),
        ("mystery", "mystery", "llm", "read", {"llm"}, {"mystery"}),
    ],
)
def test_with_a_listing_names_are_resolved_and_the_class_is_the_unit(
    name: str, model: str, class_name: str, mode: str, units: set[str], models: set[str]
) -> None:
    found = listed().classify(BODY, name)
    assert (found.model, found.class_name, found.mode) == (model, class_name, mode)
    assert (set(found.units), set(found.models)) == (units, models)
    assert found.label == ("other" if name in {"my-embed", "mystery"} else model)


def test_with_a_listing_paths_are_matched_by_what_it_lists_and_else_by_their_first_part() -> None:
    found = listed(classes={"tts": {"models": ["un/listed"]}})
    paths = [
        "/upstream/deep/er/x",
        "/upstream/deep/er",
        "/upstream/q27/x.js",
        "/upstream/un/listed/x",
        "/upstream/nobody/x",
    ]
    assert [asked("GET", path, found) for path in paths] == [
        *("deep/er llm", "no lease", "no lease", "un/listed tts", "nobody llm")
    ]
    assert asked("GET", "/upstream/nobody", found) == "no lease"


def test_with_a_listing_slots_are_those_of_the_settings() -> None:
    assert [listed().slots("q27"), listed(slots={"gpt-4o": 2}).slots("q27")] == [10, 2]


@pytest.mark.parametrize("part", ["x", "x/", "."])
def test_a_long_path_below_upstream_takes_no_time(part: str) -> None:
    found = knowing(HOME)
    route = match_route("GET", f"/upstream/q27/{part * (16_000 // len(part))}x".encode())
    begun = time.process_time()
    assert found.classify(found.refine(route)).model == "q27"
    assert time.process_time() - begun < 0.2


def test_invented_names_and_paths_do_not_grow_the_memory_of_a_classifier_that_knows_the_configuration() -> None:
    found = knowing(HOME)
    tracemalloc.start()
    try:
        for name in invented_names():
            with pytest.raises(UnknownModel):
                found.classify(BODY, name)
            found.classify(Route(NameIn.PATH, name="q27", rest=f"q27/{name[:2000]}"))
        assert tracemalloc.get_traced_memory()[0] < 4 * 2**20
    finally:
        tracemalloc.stop()
