"""From the text of a configuration to plain values: the environment, YAML as Go reads it, macros.

`${env.NAME}` is replaced in the text as a whole, other macros in keys and values afterwards. A model's own
macros come before the global ones, and `MODEL_ID` is among them. Names that are not known (`PORT`, `PID`)
stay as they are: nothing here depends on them.
"""

from __future__ import annotations

import os
import re
from typing import Any

import yaml

_ENVIRONMENT = re.compile(r"\$\{env\.([A-Za-z_]\w*)\}")
_MACRO = re.compile(r"\$\{([\w-]+)\}")
# Macros may hold macros; llama-swap forbids circles, and this bound ends them.
MAX_DEPTH = 10


class _Loader(yaml.SafeLoader):
    """As Go's YAML reads: `yes`, `no`, `on`, `off` and `1:30` are text."""


_OTHERS = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":int"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_implicit_resolvers = _OTHERS
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|True|TRUE|false|False|FALSE)$"), [*"tTfF"])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0x[0-9a-fA-F_]+|[0-9][0-9_]*)$"), [*"-+0123456789"]
)


def read_values(text: str) -> dict[str, Any]:
    """The values in `text`.

    Raises:
        ValueError: it is no YAML mapping, or names an environment variable that is not set.
    """
    try:
        raw = yaml.load(_with_environment(text), Loader=_Loader) or {}  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(raw, dict):
        raise ValueError("the configuration must be a mapping")  # noqa: TRY004 - as for all other mistakes
    return _with_macros(raw)


def _with_environment(text: str) -> str:
    """`text` with its environment variables; comments may name ones that are not set."""
    lines = []
    for line in text.splitlines(keepends=True):
        code = line if not re.match(r"\s*#", line) else ""
        for name in _ENVIRONMENT.findall(code):
            if name not in os.environ:
                raise ValueError(f"environment variable '{name}' is not set")
        lines.append(_ENVIRONMENT.sub(lambda match: os.environ.get(match[1], match[0]), line))
    return "".join(lines)


def _with_macros(raw: dict[str, Any]) -> dict[str, Any]:
    """`raw` with all macros replaced in its models, and the global ones everywhere else."""
    shared = raw.get("macros") or {}
    models = raw.get("models") or {}
    replaced: dict[str, Any] = _replace({key: value for key, value in raw.items() if key != "models"}, shared)
    replaced["models"] = {
        name: _replace(model or {}, {**shared, **((model or {}).get("macros") or {}), "MODEL_ID": name})
        for name, model in models.items()
    }
    return replaced


def _replace(value: Any, macros: dict[str, Any], depth: int = 0) -> Any:
    if isinstance(value, dict):
        return {_replace(key, macros): _replace(each, macros) for key, each in value.items()}
    if isinstance(value, list):
        return [_replace(each, macros) for each in value]
    if not isinstance(value, str) or depth > MAX_DEPTH:
        return value
    whole = _MACRO.fullmatch(value)
    if whole is not None and whole[1] in macros:
        return _replace(macros[whole[1]], macros, depth + 1)
    text = _MACRO.sub(lambda match: str(macros.get(match[1], match[0])), value)
    return text if text == value else _replace(text, macros, depth + 1)
