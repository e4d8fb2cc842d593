"""A real llama-swap, to run tests of the simulator against the thing that it simulates.

The model servers behind it are one simulator, asked by `/upstream/MODEL`, where all models are resident, so
that only llama-swap decides what waits. Where the environment names no binary the test is skipped.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import pytest
import yaml

from simulator_support import Simulator, client_of

if TYPE_CHECKING:
    from types import TracebackType

START_LIMIT = 20.0
SETTLED = 0.15  # seconds in which a request surely reaches llama-swap's queue, which cannot be looked into


class LlamaSwap:
    """To be used like a Simulator, as far as a test can do so without looking into llama-swap.

    A load takes the 0.25 s after which llama-swap asks for a server's health. Without `slow_loads` it does
    not ask, and loads take no time, but then they cannot be counted either.
    """

    def __init__(self, config: str, *, time_scale: float = 0.1, slow_loads: bool = True) -> None:
        binary = os.environ.get("LLAMA_SWAP_BIN")
        if not binary:
            pytest.skip("LLAMA_SWAP_BIN names no llama-swap")
        self.url = ""
        self.client: httpx.AsyncClient
        self._binary = binary
        self._slow_loads = slow_loads
        self._raw = yaml.safe_load(config)
        self._directory = tempfile.TemporaryDirectory()
        models = {
            model: {"concurrencyLimit": 1000, "simulator": {**(values or {}).get("simulator", {}), "load": 0}}
            for model, values in self._raw["models"].items()
        }
        everything = {"all": {"swap": False, "members": list(models)}}
        self._servers = Simulator(yaml.safe_dump({"models": models, "groups": everything}), time_scale=time_scale)
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        await self._servers.__aenter__()
        path = self._write_config()
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._process = await asyncio.create_subprocess_exec(
            self._binary, "-config", str(path), "-listen", address,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self.url = f"http://{address}"
        self.client = client_of(self.url)
        await self._answers()
        return self

    def _write_config(self) -> Path:
        for model, values in self._raw["models"].items():
            self._raw["models"][model] = {
                **(values or {}),
                "cmd": "sleep 100000",
                "proxy": f"{self._servers.url}/upstream/{model}",
                "checkEndpoint": "/health" if self._slow_loads else "none",
            }
        path = Path(self._directory.name, "llama-swap.yaml")
        path.write_text(yaml.safe_dump(self._raw, sort_keys=False), encoding="utf-8")
        return path

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.aclose()
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()
        await self._servers.__aexit__(kind, error, trace)
        self._directory.cleanup()

    async def _answers(self) -> None:
        async with asyncio.timeout(START_LIMIT):
            while True:
                try:
                    await self.client.get("/health")
                except httpx.TransportError:
                    assert self._process.returncode is None, "llama-swap did not start"
                    await asyncio.sleep(0.02)
                else:
                    return

    async def script(self, model: str, **values: Any) -> None:
        await self._servers.script(model, **values)

    async def release(self, name: str) -> None:
        await self._servers.release(name)

    async def wait_running(self, model: str, count: int = 1) -> None:
        await self._servers.wait_running(model, count)

    async def wait_queued(self, *_models: str) -> None:
        await asyncio.sleep(SETTLED)

    async def reset(self) -> None:
        await self._servers.reset()

    async def log(self) -> dict[str, Any]:
        """As seen by the model servers: what never reached one is not in it, and a health check is a load."""
        log = await self._servers.log()
        checks = [each for each in log["requests"] if each["path"].endswith("/health")]
        loads = dict.fromkeys(self._raw["models"], 0)
        for each in checks:
            loads[each["model"]] += 1
        requests = [each for each in log["requests"] if each not in checks]
        by_model = {model: count for model, count in loads.items() if count}
        return {"requests": requests, "totals": {"loads": len(checks), "loads_by_model": by_model}}


BARE = [
    pytest.param(Simulator, id="simulator"),
    pytest.param(LlamaSwap, id="llama-swap", marks=pytest.mark.llama_swap),
]
