"""Follow what llama-swap says of itself, so that the lock knows what is resident and how long loads take.

Three sources, each with its weakness. `/api/events` is prompt, but repeats, merges and loses messages and ends at
every reload: it times loads and tells that something has changed. `/running` is the truth at the moment it was asked:
only it corrects R, with the time of the question, since an older answer may contradict a grant made meanwhile; while a
model is starting or stopping it is asked again soon. `/api/profiles` and `/v1/models` are asked now and then, for
llama-swap tells nobody when they differ from what the file says.

All of it is optional: a llama-swap that answers none of these is served from the configuration alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

import httpx
import structlog
from httpx_sse import EventSource, SSEError

from proxy.loads import Load, StateHistory

log = structlog.get_logger("gpu_lease_proxy")

RECONNECT_SECONDS = 1.0
"""Between two tries at `/api/events`: it ends at each reload of llama-swap, which takes about that long."""

ABSENT_SECONDS = 30.0
"""Between two tries where llama-swap answered that it has no such stream, and between two looks at its profiles."""

DOUBT_SECONDS = 0.5
"""Between two looks at `/running` while the lock is in doubt of what is resident, and requests wait for it."""

RUNNING_SECONDS = 10.0
"""Between two looks at `/running` otherwise: a net below the events."""

LISTING_SECONDS = 60.0
"""Between two looks at `/v1/models`, where there is no configuration file to watch."""

ASK_SECONDS = 5.0
"""How long one answer may take; llama-swap needs milliseconds, also when busy."""


class Sink(Protocol):
    """Who is told. All calls are synchronous; times are `time.monotonic`."""

    def running(self, states: Mapping[str, str], asked: float) -> None:
        """`/running`: every model that is not stopped, with its state."""
        ...

    def loaded(self, load: Load) -> None:
        """A load was seen from its beginning to its end."""
        ...

    def profile(self, name: str | None) -> None:
        """The active profile."""
        ...

    def listing(self, models: Any) -> None:
        """The body of `/v1/models`."""
        ...

    def in_doubt(self) -> bool:
        """Whether requests may be waiting for a look at `/running`."""
        ...


class Follower:
    """Asks and listens until cancelled."""

    def __init__(self, client: httpx.AsyncClient, sink: Sink, *, listing: bool) -> None:
        self._client, self._sink, self._with_listing = client, sink, listing
        self._history = StateHistory()
        self._changed = asyncio.Event()

    def look(self) -> None:
        """Ask `/running` soon: something may have changed."""
        self._changed.set()

    async def run(self) -> None:
        """All of it; only a cancellation ends this."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_events())
            group.create_task(self._watch_running())
            group.create_task(self._every(ABSENT_SECONDS, "/api/profiles", self._take_profiles))
            if self._with_listing:
                group.create_task(self._every(LISTING_SECONDS, "/v1/models", self._sink.listing))

    # -- the stream

    async def _follow_events(self) -> None:
        while True:
            pause = RECONNECT_SECONDS
            try:
                async with self._client.stream("GET", "/api/events", timeout=None) as response:
                    if response.status_code != httpx.codes.OK:
                        pause = ABSENT_SECONDS
                    else:
                        await self._read_events(response)
            except (httpx.HTTPError, SSEError):
                pass
            self._history.forget()
            self._changed.set()
            await asyncio.sleep(pause)

    async def _read_events(self, response: httpx.Response) -> None:
        async for kind, data in _messages(response):
            if kind == "modelStatus" and (states := _states(data)) is not None:
                for load in self._history.see(states, time.monotonic()):
                    self._sink.loaded(load)
                self._changed.set()
            elif kind == "profileChanged" and isinstance(data, dict):
                self._sink.profile(data.get("active"))

    # -- questions

    async def _watch_running(self) -> None:
        while True:
            self._changed.clear()
            asked = time.monotonic()
            states = _running(await self._ask("/running"))
            moving = states is not None and bool({"starting", "stopping"} & set(states.values()))
            if states is not None and not moving:
                self._sink.running(states, asked)
            pause = DOUBT_SECONDS if moving or self._sink.in_doubt() else RUNNING_SECONDS
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _every(self, seconds: float, path: str, take: Callable[[Any], None]) -> None:
        while True:
            if (body := await self._ask(path)) is not None:
                take(body)
            await asyncio.sleep(seconds)

    def _take_profiles(self, body: Any) -> None:
        if isinstance(body, dict):
            self._sink.profile(body.get("active"))

    async def _ask(self, path: str) -> Any:
        """The JSON body of a good answer, else None."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                response = await self._client.get(path)
            return response.json() if response.is_success else None
        except (httpx.HTTPError, TimeoutError, ValueError):
            return None


async def _messages(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    """llama-swap wraps JSON text in JSON: (type, parsed data) of every message that can be read; logs are skipped."""
    async for event in EventSource(response).aiter_sse():
        if '"logData"' in event.data[:40]:
            continue
        try:
            message = json.loads(event.data)
            yield message["type"], json.loads(message["data"])
        except (ValueError, KeyError, TypeError):
            log.debug("event_unreadable", length=len(event.data))


def _states(models: Any) -> dict[str, str] | None:
    """{model: state} of a modelStatus message; models of peers have no state."""
    if not isinstance(models, list):
        return None
    local = [model for model in models if isinstance(model, dict) and not model.get("peerID")]
    return {str(model.get("id")): str(model.get("state")) for model in local}


def _running(body: Any) -> dict[str, str] | None:
    """{model: state} of `/running`, which leaves the stopped ones out."""
    models = body.get("running") if isinstance(body, dict) else None
    if not isinstance(models, list):
        return None
    return {str(model.get("model")): str(model.get("state")) for model in models if isinstance(model, dict)}
