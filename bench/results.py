"""All that one run has found, and the figures that goals and tables take from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.measuring import Outcomes
from bench.peers import BASELINE, DIRECT
from bench.queueing import Drained
from bench.swaps import Evening


@dataclass(slots=True)
class Results:
    """What was left out is empty; every figure of it is None."""

    outcomes: Outcomes = field(default_factory=dict)
    queue: dict[str, Drained] = field(default_factory=dict)
    locks: dict[str, list[float]] = field(default_factory=dict)
    swaps: dict[str, dict[str, Evening]] = field(default_factory=dict)

    def cpu(self, workload: str, peer: str) -> float | None:
        """CPU seconds per unit."""
        outcome = self.outcomes.get(workload, {}).get(peer)
        return None if outcome is None else outcome.cpu

    def ratio(self, workload: str, peer: str, to: str = BASELINE) -> float | None:
        """CPU per unit as a multiple of another peer's."""
        own, other = self.cpu(workload, peer), self.cpu(workload, to)
        return own / other if own is not None and other else None

    def first_byte(self, workload: str, peer: str) -> float | None:
        """Seconds to the first byte."""
        outcome = self.outcomes.get(workload, {}).get(peer)
        return None if outcome is None else outcome.first_byte

    def first_byte_ratio(self, workload: str, peer: str, to: str) -> float | None:
        """First byte as a multiple of another peer's."""
        own, other = self.first_byte(workload, peer), self.first_byte(workload, to)
        return own / other if own is not None and other else None

    def added_delay(self, workload: str, peer: str, percent: int) -> float | None:
        """Seconds that the peer adds to the delay of an event, at that percentile."""
        of = self.outcomes.get(workload, {})
        own, direct = (of[name].delay(percent) if name in of else None for name in (peer, DIRECT))
        return own - direct if own is not None and direct is not None else None

    def memory(self, workload: str, peer: str, *, grown: bool = False) -> float | None:
        """The most resident bytes in any repetition; `grown`: beyond those of the idle process."""
        outcome = self.outcomes.get(workload, {}).get(peer)
        if outcome is None or not outcome.repetitions:
            return None
        return max(each.memory for each in outcome.repetitions) - grown * outcome.idle_memory
