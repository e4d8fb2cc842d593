"""What `gpu-lease-proxy check` prints: the settings as they hold, what each model's class and lease are and why, which
models can be loaded together, and what looks wrong.

It starts nothing and asks nobody: without llama-swap's configuration it tells what the settings alone decide. No
secret is in it, neither of ours nor of llama-swap.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from itertools import chain, zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING

from proxy.classes import BUILT_IN_PATTERNS
from proxy.classify import Classification, Classifier
from proxy.errors import UnknownModel
from proxy.llama_swap import LlamaSwapConfig, load
from proxy.routes import NameIn, Route
from proxy.settings.display import shown
from proxy.settings.units import format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from proxy.settings import Settings
    from proxy.settings.layers import Layer

SDK_PATIENCE = 600.0
"""Seconds after which the OpenAI and Anthropic SDKs give up on a request by default."""

COLUMNS = 120
"""Characters of a line, where the words allow it."""

WIDEST, NARROWEST = 48, 32
"""Of a column that is not the last, before it is wrapped; of the last one, however little room there is."""

MOST_SETS = 20
"""Sets of models that are printed; a matrix can stand for thousands."""

_ANY = Route(NameIn.BODY)

_BUT_ROUTE = {"default_class": ", except on a speech, transcription or image route"}


def report(
    settings: Settings, layer: Layer, names: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> str:
    """The whole text; `names` are further model names to classify. `environ` (left out: the process's own) is what
    llama-swap's configuration may refer to.

    Raises SettingsError where that configuration is broken.
    """
    config = None
    if settings.llama_swap_config is not None:
        config = load(settings.llama_swap_config, os.environ if environ is None else environ)
    classifier = Classifier(settings, config=config)
    parts = [
        ("Settings", _table(("NAME", "VALUE", "FROM"), _settings(settings, layer, config))),
        (
            "Classes",
            _table(("CLASS", "LEASE", "MAX WAIT", "NAMES AND (BUILT-IN) PATTERNS"), _classes(settings, config)),
        ),
        ("llama-swap", _source(settings, config)),
        ("Models", models_table(classifier, names)),
        *_routing(classifier),
        ("Warnings", _bullets(warnings(settings, classifier))),
    ]
    text = "\n\n".join("\n".join([title, *lines]) for title, lines in parts) + "\n"
    return re.sub(r"[^\n -~\xa0-\U0010ffff]", "\ufffd", text)  # a name must not steer the terminal


# -- settings


def _settings(settings: Settings, layer: Layer, config: LlamaSwapConfig | None) -> Iterator[tuple[str, ...]]:
    for key in type(settings).model_fields:
        if key == "slots" and config is not None and key not in settings.model_fields_set:
            yield key, "each model's concurrencyLimit", "llama_swap_config"
        elif key != "classes":
            yield key, shown(key, getattr(settings, key)), layer.origin((key,))


def _classes(settings: Settings, config: LlamaSwapConfig | None) -> Iterator[tuple[str, ...]]:
    modes = Classifier(settings).modes
    for name, entry in settings.classes.items():
        patterns = [*entry.models, *(f"({pattern})" for pattern in BUILT_IN_PATTERNS.get(name, ()))]
        lease = f"{modes[name]} (auto)" if entry.lease == "auto" and config is None else entry.lease
        yield name, lease, format_duration(settings.max_wait_of(name)), " ".join(patterns) or "-"


# -- llama-swap


def _source(settings: Settings, config: LlamaSwapConfig | None) -> list[str]:
    """Where names come from."""
    if config is None:
        return _prose(
            "llama_swap_config is unset, so the settings alone decided what is below. `serve` will ask llama-swap for "
            "its listing too (GET /v1/models): aliases, selectors, peers and capabilities. What can be loaded together "
            "is not in the listing: all models of one class are then taken to fit, and no two of different classes."
        )
    nothing = "none is configured, so that every model stops every other"
    keys = f"{len(config.api_keys)} (not shown); a client must send one of them" if config.api_keys else "none"
    return _columns(
        [
            ("names from", f"{settings.llama_swap_config}, not from the listing of a running llama-swap"),
            ("looked at", "every 2s" if settings.watch_config else "at start and on SIGHUP (watch_config is false)"),
            ("routing", nothing if config.routing == "default" else config.routing),
            ("apiKeys", keys),
        ]
    )


def models_table(classifier: Classifier, names: Sequence[str] = ()) -> list[str]:
    """Each model with its class, its lease, and why; then `names`."""
    config = classifier.config
    known = classifier.known_models if config is None else tuple(config.models)
    wanted = list(dict.fromkeys([*known, *names]))
    if not wanted and config is not None:
        return ["  llama-swap's configuration has no models."]
    if not wanted:
        return ["  No model is named in the settings. `check NAME ...` tells how a name would be classified."]
    rows = [_model(classifier, name) for name in wanted]
    return _table(("MODEL", "CLASS", "LEASE", "SLOTS", "WHY"), rows)


def _model(classifier: Classifier, name: str) -> tuple[str, ...]:
    try:
        what = classifier.classify(_ANY, name)
    except UnknownModel:
        return name, "-", "-", "-", "llama-swap has no such name: the answer is 404"
    config = classifier.config
    local = config.models.get(name) if config is not None else None
    why = [f"class: {what.evidence}{_BUT_ROUTE.get(what.evidence, '')}", f"lease: {what.reason}"]
    if local is not None and local.aliases:
        why.append(f"names: {', '.join(local.aliases)}")
    elif what.model != name:
        why.append(f"stands for: {', '.join(sorted(what.models)) or what.model}")
    return name, what.class_name, what.mode, _slots(classifier, what), "\n".join(why)


def _slots(classifier: Classifier, what: Classification) -> str:
    return str(classifier.slots(what.model)) if what.models else "-"


def _routing(classifier: Classifier) -> Iterator[tuple[str, list[str]]]:
    """The sections that only llama-swap's configuration can fill."""
    config = classifier.config
    if config is None:
        return
    if config.selectors or config.profiles or config.peers:
        yield "Other names", _table(("NAME", "KIND", "MEANING"), _other_names(classifier, config))
    always = [model for model in config.models if config.router.always_resident(model)]
    sets = config.router.resident_sets(MOST_SETS + 1)
    lines = [line for models in sets[:MOST_SETS] for line in _prose(", ".join(models))]
    more = [f"  and more: only {MOST_SETS} are shown"] if len(sets) > MOST_SETS else []
    yield "Loaded together", [*lines, *more, *_prose(f"Always, so that no request waits for another model's: "
                                                     f"{', '.join(always) or 'none'}")]  # fmt: skip


def _other_names(classifier: Classifier, config: LlamaSwapConfig) -> Iterator[tuple[str, ...]]:
    for selector in config.selectors.values():
        what = classifier.classify(_ANY, selector.id)
        lines = f"{', '.join(selector.targets)}\nlease: {what.mode}, {what.reason}"
        yield selector.id, f"{selector.strategy} selector", lines
    for peer, served in config.peers.items():
        yield peer, "peer", f"no lease, no slots: {', '.join(served)}"
    for profile, pins in config.profiles.items():
        meanings = (f"{pin} is {target}" if target else f"{pin} is switched off" for pin, target in pins.items())
        yield profile, "profile", f"while it is active: {', '.join(meanings)}"


# -- warnings


def warnings(settings: Settings, classifier: Classifier | None = None) -> list[str]:
    """What is allowed and probably not meant, one sentence each."""
    classifier = classifier or Classifier(settings)
    config = classifier.config
    found = list(_of_settings(settings, config))
    found += _of_plain_classes(classifier) if config is None else _of_llama_swap(settings, classifier, config)
    return found


def _of_settings(settings: Settings, config: LlamaSwapConfig | None) -> Iterator[str]:
    if settings.upstream_url is None:
        yield "upstream_url is unset: `serve` runs the demo, with a simulated llama-swap."
    keyless = settings.api_keys is None and not (config is not None and config.api_keys)
    if keyless and not _is_loopback(settings.listen_host):
        yield f"listen_host is {settings.listen_host} and api_keys is unset: whoever reaches it may use it."
    if settings.max_spool < settings.max_body:
        yield f"max_spool is below max_body: bodies above {format_size(settings.max_spool)} are always refused."
    for name in settings.classes:
        if (wait := settings.max_wait_of(name)) > SDK_PATIENCE:
            yield (
                f"max_wait of {name} is {format_duration(wait)}: most clients give up after "
                f"{format_duration(SDK_PATIENCE)}."
            )


def _is_loopback(host: str) -> bool:
    return host in {"localhost", "::1"} or host.startswith("127.")


def _of_plain_classes(classifier: Classifier) -> Iterator[str]:
    default = classifier.classify(Route(NameIn.FIXED, name=""))
    if default.mode == "none":
        yield f"default_class is {default.class_name}, which waits for nothing: unknown models swap at will."
    if classifier.modes["tts"] == "none":
        yield "classes.tts.lease is none: speech swaps models while chats run."


def _of_llama_swap(settings: Settings, classifier: Classifier, config: LlamaSwapConfig) -> Iterator[str]:
    yield from (f"{warning}." for warning in classifier.mode_warnings())
    for model in config.models.values():
        if (slots := classifier.slots(model.id)) > model.slots:
            yield f"slots of {model.id} is {slots}, above its concurrencyLimit, {model.slots}: llama-swap answers 429."
    yield from _without_a_model(settings, classifier)
    own = settings.upstream_api_key
    if own is not None and config.api_keys and own.get_secret_value() not in config.api_keys:
        yield "upstream_api_key is none of llama-swap's apiKeys: llama-swap refuses it."
    yield from (f"llama-swap's configuration, {note}." for note in config.notes)


def _without_a_model(settings: Settings, classifier: Classifier) -> Iterator[str]:
    """What is probably a slip of the pen in our settings."""
    known = classifier.catalog.names() if classifier.catalog is not None else ()
    places = [(f"classes.{name}.models", entry.models) for name, entry in settings.classes.items()]
    if "slots" in settings.model_fields_set:
        places.append(("slots", tuple(settings.slots)))
    for at, patterns in places:
        for pattern in patterns:
            if pattern not in known and not any(fnmatchcase(name, pattern) for name in known):
                yield f"{at} has {pattern}, which fits no name in llama-swap's configuration."


# -- text


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return _columns([head, *rows])


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Cells below one another; wrapped where they are wide, but never within a word, which moves its row only."""
    widths = [min(max(map(len, column)), WIDEST) for column in zip(*rows, strict=True)]
    widths[-1] = max(COLUMNS - sum(widths[:-1]) - 2 * len(widths), NARROWEST)
    return list(chain.from_iterable(_lines(row, widths) for row in rows))


def _lines(row: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    wrapped = [
        [line for part in cell.split("\n") for line in _wrap(part, width)]
        for cell, width in zip(row, widths, strict=True)
    ]
    for parts in zip_longest(*wrapped, fillvalue=""):
        yield ("  " + "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True))).rstrip()


def _wrap(text: str, width: int) -> list[str]:
    return wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _prose(text: str, first: str = "  ", rest: str = "  ") -> list[str]:
    """`text` in lines; what stands in backquotes is to be copied, and stays whole."""
    whole = re.sub(r"`[^`]*`", lambda match: match[0].replace(" ", "\xa0"), text)
    return [first + line.replace("\xa0", " ") if number == 0 else rest + line.replace("\xa0", " ")
            for number, line in enumerate(_wrap(whole, COLUMNS - len(rest)))]  # fmt: skip


def _bullets(sentences: Iterable[str]) -> list[str]:
    return [line for sentence in sentences for line in _prose(sentence, "  - ", "    ")] or ["  none"]
