"""From a model's names to its class, by evidence.

Best first: the settings' names and patterns; the capabilities that llama-swap's configuration gives the model; the
built-in patterns; the route; the default class. An exact name beats a pattern and a longer pattern a shorter one. The
server that a model's command starts is no evidence. No guess leads to mode none: the embeddings routes are no evidence,
and among the built-in patterns those of `embed` come last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from itertools import chain
from typing import Generic, TypeVar

from proxy.llama_swap import Capabilities, capability_class
from proxy.settings import Settings

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


class ClassRules:
    """What the settings say of classes."""

    def __init__(self, settings: Settings) -> None:
        self.names = tuple(settings.classes)
        self.literals = _literals(settings)
        self._default = settings.default_class
        owners = {pattern: name for name, entry in settings.classes.items() for pattern in entry.models}
        self._owners = Patterns(owners)

    def decide(
        self, names: Iterable[str], capabilities: Capabilities | None, hint: str | None
    ) -> tuple[str, str, bool]:
        """(class, evidence in words, whether the route decided) of a model with these names, the best first."""
        names = tuple(names)
        if found := self._owners.find(*names):
            pattern, class_name = found
            return class_name, f"classes.{class_name}.models has {pattern}", False
        if capabilities is not None and (by_capability := capability_class(capabilities)):
            return by_capability, "capabilities in llama-swap's configuration", False
        for name in names:
            if built_in := _built_in(name):
                return built_in[0], f"built-in pattern {built_in[1]}", False
        if hint is not None:
            return hint, f"{hint} route", True
        return self._default, "default_class", True


class Patterns(Generic[T]):
    """Values by name or by pattern."""

    def __init__(self, entries: Mapping[str, T]) -> None:
        self._entries = dict(entries)
        globs = sorted(filter(_is_glob, entries), key=_literal_length, reverse=True)
        self._globs = [(pattern, re.compile(translate(pattern))) for pattern in globs]

    def find(self, *names: str) -> tuple[str, T] | None:
        """The entry that fits one of a model's `names` best, with its pattern; the earlier name counts more."""
        exact = (name for name in names if name in self._entries)
        globs = (pattern for name in names for pattern, compiled in self._globs if compiled.match(name))
        best = next(chain(exact, globs), None)
        return None if best is None else (best, self._entries[best])


def _is_glob(pattern: str) -> bool:
    return re.search(r"[*?\[]", pattern) is not None


def _literal_length(pattern: str) -> int:
    return len(re.sub(r"[*?]", "", pattern))


def _literals(settings: Settings) -> tuple[str, ...]:
    """The model names that the settings spell out."""
    names = [pattern for entry in settings.classes.values() for pattern in entry.models]
    return tuple(dict.fromkeys(name for name in [*names, *settings.slots] if not _is_glob(name)))


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
