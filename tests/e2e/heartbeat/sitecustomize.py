"""A heartbeat inside a server process: how long its loop was blocked, and how many tasks it has.

Python imports this module by itself where its directory is on PYTHONPATH. It makes every uvloop of the process beat
every `BEAT` seconds and write to the file that HEARTBEAT_FILE names (`heartbeat_support` reads it). Between two beats
the loop runs callbacks; what counts is the CPU time of its thread meanwhile, and not the time on the wall, so that the
other programs of a busy machine do not.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time

import uvloop

BEAT = 0.002
WRITTEN = struct.Struct("=qqdq")
"""Which measurement this is of, beats in it, the longest seconds between two, tasks at the last count."""

ASKED = struct.Struct("=q")
"""Behind it, written by the reader: which measurement is wanted."""


def beating(memory: mmap.mmap, loop: asyncio.AbstractEventLoop) -> None:
    """Let `loop` beat until it is closed."""
    number, beats, longest, tasks = 0, 0, 0.0, 0
    before = time.thread_time()

    def beat() -> None:
        nonlocal number, beats, longest, tasks, before
        blocked = time.thread_time() - before
        (asked,) = ASKED.unpack_from(memory, WRITTEN.size)
        if asked != number:
            number, beats, longest = asked, 0, 0.0
        else:
            beats, longest = beats + 1, max(longest, blocked)
        if beats % 50 == 0:
            tasks = len(asyncio.all_tasks(loop))
        WRITTEN.pack_into(memory, 0, number, beats, longest, tasks)
        loop.call_later(BEAT, beat)
        before = time.thread_time()

    loop.call_soon(beat)


def install(path: str) -> None:
    """Make every new uvloop beat into that file."""
    descriptor = os.open(path, os.O_RDWR)
    memory = mmap.mmap(descriptor, WRITTEN.size + ASKED.size)
    os.close(descriptor)
    genuine = uvloop.new_event_loop

    def new_event_loop() -> uvloop.Loop:
        loop = genuine()
        beating(memory, loop)
        return loop

    uvloop.new_event_loop = new_event_loop


if "HEARTBEAT_FILE" in os.environ:
    install(os.environ["HEARTBEAT_FILE"])
