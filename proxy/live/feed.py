"""The view as server-sent events: one when it has changed, at most two a second, whatever happens meanwhile.

Nobody is told of changes; each watcher looks again every half second at a view that all of them share. So a thousand
arrivals cost what one costs, a slow watcher gets the newest view and not a backlog, and without watchers nothing is
done at all. A stream ends by itself when the last lease of a proxy that shuts down has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from proxy.errors import ClientGone
from proxy.inbound import RawHeaders
from proxy.watch import ClientWatch

EVERY = 0.5
"""Seconds between two events."""

QUIET = 15.0
"""Seconds without an event after which a comment is sent: proxies on the way close what is silent for a minute."""

RETRY_MS = 1000
"""After which a browser connects again."""


class Feed:
    """The ASGI application of `/-/events`. `ended` says that the proxy is about to end."""

    def __init__(self, look: Callable[[], dict[str, Any]], ended: asyncio.Event, headers: RawHeaders) -> None:
        self._look, self._ended, self._headers = look, ended, headers
        self._event = b""
        self._made = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        try:
            async with ClientWatch(receive):
                async for data in self._pieces():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": b""})

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield b"retry: %d\n\n" % RETRY_MS
        sent, at = b"", time.monotonic()
        while not self._ended.is_set():
            event, now = self._now(), time.monotonic()
            if event != sent:
                sent, at = event, now
                yield event
            elif now - at >= QUIET:
                at = now
                yield b": nothing new\n\n"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await self._ended.wait()

    def _now(self) -> bytes:
        """The newest event; one that was made for another watcher a moment ago will do."""
        now = time.monotonic()
        if now - self._made >= EVERY / 2:
            self._made = now
            self._event = b"data: %b\n\n" % json.dumps(self._look(), separators=(",", ":")).encode()
        return self._event
