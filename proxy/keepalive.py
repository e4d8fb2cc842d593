"""Keep a client alive while its request waits: a head sent early, and signs of life until the answer begins.

A streamed answer begins with comments, which every reader of event streams skips; a plain JSON one with spaces. Two
rules make that safe. Each sign is one `send`, which writes it whole or, when it is cancelled, not at all. And whatever
comes from upstream first ends the signs synchronously, so that none can stand between two of its bytes.

    nothing out ── time is over ──► our head ── its head ──► our head, true so far ── its first byte ──► its bytes
         └──────── its head ──► its head (signs go on where it is an event stream) ── its first byte ──────┘

With our head out the real status can no more be told, nor the upstream's fields. A failure is then the API's own error
event and a connection that is cut, and the account has the status that it would have been.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import structlog
from starlette.types import Message

from proxy.error_event import ERROR_LIMIT, answered, error_event
from proxy.errors import CutStream, UpstreamFailed
from proxy.inbound import Inbound, RawHeaders
from proxy.keepalive_plan import EVENT_STREAM, Plan, Waiting, position
from proxy.reply import Reply

log = structlog.get_logger("gpu_lease_proxy")

POSITION_SECONDS = 5.0
"""Between two tellings of the place, at least: they stay in the user's text."""


@dataclass(slots=True)
class _Error:
    """An answer with a status of 400 or above, behind our head: as much of it as is told."""

    status: int
    limit: int
    said: bytearray = field(default_factory=bytearray)


class KeepAlive:
    """`async with KeepAlive(reply, plan, waiting) as send:` around wait and exchange; `send` takes the answer.

    Without a plan it only passes messages on. Raises CutStream for a failure that has been told, and UpstreamFailed for
    an answer that cannot follow our head.
    """

    def __init__(self, reply: Reply, plan: Plan | None, waiting: Waiting) -> None:
        self._reply, self._plan, self._waiting = reply, plan, waiting
        self._due = time.monotonic() + (plan.after if plan is not None else 0.0)
        self._position_due = 0.0
        self._task: asyncio.Task[None] | None = None
        self._error: _Error | None = None

    async def __aenter__(self) -> Self:
        if self._plan is not None:
            self._start(self._plan)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop()
        if self._reply.late is None or not isinstance(error, CutStream):
            return
        if self._error is not None:
            await self._tell(self._error)  # it broke off as well, but this much it said
        else:
            raise UpstreamFailed("llama-swap broke off its answer before the first byte.") from error

    def forwarded(self, inbound: Inbound) -> Inbound:
        """The request as it goes on: behind our head no content coding can be told any more."""
        if self._reply.late is None:
            return inbound
        fields = [(name, value) for name, value in inbound.headers if name != b"accept-encoding"]
        return replace(inbound, headers=[*fields, (b"accept-encoding", b"identity")])

    # -- the signs

    def _start(self, plan: Plan) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(plan))
        self._task.add_done_callback(_complain)

    def _stop(self) -> None:
        """No sign from now on: one that waits for room in the socket's buffer was not written, and will not be."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, plan: Plan) -> None:
        while True:
            await asyncio.sleep(self._due - time.monotonic())
            if not self._reply.started:
                await self._reply.open(plan.head(), plan.failure)
            await self._reply(_piece(self._sign(plan)))
            self._due = time.monotonic() + plan.every

    def _sign(self, plan: Plan) -> bytes:
        now = time.monotonic()
        if plan.shows_position and now >= self._position_due and (place := self._waiting.place()) is not None:
            self._position_due = now + POSITION_SECONDS
            return position(self._waiting, place)
        return plan.sign

    # -- the answer

    async def __call__(self, message: Message) -> None:
        """Take a message of the answer."""
        if self._plan is None:
            await self._reply(message)
        elif message["type"] == "http.response.start":
            await self._take_head(message, self._plan)
        elif self._error is not None:
            await self._take_error(message, self._error)
        else:
            await self._take_body(message, self._plan)

    async def _take_head(self, message: Message, plan: Plan) -> None:
        status, headers = message["status"], message["headers"]
        if self._reply.late is None:
            self._stop()
            await self._reply(message)
            if status == 200 and plan.api is not None and _takes_comments(headers):
                self._due = min(self._due, time.monotonic() + plan.every)
                self._start(plan)
        elif status >= 400:
            self._reply.status = status
            self._error = _Error(status, ERROR_LIMIT if _is_plain(dict(headers)) else 0)
        elif status >= 300 or not _is(plan.content_type, headers):
            raise UpstreamFailed(_surprise(status, headers))
        else:
            self._reply.status = status

    async def _take_error(self, message: Message, error: _Error) -> None:
        error.said += message.get("body", b"")[: error.limit - len(error.said)]
        if not message.get("more_body", False):
            self._stop()
            await self._tell(error)
            raise CutStream

    async def _tell(self, error: _Error) -> None:
        self._reply.late = None
        if self._plan is not None and self._plan.api is not None:
            await self._reply(_piece(error_event(self._plan.api, answered(error.status, bytes(error.said)))))

    async def _take_body(self, message: Message, plan: Plan) -> None:
        self._stop()
        if self._reply.late is not None:
            self._reply.late = None
            if plan.api is not None and message.get("body"):
                await self._reply(_piece(b": waited %.1fs\n\n" % self._waiting.waited()))
        await self._reply(message)


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("keepalive_failed", exc_info=error)


def _piece(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


def _is(content_type: bytes, headers: RawHeaders) -> bool:
    """Whether a body with these fields can follow a head that says `content_type` and no coding."""
    fields = dict(headers)
    return _essence(fields) == content_type and _is_plain(fields)


def _is_plain(fields: dict[bytes, bytes]) -> bool:
    return fields.get(b"content-encoding", b"identity").strip().lower() in {b"", b"identity"}


def _takes_comments(headers: RawHeaders) -> bool:
    """Whether the answer is an event stream to which something can be added: neither coded nor counted."""
    return _is(EVENT_STREAM, headers) and not any(name == b"content-length" for name, _ in headers)


def _essence(fields: dict[bytes, bytes]) -> bytes:
    return fields.get(b"content-type", b"").partition(b";")[0].strip().lower()


def _surprise(status: int, headers: RawHeaders) -> str:
    fields = dict(headers)
    kind = _essence(fields).decode("latin-1") or "nothing that it names"
    coding = fields.get(b"content-encoding")
    coded = f", coded as {coding.decode('latin-1')}" if coding else ""
    return f"llama-swap answered with the status {status} and {kind}{coded}, which cannot follow a head sent early."
