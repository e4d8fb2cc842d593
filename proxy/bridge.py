"""WebSockets to a model, bridged message by message.

An open socket keeps its model from being swapped (measured on llama-swap), so it holds that model's lease from before
the handshake goes upstream until the upstream's side is closed. That would be for ever where a browser's tab is left
open: a bridge without a message for `websocket_idle` seconds is closed.

The handshake passes through as any request does: target and fields as they came, and the client is accepted only when
the upstream has accepted, with its subprotocol, or gets the upstream's refusal. Close codes and reasons pass. Each
side has its own pings (RFC 6455, section 5.5.2, leaves them to the endpoint that gets them) and no compression, and
each reads only as fast as the other takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import structlog
from starlette.types import Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars
from websockets.asyncio.client import ClientConnection
from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.http11 import Request, Response
from websockets.uri import WebSocketURI, parse_uri

from proxy.classify import Classification
from proxy.entrance import Entrance
from proxy.errors import ClientGone, Refusal, UpstreamFailed, UpstreamUnreachable, WebSocketRefused
from proxy.exchange import Accounts
from proxy.forward import RETRY_PAUSE, RETRY_SECONDS, response_headers
from proxy.inbound import Inbound, RawHeaders, read_scope
from proxy.knowledge import Knowledge
from proxy.lease import Hold, Leases
from proxy.request_id import named, read_request_id
from proxy.routes import NameIn, Route, match_route
from proxy.watch import ClientWatch

log = structlog.get_logger("gpu_lease_proxy")

MAX_MESSAGE = 64 * 1024 * 1024
"""Bytes of one message: above any picture that ComfyUI sends, and what one socket may cost."""

CLOSE_SECONDS = 2.0
"""How long the upstream has to answer a close frame before its connection is cut."""

GOING_AWAY, NO_STATUS, ABNORMAL, BAD_GATEWAY = 1001, 1005, 1006, 1014
"""Close codes (RFC 6455, section 7.4, and its registry). The second and third are never sent."""

HANDSHAKE = frozenset({b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions"})
"""Fields of one connection's handshake."""

ANSWERED = frozenset({b"sec-websocket-accept", b"sec-websocket-extensions", b"sec-websocket-protocol"})


@dataclass(slots=True)
class _Handshake:
    """The client's side before it is accepted."""

    send: Send
    request_id: str
    status: int | None = None
    classification: Classification | None = None
    hold: Hold | None = None

    async def answer(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Refuse with an HTTP answer."""
        self.status = status
        await self.send({"type": "websocket.http.response.start", "status": status, "headers": headers})
        await self.send({"type": "websocket.http.response.body", "body": body})

    async def accept(self, response: Response, subprotocol: str | None, added: RawHeaders) -> None:
        """Accept, with the upstream's fields."""
        self.status = 101
        fields = [(name, value) for name, value in response_headers(_raw(response), added) if name not in ANSWERED]
        await self.send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": fields})


class Bridge:
    """The ASGI application for WebSockets. `bridged` says whether a class's are, `idle` is in seconds."""

    def __init__(
        self,
        leases: Leases,
        knowledge: Knowledge,
        accounts: Accounts,
        entrance: Entrance,
        origin: str,
        *,
        bridged: Callable[[str], bool],
        idle: float,
    ) -> None:
        self._leases, self._knowledge, self._accounts, self._entrance = leases, knowledge, accounts, entrance
        self._uri = parse_uri("ws" + origin.removeprefix("http"))
        self._bridged, self._idle = bridged, idle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket."""
        await receive()  # websocket.connect
        client = _Handshake(send, read_request_id(scope["headers"]))
        with bound_contextvars(request_id=client.request_id):
            await self._answer(scope, receive, client)

    async def _answer(self, scope: Scope, receive: Receive, client: _Handshake) -> None:
        try:
            schemes = {"ws": "http", "wss": "https"}
            inbound = read_scope({**scope, "method": "GET", "scheme": schemes[scope["scheme"]]})
            await self._serve(named(inbound, client.request_id), receive, client)
        except Refusal as error:
            self._accounts.refused(error)
            content_type, body = error.render(anthropic=False, accept=b"")
            await client.answer(error.status, [(b"content-type", content_type), *error.headers()], body)
        except (ClientGone, OSError):  # uvicorn raises an OSError where a client that has left is sent to
            pass
        finally:
            if (what := client.classification) is not None:
                self._accounts.answered(what.class_name, what.label, client.status or 499)

    async def _serve(self, inbound: Inbound, receive: Receive, client: _Handshake) -> None:
        route = self._knowledge.refine(match_route("GET", inbound.raw_path))
        who = self._entrance.identify(inbound, keyless=False)
        what = client.classification = self._classify(inbound, route)
        if what is not None:
            if not self._bridged(what.class_name):
                raise WebSocketRefused
            self._leases.check_gate(who)
            client.hold = self._leases.hold(what, who, request_id=client.request_id)
        async with contextlib.AsyncExitStack() as open_:
            upstream = await self._open(inbound, receive, client, open_)
            await self._run(upstream, receive, client)

    def _classify(self, inbound: Inbound, route: Route) -> Classification | None:
        """What the socket takes a lease for; None for one that llama-swap neither loads nor holds a model for."""
        if inbound.raw_path == b"/comfyui/ws":
            return None
        if not route.rest:  # not under /upstream, or a path that llama-swap redirects
            raise WebSocketRefused
        if route.name_in is NameIn.NOWHERE:
            return None
        what = self._knowledge.classify(route, route.name)
        return None if self._knowledge.ignores_websockets(what.model) else what

    async def _open(
        self, inbound: Inbound, receive: Receive, client: _Handshake, open_: contextlib.AsyncExitStack
    ) -> ClientConnection:
        """Wait for the lease, if one is needed, and for the upstream's acceptance, while the client is there.

        Both stay for as long as `open_` does: the upstream's connection is cut before the lease is given back.
        """
        hold = client.hold
        async with ClientWatch(_departure(receive)):
            if hold is not None:
                await open_.enter_async_context(hold)
            upstream = await open_.enter_async_context(_connected(self._uri, inbound, self._entrance.headers(inbound)))
            if hold is not None:
                hold.lease.sent()
            try:
                await upstream.handshake(user_agent_header=None)
            except InvalidStatus as refused:
                await self._pass_on(refused.response, client)
                raise ClientGone from refused
            except (InvalidHandshake, OSError) as error:
                if hold is not None:
                    hold.lease.fail()
                raise UpstreamFailed from error
            if hold is not None:
                hold.lease.answered()
        return upstream

    async def _pass_on(self, response: Response, client: _Handshake) -> None:
        if client.hold is not None:
            if response.status_code >= 500:
                client.hold.lease.fail()
            client.hold.release()
        fields = [(name, value) for name, value in response_headers(_raw(response), []) if name != b"content-length"]
        await client.answer(response.status_code, fields, bytes(response.body or b""))

    async def _run(self, upstream: ClientConnection, receive: Receive, client: _Handshake) -> None:
        response = upstream.response
        if response is None:
            raise UpstreamFailed
        await client.accept(response, upstream.subprotocol, _lease_headers(client))
        outcome = "cancelled"
        try:
            outcome = await _Pump(upstream, receive, client.send, client.hold, self._idle).run()
        finally:
            if client.hold is not None:
                client.hold.ticket.outcome = outcome
            if client.classification is not None:
                self._accounts.exchange_ended(client.classification.class_name, outcome)


@dataclass(slots=True)
class _Pump:
    """Carries messages both ways until one side ends."""

    upstream: ClientConnection
    receive: Receive
    send: Send
    hold: Hold | None
    idle: float
    moved: float = field(default_factory=time.monotonic)

    async def run(self) -> str:
        """Run to the end; returns the outcome of the exchange."""
        up, down = asyncio.create_task(self._up()), asyncio.create_task(self._down())
        try:
            while not (done := await self._wait(up, down)):
                if time.monotonic() - self.moved >= self.idle:
                    await self._close_both(GOING_AWAY, "no message for too long")
                    return "ok"
            if down in done:
                return await self._upstream_ended(down)
            code, reason = up.result()
            await self._close_upstream(code, reason)
            return "cancelled" if code == ABNORMAL else "ok"
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _wait(self, *tasks: asyncio.Task[Any]) -> set[asyncio.Task[Any]]:
        left = max(0.0, self.moved + self.idle - time.monotonic())
        done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return done

    async def _up(self) -> tuple[int, str]:
        """Client to upstream; returns the code and the reason with which the client closed."""
        while (message := await self.receive())["type"] != "websocket.disconnect":
            self.moved = time.monotonic()
            text = message.get("text")
            with contextlib.suppress(ConnectionClosed):  # which `_down` tells of
                await self.upstream.send(message["bytes"] if text is None else text)
        if "reason" not in message:  # there was no close frame, whatever code uvicorn gives
            return ABNORMAL, ""
        return message.get("code") or NO_STATUS, message["reason"] or ""

    async def _down(self) -> None:
        """Upstream to client, until the upstream has closed; the lease ends there and then."""
        with contextlib.suppress(ConnectionClosed):
            async for data in self.upstream:
                self.moved = time.monotonic()
                kind = "text" if isinstance(data, str) else "bytes"
                await self.send({"type": "websocket.send", kind: data})
        self._release()

    def _release(self) -> None:
        """The upstream has closed: the lease ends, whatever the client has still to be told."""
        if self.hold is not None and self.hold.lease.held:
            broken = self.upstream.close_code in {None, ABNORMAL}
            self.hold.ticket.outcome = "upstream_truncated" if broken else "ok"
            self.hold.release()

    async def _upstream_ended(self, down: asyncio.Task[None]) -> str:
        down.result()
        code = self.upstream.close_code or ABNORMAL
        sent = {NO_STATUS: 1000, ABNORMAL: BAD_GATEWAY}.get(code, code)
        await self.send({"type": "websocket.close", "code": sent, "reason": self.upstream.close_reason or ""})
        return "upstream_truncated" if code == ABNORMAL else "ok"

    async def _close_both(self, code: int, reason: str) -> None:
        await self._close_upstream(code, reason)
        await self.send({"type": "websocket.close", "code": code, "reason": reason})

    async def _close_upstream(self, code: int, reason: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.upstream.close({NO_STATUS: 1000, ABNORMAL: GOING_AWAY}.get(code, code), reason)
        self.upstream.transport.abort()
        self._release()


class _AsItCame(ClientProtocol):
    """A handshake with the client's own target and fields."""

    def __init__(self, uri: WebSocketURI, inbound: Inbound, fields: RawHeaders) -> None:
        super().__init__(uri, subprotocols=_subprotocols(inbound), max_size=MAX_MESSAGE)
        self._target = inbound.target.decode("latin-1")
        self._fields = [(name, value) for name, value in fields if name not in HANDSHAKE]

    def connect(self) -> Request:
        """The request that goes out."""
        made, headers = super().connect(), Headers()
        for name, value in self._fields:
            headers[name.decode("latin-1")] = value.decode("latin-1")
        for own in ("Upgrade", "Connection", "Sec-WebSocket-Key", "Sec-WebSocket-Version"):
            headers[own] = made.headers[own]
        return Request(self._target, headers)


@contextlib.asynccontextmanager
async def _connected(uri: WebSocketURI, inbound: Inbound, fields: RawHeaders) -> AsyncIterator[ClientConnection]:
    """A connection before its handshake; cut at the end, which awaits nothing. Raises UpstreamUnreachable."""
    loop, deadline = asyncio.get_running_loop(), time.monotonic() + RETRY_SECONDS

    def make() -> ClientConnection:
        return ClientConnection(_AsItCame(uri, inbound, fields), ping_interval=None, close_timeout=CLOSE_SECONDS)

    ssl = httpx.create_ssl_context() if uri.secure else None
    while True:
        try:
            transport, connection = await loop.create_connection(make, uri.host, uri.port, ssl=ssl)
            break
        except OSError as error:
            if time.monotonic() + RETRY_PAUSE > deadline:
                raise UpstreamUnreachable(retry_after=1) from error
        await asyncio.sleep(RETRY_PAUSE)
    try:
        yield connection
    finally:
        transport.abort()


def _departure(receive: Receive) -> Receive:
    """`receive` as ClientWatch reads it. A client may send nothing before it is accepted (RFC 6455, section 4.1)."""

    async def next_message() -> Message:
        await receive()
        return {"type": "http.disconnect"}

    return next_message


def _subprotocols(inbound: Inbound) -> list[Any] | None:
    values = [value for name, value in inbound.headers if name == b"sec-websocket-protocol"]
    names = [token.strip().decode("latin-1") for value in values for token in value.split(b",")]
    return names or None


def _raw(response: Response) -> RawHeaders:
    pairs = response.headers.raw_items()
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in pairs]


def _lease_headers(client: _Handshake) -> RawHeaders:
    if client.classification is None or client.hold is None:
        return []
    waited = b"%.3f" % client.hold.ticket.waited
    return [
        (b"x-lease-class", client.classification.class_name.encode()),
        (b"x-lease-wait", waited),
        (b"x-request-id", client.request_id.encode()),
    ]
