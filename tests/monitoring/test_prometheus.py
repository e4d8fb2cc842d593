"""Alerts and dashboard on a real Prometheus that scrapes a real proxy under load; promtool's own checks.

Debian's Prometheus; `scripts/server-tools` gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from known_support import Pair, known
from monitoring_support import (
    PROMETHEUS,
    Expression,
    Prometheus,
    alert_expressions,
    dashboard,
    panel_expressions,
    prometheus,
    promtool,
    with_bool,
)

from simulator_support import ask, client_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CONFIG = """
models:
  chat-a: {simulator: {load: 4, work: 1, chunks: 2, chunk_interval: 1}}
  tts-a: {simulator: {load: 4, work: 1, chunks: 2, chunk_interval: 1}}
  whisper-a: {simulator: {load: 200}}
  embed-a: {simulator: {load: 1, work: 1}}
matrix:
  sets: {all: (chat-a | tts-a | whisper-a) & embed-a}
"""
SETTINGS: dict[str, Any] = {"switch_after": 0.1, "max_turn": 0.2, "classes": {"stt": {"max_wait": 0.05}}}


# --- promtool


@pytest.mark.parametrize(
    "check",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")],
    ids=" ".join,
)
async def test_promtool_finds_no_fault(check: tuple[str, ...]) -> None:
    process = await asyncio.create_subprocess_exec(
        promtool(), *check, cwd=PROMETHEUS, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


async def test_every_alert_is_tried_by_a_rule_test() -> None:
    tests = (PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8")
    untried = [each.name for each in alert_expressions() if tests.count(f"alertname: {each.name}") < 3]
    assert untried == []  # silent while all is well, silent before its threshold, and there


async def test_comparisons_are_made_bool_outside_of_matchers_and_strings_only() -> None:
    assert with_bool('a{b=~"<1", c!="d"} >= 0 and label_replace(e, "f", ">", "", "") == bool 1') == (
        'a{b=~"<1", c!="d"} >= bool 0 and label_replace(e, "f", ">", "", "") == bool 1'
    )


# --- on a proxy, idle and under load

ALERTS, PANELS = alert_expressions(), panel_expressions(dashboard())


@dataclass(frozen=True, slots=True)
class Watched:
    """A Prometheus that scrapes a proxy under load; `idle` is what each expression gave before there was any."""

    prometheus: Prometheus
    idle: dict[str, list[dict[str, Any]]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    async with known(CONFIG, **SETTINGS) as pair:
        targets = {
            "gpu_lease_proxy": f"127.0.0.1:{pair.proxy.port}",
            "llama_swap": pair.simulator.url.partition("//")[2],
        }
        async with prometheus(tmp_path_factory.mktemp("prometheus"), **targets) as found:
            await found.until(lambda: all_found(found, *SETTLED))
            idle = {each.name: await found.query(each.text) for each in (*ALERTS, *PANELS)}
            load = asyncio.create_task(traffic(pair))
            try:
                await found.until(lambda: all_found(found, *HAPPENED))
                yield Watched(found, idle)
                assert not load.done(), "the load has ended early"
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
        await pair.proxy.until(waiters=0, holders=0)


SETTLED = ("gpu_lease_upstream_up == 1", "count_over_time(gpu_lease_upstream_up[1m]) > 2")
"""llama-swap's health is known, and there are samples enough for a rate."""

HAPPENED = (
    "increase(gpu_lease_swaps_total[1m]) > 2",
    'increase(gpu_lease_wait_seconds_count{class="stt", outcome="timeout"}[1m]) > 0',
    'sum(increase(gpu_lease_requests_total{code="200"}[1m])) > 5',
    'sum(increase(gpu_lease_rejected_total{reason="model_undecidable"}[1m])) > 0',
    "count(gpu_lease_load_seconds) > 1",
)
"""Of each kind of thing that a panel shows one has been scraped, twice where a rate is to be made of it."""


async def all_found(found: Prometheus, *conditions: str) -> bool:
    """Whether each gives a series."""
    return all([await found.query(condition) for condition in conditions])


async def traffic(pair: Pair) -> None:
    """Chat against speech, so that both wait and models are swapped; refusals, timeouts and clients that leave."""
    async with client_of(pair.url) as client, asyncio.TaskGroup() as group:

        async def forever(kind: str, model: str, patience: float = 30) -> None:
            path, body = ask(kind, model)
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience):
                        await client.post(path, json=body)
                await asyncio.sleep(0.05)

        for kind, model in (("chat", "chat-a"), ("chat", "chat-a"), ("speech", "tts-a"), ("embed", "embed-a")):
            group.create_task(forever(kind, model))
        group.create_task(forever("chat", "whisper-a"))
        group.create_task(forever("speech", "tts-a", patience=0.1))
        group.create_task(forever("chat", ""))


@pytest.mark.parametrize("expression", [*ALERTS, *PANELS], ids=lambda each: each.name)
async def test_each_expression_gives_a_series_under_load(watched: Watched, expression: Expression) -> None:
    values = [each["value"][1] for each in await watched.prometheus.query(expression.text)]
    assert set(values) - {"NaN"} or not expression.must_give_a_series


@pytest.mark.parametrize("alert", ALERTS, ids=lambda each: each.name)
async def test_an_idle_proxy_has_every_series_of_the_alerts_and_sets_off_none(
    watched: Watched, alert: Expression
) -> None:
    assert {each["value"][1] for each in watched.idle[alert.name]} == {"0"}


@pytest.mark.parametrize("panel", ["Oldest wait A", "Longest hold A"])
async def test_an_idle_proxy_shows_0_and_not_nan(watched: Watched, panel: str) -> None:
    assert [each["value"][1] for each in watched.idle[panel]] == ["0"]


async def test_prometheus_itself_evaluates_every_rule_without_a_fault(watched: Watched) -> None:
    async def evaluated() -> bool:
        groups = (await watched.prometheus.get("rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] == "err"] == []
        return len(rules) == len(ALERTS) and all(rule["health"] == "ok" for rule in rules)

    await watched.prometheus.until(evaluated)


@pytest.mark.parametrize("job", ["gpu-lease-proxy", "llama-swap"])
async def test_the_target_page_shows_it_as_up(watched: Watched, job: str) -> None:
    target = await watched.prometheus.target(job)
    assert (target["health"], target["lastError"]) == ("up", "")
