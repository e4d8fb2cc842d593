"""The way back to the client: what has been sent, what is added to it, and refusals.

A refusal may come while the client is still sending. Its answer goes out at once; what still arrives is dropped for a
moment, and then the connection closes, for an unread body stands in the way of the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Message, Receive, Send

from proxy.classify import Classification
from proxy.errors import CutStream, Refusal
from proxy.inbound import RawHeaders
from proxy.lease import Hold

DISCARD_SECONDS = 2.0
"""How long a refused client may go on sending. Closing with bytes unread is a reset, which can destroy the answer
before the client has read it (RFC 9112, section 9.6); clients that read only after sending need this time."""


@dataclass(slots=True)
class Reply:
    """The way back to the client; knows what has been sent."""

    send: Send
    status: int | None = None
    """What the account is told: with a head that was sent early, the status that the answer would have had."""
    started: bool = False
    late: Callable[[Refusal], bytes] | None = None
    """How a failure is told while an early head is all that is out."""
    classification: Classification | None = None
    hold: Hold | None = None
    request_id: str = ""
    anthropic: bool = False
    accept: bytes = b""
    body_unread: bool = False

    async def __call__(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.status, self.started = message["status"], True
        await self.send(message)

    async def open(self, headers: RawHeaders, late: Callable[[Refusal], bytes]) -> None:
        """Send a head with the status 200 before the real one is known; from then on `late` renders what is told of a
        refusal. A cancellation leaves either all of it out or nothing, and `started` says which."""
        headers = [*headers, *self._named(), *self._preference_applied()]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        self.started, self.late = True, late

    def lease_headers(self) -> RawHeaders:
        """The fields that tell the client of its lease; none on routes that have no model."""
        if self.classification is None or self.hold is None:
            return []
        waited = self.hold.ticket.waited
        return [
            (b"x-lease-class", self.classification.class_name.encode()),
            (b"x-lease-wait", b"%.3f" % waited),
            (b"server-timing", b"lease;dur=%.1f" % (waited * 1000)),
            *self._named(),
            *self._preference_applied(),
        ]

    def _named(self) -> RawHeaders:
        return [(b"x-request-id", self.request_id.encode())] if self.request_id else []

    def _preference_applied(self) -> RawHeaders:
        """Whatever the answer is, it was not waited for longer than the client prefers (RFC 7240, section 3)."""
        wait = self.hold.ticket.terms.wait if self.hold is not None else None
        return [] if wait is None else [(b"preference-applied", b"wait=%d" % wait)]

    async def refuse(self, error: Refusal, receive: Receive) -> None:
        """Answer with `error`. A body that was not read closes the connection, for it stands in the way of the next.

        Raises CutStream where a head is out already, after telling what can still be told.
        """
        if self.started:
            await self._refuse_late(error)
            raise CutStream from error
        content_type, body = error.render(anthropic=self.anthropic, accept=self.accept)
        headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        headers += error.headers() + (self.lease_headers() or self._named())
        if self.body_unread:
            headers.append((b"connection", b"close"))
        await self({"type": "http.response.start", "status": error.status, "headers": headers})
        await self({"type": "http.response.body", "body": body, "more_body": self.body_unread})
        if self.body_unread:
            await _discard(receive)
            await self({"type": "http.response.body", "body": b""})

    async def _refuse_late(self, error: Refusal) -> None:
        late, self.late = self.late, None
        if late is not None:
            self.status = error.status
            await self.send({"type": "http.response.body", "body": late(error), "more_body": True})


async def _discard(receive: Receive) -> None:
    """Take what the client still sends, and drop it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while (await receive()).get("more_body"):
                pass
