"""The configurations of docs/clients.md for another reverse proxy in front: each one is run as it is printed there.

What must cross it: every comment at once, a failure as a connection that is cut, and a client's departure.
"""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from wire_support import until

from harness import CHAT, Proxy, Upstream, after, begun
from server_tools import environment, find_program

pytestmark = pytest.mark.slow

CLIENTS = (Path(__file__).resolve().parents[2] / "docs/clients.md").read_text(encoding="utf-8")

CHAT_PATH = "/v1/chat/completions"

EVERY = 0.3
IDLE = 1.5
MAX_WAIT = 3.0


def snippet(language: str) -> str:
    """The one block of that language in docs/clients.md."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", CLIENTS, re.MULTILINE | re.DOTALL)
    assert isinstance(text, str)
    assert "127.0.0.1:9393" in text
    return text


def program(name: str) -> str:
    """Where it is; the test that asks is skipped where it is not."""
    return find_program(name) or pytest.skip(f"{name} is not there (scripts/server-tools)")


def nginx(directory: Path, port: int, upstream: int) -> tuple[list[str], list[str]]:
    """nginx with the block of the docs in the smallest possible frame: the commands that check and run it."""
    block = snippet("nginx").replace("127.0.0.1:9393", f"127.0.0.1:{upstream}")
    temporary = "".join(
        f"{kind}_temp_path {directory}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (directory / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {directory}/pid; error_log stderr warn; events {{}}\n"
        f"http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{port}; {block} }} }}\n"
    )
    command = [program("nginx"), "-p", str(directory), "-e", "stderr", "-c", str(directory / "nginx.conf")]
    return [*command, "-t"], command


def caddy(directory: Path, port: int, upstream: int) -> tuple[list[str], list[str]]:
    """Caddy likewise, without the certificate that the host's name would ask for."""
    block = snippet("caddyfile").replace("127.0.0.1:9393", f"127.0.0.1:{upstream}")
    block = block.replace("llm.example.org", f"http://127.0.0.1:{port}")
    file = directory / "Caddyfile"
    file.write_text(f"{{\n\tadmin off\n\tauto_https off\n}}\n{block}")
    return (
        [program("caddy"), "validate", "--config", str(file), "--adapter", "caddyfile"],
        [program("caddy"), "run", "--config", str(file), "--adapter", "caddyfile"],
    )


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@asynccontextmanager
async def running(command: list[str], port: int, home: Path) -> AsyncIterator[str]:
    """The address of a server that is started with `command`."""
    homes = {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_DATA_HOME": str(home)}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment() | homes, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(10):
            while True:
                assert process.returncode is None, command
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    break
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as upstream:
        yield upstream


@pytest.fixture
async def proxy(upstream: Upstream) -> AsyncIterator[Proxy]:
    settings: dict[str, Any] = {"keepalive_after": EVERY, "keepalive_every": EVERY, "max_wait": MAX_WAIT}
    async with Proxy(upstream.url, env=None, **settings) as proxy:
        yield proxy


@pytest.fixture(params=[nginx, caddy], ids=lambda kind: kind.__name__)
async def front(request: pytest.FixtureRequest, proxy: Proxy, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of another reverse proxy in front of the proxy; it is patient for less time than the waits take."""
    port = free_port()
    check, command = request.param(tmp_path, port, proxy.port)
    checking = await asyncio.create_subprocess_exec(*check, env=environment(), stderr=asyncio.subprocess.PIPE)
    _, said = await checking.communicate()
    assert checking.returncode == 0, said.decode()
    async with (
        running(command, port, tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=IDLE, trust_env=False) as client,
    ):
        yield client


async def lines_of(client: httpx.AsyncClient, into: list[str]) -> None:
    async with client.stream("POST", CHAT_PATH, json=CHAT) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            into += [line]


async def hold(proxy: Proxy, upstream: Upstream, end: asyncio.Event) -> asyncio.Task[httpx.Response]:
    """Speech that keeps the GPU until `end`."""
    upstream.by_model["tts-a"] = after(end)
    speech = asyncio.create_task(proxy.client.post("/v1/audio/speech", json={"model": "tts-a", "input": "x"}))
    await proxy.until(holders=1)
    return speech


async def test_comments_cross_at_once_and_the_stream_after_them_is_whole(
    front: httpx.AsyncClient, proxy: Proxy, upstream: Upstream
) -> None:
    end, last = asyncio.Event(), asyncio.Event()
    last.set()
    upstream.by_model["chat-a"] = begun(last)
    speech = await hold(proxy, upstream, end)
    lines: list[str] = []
    streaming = asyncio.create_task(lines_of(front, lines))
    await until(lambda: lines.count(": queued") > 1.5 * IDLE / EVERY or streaming.done(), within=10)
    assert not streaming.done()
    end.set()
    await streaming
    assert (await speech).status_code == 200
    assert [line[:6] for line in lines if line.startswith("data: ")] == ["data: ", "data: "]
    assert lines[-2:] == ["data: [DONE]", ""]
    await proxy.drained(upstream)


def cuts(request: pytest.FixtureRequest) -> bool:
    """Whether this server cuts an answer that was cut. Caddy before 2.8 ends it well, as docs/clients.md says."""
    if request.node.callspec.params["front"] is nginx:
        return True
    version = subprocess.run([program("caddy"), "version"], capture_output=True, text=True, check=True).stdout
    major, minor = re.findall(r"\d+", version)[:2]
    return (int(major), int(minor)) >= (2, 8)


async def test_a_late_failure_crosses_as_an_event_and_a_cut(
    front: httpx.AsyncClient, proxy: Proxy, upstream: Upstream, request: pytest.FixtureRequest
) -> None:
    end = asyncio.Event()
    speech = await hold(proxy, upstream, end)
    lines: list[str] = []
    with pytest.raises(httpx.RemoteProtocolError) if cuts(request) else nullcontext():
        await lines_of(front, lines)
    assert any('"queue_timeout"' in line for line in lines)
    end.set()
    assert (await speech).status_code == 200
    await proxy.drained(upstream)


@pytest.mark.parametrize("early", [False, True], ids=["before_the_head", "after_the_head"])
async def test_a_clients_departure_crosses_too(
    front: httpx.AsyncClient, proxy: Proxy, upstream: Upstream, *, early: bool
) -> None:
    end = asyncio.Event()
    speech = await hold(proxy, upstream, end)
    lines: list[str] = []
    streaming = asyncio.create_task(lines_of(front, lines))
    await proxy.until(waiters=1, holders=1)
    await until(lambda: bool(lines) or not early, within=MAX_WAIT / 2)
    streaming.cancel()
    await proxy.until(waiters=0, holders=1, within=MAX_WAIT / 2)
    end.set()
    assert (await speech).status_code == 200
    assert not upstream.of_model("chat-a")
    await proxy.drained(upstream)


def test_the_traefik_blocks_are_yaml() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", CLIENTS, re.MULTILINE | re.DOTALL)
    assert [set(yaml.safe_load(block)) for block in blocks] == [{"entryPoints"}, {"http"}]
