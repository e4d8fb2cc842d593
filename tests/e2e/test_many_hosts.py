"""More than one GPU host: HAProxy before several proxies, and llama-swap's peers; docs/many-hosts.md."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from known_support import Pair, asked, clients_of, eventually, known
from many_hosts_support import ROOT, Balancer, StandIn, config_with_peer, haproxy, real_llama_swap

from harness import Proxy, RawClient, Upstream, answer
from proxy.check import report
from proxy.settings import read
from simulator_support import Simulator, ask

HOST = """
models:
  chat-a: {simulator: {load: 0.2, work: 0.1, chunks: 2, chunk_interval: 0.1}}
  tts-a: {simulator: {load: 0.2, work: 0.1, chunks: 2, chunk_interval: 0.1}}
matrix:
  sets: {all: chat-a | tts-a}
"""


# --- HAProxy before two hosts

needs_haproxy = pytest.mark.slow
AUTHORIZED = {"Authorization": "Bearer sk-home"}
"""Means nothing where the proxies have no keys."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Two hosts and a client of the HAProxy before them."""

    first: Pair
    second: Pair
    balancer: Balancer
    client: httpx.AsyncClient
    calls: list[asyncio.Task[httpx.Response]] = field(default_factory=list)
    """All that were sent; what is left of them at the end is given up."""

    @property
    def both(self) -> tuple[Pair, Pair]:
        """Both hosts."""
        return self.first, self.second

    def speak(self) -> asyncio.Task[httpx.Response]:
        """Send speech, which is alone on its host's GPU."""
        path, body = ask("speech", "tts-a")
        self.calls.append(asyncio.create_task(self.client.post(path, json=body)))
        return self.calls[-1]

    async def fill(self, count: int) -> list[asyncio.Task[httpx.Response]]:
        """Send so many, each once the one before it has arrived somewhere."""
        calls: list[asyncio.Task[httpx.Response]] = []
        before = sum(map(len, [await each(pair) for pair in self.both for each in (waiting, holding)]))
        for number in range(1, count + 1):
            calls.append(self.speak())
            await eventually(lambda wanted=before + number: self._arrived(wanted))  # type: ignore[misc]
        return calls

    async def _arrived(self, count: int) -> bool:
        return sum([len(await each(pair)) for pair in self.both for each in (waiting, holding)]) == count


async def waiting(pair: Pair) -> list[object]:
    """Who waits there."""
    found: list[object] = (await pair.proxy.queue())["waiters"]
    return found


async def holding(pair: Pair) -> list[object]:
    """Who has the GPU there."""
    found: list[object] = (await pair.proxy.queue())["holders"]
    return found


@contextlib.asynccontextmanager
async def two_hosts(directory: Path, key: str = "", **settings: Any) -> AsyncIterator[Hosts]:
    """Both, started and seen by HAProxy, whose agent has that key; `settings` are the proxies'."""
    async with known(HOST, **settings) as first, known(HOST, **settings) as second:
        ports = [pair.proxy.port for pair in (first, second)]
        async with haproxy(directory, ports, key=key) as balancer, clients_of(balancer.url) as client:
            for each in (client, first.proxy.client, second.proxy.client):
                each.headers.update(AUTHORIZED)
            await asyncio.gather(*(seen_ready(client, name) for name in ("gpu1", "gpu2")))
            hosts = Hosts(first, second, balancer, client)
            try:
                yield hosts
            finally:
                for call in hosts.calls:
                    call.cancel()
                await asyncio.gather(*hosts.calls, return_exceptions=True)


async def seen_ready(client: httpx.AsyncClient, name: str) -> None:
    """Until HAProxy sends something to that host."""

    async def served() -> bool:
        response = await client.get("/-/healthz")
        return bool(response.headers.get("x-served-by") == name)

    await eventually(served)


async def hold(*pairs: Pair) -> None:
    """Speech stays without its end from now on."""
    await asyncio.gather(*(pair.simulator.script("tts-a", hold=True) for pair in pairs))


async def let_go(*pairs: Pair) -> None:
    """What was held ends."""
    await asyncio.gather(*(pair.simulator.script("tts-a", hold=False) for pair in pairs))


@needs_haproxy
async def test_requests_go_to_the_host_where_fewest_wait_or_run(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as hosts:
        await hold(*hosts.both)
        calls = await hosts.fill(8)
        for pair in hosts.both:
            assert (len(await holding(pair)), len(await waiting(pair))) == (1, 3)
        await let_go(hosts.first)
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        await hosts.first.proxy.until(waiters=0, holders=0)
        # The first host has nothing to do now, so everything new goes there.
        more = [await hosts.speak() for _ in range(3)]
        assert {each.headers["x-served-by"] for each in more} == {"gpu1"}
        await let_go(hosts.second)
        served = await asyncio.gather(*calls)
        assert [each.status_code for each in served] == [200] * 8
        for pair in hosts.both:
            await pair.untroubled()


@needs_haproxy
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
async def test_one_host_goes_down_and_nothing_queued_on_the_other_is_lost(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with two_hosts(tmp_path) as hosts:
        await hold(*hosts.both)
        calls = await hosts.fill(8)
        queued = await waiting(hosts.second)
        hosts.first.proxy.signal(number)

        async def moved() -> bool:
            """Whether HAProxy no longer sends anything to the first host."""
            with contextlib.suppress(httpx.RemoteProtocolError):
                answers = [await hosts.client.get("/-/healthz") for _ in range(4)]
                return {each.headers.get("x-served-by") for each in answers} == {"gpu2"}
            return False

        await eventually(moved)
        # Waits go on, so what is asked of the queue again are the same requests.
        assert [names(each) for each in await waiting(hosts.second)] == [names(each) for each in queued]
        more = [hosts.speak() for _ in range(3)]
        await hosts.second.proxy.until(waiters=6, holders=1)
        await let_go(*hosts.both)
        ended = await asyncio.gather(*calls, *more, return_exceptions=True)
        served = [each for each in ended if isinstance(each, httpx.Response)]
        assert [each.status_code for each in served if each.headers.get("x-served-by") == "gpu2"] == [200] * 7
        others = [(each.status_code, code_of(each)) for each in served if each.headers.get("x-served-by") != "gpu2"]
        if number == signal.SIGTERM:
            # The one that ran comes to its end; those that waited are told at once that they may ask again.
            assert sorted(others) == [(200, ""), *[(503, "draining")] * 3]
            assert await hosts.first.proxy.exit_code() == 0
        else:
            # What ran is cut, and cannot be taken for a whole answer; the others know that they got none.
            assert others == [(502, "")] * 3
            assert [type(each) for each in ended if each not in served] == [httpx.RemoteProtocolError]
        await hosts.second.untroubled()


def names(waiter: object) -> object:
    assert isinstance(waiter, dict)
    return waiter["id"]


def code_of(response: httpx.Response) -> str:
    if response.headers.get("content-type") != "application/json":
        return ""
    code: str = response.json().get("error", {}).get("code", "")
    return code


@needs_haproxy
async def test_a_client_that_leaves_haproxy_leaves_the_queue(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as hosts:
        await hold(*hosts.both)
        held = await hosts.fill(2)
        for pair in hosts.both:
            assert (len(await holding(pair)), len(await waiting(pair))) == (1, 0)
        async with RawClient(int(hosts.client.base_url.port or 0)) as leaver:
            leaver.tts()
            await eventually(lambda: hosts._arrived(3))
            leaver.close()
            await eventually(lambda: hosts._arrived(2))
        await let_go(*hosts.both)
        assert [each.status_code for each in await asyncio.gather(*held)] == [200, 200]
        for pair in hosts.both:
            await pair.untroubled()


@needs_haproxy
@pytest.mark.parametrize(("key", "told"), [("sk-home", True), ("sk-wrong", False)], ids=["agent", "agent refused"])
async def test_what_came_to_a_host_by_another_way_is_told_by_the_agent(tmp_path: Path, key: str, *, told: bool) -> None:
    """Five requests have come to the first host past HAProxy, which by itself goes on sending it every second one."""
    async with two_hosts(tmp_path, key, api_keys="sk-home") as hosts, clients_of(hosts.first.url) as past:
        past.headers.update(AUTHORIZED)
        await hold(*hosts.both)
        direct = [asyncio.create_task(asked(past, "speech", "tts-a")) for _ in range(5)]
        await hosts.first.proxy.until(waiters=4, holders=1)
        if told:
            await eventually(lambda: has_weight(hosts, "gpu1", 100 // 6))
        else:
            await asyncio.sleep(0.5)  # the agent is asked every tenth of a second, in vain
            assert await hosts.balancer.weight("gpu1") == 100
        calls = await hosts.fill(6)
        of_second = len(await waiting(hosts.second)) + len(await holding(hosts.second))
        # It has nothing of HAProxy's at first, and so gets one.
        assert of_second == (5 if told else 3)
        await let_go(*hosts.both)
        assert [each.status_code for each in await asyncio.gather(*calls)] == [200] * 6
        assert [each.status for each in await asyncio.gather(*direct)] == [200] * 5


async def has_weight(hosts: Hosts, server: str, weight: int) -> bool:
    """Whether HAProxy gives it that weight."""
    return await hosts.balancer.weight(server) == weight


@needs_haproxy
async def test_a_job_is_asked_for_where_it_was_taken(tmp_path: Path) -> None:
    taken = answer(b"{}", "202 Accepted", "Location: /-/jobs/0123456789abcdef")
    async with (
        Upstream(taken) as upstream,
        Proxy(upstream.url) as one,
        Proxy(upstream.url) as other,
        haproxy(tmp_path, [one.port, other.port]) as balancer,
        clients_of(balancer.url) as client,
    ):
        await asyncio.gather(*(seen_ready(client, name) for name in ("gpu1", "gpu2")))
        path, body = ask("speech", "tts-a")
        host = (await client.post(path, json=body)).headers["x-served-by"]
        asked_for = [await client.get("/-/jobs/0123456789abcdef/result") for _ in range(6)]
        assert {each.headers["x-served-by"] for each in asked_for} == {host}


# --- peers of llama-swap

LARGE = """
models:
  large: {simulator: {load: 0.2, work: 0.1, chunks: 2, chunk_interval: 0.1}}
  whisper: {simulator: {load: 0.2, work: 0.1}}
  tts-a: {simulator: {load: 0.2, work: 0.1, chunks: 2, chunk_interval: 0.1}}
matrix:
  sets: {all: large | whisper | tts-a}
"""
SMALL = """
models:
  small: {simulator: {load: 0.2, work: 0.1, chunks: 2, chunk_interval: 0.1}}
  kokoro: {simulator: {load: 0.2, work: 0.1, chunks: 2, chunk_interval: 0.1}}
"""


@dataclass(frozen=True, slots=True)
class Peers:
    """Host A, whose llama-swap has host B as a peer."""

    local: Simulator
    proxy: Proxy
    peer: Pair


@contextlib.asynccontextmanager
async def peers(directory: Path, binary: str | None) -> AsyncIterator[Peers]:
    """proxy A → llama-swap A → proxy B → llama-swap B. Without a real llama-swap, A's is a stand-in."""
    async with known(LARGE) as peer, Simulator(SMALL, time_scale=0.05) as local:
        config = directory / "a.yaml"
        config.write_text(config_with_peer(peer.url, local.url), encoding="utf-8")
        stand_in = StandIn(local.url, peer.url, ("large", "whisper"))
        async with (
            real_llama_swap(binary, config) if binary else stand_in as url,
            Proxy(url, llama_swap_config=str(config)) as proxy,
        ):
            yield Peers(local, proxy, peer)


def llama_swap() -> str:
    """The real one, named by LLAMA_SWAP_BIN. Where that is unset the test is skipped."""
    return os.environ.get("LLAMA_SWAP_BIN") or pytest.skip("LLAMA_SWAP_BIN names no llama-swap")


BACK_ENDS = [
    pytest.param(lambda: None, id="stand-in"),
    pytest.param(llama_swap, id="llama-swap", marks=pytest.mark.llama_swap),
]
each_back_end = pytest.mark.parametrize("binary", BACK_ENDS)


def test_the_example_takes_no_lease_for_a_peers_models() -> None:
    environment = {"GPU_LEASE_LLAMA_SWAP_CONFIG": str(ROOT / "config/examples/peers.yaml")}
    text = report(*read(None, environment), ("gpu2/large", "whisper"), {})
    assert re.search(r"^  kokoro +tts +write +10 ", text, re.MULTILINE)
    assert re.search(r"^  gpu2 +peer +no lease, no slots: large, whisper$", text, re.MULTILINE)


@each_back_end
async def test_a_peers_model_waits_for_the_gpu_of_its_own_host_alone(
    tmp_path: Path, binary: Callable[[], str | None]
) -> None:
    async with peers(tmp_path, binary()) as here, clients_of(here.proxy.url) as client:
        await here.local.script("kokoro", hold=True)
        speech = asyncio.create_task(asked(client, "speech", "kokoro"))
        await here.proxy.until(holders=1)
        small = asyncio.create_task(asked(client, "chat", "small"))
        await here.proxy.until(waiters=1, holders=1)
        # The GPU here is taken and somebody waits for it. Both names of a peer's model are served all the same.
        for number, name in enumerate(("gpu2/large", "large"), 1):
            path, body = ask("chat", name)
            assert (await client.post(path, json=body)).status_code == 200
            assert await granted(here.peer.proxy) == number
        assert await granted(here.proxy, "tts") == 1
        assert [each["model"] for each in (await here.proxy.queue())["waiters"]] == ["small"]
        await here.local.script("kokoro", hold=False)
        assert [(await each).status for each in (speech, small)] == [200, 200]
        await here.peer.untroubled()
        await here.proxy.until(waiters=0, holders=0)


@each_back_end
async def test_who_leaves_the_first_host_leaves_the_peers_queue(
    tmp_path: Path, binary: Callable[[], str | None]
) -> None:
    async with peers(tmp_path, binary()) as here, clients_of(here.peer.url) as there:
        await here.peer.simulator.script("tts-a", hold=True)
        speech = asyncio.create_task(asked(there, "speech", "tts-a"))
        await here.peer.proxy.until(holders=1)
        async with RawClient(here.proxy.port) as leaver:
            leaver.post("/v1/chat/completions", {"model": "gpu2/large", "messages": []})
            await here.peer.proxy.until(waiters=1, holders=1)
            assert (await here.proxy.queue())["waiters"] == []
            leaver.close()
            await here.peer.proxy.until(waiters=0, holders=1)
        await here.peer.simulator.script("tts-a", hold=False)
        assert (await speech).status == 200
        await here.peer.untroubled()
        await here.proxy.until(waiters=0, holders=0)


async def granted(proxy: Proxy, class_name: str = "llm") -> float:
    """How many requests of a class have been granted there."""
    return await proxy.metric(f'gpu_lease_wait_seconds_count{{class="{class_name}",outcome="granted"}}')
