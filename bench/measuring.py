"""One workload on all proxies, repetitions interleaved: CPU per unit, first byte, delay of events, memory."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from bench.client import Load, Taken, ask
from bench.peers import DIRECT, MissingError, Peer, Ports, started
from bench.processes import cores, cpu_seconds, first_line, free_port, memory, running
from bench.workloads import Size, Workload, chat

STAMPED = 8
"""Every so many streams tell the delays of their events: all of them would make the load generator the bottleneck."""

WARM_UP = 0.3


@dataclass(frozen=True, slots=True)
class Repetition:
    """One run. CPU in seconds, memory in bytes at its most; `share` is of one core."""

    units: float
    cpu: float
    wall: float
    memory: int
    taken: Taken

    @property
    def per_unit(self) -> float:
        """CPU seconds for one unit."""
        return self.cpu / self.units

    @property
    def share(self) -> float:
        """How much of its core the proxy was busy: 1 means that it was the bottleneck."""
        return self.cpu / self.wall


@dataclass(slots=True)
class Outcome:
    """All repetitions of one workload on one proxy; `problem` where there is none that counts."""

    repetitions: list[Repetition] = field(default_factory=list)
    problem: str = ""
    idle_memory: int = 0

    @property
    def cpu(self) -> float | None:
        """CPU seconds per unit, the median."""
        return median(each.per_unit for each in self.repetitions) if self.repetitions else None

    @property
    def spread(self) -> float:
        """How far the repetitions are apart: the largest CPU per unit by the smallest, less 1."""
        costs = [each.per_unit for each in self.repetitions]
        return max(costs) / min(costs) - 1 if costs and min(costs) > 0 else 0.0

    @property
    def first_byte(self) -> float | None:
        """Seconds to the first byte, the median of the repetitions' medians."""
        return median(median(each.taken.first_bytes) for each in self.repetitions) if self.repetitions else None

    def delay(self, percent: int) -> float | None:
        """That percentile of the delays of stamped events in seconds, the median of the repetitions'."""
        found = [quantiles(each.taken.delays, n=100)[percent - 1] for each in self.repetitions if each.taken.delays]
        return median(found) if found else None


Outcomes = dict[str, dict[str, Outcome]]
"""By workload and peer."""


@contextlib.contextmanager
def upstream(directory: Path) -> Iterator[int]:
    """The upstream's process while the block runs; its port."""
    command = [sys.executable, "-m", "bench.upstream"]
    with running(command, directory / "upstream.log", core=cores()[1], stdout=-1) as process:
        yield int(first_line(process.stdout))


async def answers(port: int, limit: float, process: subprocess.Popen[bytes], *, by_model: bool = False) -> None:
    """Return once the proxy there answers. Raises MissingError when its process ends, or `limit` seconds have gone."""
    until = time.monotonic() + limit
    request = chat("json")(by_model)
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if (await ask(port, request)).done:
                return
        if process.poll() is not None:
            raise MissingError("it did not start")
        await asyncio.sleep(0.1)
    raise MissingError(f"it did not answer within {limit:.0f} s")


@contextlib.asynccontextmanager
async def peers_up(
    peers: Sequence[Peer], upstream_port: int, problems: dict[str, str]
) -> AsyncIterator[dict[str, tuple[Peer, int, int]]]:
    """All of these that can be started, with their ports and process ids; `problems` gets what is wrong with others."""
    up: dict[str, tuple[Peer, int, int]] = {}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        for peer in peers:
            ports, home = Ports(free_port(), upstream_port), directory / peer.name.replace(" ", "-")
            try:
                process = stack.enter_context(started(peer, ports, home))
                await answers(ports.own, peer.start_limit, process, by_model=peer.by_model)
                up[peer.name] = (peer, ports.own, process.pid)
            except MissingError as error:
                print(f"  {peer.name}: {error}\n{_last_words(home)}", file=sys.stderr)
                problems[peer.name] = str(error)
        yield up


def _last_words(directory: Path) -> str:
    """What a peer said last in its own log."""
    log = directory / "log"
    return "\n".join(log.read_text(errors="replace").splitlines()[-5:]) if log.exists() else ""


async def measure(workload: Workload, peers: Sequence[Peer], size: Size, upstream_port: int) -> dict[str, Outcome]:
    """The workload on all peers and on none."""
    wanted = [peer for peer in peers if not peer.only or workload.name in peer.only]
    outcomes = {name: Outcome() for name in (DIRECT, *(peer.name for peer in wanted))}
    problems: dict[str, str] = {}
    async with peers_up(wanted, upstream_port, problems) as up:
        for name, (_, _, pid) in up.items():
            outcomes[name].idle_memory = memory(pid)
        for number in range(-1, size.repetitions):
            for name, outcome in outcomes.items():
                if outcome.problem or (name != DIRECT and name not in up):
                    continue
                peer, port, pid = up.get(name, (None, upstream_port, 0))
                load = _load(workload, port, size, number, by_model=peer is not None and peer.by_model)
                done = await repetition(load, workload.units, pid)
                _take(outcome, done, warm=number < 0)
    for name, why in problems.items():
        outcomes[name].problem = why
    return outcomes


def _load(workload: Workload, port: int, size: Size, number: int, *, by_model: bool) -> Load:
    request = workload.request(by_model)
    if workload.kind == "paced":
        return Load(port, request, workload.streams, once=True, stamped=min(STAMPED, workload.streams))
    return Load(port, request, workload.streams, WARM_UP if number < 0 else size.seconds)


def _take(outcome: Outcome, done: Repetition, *, warm: bool) -> None:
    if done.taken.failed or not done.taken.done:
        outcome.problem = f"{done.taken.failed} of {done.taken.failed + done.taken.done} failed"
        outcome.repetitions.clear()
    elif not warm:
        outcome.repetitions.append(done)


async def repetition(load: Load, units: float, pid: int) -> Repetition:
    """One run of `load`, of which each answer is `units` units, on the process `pid` (0: none)."""
    most = 0

    async def watch() -> None:
        nonlocal most
        while pid:
            await asyncio.sleep(0.2)
            most = max(most, memory(pid))

    watching = asyncio.create_task(watch())
    cpu, begun = cpu_seconds(pid) if pid else 0.0, time.perf_counter()
    taken = await load.run()
    wall = time.perf_counter() - begun
    cpu = cpu_seconds(pid) - cpu if pid else 0.0
    watching.cancel()
    most = max(most, memory(pid)) if pid else 0
    return Repetition(max(taken.done, 1) * units, cpu, wall, most, taken)
