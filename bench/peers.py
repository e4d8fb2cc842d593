"""The proxies that are compared, and how each is started: one process, or one worker, as its documentation says.

What is not ours is brought by `scripts/bench`: nginx and haproxy from Debian, the rest from PyPI into environments of
their own. Where one is missing, the table says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from bench.processes import cores, running
from bench.workloads import KEY

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "gpu-lease-proxy", "bench")
APPS = Path(__file__).parent / "apps"
BASELINE = "nginx, unbuffered"
BUFFERED = "nginx, default"
OURS = "ours, httptools"
OURS_H11 = "ours, h11"
ASGIPROXY = "asgiproxy"

LLAMA_SWAP = """
models:
  chat: {cmd: x}
  speech: {cmd: x}
"""
"""Two models that exclude each other: every request below takes a lease."""


class MissingError(Exception):
    """The peer is not on this machine."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a proxy is to listen, and where its upstream does."""

    own: int
    upstream: int

    @property
    def url(self) -> str:
        """The upstream's."""
        return f"http://127.0.0.1:{self.upstream}"


@dataclass(frozen=True, slots=True)
class Start:
    """A command and what it finds in its environment beside ours."""

    command: list[str]
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Peer:
    """A proxy by its name; `model` is the one to name in a request where only the model reaches the upstream."""

    name: str
    start: Callable[[Ports, Path], Start]
    start_limit: float = 20.0
    only: frozenset[str] = frozenset()
    """The workloads that it is asked for; empty: all."""
    by_model: bool = False


@contextlib.contextmanager
def started(peer: Peer, ports: Ports, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The peer's process while the block runs. Raises MissingError."""
    directory.mkdir(parents=True, exist_ok=True)
    start = peer.start(ports, directory)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GPU_LEASE_")}
    with running(start.command, directory / "log", core=cores()[0], env=clean | start.env) as process:
        yield process


def _debian(name: str) -> str:
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")
    if path is None:
        raise MissingError(f"{name} is not installed")
    return path


def _environment(name: str) -> str:
    path = CACHE / name / "bin" / "python"
    if not path.exists():
        raise MissingError(f"{path} is not installed")
    return str(path)


def _nginx(ports: Ports, directory: Path, extra: str) -> Start:
    user = "user root;" if os.geteuid() == 0 else ""  # else its worker may not write where bodies are buffered
    config = f"""
        {user} pid {directory}/pid; error_log {directory}/errors; worker_processes 1; daemon off;
        events {{ worker_connections 8192; }}
        http {{
            access_log off; client_max_body_size 0; keepalive_requests 1000000000;
            client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/f;
            uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;
            upstream up {{ server 127.0.0.1:{ports.upstream}; keepalive 512; keepalive_requests 1000000000; }}
            server {{
                listen 127.0.0.1:{ports.own} backlog=4096;
                location / {{
                    proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; {extra}
                }}
            }}
        }}
    """
    (directory / "nginx.conf").write_text(dedent(config))
    return Start([_debian("nginx"), "-p", str(directory), "-c", str(directory / "nginx.conf")], {})


def _haproxy(ports: Ports, directory: Path) -> Start:
    config = f"""
        global
            nbthread 1
            maxconn 8192
        defaults
            mode http
            timeout connect 10s
            timeout client 120s
            timeout server 120s
            http-reuse always
            option http-no-delay
        listen front
            bind 127.0.0.1:{ports.own}
            server up 127.0.0.1:{ports.upstream}
    """
    (directory / "haproxy.cfg").write_text(dedent(config))
    return Start([_debian("haproxy"), "-db", "-f", str(directory / "haproxy.cfg")], {})


def _uvicorn(app: str) -> Callable[[Ports, Path], Start]:
    def start(ports: Ports, directory: Path) -> Start:
        command = [_environment("peers"), "-m", "uvicorn", f"{app}:app", "--app-dir", str(APPS), "--host", "127.0.0.1"]
        command += ["--port", str(ports.own), "--http", "httptools", "--loop", "uvloop"]
        command += ["--no-access-log", "--log-level", "warning", "--backlog", "4096"]
        return Start(command, {"BENCH_UPSTREAM": ports.url})

    return start


def _litellm(ports: Ports, directory: Path) -> Start:
    python = Path(_environment("litellm"))
    server = f"api_base: '{ports.url}/v1', api_key: x"
    models = "".join(
        f"  - {{model_name: {name}, litellm_params: {{model: openai/{name}, {server}}}}}\n"
        for name in ("bench-json", "bench-sse-500")
    )
    path = directory / "litellm.yaml"
    path.write_text(f"model_list:\n{models}")
    command = [str(python.with_name("litellm")), "--config", str(path), "--host", "127.0.0.1", "--port", str(ports.own)]
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": KEY}
    return Start([*command, "--num_workers", "1", "--telemetry", "False"], env)


def ours(parser: str, **settings: object) -> Callable[[Ports, Path], Start]:
    """This proxy with everything on; slots and bounds are out of the way: no queue is compared."""

    def start(ports: Ports, directory: Path) -> Start:
        config = directory / "llama-swap.yaml"
        config.write_text(LLAMA_SWAP)
        values: dict[str, object] = {"upstream_url": ports.url, "listen_port": ports.own, "http_parser": parser}
        values |= {"llama_swap_config": config}
        values |= dict.fromkeys(("slots", "max_queue", "max_queue_per_client"), 100_000)
        values |= settings
        env = {f"GPU_LEASE_{name.upper()}": str(value) for name, value in values.items()}
        return Start([sys.executable, "-m", "proxy", "serve"], env)

    return start


UNBUFFERED = "proxy_buffering off; proxy_request_buffering off;"

DIRECT = "direct"
"""No proxy at all: what the load generator and the upstream take by themselves."""

PEERS = (
    Peer(BASELINE, lambda ports, directory: _nginx(ports, directory, UNBUFFERED)),
    Peer(BUFFERED, lambda ports, directory: _nginx(ports, directory, "")),
    Peer("haproxy", _haproxy),
    Peer(ASGIPROXY, _uvicorn("asgiproxy_app")),
    Peer("fastapi-proxy-lib", _uvicorn("fastapi_proxy_app")),
    Peer("starlette + httpx", _uvicorn("starlette_app")),
    Peer("litellm", _litellm, 120.0, frozenset({"small-1", "small-16", "sse-1"}), by_model=True),
    Peer(OURS_H11, ours("h11")),
    Peer(OURS, ours("httptools")),
)
