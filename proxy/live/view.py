"""What the page shows at one moment, as rows of text. The same for the server's HTML and for the script."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.history import Finished, History, Minute
from proxy.lease import Leases
from proxy.live import chart
from proxy.views import HolderView, KeptView, Snapshot, TurnView, WaiterView

NAME_SHOWN = 60
"""Characters of a model's name: a table that is readable on a phone. Clients may send far longer ones."""

MODELS_SHOWN = 5
"""Models of a turn."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the page: its id, heading, columns, and what stands there when it has no rows."""

    id: str
    heading: str
    columns: tuple[str, ...]
    empty: str


TABLES = (
    Table("holders", "On the GPU", ("No.", "Model", "Class", "Held", "Client"), "Nobody."),
    Table("waiters", "Waiting", ("Place", "No.", "Model", "Class", "Waited", "Client"), "Nobody."),
    Table("kept", "Kept places", ("Model", "Class", "Since arrival", "Kept for"), "None."),
    Table("finished", "Ended last", ("UTC", "No.", "Model", "Class", "Waited", "Held", "Outcome", "Client"), "None."),
)

Row = dict[str, Any]
"""`key` is unique in its table, `cells` are texts, `cancel` the number to cancel, if one can."""


def make_view(
    leases: Leases, history: History, class_names: Sequence[str], wall: Callable[[], float]
) -> dict[str, Any]:
    """All of it, ready for JSON."""
    snapshot = leases.snapshot()
    minutes = history.hour(snapshot.turn)
    return {
        "summary": _summary(snapshot, draining=leases.draining),
        "turn": _turn(snapshot.turn, wall()),
        "tables": {
            "holders": [_holder(view) for view in snapshot.holders],
            "waiters": [_waiter(view) for view in snapshot.waiters],
            "kept": [_kept(index, view) for index, view in enumerate(snapshot.kept)],
            "finished": [_finished(one) for one in reversed(history.finished)],
        },
        "chart": chart.rectangles(minutes, class_names),
        "scale": seconds_text(chart.scale_of(minutes)),
        "hour": _hour(minutes),
        "legend": [
            [chart.colour(name, class_names), f"{name} {_percent(seconds)}"]
            for name, seconds in chart.shares(minutes)
            if name in class_names
        ],
    }


def seconds_text(seconds: float) -> str:
    """Whole seconds for people, so that the page changes once a second at most: `7 s`, `2 min 05 s`, `1 h 02 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def exact_text(seconds: float) -> str:
    """The same for what is over: tenths where they matter."""
    return f"{seconds:.1f} s" if seconds < 10 else seconds_text(seconds)


def _summary(snapshot: Snapshot, *, draining: bool) -> str:
    text = f"{len(snapshot.holders)} on the GPU, {len(snapshot.waiters)} waiting"
    return text + (", shutting down" if draining else "")


def _turn(turn: TurnView | None, now: float) -> str:
    if turn is None:
        return "No turn has begun yet."
    names = [_short(name) for name in turn.models[:MODELS_SHOWN]]
    more = len(turn.models) - len(names)
    models = ", ".join([*names, *([f"{more} more"] if more else [])])
    return f"Turn of {turn.class_name}{': ' + models if models else ''}, since {_clock(now - turn.seconds)} UTC."


def _hour(minutes: list[Minute]) -> str:
    waits, longest = sum(minute.waits for minute in minutes), max(minute.longest for minute in minutes)
    turns = sum(minute.turns for minute in minutes)
    counted = [f"{waits} request{'' if waits == 1 else 's'}", f"{turns} turn{'' if turns == 1 else 's'}"]
    return f"In the last hour: {', '.join(counted)}, and {exact_text(longest)} for the longest wait."


def _percent(seconds: float) -> str:
    return f"{min(100.0, seconds / 36):.0f} %"


def _holder(view: HolderView) -> Row:
    held = seconds_text(view.held_seconds)
    cells = [_number(view), *_names(view), held, view.client]
    return {"key": str(view.id), "cells": cells, "cancel": view.id if view.is_job else None}


def _waiter(view: WaiterView) -> Row:
    waited = seconds_text(view.waited_seconds)
    cells = [str(view.position), _number(view), *_names(view), waited, view.client]
    return {"key": str(view.id), "cells": cells, "cancel": view.id}


def _kept(index: int, view: KeptView) -> Row:
    seconds = [seconds_text(view.waited_seconds), seconds_text(view.seconds_left)]
    return {"key": str(index), "cells": [*_names(view), *seconds], "cancel": None}


def _finished(one: Finished) -> Row:
    held = "-" if one.held is None else exact_text(one.held)
    cells = [_clock(one.at), _number(one), *_names(one), exact_text(one.waited), held, one.outcome, one.client]
    return {"key": str(one.id), "cells": cells, "cancel": None}


def _number(view: HolderView | WaiterView | Finished) -> str:
    return f"{view.id} (job)" if view.is_job else str(view.id)


def _names(view: HolderView | WaiterView | KeptView | Finished) -> list[str]:
    return [_short(view.model), view.class_name]


def _short(name: str) -> str:
    return name if len(name) <= NAME_SHOWN else name[: NAME_SHOWN - 1] + "…"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(round(at)))
