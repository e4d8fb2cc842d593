"""From a request's route and name to what the lock needs: class, mode, units, slots.

With llama-swap's configuration known, a name is first resolved as llama-swap resolves it (aliases, selectors, the
active profile, paths under /upstream), the units are its models, and a name that llama-swap does not have is refused
as llama-swap refuses it. With its listing alone names are resolved too, but what can be resident together is unknown:
the class is the unit. With neither, the name as sent is the model.

A `Classifier` is immutable: a change of the configuration makes a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from proxy.classes import ClassRules, Patterns
from proxy.errors import UnknownModel
from proxy.llama_swap import Catalog, LlamaSwapConfig, LocalModel, ModeDecision, Resolution, lease_mode
from proxy.router import ClassRouter, Mode, Router
from proxy.routes import NameIn, Route
from proxy.settings import Lease, Settings

DEFAULT_SLOTS = 10
"""llama-swap's own default for `concurrencyLimit`."""

REMEMBERED = 1024
"""Decisions kept: far more than a host has models, and little memory when a client invents names."""

LONGEST_REMEMBERED = 256
"""Characters of a name whose decision is kept."""

MOST_LABELS = 200
"""Values of the metrics' label `model`."""


@dataclass(frozen=True, slots=True)
class Classification:
    """What a request will make llama-swap load, and how it shares the GPU.

    `requested` is the name as sent and `model` llama-swap's id for it. `units` are what the lock's router counts,
    `models` those whose slots are taken (none where a peer serves it), `label` the model's name in metrics. `evidence`
    and `reason` say, for people, what decided the class and the mode.
    """

    requested: str
    model: str
    class_name: str
    mode: Mode
    units: frozenset[str]
    models: frozenset[str]
    label: str
    evidence: str
    reason: str = ""


class Classifier:
    """Decides by the settings, and by llama-swap's configuration or listing where there is one."""

    def __init__(
        self, settings: Settings, *, config: LlamaSwapConfig | None = None, catalog: Catalog | None = None
    ) -> None:
        self.config = config
        self.catalog = Catalog.from_config(config) if config is not None else catalog
        self._rules = ClassRules(settings)
        self._leases: dict[str, Lease] = {name: entry.lease for name, entry in settings.classes.items()}
        self._slot_rules = Patterns(settings.slots) if "slots" in settings.model_fields_set else Patterns({})
        self._labels = frozenset(self.known_models[:MOST_LABELS])
        self._remembered = lru_cache(REMEMBERED)(self._decide)
        self._remembered_slots = lru_cache(REMEMBERED)(self._slots)
        self.modes = {name: _plain_mode(name, lease) for name, lease in self._leases.items()}

    @property
    def class_names(self) -> tuple[str, ...]:
        """All classes."""
        return self._rules.names

    @property
    def known_models(self) -> tuple[str, ...]:
        """The names that settings, configuration or listing give, ids first."""
        known = self.catalog.names() if self.catalog is not None else ()
        return tuple(dict.fromkeys([*known, *self._rules.literals]))

    @property
    def router(self) -> Router:
        """What llama-swap stops: exactly, or by class."""
        return ClassRouter() if self.config is None else self.config.router

    def units(self, model: str) -> frozenset[str]:
        """What the lock counts for llama-swap's model of that id; nothing for one that takes no lease."""
        if self.config is not None:
            return frozenset({model})
        local = self.catalog.models.get(model) if self.catalog is not None else None
        class_name, _ = self._class_of(local or LocalModel(model), None)
        return frozenset() if self.modes[class_name] == "none" else frozenset({class_name})

    def slots(self, model: str) -> int:
        """How many requests of `model` may run at once: as the settings say, else as llama-swap's configuration."""
        return self._remembered_slots(model) if len(model) <= LONGEST_REMEMBERED else self._slots(model)

    def _slots(self, model: str) -> int:
        local = self.catalog.models.get(model) if self.catalog is not None else None
        if found := self._slot_rules.find(model, *(local.aliases if local is not None else ())):
            return found[1]
        return DEFAULT_SLOTS if local is None else local.slots

    def refine(self, route: Route, profile: str | None = None) -> Route:
        """`route` with what llama-swap's configuration knows of it: whether a path under /upstream loads a model."""
        if not route.rest or self.catalog is None:
            return route
        match = self.catalog.match_upstream(route.rest, profile=profile)
        if match is None:
            return replace(route, name_in=NameIn.PATH) if self.catalog.complete else route
        loads = match.loads or match.resolution.remote
        return replace(route, name_in=NameIn.PATH if loads else NameIn.NOWHERE, name=match.name)

    def classify(
        self, route: Route, name: str | None = None, profile: str | None = None, *, rewritten: bool = True
    ) -> Classification:
        """The decision for a request on `route` that names the model `name` (left out: the route's own).

        Where it is not `rewritten`, llama-swap applies neither profile nor selectors (`model_name.is_rewritten`).
        Raises UnknownModel for a name that llama-swap answers with 404.
        """
        upstream = route.name_in is NameIn.PATH
        name = route.rest if upstream else name if name is not None else route.name or ""
        decide = self._remembered if len(name) <= LONGEST_REMEMBERED else self._decide
        return decide(name, route.class_hint, profile if rewritten else None, upstream, rewritten)

    # -- the steps

    def _decide(
        self, name: str, hint: str | None, profile: str | None, upstream: bool, rewritten: bool
    ) -> Classification:
        resolution = self._resolve(name, profile, upstream=upstream, rewritten=rewritten)
        if resolution is None:
            return self._by_name(self._first_name(name) if upstream else name, hint)
        if resolution.remote:
            return self._remote(resolution, hint)
        return self._local(resolution, hint)

    def _resolve(self, name: str, profile: str | None, *, upstream: bool, rewritten: bool) -> Resolution | None:
        if self.catalog is None:
            return None
        if upstream:
            match = self.catalog.match_upstream(name, profile=profile)
            resolution = match.resolution if match is not None else None
        else:
            resolution = self.catalog.resolve(name, profile=profile, upstream=not rewritten)
        if resolution is None and self.catalog.complete:
            raise UnknownModel(upstream=upstream)
        return resolution

    def _first_name(self, rest: str) -> str:
        """The name in a path under /upstream, where no configuration tells how long it is."""
        parts = [part for part in rest.split("/") if part]
        path = "/".join(parts) + "/"
        fitting = [known for known in self._rules.literals if path.startswith(f"{known}/")]
        return max(fitting, key=len, default=parts[0] if parts else "")

    def _by_name(self, name: str, hint: str | None) -> Classification:
        """Nothing is known but the name."""
        class_name, evidence, _ = self._rules.decide((name,), None, hint)
        label = name if name in self._labels else "other"
        units, models = frozenset({class_name}), frozenset({name})
        reason = f"classes.{class_name}.lease is {self._leases[class_name]}"
        return Classification(name, name, class_name, self.modes[class_name], units, models, label, evidence, reason)

    def _remote(self, resolution: Resolution, hint: str | None) -> Classification:
        """A peer serves it: nothing is loaded here."""
        class_name, evidence, _ = self._rules.decide((resolution.requested, resolution.label), None, hint)
        return Classification(
            requested=resolution.requested,
            model=resolution.label,
            class_name=class_name,
            mode="none",
            units=frozenset(),
            models=frozenset(),
            label=self._label(resolution),
            evidence=evidence,
            reason="a peer serves it",
        )

    def _local(self, resolution: Resolution, hint: str | None) -> Classification:
        decided = [self._class_of(self._model(model), hint) for model in resolution.models]
        class_name, evidence = decided[0][0], decided[0][1]
        modes = [self._mode(model, each[0]) for model, each in zip(resolution.models, decided, strict=True)]
        mode = max(modes, key=lambda decision: ("none", "read", "write").index(decision.mode))
        reason = mode.reason
        if resolution.conservative and mode.mode == "read":
            mode = ModeDecision("write", "")
            reason = f"{resolution.selector} may choose any of its targets, which cannot all be resident at once"
        models = frozenset(resolution.models)
        return Classification(
            requested=resolution.requested,
            model=resolution.models[0],
            class_name=class_name,
            mode=mode.mode,
            units=models if self.config is not None else frozenset(each[0] for each in decided),
            models=models,
            label=self._label(resolution),
            evidence=evidence,
            reason=reason,
        )

    def _model(self, model: str) -> LocalModel:
        return self.catalog.models[model] if self.catalog is not None else LocalModel(model)

    def _class_of(self, model: LocalModel, hint: str | None) -> tuple[str, str]:
        return self._rules.decide((model.id, *model.aliases), model.capabilities, hint)[:2]

    def _mode(self, model: str, class_name: str) -> ModeDecision:
        if self.config is None:
            return ModeDecision(self.modes[class_name], f"classes.{class_name}.lease is {self._leases[class_name]}")
        classes = {each.id: self._class_of(each, None)[0] for each in self.config.models.values()}
        return lease_mode(self.config, model, classes | {model: class_name}, self._leases)

    def _label(self, resolution: Resolution) -> str:
        return resolution.label if resolution.label in self._labels else "other"

    def mode_warnings(self) -> list[str]:
        """What could be better in llama-swap's configuration, one sentence each."""
        if self.config is None:
            return []
        decisions = [self._mode(each.id, self._class_of(each, None)[0]) for each in self.config.models.values()]
        return [decision.warning for decision in decisions if decision.warning]


def _plain_mode(class_name: str, lease: Lease) -> Mode:
    """The mode of a class where llama-swap's configuration is unknown."""
    if lease != "auto":
        return lease
    return "write" if class_name == "tts" else "none" if class_name == "embed" else "read"
