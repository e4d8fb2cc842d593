"""What llama-swap refuses although each part of its configuration is right by itself.

A configuration that llama-swap would not start with is refused here too, in one sentence per mistake, since nothing
that follows from it could be true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.llama_swap.fields import Fields
from proxy.llama_swap.model import LlamaSwapConfig, LocalModel, Selector
from proxy.llama_swap.names import Names, local_names, remote_names
from proxy.router import GroupRouter, MatrixRouter


def check_aliases(models: Mapping[str, LocalModel], fields: Fields) -> None:
    """Every alias once; no key of setParamsByID may be another model's id."""
    owner: dict[str, str] = {}
    for model in models.values():
        own = [alias for alias in model.aliases if alias not in model.set_params_ids]
        for alias in model.aliases:
            if owner.setdefault(alias, model.id) != model.id or own.count(alias) > 1:
                fields.wrong(f"models.{model.id}.aliases", f"{alias!r} is an alias already; an alias must stand once")
            if alias in models and alias != model.id and alias in model.set_params_ids:
                fields.wrong(f"models.{model.id}.filters.setParamsByID", f"{alias!r} is the id of another model")
            elif alias in models and alias != model.id:
                fields.note(f"models.{model.id}.aliases", f"{alias!r} is a model's id, which llama-swap prefers")


def check_names(config: LlamaSwapConfig, raw: Mapping[str, Any], fields: Fields) -> None:
    """Peers, selectors, profiles and priorities name what there is, and no name means two things."""
    names = Names(local_names(config.models.values()), remote_names(config.peers))
    _check_peers(config, fields)
    for selector in config.selectors.values():
        _check_selector(selector, config, names, fields)
    for profile, pins in config.profiles.items():
        for pin, target in pins.items():
            at = f"profiles.{profile}.pins"
            if not pin.strip():
                fields.wrong(at, "a name must not be empty")
            if target and target not in names and target not in config.selectors:
                fields.wrong(f"{at}.{pin}", f"{target!r} is neither a model nor a selector")
    _check_scheduler(raw, names, fields)


def _check_peers(config: LlamaSwapConfig, fields: Fields) -> None:
    owners: dict[str, str] = {}
    aliases = {alias for model in config.models.values() for alias in model.aliases}
    for peer, served in config.peers.items():
        for model in served:
            full = f"{peer}/{model}"
            if owners.setdefault(full, peer) != peer:
                fields.wrong(f"peers.{peer}", f"{full!r} is the full name of a model of {owners[full]} too")
            if full in config.models or full in aliases or full in config.selectors:
                fields.wrong(f"peers.{peer}", f"{full!r}, the full name of its model, is another name already")
            if any(full in pins for pins in config.profiles.values()):
                fields.wrong(f"peers.{peer}", f"{full!r}, the full name of its model, must not be pinned by a profile")


def _check_selector(selector: Selector, config: LlamaSwapConfig, names: Names, fields: Fields) -> None:
    at = f"selectors.{selector.id}"
    if not selector.id.strip():
        fields.wrong("selectors", "a selector's name must not be empty")
    if selector.id in names.local:
        fields.wrong(at, "this is the name of a model too")
    for target in selector.targets:
        if target in config.selectors:
            fields.wrong(f"{at}.targets", f"{target!r} is a selector; only models may be targets")
        elif target not in names:
            fields.wrong(f"{at}.targets", f"{target!r} is not one of the models")
        elif selector.strategy == "warm" and target not in names.local:
            fields.wrong(f"{at}.targets", f"{target!r} is a peer's model; warm selectors choose among local ones")
    if selector.strategy == "spillover":
        _check_spillover(selector, config, names, fields)


def _check_spillover(selector: Selector, config: LlamaSwapConfig, names: Names, fields: Fields) -> None:
    at = f"selectors.{selector.id}.targets"
    meant = [names.local.get(target) or names.remote.get(target, target) for target in selector.targets]
    if len(set(meant)) < len(meant):
        fields.wrong(at, "two of them are the same model")
    local = frozenset(meant) & frozenset(config.models)
    if len(local) > 1 and not _may_spill(config.router, local):
        fields.wrong(at, "they must be together in one set of the matrix, or in one group with swap: false")


def _may_spill(router: GroupRouter | MatrixRouter, models: frozenset[str]) -> bool:
    if isinstance(router, MatrixRouter):
        return router.fits_together(models)
    first, *others = (router.group_of[model] for model in models)
    return not first.swap and all(other is first for other in others)


def _check_scheduler(raw: Mapping[str, Any], names: Names, fields: Fields) -> None:
    scheduler = fields.mapping(fields.mapping(raw.get("routing"), "routing").get("scheduler"), "routing.scheduler")
    use = fields.text(scheduler.get("use"), "routing.scheduler.use", needed=True)
    if use not in {"", "fifo"}:
        fields.wrong("routing.scheduler.use", f"it must be fifo, not {use!r}")
    at = "routing.scheduler.settings"
    settings = fields.mapping(scheduler.get("settings"), at)
    fifo = fields.mapping(settings.get("fifo"), f"{at}.fifo")
    for name in fields.mapping(fifo.get("priority"), f"{at}.fifo.priority"):
        if name not in names.local:
            fields.wrong(f"{at}.fifo.priority", f"{name!r} is not one of the models")
