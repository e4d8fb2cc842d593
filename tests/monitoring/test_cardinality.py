"""Case 77: whatever names clients invent, the metrics have the same series; and a long queue costs a scrape little."""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse

from harness import TTS, Proxy, RawClient, Upstream, after, clients

NAMES = 10_000
CONNECTIONS = 8
WAITERS = 500
SCRAPE_LIMIT = 0.1
"""Seconds; it takes about 5 ms on a quiet machine. The quickest of ten counts, for the machine may be busy."""

LOADS = "gpu_lease_load_seconds"

ODD = 'a\nb"}\\'
CONFIG: dict[str, Any] = {"models": {"chat-a": {}, ODD: {}}}

ONE_OF_EACH = ["chat-a", ODD, "", "nobody", "tts-x", "embed-x", "whisper-x", "sd-x"]
"""So that each class has answered with each status before."""

Series = frozenset[tuple[str, frozenset[tuple[str, str]]]]


async def series(proxy: Proxy) -> Series:
    """Every series, by its name and labels."""
    text = (await proxy.client.get("/-/metrics")).text
    return frozenset((each.name, frozenset(each.labels.items())) for family in parse(text) for each in family.samples)


def labels(found: Series, name: str) -> set[str]:
    """The values of a label in all series."""
    return {value for _, pairs in found for key, value in pairs if key == name}


def only(name: str, found: Series) -> Series:
    """The series of that name."""
    return frozenset(each for each in found if each[0] == name)


def without(name: str, found: Series) -> Series:
    """The series of all other names."""
    return found - only(name, found)


def invented(seed: int) -> list[str]:
    """Names that nobody has configured, of all sorts."""
    dice = random.Random(seed)
    letters = string.ascii_letters + string.digits + '-_/.: "\\{}\nä語'
    return [ODD + "x", "", *("".join(dice.choices(letters, k=dice.randrange(1, 40))) for _ in range(NAMES - 2))]


async def ask_for(port: int, names: Iterable[str]) -> set[int]:
    """A chat for each of these names, over a few connections; the statuses of the answers."""
    left, statuses = iter(names), set()

    async def ask(client: RawClient) -> None:
        for name in left:
            client.post("/v1/chat/completions", {"model": name, "messages": []})
            statuses.add((await client.answer(within=30)).status)

    async with clients(port, CONNECTIONS) as several, asyncio.TaskGroup() as group:
        for client in several:
            group.create_task(ask(client))
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True], ids=["nothing known", "configuration known"])
async def test_case_77_ten_thousand_names_make_no_series(tmp_path: Path, *, known: bool) -> None:
    path = tmp_path / "llama-swap.yaml"
    path.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    settings: dict[str, Any] = {"llama_swap_config": str(path)} if known else {}
    async with Upstream() as upstream, Proxy(upstream.url, **settings) as proxy:
        first = await ask_for(proxy.port, ONE_OF_EACH)
        before = without(LOADS, await series(proxy))
        assert await ask_for(proxy.port, invented(seed=77)) <= first
        after_all = without(LOADS, await series(proxy))
        assert after_all == before
        assert labels(after_all, "model") == ({"chat-a", ODD} if known else {"other"})
        print(f"{len(after_all)} series")
        await proxy.drained(upstream if not known else None)


async def test_case_77_a_load_that_nobody_reports_is_no_invented_names_either() -> None:
    async with Upstream() as upstream, Proxy(upstream.url) as proxy:
        await ask_for(proxy.port, ["chat-invented", "tts-invented", "chat-invented"])
        assert labels(only(LOADS, await series(proxy)), "model") <= {"other"}


async def test_case_77_a_configured_name_is_escaped_in_the_exposition(tmp_path: Path) -> None:
    path = tmp_path / "llama-swap.yaml"
    path.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    async with Upstream() as upstream, Proxy(upstream.url, llama_swap_config=str(path)) as proxy:
        assert await ask_for(proxy.port, [ODD]) == {200}
        text = (await proxy.client.get("/-/metrics")).text
        assert r'model="a\nb\"}\\"' in text
        assert ODD in labels(await series(proxy), "model")


@pytest.mark.slow
async def test_case_77_a_scrape_is_quick_while_five_hundred_wait() -> None:
    end = asyncio.Event()
    bounds: dict[str, Any] = {"max_queue": WAITERS, "max_queue_per_client": WAITERS}
    async with Upstream(after(end)) as upstream, Proxy(upstream.url, **bounds) as proxy:
        idle = await scrapes(proxy)
        async with RawClient(proxy.port) as holder, clients(proxy.port, WAITERS) as crowd:
            holder.tts()
            await proxy.until(holders=1)
            for number, client in enumerate(crowd):
                client.post("/v1/audio/speech", {**TTS, "model": f"voice-{number}"})
            await proxy.until(waiters=WAITERS, within=30)
            full = await scrapes(proxy)
            assert await proxy.metric('gpu_lease_waiting{class="tts"}') == WAITERS
            print(json.dumps({"idle": idle, "full": full, "unit": "ms"}))
            assert min(full) < SCRAPE_LIMIT * 1000
            for client in crowd:
                client.close()
            await proxy.until(waiters=0, holders=1, within=30)
            end.set()
            assert (await holder.answer()).status == 200
        await proxy.drained(upstream)


async def scrapes(proxy: Proxy) -> list[float]:
    """Milliseconds that each of ten scrapes took, the median last."""
    taken = []
    for _ in range(10):
        begun = time.perf_counter()
        (await proxy.client.get("/-/metrics")).raise_for_status()
        taken.append(round((time.perf_counter() - begun) * 1000, 1))
    return [*taken, median(taken)]
