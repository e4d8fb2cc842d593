"""From a name in a request to what serves it: profile pins, then selectors, then ids, aliases and peers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.simulator.config import Config, Selector


class NoTargetError(Exception):
    """Every target of a spillover selector is being stopped."""


@dataclass(frozen=True, slots=True)
class Target:
    """A local model, or one on a peer (`peer` set), that a name stands for."""

    model: str
    peer: str = ""
    spills: str = ""  # the spillover selector that has counted this request in


@dataclass(frozen=True, slots=True)
class InPath:
    name: str
    sent: str  # the same as it was sent; different where a profile has pinned it
    target: Target
    rest: str  # with its leading slash


class Names:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.active_profile = ""
        self._aliases = {alias: model.id for model in config.models.values() for alias in model.aliases}
        self._spilled: dict[str, Counter[str]] = {name: Counter() for name in config.selectors}
        self._rounds: Counter[str] = Counter()

    def pinned(self, name: str) -> str:
        """What the active profile makes of `name`; empty where it switches the name off."""
        profile = self.config.profiles.get(self.active_profile)
        return profile.pins.get(name, name) if profile is not None else name

    def resolve(self, name: str, states: Mapping[str, str]) -> Target | None:
        """What `name`, after a profile's pin, stands for."""
        selector = self.config.selectors.get(name)
        if selector is None:
            return self.base(name)
        if selector.strategy == "spillover":
            return self._spill(selector, states)
        chosen = self._warm(selector, states) if selector.strategy == "warm" else selector.targets[0]
        return self.base(chosen)

    def base(self, name: str) -> Target | None:
        """`name` as an id, an alias, or a model of a peer, in this order."""
        if name in self.config.models:
            return Target(name)
        if name in self._aliases:
            return Target(self._aliases[name])
        return self._on_peer(name)

    def is_name(self, name: str) -> bool:
        return name in self.config.selectors or self.base(name) is not None

    def in_path(self, path: str) -> InPath | None:
        """The model that `path`, as it goes on behind `/upstream/`, begins with; the longest name wins."""
        pin, path = self._pinned_path(path)
        parts, name, found = path.strip().split("/"), "", None
        for index, part in enumerate(parts):
            if part:
                name = f"{name}/{part}" if name else part
                target = self.base(name)
                if target is not None:
                    found = InPath(name, pin or name, target, "/" + "/".join(parts[index + 1 :]))
        return found

    def let_go(self, target: Target) -> None:
        """A request that a spillover selector had sent to `target` has ended."""
        if target.spills:
            self._spilled[target.spills][target.model] -= 1

    def _pinned_path(self, path: str) -> tuple[str, str]:
        """(the pin that the path begins with, or nothing; the path with the pin's target in its place)"""
        profile = self.config.profiles.get(self.active_profile)
        pins = profile.pins if profile is not None else {}
        matching = [pin for pin in pins if path == pin or path.startswith(pin + "/")]
        if not matching:
            return "", path
        pin = max(matching, key=len)
        return pin, pins[pin] + path[len(pin) :] if pins[pin] else ""

    def _on_peer(self, name: str) -> Target | None:
        qualified = [
            Target(model, peer)
            for peer, models in self.config.peers.items()
            for model in dict.fromkeys(models)
            if f"{peer}/{model}" == name
        ]
        bare = [Target(name, peer) for peer, models in self.config.peers.items() if name in models]
        found = qualified or bare
        return found[0] if len(found) == 1 else None

    def _warm(self, selector: Selector, states: Mapping[str, str]) -> str:
        for wanted in ("ready", "starting"):
            for target in selector.targets:
                found = self.base(target)
                if found is not None and not found.peer and states[found.model] == wanted:
                    return target
        return selector.targets[0]

    def _spill(self, selector: Selector, states: Mapping[str, str]) -> Target:
        """The least busy target that is up, or, when all of those are full, the next one that is not."""
        counts = self._spilled[selector.id]
        found = [target for target in map(self.base, selector.targets) if target is not None]
        usable = [target for target in found if target.peer or states[target.model] != "stopping"]
        up = [target for target in usable if self._is_up(target, states, counts)]
        down = [target for target in usable if target not in up]
        if not usable:
            raise NoTargetError(f'selector "{selector.id}" has no available spillover targets')
        least = min((counts[target.model] for target in up), default=selector.spillover)
        if least >= selector.spillover and down:
            chosen = down[0]
        else:
            tied = [target for target in up if counts[target.model] == least]
            chosen = tied[self._rounds[selector.id] % len(tied)]
            self._rounds[selector.id] += 1
        counts[chosen.model] += 1
        return Target(chosen.model, chosen.peer, spills=selector.id)

    @staticmethod
    def _is_up(target: Target, states: Mapping[str, str], counts: Counter[str]) -> bool:
        return counts[target.model] > 0 or (not target.peer and states[target.model] in {"ready", "starting"})
