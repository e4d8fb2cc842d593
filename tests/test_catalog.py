"""Names: what each stands for, under /upstream too; classes by capabilities; modes with their reasons."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from proxy.llama_swap import (
    Capabilities,
    Catalog,
    LlamaSwapConfig,
    Resolution,
    UpstreamMatch,
    capability_class,
    catalog_from_listing,
    lease_mode,
    parse,
)

CONFIG = """
models:
  q27: {aliases: [gpt-4o], filters: {setParamsByID: {"q27:high": {}}}}
  vis: {unlisted: true}
  tts: {}
  e: {}
  author/model: {aliases: [author/model/latest]}
  hidden: {}
matrix: {vars: {am: author/model}, sets: {home: (q27 | vis | tts | am | hidden) & e}}
peers:
  far: {proxy: "http://x", models: [big, same, e, group/inner]}
  away: {proxy: "http://y", models: [same]}
selectors:
  chat: {strategy: pin, targets: [gpt-4o, vis]}
  any: {strategy: warm, targets: [gpt-4o, vis, q27]}
  both: {strategy: warm, targets: [q27, e]}
  spill: {strategy: spillover, targets: [e, q27, big]}
  out: {strategy: pin, targets: [far/big, q27]}
profiles:
  night:
    pins: {q27: vis, night-chat: chat, hidden: "", x: big, tts: q27, q27/deep: author/model, y: }
"""


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.from_config(parse(CONFIG, {}))


def local(name: str, model: str, **more: Any) -> Resolution:
    return Resolution(name, (model,), model, **more)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("q27", local("q27", "q27")),
        ("gpt-4o", local("gpt-4o", "q27")),
        ("q27:high", local("q27:high", "q27")),
        ("vis", local("vis", "vis")),
        ("author/model", local("author/model", "author/model")),
        ("author/model/latest", local("author/model/latest", "author/model")),
        ("e", local("e", "e")),  # a local model comes before a peer's
        ("far/e", Resolution("far/e", (), "far/e", remote=True)),
        ("far/big", Resolution("far/big", (), "far/big", remote=True)),
        ("big", Resolution("big", (), "far/big", remote=True)),
        ("group/inner", Resolution("group/inner", (), "far/group/inner", remote=True)),
        ("away/same", Resolution("away/same", (), "away/same", remote=True)),
        ("same", None),  # two peers have it
        ("away/big", None),
        ("chat", local("chat", "q27", selector="chat")),
        ("any", Resolution("any", ("q27", "vis"), "q27", conservative=True, selector="any")),
        ("both", Resolution("both", ("q27", "e"), "q27", selector="both")),
        ("spill", Resolution("spill", ("e", "q27"), "e", selector="spill")),
        ("out", Resolution("out", (), "far/big", remote=True, selector="out")),
        *((name, None) for name in ("TTS", " tts ", "tts/", "nobody", "night-chat", "")),
    ],
)
def test_a_name_stands_for_what_llama_swap_makes_of_it(
    catalog: Catalog, name: str, expected: Resolution | None
) -> None:
    assert catalog.resolve(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("q27", local("q27", "vis")),
        ("gpt-4o", local("gpt-4o", "q27")),  # a pin is for the name as it was sent
        ("night-chat", local("night-chat", "q27", selector="chat")),
        ("chat", local("chat", "q27", selector="chat")),  # not pinned again behind a selector
        ("tts", local("tts", "q27")),  # nor behind a pin
        ("x", Resolution("x", (), "far/big", remote=True)),
        ("hidden", None),
        ("y", None),
    ],
)
def test_the_active_profile_pins_names_before_anything_else(
    catalog: Catalog, name: str, expected: Resolution | None
) -> None:
    assert catalog.resolve(name, profile="night") == expected


def test_a_profile_that_there_is_not_pins_nothing(catalog: Catalog) -> None:
    assert catalog.resolve("q27", profile="day") == local("q27", "q27")
    assert catalog.resolve("q27", profile="") == local("q27", "q27")


def test_of_a_warm_selector_the_first_that_is_ready_comes_first(catalog: Catalog) -> None:
    found = catalog.resolve("any", ready={"vis"})
    assert found is not None
    assert (found.models, found.label) == (("vis", "q27"), "vis")


def test_selectors_do_not_count_under_upstream(catalog: Catalog) -> None:
    assert catalog.resolve("chat", upstream=True) is None
    assert catalog.resolve("q27", upstream=True, profile="night") == local("q27", "vis")


def test_all_names_are_listed_once_models_first(catalog: Catalog) -> None:
    names = catalog.names()
    assert names[:6] == ("q27", "vis", "tts", "e", "author/model", "hidden")
    assert len(set(names)) == len(names)
    assert {"chat", "gpt-4o", "q27:high", "far/big", "big", "night-chat", "x"} <= set(names)
    assert not {"same", "y", "nobody"} & set(names)


# /upstream


def match(catalog: Catalog, path: str, profile: str | None = None) -> str:
    found: UpstreamMatch | None = catalog.match_upstream(path, profile=profile)
    if found is None:
        return "404"
    how = "redirect" if found.redirect else "ignored" if found.ignored else "loads" if found.loads else "remote"
    return f"{how} {found.resolution.label} {found.rest}"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tts/v1/audio/speech", "loads tts /v1/audio/speech"),
        ("tts/", "loads tts /"),
        ("tts", "redirect tts /"),
        ("gpt-4o/props", "loads q27 /props"),
        ("author/model/v1/x", "loads author/model /v1/x"),
        ("author/model", "redirect author/model /"),
        ("author/model/latest", "redirect author/model /"),  # the alias is longer than the id
        ("author/model/latest/x", "loads author/model /x"),
        ("author", "404"),
        ("author/", "404"),
        ("nobody/x", "404"),
        ("chat/x", "404"),
        ("", "404"),
        ("tts/app.js", "ignored tts /app.js"),
        ("tts/a/b.json", "ignored tts /a/b.json"),
        ("tts/app.jsx", "loads tts /app.jsx"),
        ("far/big/x.js", "remote far/big /x.js"),
        ("big/x", "remote far/big /x"),
        ("//tts//x", "loads tts //x"),
        ("tts /x", "404"),
        ("tts/ ", "redirect tts /"),  # llama-swap trims the path before it looks for the model
    ],
)
def test_under_upstream_the_longest_name_at_the_beginning_counts(catalog: Catalog, path: str, expected: str) -> None:
    assert match(catalog, path) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("q27/x", "loads vis /x"),
        ("q27", "redirect vis /"),
        ("q27/deep/x", "loads author/model /x"),  # the longest pin
        ("q27/deeper/x", "loads vis /deeper/x"),
        ("gpt-4o/x", "loads q27 /x"),
        ("hidden/x", "404"),
        ("night-chat/x", "404"),  # a selector
        ("x/y", "remote far/big /y"),
    ],
)
def test_pins_apply_under_upstream_too(catalog: Catalog, path: str, expected: str) -> None:
    assert match(catalog, path, "night") == expected


def test_what_was_asked_for_under_upstream_is_remembered_as_sent(catalog: Catalog) -> None:
    pinned, plain = catalog.match_upstream("q27/x", profile="night"), catalog.match_upstream("q27/x")
    assert pinned is not None
    assert plain is not None
    assert (pinned.resolution.requested, pinned.name) == ("q27", "vis")
    assert (plain.resolution.requested, plain.name) == ("q27", "q27")


# The listing.


def entry(name: str, kind: str | None, **more: Any) -> dict[str, Any]:
    meta = {key: more.pop(key) for key in ("aliases", "targets", "strategy", "peerID", "modelID") if key in more}
    return {"id": name, "object": "model", "meta": {"llamaswap": {"type": kind, **meta}}, **more}


LISTING = {
    "object": "list",
    "data": [
        entry("q27", "model", aliases=["gpt-4o"], capabilities={"function_calling": True}),
        entry("gpt-4o", "alias", modelID="q27"),
        entry("tts", "model", architecture={"input_modalities": ["text"], "output_modalities": ["audio"]}),
        entry("rr", "model", capabilities={"reranker": True}),
        entry("far/big", "peer", peerID="far"),
        entry("any", "selector", strategy="warm", targets=["q27", "unlisted"]),
        entry("one", "selector", strategy="pin", targets=["gpt-4o", "tts"]),
        entry("out", "selector", strategy="pin", targets=["far/big"]),
        entry("pinned", "profile"),
        {"id": "old"},
        {"id": 3},
        "nonsense",
    ],
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("q27", local("q27", "q27")),
        ("gpt-4o", local("gpt-4o", "q27")),
        ("far/big", Resolution("far/big", (), "far/big", remote=True)),
        ("big", None),  # there may be an unlisted model of this name
        ("any", Resolution("any", ("q27", "unlisted"), "q27", conservative=True, selector="any")),
        ("one", local("one", "q27", selector="one")),
        ("out", Resolution("out", (), "far/big", remote=True, selector="out")),
        ("pinned", local("pinned", "pinned")),
        ("old", local("old", "old")),
    ],
)
def test_a_listing_gives_the_same_names_as_far_as_it_tells_them(name: str, expected: Resolution | None) -> None:
    assert catalog_from_listing(LISTING).resolve(name) == expected


def test_a_listing_says_of_itself_that_it_is_not_all() -> None:
    catalog = catalog_from_listing(LISTING)
    assert (catalog.source, catalog.complete, catalog.router) == ("listing", False, None)
    assert match(catalog, "q27/x") == "loads q27 /x"
    assert match(catalog, "q27/x.js") == "ignored q27 /x.js"
    classes = {name: capability_class(model.capabilities) for name, model in catalog.models.items()}
    assert (classes["q27"], classes["tts"], classes["rr"], classes["old"]) == ("llm", "tts", "embed", None)


@pytest.mark.parametrize("body", [None, [], {}, {"data": {}}, "x", {"error": {}}])
def test_what_is_no_listing_is_refused(body: Any) -> None:
    with pytest.raises(ValueError, match="no list of models"):
        catalog_from_listing(body)


def test_a_listing_with_nonsense_in_every_place_is_survived() -> None:
    wrong: list[Any] = [None, 3, "x", [], {}, [[]], {"a": 1}]
    data = [{"id": "a", "meta": {"llamaswap": meta}, "architecture": meta, "capabilities": meta} for meta in wrong]
    data += [{"id": "b", "meta": meta} for meta in wrong]
    data += [entry("c", "selector", strategy=value, targets=value) for value in wrong if not isinstance(value, dict)]
    data += [entry("d", "model", aliases=value, peerID=3) for value in wrong]
    assert catalog_from_listing({"data": data}).resolve("a") == local("a", "a")


# Classes.


@pytest.mark.parametrize(
    ("inputs", "outputs", "more", "expected"),
    [
        ("text", "audio", {}, "tts"),
        ("audio", "audio", {}, "tts"),
        ("", "audio", {}, "tts"),
        ("text", "image", {}, "image"),
        ("text image", "image", {}, "image"),
        ("audio", "text", {}, "stt"),
        ("text", "text", {}, "llm"),
        ("text image", "text", {}, "llm"),
        ("image", "text", {}, "llm"),
        ("text image", "text image", {}, "llm"),
        ("text audio", "text audio", {}, "llm"),
        ("text audio", "text", {}, None),
        ("text audio", "text", {"tools": True}, "llm"),
        ("text", "text", {"reranker": True}, "embed"),
        ("", "", {"reranker": True, "tools": True}, "embed"),
        ("", "text", {}, None),
        ("audio", "", {}, None),
        ("text", "audio image", {}, None),
        ("", "", {}, None),
    ],
)
def test_capabilities_decide_a_class_where_they_leave_one(
    inputs: str, outputs: str, more: dict[str, bool], expected: str | None
) -> None:
    capabilities = Capabilities(frozenset(inputs.split()), frozenset(outputs.split()), **more)
    assert capability_class(capabilities) == expected


# Modes.

CLASSES = {"q27": "llm", "vis": "llm", "tts": "tts", "e": "embed"}


def routed(text: str) -> LlamaSwapConfig:
    return parse(yaml.safe_dump({"models": {name: {} for name in CLASSES}}) + text, {})


HOME = "matrix: {sets: {home: (q27 | vis | tts) & e}}"
BESIDE = "matrix: {sets: {home: (vis | q27 & tts) & e}}"


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        (HOME, {}, "q27 read, vis read, tts write, e none"),
        (BESIDE, {}, "q27 read, vis read, tts read, e none"),
        ("matrix: {sets: {home: q27 & tts & e, v: vis}}", {}, "q27 read, vis read, tts read, e read"),
        ("matrix: {sets: {home: q27 & vis & tts & e}}", {}, "q27 none, vis none, tts none, e none"),
        ("", {}, "q27 read, vis read, tts write, e read"),
        (HOME, {"tts": "read", "embed": "write"}, "q27 read, vis read, tts read, e write"),
        (HOME, {"llm": "none", "tts": "auto"}, "q27 none, vis none, tts write, e none"),
        (BESIDE, {"llm": "none"}, "q27 none, vis none, tts write, e none"),  # no chat model takes a lease
        (BESIDE, {"llm": "write"}, "q27 write, vis write, tts read, e none"),
        (
            "groups: {g: {swap: false, exclusive: false, persistent: true, members: [q27, e]}}",
            {},
            "q27 none, vis read, tts write, e none",  # q27, beside which tts is resident, takes no lease itself
        ),
    ],
)
def test_the_mode_follows_from_what_is_resident_together(text: str, settings: dict[str, Any], expected: str) -> None:
    config = routed(text)
    modes = {model: lease_mode(config, model, CLASSES, settings).mode for model in CLASSES}
    assert ", ".join(f"{model} {mode}" for model, mode in modes.items()) == expected


def test_every_mode_has_its_reason() -> None:
    def reason(text: str, model: str, **settings: Any) -> str:
        return lease_mode(routed(text), model, CLASSES, settings).reason

    assert reason(HOME, "e") == "always resident: no request for another model stops it, and it stops none"
    assert reason(HOME, "tts") == "speech, and not resident beside any chat model that takes a lease"
    assert reason(BESIDE, "tts") == "can be resident beside q27"
    assert reason(HOME, "q27") == "llm shares with what is resident beside it"
    assert reason(HOME, "tts", tts="read") == "classes.tts.lease"
    assert reason("", "e") == "not always resident"


def test_embeddings_that_are_not_always_resident_come_with_the_line_to_add() -> None:
    def warning(text: str, **settings: Any) -> str | None:
        return lease_mode(routed(text), "e", CLASSES, settings).warning

    assert warning(HOME) is None
    assert warning(HOME, embed="none") is None
    assert warning("matrix: {sets: {home: q27 | e}}") == (
        "e is not always resident; end every set of the matrix with `& e`, as in `home: (a | b) & e`, "
        "and put tts, vis into a set, since a model in no set stops all others"
    )
    group = (
        "e is not always resident; add the group "
        "`always: {swap: false, exclusive: false, persistent: true, members: [e]}` to llama-swap's groups"
    )
    assert warning("") == group
    assert warning("", embed="none") == group
    assert warning("", embed="read") is None


def test_the_line_that_is_advised_makes_them_always_resident() -> None:
    advised = "groups: {always: {swap: false, exclusive: false, persistent: true, members: [e]}}"
    assert lease_mode(routed(advised), "e", CLASSES, {}).mode == "none"
