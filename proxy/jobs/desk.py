"""Where jobs are handed in, asked for, and taken up again after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator

from proxy.body import Body
from proxy.classify import Classification
from proxy.entrance import Entrance
from proxy.errors import JobNotFound
from proxy.exchange import Accounts, Exchanger
from proxy.inbound import Inbound
from proxy.jobs.job import Job, Request
from proxy.jobs.runner import Limits, Runner
from proxy.jobs.shelf import Entry, Shelf
from proxy.jobs.store import Store
from proxy.knowledge import Knowledge
from proxy.lease import Leases
from proxy.prefer import read_preferences
from proxy.routes import match_route

EXPIRY_SECONDS = 1.0
"""Between two looks for jobs whose time is over; one costs nothing where there is none."""

END_SECONDS = 5.0
"""How long the end of the proxy waits for an answer that has come whole to be written down."""


def wants_job(inbound: Inbound) -> bool:
    """Whether a request on a model route asks to be run as a job."""
    return inbound.method == "POST" and read_preferences(inbound.headers).respond_async


class Jobs:
    """All jobs of the proxy. Belongs to one event loop."""

    def __init__(
        self,
        store: Store,
        leases: Leases,
        knowledge: Knowledge,
        exchanger: Exchanger,
        entrance: Entrance,
        accounts: Accounts,
        limits: Limits,
    ) -> None:
        self.store, self._leases, self._entrance = store, leases, entrance
        self.shelf = Shelf(limits.max_bytes, limits.ttl, store.remove)
        self._runner = Runner(store, self.shelf, leases, knowledge, exchanger, entrance, accounts, limits)

    # -- the way in

    async def submit(self, inbound: Inbound, what: Classification, client: str, rewritten: bool, body: Body) -> Entry:
        """A new job in the queue, with its request on disk.

        Raises JobsFull, and what the queue refuses with. When it raises, also because it was cancelled, there is no
        job, and the disk is as it was.
        """
        await self.store.ready()
        request = Request.of(inbound, what.requested, rewritten=rewritten)
        entry = Entry(self._job(inbound, what, client, body.size + len(request.dump())), client)
        self.shelf.take(entry.job.size)
        self.shelf.put(entry)
        try:
            await self.store.add(entry.job, request, body.stream())
            await self._enter(entry, request)
        except BaseException:
            if entry.task is not None:
                entry.task.cancel()
            self.shelf.drop(entry)
            raise
        return entry

    def _job(self, inbound: Inbound, what: Classification, client: str, size: int) -> Job:
        owner = self._owner(client)
        return Job(
            id=secrets.token_urlsafe(16),
            state="queued",
            requested=what.requested,
            class_name=what.class_name,
            anthropic=match_route(inbound.method, inbound.raw_path).anthropic,
            client=f"owner-{owner[:16]}" if owner else client,
            owner=owner,
            queued_at=time.time(),
            size=size,
        )

    async def _enter(self, entry: Entry, request: Request) -> None:
        self._runner.start(entry, request, bounded=True)
        await asyncio.sleep(0)  # the task's first step comes before this goes on
        if entry.refused is not None:
            raise entry.refused
        entry.entered = True

    def _owner(self, client: str) -> str:
        """The keyed hash of who makes or asks, or nothing where no key is needed."""
        if not self._entrance.keyed:
            return ""
        return hmac.new(self.store.folder.secret, client.encode(), hashlib.sha256).hexdigest()

    # -- asked by clients

    def find(self, job_id: str, client: str) -> Entry:
        """The job of that id. Raises JobNotFound where there is none, or it is another key's."""
        entry = self.shelf.get(job_id)
        if entry is None or not entry.entered:
            raise JobNotFound
        owner = entry.job.owner
        if owner and not hmac.compare_digest(owner, self._owner(client)):
            raise JobNotFound
        return entry

    def position(self, entry: Entry) -> int | None:
        """Its place in the queue from 1 on; 0 while a queued job is not in it, None for one that is not queued."""
        if entry.job.state != "queued":
            return None
        number = entry.hold.ticket.id if entry.hold is not None else 0
        waiters = self._leases.snapshot().waiters
        return next((waiter.position for waiter in waiters if waiter.id == number), 0)

    async def cancel(self, entry: Entry) -> None:
        """See `Runner.cancel`."""
        await self._runner.cancel(entry)

    async def cancel_number(self, number: int) -> bool:
        """Cancel the job that has this number in the queue; False where none has it, or it has ended otherwise."""
        for entry in self.shelf:
            if entry.hold is not None and entry.hold.ticket.id == number and not entry.job.finished:
                await self.cancel(entry)
                return entry.job.state == "cancelled"
        return False

    # -- with the application

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take up what the last run left, and run jobs for as long as the block runs."""
        await self._resume()
        expiry = asyncio.create_task(self._expire())
        try:
            yield
        finally:
            expiry.cancel()
            try:
                await self._stop()
            finally:
                self.store.close()

    async def _resume(self) -> None:
        """Queue the queued ones again, in their order, whatever the bounds say; they had been accepted."""
        queued = []
        for job in self.store.restore():
            ago = max(0.0, time.time() - (job.finished_at or job.queued_at))
            entry = Entry(job, job.client, earlier=ago, entered=True)
            self.shelf.put(entry)
            self.shelf.used += job.size
            if job.finished:
                self.shelf.finished(entry, ago)
            else:
                queued.append((entry, await self.store.request(job.id)))
        for entry, request in queued:
            self._runner.start(entry, request, bounded=False)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_SECONDS)
            self.shelf.expire()

    async def _stop(self) -> None:
        """End all tasks. Those whose answer has come whole may write it down; the others end where they stand."""
        tasks = [entry.task for entry in self.shelf if entry.task is not None and not entry.task.done()]
        for entry in self.shelf:
            if entry.task is not None and _is_at_work(entry):
                entry.task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=END_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _is_at_work(entry: Entry) -> bool:
    """Whether it waits for its lease or holds it."""
    lease = entry.hold.ticket.lease if entry.hold is not None else None
    return lease is None or lease.waiting or lease.held
