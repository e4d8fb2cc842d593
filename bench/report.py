"""The tables of a run as Markdown, and the conditions under which they hold."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from bench.goals import goals
from bench.peers import BASELINE, CACHE, DIRECT, PEERS
from bench.queueing import WAVES
from bench.results import Results
from bench.swaps import PATIENCE
from bench.workloads import Size, Workload

KEPT = "<!-- What follows is written by hand and kept. -->"
NONE = "–"
MIB = 2**20
OWN = ("uvicorn", "uvloop", "httptools", "h11", "starlette", "httpx")
THEIRS = {
    "peers": ("asgiproxy", "fastapi_proxy_lib", "aiohttp", "httpx", "starlette", "uvicorn", "aiorwlock"),
    "litellm": ("litellm",),
}

INTRODUCTION = """\
# Benchmarks

`./scripts/bench` made this page. The main figure is the CPU time of a proxy's processes for one unit of work, as a
multiple of nginx's (one worker, unbuffered) in the same run; repetitions are interleaved, and medians stand here.
Differences under 15 % are noise. The load generator and the upstream run on another core than the proxy, and a process
that gets only what time nobody else wants keeps every core awake: else slow proxies would pay for waking the others.
"""


SWAPS = """\
The simulated llama-swap alone, and behind each policy, in seconds of an evening: loads of 15 s (chat) and 6 s (speech),
`switch_after` 30 s, `max_turn` 90 s, keep-alives every 3 s. *Burnt*: a client heard nothing for so long. *Refused*: an
answer other than 200; llama-swap itself answers 429 beyond ten requests for one model.

"""


def document(results: Results, asked: Sequence[Workload], size: Size, load: float) -> str:
    """The whole page; `load` is the load average before the run."""
    parts = [INTRODUCTION, _conditions(size, load)]
    if results.outcomes:
        parts += [_cpu(results, asked), _delays(results, asked)]
    if results.queue:
        parts.append(_queue(results))
    if results.locks:
        parts.append(_locks(results))
    if results.swaps:
        parts.append(_swaps(results))
    parts.append(_goals(results))
    return "\n".join(parts)


def write(path: Path, text: str) -> None:
    """Write the page; what stands below the mark in the old one stays."""
    kept = path.read_text(encoding="utf-8").partition(KEPT)[2] if path.exists() else "\n"
    path.write_text(f"{text}\n{KEPT}{kept}", encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its columns aligned."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(texts) + "\n"


def number(value: float | None, scale: float = 1.0, unit: str = "") -> str:
    """Three digits, or a dash."""
    if value is None:
        return NONE
    value *= scale
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}{unit}"


# -- the tables


def _peers(results: Results) -> list[str]:
    return [peer.name for peer in PEERS if any(peer.name in outcomes for outcomes in results.outcomes.values())]


def _cpu(results: Results, asked: Sequence[Workload]) -> str:
    rows = [[name, *(_ratio(results, each.name, name) for each in asked)] for name in _peers(results)]
    absolute = ["*nginx*", *(f"{number(results.cpu(w.name, BASELINE), 1e6)} µs per {w.unit}" for w in asked)]
    busy = ["*core busy: nginx*", *(_share(results, w.name) for w in asked)]
    spread = ["*spread, at most*", *(_spread(results, w.name) for w in asked)]
    return "## CPU per unit, × nginx\n\n" + table(["", *(w.title for w in asked)], [*rows, absolute, busy, spread])


def _ratio(results: Results, workload: str, peer: str) -> str:
    outcome = results.outcomes.get(workload, {}).get(peer)
    if outcome is None:
        return NONE
    if outcome.problem or results.cpu(workload, BASELINE):
        return outcome.problem or number(results.ratio(workload, peer))
    return number(outcome.cpu, 1e6, " µs")


def _share(results: Results, workload: str) -> str:
    outcome = results.outcomes.get(workload, {}).get(BASELINE)
    if outcome is None or not outcome.repetitions:
        return NONE
    return f"{max(each.share for each in outcome.repetitions):.0%}"


def _spread(results: Results, workload: str) -> str:
    return f"{max((each.spread for each in results.outcomes[workload].values()), default=0.0):.0%}"


def _delays(results: Results, asked: Sequence[Workload]) -> str:
    names = [each.name for each in asked]
    firsts = [name for name in ("small-1", "sse-1") if name in names]
    head = ["", *(f"first byte, {name}, µs" for name in firsts)]
    if "paced" in names:
        head += ["event at 10 ms, added p50, ms", "p99, ms", "memory then, MiB"]
    head += ["memory idle, MiB", *(f"memory, {name}, MiB" for name in names if name.startswith("upload"))]
    rows = []
    for name in (DIRECT, *_peers(results)):
        row = [name, *(number(results.first_byte(each, name), 1e6) for each in firsts)]
        if "paced" in names:
            row += [number(results.added_delay("paced", name, percent), 1e3) for percent in (50, 99)]
            row.append(_memory(results, "paced", name))
        idle = [of[name].idle_memory for of in results.outcomes.values() if name in of and of[name].idle_memory]
        row.append(number(min(idle) / MIB) if idle else NONE)
        row += [_memory(results, each, name) for each in names if each.startswith("upload")]
        rows.append(row)
    return "## First byte, delay and memory\n\n" + table(head, rows)


def _memory(results: Results, workload: str, peer: str) -> str:
    return NONE if peer == DIRECT else number(results.memory(workload, peer), 1 / MIB)


def _queue(results: Results) -> str:
    head = ["", "waiters", "KiB per waiter", "second wave", "drain, µs per request", "× small request at 64"]
    rows = []
    for name, of in results.queue.items():
        memory = [number(of.memory(wave) / 1024) for wave in range(WAVES)]
        rows.append([name, f"{of.waiters:,}", *memory, number(of.drain, 1e6), number(of.ratio)])
    text = "Chats behind one speech, ten slots; memory beyond that before the first wave and beyond the body.\n\n"
    return "## The queue\n\n" + text + table(head, rows)


def _locks(results: Results) -> str:
    head = ["ns", "acquire and release, alone", "hand-off, depth 16", "hand-off, depth 1,000"]
    rows = [[name, *(number(value) for value in values)] for name, values in results.locks.items()]
    note = "" if any("aiorwlock" in name for name in results.locks) else "\naiorwlock: not installed.\n"
    text = "Readers share, so theirs is a use beside others rather than a hand-off.\n\n"
    return "## The lock\n\n" + text + table(head, rows) + note


def _swaps(results: Results) -> str:
    head = ["", "", "loads", "makespan, s", "chat: mean wait", "p95", "speech: mean wait", "p95"]
    head += [*(f"burnt at {limit} s" for limit in PATIENCE), "refused"]
    rows = []
    for scene, ways in results.swaps.items():
        for way, evening in ways.items():
            waits = [number(value) for kind in ("chat", "speech") for value in evening.waits.get(kind, (None, None))]
            burnt = [f"{count} of {evening.requests}" for count in evening.burnt]
            row = [scene, way, str(evening.loads), number(evening.makespan), *waits, *burnt, str(evening.failed)]
            rows.append(row)
    return "## What it is for\n\n" + SWAPS + table(head, rows)


def _goals(results: Results) -> str:
    rows = []
    for goal in goals(results):
        limit = f"≤ {goal.limit:g}" + (f" (stretch {goal.stretch:g})" if goal.stretch else "")
        held = goal.held if "missed" in goal.verdict else ""
        rows.append([goal.text, number(goal.figure), f"{limit} {goal.unit}", goal.verdict, held])
    return "## Goals\n\n" + table(["", "figure", "goal", "", "what holds it"], rows)


# -- the conditions


def _conditions(size: Size, load: float) -> str:
    own = [f"{name} {version(name)}" for name in OWN]
    lines = [
        f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d}; {_processor()}, {os.cpu_count()} cores, "
        f"Linux {platform.release()}; load average {load:.1f} before the run",
        f"- {size.repetitions} repetitions of {size.seconds:g} s each",
        f"- ours: Python {platform.python_version()}, {', '.join(own)}; llama-swap's configuration known, slots and "
        "bounds out of the way",
        f"- others: {', '.join([*_debian(), *_installed()]) or 'none'}; those in Python under uvicorn with httptools "
        "and uvloop",
    ]
    return "\n".join(lines) + "\n"


def _processor() -> str:
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1] if found else platform.machine()


def _debian() -> Iterable[str]:
    for name in ("nginx", "haproxy"):
        try:
            told = subprocess.run([name, "-v"], capture_output=True, text=True, check=False)
        except OSError:
            continue
        found = re.search(r"(\d+\.[\d.]+)", told.stdout + told.stderr)
        yield f"{name} {found[1] if found else ''}"


def _installed() -> Iterable[str]:
    for environment, names in THEIRS.items():
        for name in names:
            for path in (CACHE / environment / "lib").glob(f"python3*/site-packages/{name}-*.dist-info"):
                yield path.name.removesuffix(".dist-info").replace("-", " ")
