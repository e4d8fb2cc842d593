"""One job's life: into the queue, under the lease, through the exchange, to its last state.

A job runs in a task of its own, which enters the queue in its first step: jobs stand in the queue in the order in which
their tasks were made, and one that the queue refuses is known at once. Whatever ends the task gives the lease back
before anything is awaited; what is written down about it comes after that. A cancellation that is no client's writes
nothing, for it is the end of the proxy: on disk a queued job stays queued, and the next start finds a running one
running.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog
from starlette.types import Send

from proxy.classify import Classification
from proxy.completion import APIS, Completion
from proxy.entrance import Entrance
from proxy.errors import CutStream, Draining, Refusal, UpstreamFailed
from proxy.exchange import Accounts, Exchanger
from proxy.jobs.job import UPSTREAM_ERROR, Answer, Job, Request, State
from proxy.jobs.recorder import Recorder
from proxy.jobs.shelf import Entry, Shelf
from proxy.jobs.store import Store
from proxy.knowledge import Knowledge
from proxy.lease import Leases
from proxy.reply import Reply
from proxy.routes import Route, match_route

log = structlog.get_logger("gpu_lease_proxy")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the settings say of jobs: seconds, bytes, the classes whose work is never cut off upstream, and whether half
    a chat stream makes a job fail."""

    ttl: float
    max_bytes: int
    drains: Callable[[str], bool]
    flag_incomplete: bool


class Runner:
    """Runs jobs."""

    def __init__(
        self,
        store: Store,
        shelf: Shelf,
        leases: Leases,
        knowledge: Knowledge,
        exchanger: Exchanger,
        entrance: Entrance,
        accounts: Accounts,
        limits: Limits,
    ) -> None:
        self._store, self._shelf, self._leases, self._knowledge = store, shelf, leases, knowledge
        self._exchanger, self._entrance, self._accounts, self._limits = exchanger, entrance, accounts, limits

    def start(self, entry: Entry, request: Request, *, bounded: bool) -> None:
        """Run it; the bounds of the queue refuse it only if it is `bounded`."""
        entry.task = asyncio.get_running_loop().create_task(self._live(entry, request, bounded=bounded))

    async def _live(self, entry: Entry, request: Request, *, bounded: bool) -> None:
        """All of it. Nothing is raised but a cancellation that is no client's."""
        try:
            await self._run(entry, request, bounded=bounded)
        except Draining as error:
            entry.refused = error  # on disk it stays queued
        except Refusal as error:
            await self._fail(entry, error)
        except CutStream:
            await self._fail(entry, UpstreamFailed("llama-swap broke off its answer."))
        except asyncio.CancelledError:
            if not entry.cancelled or entry.ending:
                raise
            _uncancel()
            await self._end(entry, "cancelled")
        except (OSError, sqlite3.Error) as failure:  # whose text may hold the job's id
            log.error("job_failed", kind=type(failure).__name__, error=getattr(failure, "strerror", None))
            await self._fail(entry, Refusal())
        except Exception:
            log.exception("internal_error")
            await self._fail(entry, Refusal())

    async def _run(self, entry: Entry, request: Request, *, bounded: bool) -> None:
        route = self._knowledge.refine(match_route(request.method, request.path.encode("latin-1")))
        what = self._knowledge.classify(route, request.name, rewritten=request.rewritten)
        what = what if bounded else self._remembered(entry.job, what)
        name = request.request_id
        structlog.contextvars.bind_contextvars(request_id=name)  # of this task, which may begin with the proxy
        hold = entry.hold = self._leases.hold(what, entry.client, request_id=name, is_job=True, bounded=bounded)
        async with contextlib.AsyncExitStack() as stack:
            async with hold:
                recorder = await self._begin(entry, what)
                stack.callback(recorder.close)
                reply = Reply(recorder, classification=what, hold=hold, request_id=name)
                await self._exchanger.run(
                    request.inbound(self._entrance.upstream_key()),
                    hold,
                    lambda: self._store.body(entry.job.id),
                    self._completed(reply, route, what),
                    reply.lease_headers,
                    to_its_end=self._limits.drains(what.class_name),
                )
            if recorder.failure is not None:
                raise recorder.failure
            if recorder.answer is not None and not entry.ending:
                entry.sealed = True
                await recorder.complete()
                await self._succeed(entry, recorder.answer, recorder.size)

    def _completed(self, send: Send, route: Route, what: Classification) -> Send:
        if route.api not in APIS:
            return send
        return Completion(send, self._accounts, what.class_name, what.model, flag=self._limits.flag_incomplete)

    def _remembered(self, job: Job, what: Classification) -> Classification:
        """A job is restored before llama-swap has listed its models: till then, what was known when it came holds."""
        classifier, name = self._knowledge.classifier, job.class_name
        if classifier.catalog is not None or name not in classifier.modes:
            return what
        return replace(what, class_name=name, mode=classifier.modes[name], units=frozenset({name}))

    async def _begin(self, entry: Entry, what: Classification) -> Recorder:
        """The lease is held: write that down before anything is sent."""
        job = replace(entry.job, state="running", started_at=time.time(), wait_seconds=entry.waited)
        await self._store.begin(job)
        entry.become(job)
        to_its_end = self._limits.drains(what.class_name)
        entry.recorder = Recorder(self._store, job.id, lambda size: self._take(entry, size), to_its_end=to_its_end)
        return entry.recorder

    def _take(self, entry: Entry, size: int) -> None:
        self._shelf.take(size)
        entry.job = replace(entry.job, size=entry.job.size + size)

    async def _succeed(self, entry: Entry, answer: Answer, size: int) -> None:
        if answer.status < 400:
            await self._end(entry, "succeeded", answer, size)
        else:
            why = f"llama-swap answered with the status {answer.status}."
            await self._end(entry, "failed", answer, size, code=UPSTREAM_ERROR, message=why)

    async def _fail(self, entry: Entry, error: Refusal) -> None:
        if not entry.entered:
            entry.refused = error
        elif not entry.ending:
            self._accounts.refused(error)
            await self._end(entry, "failed", code=error.code, message=error.message)

    async def _end(
        self,
        entry: Entry,
        state: State,
        answer: Answer | None = None,
        size: int = 0,
        *,
        code: str | None = None,
        message: str | None = None,
    ) -> None:
        """The last state, written down and then told. Without an `answer` nothing of one is kept."""
        entry.sealed = entry.ending = True
        job = replace(entry.job, state=state, finished_at=time.time(), size=size)
        job = replace(job, error_code=code, error_message=message)
        try:
            await self._store.finish(job, answer)
        except sqlite3.Error as failure:
            log.error("job_not_written", kind=type(failure).__name__)
        self._shelf.used -= entry.job.size - size
        entry.become(job)
        self._shelf.finished(entry)

    async def cancel(self, entry: Entry) -> None:
        """Return once the job is cancelled and that is on disk, or once it has ended otherwise."""
        task = entry.task
        if task is not None and not task.done() and not entry.job.finished:
            if not entry.sealed and not entry.cancelled:
                entry.cancelled = True
                if entry.job.state == "running" and self._limits.drains(entry.job.class_name):
                    await self._abandon(entry)
                    return
                task.cancel()
            await asyncio.wait({task})
        if not entry.job.finished:
            await self._end(entry, "cancelled")

    async def _abandon(self, entry: Entry) -> None:
        """Its engine must not be cut off: the exchange goes on under its lease, and the answer is dropped."""
        if entry.recorder is not None:
            entry.recorder.dropped = True
        await self._end(entry, "cancelled")


def _uncancel() -> None:
    if (task := asyncio.current_task()) is not None:
        task.uncancel()
