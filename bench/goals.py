"""What this proxy is to reach, beside what it reaches, and what holds a goal that is missed.

The figures are multiples in one run, never times. A difference under `NOISE` says nothing, and one run does not make
a miss: run it twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.peers import ASGIPROXY, BASELINE, BUFFERED, OURS, OURS_H11
from bench.results import Results

NOISE = 1.15
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Goal:
    """`figure` is to be at most `limit`, at best `stretch`. `held`: what holds it, where it is missed."""

    text: str
    unit: str
    figure: float | None
    limit: float
    stretch: float | None = None
    held: str = ""

    @property
    def verdict(self) -> str:
        """In words."""
        if self.figure is None:
            return "not measured"
        if self.stretch is not None and self.figure <= self.stretch:
            return "met, and the stretch"
        if self.figure <= self.limit:
            return "met"
        return "in the noise" if self.figure <= self.limit * NOISE else "**missed**"


ASGI = (
    "the lock and the lease, the search for the model's name, bounds, metrics and forwarded fields, which asgiproxy "
    "has not; a task that watches for the client; the head and the body of an answer in two sends"
)
PARSER = "h11 parses in Python"
EVENTS = "each event passes a task and four callables, where nginx copies a buffer"
SPOOL = "the body is searched for the model's name, hashed for a retry to be known, and passes a file on disk"
BLOCKS = "what is read ahead is counted, and handed on in pieces of 64 KiB"
FIRST = "the body is read and the lease taken before anything is sent"
GROWN = "the allocator keeps blocks"


def goals(results: Results) -> Iterator[Goal]:
    """All goals, in the order in which they matter."""
    yield from _small(results)
    yield from _streams(results)
    yield from _bodies(results)
    yield from _queue(results)


def _small(results: Results) -> Iterator[Goal]:
    for streams in (16, 64):
        name = f"small-{streams}"
        text = f"small requests, c={streams}"
        yield Goal(text, "× nginx", results.ratio(name, OURS), 8, 5, ASGI)
        yield Goal(text, "× asgiproxy", results.ratio(name, OURS, ASGIPROXY), 1.1, None, ASGI)
        yield Goal(f"{text}, h11", "× nginx", results.ratio(name, OURS_H11), 14, None, PARSER)
    first = "first byte, small requests, c=1"
    yield Goal(first, "× asgiproxy", results.first_byte_ratio("small-1", OURS, ASGIPROXY), 1.0, None, FIRST)
    yield Goal(first, "× nginx (stretch)", results.first_byte_ratio("small-1", OURS, BASELINE), 3.0, None, FIRST)


def _streams(results: Results) -> Iterator[Goal]:
    yield Goal("SSE flat out, 32 streams", "× nginx", results.ratio("sse-32", OURS), 1.7, 1.4, EVENTS)
    yield Goal("SSE at 10 ms", "× nginx", results.ratio("paced", OURS), 1.7, 1.4, EVENTS)


def _bodies(results: Results) -> Iterator[Goal]:
    for kind in ("form", "json"):
        name = f"upload-{kind}"
        grown = results.memory(name, OURS, grown=True)
        yield Goal(f"upload, {kind}", "× buffered nginx", results.ratio(name, OURS, BUFFERED), 1.2, None, SPOOL)
        text = f"upload, {kind}: memory beyond idle"
        yield Goal(text, "MiB", None if grown is None else grown / MIB, 4.0, None, GROWN)
    yield Goal("download", "× buffered nginx", results.ratio("download", OURS, BUFFERED), 1.0, None, BLOCKS)


def _queue(results: Results) -> Iterator[Goal]:
    drained = results.queue.get(OURS)
    for wave, limit in enumerate((24.0, 40.0)):
        figure = None if drained is None else drained.memory(wave) / 1024
        yield Goal(f"memory per waiter beyond its body, wave {wave + 1}", "KiB", figure, limit)
    figure = None if drained is None else drained.ratio
    yield Goal("draining the queue, per request", "× small request at 64", figure, 2.5)
    lock = results.locks.get("FairRWLock, write")
    figure = None if lock is None else lock[2] / lock[1]
    yield Goal("hand-off of the lock at depth 1,000", "× at depth 16", figure, 1.3)
