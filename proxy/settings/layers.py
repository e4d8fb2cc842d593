"""What one source of settings says, and how sources lie on top of one another.

A `Layer` holds nested values, where each of them was written, and what is wrong with the writing itself. No value is
judged here, that is for `model.py`; and nothing stops at the first mistake.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

SECRETS = ("upstream_api_key", "api_keys")
"""Keys whose values are never shown."""

CLASS_KEYS = ("lease", "models", "max_wait")

Location = tuple[str | int, ...]
"""The keys and list indexes that lead to a value."""


@dataclass(slots=True)
class Layer:
    """What one source says; `origins` names the place of each value by its location."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Location, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def origin(self, at: Location) -> str:
        """Where the value at this location was written; for a part of a value, where the whole was."""
        while at and at not in self.origins:
            at = at[:-1]
        return self.origins.get(at, "default")


def overlay(below: Layer, above: Layer) -> Layer:
    """`above` wins, key by key; only `classes` are merged, since each key of a class is a setting of its own."""
    values = {**below.values, **above.values}
    hidden = {key for key in above.values if key != "classes"}
    lower, upper = below.values.get("classes"), above.values.get("classes")
    if isinstance(lower, dict) and isinstance(upper, dict):
        values["classes"] = {**lower, **{name: _merged(lower.get(name), entry) for name, entry in upper.items()}}
    origins = {at: where for at, where in below.origins.items() if at[:1] and at[0] not in hidden}
    return Layer(values, {**origins, **above.origins}, below.problems + above.problems)


def _merged(below: object, above: object) -> object:
    return {**below, **above} if isinstance(below, dict) and isinstance(above, dict) else above


def dotted(at: Location) -> str:
    """A location as people write it: `classes.tts.models[0]`."""
    text = ""
    for step in at:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is spelled most like `name`."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
