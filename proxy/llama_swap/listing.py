"""A catalog from `GET /v1/models`, for the case that llama-swap's configuration is not at hand.

The listing tells ids, aliases, selectors with their targets, capabilities, and which models are on peers. It does not
tell unlisted models, slots, profiles' targets or which models are resident together. What it leaves open is decided
towards a lease: a bare name that a peer has may be an unlisted local model too, so only a peer's full names are remote;
a target that is not listed is taken for a local model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from proxy.llama_swap.catalog import Catalog
from proxy.llama_swap.model import IGNORED_BY_DEFAULT, Capabilities, LocalModel, Selector, Strategy

_MOST = 10_000  # entries; more cannot be true, and must not be kept


def catalog_from_listing(body: Any) -> Catalog:
    """The catalog of a listing's JSON; entries that make no sense are passed over. Raises ValueError if all is none."""
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list):
        raise ValueError("it is no list of models")  # noqa: TRY004 - the caller's value is a stranger's text
    entries = [entry for entry in data[:_MOST] if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    remote = {entry["id"] for entry in entries if isinstance(_meta(entry).get("peerID"), str)}
    selectors = {entry["id"]: chosen for entry in entries if (chosen := _selector(entry)) is not None}
    models: dict[str, LocalModel] = {}
    for entry in entries:
        if entry["id"] not in remote and entry["id"] not in selectors and _meta(entry).get("type") != "alias":
            models[entry["id"]] = LocalModel(entry["id"], _aliases(entry), capabilities=_capabilities(entry))
    named = set(models).union(remote, *(model.aliases for model in models.values()))
    targets = (target for selector in selectors.values() for target in selector.targets)
    models |= {target: LocalModel(target) for target in targets if target not in named}
    return Catalog(
        models,
        source="listing",
        router=None,
        ignore_paths=(re.compile(IGNORED_BY_DEFAULT, re.ASCII),),
        selectors=selectors,
        remote={name: name for name in remote},
    )


def _meta(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(_mapping(entry.get("meta")).get("llamaswap"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def _aliases(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return _texts(_meta(entry).get("aliases"))


def _selector(entry: Mapping[str, Any]) -> Selector | None:
    meta = _meta(entry)
    strategy, targets = meta.get("strategy"), _texts(meta.get("targets"))
    if meta.get("type") != "selector" or strategy not in ("pin", "warm", "spillover") or not targets:
        return None
    return Selector(entry["id"], cast(Strategy, strategy), targets)


def _capabilities(entry: Mapping[str, Any]) -> Capabilities:
    architecture, flags = _mapping(entry.get("architecture")), _mapping(entry.get("capabilities"))
    return Capabilities(
        inputs=frozenset(_texts(architecture.get("input_modalities"))),
        outputs=frozenset(_texts(architecture.get("output_modalities"))),
        tools=flags.get("function_calling") is True,
        reranker=flags.get("reranker") is True,
    )
