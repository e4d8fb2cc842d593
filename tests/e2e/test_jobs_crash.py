"""A kill -9 at any moment: no job is lost, and none is sent twice.

Each round asks for twenty jobs, kills the proxy at a random moment (while they are still being asked for, while they
run, or when nearly all is over), starts it again on the same folder, and in every other round kills that one too. Then
every job that a client knows of has its exact bytes, or has been interrupted. The upstream's own record is the judge:
it counts how often each was sent to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs_support import ASYNC, FINAL, SPEECH, finished, result, until_files

from harness import CHAT, TTS, Proxy, Seen, Upstream, chunk, head

JOBS = 20
SLOTS = 10
"""Chats that can run at once: so many can be interrupted by one kill, and of speech one."""

LONGEST = 1.2
"""Seconds after which the latest kill comes: about when twenty jobs are through."""


def request_of(number: int) -> tuple[str, dict[str, Any]]:
    """Two of three are speech, so that some wait and some run side by side."""
    if number % 3:
        return SPEECH, {**TTS, "input": f"job-{number}"}
    messages = [{"role": "user", "content": f"job-{number}"}]
    return "/v1/chat/completions", {**CHAT, "stream": False, "messages": messages}


def name_of(seen: Seen) -> str:
    body = seen.json
    name: str = body["input"] if "input" in body else body["messages"][0]["content"]
    return name


def bytes_of(name: str) -> bytes:
    """The answer that belongs to a job: up to 600 KB, so that some are written in pieces."""
    digest = hashlib.sha256(name.encode()).digest()
    return digest * (1 + int.from_bytes(digest[:2], "big") * 600_000 // 65536 // 32)


async def answer_in_pieces(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The answer of a job, as an engine makes it: not all at once."""
    body = bytes_of(name_of(seen))
    writer.write(head("200 OK", "Content-Type: audio/wav", "Transfer-Encoding: chunked"))
    for start in range(0, len(body), 100_000):
        writer.write(chunk(body[start : start + 100_000]))
        await writer.drain()
        await asyncio.sleep(0.004)
    writer.write(b"0\r\n\r\n")


async def kill(proxy: Proxy) -> None:
    """kill -9."""
    assert proxy.process is not None
    proxy.process.kill()
    await proxy.process.wait()


async def ask_for_all(proxy: Proxy, known: dict[str, str]) -> None:
    """Ask for all jobs; what is accepted is put into `known` by its name."""

    async def ask(number: int) -> None:
        path, body = request_of(number)
        response = await proxy.client.post(path, json=body, headers=ASYNC)
        assert response.status_code == 202, response.text
        known[f"job-{number}"] = response.headers["location"]

    for start in range(0, JOBS, 5):
        await asyncio.gather(*(ask(number) for number in range(start, start + 5)))


async def one_round(seed: int, data_dir: Path) -> Counter[str]:
    """One round; returns how many jobs ended how."""
    moments, known = random.Random(seed), dict[str, str]()
    settings: dict[str, Any] = {"data_dir": str(data_dir), "switch_after": 0}
    async with Upstream(answer_in_pieces) as upstream:
        async with Proxy(upstream.url, **settings) as proxy:
            asking = asyncio.create_task(ask_for_all(proxy, known))
            await asyncio.sleep(moments.uniform(0, LONGEST))
            await kill(proxy)
            with contextlib.suppress(Exception):
                await asking
        if seed % 2:
            async with Proxy(upstream.url, **settings) as proxy:
                await asyncio.sleep(moments.uniform(0, LONGEST / 2))
                await kill(proxy)
        async with Proxy(upstream.url, **settings) as proxy:
            outcomes = await check_all(proxy, upstream, known)
            await proxy.until(waiters=0, holders=0, within=20)
            upstream.by_model = {}
            await proxy.drained(upstream)
    return outcomes


async def check_all(proxy: Proxy, upstream: Upstream, known: dict[str, str]) -> Counter[str]:
    """Every job that was accepted is there, and is whole or interrupted."""
    outcomes: Counter[str] = Counter()
    for name, location in known.items():
        job = await finished(proxy, location, within=30)
        answered = await result(proxy, location)
        sent = [name_of(seen) for seen in upstream.seen].count(name)
        if job["status"] == "succeeded":
            assert (answered.status_code, sent) == (200, 1), name
            assert answered.content == bytes_of(name), name
        else:
            assert (job["status"], job["error"]["code"], answered.status_code) == ("failed", "interrupted", 502), name
            assert job["started_at"] is not None
        outcomes[job["status"]] += 1
    await proxy.until(waiters=0, holders=0, within=20)
    sent_of_each = Counter(map(name_of, upstream.seen))
    assert max(sent_of_each.values(), default=0) <= 1, "none is sent twice, whether its client knows of it or not"
    return outcomes


@pytest.mark.parametrize("seed", [2, 3])
async def test_a_kill_loses_no_job_and_repeats_none(seed: int, tmp_path: Path) -> None:
    outcomes = await one_round(seed, tmp_path)
    assert outcomes["failed"] <= (SLOTS + 1) * (1 + seed % 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(10))
async def test_fifty_kills_lose_no_job_and_repeat_none(part: int, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(100 + 5 * part, 105 + 5 * part):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcomes += await one_round(seed, folder)
    print(dict(outcomes))
    assert outcomes["succeeded"] > 0


async def test_a_kill_in_the_middle_of_twenty_leaves_no_file_behind(tmp_path: Path) -> None:
    """What was half written goes with the next start; results of what succeeded stay."""
    known: dict[str, str] = {}
    async with Upstream(answer_in_pieces) as upstream:
        async with Proxy(upstream.url, data_dir=str(tmp_path)) as proxy:
            await ask_for_all(proxy, known)
            await upstream.wait_for(lambda seen: len(seen) >= JOBS // 2, within=20)
            await kill(proxy)
        async with Proxy(upstream.url, data_dir=str(tmp_path)) as proxy:
            outcomes = await check_all(proxy, upstream, known)
            assert sum(outcomes.values()) == JOBS
            assert outcomes.keys() <= FINAL
            await until_files(tmp_path, {f"{outcomes['succeeded']} .result"})
