"""Whether llama-swap answers. Asked every two seconds, so that readiness costs a client nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import structlog

log = structlog.get_logger("gpu_lease_proxy")

INTERVAL = 2.0
"""Seconds between two questions: two may be lost before the answer is too old."""

FRESH = 5.0
"""Seconds for which an answer counts."""


class Health:
    """Asks `/health` and remembers when it was last answered well."""

    def __init__(self, client: httpx.AsyncClient, on_change: Callable[[bool], None]) -> None:
        self._client = client
        self._on_change = on_change
        self._answered = float("-inf")
        self._up: bool | None = None

    @property
    def fresh(self) -> bool:
        """Whether llama-swap has answered within the last 5 s."""
        return time.monotonic() - self._answered <= FRESH

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self._note(await self._ask())
            await asyncio.sleep(INTERVAL)

    async def _ask(self) -> bool:
        try:
            async with asyncio.timeout(FRESH):
                response = await self._client.get("/health")
        except (httpx.HTTPError, TimeoutError):
            return False
        return response.is_success

    def _note(self, up: bool) -> None:
        if up:
            self._answered = time.monotonic()
        if up is self._up:
            return
        self._up = up
        self._on_change(up)
        log.info("upstream_up") if up else log.warning("upstream_down")
