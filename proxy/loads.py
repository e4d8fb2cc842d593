"""How long models take to load, learnt from the states that llama-swap reports.

What a client waits for in a swap begins when the old model is told to stop and ends when the new one is ready; from
`starting` to `ready` alone would leave the stop out. So a load is measured from the first `stopping` that led up to
it. The stream of states repeats itself, merges changes and may lose some: every snapshot is therefore compared with
the one before, and a load of which the beginning was not seen is not measured. `starting` → `stopped` is a load that
failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SWAP_GAP = 1.0
"""Seconds between the end of a stop and the start that it made room for: llama-swap needs milliseconds, and a model
that its ttl unloaded a minute ago has nothing to do with the next start."""

REMEMBERED = 1000
"""Models whose times are kept: more than any configuration has."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load that succeeded; times are those of the snapshots in which it was seen."""

    model: str
    began: float
    starting: float
    ready: float

    @property
    def seconds(self) -> float:
        """From the old model's stop to the new one's readiness."""
        return self.ready - self.began


class StateHistory:
    """Turns snapshots of {model: state} into loads."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The stream broke off: what happened until the next snapshot is unknown."""
        self._states: dict[str, str] | None = None
        self._starting: dict[str, tuple[float, float]] = {}
        self._stop_began: float | None = None
        self._stop_seen = float("-inf")

    def see(self, states: Mapping[str, str], at: float) -> list[Load]:
        """Take one snapshot, seen `at`; the loads that it ends. A model that is not in it is stopped."""
        known = self._states
        if known is None:  # whatever is starting began at a time that nobody saw
            known = {model: state for model, state in states.items() if state == "starting"}
        self._note_stops(states, known, at)
        loads = []
        for model, state in states.items():
            before = known.get(model, "stopped")
            if state == "starting" and before != "starting":
                self._starting[model] = (self._began(at), at)
            elif state == "ready" and model in self._starting:
                began, starting = self._starting.pop(model)
                loads.append(Load(model, began, starting, at))
                self._stop_began = None
        for model in [model for model in self._starting if states.get(model, "stopped") in {"stopped", "stopping"}]:
            del self._starting[model]
        self._states = dict(states)
        return loads

    def _note_stops(self, states: Mapping[str, str], known: Mapping[str, str], at: float) -> None:
        stopping = "stopping" in states.values()
        gone = any(state == "ready" and states.get(model, "stopped") == "stopped" for model, state in known.items())
        if stopping or gone:
            if self._stop_began is None or at - self._stop_seen > SWAP_GAP:
                self._stop_began = at
            self._stop_seen = at
        elif "stopping" in known.values():
            self._stop_seen = at

    def _began(self, at: float) -> float:
        if self._stop_began is not None and at - self._stop_seen <= SWAP_GAP:
            return self._stop_began
        return at


class LoadTimes:
    """The last measured load of each unit, in seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def record(self, unit: str, seconds: float) -> None:
        """A load of `unit` took that long."""
        if unit in self._seconds or len(self._seconds) < REMEMBERED:
            self._seconds[unit] = max(0.0, seconds)

    def get(self, unit: str) -> float | None:
        """The last load of `unit`, or None where none was measured."""
        return self._seconds.get(unit)

    def all(self) -> dict[str, float]:
        """Every unit with its last load."""
        return dict(self._seconds)
