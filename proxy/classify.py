"""From a model's name to its class, its mode and its slots.

The class is decided by evidence, best first: the settings' names and patterns, the built-in patterns, the route, the
default class. An exact name beats a pattern and a longer pattern a shorter one. No guess leads to mode none: the
embeddings routes are no evidence, and among the built-in patterns those of `embed` come last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar

from proxy.routes import NameIn, Route, match_route

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.router import Mode
    from proxy.settings import Lease, Settings

__all__ = ["BUILT_IN_PATTERNS", "Classification", "Classifier", "NameIn", "Route", "match_route"]

T = TypeVar("T")

BUILT_IN_PATTERNS: dict[str, tuple[str, ...]] = {
    "tts": (
        *("*tts*", "chatterbox*", "kokoro*", "piper*", "orpheus*", "cosyvoice*", "fish-speech*", "vibevoice*"),
        *("bark", "bark-*", "zonos*", "csm-*"),
    ),
    "stt": ("*whisper*", "*parakeet*", "*-asr*", "canary-*", "moonshine*", "*sensevoice*", "*transcribe*"),
    "image": (
        *("*flux*", "*sdxl*", "sd-*", "sd1*", "sd2*", "sd3*", "comfyui*", "stable-diffusion*"),
        *("*qwen-image*", "z-image*", "hidream*"),
    ),
    "embed": ("*embed*", "bge-*", "*rerank*", "e5-*", "gte-*", "all-minilm*"),
}
"""Compared without case, with a name and with what follows its last slash; the first class that fits is taken."""

DEFAULT_SLOTS = 10
"""llama-swap's own default for `concurrencyLimit`."""

_REMEMBERED = 1024  # decisions; far more than a host has models, and little memory when a client invents names
_LONGEST_REMEMBERED = 256  # characters of such a name
_MOST_LABELS = 200  # values of the metrics' label `model`


@dataclass(frozen=True, slots=True)
class Classification:
    """What a request will make llama-swap load, and how it shares the GPU.

    `requested` is the name as sent and `model` llama-swap's id for it. `units` are what the lock's router counts,
    `slots` how many requests of this model may run at once, `label` the model's name in metrics, and `evidence` says,
    for people, what decided the class.
    """

    requested: str
    model: str
    class_name: str
    mode: Mode
    units: frozenset[str]
    slots: int
    label: str
    evidence: str


class Classifier:
    """Decides the class of a name, by the settings. While llama-swap's config is unknown, the class is the unit."""

    def __init__(self, settings: Settings) -> None:
        self.class_names = tuple(settings.classes)
        self.known_models = _literals(settings)
        self._labels = frozenset(self.known_models[:_MOST_LABELS])
        self.modes = {name: _mode(name, entry.lease) for name, entry in settings.classes.items()}
        owners = {pattern: name for name, entry in settings.classes.items() for pattern in entry.models}
        self._owners = _Patterns(owners)
        self._slots = _Patterns(settings.slots)
        self._default_class = settings.default_class
        self._remembered = lru_cache(_REMEMBERED)(self._decide)
        self._remembered_slots = lru_cache(_REMEMBERED)(self._find_slots)

    def classify(self, route: Route, name: str | None = None) -> Classification:
        """The decision for a request on `route` that names the model `name` (left out: the route's own)."""
        name = self._name(route, name)
        decide = self._remembered if len(name) <= _LONGEST_REMEMBERED else self._decide
        return decide(name, route.class_hint)

    def slots(self, model: str) -> int:
        """How many requests of `model` may run at once."""
        find = self._remembered_slots if len(model) <= _LONGEST_REMEMBERED else self._find_slots
        return find(model)

    def _find_slots(self, model: str) -> int:
        found = self._slots.find(model)
        return found[1] if found else DEFAULT_SLOTS

    def _name(self, route: Route, name: str | None) -> str:
        if route.name_in is NameIn.PATH:
            fitting = [known for known in self.known_models if f"{route.path}/".startswith(f"{known}/")]
            return max(fitting, key=len, default=route.name or "")
        return name if name is not None else route.name or ""

    def _decide(self, name: str, hint: str | None) -> Classification:
        class_name, evidence = self._class(name, hint)
        return Classification(
            requested=name,
            model=name,
            class_name=class_name,
            mode=self.modes[class_name],
            units=frozenset({class_name}),
            slots=self.slots(name),
            label=name if name in self._labels else "other",
            evidence=evidence,
        )

    def _class(self, name: str, hint: str | None) -> tuple[str, str]:
        if found := self._owners.find(name):
            pattern, class_name = found
            return class_name, f"classes.{class_name}.models has {pattern}"
        if built_in := _built_in(name):
            class_name, pattern = built_in
            return class_name, f"built-in pattern {pattern}"
        if hint is not None:
            return hint, f"{hint} route"
        return self._default_class, "default_class"


class _Patterns(Generic[T]):
    """Values by name or by pattern."""

    def __init__(self, entries: Mapping[str, T]) -> None:
        self._entries = dict(entries)
        globs = sorted(filter(_is_glob, entries), key=_literal_length, reverse=True)
        self._globs = [(pattern, re.compile(translate(pattern))) for pattern in globs]

    def find(self, name: str) -> tuple[str, T] | None:
        """The entry that fits `name` best, with its pattern."""
        if name in self._entries:
            return name, self._entries[name]
        fitting = next((pattern for pattern, compiled in self._globs if compiled.match(name)), None)
        return None if fitting is None else (fitting, self._entries[fitting])


def _is_glob(pattern: str) -> bool:
    return re.search(r"[*?\[]", pattern) is not None


def _literal_length(pattern: str) -> int:
    return len(re.sub(r"[*?]", "", pattern))


def _literals(settings: Settings) -> tuple[str, ...]:
    """The model names that the settings spell out."""
    names = [pattern for entry in settings.classes.values() for pattern in entry.models]
    return tuple(dict.fromkeys(name for name in [*names, *settings.slots] if not _is_glob(name)))


def _mode(class_name: str, lease: Lease) -> Mode:
    if lease != "auto":
        return lease
    return "write" if class_name == "tts" else "none" if class_name == "embed" else "read"


_BUILT_IN = [
    (class_name, pattern, re.compile(translate(pattern), re.IGNORECASE | re.ASCII))
    for class_name, patterns in BUILT_IN_PATTERNS.items()
    for pattern in patterns
]


def _built_in(name: str) -> tuple[str, str] | None:
    parts = {name, name.rpartition("/")[2]}
    for class_name, pattern, compiled in _BUILT_IN:
        if any(map(compiled.match, parts)):
            return class_name, pattern
    return None
