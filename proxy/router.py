"""What llama-swap stops to serve a model: a pure function of the model and of what is resident.

The lock never asks "do these models fit together"; it asks the router what a request would make llama-swap stop, and
grants only while nothing of that is in use. Two answers exist. Where llama-swap's configuration is known its own rule
is repeated exactly (groups, matrix). Where it is not, the class is the unit and every class stops every other, which
makes the lock the plain reader-writer lock of two sides.

A *unit* is what the router counts: a model id where the configuration is known, a class name where it is not.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Literal, Protocol

Mode = Literal["read", "write", "none"]
"""How a lease shares: read leases with each other, a write lease with nothing; none never enters the lock."""

NOTHING: frozenset[str] = frozenset()


class Router(Protocol):
    """llama-swap's rule for what it stops; must be pure, since the lock asks it again whenever anything changes."""

    def evict(self, unit: str, resident: AbstractSet[str]) -> frozenset[str]:
        """Which of `resident` llama-swap stops to serve `unit`, whether or not `unit` is resident itself."""
        ...


class ClassRouter:
    """Units are classes, and every class stops every other."""

    def evict(self, unit: str, resident: AbstractSet[str]) -> frozenset[str]:
        """All other classes."""
        return frozenset(resident) - {unit}


def evict_all(router: Router, units: AbstractSet[str], resident: AbstractSet[str]) -> frozenset[str]:
    """The union of what each of `units` stops, all asked against the same `resident`, less `units` themselves."""
    stopped = NOTHING
    for unit in units:
        stopped |= router.evict(unit, resident)
    return stopped - units if stopped else stopped
