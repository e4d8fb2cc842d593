"""What Prometheus sees: every series from the start, gauges that cannot drift, each ending counted as what it was."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse
from prometheus_client.samples import Sample

from harness import (
    CHAT,
    EMBED,
    TTS,
    InProcess,
    RawClient,
    Script,
    Upstream,
    after,
    answer,
    begun,
    clients,
    hang,
    raw,
    slow,
)
from proxy import __version__
from proxy.classify import Classification, Classifier
from proxy.errors import Refusal
from proxy.gateway import CLIENT_LEFT
from proxy.lease import Hold, Leases
from proxy.metrics import EXCHANGE_OUTCOMES, WAIT_BUCKETS, Metrics
from proxy.pages import queue_json
from proxy.router import ClassRouter, Mode
from proxy.routes import match_route
from proxy.rwlock import Policy
from proxy.settings import Settings
from proxy.tickets import Bounds, WaitOutcome

CLASSES = ("llm", "tts", "embed", "mine")
OUTCOMES = get_args(WaitOutcome)
MODES: dict[str, Mode] = {"llm": "read", "tts": "write", "embed": "none"}


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Desk:
    """The metrics of a lock with a clock of its own."""

    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.metrics = Metrics(CLASSES, wall=lambda: self.clock.now + 1_000_000, clock=self.clock)
        bounds = Bounds(7, 7, lambda _: 60.0)
        self.leases = Leases(ClassRouter(), lambda _: 10, Policy(), bounds, (self.metrics,), clock=self.clock)
        self.metrics.watch(self.leases)
        self.tasks: list[asyncio.Task[None]] = []

    def value(self, series: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(series, labels)
        assert found is not None, f"no {series} {labels}"
        return found

    def text(self, accept: str = "") -> str:
        encode, _ = choose_encoder(accept)
        return encode(self.metrics.registry).decode()

    async def start(self, class_name: str) -> Hold:
        what = Classification(
            requested="m",
            model="m",
            class_name=class_name,
            mode=MODES[class_name],
            units=frozenset({class_name}),
            models=frozenset({"m"}),
            label="other",
            evidence="the test",
        )
        hold = self.leases.hold(what, "somebody")

        async def run() -> None:
            async with hold:
                await asyncio.Event().wait()

        self.tasks.append(asyncio.create_task(run()))
        for _ in range(5):
            await asyncio.sleep(0)
        return hold


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    for task in desk.tasks:
        task.cancel()
    await asyncio.gather(*desk.tasks, return_exceptions=True)


# -- all series, from the start


def codes_of(error: type[Refusal]) -> set[str]:
    """The codes of an error and of all below it."""
    return {error.code}.union(*(codes_of(child) for child in error.__subclasses__()))


SERIES: dict[str, tuple[str, list[dict[str, str]]]] = {
    "gpu_lease_wait_seconds": ("histogram", [{"class": c, "outcome": o} for c, o in product(CLASSES, OUTCOMES)]),
    "gpu_lease_hold_seconds": ("histogram", [{"class": c} for c in CLASSES]),
    "gpu_lease_upstream_first_byte_seconds": ("histogram", [{"class": c} for c in CLASSES]),
    "gpu_lease_waiting": ("gauge", [{"class": c} for c in CLASSES]),
    "gpu_lease_held": ("gauge", [{"class": c} for c in CLASSES]),
    "gpu_lease_queue_limit": ("gauge", [{}]),
    "gpu_lease_oldest_wait_start_timestamp_seconds": ("gauge", [{}]),
    "gpu_lease_oldest_hold_start_timestamp_seconds": ("gauge", [{}]),
    "gpu_lease_turns": ("counter", [{"class": c} for c in CLASSES]),
    "gpu_lease_turn_seconds": ("counter", [{"class": c} for c in CLASSES]),
    "gpu_lease_swaps": ("counter", [{}]),
    "gpu_lease_requests": ("counter", []),
    "gpu_lease_rejected": ("counter", [{"reason": code} for code in sorted(codes_of(Refusal))]),
    "gpu_lease_incomplete_streams": ("counter", [{"class": c} for c in CLASSES]),
    "gpu_lease_load_seconds": ("gauge", []),
    "gpu_lease_upstream_up": ("gauge", [{}]),
    "gpu_lease_build": ("info", [{"version": __version__}]),
    "gpu_lease_exchanges": ("counter", [{"class": c, "outcome": o} for c, o in product(CLASSES, EXCHANGE_OUTCOMES)]),
    "gpu_lease_orphans": ("counter", [{}]),
    "gpu_lease_overlong_holds": ("counter", [{"class": c} for c in CLASSES]),
}
"""Families by name: their type, and the label sets that must exist before anything has happened."""

SUFFIX = {"counter": "_total", "histogram": "_count", "gauge": "", "info": "_info"}


def parse_open(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


def own(families: Iterable[Metric]) -> dict[str, Metric]:
    return {family.name: family for family in families if family.name.startswith("gpu_lease_")}


@pytest.mark.parametrize("name", SERIES)
async def test_a_series_exists_with_its_type_its_help_and_all_its_label_sets_before_anything_happens(
    desk: Desk, name: str
) -> None:
    kind, label_sets = SERIES[name]
    family = own(parse_open(desk.text("application/openmetrics-text")))[name]
    assert family.type == kind
    assert family.documentation[0].isupper()
    assert family.documentation.endswith(".")
    samples = [sample for sample in family.samples if sample.name == name + SUFFIX[kind]]
    assert sorted(map(sorted_labels, samples)) == sorted(tuple(sorted(labels.items())) for labels in label_sets)
    if kind in {"counter", "histogram"}:
        assert {sample.value for sample in samples} <= {0.0}


def sorted_labels(sample: Sample) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(sample.labels.items()))


async def test_there_is_no_series_beside_these_and_those_of_the_process(desk: Desk) -> None:
    families = parse_open(desk.text("application/openmetrics-text"))
    assert set(own(families)) == set(SERIES)
    others = {family.name for family in families} - set(SERIES)
    assert {name.split("_")[0] for name in others} == {"process", "python"}
    assert {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds"} <= others


async def test_the_plain_format_has_no_series_more(desk: Desk) -> None:
    await desk.start("llm")
    names = {name + (SUFFIX[kind] if kind != "histogram" else "") for name, (kind, _) in SERIES.items()}
    assert set(re.findall(r"^# TYPE (gpu_lease_\w+)", desk.text(), re.MULTILINE)) == names


async def test_both_formats_say_the_same(desk: Desk) -> None:
    await desk.start("tts")
    await desk.start("llm")

    def values(families: Iterable[Metric]) -> dict[tuple[str, Any], float]:
        samples = [sample for family in own(families).values() for sample in family.samples]
        return {(each.name, sorted_labels(each)): each.value for each in samples if not math.isnan(each.value)}

    open_metrics = values(parse_open(desk.text("application/openmetrics-text; version=1.0.0")))
    assert values(parse(desk.text())) == open_metrics


async def test_the_buckets_hold_the_timeouts_of_common_clients() -> None:
    assert {30, 60, 120, 600} <= set(WAIT_BUCKETS)
    assert list(WAIT_BUCKETS) == sorted(WAIT_BUCKETS)


# -- gauges


async def test_gauges_agree_with_the_queue_at_every_moment(desk: Desk) -> None:
    def agree() -> None:
        queue = queue_json(desk.leases)
        for series, entries in (("gpu_lease_waiting", queue["waiters"]), ("gpu_lease_held", queue["holders"])):
            for class_name in CLASSES:
                count = sum(entry["class"] == class_name for entry in entries)
                assert desk.value(series, **{"class": class_name}) == count

    agree()
    holds = []
    for class_name in ("llm", "llm", "tts", "embed", "tts", "llm"):
        holds.append(await desk.start(class_name))
        agree()
    for hold in holds:
        hold.release()
        agree()
    assert desk.value("gpu_lease_held", **{"class": "tts"}) == 1, "granted by the releases"
    desk.tasks[2].cancel()
    await asyncio.sleep(0)
    agree()


async def test_the_oldest_wait_and_hold_are_times_of_the_wall_clock_or_nan(desk: Desk) -> None:
    wait, hold = (f"gpu_lease_oldest_{what}_start_timestamp_seconds" for what in ("wait", "hold"))
    assert math.isnan(desk.value(wait))
    assert math.isnan(desk.value(hold))
    holder = await desk.start("llm")
    desk.clock.now += 5
    await desk.start("tts")
    desk.clock.now += 2
    await desk.start("tts")
    assert desk.value(hold) == 1_001_000
    assert desk.value(wait) == 1_001_005
    holder.release()
    desk.clock.now += 100
    assert desk.value(hold) == 1_001_007, "granted now, and not when it arrived"
    assert desk.value(wait) == 1_001_007


async def test_the_queue_limit_is_the_setting(desk: Desk) -> None:
    assert desk.value("gpu_lease_queue_limit") == 7


# -- counters of turns


async def test_the_time_of_turns_includes_the_one_under_way_and_never_goes_back(desk: Desk) -> None:
    def seconds() -> tuple[float, float]:
        llm, tts = (desk.value("gpu_lease_turn_seconds_total", **{"class": name}) for name in ("llm", "tts"))
        return llm, tts

    assert seconds() == (0, 0)
    chat = await desk.start("llm")
    chat.lease.answered()
    desk.clock.now += 3
    assert seconds() == (3, 0)
    speech = await desk.start("tts")
    chat.release()
    await asyncio.sleep(0)
    assert seconds() == (3, 0)
    desk.clock.now += 4
    speech.release()
    assert seconds() == (3, 4)
    desk.clock.now += 1
    assert seconds() == (3, 5), "a turn outlives its leases"
    assert [desk.value("gpu_lease_turns_total", **{"class": c}) for c in CLASSES] == [1, 1, 0, 0]
    assert desk.value("gpu_lease_swaps_total") == 1


# -- names as labels

ODD = 'a\nb"}\\'


async def test_an_odd_name_of_the_configuration_is_escaped(desk: Desk) -> None:
    desk.metrics.answered("llm", ODD, 200)
    for text, parser in ((desk.text(), parse), (desk.text("application/openmetrics-text"), parse_open)):
        (sample,) = [s for s in own(parser(text))["gpu_lease_requests"].samples if s.name == "gpu_lease_requests_total"]
        assert sample.labels == {"class": "llm", "model": ODD, "code": "200"}


async def test_names_that_clients_invent_are_one_label() -> None:
    async with Upstream() as upstream, InProcess(upstream.url, classes={"llm": {"models": ["chat-a"]}}) as proxy:
        before = len(await _series(proxy))
        for name in (ODD, "chat-b", "", " ", "x" * 1000, "chat-a"):
            await proxy.client.post("/v1/chat/completions", json={**CHAT, "model": name})
        lines = [line for line in await _series(proxy) if line.startswith("gpu_lease_requests_total")]
        assert sorted(line.rpartition(" ")[0] for line in lines) == [
            'gpu_lease_requests_total{class="llm",code="200",model="chat-a"}',
            'gpu_lease_requests_total{class="llm",code="200",model="other"}',
        ]
        assert proxy.metric("gpu_lease_requests_total", **{"class": "llm", "model": "other", "code": "200"}) == 4
        assert len(await _series(proxy)) <= before + 4


async def _series(proxy: InProcess) -> list[str]:
    text = (await proxy.client.get("/-/metrics")).text
    return [line for line in text.splitlines() if line.startswith("gpu_lease_")]


# -- endings


@contextlib.asynccontextmanager
async def scene(**settings: Any) -> AsyncIterator[tuple[Upstream, InProcess]]:
    """An upstream and the application before it."""
    async with Upstream() as upstream, InProcess(upstream.url, **settings) as proxy:
        yield upstream, proxy


def counted(proxy: InProcess, series: str, label: str) -> dict[str, float]:
    """What of a counter or histogram by class is not 0, added up by `label`."""
    found: dict[str, float] = {}
    for family in proxy.app.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == series and sample.value:
                found[sample.labels[label]] = found.get(sample.labels[label], 0) + sample.value
    return found


def exchanges(proxy: InProcess) -> dict[str, float]:
    return counted(proxy, "gpu_lease_exchanges_total", "outcome")


def waits(proxy: InProcess) -> dict[str, float]:
    return counted(proxy, "gpu_lease_wait_seconds_count", "outcome")


def codes(proxy: InProcess) -> dict[str, float]:
    return counted(proxy, "gpu_lease_requests_total", "code")


def rejected(proxy: InProcess) -> dict[str, float]:
    return counted(proxy, "gpu_lease_rejected_total", "reason")


TRUNCATED = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 40, reset=True)


@pytest.mark.parametrize(
    ("script", "outcome", "code", "reason"),
    [
        (answer(), "ok", "200", None),
        (slow(2, 0.001), "ok", "200", None),
        (answer(b"{}", "404 Not Found"), "ok", "404", None),
        (answer(b"{}", "429 Too Many Requests"), "ok", "429", None),
        (answer(b"{}", "500 Internal Server Error"), "upstream_error", "500", None),
        (answer(b"{}", "503 Service Unavailable"), "upstream_error", "503", None),
        (raw(b""), "upstream_error", "502", "upstream_failed"),
        (raw(b"HTTP/1.1 2000 x\r\n\r\n"), "upstream_error", "502", "upstream_failed"),
        (slow(2, 0.001, end=b""), "upstream_truncated", "200", None),
        (TRUNCATED, "upstream_truncated", "200", None),
    ],
    ids=["answer", "stream", "404", "429", "500", "503", "no answer", "no HTTP", "stream broken", "answer broken"],
)
async def test_an_exchange_is_counted_once_as_what_it_came_to(
    script: Script, outcome: str, code: str, reason: str | None
) -> None:
    async with scene() as (upstream, proxy):
        upstream.script = script
        async with RawClient(proxy.port) as client:
            client.chat("Connection: close")
            await client.rest()
        await proxy.idle()
        assert exchanges(proxy) == {outcome: 1}
        assert codes(proxy) == {code: 1}
        assert waits(proxy) == {"granted": 1}
        assert rejected(proxy) == ({reason: 1} if reason else {})
        assert counted(proxy, "gpu_lease_hold_seconds_count", "class") == {"llm": 1}
        heads = counted(proxy, "gpu_lease_upstream_first_byte_seconds_count", "class")
        assert heads == ({} if code == "502" else {"llm": 1})


async def test_a_client_that_left_before_an_answer_is_499_and_after_its_head_the_status_that_it_got() -> None:
    async with scene() as (upstream, proxy), clients(proxy.port, 2) as (early, late):
        upstream.script = hang()
        early.chat()
        await upstream.wait_for(lambda seen: len(seen) == 1)
        early.close()
        await proxy.idle()
        await proxy.until(lambda: codes(proxy) == {str(CLIENT_LEFT): 1})
        upstream.script = begun(asyncio.Event())
        late.chat()
        await late.until(b"data: ")
        late.close()
        await proxy.idle()
        await proxy.until(lambda: codes(proxy) == {"499": 1, "200": 1})
        assert exchanges(proxy) == {"cancelled": 2}
        assert waits(proxy) == {"granted": 2}


async def test_a_client_that_leaves_after_the_upstreams_end_had_a_good_exchange() -> None:
    """The lease ended with the upstream's body; what the client did not read is its own affair."""
    large = 3_000_000

    async def burst(seen: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % large + b"x" * large)
        await writer.drain()

    async with scene() as (upstream, proxy), RawClient(proxy.port) as client:
        upstream.script = burst
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.chat()
        await proxy.until(lambda: exchanges(proxy) != {})
        assert not proxy.app.leases.lock.held
        client.reset()
        await proxy.idle()
        assert exchanges(proxy) == {"ok": 1}


async def test_every_way_a_wait_ends_is_counted() -> None:
    async with scene(classes={"stt": {"max_wait": 0.05}}) as (upstream, proxy), clients(proxy.port, 5) as five:
        holder, granted, leaver, late, drained = five
        end = asyncio.Event()
        upstream.script = after(end)
        lock = proxy.app.leases.lock
        holder.tts()
        await proxy.until(lambda: len(lock.held) == 1)
        late.post("/v1/chat/completions", {**CHAT, "model": "whisper"})
        assert (await late.answer()).status == 503
        leaver.chat()
        await proxy.until(lambda: lock.waiting_count == 1)
        leaver.close()
        await proxy.until(lambda: lock.waiting_count == 0)
        assert waits(proxy) == {"granted": 1, "timeout": 1, "cancelled": 1}
        granted.tts()
        await proxy.until(lambda: lock.waiting_count == 1)
        upstream.script = hang()
        end.set()
        await proxy.until(lambda: lock.waiting_count == 0)
        drained.chat()
        await proxy.until(lambda: lock.waiting_count == 1)
        proxy.signal()
        assert (await drained.answer()).status == 503
        assert waits(proxy) == {"granted": 2, "timeout": 1, "cancelled": 1, "shutdown": 1}
        assert codes(proxy) == {"503": 2, "499": 1, "200": 1}
        assert rejected(proxy) == {"queue_timeout": 1, "draining": 1}
        assert counted(proxy, "gpu_lease_wait_seconds_count", "class") == {"tts": 2, "stt": 1, "llm": 2}


async def test_mode_none_is_counted_like_the_others_and_other_routes_not_at_all() -> None:
    async with scene() as (_, proxy):
        await proxy.client.post("/v1/embeddings", json=EMBED)
        await proxy.client.get("/v1/models")
        assert codes(proxy) == {"200": 1}
        assert exchanges(proxy) == {"ok": 1}
        assert counted(proxy, "gpu_lease_wait_seconds_count", "class") == {"embed": 1}
        assert counted(proxy, "gpu_lease_turns_total", "class") == {}


async def test_a_refusal_before_the_class_is_known_is_counted_by_its_reason_alone() -> None:
    async with scene() as (_, proxy):
        await proxy.client.post("/v1/chat/completions", json={"messages": []})
        await proxy.client.get("/-/nothing")
        assert rejected(proxy) == {"model_undecidable": 1, "page_not_found": 1}
        assert codes(proxy) == waits(proxy) == exchanges(proxy) == {}


async def test_a_fault_of_the_proxy_is_a_500_in_the_form_of_all_errors_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a fault")

    async with scene() as (_, proxy):
        monkeypatch.setattr("proxy.exchange._Leased.sent", fail)
        response = await proxy.client.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert (codes(proxy), rejected(proxy)) == ({"500": 1}, {"internal_error": 1})
        await proxy.idle()
        monkeypatch.undo()
        assert (await proxy.client.post("/v1/audio/speech", json=TTS)).status_code == 200


ROWS = re.findall(
    r"^\| `(gpu_lease_\w+)` \| (\w+) \|([^|]*)\|",
    (Path(__file__).resolve().parents[1] / "docs/metrics.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_the_docs_have_one_row_for_each_series() -> None:
    names = [name.removesuffix("_total").removesuffix("_info") for name, _, _ in ROWS]
    assert sorted(names) == sorted(SERIES)


@pytest.mark.parametrize(("series", "kind", "labels"), ROWS, ids=[row[0] for row in ROWS])
async def test_type_and_labels_in_the_docs_are_those_of_the_series(
    desk: Desk, series: str, kind: str, labels: str
) -> None:
    desk.metrics.answered("llm", "other", 200)
    desk.metrics.load_seconds.labels("m").set(1)
    (family,) = [each for each in parse(desk.text()) if each.name in {series, series.removesuffix("_total")}]
    assert family.type == kind
    named = set(re.findall(r"`(\w+)`", labels))
    assert {frozenset(sample.labels) - {"le"} for sample in family.samples} == {frozenset(named)}


def test_every_bound_has_a_reason_of_its_own() -> None:
    reasons = {labels["reason"] for labels in SERIES["gpu_lease_rejected"][1]}
    assert {"queue_full", "client_queue_full", "queue_timeout", "spool_full", "draining", "body_too_large"} <= reasons


# -- case 77: names that clients invent


async def test_case_77_ten_thousand_names_and_five_hundred_waiters_are_not_one_series_more(desk: Desk) -> None:
    desk.leases.bounds = Bounds(1000, 1000, lambda _: 60.0)
    classifier, random = Classifier(Settings()), Random(77)
    route = match_route("POST", b"/v1/chat/completions")
    names = ["".join(random.choices('abc"\\\n{}=, \u00e9', k=20)) for _ in range(10_000)] + ['a"\nb\\"}']
    what = classifier.classify(route, names[0], rewritten=True)
    desk.metrics.answered(what.class_name, what.label, 200)
    before = series(desk.text())
    for number, name in enumerate(names):
        what = classifier.classify(route, name, rewritten=True)
        async with desk.leases.hold(what, "somebody", request_id=f"r{number}"):
            pass
        desk.metrics.answered(what.class_name, what.label, 200)
    holder = await desk.start("tts")
    waiting = [asyncio.create_task(_wait(desk.leases, what)) for _ in range(500)]
    await asyncio.sleep(0)
    begun = time.perf_counter()
    text = desk.text("application/openmetrics-text; version=1.0.0")
    print(f"a scrape with 500 waiters takes {time.perf_counter() - begun:.3f} s")
    assert series(desk.text()) == before
    assert desk.value("gpu_lease_waiting", **{"class": "llm"}) == 500
    assert 'model="other"' in text
    assert not [line for line in text.splitlines() if "\u00e9" in line]
    holder.release()
    await asyncio.gather(*waiting)


async def _wait(leases: Leases, what: Classification) -> None:
    async with leases.hold(what, "somebody"):
        pass


def series(text: str) -> set[str]:
    """The names of all series with their labels."""
    found = {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    return {name for name in found if not name.startswith(("python_", "process_"))}


async def test_case_77_a_configured_name_is_escaped_as_the_format_has_it(desk: Desk) -> None:
    desk.metrics.answered("llm", 'a"b\\c\nd}', 200)
    text = desk.text()
    assert r'model="a\"b\\c\nd}"' in text
    assert any(sample.labels.get("model") == 'a"b\\c\nd}' for family in parse(text) for sample in family.samples)
