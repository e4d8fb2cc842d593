"""Values of llama-swap's configuration in the types that it wants, converted as its YAML library does.

Any scalar can be text, and a number's text is Go's. A float can be a whole number, which cuts it off. Beside `true`
and `false` a boolean can be `yes`, `no`, `on` or `off`. Null keeps the default, and is dropped from a list of texts.

Where a value holds a variable that is not set here there are two ways. In a name, in routing and in keys it is a
mistake, since nothing right could be said of any request (`needed`). Anywhere else the default is taken, and noted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from proxy.llama_swap.environment import as_written, unset_in
from proxy.llama_swap.go_yaml import go_text
from proxy.llama_swap.macros import PLACEHOLDER

_TRUE = frozenset(("y", "Y", "yes", "Yes", "YES", "on", "On", "ON"))
_FALSE = frozenset(("n", "N", "no", "No", "NO", "off", "Off", "OFF"))


@dataclass(slots=True)
class Fields:
    """Reads values and collects what is wrong with them, in sentences that begin with where it stands."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def wrong(self, at: str, text: str) -> None:
        """Something here makes the configuration unusable, for llama-swap or for us."""
        self.problems.append(as_written(f"{at}: {text}"))

    def note(self, at: str, text: str) -> None:
        """Something here is passed over."""
        self.notes.append(as_written(f"{at}: {text}"))

    def mapping(self, value: Any, at: str) -> dict[str, Any]:
        """A mapping; its keys are not looked at."""
        if value is None or isinstance(value, dict):
            return value or {}
        if not self._unset(value, at):
            self.wrong(at, "it must be a mapping of keys to values")
        return {}

    def items(self, value: Any, at: str) -> list[tuple[str, Any]]:
        """A mapping whose keys are names."""
        return [(self.text(key, at, needed=True), each) for key, each in self.mapping(value, at).items()]

    def text(self, value: Any, at: str, *, needed: bool = False) -> str:
        """A text; empty where there is none, or none that can be known."""
        if isinstance(value, dict | list):
            self.wrong(at, "it must be text")
            return ""
        text = go_text(value)
        if self._unset(text, at, needed=needed):
            return ""
        if unknown := PLACEHOLDER.search(text):
            self.wrong(at, f"the macro {unknown[0]} is not known here")
        return text

    def texts(self, value: Any, at: str, *, needed: bool = False) -> tuple[str, ...]:
        """A list of texts."""
        if value is None:
            return ()
        if not isinstance(value, list):
            if not self._unset(value, at, needed=needed):
                self.wrong(at, "it must be a list")
            return ()
        known = [item for item in value if item is not None and not self._unset(item, at, needed=needed)]
        return tuple(self.text(item, at) for item in known)

    def flag(self, value: Any, at: str, default: bool, *, needed: bool = False) -> bool:
        """A boolean."""
        if value is None or self._unset(value, at, needed=needed):
            return default
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value in _TRUE | _FALSE:
            return value in _TRUE
        self.wrong(at, f"it must be true or false, not {_short(value)}")
        return default

    def whole(self, value: Any, at: str, default: int, *, needed: bool = False) -> int:
        """A whole number."""
        if value is None or self._unset(value, at, needed=needed):
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:
            return int(value)
        self.wrong(at, f"it must be a whole number, not {_short(value)}")
        return default

    def unknown(self, values: dict[str, Any], known: frozenset[str], at: str) -> None:
        """Note the keys that llama-swap does not have; it passes them over too."""
        names = [as_written(key) for key in values if key not in known]
        if names:
            self.note(at or "top level", f"unknown: {', '.join(names)}")

    def _unset(self, value: Any, at: str, *, needed: bool = False) -> bool:
        """Whether a variable in this value is not set, and say so."""
        names = unset_in(value)
        if names and needed:
            self.wrong(at, f"the environment variable {names[0]} is not set here; set it as for llama-swap")
        elif names:
            self.note(at, f"${{env.{names[0]}}} is not set here, so this is passed over")
        return bool(names)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
