"""The read-aloud example of docs/jobs.md, run as it is told there, against the simulated llama-swap."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from harness import CHAT, Proxy, RawClient
from simulator_support import Simulator

SCRIPT = Path(__file__).resolve().parents[2] / "docs/examples/read_aloud.py"
PAGE = SCRIPT.parents[1] / "jobs.md"
TEXT = "It rained. The cat slept. Nobody minded."


async def read_aloud(proxy: Proxy, folder: Path) -> str:
    """Runs the script in `folder`; returns what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), proxy.url, "tts-a", TEXT), cwd=folder, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_three_sentences_are_read_aloud_after_the_chat_that_has_the_gpu(tmp_path: Path) -> None:
    async with Simulator(time_scale=0.02) as simulator, Proxy(simulator.url) as proxy, RawClient(proxy.port) as client:
        client.post("/v1/chat/completions", CHAT)
        await client.until(b"data: ")
        reading = asyncio.create_task(read_aloud(proxy, tmp_path))
        try:
            printed = await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        names = [f"sentence-{number}.wav" for number in (1, 2, 3)]
        assert printed.split() == names
        for name in names:
            audio = (tmp_path / name).read_bytes()
            assert (audio[:4], audio[8:12]) == (b"RIFF", b"WAVE")
        assert sorted(os.listdir(tmp_path)) == names
        with contextlib.suppress(TimeoutError):
            await client.rest(0.1)
        swaps = await proxy.metric("gpu_lease_swaps_total")
        assert swaps <= 1, "one turn of speech for all three"
        await proxy.until(waiters=0, holders=0)


def test_the_page_shows_the_call_that_was_tested() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f'python docs/examples/read_aloud.py http://localhost:9393 tts-a "{TEXT}"' in page
    assert "sentence-1.wav\nsentence-2.wav\nsentence-3.wav" in page


def test_the_page_tells_what_jobs_really_answer() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for word in ("job_unfinished", "job_cancelled", "interrupted", "jobs_full", "upstream_error", "queue_timeout"):
        assert f"`{word}`" in page
