"""What llama-swap tells about its models: `/v1/models`, `/running`, and the snapshots in `/api/events`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.simulator.config import Config, Model
    from proxy.simulator.names import Names


def model_list(config: Config, names: Names, states: Mapping[str, str]) -> dict[str, Any]:
    records = [*_models(config, states), *_peers(config), *_selectors(config, names, states)]
    profile = config.profiles.get(names.active_profile)
    if profile is not None:
        listed = {record["id"] for record in records}
        pins = [pin for pin, target in profile.pins.items() if target and not names.is_name(pin)]
        records += [_record(pin, "unloaded", {"type": "profile"}) for pin in pins if pin not in listed]
    return {"object": "list", "data": sorted(records, key=lambda record: str(record["id"]))}


def running(config: Config, states: Mapping[str, str]) -> dict[str, Any]:
    return {
        "running": [
            {
                "model": model, "state": states[model], "cmd": "", "proxy": "", "ttl": 0,
                "name": config.models[model].name, "description": config.models[model].description,
            }
            for model in sorted(states)
            if states[model] != "stopped"
        ]
    }  # fmt: skip


def snapshot(config: Config, states: Mapping[str, str]) -> list[dict[str, Any]]:
    """All models, whatever their state, as an event of type modelStatus carries them."""
    entries = []
    for model in sorted(config.models.values(), key=lambda each: each.id):
        entry = {
            "id": model.id, "name": model.name, "description": model.description,
            "state": states[model.id], "unlisted": model.unlisted, "peerID": "",
        }  # fmt: skip
        optional = {
            "aliases": list(model.aliases),
            "capabilities": _capabilities(model),
            "context_length": model.capabilities.get("context"),
        }
        entries.append(entry | {key: value for key, value in optional.items() if value})
    for peer, models in config.peers.items():
        entries += [
            {"id": f"{peer}/{model}", "name": "", "description": "", "state": "", "unlisted": False, "peerID": peer}
            for model in models
        ]
    return entries


def _models(config: Config, states: Mapping[str, str]) -> list[dict[str, Any]]:
    records = []
    for model in config.models.values():
        if model.unlisted:
            continue
        status = "unloaded" if states[model.id] == "stopped" else "loaded"
        about = {"type": "model"} | ({"aliases": list(model.aliases)} if model.aliases else {})
        records.append(_described(model, model.id, status, about))
        if config.list_aliases:
            about = {"type": "alias", "modelID": model.id}
            records += [_described(model, alias, status, about) for alias in model.aliases]
    return records


def _peers(config: Config) -> list[dict[str, Any]]:
    return [
        _record(f"{peer}/{model}", "unloaded", {"type": "peer", "peerID": peer}, name=f"{peer}: {model}")
        for peer, models in config.peers.items()
        for model in models
    ]


def _selectors(config: Config, names: Names, states: Mapping[str, str]) -> list[dict[str, Any]]:
    records = []
    for selector in config.selectors.values():
        if selector.unlisted:
            continue
        asked = selector.targets[:1] if selector.strategy == "pin" else selector.targets
        local = [found.model for found in map(names.base, asked) if found is not None and not found.peer]
        up = any(states[model] in {"ready", "starting"} for model in local)
        about: dict[str, Any] = {"type": "selector", "strategy": selector.strategy, "targets": list(selector.targets)}
        if selector.strategy == "spillover":
            about["spillover"] = selector.spillover
        status = "loaded" if up else "unloaded"
        records.append(
            _record(selector.id, status, {**selector.metadata, **about}, selector.name, selector.description)
        )
    return records


def _record(model_id: str, status: str, about: dict[str, Any], name: str = "", description: str = "") -> dict[str, Any]:
    record = {
        "id": model_id, "object": "model", "created": int(time.time()), "owned_by": "llama-swap",
        "status": {"value": status}, "meta": {"llamaswap": about},
    }  # fmt: skip
    named = {"name": name.strip(), "description": description.strip()}
    return record | {key: value for key, value in named.items() if value}


def _described(model: Model, model_id: str, status: str, about: dict[str, Any]) -> dict[str, Any]:
    record = _record(model_id, status, {**model.metadata, **about}, model.name, model.description)
    given, taken = list(model.capabilities.get("in") or ()), list(model.capabilities.get("out") or ())
    architecture: dict[str, Any] = {}
    if given:
        architecture["input_modalities"] = given
    if taken:
        architecture["output_modalities"] = taken
    if given and taken:
        architecture["modality"] = "+".join(given) + "->" + "+".join(taken)
    optional: dict[str, Any] = {"architecture": architecture, "capabilities": _capabilities(model)}
    if model.capabilities.get("tools"):
        optional["supported_parameters"] = ["tools", "tool_choice"]
    if model.capabilities.get("context"):
        record["context_length"] = record["meta"]["n_ctx"] = model.capabilities["context"]
    return record | {key: value for key, value in optional.items() if value}


def _capabilities(model: Model) -> dict[str, bool]:
    given, taken = set(model.capabilities.get("in") or ()), set(model.capabilities.get("out") or ())
    able = {
        "vision": "image" in given,
        "audio_transcriptions": "audio" in given and "text" in taken,
        "audio_speech": "text" in given and "audio" in taken,
        "image_generation": "text" in given and "image" in taken,
        "image_to_image": "image" in given and "image" in taken,
        "function_calling": bool(model.capabilities.get("tools")),
        "reranker": bool(model.capabilities.get("reranker")),
    }
    return {name: True for name, value in able.items() if value}
