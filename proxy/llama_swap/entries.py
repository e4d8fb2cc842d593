"""Models, selectors, profiles, peers, keys and ignored paths of llama-swap's configuration, each read by itself.

Whether they agree with one another is for `checks.py`.
"""

from __future__ import annotations

import re
import warnings
from typing import Any, cast

from proxy.llama_swap.fields import Fields
from proxy.llama_swap.go_yaml import NonText
from proxy.llama_swap.model import (
    COMFYUI_MODEL,
    COMFYUI_SLOTS,
    DEFAULT_SLOTS,
    IGNORED_BY_DEFAULT,
    Capabilities,
    LocalModel,
    Pins,
    Selector,
    Strategy,
)

_MODALITIES = frozenset({"text", "audio", "image"})
_STRATEGIES = ("pin", "warm", "spillover")
_MODEL_KEYS = frozenset(
    (
        *("cmd", "cmdStop", "proxy", "aliases", "env", "checkEndpoint", "ttl", "unloadTimeout", "unlisted"),
        *("useModelName", "name", "description", "concurrencyLimit", "filters", "macros", "metadata"),
        *("sendLoadingState", "timeouts", "compat", "capabilities", "healthCheckTimeout"),
    )
)


def read_models(raw: Any, fields: Fields) -> dict[str, LocalModel]:
    """The section `models`."""
    models = {}
    for key, value in fields.mapping(raw, "models").items():
        if isinstance(key, NonText):
            fields.wrong("models", f"the id {key} is read as a number or the like, and llama-swap then has no model "
                         f'at all; write it as "{key}"')  # fmt: skip
            continue
        model_id = fields.text(key, "models", needed=True)
        models[model_id] = _model(model_id, value, fields)
    return models


def _model(model_id: str, raw: Any, fields: Fields) -> LocalModel:
    at = f"models.{model_id}"
    values = fields.mapping(raw, at)
    fields.unknown(values, _MODEL_KEYS, at)
    params = fields.mapping(fields.mapping(values.get("filters"), f"{at}.filters").get("setParamsByID"), at)
    ids = [fields.text(key, f"{at}.filters.setParamsByID", needed=True) for key in params]
    own = fields.texts(values.get("aliases"), f"{at}.aliases", needed=True)
    compat = fields.mapping(values.get("compat"), f"{at}.compat")
    slots = fields.whole(values.get("concurrencyLimit"), f"{at}.concurrencyLimit", 0)
    comfyui = model_id == COMFYUI_MODEL
    return LocalModel(
        id=model_id,
        aliases=own + tuple(name for name in ids if name != model_id and name not in own),
        set_params_ids=tuple(ids),
        slots=max(slots, COMFYUI_SLOTS) if comfyui else slots if slots > 0 else DEFAULT_SLOTS,
        capabilities=_capabilities(values.get("capabilities"), f"{at}.capabilities", fields),
        unlisted=fields.flag(values.get("unlisted"), f"{at}.unlisted", default=False),
        ignore_websockets=comfyui or fields.flag(compat.get("ignoreWebsockets"), f"{at}.compat", default=False),
    )


def _capabilities(raw: Any, at: str, fields: Fields) -> Capabilities:
    values = fields.mapping(raw, at)
    ways = {way: frozenset(fields.texts(values.get(way), f"{at}.{way}")) for way in ("in", "out")}
    for way, given in ways.items():
        for unknown in sorted(given - _MODALITIES):
            fields.wrong(f"{at}.{way}", f"{unknown!r} must be text, audio or image")
    return Capabilities(
        inputs=ways["in"],
        outputs=ways["out"],
        tools=fields.flag(values.get("tools"), f"{at}.tools", default=False),
        reranker=fields.flag(values.get("reranker"), f"{at}.reranker", default=False),
    )


def read_selectors(raw: Any, fields: Fields) -> dict[str, Selector]:
    """The section `selectors`."""
    selectors = {}
    for name, value in fields.items(raw, "selectors"):
        at = f"selectors.{name}"
        values = fields.mapping(value, at)
        strategy = fields.text(values.get("strategy"), f"{at}.strategy", needed=True)
        targets = fields.texts(values.get("targets"), f"{at}.targets", needed=True)
        if strategy not in _STRATEGIES:
            fields.wrong(f"{at}.strategy", f"it must be pin, warm or spillover, not {strategy!r}")
        elif not targets:
            fields.wrong(f"{at}.targets", "it must name at least one model")
        else:
            settings = fields.mapping(values.get("settings"), f"{at}.settings")
            spillover = fields.whole(settings.get("spillover"), f"{at}.settings.spillover", 1)
            if strategy == "spillover" and spillover < 1:
                fields.wrong(f"{at}.settings.spillover", "it must be at least 1")
            selectors[name] = Selector(name, cast(Strategy, strategy), targets)
    return selectors


def read_profiles(raw: Any, fields: Fields) -> dict[str, Pins]:
    """The section `profiles`."""
    profiles: dict[str, Pins] = {}
    for name, value in fields.items(raw, "profiles"):
        at = f"profiles.{name}"
        if not name.strip():
            fields.wrong("profiles", "a profile's name must not be empty")
        pins = fields.items(fields.mapping(value, at).get("pins"), f"{at}.pins")
        if not pins:
            fields.wrong(f"{at}.pins", "it must hold at least one name")
        profiles[name] = {pin: fields.text(target, f"{at}.pins.{pin}", needed=True) for pin, target in pins}
    return profiles


def read_peers(raw: Any, fields: Fields) -> dict[str, tuple[str, ...]]:
    """The section `peers`: what each of them serves."""
    peers = {}
    for name, value in fields.items(raw, "peers"):
        values = fields.mapping(value, f"peers.{name}")
        models = fields.texts(values.get("models"), f"peers.{name}.models", needed=True)
        if value is not None and not models:
            fields.wrong(f"peers.{name}.models", "it must name at least one model")
        if value is not None and not values.get("proxy"):
            fields.wrong(f"peers.{name}.proxy", "it must be the peer's address")
        peers[name] = tuple(dict.fromkeys(models))
    return peers


def read_api_keys(raw: Any, fields: Fields) -> tuple[str, ...]:
    """The list `apiKeys`; no key ever stands in a message."""
    keys = fields.texts(raw, "apiKeys", needed=True)
    if any(not key or " " in key for key in keys):
        fields.wrong("apiKeys", "a key must not be empty, and must hold no space")
    return keys


def read_ignored_paths(raw: Any, fields: Fields) -> tuple[re.Pattern[str], ...]:
    """`upstream.ignorePaths`. One that cannot be used here is noted: what it fits takes a lease like anything else."""
    at = "upstream.ignorePaths"
    given = fields.mapping(raw, "upstream").get("ignorePaths")
    patterns = fields.texts(given, at)
    if not patterns and not given:
        return (re.compile(IGNORED_BY_DEFAULT, re.ASCII),)
    found = [(pattern, _compiled(pattern)) for pattern in patterns]
    for pattern, compiled in found:
        if compiled is None:
            fields.note(at, f"{pattern!r} cannot be used here, so that such paths take a lease")
    return tuple(compiled for _, compiled in found if compiled is not None)


# What Go and Python read differently, apart from `$`, which is the end of the text in Go.
_UNLIKE = re.compile(r"\\[pPQECzZG0-9]|\(\?(?![:Pis)])|\[\[:|\(\?[a-zA-Z]*[msU]|\{,")


def _compiled(pattern: str) -> re.Pattern[str] | None:
    if _UNLIKE.search(pattern):
        return None
    ours = re.sub(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|\$", lambda match: match[1] or r"\Z", pattern, flags=re.DOTALL)
    ours = re.sub(r"^\.\*(?![*+?{])", "", ours)  # a search skips what comes before anyway, and in linear time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return re.compile(ours, re.ASCII)
    except (re.error, Warning):
        return None
