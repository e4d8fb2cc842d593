"""What the queueing tests share: two llama-swaps behind one interface, and clients that note when.

A back end is a llama-swap with the routing `(q27 | vis | tts) & e`: the simulated one, or the real one with scripted
model servers. Both tell how old each request was when its first byte came, measured at llama-swap's own door: that is
where a request that has to wait inside grows old, and where one that waited outside must not.

    async with Stage(SimulatedLlamaSwap) as stage, stage.proxied("q27", policy="fifo") as scene:
        call = await scene.clients.call("tts")
        (seen,) = await scene.back_end.seen(call)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import shlex
import socket
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest
import yaml

from harness import Proxy
from simulator_support import Simulator, ask, client_of

MODELS = ("q27", "vis", "tts", "e")
KINDS = {"q27": "chat", "vis": "chat", "tts": "speech", "e": "embed"}
ROUTING = {"router": {"use": "matrix", "settings": {"matrix": {"sets": {"home": "(q27 | vis | tts) & e"}}}}}

SLACK = 0.8
"""Seconds that a busy machine may add to what a test measures."""

DISORDER = 0.25
"""Seconds within which two requests may arrive in another order than they were sent."""

START_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the model servers take, in seconds before a back end's scale."""

    load: float = 0.15
    stop: float = 0.02
    work: float = 0.05
    chunks: int = 10
    interval: float = 0.03

    @property
    def turn(self) -> float:
        """One answer from its beginning to its end."""
        return self.work + self.chunks * self.interval

    def scaled(self, scale: float) -> Pace:
        """The same, so many times as slow."""
        return Pace(self.load * scale, self.stop * scale, self.work * scale, self.chunks, self.interval * scale)


QUICK = Pace(load=0.1, work=0.02, chunks=2, interval=0.02)


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as llama-swap saw it; times are seconds since the epoch, and None for what never came."""

    tag: str
    status: int | None
    arrived: float
    first_byte: float | None
    finished: float

    @property
    def age(self) -> float:
        """Seconds from its arrival at llama-swap's door to its first byte."""
        assert self.first_byte is not None, f"{self.tag} got no byte"
        return self.first_byte - self.arrived


# -- clients


@dataclass(slots=True, eq=False)
class Call:
    """One request as its client saw it; `status` None where the client gave up first."""

    model: str
    tag: str
    sent: float = field(default_factory=time.time)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    half_through: asyncio.Event = field(default_factory=asyncio.Event)
    first_byte: float | None = None
    ended: float | None = None
    status: int | None = None
    lease_class: str = ""
    lease_wait: float = 0.0
    task: asyncio.Task[None] | None = None

    async def done(self) -> Self:
        """This call once it has ended."""
        assert self.task is not None
        await self.task
        return self


class Clients:
    """Clients of one URL: that of a llama-swap, or of a proxy before it."""

    _numbers = itertools.count(1)

    def __init__(self, url: str, half: int) -> None:
        self._client = client_of(url)
        self._half = half
        self._tasks: set[asyncio.Task[None]] = set()
        self.calls: list[Call] = []

    async def close(self) -> None:
        """Leaves, whatever is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    def start(self, model: str, *, timeout: float = 90.0) -> Call:
        """Sends a request for `model`, whose client waits `timeout` seconds for each byte."""
        call = Call(model, f"{model}-{next(self._numbers)}")
        call.task = asyncio.create_task(self._run(call, timeout))
        self._tasks.add(call.task)
        self.calls.append(call)
        return call

    async def call(self, model: str, *, timeout: float = 90.0) -> Call:
        """Sends a request and waits for its end."""
        return await self.start(model, timeout=timeout).done()

    async def _run(self, call: Call, timeout: float) -> None:
        path, body = ask(KINDS[call.model], call.model, stream=True)
        options: dict[str, Any] = {"json": body, "headers": {"User-Agent": call.tag}, "timeout": timeout}
        with contextlib.suppress(httpx.ReadTimeout):
            async with self._client.stream("POST", path, **options) as answer:
                call.lease_class = answer.headers.get("x-lease-class", "")
                call.lease_wait = float(answer.headers.get("x-lease-wait", 0))
                await self._read(call, answer)
                call.status = answer.status_code
        call.ended = time.time()
        call.begun.set()
        call.half_through.set()

    async def _read(self, call: Call, answer: httpx.Response) -> None:
        pieces = 0
        async for _ in answer.aiter_raw():
            pieces += 1
            if call.first_byte is None:
                call.first_byte = time.time()
                call.begun.set()
            if pieces >= self._half:
                call.half_through.set()


class Overlapping:
    """Two clients whose requests for one model always overlap: each is sent when the one before is half through.

    async with Overlapping(clients, "q27") as crowd:
        await crowd.served(12)
    """

    def __init__(self, clients: Clients, model: str) -> None:
        self.calls: list[Call] = []
        self._clients, self._model = clients, model
        self._stopping = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep_on())
        await self.served(2)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        await self._task
        for call in self.calls:
            await call.done()

    async def served(self, more: int) -> None:
        """Returns once so many more have been served."""
        enough = self._count() + more
        await eventually(lambda: self._count() >= enough)

    def _count(self) -> int:
        return sum(call.status is not None for call in self.calls)

    async def _keep_on(self) -> None:
        while not self._stopping:
            self.calls.append(self._clients.start(self._model))
            await self.calls[-1].half_through.wait()


async def eventually(true: Callable[[], bool], limit: float = 60.0) -> None:
    """Returns once `true` is."""
    async with asyncio.timeout(limit):
        while not true():  # noqa: ASYNC110 - what is asked here has no event
            await asyncio.sleep(0.01)


# -- back ends


class BackEnd(ABC):
    """A llama-swap. `scale` multiplies all seconds."""

    scale = 1.0
    url: str
    pace: Pace

    @property
    @abstractmethod
    def load_limit(self) -> float:
        """The longest that one load takes, with the stop of the model before."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    async def script(self, model: str, pace: Pace, *, hold: bool) -> None:
        """How the server of `model` behaves from now on."""

    async def follow(self, pace: Pace) -> None:
        """All models go at this pace, times the scale, and none is held."""
        self.pace = pace.scaled(self.scale)
        for model in MODELS:
            await self.let_go(model)

    async def hold(self, model: str) -> None:
        """From now on answers of `model` keep back their last piece."""
        await self.script(model, self.pace, hold=True)

    async def let_go(self, model: str) -> None:
        """Ends `hold`."""
        await self.script(model, self.pace, hold=False)

    @abstractmethod
    async def inside(self) -> Counter[str]:
        """The requests that wait or run inside now, by model."""

    @abstractmethod
    async def loads(self) -> Counter[str]:
        """The loads since `forget`, by model."""

    @abstractmethod
    async def forget(self) -> None:
        """Forgets what has happened."""

    @abstractmethod
    async def journal(self) -> dict[str, Seen]:
        """The requests since `forget` that are over, by tag."""

    async def check_that_nothing_waited(self, calls: Iterable[Call]) -> None:
        """Asserts that none of these grew older here than it may, and that nothing waited since `forget`."""
        ages = {each.tag: each.age for each in await self.seen(*calls)}
        assert max(ages.values()) <= self.age_limit, (self.age_limit, ages)

    @property
    def age_limit(self) -> float:
        """How old a request may be at its first byte that waited for nothing: its own work and one load."""
        return self.load_limit + self.pace.work + SLACK

    async def seen(self, *calls: Call) -> list[Seen]:
        """What these calls were here, once all of them are over."""
        async with asyncio.timeout(10):
            while True:
                journal = await self.journal()
                if all(call.tag in journal for call in calls):
                    return [journal[call.tag] for call in calls]
                await asyncio.sleep(0.02)

    async def until_inside(self, count: int) -> None:
        """Returns once so many requests wait or run inside."""
        async with asyncio.timeout(10):
            while (await self.inside()).total() != count:  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.01)


class SimulatedLlamaSwap(BackEnd):
    """The simulator."""

    def __init__(self) -> None:
        config = {"models": dict.fromkeys(MODELS), "routing": ROUTING}
        self._simulator = Simulator(yaml.safe_dump(config), time_scale=1.0)

    @property
    def load_limit(self) -> float:
        return self.pace.load + self.pace.stop

    async def __aenter__(self) -> Self:
        await self._simulator.__aenter__()
        self.url = self._simulator.url
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._simulator.__aexit__(kind, error, trace)

    async def script(self, model: str, pace: Pace, *, hold: bool) -> None:
        values = asdict(pace)
        values["chunk_interval"] = values.pop("interval")
        await self._simulator.script(model, **values, hold=hold)

    async def inside(self) -> Counter[str]:
        state = await self._simulator.state()
        return Counter(state["queue"]) + Counter(state["running"]) + Counter(state["swaps"])

    async def loads(self) -> Counter[str]:
        return Counter((await self._simulator.totals())["loads_by_model"])

    async def forget(self) -> None:
        await self._simulator.reset()

    async def journal(self) -> dict[str, Seen]:
        seen = (
            Seen(each["headers"]["user-agent"], each["status"], each["arrived"], each["first_byte"], each["finished"])
            for each in await self._simulator.requests()
            if each["finished"] is not None
        )
        return {each.tag: each for each in seen}

    async def check_that_nothing_waited(self, calls: Iterable[Call]) -> None:
        await super().check_that_nothing_waited(calls)
        totals = await self._simulator.totals()
        assert (totals["queued_inside"], totals["stopped_busy"]) == (0, 0), totals


class RealLlamaSwap(BackEnd):
    """The real one, named by LLAMA_SWAP_BIN. Where that is unset the test is skipped.

    It asks a server for its health 0.25 s after its start and then every second, so a load of up to 1.25 s takes that
    long, and on a busy machine a second more.
    """

    scale = 3.0
    load_limit = 2.5
    _FINISHED = re.compile(r'Request \S+ "POST \S+ \S+" (\d+) \d+ "([\w-]+)" (\S+)$')

    def __init__(self) -> None:
        binary = os.environ.get("LLAMA_SWAP_BIN")
        if not binary:
            pytest.skip("LLAMA_SWAP_BIN names no llama-swap")
        self._binary = binary
        self._finished: dict[str, tuple[int, float, float]] = {}
        self._forgotten = 0
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory()
        self._path = Path(self._directory.name)
        port, *ports = _free_ports(1 + len(MODELS))
        self.url = f"http://127.0.0.1:{port}"
        self._client = client_of(self.url)
        config = {"models": dict(zip(MODELS, map(self._model, MODELS, ports), strict=True)), "routing": ROUTING}
        (self._path / "llama-swap.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self._process = await asyncio.create_subprocess_exec(
            self._binary, "-config", str(self._path / "llama-swap.yaml"), "-listen", f"127.0.0.1:{port}",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read_log())
        try:
            await _answers(self._client, lambda: self._process.returncode is None)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()
        await self._reading
        self._directory.cleanup()

    def _model(self, model: str, port: int) -> dict[str, Any]:
        server = Path(__file__).with_name("model_server.py")
        command = [sys.executable, "-I", "-S", str(server), model, str(port), str(self._path)]
        return {"cmd": shlex.join(command), "proxy": f"http://127.0.0.1:{port}"}

    async def _read_log(self) -> None:
        """Its log has a line for each request when it is over: status, User-Agent and how long it was here."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if found := self._FINISHED.search(line.decode().rstrip()):
                status, tag, duration = found.groups()
                self._finished[tag] = (int(status), _seconds(duration), time.time())

    async def script(self, model: str, pace: Pace, *, hold: bool) -> None:
        new = self._path / f"{model}.new"
        new.write_text(json.dumps({**asdict(pace), "hold": hold}), encoding="utf-8")
        new.replace(self._path / f"{model}.json")

    async def inside(self) -> Counter[str]:
        async with asyncio.timeout(10), self._client.stream("GET", "/api/events") as events:
            async for line in events.aiter_lines():
                message = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {"type": ""}
                if message["type"] == "inflight" and (data := json.loads(message["data"]))["operation"] == "snapshot":
                    return Counter(each["model"] for each in data.get("requests", ()))
        raise AssertionError("the events ended before they told what is under way")

    async def loads(self) -> Counter[str]:
        return Counter(line["model"] for line in self._lines()[self._forgotten :] if line["event"] == "started")

    async def forget(self) -> None:
        self._forgotten = len(self._lines())
        self._finished.clear()

    async def journal(self) -> dict[str, Seen]:
        times: dict[str, dict[str, float]] = {}
        for line in self._lines():
            times.setdefault(line["tag"], {})[line["event"]] = line["at"]
        # A model server notes an end when it comes; where none was reached the log, through its pipe, must do.
        seen: dict[str, Seen] = {}
        for tag, (status, inside, logged) in self._finished.items():
            at = times.get(tag, {"finished": logged})
            if (finished := at.get("finished")) is not None:
                seen[tag] = Seen(tag, status, finished - inside, at.get("first byte"), finished)
        return seen

    def _lines(self) -> list[dict[str, Any]]:
        path = self._path / "journal"
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


async def _answers(client: httpx.AsyncClient, alive: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_LIMIT):
        while True:
            assert alive(), "llama-swap did not start"
            with contextlib.suppress(httpx.TransportError):
                await client.get("/health")
                return
            await asyncio.sleep(0.02)


def _free_ports(count: int) -> list[int]:
    """Ports outside the range of which the system takes those of outgoing connections, for servers to come and go."""
    ports = random.sample(range(10_000, 32_000), 50 * count)
    return list(itertools.islice(filter(_is_free, ports), count))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _seconds(text: str) -> float:
    """A duration as Go writes it, such as 1m2.5s, 1.5s, 12.3ms or 800µs."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([a-zµ]+)", text))


BACK_ENDS = [
    pytest.param(SimulatedLlamaSwap, id="simulator"),
    pytest.param(RealLlamaSwap, id="llama-swap", marks=[pytest.mark.llama_swap, pytest.mark.timeout(300)]),
]


# -- both together


@dataclass(frozen=True, slots=True)
class Scene:
    """A back end, its clients, and the proxy between them, if there is one, with the leases it lost before."""

    back_end: BackEnd
    clients: Clients
    proxy: Proxy | None
    orphans: float

    async def until_there(self, count: int) -> None:
        """Returns once so many requests wait or run, at the proxy where there is one."""
        if self.proxy is None:
            await self.back_end.until_inside(count)
        else:
            await self.proxy.until_all(count)

    async def drained(self) -> None:
        """The invariant after every test: nothing is held, waits or runs anywhere, and both classes work."""
        if self.proxy is not None:
            await self.proxy.drained()
            assert await self.proxy.metric("gpu_lease_orphans_total") == self.orphans, "a lease was left behind"
        await self.back_end.until_inside(0)
        await self.back_end.follow(QUICK)
        async with asyncio.timeout(2 + 2 * (self.back_end.load_limit + self.back_end.pace.turn)):
            assert [(await self.clients.call(model)).status for model in ("tts", "q27")] == [200, 200]


class Stage:
    """A back end, and a proxy of either policy before it, started when a scene first needs it.

    Scenes follow one another: each begins with the models it names loaded, nothing under way and an empty journal, and
    ends drained. Behind a proxy nothing may have waited inside llama-swap.
    """

    def __init__(self, kind: type[BackEnd]) -> None:
        self._back_end = kind()
        self._proxies: dict[str, Proxy] = {}
        self._stack = contextlib.AsyncExitStack()
        self.switch_after = 0.6 * kind.scale
        self.max_turn = 1.8 * kind.scale

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._back_end)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @contextlib.asynccontextmanager
    async def bare(self, *loaded: str, pace: Pace = Pace()) -> AsyncIterator[Scene]:
        """Clients that talk to llama-swap itself."""
        async with self._scene(None, loaded, pace) as scene:
            yield scene

    @contextlib.asynccontextmanager
    async def proxied(self, *loaded: str, policy: str = "batch", pace: Pace = Pace()) -> AsyncIterator[Scene]:
        """Clients that talk to a proxy before it."""
        if policy not in self._proxies:
            settings: dict[str, Any] = {"policy": policy, "classes": {"embed": {"models": ["e"]}}}
            settings |= {"switch_after": self.switch_after, "max_turn": self.max_turn}
            settings["keepalive_after"] = 60  # a head that is sent early does not tell the wait
            proxy = Proxy(self._back_end.url, **settings)
            self._proxies[policy] = await self._stack.enter_async_context(proxy)
        async with self._scene(self._proxies[policy], loaded, pace) as scene:
            yield scene

    @contextlib.asynccontextmanager
    async def _scene(self, proxy: Proxy | None, loaded: Iterable[str], pace: Pace) -> AsyncIterator[Scene]:
        back_end = self._back_end
        await back_end.follow(pace)
        await back_end.until_inside(0)
        orphans = await proxy.metric("gpu_lease_orphans_total") if proxy else 0
        scene = Scene(back_end, Clients(proxy.url if proxy else back_end.url, half=pace.chunks // 2), proxy, orphans)
        try:
            for model in loaded:
                assert (await scene.clients.call(model)).status == 200
            await back_end.seen(*scene.clients.calls)
            await back_end.until_inside(0)
            await back_end.forget()
            scene.clients.calls.clear()
            yield scene
            if proxy is not None:
                await back_end.check_that_nothing_waited(
                    call for call in scene.clients.calls if call.status is not None
                )
            await scene.drained()
        finally:
            await scene.clients.close()


async def gathered(calls: Iterable[Call]) -> list[Call]:
    """These calls once all of them have ended."""
    return [await call.done() for call in calls]


def table(title: str, rows: Iterable[Sequence[object]]) -> None:
    """Prints rows under a title, for whoever reads the output of a test."""
    print(f"\n{title}")
    for row in rows:
        print("  " + " | ".join(map(str, row)))
