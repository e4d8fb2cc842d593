"""Wiring: settings become objects, objects become one ASGI application with a lifespan."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import httpx
from starlette.types import Receive, Scope, Send

from proxy.body import Spool
from proxy.classify import Classifier
from proxy.errors import Refusal
from proxy.forward import Forwarder
from proxy.gateway import Entrance, Gateway, Reply
from proxy.health import Health
from proxy.inbound import Keys, Trust, read_scope
from proxy.lease import Bounds, Leases
from proxy.metrics import Metrics
from proxy.pages import make_pages
from proxy.router import ClassRouter
from proxy.rwlock import Policy
from proxy.settings import Settings
from proxy.upstream import Transport

SWEEP_SECONDS = 1.0
"""How often leases are checked for orphans and overlong holds."""

KEYLESS_PAGES = frozenset({b"/-/healthz", b"/-/readyz"})


class App:
    """The proxy as an ASGI application."""

    def __init__(self, settings: Settings) -> None:
        origin = str(settings.upstream_url).rstrip("/")
        classifier = Classifier(settings)
        metrics = self.metrics = Metrics(classifier.class_names, clock=time.monotonic)
        self.leases = Leases(ClassRouter(), classifier.slots, _policy(settings), _bounds(settings), (metrics,))
        metrics.watch(self.leases)
        self._transport = Transport(origin)
        self._client = httpx.AsyncClient(
            transport=self._transport, base_url=origin, headers=_own_headers(settings), trust_env=False
        )
        self._health = Health(self._client, metrics.upstream_up.set)
        self._entrance = _entrance(settings)
        self._gateway = Gateway(self.leases, classifier, Forwarder(self._transport, origin), metrics, self._entrance)
        self._pages = make_pages(self.leases, metrics.registry, lambda: self._health.fresh, metrics.refused)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["raw_path"].startswith(b"/-/"):
            await self._own_page(scope, receive, send)
        else:
            await self._gateway(scope, receive, send)

    async def _own_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._entrance.identify(read_scope(scope), keyless=scope["raw_path"] in KEYLESS_PAGES)
        except Refusal as error:
            self.metrics.refused(error)
            await Reply(send).refuse(error, receive)
        else:
            await self._pages(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the background tasks for as long as the block runs."""
        tasks = [asyncio.create_task(self._health.run()), asyncio.create_task(self._sweep())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.leases.sweep()


def _policy(settings: Settings) -> Policy:
    first = Policy(settings.policy)  # what `auto` is while no load has been measured
    switch_after = first.switch_after if settings.switch_after is None else settings.switch_after
    max_turn = max(first.max_turn, switch_after) if settings.max_turn is None else settings.max_turn
    return Policy(settings.policy, min(switch_after, max_turn), max_turn)


def _bounds(settings: Settings) -> Bounds:
    return Bounds(
        settings.max_queue,
        settings.max_queue_per_client,
        settings.max_wait_of,
        max_hold=settings.max_hold,
        slow_wait_log=settings.slow_wait_log,
    )


def _entrance(settings: Settings) -> Entrance:
    keys = [key.get_secret_value() for key in settings.api_keys or ()]
    upstream_key = settings.upstream_api_key.get_secret_value() if settings.upstream_api_key else None
    spool = Spool(settings.max_spool, settings.spool_dir)
    return Entrance(Keys(keys), Trust(settings.trusted_proxies), spool, settings.max_body, upstream_key)


def _own_headers(settings: Settings) -> dict[str, str]:
    key = settings.upstream_api_key
    return {"authorization": f"Bearer {key.get_secret_value()}"} if key else {}
