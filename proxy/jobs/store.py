"""Jobs on disk, seen from the event loop: every call is carried out in a thread, those of one kind in order.

The table has a thread of its own, so that the commit which a lease waits for is behind no file. Files have another. A
call that was begun is carried out even if its caller is cancelled, and what is asked for afterwards comes after it: so
removing a job needs no waiting, whatever is still under way for it.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

import httpx
import structlog

from proxy.errors import JobInterrupted, JobsFull, SettingsError
from proxy.jobs.folder import REQUEST, RESULT, Folder
from proxy.jobs.job import Answer, Job, Request
from proxy.jobs.table import Table

log = structlog.get_logger("gpu_lease_proxy")

P = ParamSpec("P")
T = TypeVar("T")

CHUNK = 256 * 1024
"""Bytes read or written at once: large enough that the hop into a thread costs nothing beside the copy."""


class Store:
    """The jobs of one proxy. Without a `data_dir` nothing is made before the first job, and `close` removes it."""

    def __init__(self, data_dir: Path | None) -> None:
        """Raises SettingsError where `data_dir` cannot be used."""
        self._data_dir = data_dir
        self._folder: Folder | None = None
        self._table: Table | None = None
        self._table_thread = ThreadPoolExecutor(1, thread_name_prefix="jobs-table")
        self._file_thread = ThreadPoolExecutor(1, thread_name_prefix="jobs-files")
        if data_dir is not None:
            self._open()

    def _open(self) -> None:
        if self._folder is not None:
            return
        folder = Folder(self._data_dir)
        try:
            self._table = Table(folder.table)
        except SettingsError:
            folder.close()
            raise
        self._folder = folder

    async def ready(self) -> None:
        """Open what is not open yet. Raises JobsFull where that is impossible."""
        if self._folder is None:
            try:
                await self._in_order(self._open)
            except SettingsError as error:
                raise JobsFull(f"Jobs cannot be stored: {error}.") from error

    @property
    def folder(self) -> Folder:
        """The folder; `ready` must have been awaited."""
        if self._folder is None:
            raise RuntimeError("the store is not open")
        return self._folder

    @property
    def table(self) -> Table:
        """The table; `ready` must have been awaited."""
        if self._table is None:
            raise RuntimeError("the store is not open")
        return self._table

    async def _in_order(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._table_thread.submit(call, *args, **kwargs))

    async def with_file(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do something with a file in the files' thread."""
        return await asyncio.wrap_future(self._file_thread.submit(call, *args, **kwargs))

    # -- at the start

    def restore(self) -> list[Job]:
        """What the last run left, in the order of queueing. Those that it left running are interrupted from now on."""
        if self._table is None:
            return []
        found = []
        for job in self._table.all():
            left = job
            if job.state == "running":
                error = JobInterrupted()
                over = replace(job, state="failed", finished_at=time.time(), size=0)
                left = replace(over, error_code=error.code, error_message=error.message)
                self._table.finish(left, None)
            found.append(left)
        keep = {job.id + REQUEST for job in found if not job.finished}
        self.folder.sweep(keep | {job.id + RESULT for job in found if job.answered})
        return found

    # -- one job

    async def add(self, job: Job, request: Request, body: httpx.AsyncByteStream) -> None:
        """Write a new job down; once this returns it survives everything. Raises JobsFull where the disk does not."""
        try:
            await self._write(job.id + REQUEST, body)
            await self._in_order(self.table.insert, job, request)
        except (OSError, sqlite3.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise JobsFull(f"The job cannot be stored (setting data_dir): {why}.") from error

    async def _write(self, name: str, body: httpx.AsyncByteStream) -> None:
        file = Writer(self, name)
        try:
            async for chunk in body:
                await file.write(chunk)
            await file.complete()
        finally:
            file.close()

    async def begin(self, job: Job) -> None:
        """Write down that the job runs."""
        await self._in_order(self.table.begin, job)

    async def request(self, job_id: str) -> Request:
        """What an unfinished job is to send."""
        return await self._in_order(self.table.request, job_id)

    async def finish(self, job: Job, answer: Answer | None) -> None:
        """Write down how the job ended. Its request goes, and without an `answer` what there is of a result."""
        await self._in_order(self.table.finish, job, answer)
        self.later(self.folder.remove, job.id + REQUEST)
        if answer is None:
            self.later(self.folder.remove, job.id + RESULT)

    async def answer(self, job_id: str) -> Answer | None:
        """The head of the upstream's answer."""
        return await self._in_order(self.table.answer, job_id)

    def body(self, job_id: str) -> httpx.AsyncByteStream:
        """The body of a job's request."""
        return _FileStream(self, self.folder.path / f"{job_id}{REQUEST}")

    def result(self, job_id: str) -> Path:
        """The file with the body of the answer."""
        return self.folder.path / f"{job_id}{RESULT}"

    def remove(self, ids: Iterable[str]) -> None:
        """Forget these jobs, behind whatever is still under way for them. Nothing is awaited."""
        names = list(ids)
        for job_id in names:
            for suffix in (REQUEST, RESULT):
                self.later(self.folder.remove, job_id + suffix)
        self._table_thread.submit(self.table.remove, names).add_done_callback(_complain)

    def later(self, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do something with a file behind all that is under way. Nothing is awaited."""
        try:
            self._file_thread.submit(call, *args, **kwargs).add_done_callback(_complain)
        except RuntimeError:  # after `close` nothing is under way
            call(*args, **kwargs)

    def close(self) -> None:
        """End the threads once they have done all that was asked of them, and close the files."""
        self._file_thread.shutdown()
        self._table_thread.shutdown()
        if self._table is not None:
            self._table.close()
        if self._folder is not None:
            self._folder.close()
        self._table = self._folder = None


def _complain(done: Future[Any]) -> None:
    """Nobody awaits it: a failure would be missed in silence. Its text may hold a job's id, which no log may."""
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("job_file_failed", kind=type(error).__name__, error=getattr(error, "strerror", None))


class Writer:
    """Writes one new file, piece by piece. It is opened in the thread, so that no cancellation leaves it open."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._file: IO[bytes] | None = None

    async def write(self, data: bytes) -> None:
        """Write `data` at the end."""
        await self._store.with_file(self._write, data)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._store.folder.create(self._name)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    async def complete(self) -> None:
        """Return once the file is on disk, and stays there if the power fails."""
        await self._store.with_file(self._sync)

    def _sync(self) -> None:
        self._write(b"")
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._store.folder.sync()

    def close(self) -> None:
        """Close the file behind what is still being written. Nothing is awaited."""
        self._store.later(self._close)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


class _FileStream(httpx.AsyncByteStream):
    """A file as an httpx stream. It is opened for each piece, so that a reader who is cancelled leaves nothing open."""

    def __init__(self, store: Store, path: Path) -> None:
        self._store, self._path = store, path

    async def __aiter__(self) -> AsyncIterator[bytes]:
        offset = 0
        while chunk := await self._store.with_file(_read, self._path, offset):
            offset += len(chunk)
            yield chunk


def _read(path: Path, offset: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(CHUNK)
