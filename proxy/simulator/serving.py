"""One model request from its turn to its last byte: the swapper around it, a model server's answer inside."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.simulator.answers import Answer, Question, answer
from proxy.simulator.swapper import NotServedError, OverLimitError

if TYPE_CHECKING:
    from proxy.simulator.config import Behaviour
    from proxy.simulator.exchange import Exchange
    from proxy.simulator.names import Target
    from proxy.simulator.swapper import Swapper, Turn

LOADING_TICK = 0.75  # seconds, before the scale, between two signs of life while a model loads; llama-swap's
HELD_POLL = 0.01  # seconds between two looks at whether a held answer has been let go


class ServerDiedError(Exception):
    """The model's server went away under the answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of a model server."""

    target: Target
    requested: str
    path: str  # decoded, as the model server sees it
    sent: str  # the same with its escapes and its query
    body: dict[str, Any]
    stream: bool


class Serving:
    def __init__(self, swapper: Swapper) -> None:
        self.swapper = swapper
        self.scripts = swapper.scripts

    async def serve(self, exchange: Exchange, asked: Asked) -> None:
        if asked.target.peer:
            await _Server(self, exchange, asked, asyncio.get_running_loop().create_future()).answer()
            return
        try:
            turn = self.swapper.arrive(asked.target.model, exchange.entry)
        except OverLimitError:
            await exchange.error(429, "Too many requests", "concurrency_limit", {"Retry-After": "1"})
            return
        try:
            if self._tells_loading(asked):
                await self._tell_loading(exchange, asked, turn)
            await turn.granted
            await _Server(self, exchange, asked, turn.killed).answer()
        except NotServedError as error:
            await exchange.error(500, str(error))
        finally:
            self.swapper.leave(turn)

    def _tells_loading(self, asked: Asked) -> bool:
        model = asked.target.model
        wanted = self.swapper.config.models[model].loading_state and asked.stream
        return wanted and asked.path == "/v1/chat/completions" and self.swapper.states[model] != "ready"

    async def _tell_loading(self, exchange: Exchange, asked: Asked, turn: Turn) -> None:
        """sendLoadingState: 200 at once, and a sign of life as reasoning until the turn comes."""
        await exchange.start(200, {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        text = f"llama-swap loading model: {asked.target.model}\n"
        while not turn.granted.done():
            delta = {"choices": [{"delta": {"reasoning_content": text}}]}
            await exchange.piece(b"data: " + json.dumps(delta).encode() + b"\n\n")
            text = "."
            await asyncio.wait({turn.granted}, timeout=LOADING_TICK * self.swapper.time_scale)


class _Server:
    """The scripted server behind one request; `killed` says that it is gone."""

    def __init__(self, serving: Serving, exchange: Exchange, asked: Asked, killed: asyncio.Future[None]) -> None:
        self.serving = serving
        self.exchange = exchange
        self.asked = asked
        self.killed = killed
        self.behaviour: Behaviour = serving.scripts.for_request(asked.target.model, exchange.headers)

    async def answer(self) -> None:
        try:
            await self._answer()
        except ServerDiedError:
            # llama-swap makes of a death before the head an empty 502, and of a later one a clean end.
            if self.exchange.begun:
                await self.exchange.end()
            else:
                await self.exchange.whole(502, {})

    async def _answer(self) -> None:
        if self.asked.path == "/health":  # a server that is up says so at once, whatever its script
            await self._whole(self._reply())
            return
        await self._pause(self.behaviour.work)
        if self.behaviour.fail == "die_before_headers":
            self._die()
        if isinstance(self.behaviour.fail, int):
            error = {"message": "the model server refuses", "type": "server_error", "code": None}
            await self.exchange.json({"error": error}, self.behaviour.fail)
            return
        reply = self._reply()
        if reply.streamed:
            await self._stream(reply)
            return
        await self._pause(self.behaviour.chunks * self.behaviour.chunk_interval if reply.generated else 0)
        await self._held()
        await self._whole(reply)

    async def _whole(self, reply: Answer) -> None:
        await self.exchange.whole(200, self._head(reply), b"".join(reply.pieces))

    async def _stream(self, reply: Answer) -> None:
        await self.exchange.start(200, self._head(reply))
        for place, piece in enumerate(reply.pieces):
            if self.behaviour.fail == "die_mid_stream" and place == self.behaviour.fail_after:
                self._die()
            if place > 0:
                await self._pause(self.behaviour.chunk_interval)
            if place == len(reply.pieces) - 1:
                await self._held()
            await self.exchange.piece(piece)
        await self.exchange.end()

    def _head(self, reply: Answer) -> dict[str, str]:
        head = {"Content-Type": reply.content_type, "X-Sim-Model": self.asked.target.model}
        if reply.content_type == "text/event-stream":
            head["X-Accel-Buffering"] = "no"
        return head

    def _reply(self) -> Answer:
        asked, model = self.asked, self.asked.target.model
        chunks = max(0, self.behaviour.chunks)
        reply = answer(Question(model, asked.requested, asked.path, asked.body, asked.stream, chunks))
        if reply is not None:
            return reply
        echo = {"model": model, "method": self.exchange.method, "target": asked.sent}
        return Answer("application/json", [json.dumps(echo).encode()])

    def _die(self) -> None:
        self.serving.swapper.server_died(self.asked.target.model)
        raise ServerDiedError

    async def _held(self) -> None:
        while self.serving.scripts.holds(self.asked.target.model, self.exchange.headers):
            await self._pause(HELD_POLL / self.serving.swapper.time_scale)

    async def _pause(self, seconds: float) -> None:
        await asyncio.wait({self.killed}, timeout=seconds * self.serving.swapper.time_scale)
        if self.killed.done():
            raise ServerDiedError
