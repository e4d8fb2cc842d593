"""The routes that change something: unloading, profiles, and our own under `/_sim/`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from proxy.simulator.config import ConfigError

if TYPE_CHECKING:
    from proxy.simulator.exchange import Exchange
    from proxy.simulator.simulation import Simulation


class ControlRoutes:
    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.config = simulation.config
        self.swapper = simulation.swapper

    async def on_unload(self, exchange: Exchange, _rest: str) -> None:
        await self.swapper.unload(self.config.models)
        await exchange.text("OK")

    async def on_unload_all(self, exchange: Exchange, _rest: str) -> None:
        await self.swapper.unload(self.config.models)
        await exchange.json({"msg": "ok"})

    async def on_unload_model(self, exchange: Exchange, rest: str) -> None:
        target = self.simulation.names.base(rest)
        if target is None or target.peer:
            await exchange.error(404, "model not found")
            return
        await self.swapper.unload([target.model])
        await exchange.text("OK")

    async def on_activate(self, exchange: Exchange, _rest: str) -> None:
        try:
            wanted = json.loads(await exchange.body())
        except ValueError:
            await exchange.error(400, "invalid profile request")
            return
        name = wanted.get("name", 0) if isinstance(wanted, dict) else 0
        if not isinstance(name, str | None):
            missing = not isinstance(wanted, dict) or "name" not in wanted
            text = "profile name is required" if missing else "profile name must be a string or null"
            await exchange.error(400, text)
            return
        if name and name not in self.config.profiles:
            await exchange.error(404, f'profile "{name}" not found')
            return
        self.simulation.activate(name or "")
        await exchange.json(self.simulation.active_profile())

    async def on_sim_log(self, exchange: Exchange, _rest: str) -> None:
        await exchange.json(self.simulation.journal.as_dict())

    async def on_sim_reset(self, exchange: Exchange, _rest: str) -> None:
        self.simulation.journal.reset()
        await exchange.json({})

    async def on_sim_state(self, exchange: Exchange, _rest: str) -> None:
        await exchange.json({**self.swapper.as_dict(), "reloads": self.simulation.journal.reloads})

    async def on_sim_script(self, exchange: Exchange, _rest: str) -> None:
        try:
            changes: dict[str, dict[str, Any]] = json.loads(await exchange.body())
            self.simulation.scripts.change(changes)
        except (ConfigError, ValueError, TypeError, AttributeError) as error:
            await exchange.json({"error": str(error)}, 400)
            return
        await exchange.json({})

    async def on_sim_release(self, exchange: Exchange, _rest: str) -> None:
        self.simulation.scripts.release((await exchange.body()).decode())
        await exchange.json({})
