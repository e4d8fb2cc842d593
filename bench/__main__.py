"""`./scripts/bench [--quick] [--only NAME…] [--peers NAME…]`: one run, one page."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from bench import report
from bench.measuring import measure, upstream
from bench.peers import PEERS, Peer
from bench.processes import CORES, awake, cores
from bench.queueing import measure_queue
from bench.results import Results
from bench.swaps import measure_swaps
from bench.workloads import FULL, GROUPS, QUICK, SMOKE, Size, Workload, workloads

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
OPEN_FILES = 16384


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    options = _parse(arguments)
    size = SMOKE if options.smoke else QUICK if options.quick else FULL
    size = replace(size, repetitions=options.repetitions or size.repetitions)
    peers = [peer for peer in PEERS if not options.peers or any(name in peer.name for name in options.peers)]
    _prepare()
    load = os.getloadavg()[0]
    only = options.only or GROUPS
    asked = [each for each in workloads(size) if {each.group, each.name} & set(only)]
    with awake([] if options.smoke else CORES):
        results = uvloop.run(run(asked, peers, size, only))
    text = report.document(results, asked, size, load)
    print(text)
    partial = options.only or options.peers or options.quick or options.smoke
    if page := options.output or (None if partial else PAGE):
        report.write(page, text)
    return 1 if failed(results) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [*GROUPS, *(each.name for each in workloads(SMOKE) if each.name not in GROUPS)]
    parser = argparse.ArgumentParser(prog="scripts/bench", description="What the proxy costs, and what it is for.")
    parser.add_argument("--quick", action="store_true", help="one short repetition of everything")
    parser.add_argument("--smoke", action="store_true", help="as little as shows that it works")
    parser.add_argument("--repetitions", type=int, metavar="N", help="of every workload, interleaved; 5 by default")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="those whose names contain one of these")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the page goes; else, complete, into docs/")
    return parser.parse_args(arguments)


def _prepare() -> None:
    """Leave a core to the proxies, and let a thousand connections be open here and in every child."""
    os.sched_setaffinity(0, set(map(int, cores()[1].split(","))))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, most), most))


async def run(asked: Sequence[Workload], peers: Sequence[Peer], size: Size, only: Sequence[str]) -> Results:
    """Everything that is asked for."""
    results = Results()
    with tempfile.TemporaryDirectory() as directory, upstream(Path(directory)) as port:
        for workload in asked:
            _say(workload.title)
            results.outcomes[workload.name] = await measure(workload, peers, size, port)
        if "queue" in only:
            _say("queue")
            results.queue = await measure_queue(size, port)
    if "locks" in only:
        _say("locks")
        results.locks = measure_locks(size)
    if "swaps" in only:
        _say("swaps")
        results.swaps = await measure_swaps(size)
    return results


def measure_locks(size: Size) -> dict[str, list[float]]:
    """`bench.locks` in a process of its own."""
    command = ["taskset", "-c", cores()[0], sys.executable, "-m", "bench.locks", str(size.lock_seconds)]
    found: dict[str, list[float]] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def failed(results: Results) -> bool:
    """Whether a proxy of ours failed a workload, or an evening through it had a request refused."""
    ours = [of for outcomes in results.outcomes.values() for name, of in outcomes.items() if name.startswith("ours")]
    behind = [evening for ways in results.swaps.values() for way, evening in ways.items() if way in {"fifo", "batch"}]
    return any(of.problem for of in ours) or any(evening.failed for evening in behind)


def _say(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
