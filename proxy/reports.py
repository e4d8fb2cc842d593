"""What llama-swap reports of itself, carried to whoever believes it: the lock, the load times, what is known of names.

The lock counts in units; llama-swap speaks of models. With its configuration known they are the same. Without, a unit
is a class, and one that takes no lease is left out, since it stops nothing and is stopped by nothing that the lock
knows of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from proxy.classify import Classification
from proxy.knowledge import Knowledge
from proxy.loads import Load, LoadTimes
from proxy.rwlock import FairRWLock


class Reports:
    """See `follow.Sink`. `on_load` is told of each measured load: the model, and seconds."""

    def __init__(
        self, lock: FairRWLock, knowledge: Knowledge, units: LoadTimes, on_load: Callable[[str, float], None]
    ) -> None:
        """`units` is where the lock's windows look up the last load of a unit."""
        self.models = LoadTimes()
        self._lock, self._knowledge, self._units, self._on_load = lock, knowledge, units, on_load
        self._measured = float("-inf")

    def running(self, states: Mapping[str, str], asked: float) -> None:
        """What is resident, as it was when `/running` was asked."""
        ready = [model for model, state in states.items() if state == "ready"]
        self._lock.report(frozenset().union(*map(self._knowledge.units, ready)), asked=asked)

    def loaded(self, load: Load) -> None:
        """A load was seen from its beginning to its end."""
        self._measured = time.monotonic()
        self._record(load.model, load.seconds)
        for unit in self._knowledge.units(load.model):
            self._lock.ready(unit, since=load.starting)

    def first_answer(self, what: Classification, seconds: float) -> None:
        """A turn that had to load gave its first answer so long after it began: the load, where nobody reports it."""
        if time.monotonic() - self._measured > seconds:
            self._record(what.model, seconds, what.label)

    def _record(self, model: str, seconds: float, label: str | None = None) -> None:
        """`label` is what may be shown of a name that a client gave; llama-swap's own are shown as they are."""
        shown = label or model
        self._on_load(shown, seconds)
        self.models.record(shown, seconds)
        for unit in self._knowledge.units(model):
            self._units.record(unit, seconds)

    def profile(self, name: str | None) -> None:
        """The active profile."""
        self._knowledge.take_profile(name)

    def listing(self, models: Any) -> None:
        """The body of `/v1/models`."""
        self._knowledge.take_listing(models)

    def in_doubt(self) -> bool:
        """Whether the lock waits for a report."""
        return self._lock.uncertain
