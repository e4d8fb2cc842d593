"""The life of a request: key, route, gate, body, name, class, lease, forward, account.

Data goes one way through here, and each step is somebody else's module; this one only gives the order, answers
refusals and keeps the account. What holds a lease is one `async with`, so that every way out of it gives the lease
back, and inside it the end of the upstream's body gives it back even earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_to_bytes

import httpx
import structlog
from starlette.types import Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from proxy.body import Body, Passing
from proxy.classify import Classification
from proxy.completion import APIS, Completion
from proxy.entrance import Entrance
from proxy.errors import (
    BodyTooLarge,
    ClientGone,
    CutStream,
    ModelUndecidable,
    Refusal,
    WebSocketRefused,
)
from proxy.exchange import Accounts, Exchanger, Unleased
from proxy.forward import Forwarder, Outgoing
from proxy.inbound import Inbound, read_scope
from proxy.jobs import Jobs, accept, wants_job
from proxy.keepalive import KeepAlive
from proxy.keepalive_plan import KeepAlives, Plan, Waiting
from proxy.knowledge import Knowledge
from proxy.lease import Leases
from proxy.model_name import NameReader, Undecidable, asks_for_stream, body_reader, is_rewritten, stream_reader
from proxy.reply import Reply
from proxy.request_id import named, read_request_id
from proxy.routes import NameIn, Route, match_route
from proxy.terms import read_terms
from proxy.tickets import Ticket
from proxy.watch import ClientWatch

log = structlog.get_logger("gpu_lease_proxy")

CLIENT_LEFT = 499
"""The code under which a client that left before an answer is counted (nginx's)."""

PROFILE_PATH = b"/api/profiles/active"


class Gateway:
    """The ASGI application for everything that is llama-swap's."""

    def __init__(
        self,
        leases: Leases,
        knowledge: Knowledge,
        forwarder: Forwarder,
        accounts: Accounts,
        entrance: Entrance,
        *,
        drains: Callable[[str], bool] = lambda class_name: False,
        flag_incomplete: bool = True,
        keepalives: KeepAlives | None = None,
    ) -> None:
        self._leases, self._knowledge, self._forwarder = leases, knowledge, forwarder
        self._accounts, self._entrance = accounts, entrance
        self._drains, self._flag_incomplete = drains, flag_incomplete
        self._keepalives = keepalives or KeepAlives(after=3, every=3)
        self._exchanger = Exchanger(forwarder, entrance, accounts)
        self.jobs: Jobs | None = None
        """Where requests go that ask to be run as a job."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises CutStream where the answer must not end well."""
        reply = Reply(send, request_id=read_request_id(scope["headers"]))
        with bound_contextvars(request_id=reply.request_id):
            await self._answer(scope, receive, reply)

    async def _answer(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        try:
            await self._serve(named(read_scope(scope), reply.request_id), receive, reply)
        except Refusal as error:
            await self._refuse(error, receive, reply)
        except ClientGone:
            pass
        except CutStream:
            raise
        except Exception:
            log.exception("internal_error")
            await self._refuse(Refusal(), receive, reply)
        finally:
            if (what := reply.classification) is not None:
                self._accounts.answered(what.class_name, what.label, reply.status or CLIENT_LEFT)

    async def _refuse(self, error: Refusal, receive: Receive, reply: Reply) -> None:
        self._accounts.refused(error)
        await reply.refuse(error, receive)

    async def _serve(self, inbound: Inbound, receive: Receive, reply: Reply) -> None:
        reply.body_unread = inbound.has(b"transfer-encoding", b"chunked") or bool(inbound.content_length())
        reply.accept = inbound.first(b"accept") or b""
        route = self._knowledge.refine(match_route(inbound.method, inbound.raw_path))
        reply.anthropic = route.anthropic
        client = self._entrance.identify(inbound, keyless=route.keyless)
        if inbound.wants_websocket:
            raise WebSocketRefused
        if inbound.method == "PUT" and unquote_to_bytes(inbound.raw_path) == PROFILE_PATH:
            await self._switch_profile(inbound, receive, reply)
        elif route.name_in is NameIn.NOWHERE:
            await self._pass(inbound, receive, reply)
        else:
            await self._lease(inbound, route, client, receive, reply)

    # -- without a lease

    async def _pass(self, inbound: Inbound, receive: Receive, reply: Reply) -> None:
        passing = Passing(receive, self._entrance.body_timeout)
        outgoing = Outgoing(inbound, self._entrance.headers(inbound), lambda: passing)
        if not reply.body_unread:
            await receive()  # the empty body, after which the server reports a disconnect
            passing.read.set()
            outgoing.stream = lambda: httpx.ByteStream(b"")
        try:
            async with ClientWatch(receive, passing.read):
                await self._forwarder.exchange(outgoing, Unleased(), reply)
        finally:
            reply.body_unread = not passing.read.is_set()

    async def _switch_profile(self, inbound: Inbound, receive: Receive, reply: Reply) -> None:
        """Another profile gives names another meaning: known here before the client knows that it is so."""
        with Body(self._entrance.spool) as body:
            await body.read(receive, self._entrance.max_body, timeout=self._entrance.body_timeout)
            reply.body_unread = False
            outgoing = Outgoing(inbound, self._entrance.headers(inbound), body.stream)
            switch = _ProfileSwitch(self._knowledge, await body.json())
            async with ClientWatch(receive):
                await self._forwarder.exchange(outgoing, switch, reply)

    # -- with one

    async def _lease(self, inbound: Inbound, route: Route, client: str, receive: Receive, reply: Reply) -> None:
        self._leases.check_gate(client)
        inbound.check_fields()
        if (inbound.content_length() or 0) > self._entrance.max_body:
            raise BodyTooLarge
        with Body(self._entrance.spool) as body:
            asks = self._keepalives.asks_about_stream(inbound.method, route)
            reader = _reader(route, inbound, stream=asks)
            scan = reader or (stream_reader(inbound.first(b"content-type")) if asks else None)
            await body.read(receive, self._entrance.max_body, scan, timeout=self._entrance.body_timeout)
            reply.body_unread = False
            rewritten = reader is None or is_rewritten(inbound.first(b"content-type"), inbound.query, inbound.method)
            what = reply.classification = self._knowledge.classify(route, _name(route, reader), rewritten=rewritten)
            if self.jobs is not None and wants_job(inbound):
                async with ClientWatch(receive):
                    entry = await self.jobs.submit(inbound, what, client, rewritten, body)
                await accept(self.jobs, entry, reply)
                return
            terms = read_terms(inbound, client, body.digest)
            hold = reply.hold = self._leases.hold(what, client, terms, request_id=reply.request_id)
            drain = self._drains(what.class_name)
            watch = ClientWatch(receive, until=lambda: drain and hold.is_held, left=hold.left)
            plan = self._keepalives.plan(inbound.method, route, what.class_name, streamed=asks_for_stream(scan))
            async with self._kept_alive(reply, plan, hold.ticket) as alive, watch, hold:
                send = self._completed(alive, inbound, route, what)
                inbound = alive.forwarded(inbound)
                await self._exchanger.run(inbound, hold, body.stream, send, reply.lease_headers, to_its_end=drain)

    def _kept_alive(self, reply: Reply, plan: Plan | None, ticket: Ticket) -> KeepAlive:
        def place() -> int | None:
            return next((each.position for each in self._leases.snapshot().waiters if each.id == ticket.id), None)

        waiting = Waiting(ticket.class_name, ticket.classification.requested, lambda: ticket.waited, place)
        return KeepAlive(reply, plan and plan.silent_for(ticket.terms.wait), waiting)

    def _completed(self, send: Send, inbound: Inbound, route: Route, what: Classification) -> Send:
        if route.api not in APIS or inbound.method == "HEAD":
            return send
        return Completion(send, self._accounts, what.class_name, what.model, flag=self._flag_incomplete)


def _reader(route: Route, inbound: Inbound, *, stream: bool) -> NameReader | None:
    """What finds the name. llama-swap reads the body of a HEAD too, so the method counts, not the kind of route."""
    if route.name_in not in {NameIn.BODY, NameIn.QUERY}:
        return None
    return body_reader(inbound.first(b"content-type"), inbound.query, inbound.method, stream=stream)


def _name(route: Route, reader: NameReader | None) -> str:
    if reader is None:
        return route.name or ""
    try:
        return reader.finish()
    except Undecidable as error:
        raise ModelUndecidable(str(error)) from error


class _ProfileSwitch(Unleased):
    """Listens to a change of the active profile."""

    def __init__(self, knowledge: Knowledge, body: Any) -> None:
        self._knowledge, self._body = knowledge, body

    def head(self, status: int, seconds: float) -> None:
        """llama-swap has changed it, or not."""
        if 200 <= status < 300 and isinstance(self._body, dict):
            self._knowledge.take_profile(self._body.get("name") or None)
