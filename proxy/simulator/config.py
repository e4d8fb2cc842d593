"""The part of llama-swap's configuration that decides what a request does, as frozen values.

Read are models, selectors, profiles, peers, keys, ignored paths and routing, with llama-swap's own
spelling; whatever else a configuration says is passed over. One key is ours: `simulator` on a model says
how long its server takes and how it fails (`Behaviour`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from proxy.simulator.config_text import read_values
from proxy.simulator.eviction import DEFAULT_GROUP, Group, Router
from proxy.simulator.matrix import Matrix, read_matrix

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# llama-swap's own defaults.
DEFAULT_LIMIT = 10
COMFYUI_LIMIT = 50
COMFYUI_MODEL = "comfyui_auto"
DEFAULT_IGNORE_PATHS = (r".*\.(js|json|css|png|gif|jpg|jpeg|ico|txt)$",)


class ConfigError(ValueError):
    """The configuration is one that llama-swap, too, would refuse to start with."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one model's server behaves. All times are in seconds, before the time scale."""

    load: float = 3.0
    stop: float = 0.5
    work: float = 0.5  # until the first byte of an answer
    chunks: int = 10
    chunk_interval: float = 0.1
    fail_load: bool | int = False  # every load, or the next n
    fail: str | int | None = None  # "die_mid_stream", "die_before_headers", or a status the server answers
    fail_after: int = 3  # chunks before it dies mid-stream
    fail_times: int | None = None  # None: every time
    hold: bool = False  # answers stay without their last piece until this is lifted


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    name: str = ""
    description: str = ""
    aliases: tuple[str, ...] = ()  # the keys of filters.setParamsByID are aliases too
    unlisted: bool = False
    limit: int = DEFAULT_LIMIT
    loading_state: bool = False
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    behaviour: Behaviour = Behaviour()


@dataclass(frozen=True, slots=True)
class Selector:
    id: str
    strategy: str  # pin, warm or spillover
    targets: tuple[str, ...]
    spillover: int = 1
    name: str = ""
    description: str = ""
    unlisted: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Profile:
    id: str
    description: str
    pins: Mapping[str, str]  # an empty target switches the name off


@dataclass(frozen=True, slots=True)
class Config:
    models: Mapping[str, Model]
    router: Router
    selectors: Mapping[str, Selector] = field(default_factory=dict)
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    priority: Mapping[str, int] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    ignore_paths: tuple[re.Pattern[str], ...] = ()
    list_aliases: bool = False


def load_config(path: Path) -> Config:
    return parse_config(path.read_text(encoding="utf-8"))


def default_config() -> Config:
    return parse_config(DEFAULT)


def parse_config(text: str) -> Config:
    """The configuration in `text`.

    Raises:
        ConfigError: where llama-swap would not start.
    """
    try:
        raw = read_values(text)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    loading_state = bool(raw.get("sendLoadingState", False))
    models = {str(key): _model(str(key), value or {}, loading_state) for key, value in _map(raw, "models")}
    return Config(
        models=models,
        router=_router(raw, models),
        selectors={str(key): _selector(str(key), value) for key, value in _map(raw, "selectors")},
        profiles={str(key): _profile(str(key), value or {}) for key, value in _map(raw, "profiles")},
        peers={str(key): tuple(map(str, value.get("models", ()))) for key, value in _map(raw, "peers")},
        priority=_priority(raw),
        api_keys=tuple(map(str, raw.get("apiKeys") or ())),
        ignore_paths=tuple(
            re.compile(pattern) for pattern in _dig(raw, "upstream", "ignorePaths") or DEFAULT_IGNORE_PATHS
        ),
        list_aliases=bool(raw.get("includeAliasesInList", False)),
    )


def behaviour_from(raw: Mapping[str, Any], base: Behaviour = Behaviour()) -> Behaviour:
    """`base` with the values of a `simulator` section laid over it."""
    unknown = set(raw) - {each.name for each in fields(Behaviour)}
    if unknown:
        raise ConfigError(f"simulator: unknown key {min(unknown)!r}")
    return replace(base, **raw)


def _map(raw: Mapping[str, Any], key: str) -> list[tuple[Any, Any]]:
    return list((raw.get(key) or {}).items())


def _dig(raw: Mapping[str, Any], *keys: str) -> Any:
    value: Any = raw
    for key in keys:
        value = (value or {}).get(key)
    return value


def _model(model_id: str, raw: Mapping[str, Any], loading_state: bool) -> Model:
    aliases = [str(alias) for alias in raw.get("aliases") or ()]
    by_id = _dig(raw, "filters", "setParamsByID") or {}
    aliases += [key for key in map(str, by_id) if key != model_id and key not in aliases]
    limit = int(raw.get("concurrencyLimit") or DEFAULT_LIMIT)
    return Model(
        id=model_id,
        name=str(raw.get("name") or ""),
        description=str(raw.get("description") or ""),
        aliases=tuple(aliases),
        unlisted=bool(raw.get("unlisted", False)),
        limit=max(limit, COMFYUI_LIMIT) if model_id == COMFYUI_MODEL else limit,
        loading_state=bool(raw.get("sendLoadingState", loading_state)),
        capabilities=raw.get("capabilities") or {},
        metadata=raw.get("metadata") or {},
        behaviour=behaviour_from(raw.get("simulator") or {}),
    )


def _selector(selector_id: str, raw: Mapping[str, Any]) -> Selector:
    strategy = str(raw.get("strategy") or "")
    if strategy not in {"pin", "warm", "spillover"}:
        raise ConfigError(f"selectors.{selector_id}.strategy: unknown strategy {strategy!r}")
    targets = tuple(map(str, raw.get("targets") or ()))
    if not targets:
        raise ConfigError(f"selectors.{selector_id}.targets must contain at least one entry")
    return Selector(
        id=selector_id,
        strategy=strategy,
        targets=targets,
        spillover=int(_dig(raw, "settings", "spillover") or 1),
        name=str(raw.get("name") or ""),
        description=str(raw.get("description") or ""),
        unlisted=bool(raw.get("unlisted", False)),
        metadata=raw.get("metadata") or {},
    )


def _profile(profile_id: str, raw: Mapping[str, Any]) -> Profile:
    pins = {str(pin): str(target or "") for pin, target in (raw.get("pins") or {}).items()}
    return Profile(profile_id, str(raw.get("description") or ""), pins)


def _priority(raw: Mapping[str, Any]) -> dict[str, int]:
    values = _dig(raw, "routing", "scheduler", "settings", "fifo", "priority") or {}
    return {str(model): int(value) for model, value in values.items()}


def _router(raw: Mapping[str, Any], models: Mapping[str, Model]) -> Router:
    matrix, groups = raw.get("matrix"), raw.get("groups")
    router = _dig(raw, "routing", "router") or {}
    if (matrix or groups) and router:
        raise ConfigError("config uses both the top-level matrix or groups and routing.router")
    settings = router.get("settings") or {}
    if router.get("use") == "matrix":
        matrix = settings.get("matrix")
        if not matrix:
            raise ConfigError("routing.router.use is matrix but routing.router.settings.matrix is not set")
    elif not matrix:
        groups = groups or settings.get("groups")
    if matrix and groups:
        raise ConfigError("config cannot use both groups and matrix")
    if matrix:
        return _matrix(matrix, models)
    return _groups(groups or {}, models)


def _matrix(raw: Mapping[str, Any], models: Mapping[str, Model]) -> Matrix:
    try:
        return read_matrix(
            sets={str(name): str(text) for name, text in (raw.get("sets") or {}).items()},
            variables={str(name): str(model) for name, model in (raw.get("vars") or {}).items()},
            costs={str(name): int(cost) for name, cost in (raw.get("evict_costs") or {}).items()},
            models=frozenset(models),
        )
    except ValueError as error:
        raise ConfigError(f"matrix: {error}") from error


def _groups(raw: Mapping[str, Any], models: Mapping[str, Model]) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    taken: set[str] = set()
    for name, values in raw.items():
        members = frozenset(map(str, values.get("members") or ()))
        if members & taken or not members <= set(models):
            raise ConfigError(f"groups.{name}: a member is unknown, or in two groups")
        taken |= members
        groups[str(name)] = Group(
            members,
            swap=bool(values.get("swap", True)),
            exclusive=bool(values.get("exclusive", True)),
            persistent=bool(values.get("persistent", False)),
        )
    groups[DEFAULT_GROUP] = Group(frozenset(models) - taken)
    return groups


# Five models that exclude one another, as on a card with room for one of them, and a small one beside all.
DEFAULT = """
models:
  chat-a:
    aliases: [gpt-4o]
    simulator: {load: 3, work: 0.3, chunks: 20, chunk_interval: 0.1}
  chat-b:
    simulator: {load: 3, work: 0.3, chunks: 20, chunk_interval: 0.1}
  vision-a:
    capabilities: {in: [text, image], out: [text]}
    simulator: {load: 4, work: 0.6, chunks: 20, chunk_interval: 0.1}
  tts-a:
    capabilities: {in: [text], out: [audio]}
    simulator: {load: 2, work: 1, chunks: 4, chunk_interval: 0.1}
  whisper-a:
    capabilities: {in: [audio], out: [text]}
    simulator: {load: 1, work: 0.8}
  embed-a:
    simulator: {load: 0.5, work: 0.05}
routing:
  router:
    use: matrix
    settings:
      matrix:
        sets:
          home: (chat-a | chat-b | vision-a | tts-a | whisper-a) & embed-a
"""
