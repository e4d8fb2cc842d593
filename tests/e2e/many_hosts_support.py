"""Several GPU hosts: HAProxy before them, with the configuration that is shipped, and a llama-swap that has a peer."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from harness import Script, Seen, Upstream
from server_tools import environment, find_program, free_port
from simulator_support import client_of

ROOT = Path(__file__).resolve().parents[2]
HAPROXY = ROOT / "config/haproxy"
QUICK = {"inter 1s": "inter 100ms", "agent-inter 1s": "agent-inter 100ms"}


@dataclass(frozen=True, slots=True)
class Balancer:
    """A running HAProxy: where clients go, and the port of its runtime API."""

    url: str
    runtime: int

    async def weight(self, server: str) -> int:
        """The weight that it gives a server now, in percent of its first one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.runtime)
        try:
            writer.write(f"get weight gpus/{server}\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
        return int(answer.split()[0])


def haproxy_config(ports: Sequence[int], bind: int, agent: int, runtime: int) -> str:
    """What is shipped, with other addresses, checks that are ten times as frequent, and a runtime API."""
    text = (HAPROXY / "haproxy.cfg").read_text(encoding="utf-8")
    kept = [line for line in text.splitlines() if not line.startswith("    server ")]
    place = next(number for number, line in enumerate(kept) if "default-server agent-check" in line) + 1
    servers = [
        f'    server gpu{number} 127.0.0.1:{port} agent-send "gpu{number}\\n"' for number, port in enumerate(ports, 1)
    ]
    text = "\n".join([*kept[:place], *servers, *kept[place:], ""])
    for old, new in {"9390": str(bind), "9391": str(agent)}.items():
        text = re.sub(rf"\b{old}\b", new, text)
    text = text.replace("global\n", f"global\n    stats socket ipv4@127.0.0.1:{runtime} level admin\n")
    for old, new in QUICK.items():
        assert old in text
        text = re.sub(rf"(?<!-)\b{re.escape(old)}\b", new, text)
    return text


@contextlib.asynccontextmanager
async def haproxy(directory: Path, ports: Sequence[int], *, key: str = "") -> AsyncIterator[Balancer]:
    """HAProxy before the proxies on these ports. `key` is the one that its agent has."""
    program = find_program("haproxy")
    if program is None:
        pytest.skip("haproxy is not there (scripts/server-tools gets it on Debian)")
    bind, runtime = free_port(), free_port()
    shutil.copy(HAPROXY / "waiting.lua", directory)
    path = directory / "haproxy.cfg"
    path.write_text(haproxy_config(ports, bind, free_port(), runtime), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        program, "-db", "-f", str(path), env=environment() | {"GPU_LEASE_KEY": key}, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        balancer = Balancer(f"http://127.0.0.1:{bind}", runtime)
        async with client_of(balancer.url) as client:
            await _serves(client, process)
        yield balancer
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _serves(client: httpx.AsyncClient, process: asyncio.subprocess.Process) -> None:
    """Until it answers, and has found every host ready once."""
    async with asyncio.timeout(10):
        while True:
            assert process.returncode is None, "HAProxy did not start"
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/-/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.02)


# -- a llama-swap with a peer


class StandIn:
    """Takes llama-swap's place in front of a simulator: a peer's models go to the peer, all else to the simulator.

    The simulator knows peers but asks none. As llama-swap does, it takes the peer's name off the model.
    """

    def __init__(self, local: str, peer: str, models: Sequence[str]) -> None:
        self._upstream = Upstream(relay(local))
        for model in models:
            self._upstream.by_model[f"gpu2/{model}"] = relay(peer, f"gpu2/{model}", model)
            self._upstream.by_model[model] = relay(peer)

    async def __aenter__(self) -> str:
        await self._upstream.__aenter__()
        return self._upstream.url

    async def __aexit__(self, *error: object) -> None:
        await self._upstream.stop()


def relay(url: str, name: str = "", new_name: str = "") -> Script:
    """Passes a request on, and the answer back, until either end closes; with another model's name, if there is one."""
    to = urlsplit(url)

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = seen.body.replace(f'"{name}"'.encode(), f'"{new_name}"'.encode()) if name else seen.body
        lines = [
            line for line in seen.head.split(b"\r\n") if not line.lower().startswith((b"content-length", b"connection"))
        ]
        head = b"\r\n".join([*lines[:-2], b"Connection: close", b"Content-Length: %d" % len(body), b"", b""])
        answers, requests = await asyncio.open_connection(to.hostname, to.port)
        requests.write(head + body)
        back, away = asyncio.create_task(_pipe(answers, writer)), asyncio.create_task(_ended(reader))
        try:
            await asyncio.wait((back, away), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (back, away):
                task.cancel()
            await asyncio.gather(back, away, return_exceptions=True)
            requests.close()
        raise ConnectionResetError  # one request a connection

    return script


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def _ended(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(65536):
            pass


@contextlib.asynccontextmanager
async def real_llama_swap(binary: str, config: Path) -> AsyncIterator[str]:
    """llama-swap itself with that configuration, and where it listens."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        binary, "-config", str(config), "-listen", f"127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        async with client_of(url) as client, asyncio.timeout(20):
            while True:
                assert process.returncode is None, "llama-swap did not start"
                with contextlib.suppress(httpx.TransportError):
                    await client.get("/health")
                    break
                await asyncio.sleep(0.02)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def config_with_peer(peer: str, local: str) -> str:
    """config/examples/peers.yaml with these addresses; the simulator at `local` serves its own models."""
    config = yaml.safe_load((ROOT / "config/examples/peers.yaml").read_text(encoding="utf-8"))
    config["peers"]["gpu2"]["proxy"] = peer
    idle = f"{sys.executable} -c 'import time; time.sleep(600)'"
    for model in config["models"].values():
        model |= {"cmd": idle, "proxy": local, "checkEndpoint": "/health"}
    return yaml.safe_dump(config)
