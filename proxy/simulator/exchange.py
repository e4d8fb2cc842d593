"""One request and its answer, on raw ASGI: what is asked, what is sent, and that the client has gone."""

from __future__ import annotations

import asyncio
import html
import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from proxy.simulator.journal import Entry

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from starlette.types import Receive, Scope, Send

ERROR_TYPES = {
    400: ("invalid_request_error", "bad_request"),
    401: ("authentication_error", "unauthorized"),
    404: ("invalid_request_error", "not_found"),
    409: ("invalid_request_error", "conflict"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    502: ("server_error", "bad_gateway"),
    503: ("server_error", "service_unavailable"),
}


class ClientGoneError(Exception):
    """The client closed its connection."""


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.raw_path: str = scope["raw_path"].decode("latin-1")
        self.query: bytes = scope["query_string"]
        self.headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            self.headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        self.entry = Entry(0, self.method, self.target, {})  # the journal's own, if it records this request
        self.begun = False
        self._receive = receive
        self._send = send

    @property
    def target(self) -> str:
        return self.raw_path + ("?" + self.query.decode("latin-1") if self.query else "")

    async def body(self) -> bytes:
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    async def while_client_stays(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, and cancels it when the client leaves. The body must have been read.

        Raises:
            ClientGoneError: it left before the work was done.
        """
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGoneError
            working.result()
        finally:
            watching.cancel()
            working.cancel()
            await asyncio.wait({working, watching})

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # Sending.

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        if self.begun:
            return
        self.begun = True
        self.entry.answered(status)
        encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def piece(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        await self.start(status, {**headers, "Content-Length": str(len(body))})
        await self._send({"type": "http.response.body", "body": body})

    async def json(self, value: Any, status: int = 200) -> None:
        await self.whole(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    async def text(self, text: str, status: int = 200) -> None:
        await self.whole(status, {"Content-Type": "text/plain; charset=utf-8"}, text.encode())

    async def redirect(self, status: int, location: str) -> None:
        location += "?" + self.query.decode("latin-1") if self.query else ""
        head, page = {"Location": location}, b""
        if self.method in {"GET", "HEAD"}:
            head["Content-Type"] = "text/html; charset=utf-8"
            page = f'<a href="{html.escape(location)}">{HTTPStatus(status).phrase}</a>.\n\n'.encode()
        await self.whole(status, head, page)

    async def error(self, status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None) -> None:
        """An error of llama-swap's own; one without a code of its own takes the form that Accept asks for."""
        accept, extra = self.headers.get("accept", ""), dict(headers or {})
        if "text/plain" in accept and not code:
            await self.whole(status, {"Content-Type": "text/plain", **extra}, f"llama-swap: {message}".encode())
            return
        if "text/html" in accept and not code:
            page = f"<html><body><h1>llama-swap</h1><p>{html.escape(message)}</p></body></html>"
            await self.whole(status, {"Content-Type": "text/html", **extra}, page.encode())
            return
        kind, usual_code = ERROR_TYPES.get(status, ("server_error", "internal_error"))
        detail = {"message": message, "type": kind, "param": None, "code": code or usual_code}
        body = json.dumps({"src": "llama-swap", "error": detail}, separators=(",", ":"))
        await self.whole(status, {"Content-Type": "application/json", **extra}, body.encode())
