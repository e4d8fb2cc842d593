"""What the tests of jobs share: asking for one, looking at it, and a data directory between two runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from harness import TTS, InProcess, Proxy, Script, Seen, answer

SPEECH = "/v1/audio/speech"
ASYNC = {"Prefer": "respond-async"}
FINAL = {"succeeded", "failed", "cancelled"}


async def submit(proxy: Proxy | InProcess, body: object = TTS, path: str = SPEECH, **fields: str) -> str:
    """The address of a new job."""
    response = await proxy.client.post(path, json=body, headers=ASYNC | fields)
    assert response.status_code == 202, response.text
    return response.headers["location"]


def speech(text: str) -> dict[str, str]:
    """A speech request that says `text`."""
    return {**TTS, "input": text}


async def job_at(proxy: Proxy | InProcess, location: str, **fields: str) -> dict[str, Any]:
    """The job as it is shown now."""
    response = await proxy.client.get(location, headers=fields)
    response.raise_for_status()
    shown: dict[str, Any] = response.json()
    return shown


async def until(
    proxy: Proxy | InProcess, location: str, *states: str, within: float = 10.0, **fields: str
) -> dict[str, Any]:
    """The job once it is in one of `states`."""
    async with asyncio.timeout(within):
        while True:
            job = await job_at(proxy, location, **fields)
            if job["status"] in states:
                return job
            await asyncio.sleep(0.01)


async def finished(proxy: Proxy | InProcess, location: str, within: float = 10.0, **fields: str) -> dict[str, Any]:
    """The job once it has finished."""
    return await until(proxy, location, *FINAL, within=within, **fields)


async def result(proxy: Proxy | InProcess, location: str, **fields: str) -> httpx.Response:
    """What its result is answered with."""
    return await proxy.client.get(f"{location}/result", headers=fields)


def echo(prefix: bytes = b"audio of ") -> Script:
    """Answers with the text that was to be said."""

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(prefix + seen.json["input"].encode())(seen, reader, writer)

    return script


def said(seen: list[Seen]) -> list[str]:
    """The texts of the speech requests that arrived upstream, in order."""
    return [one.json["input"] for one in seen if b'"input"' in one.body]


def files(data_dir: Path) -> set[str]:
    """The bodies on disk, by the ends of their names, and how many of each."""
    names = [path.suffix for path in (data_dir / "jobs").iterdir()]
    return {f"{names.count(suffix)} {suffix}" for suffix in (".request", ".result") if suffix in names}


async def until_files(data_dir: Path, wanted: set[str], within: float = 10.0) -> None:
    """Return once these are the bodies on disk: removing them is behind the answers."""
    async with asyncio.timeout(within):
        while True:
            if files(data_dir) == wanted:
                return
            await asyncio.sleep(0.02)


async def until_gone(proxy: Proxy | InProcess, location: str, within: float = 10.0) -> None:
    """Return once there is no such job any more."""
    async with asyncio.timeout(within):
        while True:
            if (await proxy.client.get(location)).status_code == 404:
                return
            await asyncio.sleep(0.05)


def modes(folder: Path) -> set[str]:
    """The modes of a folder and of all in it."""
    return {f"{'d' if path.is_dir() else '-'}{path.stat().st_mode & 0o777:o}" for path in (folder, *folder.iterdir())}


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream; comments are left out."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found
