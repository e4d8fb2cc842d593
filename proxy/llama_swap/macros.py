"""`${NAME}` in llama-swap's configuration, replaced as llama-swap does it.

Macros are replaced one after the other, the last declared first, so that a macro may use those declared above it.
A model has `MODEL_ID` above all, then the global ones, each in its place overruled by the model's own, then what only
the model declares. A value that is nothing but a macro takes the macro's type. Keys are left alone, but for those of
`filters.setParamsByID`, and so is everything below a mapping with a key that is no text.

`PORT` and `PID` are llama-swap's own and stay as they are: nothing that is read here may depend on them.
"""

from __future__ import annotations

import re
from typing import Any

from proxy.llama_swap.environment import as_written
from proxy.llama_swap.go_yaml import NonText, go_text

Macros = dict[str, Any]

PLACEHOLDER = re.compile(r"\$\{([a-zA-Z0-9_-]+)\}")

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,63}")
_RESERVED = ("PID", "PORT", "MODEL_ID")


def with_macros(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """`raw` with all macros replaced; what is wrong with the macros themselves is added to `problems`."""
    shared = _declared(raw.get("macros"), "macros", problems)
    replaced = {key: _replace(value, shared) for key, value in raw.items() if key not in {"macros", "models"}}
    if "models" in raw:
        replaced["models"] = raw["models"]
    if isinstance(raw.get("models"), dict):
        replaced["models"] = {key: _model(key, value, shared, problems) for key, value in raw["models"].items()}
    return replaced


def _declared(raw: Any, at: str, problems: list[str]) -> Macros:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        problems.append(f"{at}: it must be a mapping of names to values")
        return {}
    for name, value in raw.items():
        why = _why_unusable(name, value)
        if why:
            problems.append(f"{at}.{as_written(name)}: {why}")
    return dict(raw)


def _why_unusable(name: str, value: Any) -> str | None:
    if not _NAME.fullmatch(name):
        return "a macro's name must be letters, digits, _ and -, at most 63"
    if name in _RESERVED:
        return "this name is llama-swap's own"
    if not isinstance(value, str | bool | int | float):
        return "a macro's value must be text, a number or a boolean"
    return "it holds itself" if f"${{{name}}}" in go_text(value) else None


def _model(key: str, raw: Any, shared: Macros, problems: list[str]) -> Any:
    if not isinstance(raw, dict):
        return raw
    own = _declared(raw.get("macros"), f"models.{as_written(key)}.macros", problems)
    macros = {"MODEL_ID": key, **shared} | own  # a name that is there already keeps its place
    rest = {name: value for name, value in raw.items() if name != "macros"}
    if not _is_text_map(rest):
        return rest
    replaced = {name: _replace(value, macros) for name, value in rest.items()}
    _replace_ids(replaced, macros, f"models.{as_written(key)}.filters.setParamsByID", problems)
    return replaced


def _replace_ids(model: dict[str, Any], macros: Macros, at: str, problems: list[str]) -> None:
    filters = model.get("filters")
    params = filters.get("setParamsByID") if isinstance(filters, dict) else None
    if not isinstance(params, dict) or not _is_text_map(params):
        return
    replaced: dict[str, Any] = {}
    for key, value in params.items():
        name = _in_text(key, macros)
        if name in replaced:
            problems.append(f"{at}: two keys become {as_written(name)!r}; keep one of them")
        if unknown := PLACEHOLDER.search(name):
            problems.append(f"{at}: unknown macro {unknown[0]} in the key {as_written(name)!r}")
        replaced[name] = value
    model["filters"] = {**model["filters"], "setParamsByID": replaced}


def _in_text(text: str, macros: Macros) -> str:
    for name in reversed(macros):
        text = text.replace(f"${{{name}}}", go_text(macros[name]))
    return text


def _is_text_map(values: dict[str, Any]) -> bool:
    return not any(isinstance(key, NonText) for key in values)


def _replace(value: Any, macros: Macros) -> Any:
    if isinstance(value, dict):
        return {key: _replace(each, macros) for key, each in value.items()} if _is_text_map(value) else value
    if isinstance(value, list):
        return [_replace(each, macros) for each in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    for name in reversed(macros):
        slug = f"${{{name}}}"
        if value == slug:
            value = macros[name]
            if not isinstance(value, str):
                return value
        elif slug in value:
            value = value.replace(slug, go_text(macros[name]))
    return value
