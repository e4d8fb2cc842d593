"""The bench runs: every workload once, as small as it can be, on this proxy and the simulator. No figure is checked.

What the tables say is checked on figures made up here, so that a table cannot show one thing and a goal another.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.client import Taken
from bench.goals import Goal, goals
from bench.http import Message, chunk
from bench.measuring import Outcome, Repetition, _take, measure, upstream
from bench.peers import BASELINE, DIRECT, OURS, OURS_H11, MissingError, Peer, Ports, Start
from bench.report import KEPT, document, number, table, write
from bench.results import Results
from bench.swaps import PATIENCE, Call, _came_to
from bench.workloads import GROUPS, SMOKE, workloads

ROOT = Path(__file__).resolve().parents[1]
WIRE = [each.name for each in workloads(SMOKE)]


def smoke(tmp_path: Path, *only: str, peers: str = OURS) -> str:
    """The page of a smoke run of those workloads."""
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "bench", "--smoke", "--output", str(page), "--peers", peers, "--only", *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return page.read_text(encoding="utf-8")


def cells(page: str, row: str) -> list[str]:
    """The cells of the first row with this name."""
    lines = (line.strip("|\n").split("|") for line in page.splitlines() if line.startswith("|"))
    return next([cell.strip() for cell in line[1:]] for line in lines if line[0].strip() == row)


@pytest.mark.slow
def test_smoke_every_workload_on_the_wire(tmp_path: Path) -> None:
    costs = cells(smoke(tmp_path, *WIRE), OURS)
    assert len(costs) == len(WIRE)
    assert all(cost.endswith(" µs") for cost in costs), costs


@pytest.mark.slow
def test_smoke_small_requests_under_h11(tmp_path: Path) -> None:
    (cost,) = cells(smoke(tmp_path, "small-16", peers=OURS_H11), OURS_H11)
    assert cost.endswith(" µs")


@pytest.mark.slow
def test_smoke_the_queue_and_the_lock(tmp_path: Path) -> None:
    page = smoke(tmp_path, "queue", "locks")
    assert cells(page, OURS)[0] == str(SMOKE.waiters)
    assert all(float(cell) > 0 for cell in cells(page, "FairRWLock, write"))


@pytest.mark.slow
def test_smoke_the_swaps(tmp_path: Path) -> None:
    page = smoke(tmp_path, "swaps")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| starvation")]
    assert [row[2].strip() for row in rows] == ["llama-swap alone", "fifo", "batch"]
    assert all(int(row[3]) >= 1 for row in rows)


# -- what the tables are made of


def repetition(cpu: float, units: float = 10.0) -> Repetition:
    return Repetition(units, cpu, wall=cpu * 2, memory=2**20, taken=Taken(done=10, first_bytes=[0.001], delays=[]))


def outcome(*cpus: float) -> Outcome:
    return Outcome([repetition(cpu) for cpu in cpus])


def test_a_cost_is_the_median_of_the_repetitions_as_a_multiple_of_nginx() -> None:
    results = Results({"small-16": {BASELINE: outcome(1.0, 2.0, 9.0), OURS: outcome(30.0, 10.0, 14.0)}})
    assert results.ratio("small-16", OURS) == pytest.approx(7.0)
    page = document(results, [each for each in workloads(SMOKE) if each.name == "small-16"], SMOKE, 0.0)
    assert cells(page, OURS) == ["7.00"]
    assert "| small requests, c=16" in page
    assert "met" in page


@pytest.mark.parametrize("with_nginx", [True, False])
def test_a_workload_of_which_some_answers_failed_has_no_figure(*, with_nginx: bool) -> None:
    broken = outcome(1.0)
    _take(broken, Repetition(10.0, 1.0, 1.0, 2**20, Taken(done=1, failed=3)), warm=False)
    results = Results({"small-16": {OURS: broken} | ({BASELINE: outcome(1.0)} if with_nginx else {})})
    assert results.ratio("small-16", OURS) is None
    page = document(results, [each for each in workloads(SMOKE) if each.name == "small-16"], SMOKE, 0.0)
    assert cells(page, OURS) == ["3 of 4 failed"]


async def test_a_peer_that_is_not_installed_says_so_instead_of_a_figure(tmp_path: Path) -> None:
    def missing(ports: Ports, directory: Path) -> Start:
        raise MissingError("it is not installed")

    with upstream(tmp_path) as port:
        small = next(each for each in workloads(SMOKE) if each.name == "small-1")
        found = await measure(small, [Peer("gone", missing)], SMOKE, port)
    assert (found["gone"].problem, found["gone"].cpu) == ("it is not installed", None)
    assert found[DIRECT].repetitions[0].taken.done > 0


def test_the_proxies_have_a_core_for_themselves_also_when_the_bench_keeps_to_the_others() -> None:
    code = "from bench.__main__ import _prepare; from bench.processes import cores; _prepare(); print(*cores())"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    proxies, others = told.split()
    if len(os.sched_getaffinity(0)) > 1:
        assert proxies not in others.split(",")


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [(None, "not measured"), (4.0, "met, and the stretch"), (7.9, "met"), (9.1, "in the noise"), (9.3, "**missed**")],
)
def test_a_goal_is_missed_only_beyond_the_noise(figure: float | None, verdict: str) -> None:
    assert Goal("", "", figure, 8, 5).verdict == verdict


def test_every_goal_is_there_when_nothing_was_measured() -> None:
    assert {goal.verdict for goal in goals(Results())} == {"not measured"}


def test_what_is_written_by_hand_below_the_mark_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write(page, "old")
    page.write_text(page.read_text(encoding="utf-8") + "by hand\n", encoding="utf-8")
    write(page, "new")
    assert page.read_text(encoding="utf-8") == f"new\n{KEPT}\nby hand\n"


def test_tables_line_up_and_numbers_have_three_digits() -> None:
    lines = table(["a", ""], [["b", "cccc"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [number(value) for value in (None, 0.1234, 12.34, 123.4)] == ["–", "0.12", "12.3", "123"]  # noqa: RUF001


def test_only_a_silence_burns_a_timeout_and_only_the_models_bytes_end_a_wait() -> None:
    quiet, kept_alive = Call("chat", sent=0.0), Call("chat", sent=0.0)
    quiet.first, quiet.ended, quiet.silence, quiet.status = 100.0, 110.0, 100.0, 200
    kept_alive.first, kept_alive.ended, kept_alive.silence, kept_alive.status = 100.0, 110.0, 3.0, 200
    evening = _came_to([quiet, kept_alive], loads=1, scale=1.0)
    assert evening.burnt == tuple(int(limit < 100) for limit in PATIENCE)
    assert (evening.waits["chat"][0], evening.makespan, evening.failed) == (100.0, 110.0, 0)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    "message",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"hello") + b"0\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length:5\r\n\r\nhello",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_a_message_is_whole_with_its_last_byte_however_it_is_cut(message: bytes, size: int) -> None:
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    read = Message()
    answer = message.startswith(b"HTTP")
    assert [read.feed(piece, answer=answer) for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_every_workload_can_be_named() -> None:
    assert {each.group for each in workloads(SMOKE)} <= set(GROUPS)
    command = [sys.executable, "-m", "bench", "--help"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(name in told for name in (*GROUPS, *WIRE)), told
