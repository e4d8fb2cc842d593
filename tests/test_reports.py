"""What llama-swap's reports come to: for the lock, for the load times, for the names; and all of it wired together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import InProcess
from lease_support import what
from proxy.classify import Classification
from proxy.knowledge import Knowledge
from proxy.loads import Load, LoadTimes
from proxy.reports import Reports
from proxy.rwlock import Claim, FairRWLock, Policy
from proxy.settings import Settings
from simulator_support import SCALE, Simulator, ask, client_of, send

CONFIG = """
models:
  a: {simulator: {load: 4, stop: 0.5, work: 0.5, chunks: 2, chunk_interval: 0.5}}
  b: {simulator: {load: 4, stop: 0.5, work: 0.5, chunks: 2, chunk_interval: 0.5}}
  e: {simulator: {load: 2, work: 0.1}}
profiles:
  night: {pins: {name: b}}
matrix: {sets: {all: (a | b) & e}}
"""
LISTING = {"data": [{"id": name, "meta": {"llamaswap": {"type": "model"}}} for name in ("a", "kokoro", "bge-m3")]}


class Known:
    """A lock and reports, with the configuration or the listing."""

    def __init__(self, config: Path | None) -> None:
        settings: dict[str, Any] = {} if config is None else {"llama_swap_config": config}
        self.knowledge = Knowledge(Settings.model_validate(settings), {})
        self.units = LoadTimes()
        self.told: list[tuple[str, float]] = []
        classifier = self.knowledge.classifier
        self.lock = FairRWLock(classifier.router, classifier.slots, Policy())
        self.reports = Reports(
            self.lock, self.knowledge, self.units, lambda model, seconds: self.told.append((model, seconds))
        )

    def lease(self, *names: str) -> Any:
        return self.lock.request(Claim("read", frozenset(names), frozenset(names)))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "llama-swap.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def test_what_is_ready_is_resident_and_what_moves_is_not(config: Path) -> None:
    known = Known(config)
    known.reports.running({"a": "ready", "b": "stopping", "e": "ready"}, time.monotonic())
    assert known.lock.resident == {"a", "e"}
    known.reports.running({}, time.monotonic())
    assert known.lock.resident == frozenset()


def test_a_report_older_than_the_last_grant_does_not_count(config: Path) -> None:
    known = Known(config)
    asked = time.monotonic()
    lease = known.lease("a")
    lease.answered()
    known.reports.running({"b": "ready"}, asked)
    assert known.lock.resident == {"a"}
    known.reports.running({"b": "ready"}, time.monotonic())
    assert known.lock.resident == {"a", "b"}, "what is in use stays"


def test_with_the_listing_alone_classes_are_resident_and_what_takes_no_lease_is_left_out() -> None:
    known = Known(None)
    known.reports.listing(LISTING)
    known.reports.running({"a": "ready", "bge-m3": "ready"}, time.monotonic())
    assert known.lock.resident == {"llm"}
    known.reports.running({"kokoro": "ready", "unheard-of": "ready"}, time.monotonic())
    assert known.lock.resident == {"tts", "llm"}


def test_a_load_ends_the_loading_of_leases_that_were_granted_before_it_began(config: Path) -> None:
    known = Known(config)
    lease, waiting = known.lease("a"), known.lease("e")
    assert lease.held
    assert waiting.waiting, "one load at a time"
    known.reports.loaded(Load("a", 0, lease.granted - 1, lease.granted + 1))
    assert waiting.waiting, "that was an earlier load"
    known.reports.loaded(Load("a", lease.granted, lease.granted, lease.granted + 2))
    assert waiting.held


def test_a_measured_load_is_told_by_model_and_counted_by_unit(config: Path) -> None:
    known = Known(config)
    known.reports.loaded(Load("a", 1, 2, 4.5))
    assert known.told == [("a", 3.5)]
    assert (known.reports.models.all(), known.units.all()) == ({"a": 3.5}, {"a": 3.5})
    by_class = Known(None)
    by_class.reports.listing(LISTING)
    by_class.reports.loaded(Load("kokoro", 1, 2, 4))
    by_class.reports.loaded(Load("bge-m3", 1, 2, 9))
    assert (by_class.reports.models.all(), by_class.units.all()) == ({"kokoro": 3, "bge-m3": 8}, {"tts": 3})


def answered(model: str, label: str | None = None) -> Classification:
    return replace(what("llm", model), label=label or model)


def test_a_first_answer_shows_no_name_that_a_client_invented() -> None:
    known = Known(None)
    known.reports.first_answer(answered("invented", "other"), 7)
    assert known.told == [("other", 7)]
    assert (known.reports.models.all(), known.units.all()) == ({"other": 7}, {"llm": 7})


def test_a_first_answer_counts_as_the_load_only_where_none_was_reported_meanwhile(config: Path) -> None:
    known = Known(config)
    known.reports.first_answer(answered("a"), 7)
    assert known.units.get("a") == 7
    known.reports.loaded(Load("a", 1, 2, 4))
    known.reports.first_answer(answered("a"), 60)  # the load and then a long prompt
    assert known.units.get("a") == 3
    known.reports.first_answer(answered("b"), 0)  # nothing was reported within its time
    assert known.units.get("b") == 0


def test_doubt_is_the_locks(config: Path) -> None:
    known = Known(config)
    lease = known.lease("a")
    assert not known.reports.in_doubt()
    lease.release()
    assert known.reports.in_doubt()
    known.reports.running({}, time.monotonic())
    assert not known.reports.in_doubt()


def test_the_profile_goes_to_what_is_known_of_names(config: Path) -> None:
    known = Known(config)
    known.reports.profile("night")
    assert known.knowledge.profile == "night"
    known.reports.profile(None)
    assert known.knowledge.profile is None


# -- wired


@pytest.fixture
async def pair(config: Path) -> AsyncIterator[tuple[Simulator, InProcess]]:
    async with (
        Simulator(config, time_scale=SCALE) as simulator,
        InProcess(simulator.url, llama_swap_config=config) as proxy,
    ):
        await proxy.until(lambda: proxy.metric("gpu_lease_upstream_up") == 1)
        yield simulator, proxy


class Through:
    """A client of the proxy."""

    def __init__(self, proxy: InProcess) -> None:
        self.url = f"http://127.0.0.1:{proxy.port}"
        self.client = client_of(self.url)


@pytest.fixture
async def through(pair: tuple[Simulator, InProcess]) -> AsyncIterator[Through]:
    through = Through(pair[1])
    yield through
    await through.client.aclose()


async def test_loads_show_in_the_queues_page_in_the_metrics_and_in_the_windows(
    pair: tuple[Simulator, InProcess], through: Through
) -> None:
    _, proxy = pair
    assert (await send(through, "chat", "a")).status_code == 200
    assert (await send(through, "chat", "b")).status_code == 200
    seconds = (await through.client.get("/-/queue")).json()["load_seconds"]
    assert set(seconds) == {"a", "b"}
    for model in "ab":
        assert proxy.metric("gpu_lease_load_seconds", model=model) == seconds[model]
    assert 4.5 * SCALE * 0.9 <= seconds["b"] < 4.5 * SCALE + 1
    assert proxy.app.leases.policy.window(frozenset("a"), frozenset("b"))[0] == 1.0
    await proxy.idle()


async def test_what_goes_on_behind_its_back_is_known_soon(pair: tuple[Simulator, InProcess], through: Through) -> None:
    simulator, proxy = pair
    lock = proxy.app.leases.lock
    await send(simulator, "chat", "a")
    await proxy.until(lambda: lock.resident == {"a"})
    await send(through, "chat", "a")
    assert lock.turn is not None
    assert lock.turn.loaded == lock.turn.begun, "its models were all resident"
    await simulator.client.get("/unload")
    await proxy.until(lambda: lock.resident == frozenset())
    assert lock.turn.loaded is None, "until its next first byte"
    await send(through, "chat", "a")
    assert lock.turn.loaded is not None
    await proxy.idle()


async def test_a_client_that_leaves_a_load_leaves_a_doubt_that_ends_with_the_load(
    pair: tuple[Simulator, InProcess], through: Through
) -> None:
    simulator, proxy = pair
    lock = proxy.app.leases.lock
    leaving = send(through, "chat", "a")
    await simulator.until(lambda state: state["models"]["a"] == "starting")
    leaving.cancel()
    await proxy.until(lambda: not lock.held)
    assert lock.uncertain
    await proxy.until(lambda: not lock.uncertain)
    assert lock.resident == {"a"}
    assert (await simulator.state())["models"]["a"] == "ready"
    await proxy.idle()


async def test_a_failed_load_leaves_a_doubt_that_one_look_ends(
    pair: tuple[Simulator, InProcess], through: Through
) -> None:
    simulator, proxy = pair
    await simulator.script("a", fail_load=1)
    assert (await send(through, "chat", "a")).status_code == 500
    await proxy.until(lambda: not proxy.app.leases.lock.uncertain)
    assert proxy.app.leases.lock.resident == frozenset()
    assert (await send(through, "chat", "a")).status_code == 200
    await proxy.idle()


async def test_a_change_of_profile_counts_when_its_answer_is_there(
    pair: tuple[Simulator, InProcess], through: Through
) -> None:
    _, proxy = pair
    active = "/api/profiles/active"
    path, body = ask("chat", "name")
    assert (await through.client.post(path, json=body)).status_code == 404
    assert (await through.client.put(active, json={"name": "nobody"})).status_code == 404
    assert proxy.app._knowledge.profile is None
    for target in (active, "/api/%70rofiles/active"):
        assert (await through.client.put(target, json={"name": "night"})).status_code == 200
        assert proxy.app._knowledge.profile == "night"
        assert (await through.client.post(path, json=body)).headers["x-lease-class"] == "llm"
        assert (await through.client.put(active, content=b'{"name":null}')).status_code == 200
        assert proxy.app._knowledge.profile is None
    for rubbish in (b"", b"[]", b"{", b'{"name":5}', b"\xff"):
        assert (await through.client.put(active, content=rubbish)).status_code == 400
        assert proxy.app._knowledge.profile is None
    await proxy.idle()


async def test_after_llama_swaps_reload_the_lock_believes_nothing_until_it_has_asked(
    pair: tuple[Simulator, InProcess], through: Through
) -> None:
    simulator, proxy = pair
    await send(through, "chat", "a")
    await simulator.reload(CONFIG + "\n# changed\n")
    await proxy.until(lambda: proxy.app.leases.lock.resident == frozenset())
    assert (await send(through, "chat", "a")).status_code == 200
    totals = await simulator.totals()
    assert (totals["queued_inside"], totals["stopped_busy"]) == (0, 0)
    async with asyncio.timeout(5):
        await proxy.idle()
