"""`${env.NAME}` in llama-swap's configuration, which stands for *its* environment, not ours.

llama-swap replaces it in the text, before it is read as YAML, and does not start if one is not set. Here an unset one
becomes a mark in its place, so that everything around it can be read; whoever reads a value decides whether the mark
matters there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_VARIABLE = re.compile(r"\$\{env\.([a-zA-Z_][a-zA-Z0-9_]*)\}")
# Characters of private use: text in YAML wherever they stand, also inside [ ] and { }.
_MARK = re.compile("\ue000([a-zA-Z0-9_]*)\ue001")
_UNUSABLE = re.compile(r"[\n\r\x00]")


def with_environment(text: str, environ: Mapping[str, str]) -> str:
    """`text` with what is set, escaped as llama-swap does for the inside of double quotes, and marks for the rest."""

    def replacement(match: re.Match[str]) -> str:
        value = environ.get(match[1])
        if value is None or _UNUSABLE.search(value):  # llama-swap refuses a line break in a value
            return f"\ue000{match[1]}\ue001"
        return value.replace("\\", "\\\\").replace('"', '\\"')

    return _VARIABLE.sub(replacement, text)


def unset_in(value: Any) -> list[str]:
    """The names of the variables in `value`, at any depth, that are not set."""
    if isinstance(value, str):
        return _MARK.findall(value)
    if isinstance(value, dict):
        return [name for key, each in value.items() for name in unset_in(key) + unset_in(each)]
    if isinstance(value, list):
        return [name for each in value for name in unset_in(each)]
    return []


def as_written(text: str) -> str:
    """`text` with its marks turned back, for messages."""
    return _MARK.sub(r"${env.\1}", text)
