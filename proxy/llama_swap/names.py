"""Which name stands for what: local ids and aliases, then models of peers.

A local id comes before an alias, both before a peer's model. That goes by `PEER/MODEL`, and by its bare name where
one peer only has it. Neither a profile's pins nor selectors are names in this sense; they stand for such names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.llama_swap.model import LocalModel


@dataclass(frozen=True, slots=True)
class Names:
    """`local` gives a model's id for each of its names, `remote` the full name of a peer's model for each of its."""

    local: Mapping[str, str]
    remote: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.local or name in self.remote


def local_names(models: Iterable[LocalModel]) -> dict[str, str]:
    """The id that each id and each alias means."""
    models = list(models)
    return {alias: model.id for model in models for alias in model.aliases} | {model.id: model.id for model in models}


def remote_names(peers: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """The full name that each full name, and each bare name of one peer only, means."""
    owners: dict[str, set[str]] = {}
    for peer, served in peers.items():
        for model in served:
            owners.setdefault(model, set()).add(f"{peer}/{model}")
    bare = {model: full for model, (full, *others) in owners.items() if not others}
    return bare | {full: full for fulls in owners.values() for full in fulls}
