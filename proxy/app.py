"""Wiring: settings become objects, objects become one ASGI application with a lifespan."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping

import httpx
import structlog
from starlette.types import Receive, Scope, Send

from proxy import __version__
from proxy.body import Spool
from proxy.bridge import Bridge
from proxy.entrance import Entrance
from proxy.errors import PageNotFound, Refusal
from proxy.exchange import Exchanger
from proxy.follow import Follower
from proxy.forward import Forwarder
from proxy.gateway import Gateway
from proxy.health import Health
from proxy.history import History
from proxy.inbound import Keys, Trust, read_scope
from proxy.jobs import JOB_PAGES, Jobs, Limits, Store, make_job_pages
from proxy.keepalive_plan import KeepAlives
from proxy.knowledge import Knowledge
from proxy.lease import Leases
from proxy.live import Actions, Hosts, live_routes
from proxy.loads import LoadTimes
from proxy.metrics import Metrics
from proxy.pages import make_pages
from proxy.reply import Reply
from proxy.reports import Reports
from proxy.response_body import ReadAhead
from proxy.rwlock import Policy
from proxy.settings import Settings
from proxy.tickets import Bounds
from proxy.upstream import Transport
from proxy.windows import Windows

log = structlog.get_logger("gpu_lease_proxy")

SWEEP_SECONDS = 1.0
"""How often leases are checked for orphans and overlong holds."""

KEYLESS_PAGES = frozenset({b"/-/healthz", b"/-/readyz"})


class App:
    """The proxy as an ASGI application."""

    def __init__(self, settings: Settings, environ: Mapping[str, str] | None = None) -> None:
        """Raises SettingsError where llama-swap's configuration is broken, or `data_dir` cannot be used."""
        origin = str(settings.upstream_url).rstrip("/")
        knowledge = self._knowledge = Knowledge(settings, environ if environ is not None else {})
        classifier = knowledge.classifier
        times = LoadTimes()
        metrics = self.metrics = Metrics(classifier.class_names, clock=time.monotonic)
        self.history = History()
        policy, bounds, observers = _policy(settings, times), _bounds(settings), (metrics, self.history)
        self.leases = Leases(classifier.router, classifier.slots, policy, bounds, observers)
        metrics.watch(self.leases)
        self._transport = Transport(origin, ahead=_ahead(settings))
        self._entrance = _entrance(settings, knowledge)
        self._entrance.spool.retry_after = self.leases.retry_after
        self._client = _own_client(self._transport, origin, self._entrance)
        self._health = Health(self._client, metrics.upstream_up.set)
        reports = Reports(self.leases.lock, knowledge, times, metrics.load_measured)
        self._follower = Follower(self._client, reports, listing=not knowledge.from_file)
        knowledge.on_change = lambda new: self.leases.reconfigure(new.router, new.slots)
        self.leases.on_doubt = self._follower.look
        self.leases.on_first_answer = reports.first_answer
        self._gateway = Gateway(
            self.leases,
            knowledge,
            Forwarder(self._transport, origin),
            metrics,
            self._entrance,
            drains=settings.drains,
            flag_incomplete=settings.flag_incomplete,
            keepalives=_keepalives(settings),
        )
        exchanger = Exchanger(Forwarder(self._transport, origin), self._entrance, metrics)
        limits = Limits(settings.job_ttl, settings.jobs_max_bytes, settings.drains, settings.flag_incomplete)
        store = Store(settings.data_dir)
        self._jobs = Jobs(store, self.leases, knowledge, exchanger, self._entrance, metrics, limits)
        self._gateway.jobs = self._jobs
        self._job_pages = make_job_pages(self._jobs, self._identify, metrics.refused, settings.keepalive_every)
        self._bridge = Bridge(
            self.leases,
            knowledge,
            metrics,
            self._entrance,
            origin,
            bridged=lambda name: settings.classes[name].websocket == "bridge",
            idle=settings.websocket_idle,
        )
        actions = Actions(self.leases, self._jobs, self._entrance, Hosts(settings.allowed_hosts))
        self._pages = make_pages(
            self.leases,
            metrics.registry,
            lambda: self._health.fresh,
            metrics.refused,
            load_seconds=reports.models.all,
            finished=self.history.finished,
            more=live_routes(self.leases, self.history, classifier.class_names, actions),
        )
        self.admin_port: int | None = None
        """Where our own pages are, if they have a port of their own."""

    @property
    def reloads(self) -> bool:
        """Whether there is anything to read again."""
        return self._knowledge.from_file

    def reload(self) -> None:
        """Read llama-swap's configuration again (SIGHUP)."""
        self._knowledge.reload()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            nowhere = {"raw_path": b"/-/"} if self._is_admin(scope) else {}  # where none is bridged
            await self._bridge({**scope, **nowhere}, receive, send)
        elif scope["raw_path"].startswith(b"/-/") or self._is_admin(scope):
            await self._own_page(scope, receive, send)
        else:
            await self._gateway(scope, receive, send)

    def _is_admin(self, scope: Scope) -> bool:
        """Whether this came in on the port that is for our own pages alone."""
        return self.admin_port is not None and scope["server"][1] == self.admin_port

    async def _own_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_port(scope)
            self._identify(scope)
        except Refusal as error:
            self.metrics.refused(error)
            await Reply(send).refuse(error, receive)
        else:
            pages = self._job_pages if scope["raw_path"].startswith(JOB_PAGES) else self._pages
            await pages(scope, receive, send)

    def _check_port(self, scope: Scope) -> None:
        """Raises PageNotFound for what is not on the port that was asked."""
        path, admin = scope["raw_path"], self._is_admin(scope)
        if admin and not path.startswith(b"/-/"):
            raise PageNotFound
        if self.admin_port is not None and not admin and path not in KEYLESS_PAGES and not path.startswith(JOB_PAGES):
            raise PageNotFound("This page is on a port of its own (setting admin_port).")

    def _identify(self, scope: Scope) -> str:
        """Who asks for one of our own pages. Raises Unauthorized or KeyMissing."""
        return self._entrance.identify(read_scope(scope), keyless=scope["raw_path"] in KEYLESS_PAGES)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the background tasks for as long as the block runs."""
        running = (self._health.run(), self._sweep(), self._follower.run(), self._knowledge.watch())
        tasks = [asyncio.create_task(each) for each in running]
        for task in tasks:
            task.add_done_callback(_complain)
        try:
            async with self._jobs.running():
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


def _complain(task: asyncio.Task[None]) -> None:
    """A background task that fails would otherwise be missed in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background_task_failed", exc_info=error)


def _policy(settings: Settings, times: LoadTimes) -> Policy:
    windows = Windows(settings.switch_after, settings.max_turn, settings.max_wait, times.get)
    return Policy(settings.policy, windows=windows.of)


def _ahead(settings: Settings) -> ReadAhead:
    return ReadAhead(settings.response_buffer, settings.max_response_buffers, settings.stall_timeout)


def _keepalives(settings: Settings) -> KeepAlives:
    return KeepAlives(
        settings.keepalive_after,
        settings.keepalive_every,
        settings.json_keepalive_after,
        settings.show_position,
        frozenset(name for name, entry in settings.classes.items() if not entry.keepalive),
    )


def _bounds(settings: Settings) -> Bounds:
    return Bounds(
        settings.max_queue,
        settings.max_queue_per_client,
        settings.max_wait_of,
        max_hold=settings.max_hold,
        slow_wait_log=settings.slow_wait_log,
        keep_place=settings.keep_place,
    )


def _entrance(settings: Settings, knowledge: Knowledge) -> Entrance:
    keys = [key.get_secret_value() for key in settings.api_keys or ()]
    given = settings.upstream_api_key.get_secret_value() if settings.upstream_api_key else None

    def upstream_key() -> str | None:
        return given or next(iter(knowledge.api_keys), None)

    return Entrance(
        Keys(keys),
        Trust(settings.trusted_proxies),
        Spool(settings.max_spool, settings.spool_dir),
        settings.max_body,
        settings.body_timeout,
        lambda: knowledge.api_keys,
        upstream_key,
    )


def _own_client(transport: Transport, origin: str, entrance: Entrance) -> httpx.AsyncClient:
    """For our own questions, with the key that llama-swap wants now."""

    def with_key(request: httpx.Request) -> httpx.Request:
        if key := entrance.upstream_key():
            request.headers["authorization"] = f"Bearer {key}"
        return request

    headers = {"user-agent": f"gpu-lease-proxy/{__version__}"}
    return httpx.AsyncClient(transport=transport, base_url=origin, headers=headers, auth=with_key, trust_env=False)
