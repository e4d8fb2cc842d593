"""The reader of `heartbeat/sitecustomize.py`: whether a proxy's loop was blocked, and how many tasks it has.

heartbeat = Heartbeat(tmp_path)
proxy = await stack.proxy(env=heartbeat.environment)
await heartbeat.begin()
...
assert (await heartbeat.longest()) < 0.05
"""

from __future__ import annotations

import asyncio
import mmap
import os
from pathlib import Path

from heartbeat.sitecustomize import ASKED, WRITTEN

BLOCKED = 0.05
"""Seconds of CPU that no callback may take, nor all those of one turn of the loop."""


class Heartbeat:
    """Of the process that is started with `environment`."""

    def __init__(self, directory: Path) -> None:
        path = directory / "heartbeat"
        path.write_bytes(bytes(WRITTEN.size + ASKED.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        paths = [str(Path(__file__).parent / "heartbeat"), os.environ.get("PYTHONPATH", "")]
        self.environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HEARTBEAT_FILE": str(path)}
        self._number = 0

    async def begin(self) -> None:
        """Forget what was; return once the loop beats for this measurement."""
        self._number += 1
        ASKED.pack_into(self._memory, WRITTEN.size, self._number)
        await self._beats(1)

    async def longest(self) -> float:
        """The longest seconds of CPU between two beats since `begin`."""
        _, beats, *_ = WRITTEN.unpack_from(self._memory)
        await self._beats(beats + 2)  # a callback that blocks now is over then
        _, _, longest, _ = WRITTEN.unpack_from(self._memory)
        return float(longest)

    async def tasks(self) -> int:
        """How many tasks the loop has."""
        _, beats, *_ = WRITTEN.unpack_from(self._memory)
        await self._beats(beats + 60)  # they are counted at every fiftieth
        *_, tasks = WRITTEN.unpack_from(self._memory)
        return int(tasks)

    async def _beats(self, count: int) -> None:
        async with asyncio.timeout(20):
            while True:
                number, beats, *_ = WRITTEN.unpack_from(self._memory)
                if number == self._number and beats >= count:
                    return
                await asyncio.sleep(0.005)
