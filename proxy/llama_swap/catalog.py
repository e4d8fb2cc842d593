"""Every name that a request may use, and which models it can make llama-swap load.

A name is read in three steps, as llama-swap does: the active profile may pin it to another name, or switch it off;
what results may be a selector, which chooses among targets; and each of these is a local model or one of a peer. Under
/upstream a name stands at the beginning of the path, the longest that fits counts, and selectors are none.

A selector's choice depends on what is loaded and busy when llama-swap reads the request, which is after the lease was
granted. So the lease must cover every local target; where those cannot all be resident at once it is `conservative`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from proxy.llama_swap.model import LlamaSwapConfig, LocalModel, Pins, Selector
from proxy.llama_swap.names import Names, local_names, remote_names
from proxy.router import ModelRouter

_NOTHING_READY: frozenset[str] = frozenset()
# What Go's strings.TrimSpace takes away; Python's strip() would also take four control characters.
_SPACE = "".join(chr(code) for code in range(0x3001) if chr(code).isspace() and not 0x1C <= code <= 0x1F)


LONGEST_IGNORED = 2048
"""Characters of a path that `ignorePaths` are tried on: their patterns are somebody's, and may backtrack."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a name stands for.

    `requested` is the name as sent. `models` are the local models that the request may load, the likeliest first, and
    `remote` says that there is none, since a peer serves it: no lease, no slots. `label` is the id of the first, or
    the peer's full name of the model. `conservative`: the models are not resident together, so that only a write
    lease is sure to cover the request. `selector` is the one that will choose, if any.
    """

    requested: str
    models: tuple[str, ...]
    label: str
    remote: bool = False
    conservative: bool = False
    selector: str | None = None


@dataclass(frozen=True, slots=True)
class UpstreamMatch:
    """What a path under /upstream/ stands for.

    `rest` is what the model's server is asked, from its slash on. With `redirect` llama-swap only answers that a slash
    is missing; with `ignored` it answers 409 unless the model is loaded. Neither loads anything.
    """

    resolution: Resolution
    name: str
    rest: str
    redirect: bool
    ignored: bool

    @property
    def loads(self) -> bool:
        """Whether the request may make llama-swap load a model."""
        return not (self.redirect or self.ignored or self.resolution.remote)


class Catalog:
    """Names, from llama-swap's configuration or its listing; immutable.

    `complete`: a name that is not here is one that llama-swap answers with 404. A listing leaves some out. Without a
    `router` nothing is known of what is resident together.
    """

    def __init__(
        self,
        models: Mapping[str, LocalModel],
        *,
        source: Literal["file", "listing"],
        router: ModelRouter | None,
        ignore_paths: tuple[re.Pattern[str], ...],
        selectors: Mapping[str, Selector] | None = None,
        profiles: Mapping[str, Pins] | None = None,
        remote: Mapping[str, str] | None = None,
    ) -> None:
        self.models, self.source, self.router = models, source, router
        self.complete = source == "file"
        self.profiles = profiles or {}
        self._selectors = selectors or {}
        self._ignore_paths = ignore_paths
        self._names = Names(local_names(models.values()), remote or {})
        self._longest = max(map(len, [*self._names.local, *self._names.remote]), default=0)

    @classmethod
    def from_config(cls, config: LlamaSwapConfig) -> Catalog:
        """The names of llama-swap's configuration."""
        return cls(
            config.models,
            source="file",
            router=config.router,
            ignore_paths=config.ignore_paths,
            selectors=config.selectors,
            profiles=config.profiles,
            remote=remote_names(config.peers),
        )

    def names(self) -> tuple[str, ...]:
        """All names, also of profiles that are not active: ids first, then selectors, aliases, peers and pins."""
        pins = (pin for pinned in self.profiles.values() for pin, target in pinned.items() if target)
        return tuple(
            dict.fromkeys([*self.models, *self._selectors, *self._names.local, *self._names.remote, *pins]),
        )

    def resolve(
        self,
        name: str,
        *,
        profile: str | None = None,
        upstream: bool = False,
        ready: AbstractSet[str] = _NOTHING_READY,
    ) -> Resolution | None:
        """What `name` stands for while `profile` is active; None where llama-swap answers 404.

        Under `upstream` selectors do not count. Neither selectors nor pins do where llama-swap fails to put another
        name into the request, which is so for all but JSON, a multipart field and the query of a GET: for those
        requests ask with `upstream` and without a profile. Of a warm selector the first that is `ready` comes first.
        """
        if not name:
            return None
        meant = self._pins(profile).get(name, name)
        selector = None if upstream else self._selectors.get(meant)
        return self._base(name, meant) if selector is None else self._selected(name, selector, ready)

    def match_upstream(self, path: str, *, profile: str | None = None) -> UpstreamMatch | None:
        """What `path`, decoded and without the leading `/upstream/`, stands for; None where llama-swap answers 404."""
        path, pin = self._pinned_path(path.removeprefix("/"), profile)
        segments = path.strip(_SPACE).split("/")
        found: tuple[str, Resolution, str] | None = None
        name = ""
        for place, segment in enumerate(segments):
            name = f"{name}/{segment}" if name and segment else name or segment
            if len(name) > self._longest:
                break
            resolution = self._base(pin or name, name) if segment else None
            if resolution is not None:
                found = name, resolution, "/" + "/".join(segments[place + 1 :])
        if found is None:
            return None
        name, resolution, rest = found
        redirect = rest == "/" and not path.endswith("/")
        # A longer path is not tried: it then takes a lease, which costs a wait and no more.
        tried = not resolution.remote and len(rest) <= LONGEST_IGNORED
        ignored = tried and any(pattern.search(rest) for pattern in self._ignore_paths)
        return UpstreamMatch(resolution, name, rest, redirect, ignored)

    def _pins(self, profile: str | None) -> Pins:
        return self.profiles.get(profile, {}) if profile else {}

    def _pinned_path(self, path: str, profile: str | None) -> tuple[str, str | None]:
        """The path with what the longest pin at its beginning stands for, and that pin."""
        pins = self._pins(profile)
        pin = max((pin for pin in pins if f"{path}/".startswith(f"{pin}/")), key=len, default=None)
        if pin is None:
            return path, None
        return (pins[pin] + path[len(pin) :] if pins[pin] else ""), pin

    def _base(self, requested: str, name: str) -> Resolution | None:
        if model := self._names.local.get(name):
            return Resolution(requested, (model,), model)
        if full := self._names.remote.get(name):
            return Resolution(requested, (), full, remote=True)
        return None

    def _selected(self, requested: str, selector: Selector, ready: AbstractSet[str]) -> Resolution | None:
        targets = selector.targets[:1] if selector.strategy == "pin" else selector.targets
        found = [each for target in targets if (each := self._base(requested, target)) is not None]
        models = tuple(dict.fromkeys(model for each in found for model in each.models))
        if selector.strategy == "warm":
            models = tuple(sorted(models, key=lambda model: model not in ready))  # stable: the others keep their order
        if not models:
            return Resolution(requested, (), found[0].label, remote=True, selector=selector.id) if found else None
        together = len(models) == 1 or (self.router is not None and self.router.fits_together(frozenset(models)))
        return Resolution(requested, models, models[0], conservative=not together, selector=selector.id)
