"""Run the application under uvicorn, with an end of our own.

uvicorn would close its listeners at the first signal, wait for running streams while the waiters behind them starve,
and leave with the signal's exit code. Here the first signal begins to *drain*: the listener stays open, waiters and
newcomers are refused with a clear answer, readiness turns to 503, and running leases go on to their end, for at most
`shutdown_grace`. Then the server stops, with exit code 0. A second signal cuts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Callable, Iterator, Mapping

import structlog
import uvicorn
import uvloop

from proxy import logs
from proxy.allocator import keep_memory
from proxy.app import App
from proxy.bridge import MAX_MESSAGE
from proxy.protocols import protocol_for
from proxy.settings import Settings

log = structlog.get_logger("gpu_lease_proxy")

LINGER_SECONDS = 0.5
"""How long requests without a lease have to end once the last lease has: log streams never do."""

KEEP_ALIVE_SECONDS = 75
"""Longer than the pools of common clients keep a connection, so that they close it and never we under a request."""

UNSENT_BYTES = 128 * 1024
"""What the kernel takes for a client beyond what is on its way. It would take megabytes, and tell that there is room
again only when a third of them has gone: a client that reads steadily but slowly would seem to have stalled."""


class Server(uvicorn.Server):
    """uvicorn with our signals."""

    def __init__(self, config: uvicorn.Config, app: App, grace: float, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._app, self._grace, self._started = app, grace, started
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and tell."""
        await super().startup(sockets)
        self._started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM in the loop; once it has ended, one more must not spoil the exit code."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        if self._app.reloads:
            loop.add_signal_handler(signal.SIGHUP, self._app.reload)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            for number in signals:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    def _on_signal(self) -> None:
        if self._drain is not None:
            log.warning("cut", reason="second signal")
            self.should_exit = self.force_exit = True
            return
        log.info("draining", held=len(self._app.leases.lock.held), grace=self._grace)
        self._app.leases.drain()
        self._drain = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                await self._app.leases.drained.wait()
        self.should_exit = True


def server_config(app: App, settings: Settings) -> uvicorn.Config:
    """How uvicorn serves `app`."""
    config = uvicorn.Config(
        app,
        http=protocol_for(
            settings.http_parser,
            head_timeout=settings.head_timeout,
            max_head=settings.max_head,
            on_refused=app.metrics.refused,
        ),
        loop="asyncio",
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE,
        ws_ping_timeout=60.0,
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        workers=1,
    )
    config.timeout_graceful_shutdown = LINGER_SECONDS  # type: ignore[assignment]  # any number of seconds will do
    return config


def run(
    settings: Settings,
    *,
    environ: Mapping[str, str] | None = None,
    started: Callable[[str], None] | None = None,
) -> int:
    """Serve until a signal; returns the exit code. `started` is given the base URL once the socket listens.

    `environ` is what `${env.NAME}` in llama-swap's configuration may name. Raises OSError when the address cannot be
    bound, and SettingsError where llama-swap's configuration is broken.
    """
    logs.configure(settings.log_format)
    keep_memory()
    app = App(settings, environ)
    config = server_config(app, settings)
    with contextlib.ExitStack() as open_:
        listeners = [open_.enter_context(_listen(settings.listen_host, port)) for port in _ports(settings)]
        url, *admin = map(_url, listeners)
        if admin:
            app.admin_port = listeners[1].getsockname()[1]

        def on_started() -> None:
            # What has been loaded by now stays; a collection that looked through it would stop the loop for 50 ms.
            gc.freeze()
            log.info("listening", url=url, **({"admin_url": admin[0]} if admin else {}))
            if started is not None:
                started(url)

        server = Server(config, app, settings.shutdown_grace, on_started)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve(sockets=listeners))
    return 0


def _ports(settings: Settings) -> list[int]:
    """Where to listen: for everybody, and for the pages under `/-/` if they are apart."""
    return [settings.listen_port] if settings.admin_port is None else [settings.listen_port, settings.admin_port]


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what it accepts; without it each answer waits for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener
