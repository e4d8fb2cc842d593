"""The simulator as a process of its own, for any test that needs a llama-swap to talk to.

async with Simulator(CONFIG) as simulator:
    ...requests to simulator.url...
    log = await simulator.log()
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

START_LIMIT = 20.0  # seconds; a slow machine needs about two
# By route: how the tests ask for each kind of work.
ROUTES = {
    "chat": "/v1/chat/completions",
    "speech": "/v1/audio/speech",
    "embed": "/v1/embeddings",
}
STOP_LIMIT = 10.0


class Simulator:
    """`config` is the text of a configuration, or the path of one; without it the default one is used."""

    def __init__(
        self, config: str | Path | None = None, *, time_scale: float = 0.1, http: str = "h11", port: int = 0
    ) -> None:
        self.url = ""
        self.client: httpx.AsyncClient
        self.returncode: int | None = None
        self._config = config
        self._path = config if isinstance(config, Path) else None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._options = ["--time-scale", str(time_scale), "--http", http, "--port", str(port)]
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        options = self._options
        if isinstance(self._config, str):
            self._directory = tempfile.TemporaryDirectory()
            self._path = Path(self._directory.name, "llama-swap.yaml")
            self._path.write_text(self._config, encoding="utf-8")
        if self._path is not None:
            options = [*options, "--config", str(self._path)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy.simulator", *options,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert self._process.stdout is not None
            line = await asyncio.wait_for(self._process.stdout.readline(), START_LIMIT)
            assert line.startswith(b"listening on http://"), f"the simulator did not start: {line!r}"
        except BaseException:
            await self.terminate()
            raise
        self.url = line.decode().removeprefix("listening on ").strip()
        self.client = client_of(self.url)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.aclose()
        await self.terminate()
        if self._directory is not None:
            self._directory.cleanup()

    async def terminate(self) -> int:
        """Ends the process with SIGTERM, and waits for it; its exit code."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_LIMIT)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self.returncode = self._process.returncode
        assert self.returncode is not None
        return self.returncode

    async def reload(self, config: str, *, wait: bool = True) -> None:
        """Writes another configuration and sends SIGHUP, and waits until it holds."""
        assert self._path is not None, "only a simulator with a configuration of its own can be given another"
        self._path.write_text(config, encoding="utf-8")
        before = (await self.state())["reloads"]
        self._process.send_signal(signal.SIGHUP)
        if wait:
            await self.until(lambda state: state["reloads"] > before)

    async def log(self) -> dict[str, Any]:
        """{"requests": [one record a request], "totals": {...}}"""
        return await self._json("GET", "/_sim/log")

    async def requests(self) -> list[dict[str, Any]]:
        requests: list[dict[str, Any]] = (await self.log())["requests"]
        return requests

    async def totals(self) -> dict[str, Any]:
        totals: dict[str, Any] = (await self.log())["totals"]
        return totals

    async def reset(self) -> None:
        await self._json("DELETE", "/_sim/log")

    async def state(self) -> dict[str, Any]:
        """{"models": {id: state}, "running": {id: requests}, "queue": [ids], "swaps": {id: waiters}, ...}"""
        return await self._json("GET", "/_sim/state")

    async def script(self, model: str, **values: Any) -> None:
        """Changes `simulator` values of `model` from here on."""
        await self._json("POST", "/_sim/script", json={model: values})

    async def release(self, name: str) -> None:
        """Lets an answer end that was asked for with `x-sim-hold: name`."""
        await self.client.post("/_sim/release", content=name)

    async def wait_running(self, model: str, count: int = 1) -> None:
        """Returns once `count` requests for `model` run."""
        await self.until(lambda state: state["running"].get(model, 0) == count)

    async def wait_queued(self, *models: str) -> None:
        """Returns once exactly requests for `models`, in this order, wait."""
        await self.until(lambda state: state["queue"] == list(models))

    async def until(self, condition: Callable[[dict[str, Any]], bool], limit: float = 10.0) -> dict[str, Any]:
        """The first state (see `state`) for which `condition` holds."""
        async with asyncio.timeout(limit):
            while True:
                state = await self.state()
                if condition(state):
                    return state
                await asyncio.sleep(0.005)

    async def _json(self, method: str, path: str, json: Any = None) -> dict[str, Any]:
        answer = await self.client.request(method, path, json=json)
        answer.raise_for_status()
        value: dict[str, Any] = answer.json()
        return value


def client_of(url: str) -> httpx.AsyncClient:
    """A client without limits of its own, so that whatever waits waits at the server."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return httpx.AsyncClient(base_url=url, timeout=30.0, limits=limits, trust_env=False)


@dataclass(frozen=True, slots=True)
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes


async def send_raw(
    url: str, method: str, target: str, headers: Mapping[str, str] | None = None, body: bytes = b""
) -> RawAnswer:
    """One request whose target goes out byte for byte, which httpx does not promise; to the answer's end."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        given = {"Host": "x", "Connection": "close", "Content-Length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        writer.write(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
        raw_head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = raw_head.decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return RawAnswer(int(first.split()[1]), fields, await reader.read())
    finally:
        writer.close()


class Releasing(Protocol):
    async def release(self, name: str) -> None: ...


def ask(kind: str, model: str, *, stream: bool = False) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request to `model`: "chat", "speech" or "embed"."""
    bodies: dict[str, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": "x"}], "stream": stream},
        "speech": {"input": "x", "voice": "v"},
        "embed": {"input": "x"},
    }
    return ROUTES[kind], {"model": model, **bodies[kind]}


class Hog:
    """Requests for one model that always overlap: one ends when the next has begun, or `turn` seconds later.

    async with Hog(client, simulator, "chat", "chat-a") as hog:
        await hog.until(24)

    `client` may lead to the simulator through a proxy. That may let the next request wait for others; the
    one before it must end then, which is what `turn` is for.
    """

    def __init__(
        self, client: httpx.AsyncClient, control: Releasing, kind: str, model: str, *, turn: float = 30.0
    ) -> None:
        self.served = 0
        self.failed: list[int] = []
        self._client = client
        self._control = control
        self._turn = turn
        self._path, self._body = ask(kind, model, stream=True)
        self._progress = asyncio.Condition()
        self._stopping = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep_on())
        await self.until(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Begins no more requests, and waits for the end of those that run."""
        self._stopping = True
        await self._task

    async def until(self, served: int, limit: float = 60.0) -> None:
        async with asyncio.timeout(limit), self._progress:
            await self._progress.wait_for(lambda: self.served >= served)

    async def _keep_on(self) -> None:
        name, request = await self._begin()
        while not self._stopping:
            begun = asyncio.create_task(self._begin())
            await asyncio.wait({begun}, timeout=self._turn)
            await self._end(name, request)
            name, request = await begun
        await self._end(name, request)

    async def _begin(self) -> tuple[str, asyncio.Task[None]]:
        """A request whose answer has begun, and the name that lets it end."""
        name, begun = uuid.uuid4().hex, asyncio.Event()
        request = asyncio.create_task(self._one(name, begun))
        await begun.wait()
        return name, request

    async def _end(self, name: str, request: asyncio.Task[None]) -> None:
        await self._control.release(name)
        await request
        async with self._progress:
            self.served += 1
            self._progress.notify_all()

    async def _one(self, name: str, begun: asyncio.Event) -> None:
        headers = {"x-sim-hold": name}
        try:
            async with self._client.stream("POST", self._path, json=self._body, headers=headers) as answer:
                async for _ in answer.aiter_raw():
                    begun.set()
            if answer.status_code != 200:
                self.failed.append(answer.status_code)
        finally:
            begun.set()


# Two models that exclude each other, and one beside both. A chat takes a sixth of a second with SCALE.
SMALL = """
models:
  a: {simulator: {load: 4, stop: 0.5, work: 0.5, chunks: 6, chunk_interval: 0.5}}
  b: {simulator: {load: 4, stop: 0.5, work: 0.5, chunks: 6, chunk_interval: 0.5}}
  e: {simulator: {load: 2, work: 0.1}}
matrix: {sets: {all: (a | b) & e}}
"""
SCALE = 0.05


class Upstream(Protocol):
    """A simulator, or what a test can use like one."""

    url: str
    client: httpx.AsyncClient


def send(upstream: Upstream, kind: str, model: str, **more: Any) -> asyncio.Task[httpx.Response]:
    path, body = ask(kind, model)
    return asyncio.create_task(upstream.client.post(path, json=body, **more))


def served(log: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """The requests for `model` that reached a model server."""
    return [each for each in log["requests"] if each["requested"] == model and each["started"] is not None]


async def states(upstream: Upstream) -> dict[str, str]:
    """The state of each model that is not stopped, as `/running` tells it."""
    running = (await upstream.client.get("/running")).json()["running"]
    return {each["model"]: each["state"] for each in running}


async def until(upstream: Upstream, wanted: dict[str, str]) -> None:
    """Returns once `states` are `wanted`."""
    async with asyncio.timeout(10):
        while True:
            if await states(upstream) == wanted:
                return
            await asyncio.sleep(0.005)
