"""`/-/jobs/ID`: a job, its result, its transitions as they come, and the end of it.

Whoever has the id may ask; where keys are needed, only with the key that made the job. A job that is somebody else's is
answered like one that does not exist.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import IO

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from proxy.errors import (
    ClientGone,
    JobCancelled,
    JobNotFound,
    JobUnfinished,
    PageNotFound,
    Refusal,
    refusal_of,
)
from proxy.inbound import RawHeaders
from proxy.jobs.desk import Jobs
from proxy.jobs.job import Answer
from proxy.jobs.shelf import Entry
from proxy.jobs.store import CHUNK, Store
from proxy.watch import ClientWatch

JOB_PAGES = b"/-/jobs/"
"""Where all of them are."""

EVENT_FIELDS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def accept(jobs: Jobs, entry: Entry, send: Send) -> None:
    """Answer the request for a job with the job (RFC 7240, section 4.1)."""
    body = json.dumps(entry.job.show(jobs.position(entry))).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"location", JOB_PAGES + entry.job.id.encode()),
        (b"preference-applied", b"respond-async"),
    ]
    await send({"type": "http.response.start", "status": 202, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def make_job_pages(
    jobs: Jobs, identify: Callable[[Scope], str], refused: Callable[[Refusal], None], keepalive_every: float
) -> Starlette:
    """The application that serves them. Keys have been checked before; `identify` tells whose it was."""

    def entry_of(request: Request) -> Entry:
        return jobs.find(request.path_params["id"], identify(request.scope))

    async def show(request: Request) -> Response:
        entry = entry_of(request)
        return JSONResponse(entry.job.show(jobs.position(entry)))

    async def delete(request: Request) -> Response:
        entry = entry_of(request)
        await jobs.cancel(entry)
        return JSONResponse(entry.job.show())

    async def result(request: Request) -> Response | _Replay:
        entry = entry_of(request)
        answer = await jobs.store.answer(entry.job.id) if entry.job.finished else None
        if answer is None:
            return _refusal_for(entry, request)
        return _Replay(jobs.store, entry.job.id, answer)

    async def events(request: Request) -> _Events:
        return _Events(jobs, entry_of(request), keepalive_every)

    async def refuse(request: Request, error: Exception) -> Response:
        refusal = error if isinstance(error, Refusal) else PageNotFound()
        refused(refusal)
        return _rendered(refusal, request, refusal.headers())

    routes = [
        Route("/-/jobs/{id}", show, methods=["GET"]),
        Route("/-/jobs/{id}", delete, methods=["DELETE"]),
        Route("/-/jobs/{id}/result", result, methods=["GET"]),
        Route("/-/jobs/{id}/events", events, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={404: refuse, Refusal: refuse})


def _rendered(refusal: Refusal, request: Request, fields: RawHeaders, *, anthropic: bool = False) -> Response:
    accept = request.headers.get("accept", "").encode("latin-1")
    content_type, body = refusal.render(anthropic=anthropic, accept=accept)
    response = Response(body, refusal.status)
    response.raw_headers += [(b"content-type", content_type), *fields]
    return response


def _refusal_for(entry: Entry, request: Request) -> Response:
    """What a job that has no answer to replay is answered with: what its request would have been answered with."""
    job = entry.job
    if not job.finished:
        raise JobUnfinished(f"The job is {job.state}; its result is here once it has finished.")
    if job.state == "cancelled":
        raise JobCancelled
    if job.answered:
        raise JobNotFound  # its time was over a moment ago
    refusal = refusal_of(job.error_code or "", job.error_message)
    return _rendered(refusal, request, [], anthropic=job.anthropic)  # it is final: nothing to wait for or to send again


class _Replay:
    """The upstream's answer, as it came. The file is open before anything is sent, so that expiry cannot cut it."""

    def __init__(self, store: Store, job_id: str, answer: Answer) -> None:
        self._store, self._answer = store, answer
        self._path = store.result(job_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        opened: list[IO[bytes]] = []

        def open_it() -> None:
            opened.append(self._path.open("rb", buffering=0))

        def close_it() -> None:
            for file in opened:
                file.close()

        try:
            await self._store.with_file(open_it)
            async with ClientWatch(receive):
                await self._send(opened[0], send)
        except FileNotFoundError as error:
            raise JobNotFound from error
        except ClientGone:
            pass
        finally:
            self._store.later(close_it)

    async def _send(self, file: IO[bytes], send: Send) -> None:
        await send({"type": "http.response.start", "status": self._answer.status, "headers": self._answer.headers})
        while chunk := await self._store.with_file(file.read, CHUNK):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _Events:
    """The transitions of a job as server-sent events, from its first state on; ends after the last one."""

    def __init__(self, jobs: Jobs, entry: Entry, keepalive_every: float) -> None:
        self._jobs, self._entry, self._every = jobs, entry, keepalive_every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_FIELDS})
        try:
            async with ClientWatch(receive):
                async for data in self._events():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[bytes]:
        told: set[str] = set()
        while True:
            changed, job = self._entry.changed, self._entry.job
            for state in job.transitions():
                if state.state not in told:
                    told.add(state.state)
                    shown = state.show(self._jobs.position(self._entry) if state is job else None)
                    yield f"event: {state.state}\ndata: {json.dumps(shown)}\n\n".encode()
            if job.finished:
                return
            while not changed.is_set():
                try:
                    async with asyncio.timeout(self._every):
                        await changed.wait()
                except TimeoutError:
                    yield f": {job.state}\n\n".encode()
