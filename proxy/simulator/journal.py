"""What really happened inside, request by request, for tests and benchmarks to read under `/_sim/log`.

Times are seconds since the epoch, so that a test can set them beside its own. `waited` is the time from a
request's arrival here to the beginning of its work, without the part in which its own model was loaded:
behind a proxy that waits for the GPU outside it stays near zero.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# Credentials are left out on purpose.
KEPT_HEADERS = (
    "host", "accept", "content-type", "content-length", "user-agent", "x-request-id", "traceparent",
    "x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-sim-tag",
)  # fmt: skip

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    return _EPOCH + time.monotonic()


@dataclass(eq=False, slots=True)
class Entry:
    id: int
    method: str
    path: str  # as sent, query included
    headers: dict[str, str]
    arrived: float = field(default_factory=now)
    requested: str | None = None  # the name in the request
    model: str | None = None  # the model that ran it, or was loaded for it
    loads: bool = False  # this request began a load, rather than joining one
    load: float | None = None  # seconds of its own model's swap that it sat through
    queued: bool = False  # it had to wait for something other than its own load
    started: float | None = None
    first_byte: float | None = None
    finished: float | None = None
    status: int | None = None
    cancelled: bool = False

    def begin(self) -> None:
        self.started = now()

    def loaded(self, since: float) -> None:
        self.load = now() - max(since, self.arrived)

    def answered(self, status: int) -> None:
        self.status = status
        if self.first_byte is None:
            self.first_byte = now()

    def as_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        ended = self.started if self.started is not None else self.finished
        values["waited"] = None if ended is None else ended - self.arrived - (self.load or 0.0)
        return values


class Journal:
    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self.reloads = 0
        self.reset()

    def reset(self) -> None:
        self._entries: list[Entry] = []
        self._loads: Counter[str] = Counter()
        self._evictions = 0
        self._stopped_busy = 0
        self._queued_inside = 0
        self._max_queued_inside = 0

    def open(self, method: str, path: str, headers: dict[str, str]) -> Entry:
        kept = {name: headers[name] for name in KEPT_HEADERS if name in headers}
        entry = Entry(next(self._ids), method, path, kept)
        self._entries.append(entry)
        return entry

    def queued(self, entry: Entry, length: int) -> None:
        entry.queued = True
        self._queued_inside += 1
        self._max_queued_inside = max(self._max_queued_inside, length)

    def load_begun(self, model: str) -> None:
        self._loads[model] += 1

    def stopped(self, model: str, *, busy: bool) -> None:
        self._evictions += 1
        self._stopped_busy += busy

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": [entry.as_dict() for entry in self._entries],
            "totals": {
                "loads": self._loads.total(),
                "loads_by_model": dict(self._loads),
                "evictions": self._evictions,
                "stopped_busy": self._stopped_busy,
                "queued_inside": self._queued_inside,
                "max_queued_inside": self._max_queued_inside,
            },
        }
