"""The lock alone, beside asyncio.Lock and aiorwlock: nanoseconds per acquire and release, and per hand-off.

A hand-off is a release, the grant that it makes, and the waking of the task that got it. With a depth of N there are N
tasks that each acquire, release and queue again, so that N - 1 always wait. Time is that of the process, which never
sleeps here, so that others on the machine do not count.

`python -m bench.locks SECONDS` prints the figures as JSON; the bench runs it as a process of its own on one core.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from bench.peers import CACHE
from proxy.classify import Classification
from proxy.lease import Leases
from proxy.router import ClassRouter
from proxy.rwlock import Claim, FairRWLock, Policy
from proxy.tickets import Bounds

DEPTHS = (16, 1000)
Use = Callable[[int], Awaitable[None]]
"""One acquire and release by the task of that number."""


def _slots(model: str) -> int:
    return 1_000_000


def _claim(mode: Any, name: str) -> Claim:
    return Claim(mode, frozenset({name}), frozenset({name}))


def fair(*claims: Claim, kind: Any = "batch") -> Use:
    """Our lock; the tasks take these claims in turn."""
    lock = FairRWLock(ClassRouter(), _slots, Policy(kind))

    async def use(number: int) -> None:
        lease = lock.request(claims[number % len(claims)])
        if lease.waiting:
            await lease.wait()
        lease.answered()
        lease.release()

    return use


def leased() -> Use:
    """Our lock with what stands around it for every request: bounds, a timer, outcomes."""
    bounds = Bounds(max_queue=10_000, max_queue_per_client=10_000, max_wait=lambda name: 600.0)
    leases = Leases(ClassRouter(), _slots, Policy(), bounds)
    name = frozenset({"tts"})
    what = Classification("tts", "tts", "tts", "write", name, name, "tts", "")

    async def use(number: int) -> None:
        async with leases.hold(what, "client") as ticket:
            if ticket.lease is not None:
                ticket.lease.answered()

    return use


def standard() -> Use:
    """asyncio.Lock."""
    lock = asyncio.Lock()

    async def use(number: int) -> None:
        async with lock:
            pass

    return use


def other(kind: str) -> Use | None:
    """aiorwlock's reader or writer lock; None where it is not installed."""
    sys.path += map(str, (CACHE / "peers" / "lib").glob("python3*/site-packages"))
    try:
        lock = getattr(importlib.import_module("aiorwlock").RWLock(), kind)
    except ImportError:
        return None

    async def use(number: int) -> None:
        async with lock:
            pass

    return use


CANDIDATES: dict[str, Callable[[], Use | None]] = {
    "asyncio.Lock": standard,
    "aiorwlock, write": lambda: other("writer_lock"),
    "aiorwlock, read": lambda: other("reader_lock"),
    "FairRWLock, write": lambda: fair(_claim("write", "tts")),
    "FairRWLock, read": lambda: fair(_claim("read", "llm")),
    "FairRWLock, two classes in turns": lambda: fair(_claim("write", "tts"), _claim("read", "llm")),
    "FairRWLock, two classes, fifo": lambda: fair(_claim("write", "tts"), _claim("read", "llm"), kind="fifo"),
    "Leases, write": leased,
}


async def alone(use: Use, seconds: float) -> float:
    """Nanoseconds per acquire and release when nobody else wants it."""
    count, begun = 0, time.process_time()
    while time.process_time() < begun + seconds:
        for _ in range(100):
            await use(0)
        count += 100
    return (time.process_time() - begun) / count * 1e9


async def handed(use: Use, depth: int, seconds: float) -> float:
    """Nanoseconds per hand-off between `depth` tasks."""
    count, over = 0, False

    async def task(number: int) -> None:
        nonlocal count
        while not over:
            await use(number)
            count += 1
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(task(number)) for number in range(depth)]
    await asyncio.sleep(seconds / 10)
    before, begun = count, time.process_time()
    await asyncio.sleep(seconds)
    figure = (time.process_time() - begun) / max(count - before, 1) * 1e9
    over = True
    await asyncio.gather(*tasks)
    return figure


async def figures(seconds: float) -> dict[str, list[float]]:
    """By name: alone, and at each depth."""
    found = {}
    for name, make in CANDIDATES.items():
        if make() is None:
            continue
        uses = [use for _ in range(1 + len(DEPTHS)) if (use := make()) is not None]
        found[name] = [await alone(uses[0], seconds)]
        found[name] += [await handed(use, depth, seconds) for use, depth in zip(uses[1:], DEPTHS, strict=True)]
    return found


if __name__ == "__main__":
    print(json.dumps(uvloop.run(figures(float(sys.argv[1])))))
