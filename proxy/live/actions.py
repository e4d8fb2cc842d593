"""What a person may do from the page: take a waiter out of the queue.

A browser carries its user's Basic key and its place on the loopback to every page that it opens, also a foreign one. So
a page must prove that it is ours: its Origin is the Host it asks (RFC 6454), the Host is a name that a foreign server
cannot have made point here (DNS rebinding), and the content type is one for which browsers ask first (no form can send
it). Whoever sends no Origin is no browser, and counts as foreign unless it sent a key.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from proxy.entrance import Entrance
from proxy.errors import ActionForbidden, ActionMalformed, BodyTimeout, WaiterNotFound
from proxy.inbound import Inbound, read_scope
from proxy.jobs import Jobs
from proxy.lease import Leases

MOST_BYTES = 1024
"""Of an action's body."""


class Hosts:
    """The Host fields that actions are taken from: `allowed`, and what no foreign server can have.

    These are IP addresses, which no name service can make point elsewhere; `localhost` and names below it; this
    machine's own name, also with `.local`; and names without a dot, which only the local network gives (the services of
    a compose file are such).
    """

    def __init__(self, allowed: Iterable[str], own: str | None = None) -> None:
        own = (own if own is not None else socket.gethostname()).lower()
        self._names = {name.lower().rstrip(".") for name in allowed} | {own, f"{own}.local"}

    def has(self, host: str) -> bool:
        """Whether a Host field's value, its port included, is one of them."""
        name = _host_name(host).lower()
        try:
            ip_address(name)
        except ValueError:
            name = name.rstrip(".")
            return bool(name) and ("." not in name or name.endswith(".localhost") or name in self._names)
        return True


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


class Actions:
    """Takes `POST /-/cancel`. Keys have been checked before."""

    def __init__(self, leases: Leases, jobs: Jobs, entrance: Entrance, hosts: Hosts) -> None:
        self._leases, self._jobs, self._entrance, self._hosts = leases, jobs, entrance, hosts

    async def cancel(self, request: Request) -> Response:
        """Take the waiter out of the queue, or end the job.

        Raises ActionForbidden, ActionMalformed, BodyTimeout, or WaiterNotFound where nothing can be cancelled.
        """
        self._check(read_scope(request.scope))
        number = await self._number(request)
        if not await self._jobs.cancel_number(number) and not self._leases.cancel(number):
            raise WaiterNotFound
        return JSONResponse({"id": number, "cancelled": True})

    def _check(self, inbound: Inbound) -> None:
        keyed = self._entrance.keyed
        if not keyed and not _is_loopback(self._entrance.trust.client_address(inbound)):
            raise ActionForbidden
        host = (inbound.first(b"host") or b"").decode("latin-1")
        if not self._hosts.has(host):
            raise ActionForbidden("The Host of this request is none of this proxy's names (setting allowed_hosts).")
        origin = inbound.first(b"origin")
        if origin is None and not keyed:
            raise ActionForbidden("This request has no Origin; send the proxy's own, or a key.")
        if origin is not None and origin.decode("latin-1").partition("://")[2].lower() != host.lower():
            raise ActionForbidden("This request comes from a page of another origin.")
        essence = (inbound.first(b"content-type") or b"").partition(b";")[0].strip().lower()
        if essence != b"application/json":
            raise ActionMalformed

    async def _number(self, request: Request) -> int:
        body = b""
        try:
            async with asyncio.timeout(self._entrance.body_timeout):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MOST_BYTES:
                        raise ActionMalformed
            asked = json.loads(body)
        except TimeoutError as error:
            raise BodyTimeout from error
        except (ValueError, RecursionError, ClientDisconnect) as error:
            raise ActionMalformed from error
        number = asked.get("id") if isinstance(asked, dict) else None
        if not isinstance(number, int) or isinstance(number, bool):
            raise ActionMalformed
        return number


def _is_loopback(address: str) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return parsed.is_loopback
