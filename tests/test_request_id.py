"""Each request has a name: the client's own or a new one, in its log lines, upstream, in its answer, as exemplar."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from jobs_support import finished
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

from harness import CHAT, TTS, InProcess, Proxy, RawClient, Seen, Upstream, after, answer, clients
from proxy.inbound import Inbound
from proxy.request_id import named, read_request_id

MADE = re.compile(r"[0-9a-f]{24}")
OPEN_METRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as upstream:
        yield upstream


def sent_on(seen: Seen) -> list[bytes]:
    """The names under which llama-swap knows it."""
    return [value for name, value in seen.headers if name == b"x-request-id"]


# --- reading


@pytest.mark.parametrize("given", ["a", "Root=1-67891233-abcdef", "b3a1c9f0-1111-4222-8333-444455556666", "x" * 100])
def test_a_plain_name_is_kept(given: str) -> None:
    fields = [(b"x-request-id", b" " + given.encode() + b"\t")]
    assert read_request_id(fields) == given


@pytest.mark.parametrize("given", [b"", b"a b", b"x" * 101, b"a\xff", b'a"b', b"a\x1b[2J", b"a,b", b"{}"])
def test_any_other_name_is_replaced(given: bytes) -> None:
    name = read_request_id([(b"x-request-id", given)])
    assert MADE.fullmatch(name)
    inbound = Inbound("GET", b"/", b"", [(b"host", b"a"), (b"x-request-id", given)], "", "http")
    assert named(inbound, name).headers == [(b"host", b"a"), (b"x-request-id", name.encode())]


def test_names_differ() -> None:
    assert len({read_request_id([]) for _ in range(1000)}) == 1000


def test_a_name_that_is_right_stays_where_it_is() -> None:
    inbound = Inbound("GET", b"/", b"", [(b"x-request-id", b"a"), (b"host", b"a")], "", "http")
    assert named(inbound, "a") is inbound


# --- on the wire


async def test_it_goes_upstream_and_back(upstream: Upstream) -> None:
    async with InProcess(upstream.url) as proxy:
        for given in ("mine-1", None):
            fields = {"x-request-id": given} if given else {}
            response = await proxy.client.post("/v1/chat/completions", json=CHAT, headers=fields)
            name = response.headers["x-request-id"]
            assert given in {None, name}
            assert sent_on(upstream.seen[-1]) == [name.encode()]
        passed = await proxy.client.get("/v1/models", headers={"x-request-id": "mine-2"})
        assert "x-request-id" not in passed.headers
        assert sent_on(upstream.seen[-1]) == [b"mine-2"]


async def test_a_name_that_upstream_gave_its_answer_stays_alone(upstream: Upstream) -> None:
    upstream.script = answer(b"{}", "200 OK", "X-Request-Id: its-own")
    async with InProcess(upstream.url) as proxy:
        response = await proxy.client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine"})
        assert response.headers.get_list("x-request-id") == ["its-own"]


async def test_a_refusal_has_it_too(upstream: Upstream) -> None:
    async with InProcess(upstream.url, api_keys=["secret"]) as proxy:
        refused = await proxy.client.get("/v1/models", headers={"x-request-id": "mine"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")
        fields = {"x-request-id": "mine", "x-api-key": "secret"}
        refused = await proxy.client.post("/v1/chat/completions", content=b"{}", headers=fields)
        assert (refused.status_code, refused.headers.get_list("x-request-id")) == (400, ["mine"])


# --- in the log


async def test_every_line_of_a_request_has_its_name_and_no_other_line_has(upstream: Upstream) -> None:
    """Two requests on one connection, so that nothing is left of the first; a third beside them."""
    end = asyncio.Event()
    async with Proxy(upstream.url, slow_wait_log=0) as proxy, clients(proxy.port, 3) as (holder, twice, other):
        upstream.script = after(end)
        holder.tts("X-Request-Id: holder")
        await proxy.until(holders=1)
        twice.chat("X-Request-Id: first")
        other.chat("X-Request-Id: other")
        await proxy.until(waiters=2)
        end.set()
        for client in (holder, twice, other):
            await client.answer()
        end.clear()
        holder.tts("X-Request-Id: holder-2")
        await proxy.until(holders=1)
        twice.chat("X-Request-Id: second")
        await proxy.until(waiters=1)
        end.set()
        await twice.answer()
        await holder.answer()
        slow = [entry["request_id"] for entry in proxy.log if entry["event"] == "slow_wait"]
        assert sorted(slow[:2]) == ["first", "other"]
        assert slow[2:] == ["second"]
        others = [entry for entry in proxy.log if entry["event"] != "slow_wait"]
        assert not [entry for entry in others if "request_id" in entry]


async def test_lines_of_the_watchdog_have_it_too(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    end = asyncio.Event()
    upstream.script = after(end)
    async with Proxy(upstream.url, max_hold="10ms") as proxy, RawClient(proxy.port) as client:
        client.tts("X-Request-Id: hog")
        assert (await proxy.logged("overlong_hold"))["request_id"] == "hog"
        end.set()
        await client.answer()


async def test_a_job_keeps_its_name_also_over_a_restart(upstream: Upstream, tmp_path: Path) -> None:
    end = asyncio.Event()
    upstream.script = after(end)
    settings: dict[str, Any] = {"data_dir": str(tmp_path), "slow_wait_log": 0, "shutdown_grace": 0}
    async with Proxy(upstream.url, **settings) as proxy, RawClient(proxy.port) as holder:
        holder.tts()
        await proxy.until(holders=1)
        fields = {"prefer": "respond-async", "x-request-id": "my-job"}
        location = (await proxy.client.post("/v1/audio/speech", json=TTS, headers=fields)).headers["location"]
        await proxy.until(waiters=1)
        proxy.signal()
        assert await proxy.exit_code() == 0
    end.set()
    async with Proxy(upstream.url, **settings) as proxy:
        await finished(proxy, location)
        assert sent_on(upstream.seen[-1]) == [b"my-job"]
        result = await proxy.client.get(f"{location}/result")
        assert result.headers["x-request-id"] == "my-job"
        exemplars = await exemplars_of(proxy)
        assert exemplars == {"my-job"}


# --- exemplars


async def exemplars_of(proxy: Proxy | InProcess) -> set[str]:
    """The names at the buckets of the waits."""
    text = (await proxy.client.get("/-/metrics", headers=OPEN_METRICS)).text
    families = {family.name: family for family in parse(text)}  # type: ignore[no-untyped-call]
    samples = families["gpu_lease_wait_seconds"].samples
    return {sample.exemplar.labels["request_id"] for sample in samples if sample.exemplar}


async def test_the_wait_has_the_name_as_exemplar_in_open_metrics_only(upstream: Upstream) -> None:
    async with InProcess(upstream.url) as proxy:
        longest = "x" * 100
        for name in ("first", longest):
            await proxy.client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": name})
            assert await exemplars_of(proxy) == {name}
        plain = (await proxy.client.get("/-/metrics")).text
        assert longest not in plain
        rich = (await proxy.client.get("/-/metrics", headers=OPEN_METRICS)).text
        buckets = [text.count("\ngpu_lease_wait_seconds_bucket{") for text in (plain, rich)]
        assert buckets[0] == buckets[1] > 0
