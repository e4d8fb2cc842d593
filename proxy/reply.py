"""The way back to the client: what has been sent, what is added to it, and refusals.

A refusal may come while the client is still sending. Its answer goes out at once; what still arrives is dropped for a
moment, and then the connection closes, for an unread body stands in the way of the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from starlette.types import Message, Receive, Send

from proxy.classify import Classification
from proxy.errors import Refusal
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
    classification: Classification | None = None
    hold: Hold | None = None
    anthropic: bool = False
    accept: bytes = b""
    body_unread: bool = False

    async def __call__(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self.send(message)

    def lease_headers(self) -> RawHeaders:
        """The fields that tell the client of its lease; none on routes that have no model."""
        if self.classification is None or self.hold is None:
            return []
        waited = self.hold.ticket.waited
        return [
            (b"x-lease-class", self.classification.class_name.encode()),
            (b"x-lease-wait", b"%.3f" % waited),
            (b"server-timing", b"lease;dur=%.1f" % (waited * 1000)),
        ]

    async def refuse(self, error: Refusal, receive: Receive) -> None:
        """Answer with `error`. A body that was not read closes the connection, for it stands in the way of the next."""
        content_type, body = error.render(anthropic=self.anthropic, accept=self.accept)
        headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        headers += error.headers() + self.lease_headers()
        if self.body_unread:
            headers.append((b"connection", b"close"))
        await self({"type": "http.response.start", "status": error.status, "headers": headers})
        await self({"type": "http.response.body", "body": body, "more_body": self.body_unread})
        if self.body_unread:
            await _discard(receive)
            await self({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive) -> None:
    """Take what the client still sends, and drop it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while (await receive()).get("more_body"):
                pass
