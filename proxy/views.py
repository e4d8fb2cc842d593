"""What can be seen of the queue at one moment: frozen, and all in seconds, for `/-/queue`, the metrics and people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HolderView:
    """A held lease, as `/-/queue` shows it; seconds."""

    id: int
    class_name: str
    model: str
    requested: str
    mode: str
    held_seconds: float


@dataclass(frozen=True, slots=True)
class WaiterView:
    """A waiter, as `/-/queue` shows it; `position` counts from 1."""

    id: int
    position: int
    class_name: str
    model: str
    requested: str
    mode: str
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class TurnView:
    """The current turn."""

    class_name: str
    mode: str
    models: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All there is to see at one moment."""

    policy: str
    turn: TurnView | None
    holders: tuple[HolderView, ...]
    waiters: tuple[WaiterView, ...]
