"""The jobs in memory: who may see them, how much they take on disk, and which goes when there is no room.

Finished jobs are kept in the order in which they finished. They go when their time is over, and earlier when a new
request or a growing result needs the room. A job that still has work to do never goes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from proxy.errors import JobsFull
from proxy.jobs.job import Job
from proxy.jobs.recorder import Recorder
from proxy.lease import Hold

RETRY_SECONDS = 30.0
"""After which a refused client may try again: some job has probably finished then, and its result can go."""


@dataclass(slots=True, eq=False)
class Entry:
    """A job and what goes on with it now."""

    job: Job
    client: str
    """Who it counts against in this process; what is on disk does not give away a key."""
    earlier: float = 0.0
    """Seconds that it had waited before this process began."""
    since: float = field(default_factory=time.monotonic)
    hold: Hold | None = None
    task: asyncio.Task[None] | None = None
    recorder: Recorder | None = None
    entered: bool = False
    """It has been answered with 202; until then a refusal is the answer to its request."""
    refused: Exception | None = None
    cancelled: bool = False
    sealed: bool = False
    """Its answer is whole, or it has failed: it can no longer be cancelled."""
    ending: bool = False
    """Its last state is being written down."""
    expires: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def become(self, job: Job) -> None:
        """The job has come to another state; wakes all who watch it."""
        self.job = job
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    @property
    def waited(self) -> float:
        """Seconds waited up to now."""
        return self.earlier + time.monotonic() - self.since


class Shelf:
    """All jobs. `limit` is bytes, `ttl` seconds; `remove` is told of the ids that went."""

    def __init__(self, limit: int, ttl: float, remove: Callable[[Iterable[str]], None]) -> None:
        self._limit, self._ttl, self._remove = limit, ttl, remove
        self._jobs: dict[str, Entry] = {}
        self._finished: OrderedDict[str, Entry] = OrderedDict()
        self.used = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._jobs.values()))

    def get(self, job_id: str) -> Entry | None:
        """The job of that id."""
        return self._jobs.get(job_id)

    def put(self, entry: Entry) -> None:
        """One more job, whose size is counted already."""
        self._jobs[entry.job.id] = entry

    def drop(self, entry: Entry) -> None:
        """Forget a job and what it took, here and on disk."""
        job = entry.job
        self._jobs.pop(job.id, None)
        self._finished.pop(job.id, None)
        self.used -= job.size
        self._remove([job.id])

    def take(self, size: int) -> None:
        """Count `size` more bytes; finished jobs go for them, the oldest first. Raises JobsFull."""
        while self.used + size > self._limit:
            if not self._finished:
                raise JobsFull(retry_after=RETRY_SECONDS)
            self.drop(next(iter(self._finished.values())))
        self.used += size

    def finished(self, entry: Entry, ago: float = 0.0) -> None:
        """The job has finished, `ago` seconds ago."""
        entry.expires = time.monotonic() + self._ttl - ago
        self._finished[entry.job.id] = entry

    def expire(self) -> None:
        """Drop the jobs whose time is over."""
        now = time.monotonic()
        while self._finished and (oldest := next(iter(self._finished.values()))).expires <= now:
            self.drop(oldest)
