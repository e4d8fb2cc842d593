"""Settings as text: what `check` prints, and the JSON schema of the file."""

from __future__ import annotations

from typing import Any

from proxy.settings.model import Settings
from proxy.settings.units import format_duration, format_size

_SIZES = frozenset({"max_body", "max_spool"})

_NONE = {"max_hold": "off", "switch_after": "auto", "max_turn": "auto"}

SCHEMA_NAME = "proxy.schema.json"


def shown(key: str, value: object) -> str:
    """The value of a setting as one would write it in the file; a secret only as `********`."""
    if value is None or isinstance(value, bool):
        return str(value).lower() if value is not None else _NONE.get(key, "unset")
    if isinstance(value, float):
        return format_duration(value)
    if key in _SIZES and isinstance(value, int):
        return format_size(value)
    if isinstance(value, dict):
        return _mapping(value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)  # of a SecretStr too, which hides itself


def _mapping(value: dict[str, object]) -> str:
    if set(value) == {"*"}:
        return str(value["*"])
    return ", ".join(f"{name}: {entry}" for name, entry in value.items()) or "none"


def schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of the YAML file, with defaults as one would write them."""
    made = Settings.model_json_schema()
    _without_titles(made)
    for key, entry in made["properties"].items():
        entry.pop("default", None)
        value = Settings.model_fields[key].get_default()
        if isinstance(value, str) or (isinstance(value, int) and key not in _SIZES):
            entry["default"] = value
        elif value is not None and key != "classes":
            entry["default"] = [str(item) for item in value] if isinstance(value, tuple) else shown(key, value)
    del made["$defs"]["ClassSettings"]["properties"]["max_wait"]["default"]
    made["properties"]["slots"]["default"] = 10
    for key, text in _NONE.items():
        made["properties"][key]["default"] = text
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "gpu-lease-proxy settings"}
    return head | made


def _without_titles(node: object) -> None:
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        for child in node.values():
            _without_titles(child)
    elif isinstance(node, list):
        for child in node:
            _without_titles(child)
