"""A crowd that behaves as badly as crowds do, and a llama-swap that dies under it.

async with LlamaSwap(directory) as llama_swap:
    crowd = Crowd(port, seed=1)
    await crowd.run(50, until=deadline)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections import Counter
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

from differential_support import Got, read_answer

from harness import RawClient
from simulator_support import Simulator

BEHAVIOUR = "{load: 2, stop: 0.4, work: 0.2, chunks: 6, chunk_interval: 0.1}"
MODELS = ("chat-a", "chat-b", "tts-a", "whisper-a", "embed-a")
CONFIG = "models:\n" + "".join(f"  {model}: {{simulator: {BEHAVIOUR}}}\n" for model in MODELS)
APART = CONFIG + "matrix: {sets: {all: (chat-a | chat-b | tts-a | whisper-a) & embed-a}}\n"
PAIRED = CONFIG + "matrix: {sets: {one: chat-a & chat-b & embed-a, two: (tts-a | whisper-a) & embed-a}}\n"
"""Two configurations, between which llama-swap and the proxy go to and fro."""

TIME_SCALE = 0.01
FAILURES = ("die_mid_stream", "die_before_headers", "500", "429")
LARGE = b"X-Sim-Chunks: 300\r\nX-Sim-Chunk-Interval: 0"
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-a\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    + bytes(1_200_000)
    + b"\r\n--b--\r\n"
)


class LlamaSwap:
    """The simulated one, on a port that it keeps when it is restarted."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "llama-swap.yaml"
        self.path.write_text(APART, encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._simulator = self._new()

    def _new(self) -> Simulator:
        return Simulator(self.path, time_scale=TIME_SCALE, http="httptools", port=self._port)

    async def __aenter__(self) -> Self:
        await self._simulator.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._simulator.__aexit__(None, None, None)

    async def restart(self) -> None:
        """Everything that runs is cut off, and for a moment nobody listens."""
        await self._simulator.__aexit__(None, None, None)
        self._simulator = self._new()
        await self._simulator.__aenter__()

    async def reload(self, config: str) -> None:
        """Another configuration, which llama-swap is told of; the proxy finds out by itself, or is told."""
        await self._simulator.reload(config)


class Crowd:
    """Clients of the proxy, each of which asks for something, again and again."""

    def __init__(self, port: int, seed: int) -> None:
        self._port, self._seed = port, seed
        self.counts = Counter[str]()

    async def run(self, clients: int, until: float) -> None:
        """Return at about the monotonic time `until`, when all are done."""
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._one(Random(f"{self._seed} {number}"), until))
        self._seed += 1

    async def _one(self, random: Random, until: float) -> None:
        while time.monotonic() < until:
            async with RawClient(self._port) as client:
                for _ in range(random.randint(1, 3)):
                    try:
                        async with asyncio.timeout(60):
                            goes_on = await self._ask(client, random)
                    except (ConnectionError, asyncio.IncompleteReadError):
                        self.counts["cut off"] += 1
                        break
                    if not goes_on:
                        break

    async def _ask(self, client: RawClient, random: Random) -> bool:
        """One request; whether the connection can be used for another."""
        client.send(request(random))
        manner = random.choices(("whole", "leaves", "slow"), (7, 2, 1))[0]
        if manner == "leaves":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.choice((0, 0.002, 0.02, 0.2))):
                    await client.reader.readexactly(random.choice((1, 200, 5000)))
            client.reset() if random.random() < 0.5 else client.close()
            self.counts["left"] += 1
            return False
        if manner == "slow":
            await self._dawdle(client, random)
        got = await read_answer(client.reader, is_head=False)
        self.counts[_outcome(got)] += 1
        return got.whole and (b"connection", b"close") not in got.fields

    async def _dawdle(self, client: RawClient, random: Random) -> None:
        """Reads nothing for a while; the socket's buffers are small."""
        transport = client.writer.transport
        assert isinstance(transport, asyncio.ReadTransport)
        transport.pause_reading()
        await asyncio.sleep(random.random() / 2)
        with contextlib.suppress(RuntimeError):
            transport.resume_reading()


def _outcome(got: Got) -> str:
    """The status, with the proxy's own code where there is one."""
    if not got.whole:
        return f"{got.status} broken off"
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return f"{got.status} {json.loads(got.body)['error']['code']}"
    return str(got.status)


def request(random: Random) -> bytes:
    """Something that a client might want."""
    kind = random.choices(("chat", "speech", "embed", "form", "free", "page", "junk"), (45, 15, 15, 5, 10, 5, 5))[0]
    if kind == "free":
        return b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
    if kind == "page":
        return b"GET /-/%b HTTP/1.1\r\nHost: a\r\n\r\n" % random.choice((b"queue", b"metrics", b"healthz", b"none"))
    if kind == "junk":
        return random.choice((b"GET / HTTP/9\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n\r\n"))
    fields = [b"Host: a", *random.choice((b"X-Sim-Chunks: 1", b"X-Sim-Chunks: 6", LARGE)).split(b"\r\n")]
    if random.random() < 0.1:
        fields.append(b"X-Sim-Fail: " + random.choice(FAILURES).encode())
    if random.random() < 0.05:
        fields.append(b"Prefer: respond-async")
    if kind == "form":
        head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        return head + b"\r\n".join([*fields, b"Content-Length: %d" % len(FORM), b"", FORM])
    path, model = {
        "chat": (b"/v1/chat/completions", random.choice(("chat-a", "chat-b"))),
        "speech": (b"/v1/audio/speech", "tts-a"),
        "embed": (b"/v1/embeddings", "embed-a"),
    }[kind]
    messages = [{"role": "user", "content": "x" * random.choice((1, 100, 20_000))}]
    stream = random.random() < 0.7
    body = json.dumps({"model": model, "stream": stream, "messages": messages, "input": "x", "voice": "v"}).encode()
    head = b"POST " + path + b" HTTP/1.1\r\nContent-Type: application/json\r\n"
    return head + b"\r\n".join([*fields, b"Content-Length: %d" % len(body), b"", body])


def memory_of(pid: int) -> int:
    """Bytes that are resident."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def threads_of(pid: int) -> int:
    """How many threads the process has."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
