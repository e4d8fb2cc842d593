"""All calls of all clients at once, behind a speech request that keeps the GPU for longer than any of them waits.

The model of a call decides what becomes of it. Keep-alives come twice in each client's idle timeout, and both the queue
and the upstream's first byte take several times that timeout.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from clients import streams
from clients.calls import Call, Client, Outcome

from harness import Proxy, RawClient, Upstream, after

IDLE = 1.0
EVERY = 0.5

QUEUED = 2.5
"""Seconds that every request has waited when speech ends."""

LOADING = 1.5
"""Seconds from then to the upstream's first byte."""

HASTY_WAIT = 1.5
"""Seconds: after the early head, and while speech still holds the GPU."""

PATIENCE = 15.0
"""Seconds after which speech ends although not every request is waiting that should be."""

SETTINGS: dict[str, Any] = {
    "keepalive_after": EVERY,
    "keepalive_every": EVERY,
    "max_queue": 500,
    "max_queue_per_client": 500,
    "slots": 500,
    "classes": {
        "hasty": {"models": ["hasty"], "max_wait": HASTY_WAIT},
        "silent": {"models": ["silent"], "keepalive": False},
    },
}

SCRIPTS = {
    "told": streams.telling(LOADING),
    "plain": streams.telling_plainly,
    "broken": streams.broken,
    "dead": streams.dead,
    "cut": streams.cut,
}
"""What the upstream does for each model. It never sees `hasty`, whose max_wait is short, nor `silent`, for which there
are no keep-alives: its clients give up."""


def calls(client: Client) -> list[Call]:
    """Every call of one client."""
    told = [Call(api, "told") for api in client.apis]
    fates = ("broken", "dead", "cut", "hasty", *(["silent"] if client.exact else []))
    failing = itertools.product(client.fails_on, fates)
    plain = itertools.product(client.fails_on, ("plain", "hasty"))
    return told + list(itertools.starmap(Call, failing)) + [Call(api, model, stream=False) for api, model in plain]


async def play(kinds: Iterable[type[Client]]) -> dict[str, dict[Call, Outcome]]:
    """What came of all calls, by client. Raises what a client raises that cannot be had here."""
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream())
        upstream.by_model = dict(SCRIPTS)
        proxy = await stack.enter_async_context(Proxy(upstream.url, **SETTINGS))
        clients = [await stack.enter_async_context(kind(proxy.url, IDLE)) for kind in kinds]
        outcomes = await _behind_speech(proxy, upstream, clients)
        await proxy.drained(upstream)
        return outcomes


async def _behind_speech(proxy: Proxy, upstream: Upstream, clients: Sequence[Client]) -> dict[str, dict[Call, Outcome]]:
    end = asyncio.Event()
    upstream.by_model["tts-a"] = after(end)
    async with RawClient(proxy.port) as speaker:
        speaker.tts()
        await proxy.until(holders=1)
        running = {client.name: asyncio.create_task(client.run(calls(client))) for client in clients}
        try:
            await _all_have_waited(proxy, [call for client in clients if client.patient for call in calls(client)])
            end.set()
            async with asyncio.timeout(30):
                await asyncio.gather(*running.values())
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)
        assert (await speaker.answer()).status == 200
    return {name: task.result() for name, task in running.items()}


async def _all_have_waited(proxy: Proxy, of: Sequence[Call]) -> None:
    """Return once all that can wait have done so for `QUEUED` seconds; late, if a client gave up that should not have.

    What came of that one tells more than a failure here would.
    """
    expected = sum(call.model in SCRIPTS for call in of)
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while True:
                waited = [each["waited_seconds"] for each in (await proxy.queue())["waiters"]]
                if len(waited) == expected and min(waited) >= QUEUED:
                    return
                await asyncio.sleep(0.05)
