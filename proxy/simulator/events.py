"""The feed behind `/api/events`: snapshots of all models' states, and the active profile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

Listener = asyncio.Queue[bytes | None]


class Events:
    def __init__(self) -> None:
        self._listeners: set[Listener] = set()

    def publish(self, kind: str, data: Any) -> None:
        for listener in self._listeners:
            listener.put_nowait(message(kind, data))

    def close(self) -> None:
        """Ends every feed."""
        for listener in self._listeners:
            listener.put_nowait(None)

    def listen(self) -> Listener:
        listener: Listener = asyncio.Queue()
        self._listeners.add(listener)
        return listener

    def forget(self, listener: Listener) -> None:
        self._listeners.discard(listener)


def message(kind: str, data: Any) -> bytes:
    """One event: an envelope whose data is JSON text inside JSON."""
    envelope = {"type": kind, "data": json.dumps(data, separators=(",", ":"))}
    return b"event:message\ndata:" + json.dumps(envelope, separators=(",", ":")).encode() + b"\n\n"
