"""A llama.cpp server with a small model, and our proxy in front of it, as processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROOT = Path(__file__).parents[2]
START_LIMIT = 60.0  # seconds; the model loads in a few
STOP_LIMIT = 10.0


class CannotBuildError(Exception):
    """This machine cannot build llama-server; the text is the reason."""


class Artifacts(NamedTuple):
    server: str
    model: str


def build() -> Artifacts:
    """The program and the model, from the cache or built now, which takes minutes."""
    done = subprocess.run([ROOT / "scripts" / "llama-server"], capture_output=True, text=True, check=False)
    said = done.stderr.strip()
    if done.returncode == 3:
        raise CannotBuildError(said.rsplit("\n", 1)[-1])
    assert done.returncode == 0, f"scripts/llama-server failed with {done.returncode}:\n{said[-4000:]}"
    paths = dict(line.split("=", 1) for line in done.stdout.splitlines())
    return Artifacts(paths["SERVER"], paths["MODEL"])


@contextmanager
def llama_server(artifacts: Artifacts) -> Iterator[str]:
    """The URL of a llama-server.

    It serves one request at a time, so that a text never depends on another request, and on one thread: two of them
    wait for each other at every step, which on a busy machine takes ten times as long. The model was never taught to
    chat: it goes on with what it is given, so the template gives it the message and nothing else.
    """
    port = _free_port()
    command = [
        artifacts.server, "--model", artifacts.model, "--host", "127.0.0.1", "--port", str(port),
        "--ctx-size", "8192", "--parallel", "1", "--threads", "1", "--slots", "--no-warmup",
        "--chat-template", "{{ messages[0].content }}",
    ]  # fmt: skip
    with _running(command, {}, f"http://127.0.0.1:{port}", "/health") as url:
        yield url


@contextmanager
def proxy_before(upstream: str) -> Iterator[str]:
    """The URL of our proxy in front of `upstream`, with every other setting at its default."""
    port = _free_port()
    env = {"GPU_LEASE_UPSTREAM_URL": upstream, "GPU_LEASE_LISTEN_PORT": str(port)}
    with _running([sys.executable, "-m", "proxy", "serve"], env, f"http://127.0.0.1:{port}", "/-/healthz") as url:
        yield url


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` becomes true within so many seconds."""
    end = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return true


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def _running(command: list[str], env: Mapping[str, str], url: str, health: str) -> Iterator[str]:
    """Runs a server until the block ends; enters the block when its health page answers 200."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GPU_LEASE_")}
    with subprocess.Popen(command, env=inherited | dict(env)) as process:
        try:
            assert eventually(lambda: process.poll() is not None or _answers(url + health), START_LIMIT)
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            yield url
        finally:
            _stop(process)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
