"""What `gpu-lease-proxy check` prints: the settings as they hold, how models are classified, and what looks wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.classify import BUILT_IN_PATTERNS, Classifier, NameIn, Route
from proxy.settings.display import shown
from proxy.settings.units import format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from proxy.settings import Settings
    from proxy.settings.layers import Layer

SDK_PATIENCE = 600.0
"""Seconds after which the OpenAI and Anthropic SDKs give up on a request by default."""


def report(settings: Settings, layer: Layer, names: Sequence[str] = ()) -> str:
    """The whole text; `names` are further model names to classify. No secret is in it."""
    parts = [
        ("Settings", _table(("NAME", "VALUE", "FROM"), _settings(settings, layer))),
        ("Classes", _table(("CLASS", "LEASE", "MAX WAIT", "NAMES AND PATTERNS"), _classes(settings))),
        ("Models", _models(settings, names)),
        ("Warnings", [f"  - {warning}" for warning in warnings(settings)] or ["  none"]),
    ]
    return "\n\n".join("\n".join([title, *lines]) for title, lines in parts) + "\n"


def warnings(settings: Settings) -> list[str]:
    """What is allowed and probably not meant, one sentence each."""
    found = []
    if settings.upstream_url is None:
        found.append("upstream_url is unset: `serve` runs the demo, with a simulated llama-swap.")
    if settings.api_keys is None and not _is_loopback(settings.listen_host):
        found.append(f"listen_host is {settings.listen_host} and api_keys is unset: whoever reaches it may use it.")
    if settings.max_spool < settings.max_body:
        found.append(f"max_spool is below max_body: bodies above {format_size(settings.max_spool)} are always refused.")
    found += [_patience(name, settings) for name in settings.classes if settings.max_wait_of(name) > SDK_PATIENCE]
    classifier = Classifier(settings)
    default = classifier.classify(Route(NameIn.FIXED, name=""))
    if default.mode == "none":
        found.append(f"default_class is {default.class_name}, which waits for nothing: unknown models swap at will.")
    if classifier.modes["tts"] == "none":
        found.append("classes.tts.lease is none: speech swaps models while chats run.")
    return found


def _patience(name: str, settings: Settings) -> str:
    wait = format_duration(settings.max_wait_of(name))
    return f"max_wait of {name} is {wait}: most clients give up after {format_duration(SDK_PATIENCE)}."


def _is_loopback(host: str) -> bool:
    return host in {"localhost", "::1"} or host.startswith("127.")


def _settings(settings: Settings, layer: Layer) -> Iterable[tuple[str, ...]]:
    for key in type(settings).model_fields:
        if key != "classes":
            yield key, shown(key, getattr(settings, key)), layer.origin((key,))


def _classes(settings: Settings) -> Iterable[tuple[str, ...]]:
    modes = Classifier(settings).modes
    for name, entry in settings.classes.items():
        patterns = [*entry.models, *(f"({pattern})" for pattern in BUILT_IN_PATTERNS.get(name, ()))]
        lease = f"{modes[name]} ({entry.lease})" if entry.lease == "auto" else modes[name]
        yield name, lease, format_duration(settings.max_wait_of(name)), " ".join(patterns) or "-"


def _models(settings: Settings, names: Sequence[str]) -> list[str]:
    classifier = Classifier(settings)
    wanted = list(dict.fromkeys([*classifier.known_models, *names]))
    if not wanted:
        return ["  No model is named in the settings. `check NAME ...` tells how a name would be classified."]
    found = [classifier.classify(Route(NameIn.BODY), name) for name in wanted]
    rows = [(what.model, what.class_name, what.mode, str(what.slots), what.evidence) for what in found]
    return [
        *_table(("MODEL", "CLASS", "LEASE", "SLOTS", "BECAUSE"), rows),
        "  llama-swap's own configuration is not read: all models of one class are taken to fit together.",
    ]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
