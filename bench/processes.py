"""Processes that the bench starts: on which cores, and what they have used.

CPU time and memory are read from /proc for a process and all its descendants: nginx works in a child.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
STOP_LIMIT = 10.0

CORES = tuple(sorted(os.sched_getaffinity(0)))
"""Those that the bench was given, before it kept to some of them."""


def cores() -> tuple[str, str]:
    """(the proxy's, those of the others), as taskset writes them; equal where there is only one."""
    return str(CORES[0]), ",".join(map(str, CORES[1:] or CORES))


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, *, core: str, env: Mapping[str, str] | None = None, stdout: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process on these cores while the block runs; what it says goes to `log`."""
    pinned = ["taskset", "-c", core, *command] if shutil.which("taskset") else list(command)
    with log.open("wb") as out:
        process = subprocess.Popen(pinned, env=None if env is None else dict(env), stdout=stdout or out, stderr=out)
        try:
            yield process
        finally:
            _stop(process)
            if process.stdout is not None:
                process.stdout.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Twice: the second signal makes a server in Python leave at once. A kill would leave nginx's worker behind."""
    for limit in (0.1, STOP_LIMIT):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit)
            return
    process.kill()
    process.wait()


SPINNER = """
import os
core, parent = {core}, {parent}
os.sched_setaffinity(0, [core])
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def awake(numbers: Iterable[int]) -> Iterator[None]:
    """Keep these cores from falling asleep while the block runs.

    A send that wakes a sleeping core costs the sender many times one that does not. Whoever is slow leaves the other
    side idle and would pay that for every message, and whoever is fast never: so a process that only ever gets the time
    which nobody else wants (SCHED_IDLE) keeps each core busy.
    """
    with contextlib.ExitStack() as stack:
        for core in numbers:
            code = SPINNER.format(core=core, parent=os.getpid())
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", code]))
            stack.callback(process.kill)
        yield


def tree(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents.setdefault(int(_fields(path)[1]), []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its descendants, those that have ended included."""
    total = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            total += sum(map(int, _fields(Path(f"/proc/{each}/stat"))[11:15]))
    return total / TICK


def memory(pid: int) -> int:
    """Resident bytes of a process and all its descendants."""
    total = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return total * PAGE


def _fields(path: Path) -> list[str]:
    """What follows the name in a stat file: state, parent, … (proc(5))."""
    return path.read_text().rpartition(")")[2].split()


def first_line(stream: IO[bytes] | None) -> str:
    """The first line that a process prints."""
    return "" if stream is None else stream.readline().decode().strip()
