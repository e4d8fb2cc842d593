"""The routes that tell about llama-swap and its models; they load nothing and wait for nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.simulator import listing
from proxy.simulator.events import message

if TYPE_CHECKING:
    from proxy.simulator.exchange import Exchange
    from proxy.simulator.simulation import Simulation


class InfoRoutes:
    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.config = simulation.config
        self.names = simulation.names
        self.events = simulation.events
        self.swapper = simulation.swapper

    async def on_health(self, exchange: Exchange, _rest: str) -> None:
        await exchange.text("OK")

    async def on_root(self, exchange: Exchange, _rest: str) -> None:
        await exchange.redirect(302, "/ui")

    async def on_upstream_root(self, exchange: Exchange, _rest: str) -> None:
        await exchange.redirect(302, "/ui/models")

    async def on_ui(self, exchange: Exchange, _rest: str) -> None:
        page = b"<!doctype html><title>llama-swap (simulated)</title>"
        await exchange.whole(200, {"Content-Type": "text/html; charset=utf-8"}, page)

    async def on_favicon(self, exchange: Exchange, _rest: str) -> None:
        await exchange.text("404 page not found\n", 404)

    async def on_models(self, exchange: Exchange, _rest: str) -> None:
        await exchange.json(listing.model_list(self.config, self.names, self.swapper.states))

    async def on_running(self, exchange: Exchange, _rest: str) -> None:
        await exchange.json(listing.running(self.config, self.swapper.states))

    async def on_metrics(self, exchange: Exchange, _rest: str) -> None:
        await exchange.text("# a simulated llama-swap has no metrics of its own\n")

    async def on_version(self, exchange: Exchange, _rest: str) -> None:
        await exchange.json({"version": "simulated", "commit": "none", "build_date": "unknown"})

    async def on_logs(self, exchange: Exchange, _rest: str) -> None:
        await exchange.text("simulated llama-swap\n")

    async def on_log_stream(self, exchange: Exchange, _rest: str) -> None:
        await exchange.body()
        await exchange.while_client_stays(self._log_forever(exchange))

    async def _log_forever(self, exchange: Exchange) -> None:
        await exchange.start(200, {"Content-Type": "text/plain", "X-Accel-Buffering": "no"})
        await exchange.piece(b"simulated llama-swap\n")
        await asyncio.Event().wait()

    async def on_events(self, exchange: Exchange, _rest: str) -> None:
        await exchange.body()
        await exchange.while_client_stays(self._feed(exchange))

    async def _feed(self, exchange: Exchange) -> None:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        await exchange.start(200, headers)
        listener = self.events.listen()
        try:
            await exchange.piece(message("logData", {"source": "proxy", "data": ""}))
            await exchange.piece(message("modelStatus", listing.snapshot(self.config, self.swapper.states)))
            await exchange.piece(message("profileChanged", self.simulation.active_profile()))
            await exchange.piece(message("inflight", {"operation": "snapshot", "requests": []}))
            while (news := await listener.get()) is not None:
                await exchange.piece(news)
            await exchange.end()
        finally:
            self.events.forget(listener)

    async def on_profiles(self, exchange: Exchange, _rest: str) -> None:
        profiles = [
            {"id": profile.id, "description": profile.description, "pins": profile.pins}
            for profile in sorted(self.config.profiles.values(), key=lambda each: each.id)
        ]
        await exchange.json({**self.simulation.active_profile(), "profiles": profiles})
