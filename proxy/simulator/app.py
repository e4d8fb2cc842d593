"""The HTTP face: what every request passes before its route, and which object answers which route."""

from __future__ import annotations

import base64
import binascii
import contextlib
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.routing import Mount

from proxy.simulator.config import Config, default_config
from proxy.simulator.control_routes import ControlRoutes
from proxy.simulator.exchange import ClientGoneError, Exchange
from proxy.simulator.info_routes import InfoRoutes
from proxy.simulator.journal import Journal, now
from proxy.simulator.model_routes import ModelRoutes
from proxy.simulator.mux import OPEN, RECORDED, Found, Refused, match
from proxy.simulator.simulation import Simulation

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

DEFAULT_TIME_SCALE = 0.1


def create_app(config: Config | None = None, time_scale: float = DEFAULT_TIME_SCALE) -> Starlette:
    """A simulated llama-swap; `time_scale` multiplies all seconds of the configuration.

    `app.state.reload(config)` does what llama-swap does when its configuration changes.
    """
    front = Front(config or default_config(), time_scale)
    app = Starlette(routes=[Mount("/", app=front)])
    app.state.reload = front.reload
    return app


class Front:
    def __init__(self, config: Config, time_scale: float) -> None:
        self._journal = Journal()
        self._time_scale = time_scale
        self._begin(config)

    def reload(self, config: Config) -> None:
        """Every model stops, running streams end cleanly, those who wait are refused."""
        self._simulation.close()
        self._journal.reloads += 1
        self._begin(config)

    def _begin(self, config: Config) -> None:
        self._simulation = Simulation(config, self._journal, self._time_scale)
        self._api_keys = config.api_keys
        self._routes = (
            ModelRoutes(self._simulation),
            InfoRoutes(self._simulation),
            ControlRoutes(self._simulation),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        if exchange.method == "OPTIONS":
            await self._preflight(exchange)
            return
        found = match(exchange.method, exchange.raw_path)
        if isinstance(found, Refused) or found.handler in RECORDED:
            exchange.entry = self._journal.open(exchange.method, exchange.target, exchange.headers)
        try:
            await self._handle(exchange, found)
        except ClientGoneError:
            exchange.entry.cancelled = True
        finally:
            exchange.entry.finished = now()

    async def _handle(self, exchange: Exchange, found: Found | Refused) -> None:
        if isinstance(found, Refused):
            await self._refuse(exchange, found)
        elif self._api_keys and found.handler not in OPEN and not self._has_key(exchange):
            challenge = {"WWW-Authenticate": 'Basic realm="llama-swap"'}
            await exchange.error(401, "unauthorized: invalid or missing API key", headers=challenge)
        else:
            name = f"on_{found.handler}"
            routes = next(each for each in self._routes if hasattr(each, name))
            await getattr(routes, name)(exchange, found.rest)

    async def _preflight(self, exchange: Exchange) -> None:
        wanted = exchange.headers.get("access-control-request-headers")
        headers = {
            "Access-Control-Allow-Origin": "*",
            "Access-Control-Allow-Methods": "GET, POST, PUT, PATCH, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": wanted or "Content-Type, Authorization, Accept, X-Requested-With",
            "Access-Control-Max-Age": "86400",
        }
        await exchange.start(204, headers)
        await exchange.end()

    async def _refuse(self, exchange: Exchange, refused: Refused) -> None:
        if refused.status == 307:
            await exchange.redirect(307, refused.location)
        elif refused.status == 405:
            headers = {"Allow": refused.allow, "Content-Type": "text/plain; charset=utf-8"}
            await exchange.whole(405, headers, b"Method Not Allowed\n")
        else:
            text = "400 Bad Request" if refused.status == 400 else "404 page not found\n"
            await exchange.text(text, refused.status)

    def _has_key(self, exchange: Exchange) -> bool:
        """Of several credentials a Basic password counts before a Bearer token, and that before x-api-key."""
        scheme, _, credentials = exchange.headers.get("authorization", "").partition(" ")
        key = exchange.headers.get("x-api-key", "")
        if scheme.lower() == "bearer":
            key = credentials or key
        elif scheme.lower() == "basic":
            with contextlib.suppress(binascii.Error, UnicodeDecodeError):
                key = base64.b64decode(credentials, validate=True).decode().partition(":")[2] or key
        return key in self._api_keys
