"""What jobs are made of, without a network: their states, their room, their table, their folder."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from proxy.errors import JobInterrupted, JobsFull, Refusal, SettingsError, UnknownModel, refusal_of
from proxy.inbound import Inbound
from proxy.jobs.desk import wants_job
from proxy.jobs.folder import Folder
from proxy.jobs.job import Answer, Job, Request
from proxy.jobs.recorder import Recorder
from proxy.jobs.shelf import Entry, Shelf
from proxy.jobs.store import CHUNK, Store
from proxy.jobs.table import Table

numbers = itertools.count()


def a_job(**changes: object) -> Job:
    job = Job(f"id-{next(numbers)}", "queued", "tts-a", "tts", False, "10.0.0.1", "", 1000.0)
    return replace(job, **changes)  # type: ignore[arg-type]


def inbound(method: str = "POST", *headers: tuple[bytes, bytes]) -> Inbound:
    return Inbound(method, b"/v1/audio/speech", b"a=%2F", list(headers), "10.0.0.1", "http")


REQUEST = Request.of(inbound("POST", (b"host", b"x")), "tts-a", rewritten=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    store.close()


# --- the job and its request


@pytest.mark.parametrize(
    ("prefer", "wanted"),
    [
        (b"respond-async", True),
        (b"wait=5, Respond-Async", True),
        (b"wait=5", False),
        (b"respond-asynchronously", False),
    ],
)
def test_a_job_is_only_what_asks_for_it(prefer: bytes, wanted: bool) -> None:
    assert wants_job(inbound("POST", (b"prefer", prefer))) is wanted
    assert not wants_job(inbound("GET", (b"prefer", prefer)))
    assert not wants_job(inbound())


def test_a_request_comes_back_as_it_was_but_for_the_credential() -> None:
    fields = [(b"host", b"h"), (b"x-own", b"\xe4\xff"), (b"x-own", b"2"), (b"cookie", b"a=b")]
    secret = [(b"authorization", b"Bearer sk"), (b"x-api-key", b"sk"), (b"prefer", b"respond-async")]
    came = Inbound(
        "POST", b"/v1/\xc3\xa4", b"q=\xff", [*fields, *secret, (b"proxy-authorization", b"sk")], "::1", "https"
    )
    request = Request.of(came, "tts-\u00e4", rewritten=False)
    text = request.dump()
    assert "sk" not in text
    again = Request.load(text)
    assert again.inbound(None) == replace(came, headers=fields)
    assert again.inbound("sk-up").headers == [*fields, (b"authorization", b"Bearer sk-up")]
    assert (again.name, again.rewritten) == ("tts-\u00e4", False)


def test_an_answer_comes_back_as_it_was() -> None:
    answer = Answer(207, [(b"set-cookie", b"a"), (b"set-cookie", b"\xff"), (b"x", b"")])
    assert Answer.load(answer.dump()) == answer


def test_the_transitions_are_known_from_the_last_state() -> None:
    queued = a_job()
    running = replace(queued, state="running", started_at=1002.5, wait_seconds=2.5)
    failed = replace(running, state="failed", finished_at=1003.0, error_code="interrupted", error_message="m")
    early = replace(queued, state="cancelled", finished_at=1001.0)
    assert list(queued.transitions()) == [queued]
    assert list(running.transitions()) == [queued, running]
    assert [job.state for job in failed.transitions()] == ["queued", "running", "failed"]
    assert [job.show()["error"] for job in failed.transitions()] == [
        None,
        None,
        {"code": "interrupted", "message": "m"},
    ]
    assert [job.show()["wait_seconds"] for job in failed.transitions()] == [None, 2.5, 2.5]
    assert list(early.transitions()) == [queued, early]
    assert [job.finished for job in (queued, running, failed, early)] == [False, False, True, True]


def test_long_names_are_cut_where_they_are_shown() -> None:
    assert len(a_job(requested="x" * 5000).show()["model"]) == 200


def test_a_refusal_is_known_by_its_code() -> None:
    assert isinstance(refusal_of("interrupted", None), JobInterrupted)
    assert isinstance(refusal_of("not_found", "m"), UnknownModel)
    assert type(refusal_of("of a later version", "m")) is Refusal


# --- room


class Room:
    """A shelf that remembers what it told to be removed."""

    def __init__(self, limit: int, ttl: float = 60.0) -> None:
        self.removed: list[str] = []
        self.shelf = Shelf(limit, ttl, self._remove)

    def _remove(self, ids: Iterable[str]) -> None:
        self.removed += ids

    def put(self, job: Job, *, ago: float = 0.0) -> Entry:
        self.shelf.take(job.size)
        entry = Entry(job, "c")
        self.shelf.put(entry)
        if job.finished:
            self.shelf.finished(entry, ago)
        return entry


def test_the_oldest_finished_jobs_make_room_and_others_never() -> None:
    room = Room(100)
    waiting = room.put(a_job(size=40))
    first, second = (room.put(a_job(size=20, state="succeeded")) for _ in range(2))
    room.shelf.take(20)
    assert room.removed == []
    room.shelf.take(10)
    assert room.removed == [first.job.id]
    assert room.shelf.used == 90
    with pytest.raises(JobsFull) as caught:
        room.shelf.take(61)
    assert room.removed == [first.job.id, second.job.id], "one that is too large for all of it takes all of it"
    assert caught.value.retry_after == 30
    assert room.shelf.used == 70, "what was refused is not counted"
    assert [entry.job for entry in room.shelf] == [waiting.job]


def test_a_job_that_finished_before_the_restart_has_only_the_rest_of_its_time() -> None:
    room = Room(100, ttl=60.0)
    over, kept = (room.put(a_job(state="succeeded", size=10), ago=ago) for ago in (61.0, 59.0))
    room.shelf.expire()
    assert room.removed == [over.job.id]
    assert room.shelf.get(over.job.id) is None
    assert room.shelf.get(kept.job.id) is kept
    assert room.shelf.used == 10


# --- on disk


async def body(data: bytes, store: Store, job: Job) -> None:
    await store.add(job, REQUEST, httpx.ByteStream(data))


async def read(stream: httpx.AsyncByteStream) -> bytes:
    return b"".join([piece async for piece in stream])


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK])
async def test_a_request_is_on_disk_as_it_came(store: Store, size: int) -> None:
    job, data = a_job(), bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    await body(data, store, job)
    assert await read(store.body(job.id)) == data
    assert await read(store.body(job.id)) == data, "for a second try, too"
    assert await store.request(job.id) == REQUEST
    assert store.table.all() == [job]


async def test_a_restart_finds_each_job_in_its_state(store: Store, tmp_path: Path) -> None:
    jobs = [a_job() for _ in range(5)]
    for job in jobs:
        await body(b"x", store, job)
    running = replace(jobs[1], state="running", started_at=1001.0, wait_seconds=1.0)
    await store.begin(running)
    done = replace(jobs[2], state="succeeded", finished_at=1003.0, size=3)
    record = Recorder(store, done.id, lambda size: None)
    await record({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
    await record({"type": "http.response.body", "body": b"abc"})
    await record.complete()
    record.close()
    await store.finish(done, record.answer)
    store.remove([jobs[3].id])
    half = Recorder(store, running.id, lambda size: None)
    await half({"type": "http.response.body", "body": b"x" * CHUNK, "more_body": True})
    half.close()
    store.close()
    again = Store(tmp_path)
    try:
        queued, interrupted, succeeded, last = again.restore()
        assert (queued, last) == (jobs[0], jobs[4])
        assert succeeded == done
        assert (interrupted.state, interrupted.error_code, interrupted.started_at) == ("failed", "interrupted", 1001.0)
        assert interrupted.finished_at is not None
        assert again.table.all()[1] == interrupted, "told once for all"
        left = {path.name for path in (tmp_path / "jobs").iterdir() if path.suffix in {".request", ".result"}}
        assert left == {f"{jobs[0].id}.request", f"{jobs[4].id}.request", f"{done.id}.result"}
        assert again.result(done.id).read_bytes() == b"abc"
        assert await again.answer(done.id) == Answer(200, [(b"x", b"y")])
        assert again.folder.secret == (tmp_path / "jobs/secret").read_bytes()
    finally:
        again.close()


async def test_what_a_job_sent_is_forgotten_when_it_is_over(store: Store, tmp_path: Path) -> None:
    job = a_job()
    await body(b"x", store, job)
    await store.finish(replace(job, state="cancelled", finished_at=1001.0), None)
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs/jobs.sqlite3")) as connection:
        assert connection.execute("SELECT state, request FROM jobs").fetchall() == [("cancelled", None)]


def test_the_table_knows_its_version_and_loses_nothing_it_said(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with contextlib.closing(Table(path)) as table:
        table.insert(job := a_job(anthropic=True), REQUEST)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    with contextlib.closing(Table(path)) as table:
        assert table.all() == [job]
        assert table.all()[0].anthropic is True
        assert table._connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"


def test_a_folder_is_one_proxys_until_it_ends(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with pytest.raises(SettingsError, match="another proxy runs on"):
        Folder(tmp_path)
    secret = folder.secret
    folder.close()
    again = Folder(tmp_path)
    assert again.secret == secret
    assert len(secret) == 32
    again.close()


@pytest.mark.parametrize("what", ["missing", "file", "table"])
def test_a_folder_that_cannot_be_used_is_one_sentence(what: str, tmp_path: Path) -> None:
    data_dir = tmp_path / "d"
    if what != "missing":
        data_dir.mkdir()
        (data_dir / "jobs").write_bytes(b"") if what == "file" else (data_dir / "jobs/jobs.sqlite3").mkdir(parents=True)
    with pytest.raises(SettingsError) as caught:
        Store(data_dir)
    (problem,) = caught.value.problems
    assert problem.startswith("data_dir: ")
    assert "\n" not in problem


async def test_a_result_without_room_is_dropped_or_read_to_its_end(store: Store) -> None:
    def full(size: int) -> None:
        raise JobsFull

    head = {"type": "http.response.start", "status": 200, "headers": []}
    with pytest.raises(JobsFull):
        await Recorder(store, "a", full)(head)
    patient = Recorder(store, "b", full, to_its_end=True)
    await patient(head)
    await patient({"type": "http.response.body", "body": b"x"})
    assert isinstance(patient.failure, JobsFull)
    assert patient.size == 0
