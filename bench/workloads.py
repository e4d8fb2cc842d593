"""What is asked of every proxy, and in which numbers: in full, quickly (to develop), or as a smoke test."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

MIB = 2**20

KEY = f"sk-{secrets.token_hex(32)}"
"""What clients send: litellm wants one of its own."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything. Times are seconds; a `swap_scale` of 0.02 makes a second of an evening 20 ms."""

    repetitions: int
    seconds: float
    paced_events: int
    paced_streams: int
    events: int
    upload: int
    download: int
    waiters: int
    drains: int
    lock_seconds: float
    swap_scale: float
    swap_rounds: int


FULL = Size(
    repetitions=5, seconds=2.0, paced_events=400, paced_streams=200, events=500, upload=20 * MIB, download=5 * MIB,
    waiters=1000, drains=5, lock_seconds=1.0, swap_scale=0.02, swap_rounds=3,
)  # fmt: skip
QUICK = replace(
    FULL, repetitions=1, seconds=0.4, paced_events=100, drains=1, lock_seconds=0.1, swap_scale=0.01, swap_rounds=1
)
SMOKE = Size(
    repetitions=1, seconds=0.1, paced_events=10, paced_streams=10, events=20, upload=2 * MIB, download=MIB,
    waiters=30, drains=1, lock_seconds=0.01, swap_scale=0.004, swap_rounds=1,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` connections in a closed loop. `units` is how many units one answer counts for.

    `request` makes the request's bytes, and is told whether the model's name is all that reaches the upstream.
    """

    name: str
    title: str
    unit: str
    streams: int
    request: Callable[[bool], bytes]
    units: float = 1.0
    kind: Literal["loop", "paced"] = "loop"

    @property
    def group(self) -> str:
        """By what `--only` names it."""
        return self.name.partition("-")[0]


def post(path: str, wanted: str, body: bytes, kind: str = "application/json") -> bytes:
    """A request that the upstream answers as `wanted` says."""
    lines = [f"POST {path} HTTP/1.1", "Host: bench", "User-Agent: bench", "Accept: */*", f"X-Wanted: bench-{wanted}"]
    lines += [f"Authorization: Bearer {KEY}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def chat(wanted: str, *, stream: bool = False, size: int = 1024, model: str = "chat") -> Callable[[bool], bytes]:
    """A chat of about `size` bytes, most of which are one message, as an image would be."""

    def request(by_model: bool) -> bytes:
        message = {"role": "user", "content": "x" * (size - 100)}
        body = {"model": f"bench-{wanted}" if by_model else model, "stream": stream, "messages": [message]}
        return post("/v1/chat/completions", wanted, json.dumps(body, separators=(",", ":")).encode())

    return request


def form(wanted: str, size: int) -> Callable[[bool], bytes]:
    """A recording of `size` bytes to be transcribed."""
    border = "bench-border-0123456789"
    name = f'--{border}\r\nContent-Disposition: form-data; name="model"\r\n\r\nchat\r\n'
    file = f'--{border}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n'
    body = f"{name}{file}\r\n".encode() + b"\x00\x01" * (size // 2) + f"\r\n--{border}--\r\n".encode()
    return lambda by_model: post("/v1/audio/transcriptions", wanted, body, f"multipart/form-data; boundary={border}")


def workloads(size: Size) -> list[Workload]:
    """All that every proxy is asked for."""
    small = [
        Workload(f"small-{streams}", f"1 KB JSON, c={streams}", "request", streams, chat("json"))
        for streams in (1, 16, 64)
    ]
    events = chat(f"sse-{size.events}", stream=True)
    streams = [
        Workload(f"sse-{count}", f"SSE flat out, {count} streams", "event", count, events, size.events)
        for count in (1, 32)
    ]
    paced = chat(f"paced-{size.paced_events}", stream=True)
    title = f"SSE at 10 ms, {size.paced_streams} streams"
    up, down = size.upload / MIB, size.download / MIB
    return [
        *small,
        *streams,
        Workload("paced", title, "event", size.paced_streams, paced, size.paced_events, "paced"),
        Workload("upload-form", f"upload of {up:.0f} MB, form", "MB", 1, form("json", size.upload), up),
        Workload("upload-json", f"upload of {up:.0f} MB, JSON", "MB", 1, chat("json", size=size.upload), up),
        Workload("download", f"download of {down:.0f} MB", "MB", 1, chat(f"bytes-{size.download}"), down),
    ]


GROUPS = ("small", "sse", "paced", "upload", "download", "queue", "locks", "swaps")
