"""A server's protocol that parses what has come in pieces, so that no client can keep the others waiting.

The socket gives up to 256 KiB at once. Whether that is a piece of an upload, or six thousand requests, or forty
thousand chunks of one byte, only the parser finds out, and the last two take it a quarter of a second. So after each
piece the clock is looked at, and the rest waits for the next turn of the loop, with nothing read from this client
meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from uvicorn.protocols.http.flow_control import FlowControl

PIECE = 16 * 1024
"""Bytes that are parsed without looking at the clock: at the worst, 20 ms."""

TURN_SECONDS = 0.005
"""After so long others may run first: longer than anything ordinary takes, a tenth of what anyone would notice."""


class Paced:
    """Goes before an asyncio protocol, in whose place `parse` takes what has been received."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    flow: FlowControl

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._pieces: deque[memoryview] = deque()

    def parse(self, data: bytes | memoryview) -> None:
        """Take these bytes; at most `PIECE`."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived (asyncio)."""
        behind = bool(self._pieces)
        if not behind and len(data) <= PIECE:
            self.parse(data)
            return
        whole = memoryview(data)
        self._pieces.extend(whole[at : at + PIECE] for at in range(0, len(data), PIECE))
        if behind:
            self.transport.pause_reading()  # again: the application has asked for more meanwhile
        else:
            self._take_turn()

    def _take_turn(self) -> None:
        ends = time.monotonic() + TURN_SECONDS
        while self._pieces and not self.transport.is_closing():
            if time.monotonic() > ends:
                self.transport.pause_reading()
                self.loop.call_soon(self._take_turn)
                return
            self._parse_or_pass_on(self._pieces.popleft())
        self._pieces.clear()
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _parse_or_pass_on(self, piece: memoryview) -> None:
        """To the protocol that has this connection now: it may have become a WebSocket's."""
        now: object = self.transport.get_protocol()
        if now is self:
            self.parse(piece)
        elif isinstance(now, asyncio.Protocol):
            now.data_received(bytes(piece))
