"""The URLs of the live page: itself, its script, style and icon, its events, and what it can ask for."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.history import History
from proxy.inbound import RawHeaders
from proxy.lease import Leases
from proxy.live.actions import Actions
from proxy.live.feed import Feed
from proxy.live.html import page
from proxy.live.view import make_view

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

SAFE = {
    "content-security-policy": _POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
"""Fields of everything here: nothing runs that is not a file of ours, and nobody frames or embeds it."""

FILES = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "page.svg": "image/svg+xml",
}

_EVENT_FIELDS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


def live_routes(leases: Leases, history: History, class_names: Sequence[str], actions: Actions) -> list[Route]:
    """All of them."""

    def look() -> dict[str, Any]:
        return make_view(leases, history, class_names, time.time)

    feed = Feed(look, leases.drained, _raw(_EVENT_FIELDS | SAFE))

    async def show(request: Request) -> Response:
        fields = {"content-type": "text/html; charset=utf-8", "cache-control": "no-store"}
        return Response(page(look()), headers=fields | SAFE)

    async def events(request: Request) -> Response | Feed:
        return Response(headers=_EVENT_FIELDS | SAFE) if request.method == "HEAD" else feed

    files = [Route(f"/-/{name}", _file(name, content_type)) for name, content_type in FILES.items()]
    return [
        Route("/-/", show),
        Route("/-/events", events),
        Route("/-/cancel", actions.cancel, methods=["POST"]),
        *files,
    ]


def _file(name: str, content_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = resources.files("proxy.live").joinpath(name).read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, headers={"content-type": content_type, "cache-control": "no-cache"} | SAFE)

    return send


def _raw(fields: dict[str, str]) -> RawHeaders:
    return [(name.encode(), value.encode()) for name, value in fields.items()]
