"""What is known of llama-swap's configuration once it has been read: frozen values, without its spelling."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from proxy.router import GroupRouter, MatrixRouter

DEFAULT_SLOTS = 10
"""llama-swap's default for `concurrencyLimit`."""

COMFYUI_MODEL = "comfyui_auto"
COMFYUI_SLOTS = 50
"""llama-swap gives the model behind /comfyui/ at least so many."""

IGNORED_BY_DEFAULT = r"\.(js|json|css|png|gif|jpg|jpeg|ico|txt)\Z"
"""llama-swap's default for `upstream.ignorePaths`, with `$` as Go means it and without a `.*` in front."""

Strategy = Literal["pin", "warm", "spillover"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model takes and gives, out of text, audio and image, as far as its owner has said."""

    inputs: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    tools: bool = False
    reranker: bool = False


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that llama-swap runs itself. `set_params_ids` are aliases too, and stand in `aliases`."""

    id: str
    aliases: tuple[str, ...] = ()
    set_params_ids: tuple[str, ...] = ()
    slots: int = DEFAULT_SLOTS
    capabilities: Capabilities = Capabilities()
    unlisted: bool = False
    ignore_websockets: bool = False


@dataclass(frozen=True, slots=True)
class Selector:
    """A name that stands for one of several models, chosen by llama-swap for each request."""

    id: str
    strategy: Strategy
    targets: tuple[str, ...]


Pins = Mapping[str, str]
"""Of one profile: names and what they stand for while it is active; nothing switches a name off."""


@dataclass(frozen=True, slots=True)
class LlamaSwapConfig:
    """llama-swap's configuration, as far as it decides what a request loads, stops and needs.

    `routing` says where the router comes from; with `default` every model stops every other. `notes` are the things
    that were passed over, for one line of the log.
    """

    models: Mapping[str, LocalModel]
    selectors: Mapping[str, Selector]
    profiles: Mapping[str, Pins]
    peers: Mapping[str, tuple[str, ...]]
    api_keys: tuple[str, ...] = field(repr=False)
    ignore_paths: tuple[re.Pattern[str], ...]
    routing: Literal["matrix", "groups", "default"]
    router: GroupRouter | MatrixRouter
    notes: tuple[str, ...] = ()
