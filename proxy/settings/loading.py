"""From the sources to `Settings`, or to every mistake at once.

A first reading judges each value alone. Where values fail, a second one, without them, still finds what the others
contradict: nobody should have to start the program once per mistake.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from proxy.errors import SettingsError
from proxy.settings.environment import CONFIG_VARIABLE, read_environment
from proxy.settings.layers import SECRETS, Layer, Location, dotted, nearest, overlay
from proxy.settings.model import ClassSettings, Contradiction, Settings
from proxy.settings.yaml_file import read_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

_SHOWN = 60  # characters of a wrong value; enough to recognise it in a line of a terminal

_RIGHT = {
    "literal_error": "it must be {expected}",
    "greater_than": "it must be more than {gt:g}",
    "greater_than_equal": "it must be at least {ge:g}",
    "less_than_equal": "it must be at most {le:g}",
    "string_type": "it must be text; put it in quotes",
    "tuple_type": "it must be a list",
    "dict_type": "it must be a mapping of keys to values",
    "model_type": "it must be a mapping of keys to values",
    "model_attributes_type": "it must be a mapping of keys to values",
    "path_type": "it must be the path of a directory",
    "bool_parsing": "it must be true or false",
    "bool_type": "it must be true or false",
}


def load(config: Path | None, environ: Mapping[str, str]) -> Settings:
    """The settings of the file `config`, else of the one GPU_LEASE_CONFIG names, under the variables of `environ`.

    Raises SettingsError with one line per mistake.
    """
    return read(config, environ)[0]


def read(config: Path | None, environ: Mapping[str, str]) -> tuple[Settings, Layer]:
    """As `load`, with the layer that tells where each value was written. Raises SettingsError."""
    named = environ.get(CONFIG_VARIABLE, "").strip()
    path = config or (Path(os.path.expanduser(named)) if named else None)
    layer = read_file(path) if path else Layer()
    layer = overlay(layer, read_environment(environ, Settings.model_fields))
    return _checked(layer), layer


def _checked(layer: Layer) -> Settings:
    problems = list(layer.problems)
    contradictions: list[Contradiction] = []
    wrong: set[str] = set()
    try:
        settings = Settings.of(layer, contradictions)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        problems += [_line(layer, mistake) for mistake in mistakes]
        wrong = {str(mistake["loc"][0]) for mistake in mistakes}
        rest = {key: value for key, value in layer.values.items() if key not in wrong}
        settings = Settings.of(Layer(rest), contradictions)
    problems += [
        _sentence(layer, tuple(found.key.split(".")), None, found.text)
        for found in contradictions
        if not wrong & {found.key, *found.others}
    ]
    problems += _unusable_paths(layer, settings)
    if problems:
        raise SettingsError(list(dict.fromkeys(problems)))
    return settings


def _line(layer: Layer, mistake: ErrorDetails) -> str:
    at = tuple(step for step in mistake["loc"] if step != "[key]")
    if mistake["type"] == "extra_forbidden":
        known = ClassSettings.model_fields if at[0] == "classes" else Settings.model_fields
        meant = dotted((*at[:-1], nearest(str(at[-1]), known)))
        return f"{dotted(at)} ({layer.origin(at)}): unknown key; did you mean {meant}?"
    context: dict[str, Any] = mistake.get("ctx", {})
    right = str(context["error"]) if "error" in context else _RIGHT.get(mistake["type"], mistake["msg"])
    return _sentence(layer, at, mistake["input"], right.format(**context) if "error" not in context else right)


def _sentence(layer: Layer, at: Location, value: object, right: str) -> str:
    shown = "" if _is_secret(at, value) else f"got {_short(value)}; "
    return f"{dotted(at)} ({layer.origin(at)}): {shown}{right}"


def _is_secret(at: Location, value: object) -> bool:
    """Whether the value must not be shown, or there is none to show."""
    return value is None or at[0] in SECRETS or (at[0] == "upstream_url" and "@" in str(value))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _unusable_paths(layer: Layer, settings: Settings) -> list[str]:
    # os.path, since pathlib raises for a name that is too long or behind a directory that must not be read.
    problems = []
    for key in ("spool_dir", "data_dir"):
        path = getattr(settings, key)
        if path is not None and not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
            problems.append(
                f"{key} ({layer.origin((key,))}): {path} must be a directory that exists and can be written to"
            )
    if (config := settings.llama_swap_config) is not None and not os.path.exists(config):
        where = layer.origin(("llama_swap_config",))
        problems.append(f"llama_swap_config ({where}): {config} must be a file or a directory that exists")
    return problems
