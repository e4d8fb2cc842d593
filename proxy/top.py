"""The queue in a terminal: once, or watched like `top` watches processes.

What clients send as names is put into cells as `Text`, which rich neither reads for markup nor lets move the cursor.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from proxy.asker import Asker, NoAnswer

EVERY = 1.0
"""Seconds between two questions."""

FINISHED_SHOWN = 10


def print_once(queue: dict[str, Any], console: Console | None = None) -> None:
    """The queue as it is."""
    (console or Console()).print(screen(queue))


def watch(asker: Asker, console: Console | None = None) -> None:
    """Show it until Ctrl-C; where the output is no terminal, once.

    Raises NoAnswer where there is none at the start. Later it says so, and goes on asking.
    """
    console = console or Console()
    queue = asker.queue()
    if not console.is_terminal:
        print_once(queue, console)
        return
    with Live(screen(queue), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY)
            try:
                queue, trouble = asker.queue(), ""
            except NoAnswer as error:
                trouble = str(error)
            live.update(screen(queue, trouble), refresh=True)


def screen(queue: dict[str, Any], trouble: str = "") -> RenderableType:
    """All of it."""
    holders, waiters, kept = queue["holders"], queue["waiters"], queue["kept"]
    parts: list[RenderableType] = [_text(f"{len(holders)} on the GPU, {len(waiters)} waiting. {_turn(queue['turn'])}")]
    if trouble:
        parts.append(Text(trouble, style="bold red"))
    parts += [
        _table("On the GPU", ("No.", "Model", "Class", "Held", "Client"), map(_holder, holders)),
        _table("Waiting", ("Place", "No.", "Model", "Class", "Waited", "Client"), map(_waiter, waiters)),
    ]
    if kept:
        parts.append(_table("Kept places", ("Model", "Class", "Since arrival", "Kept for"), map(_kept, kept)))
    if ended := queue.get("finished", [])[:FINISHED_SHOWN]:
        columns = ("No.", "Model", "Class", "Waited", "Held", "Outcome", "Client")
        parts.append(_table("Ended last", columns, map(_finished, ended)))
    return Group(*parts)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=True, box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, header_style="dim", overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(text: str) -> Text:
    """Without what a terminal would obey."""
    return Text("".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text))


def _turn(turn: dict[str, Any] | None) -> str:
    if turn is None:
        return "No turn has begun yet."
    return f"Turn of {turn['class']} ({', '.join(turn['models'])}) for {_seconds(turn['seconds'])}."


def _holder(one: dict[str, Any]) -> list[str]:
    return [_number(one), *_names(one), _seconds(one["held_seconds"]), one.get("client", "")]


def _waiter(one: dict[str, Any]) -> list[str]:
    return [str(one["position"]), _number(one), *_names(one), _seconds(one["waited_seconds"]), one.get("client", "")]


def _kept(one: dict[str, Any]) -> list[str]:
    return [*_names(one), _seconds(one["waited_seconds"]), _seconds(one["seconds_left"])]


def _finished(one: dict[str, Any]) -> list[str]:
    seconds = [_seconds(one["waited_seconds"]), _seconds(one["held_seconds"])]
    return [_number(one), *_names(one), *seconds, one["outcome"], one.get("client", "")]


def _number(one: dict[str, Any]) -> str:
    return f"{one['id']} (job)" if one.get("job") else str(one["id"])


def _names(one: dict[str, Any]) -> list[str]:
    return [one["model"], one["class"]]


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60:02} s"
