"""What the tests of config/prometheus and config/grafana share: the expressions in them, and Prometheus to try them on.

`scripts/server-tools` gets Debian's Prometheus, into the cache, where it is not installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from server_tools import environment, find_program, free_port

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "config/prometheus"
DASHBOARD = ROOT / "config/grafana/dashboards/gpu-lease-proxy.json"

# What Grafana puts in before it asks; the ranges are those of a test that lasts half a minute.
GRAFANA = {"$__rate_interval": "1m", "$__range": "5m", "$__interval": "5s", "$instance": ".*", "$class": ".*"}

# A comparison of PromQL, outside label matchers and strings, that is not one with `bool` already.
COMPARISON = re.compile(r"""\{[^}]*\}|"[^"]*"|'[^']*'|((?:==|!=|>=|<=|>|<)(?!\s*bool\b))""")


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression and where it stands."""

    name: str
    text: str

    @property
    def must_give_a_series(self) -> bool:
        """`absent` and `unless` give none where all is well."""
        return re.search(r"\b(absent|absent_over_time|unless)\b", self.text) is None


def with_bool(expression: str) -> str:
    """The expression with every comparison made one that gives 0 or 1, and filters nothing.

    >>> with_bool('sum(a{b!="c"}) > 1 and time() == bool 2')
    'sum(a{b!="c"}) > bool 1 and time() == bool 2'
    """
    return COMPARISON.sub(lambda match: f"{match[0]} bool" if match[1] else match[0], expression)


def alert_expressions() -> list[Expression]:
    """Each alert's, with `bool` comparisons."""
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [Expression(rule["alert"], with_bool(rule["expr"])) for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """The dashboard, parsed."""
    parsed: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return parsed


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels that show something: not the rows, but what is folded into them."""
    return [panel for panel in _all_panels(board["panels"]) if panel["type"] != "row"]


def panel_expressions(board: dict[str, Any]) -> list[Expression]:
    """Those of every panel and every annotation, with Grafana's variables filled in."""
    found = [
        Expression(f"{panel['title']} {target['refId']}", filled_in(target["expr"]))
        for panel in panels(board)
        for target in panel["targets"]
    ]
    annotations = [each for each in board["annotations"]["list"] if "expr" in each]
    return found + [Expression(each["name"], filled_in(each["expr"])) for each in annotations]


def filled_in(expression: str) -> str:
    """The expression with Grafana's variables replaced."""
    for name, value in GRAFANA.items():
        expression = re.sub(rf"{re.escape(name)}\b", value, expression)
    return expression


def _all_panels(listed: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in listed:
        yield panel
        yield from _all_panels(panel.get("panels", []))


def promtool() -> str:
    """Where promtool is; the test is skipped where it is not."""
    return _or_skip("promtool")


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.client = httpx.AsyncClient(base_url=url, timeout=10, trust_env=False)

    async def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        response = await self.client.get(f"/api/v1/{path}", params=parameters)
        assert response.status_code == 200, response.text
        return response.json()["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now."""
        found: list[dict[str, Any]] = (await self.get("query", query=expression))["result"]
        return found

    async def target(self, job: str) -> dict[str, Any]:
        """What its target page tells of the only target of a job."""
        targets = (await self.get("targets"))["activeTargets"]
        (found,) = [target for target in targets if target["labels"]["job"] == job]
        assert isinstance(found, dict)
        return found

    async def until(self, true: Callable[[], Awaitable[bool]], within: float = 30) -> None:
        """Return once `true` is; nobody tells when it is."""
        async with asyncio.timeout(within):
            while not await true():  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def prometheus(directory: Path, **targets: str) -> AsyncIterator[Prometheus]:
    """Prometheus with this repository's configuration, every second, and other targets: `host:port` by job.

    Hyphens of a job's name are underscores here.
    """
    program, port = _or_skip("prometheus"), free_port()
    process = await asyncio.create_subprocess_exec(
        program, f"--config.file={_configuration(directory, targets)}", f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        env=environment(), stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    found = Prometheus(f"http://127.0.0.1:{port}")
    try:
        await found.until(lambda: _ready(found, process))
        yield found
    finally:
        await found.client.aclose()
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _configuration(directory: Path, targets: dict[str, str]) -> Path:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    for scrape in config["scrape_configs"]:
        scrape["static_configs"] = [{"targets": [targets[scrape["job_name"].replace("-", "_")]]}]
    for name in config["rule_files"]:
        shutil.copy(PROMETHEUS / name, directory)
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


async def _ready(found: Prometheus, process: asyncio.subprocess.Process) -> bool:
    assert process.returncode is None, "Prometheus did not start"
    with contextlib.suppress(httpx.TransportError):
        return (await found.client.get("/-/ready")).status_code == 200
    return False


def _or_skip(name: str) -> str:
    program = find_program(name)
    if program is None:
        pytest.skip(f"{name} is not there (scripts/server-tools gets it on Debian)")
    return program
