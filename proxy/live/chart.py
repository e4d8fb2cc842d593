"""The last hour as rectangles: above, the longest wait of each minute; below, whose turn it was, minute by minute.

It is drawn twice from the same numbers, by the server into the page and by the script when they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proxy.history import MINUTES, Minute

STEP = 10
"""Units of the drawing for a minute."""

WIDTH = MINUTES * STEP
WAITS, GAP, TURNS = 100, 8, 24
"""Heights of the upper part, of the space between and of the lower part."""

HEIGHT = WAITS + GAP + TURNS

COLOURS = 8
"""Classes beyond these share colours with the first."""

LEAST_SCALE = 10.0
"""Seconds at the top of the upper part, at least: so that waits of milliseconds do not look like hours."""

Rectangle = tuple[str, float, float, float, float]
"""Its CSS class, x, y, width, height."""


def scale_of(minutes: Iterable[Minute]) -> float:
    """Seconds at the top of the upper part."""
    return max([LEAST_SCALE, *(minute.longest for minute in minutes)])


def rectangles(minutes: Sequence[Minute], class_names: Sequence[str]) -> list[Rectangle]:
    """All of them."""
    scale = scale_of(minutes)
    drawn = []
    for column, minute in enumerate(minutes, MINUTES - len(minutes)):
        if minute.longest > 0:
            height = round(max(1.0, WAITS * minute.longest / scale), 1)
            drawn.append(("wait", float(column * STEP + 1), round(WAITS - height, 1), float(STEP - 2), height))
        drawn += _turns(column, minute, class_names)
    return drawn


def _turns(column: int, minute: Minute, class_names: Sequence[str]) -> Iterable[Rectangle]:
    top = float(WAITS + GAP)
    for name, seconds in sorted(minute.seconds.items()):
        height = float(round(TURNS * min(1.0, seconds / 60)))  # whole, so that an idle turn seldom changes the page
        if height > 0 and name in class_names:
            yield (colour(name, class_names), float(column * STEP), top, float(STEP), height)
            top += height


def colour(class_name: str, class_names: Sequence[str]) -> str:
    """The CSS class of a class of models."""
    return f"c{class_names.index(class_name) % COLOURS}"


def shares(minutes: Iterable[Minute]) -> list[tuple[str, float]]:
    """How many seconds of the hour each class had, the largest first."""
    total: dict[str, float] = {}
    for minute in minutes:
        for name, seconds in minute.seconds.items():
            total[name] = total.get(name, 0.0) + seconds
    return sorted(total.items(), key=lambda entry: -entry[1])
