"""The table of jobs, in SQLite. Every call is one statement, is on disk when it returns, and blocks for that long.

`user_version` tells which proxy wrote the file. What a newer one wrote is not touched: it may mean something else.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import astuple, fields
from pathlib import Path

from proxy.errors import SettingsError
from proxy.jobs.job import Answer, Job, Request

VERSION = 1

_SCHEMA = """
BEGIN;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,
    requested TEXT NOT NULL,
    class_name TEXT NOT NULL,
    anthropic INTEGER NOT NULL,
    client TEXT NOT NULL,
    owner TEXT NOT NULL,
    queued_at REAL NOT NULL,
    started_at REAL,
    finished_at REAL,
    wait_seconds REAL,
    error_code TEXT,
    error_message TEXT,
    size INTEGER NOT NULL,
    request TEXT,
    answer TEXT
);
PRAGMA user_version = 1;
COMMIT;
"""

_NAMES = tuple(field.name for field in fields(Job))
_COLUMNS = ", ".join(_NAMES)
_INSERT = f"INSERT INTO jobs ({_COLUMNS}, request) VALUES ({', '.join('?' * (len(_NAMES) + 1))})"  # noqa: S608
_UPDATE = f"UPDATE jobs SET {', '.join(f'{name} = ?' for name in _NAMES)}"  # noqa: S608 - our own columns


class Table:
    """An open table. Belongs to one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises SettingsError for a file that is damaged, or that a newer proxy wrote."""
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(path)
            except BaseException:
                self._connection.close()
                raise
        except sqlite3.Error as error:
            hint = "move it away, and start with no jobs"
            raise SettingsError([f"data_dir: {path} is no usable table of jobs ({error}); {hint}"]) from error

    def _prepare(self, path: Path) -> None:
        run = self._connection.execute
        (version,) = run("PRAGMA user_version").fetchone()
        if version > VERSION:
            newer = f"data_dir: {path} was written by a newer proxy (version {version}; this one knows {VERSION})"
            raise SettingsError([f"{newer}; start that one, or move the file away"])
        # FULL: a commit is on disk when it returns, also if the power fails; in the write-ahead log that is one sync.
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
            run(f"PRAGMA {pragma}").fetchall()
        if (found := run("PRAGMA quick_check").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found.splitlines()[0])
        if version == 0:
            self._connection.executescript(_SCHEMA)
        run(f"SELECT {_COLUMNS}, request, answer FROM jobs LIMIT 0")  # noqa: S608 - our own columns

    def insert(self, job: Job, request: Request) -> None:
        """A new job."""
        self._connection.execute(_INSERT, (*astuple(job), request.dump()))

    def begin(self, job: Job) -> None:
        """The job runs."""
        self._connection.execute(f"{_UPDATE} WHERE id = ?", (*astuple(job), job.id))

    def request(self, job_id: str) -> Request:
        """What an unfinished job is to send."""
        (text,) = self._connection.execute("SELECT request FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return Request.load(text)

    def finish(self, job: Job, answer: Answer | None) -> None:
        """The job is over. What it sent is no longer needed and is forgotten."""
        text = answer.dump() if answer is not None else None
        change = f"{_UPDATE}, request = NULL, answer = ? WHERE id = ?"
        self._connection.execute(change, (*astuple(job), text, job.id))

    def answer(self, job_id: str) -> Answer | None:
        """The head that upstream answered with, if any."""
        row = self._connection.execute("SELECT answer FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return Answer.load(row[0]) if row is not None and row[0] is not None else None

    def remove(self, ids: Iterable[str]) -> None:
        """Forget these jobs."""
        self._connection.executemany("DELETE FROM jobs WHERE id = ?", [(job_id,) for job_id in ids])

    def all(self) -> list[Job]:
        """Every job, in the order in which they were queued."""
        rows = self._connection.execute(f"SELECT {_COLUMNS} FROM jobs ORDER BY number")  # noqa: S608 - our own columns
        return [_job(dict(zip(_NAMES, row, strict=True))) for row in rows]

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def _job(row: dict[str, object]) -> Job:
    return Job(**{**row, "anthropic": bool(row["anthropic"])})  # type: ignore[arg-type]
