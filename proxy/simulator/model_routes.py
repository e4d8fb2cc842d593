"""The routes that run a model, and with that may load it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from proxy.simulator.config import COMFYUI_MODEL
from proxy.simulator.names import NoTargetError, Target
from proxy.simulator.reading import read_request
from proxy.simulator.serving import Asked, Serving

if TYPE_CHECKING:
    from proxy.simulator.exchange import Exchange
    from proxy.simulator.simulation import Simulation


class ModelRoutes:
    def __init__(self, simulation: Simulation) -> None:
        self.config = simulation.config
        self.names = simulation.names
        self.swapper = simulation.swapper
        self.serving = Serving(simulation.swapper)

    async def on_named(self, exchange: Exchange, _rest: str) -> None:
        body = await exchange.body()
        content_type = exchange.headers.get("content-type", "")
        reading = read_request(exchange.method, exchange.query, content_type, body)
        exchange.entry.requested = reading.model or None
        name = self.names.pinned(reading.model) if reading.rewritten else reading.model
        if not name:
            await exchange.error(404, "no model id could be identified")
            return
        try:
            states = self.swapper.states
            target = self.names.resolve(name, states) if reading.rewritten else self.names.base(name)
        except NoTargetError as error:
            await exchange.error(503, str(error))
            return
        if target is None:
            await exchange.error(404, "no router for requested model")
            return
        path = re.sub(r"^/v(?=/)|^/audioapi", "", _decoded(exchange.raw_path))
        try:
            await self._serve(exchange, Asked(target, reading.model, path, path, reading.body, reading.stream))
        finally:
            self.names.let_go(target)

    async def on_upstream(self, exchange: Exchange, rest: str) -> None:
        found = self.names.in_path(rest)
        if found is None:
            await exchange.error(404, "model not found")
            return
        exchange.entry.requested = found.sent
        if found.rest == "/" and not _decoded(exchange.raw_path).endswith("/"):
            status = 301 if exchange.method in {"GET", "HEAD"} else 308
            await exchange.redirect(status, f"/upstream/{found.name}/")
            return
        ignored = any(pattern.search(found.rest) for pattern in self.config.ignore_paths)
        if ignored and not found.target.peer and self.swapper.states[found.target.model] != "ready":
            model = found.target.model
            await exchange.error(409, f"model {model} is not loaded; path matches upstream.ignorePaths")
            return
        suffix = _raw_suffix(exchange.raw_path, f"/upstream/{found.sent}")
        await self._pass_on(exchange, found.target, found.name, found.rest, suffix)

    async def on_comfyui_root(self, exchange: Exchange, _rest: str) -> None:
        await exchange.redirect(301 if exchange.method in {"GET", "HEAD"} else 308, "/comfyui/")

    async def on_comfyui(self, exchange: Exchange, rest: str) -> None:
        if COMFYUI_MODEL not in self.config.models:
            await exchange.error(404, f"local model {COMFYUI_MODEL} not found")
            return
        if rest and self.swapper.states[COMFYUI_MODEL] != "ready":
            await exchange.error(409, f"model {COMFYUI_MODEL} is not loaded; only /comfyui/ can start it")
            return
        exchange.entry.requested = COMFYUI_MODEL
        suffix = _raw_suffix(exchange.raw_path, "/comfyui")
        await self._pass_on(exchange, Target(COMFYUI_MODEL), COMFYUI_MODEL, "/" + rest, suffix)

    async def _pass_on(self, exchange: Exchange, target: Target, name: str, path: str, raw_path: str) -> None:
        body = await exchange.body()
        content_type = exchange.headers.get("content-type", "")
        reading = read_request(exchange.method, exchange.query, content_type, body)
        sent = raw_path + exchange.target[len(exchange.raw_path) :]
        await self._serve(exchange, Asked(target, name, path, sent, reading.body, reading.stream))

    async def _serve(self, exchange: Exchange, asked: Asked) -> None:
        await exchange.while_client_stays(self.serving.serve(exchange, asked))


def _decoded(raw_path: str) -> str:
    return unquote_to_bytes(raw_path).decode("utf-8", "replace")


def _raw_suffix(raw_path: str, prefix: str) -> str:
    """What follows `prefix`, which is decoded, in `raw_path`, whose escapes stay as they are."""
    left, position = len(prefix.encode()), 0
    while left > 0 and position < len(raw_path):
        position += 3 if raw_path[position] == "%" else 1
        left -= 1
    return raw_path[position:] or "/"
