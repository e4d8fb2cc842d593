"""What the end-to-end tests share: a raw-TCP upstream that does as told, the proxy as users start it, raw clients.

The upstream is no framework, on purpose: it records every byte it gets and can misbehave in every way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from proxy.app import App
from proxy.server import Server, server_config
from proxy.settings import Settings

CHAT = {"model": "chat-a", "stream": True, "messages": [{"role": "user", "content": "x"}]}
TTS = {"model": "tts-a", "input": "x", "voice": "v"}
EMBED = {"model": "embed-a", "input": "x"}


@dataclass(eq=False)
class Seen:
    """One request as it arrived at the upstream."""

    head: bytes
    body: bytes
    arrived: float
    connection: int
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the peer has closed the connection on which this request came."""

    @property
    def target(self) -> bytes:
        """The request target, byte for byte."""
        return self.head.split(b" ", 2)[1]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Fields in order."""
        lines = self.head.split(b"\r\n")[1:-2]
        pairs = (line.partition(b":") for line in lines)
        return [(name, value.strip()) for name, _, value in pairs]

    @property
    def is_the_proxys_own(self) -> bool:
        """Whether the proxy asks for itself: its health check, or what llama-swap has loaded."""
        return (b"user-agent", b"gpu-lease-proxy") in [(name, value.partition(b"/")[0]) for name, value in self.headers]

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


Script = Callable[[Seen, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


DEFAULTS: dict[str, object] = {"http_parser": os.environ["TEST_PARSER"]} if "TEST_PARSER" in os.environ else {}
"""Settings of every proxy that does not say otherwise: CI runs all cases once more under the other parser."""


class Upstream:
    """A raw-TCP server. `script` answers each request; replace it, or map models to scripts with `by_model`."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or answer()
        self.by_model: dict[str, Script] = {}
        self.seen: list[Seen] = []
        self.connections = 0
        self.open_in_use = 0
        self.heads: list[bytes] = []
        self.reads_bodies = asyncio.Event()
        """Clear it and nothing is read beyond a request's head; the socket's own buffers are small."""
        self.reads_bodies.set()
        self._free = asyncio.Event()
        self._free.set()
        self._arrival = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**24)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Refuse connections and cut those that are open."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def restart(self) -> None:
        """Listen on the same port again."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**24)

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    def of_model(self, model: str) -> list[Seen]:
        """The requests that name `model` in a JSON body."""
        return [seen for seen in self.seen if seen.body and f'"{model}"'.encode() in seen.body]

    async def wait_for(self, predicate: Callable[[list[Seen]], bool], within: float = 5.0) -> None:
        """Return once `predicate` of all requests seen so far is true (the proxy's own questions are not counted)."""
        async with asyncio.timeout(within), self._arrival:
            await self._arrival.wait_for(lambda: predicate(self.seen))

    async def wait_for_head(self, target: bytes, within: float = 5.0) -> None:
        """Return once the head of a request for `target` has come, whether or not its body is read."""
        async with asyncio.timeout(within), self._arrival:
            await self._arrival.wait_for(lambda: any(head.split(b" ")[1] == target for head in self.heads))

    async def quiet(self, within: float) -> None:
        """Return once no request is being answered."""
        async with asyncio.timeout(within):
            await self._free.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        number = self.connections
        try:
            while (seen := await self._read(reader, number)) is not None:
                await self._answer(seen, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            for seen in self.seen:
                if seen.connection == number:
                    seen.closed.set()
            writer.close()
            self._tasks.discard(task)

    async def _answer(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if seen.is_the_proxys_own:
            status = "200 OK" if seen.target == b"/health" else "404 Not Found"
            writer.write(head(status, "Content-Length: 2") + b"{}")
            return
        self.seen.append(seen)
        async with self._arrival:
            self._arrival.notify_all()
        script = next((s for m, s in self.by_model.items() if f'"{m}"'.encode() in seen.body), self.script)
        self.open_in_use += 1
        self._free.clear()
        try:
            await script(seen, reader, writer)
            await writer.drain()
        finally:
            self.open_in_use -= 1
            if not self.open_in_use:
                self._free.set()

    async def _hold_back(self, head: bytes, reader: asyncio.StreamReader) -> None:
        self.heads.append(head)
        async with self._arrival:
            self._arrival.notify_all()
        transport = reader._transport  # type: ignore[attr-defined]
        transport.pause_reading()
        await self.reads_bodies.wait()
        transport.resume_reading()

    async def _read(self, reader: asyncio.StreamReader, number: int) -> Seen | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        seen = Seen(head, b"", time.monotonic(), number)
        if not self.reads_bodies.is_set() and not seen.is_the_proxys_own:
            await self._hold_back(head, reader)
        fields = {name.lower(): value for name, value in seen.headers}
        if b"chunked" in fields.get(b"transfer-encoding", b"").lower():
            while size := int(await reader.readline(), 16):
                seen.body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        elif length := int(fields.get(b"content-length", b"0")):
            seen.body = await reader.readexactly(length)
        return seen


async def watch_close(seen: Seen, reader: asyncio.StreamReader) -> None:
    """Set `seen.closed` when the peer closes while a script runs."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(65536):
            pass
    seen.closed.set()


# -- scripts


def head(status: str = "200 OK", *fields: str) -> bytes:
    """A response head."""
    return "\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    """`data` as a chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(body: bytes = b'{"ok":true}', status: str = "200 OK", *fields: str) -> Script:
    """A complete answer at once."""

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = f"Content-Length: {len(body)}"
        writer.write(head(status, "Content-Type: application/json", length, *fields) + body)

    return script


def event(number: int) -> bytes:
    """One chat event."""
    delta = {"index": 0, "delta": {"content": f"t{number} "}, "finish_reason": None}
    data = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "chat-a", "choices": [delta]}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


SSE = head("200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked")


def slow(events: int, interval: float = 0.1, *, end: bytes = b"0\r\n\r\n") -> Script:
    """`events` SSE events, one per `interval` seconds, then [DONE] and a clean end (or `end`, and a close if empty).

    Ends early when the peer closes.
    """

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watcher = asyncio.create_task(watch_close(seen, reader))
        try:
            writer.write(SSE)
            for number in range(events):
                writer.write(chunk(event(number)))
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(seen.closed.wait(), interval)
                    raise ConnectionResetError
            writer.write(chunk(b"data: [DONE]\n\n") + end)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        if not end:
            raise ConnectionResetError

    return script


def hang(seconds: float = 30.0, then: Script | None = None) -> Script:
    """No byte for `seconds`, then `then`; ends at once when the peer closes."""

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watcher = asyncio.create_task(watch_close(seen, reader))
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(seen.closed.wait(), seconds)
                raise ConnectionResetError
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        await (then or answer())(seen, reader, writer)

    return script


def after(event: asyncio.Event, then: Script | None = None) -> Script:
    """No byte until `event` is set, then `then`; ends at once when the peer closes."""

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watcher = asyncio.create_task(watch_close(seen, reader))
        opened, gone = asyncio.create_task(event.wait()), asyncio.create_task(seen.closed.wait())
        try:
            await asyncio.wait((opened, gone), return_when=asyncio.FIRST_COMPLETED)
            if not event.is_set():
                raise ConnectionResetError
        finally:
            for task in (watcher, opened, gone):
                task.cancel()
            await asyncio.gather(watcher, opened, gone, return_exceptions=True)
        await (then or answer())(seen, reader, writer)

    return script


def begun(end: asyncio.Event) -> Script:
    """A stream whose head and first event come at once, and whose end comes when `end` is set."""
    rest = after(end, raw(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", close=False))

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(event(0)))
        await rest(seen, reader, writer)

    return script


def raw(data: bytes, *, close: bool = True, reset: bool = False) -> Script:
    """These bytes, then a close (or a reset)."""

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if reset:
            linger(writer)
            writer.transport.abort()
        if close or reset:
            raise ConnectionResetError

    return script


def linger(writer: asyncio.StreamWriter) -> None:
    """Make the next close of this socket a reset."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# -- the proxy


class Proxy:
    """`gpu-lease-proxy serve` in a process of its own, on a free port."""

    def __init__(
        self, upstream: str, *, env: dict[str, str] | None = None, traced: bool = True, **settings: object
    ) -> None:
        """`traced`: whether coverage may look on, which doubles the time of what it looks at."""
        foreign = ("GPU_LEASE_",) if traced else ("GPU_LEASE_", "COVERAGE_")
        self._env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        self._env |= {"GPU_LEASE_UPSTREAM_URL": upstream, "GPU_LEASE_LISTEN_PORT": "0", "GPU_LEASE_LOG_FORMAT": "json"}
        settings = DEFAULTS | settings
        self._env |= {f"GPU_LEASE_{name.upper()}": _text(value) for name, value in settings.items()}
        self._env |= env or {}
        self.process: asyncio.subprocess.Process | None = None
        self.log: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._logged = asyncio.Condition()
        self._started = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy", "serve", env=self._env, stderr=asyncio.subprocess.PIPE
        )
        self._reader = asyncio.create_task(self._read_log())
        async with asyncio.timeout(20):
            await self._started.wait()
        assert self.url, "\n".join(self.lines)
        self.client = httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.client.aclose()
        await self.stop()
        if kind is not None:
            print("\n".join(self.lines))

    async def _read_log(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode().rstrip())
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                self.log.append(entry)
                async with self._logged:
                    self._logged.notify_all()
                if entry.get("event") == "listening":
                    self.url = entry["url"]
                    self._started.set()
        self.url = getattr(self, "url", "")
        self._started.set()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.url.rsplit(":", 1)[1])

    async def stop(self) -> int:
        """End it for good, without grace; returns the exit code."""
        assert self.process is not None
        assert self._reader is not None
        if self.process.returncode is None:
            self.process.terminate()
            try:
                async with asyncio.timeout(1):
                    await self.process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self.process.terminate()
        code = await self.process.wait()
        await self._reader
        return code

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    async def exit_code(self, within: float = 5.0) -> int:
        """The exit code, once it has ended by itself."""
        assert self.process is not None
        assert self._reader is not None
        async with asyncio.timeout(within):
            code = await self.process.wait()
            await self._reader
        return code

    async def logged(self, event: str, within: float = 5.0) -> dict[str, Any]:
        """The first log line of that event, once it is there."""
        async with asyncio.timeout(within), self._logged:
            await self._logged.wait_for(lambda: any(entry.get("event") == event for entry in self.log))
        return next(entry for entry in self.log if entry.get("event") == event)

    async def queue(self) -> dict[str, Any]:
        """`/-/queue`."""
        response = await self.client.get("/-/queue")
        response.raise_for_status()
        result: dict[str, Any] = response.json()
        return result

    async def metric(self, series: str) -> float:
        """The value of one series, written as Prometheus does, such as `gpu_lease_held{class="llm"}`."""
        text = (await self.client.get("/-/metrics")).text
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.rsplit(" ", 1)[0] == series]
        assert values, f"no series {series} in\n{text}"
        return float(values[0])

    async def until(
        self, waiters: int | None = None, holders: int | None = None, within: float = 5.0
    ) -> dict[str, Any]:
        """The queue once it has that many waiters and holders."""
        async with asyncio.timeout(within):
            while True:
                queue = await self.queue()
                if waiters in {None, len(queue["waiters"])} and holders in {None, len(queue["holders"])}:
                    return queue
                await asyncio.sleep(0.01)

    async def until_all(self, count: int, within: float = 5.0) -> dict[str, Any]:
        """The queue once that many requests wait or hold."""
        async with asyncio.timeout(within):
            while True:
                queue = await self.queue()
                if len(queue["waiters"]) + len(queue["holders"]) == count:
                    return queue
                await asyncio.sleep(0.01)

    async def drained(self, upstream: Upstream | None = None) -> None:
        """The invariant after every case: nothing held, nothing waiting, nothing open upstream, and both classes work.

        Pass the upstream with its scripts set to plain answers.
        """
        await self.until(waiters=0, holders=0, within=2)
        for name in ("llm", "tts"):
            assert await self.metric(f'gpu_lease_held{{class="{name}"}}') == 0
            assert await self.metric(f'gpu_lease_waiting{{class="{name}"}}') == 0
        if upstream is None:
            return
        await upstream.quiet(within=2)
        upstream.by_model.clear()
        upstream.script = answer()
        for path, body in (("/v1/audio/speech", TTS), ("/v1/chat/completions", CHAT)):
            response = await self.client.post(path, json=body, timeout=2)
            assert response.status_code == 200, response.text


class InProcess:
    """The application under its own server in this very loop: to put faults in, and to look at the lock itself.

    `signal` is what SIGTERM would do; the signals of the test process are left alone.
    """

    def __init__(self, upstream: str, **settings: object) -> None:
        self.settings = Settings.model_validate({"upstream_url": upstream, "listen_port": 0, **DEFAULTS, **settings})

    async def __aenter__(self) -> Self:
        self.app = App(self.settings)
        config = server_config(self.app, self.settings)
        started = asyncio.Event()
        self.server = _Unsignalled(config, self.app, self.settings.shutdown_grace, started.set)
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self.server.serve(sockets=[listener]))
        async with asyncio.timeout(5):
            await started.wait()
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=30, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.client.aclose()
        for task in self.server.server_state.tasks:
            task.cancel()
        await asyncio.gather(*self.server.server_state.tasks, return_exceptions=True)
        self.server.should_exit = True
        await self._task

    def signal(self) -> None:
        """What the server does at a signal."""
        self.server._on_signal()

    async def ended(self, within: float = 5.0) -> None:
        """Return once the server has ended by itself."""
        async with asyncio.timeout(within):
            await asyncio.shield(self._task)
            await asyncio.gather(*self.server.server_state.tasks, return_exceptions=True)

    async def idle(self, within: float = 2.0) -> None:
        """The invariant after every case, read from the inside: no lease, no waiter, no count and no byte is left."""
        leases, lock = self.app.leases, self.app.leases.lock
        await self.until(lambda: not lock.held and not lock.waiting, within)
        residency, spool = lock._residency, self.app._entrance.spool
        await self.until(lambda: not spool.used, within)
        assert not lock._slots_in_use
        assert not lock._lanes
        assert not lock._free_lanes
        assert (lock.waiting_count, lock._writers, residency.loading) == (0, 0, 0)
        assert not residency.in_use
        assert not leases._waiting_of

    async def cut(self, within: float = 5.0) -> None:
        """Return once the server has ended, and its loop as far as its own tasks go."""
        async with asyncio.timeout(within):
            await asyncio.shield(self._task)
            for task in self.server.server_state.tasks:
                task.cancel()
            await asyncio.gather(*self.server.server_state.tasks, return_exceptions=True)

    def metric(self, series: str, **labels: str) -> float:
        """The value of one series."""
        found = self.app.metrics.registry.get_sample_value(series, labels)
        assert found is not None, f"no series {series} {labels}"
        return found

    async def until(self, true: Callable[[], bool], within: float = 5.0) -> None:
        """Return once `true` is."""
        async with asyncio.timeout(within):
            while not true():  # noqa: ASYNC110 - the lock's state has no event for every question
                await asyncio.sleep(0.002)


class _Unsignalled(Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# -- raw clients


@dataclass(frozen=True)
class Answer:
    """What a raw client got; the names of fields are in lower case, and of equal ones the last counts."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


class RawClient:
    """A socket to the proxy."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.writer.close()

    def send(self, data: bytes) -> None:
        """Write bytes."""
        self.writer.write(data)

    def post(self, path: str, body: object, *fields: str) -> None:
        """Write a POST with a JSON body."""
        data = json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: test",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        ]
        self.send("\r\n".join([*lines, *fields, "", ""]).encode() + data)

    def chat(self, *fields: str) -> None:
        """Write `POST chat` of the cases."""
        self.post("/v1/chat/completions", CHAT, *fields)

    def tts(self, *fields: str) -> None:
        """Write `POST tts` of the cases."""
        self.post("/v1/audio/speech", TTS, *fields)

    async def head(self, within: float = 5.0) -> bytes:
        """The response head."""
        async with asyncio.timeout(within):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def answer(self, within: float = 5.0) -> Answer:
        """A whole answer that has a Content-Length, or ends with its connection."""
        async with asyncio.timeout(within):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            pairs = (line.partition(":") for line in lines[1:-2])
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            length = headers.get("content-length")
            body = await (self.reader.read() if length is None else self.reader.readexactly(int(length)))
        return Answer(int(lines[0].split(" ")[1]), headers, body)

    async def rest_of_chunks(self, within: float = 5.0) -> bytes:
        """Everything up to the last chunk of a chunked body."""
        return await self.until(b"\r\n0\r\n\r\n", within)

    async def rest(self, within: float = 5.0) -> bytes:
        """Everything until the connection ends, also when it is reset."""
        data = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(within):
                while piece := await self.reader.read(65536):
                    data += piece
        return data

    async def until(self, marker: bytes, within: float = 5.0) -> bytes:
        """Everything up to and with `marker`."""
        async with asyncio.timeout(within):
            return await self.reader.readuntil(marker)

    def close(self) -> None:
        """Close in the ordinary way."""
        self.writer.close()

    def reset(self) -> None:
        """Close with a reset."""
        linger(self.writer)
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def clients(port: int, count: int) -> AsyncIterator[list[RawClient]]:
    """Several raw clients."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(RawClient(port)) for _ in range(count)]
