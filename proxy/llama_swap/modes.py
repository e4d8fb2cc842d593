"""The mode of a model's lease, and why.

What a setting says, counts. `auto` goes by what llama-swap does: a model that is resident beside every other needs no
lease. Speech comes in bursts that a chat must not be cut by, so a speech model writes, unless it is resident beside a
chat model: then both read and run side by side. Everything else reads, also embeddings that are not always resident,
which is worth a warning: one line in llama-swap's configuration would spare them the wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from proxy.llama_swap.model import LlamaSwapConfig
from proxy.router import MatrixRouter, Mode

Setting = Literal["auto", "read", "write", "none"]


@dataclass(frozen=True, slots=True)
class ModeDecision:
    """A mode, the reason in words for `check`, and a warning where something could be better."""

    mode: Mode
    reason: str
    warning: str | None = None


def lease_mode(
    config: LlamaSwapConfig, model: str, classes: Mapping[str, str], settings: Mapping[str, Setting]
) -> ModeDecision:
    """The mode of the local `model`, where `classes` has the class of each local model, `settings` each class's lease.

    A class that is not in `settings` is `auto`.
    """
    class_name = classes[model]
    setting = settings.get(class_name, "auto")
    always = config.router.always_resident(model)
    if setting != "auto":
        warning = None if always or setting != "none" else _not_resident(config, model)
        return ModeDecision(setting, f"classes.{class_name}.lease", warning)
    if always:
        return ModeDecision("none", "always resident: no request for another model stops it, and it stops none")
    if class_name == "embed":
        return ModeDecision("read", "not always resident", _not_resident(config, model))
    if class_name != "tts":
        return ModeDecision("read", f"{class_name} shares with what is resident beside it")
    beside = _chat_beside(config, model, classes, settings)
    if beside is not None:
        return ModeDecision("read", f"can be resident beside {beside}")
    return ModeDecision("write", "speech, and not resident beside any chat model that takes a lease")


def _chat_beside(
    config: LlamaSwapConfig, model: str, classes: Mapping[str, str], settings: Mapping[str, Setting]
) -> str | None:
    """A chat model that takes a lease and can be resident together with `model`."""
    router = config.router
    for other in config.models:
        setting = settings.get(classes[other], "auto")
        leased = setting != "none" and (setting != "auto" or not router.always_resident(other))
        if classes[other] == "llm" and leased and router.fits_together(frozenset({model, other})):
            return other
    return None


def _not_resident(config: LlamaSwapConfig, model: str) -> str:
    """What to add to llama-swap's configuration, so that `model` need not wait."""
    if isinstance(config.router, MatrixRouter):
        alone = ", ".join(sorted(config.router.in_no_set - {model}))
        line = f"end every set of the matrix with `& {model}`, as in `home: (a | b) & {model}`"
        more = f", and put {alone} into a set, since a model in no set stops all others" if alone else ""
        return f"{model} is not always resident; {line}{more}"
    group = f"always: {{swap: false, exclusive: false, persistent: true, members: [{model}]}}"
    return f"{model} is not always resident; add the group `{group}` to llama-swap's groups"
