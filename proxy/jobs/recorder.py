"""The client's side of a job's exchange: an ASGI `send` that writes the answer to disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from starlette.types import Message

from proxy.errors import JobsFull
from proxy.jobs.folder import RESULT
from proxy.jobs.job import Answer
from proxy.jobs.store import CHUNK, Store, Writer


class Recorder:
    """Writes one answer. `take` is asked for room before each piece, and raises JobsFull where there is none.

    That ends the exchange; with `to_its_end` it goes on, the answer is dropped, and the error is kept in `failure`.
    """

    def __init__(self, store: Store, job_id: str, take: Callable[[int], None], *, to_its_end: bool = False) -> None:
        self._file = Writer(store, job_id + RESULT)
        self._take_room = take
        self.size = 0
        """Bytes of the answer, its head included."""
        self._pending: list[bytes] = []
        self._unwritten = 0
        self.answer: Answer | None = None
        self.failure: JobsFull | None = None
        self._to_its_end = to_its_end
        self.dropped = False
        """Set it and nothing more is kept: the answer is only read to its end."""

    async def __call__(self, message: Message) -> None:
        """Take a message of the answer (ASGI)."""
        try:
            if not self.dropped:
                await self._record(message)
        except JobsFull as error:
            if not self._to_its_end:
                raise
            self.failure, self.dropped = error, True

    async def _record(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answer = Answer(message["status"], list(message["headers"]))
            self._take(len(self.answer.dump()))
        elif body := message.get("body", b""):
            self._take(len(body))
            self._pending.append(body)
            self._unwritten += len(body)
            if self._unwritten >= CHUNK:
                await self._flush()

    def _take(self, size: int) -> None:
        self._take_room(size)
        self.size += size

    async def _flush(self) -> None:
        data = b"".join(self._pending)
        self._pending.clear()
        self._unwritten = 0
        with _room_on_disk():
            await self._file.write(data)

    async def complete(self) -> None:
        """Return once the whole answer is on disk, and stays there if the power fails. Raises JobsFull."""
        await self._flush()
        with _room_on_disk():
            await self._file.complete()

    def close(self) -> None:
        """Close the file behind what is still being written. Nothing is awaited."""
        self._file.close()


@contextlib.contextmanager
def _room_on_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobsFull(f"The result cannot be stored (setting data_dir): {error.strerror}.") from error
