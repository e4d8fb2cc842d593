"""The dashboard as a file: every panel says what it shows, in which unit, and from where; and it can be imported."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import yaml
from monitoring_support import DASHBOARD, ROOT, dashboard, panels

from proxy.metrics import WAIT_BUCKETS

Panel = dict[str, Any]
BOARD = dashboard()
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WITHOUT_THRESHOLDS = {"heatmap"}
DOCUMENTED = set(
    re.findall(r"^\| `(gpu_lease_\w+)` \|", (ROOT / "docs/metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
)


def faults(panel: Panel) -> set[str]:
    """What a panel lacks."""
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    sources = [panel.get("datasource"), *(target.get("datasource") for target in panel.get("targets", []))]
    found = {
        "title": panel.get("title"),
        "unit": defaults.get("unit"),
        "description": panel.get("description"),
        "targets": panel.get("targets"),
        "datasource": all(source == DATASOURCE for source in sources),
        "thresholds": panel["type"] in WITHOUT_THRESHOLDS or _good_thresholds(defaults.get("thresholds")),
    }
    return {name for name, good in found.items() if not good}


def _good_thresholds(thresholds: Panel | None) -> bool:
    """The first step has no value, and the others rise."""
    first, *others = [step["value"] for step in (thresholds or {"steps": [{"value": 0}]})["steps"]]
    return first is None and others == sorted(others)


@pytest.mark.parametrize("panel", panels(BOARD), ids=lambda panel: panel["title"])
def test_every_panel_has_unit_description_thresholds_and_the_datasource_variable(panel: Panel) -> None:
    assert faults(panel) == set()


BREAKAGES: dict[str, Callable[[Panel], object]] = {
    "unit": lambda panel: panel["fieldConfig"]["defaults"].pop("unit"),
    "description": lambda panel: panel.update(description=""),
    "datasource": lambda panel: panel["targets"][0].update(datasource={"type": "prometheus", "uid": "prod"}),
    "thresholds": lambda panel: panel["fieldConfig"]["defaults"].pop("thresholds"),
    "title": lambda panel: panel.pop("title"),
    "targets": lambda panel: panel.update(targets=[]),
}


@pytest.mark.parametrize("fault", BREAKAGES)
def test_a_panel_that_lacks_one_of_them_is_found(fault: str) -> None:
    panel = copy.deepcopy(panels(BOARD)[0])
    BREAKAGES[fault](panel)
    assert faults(panel) == {fault}


def test_the_annotation_and_the_variables_use_the_datasource_variable_too() -> None:
    variables = {each["name"]: each for each in BOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    asking = [each for each in variables.values() if each["type"] == "query"]
    restarts = [each for each in BOARD["annotations"]["list"] if each["name"] == "Restarts"]
    assert len(restarts) == 1
    assert [each["datasource"] for each in [*asking, *restarts]] == [DATASOURCE] * (len(asking) + 1)


def test_it_can_be_imported_anywhere_and_again() -> None:
    """A classic dashboard: fixed uid, no database id, ids of panels that differ, no panels one over another."""
    assert (BOARD["uid"], BOARD["id"]) == ("gpu-lease-proxy", None)
    assert isinstance(BOARD["panels"], list)
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert [pair for pair in combinations([panel["gridPos"] for panel in BOARD["panels"]], 2) if overlap(*pair)] == []


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    """Whether two places share some of the grid."""
    across = one["x"] < other["x"] + other["w"] and other["x"] < one["x"] + one["w"]
    return across and one["y"] < other["y"] + other["h"] and other["y"] < one["y"] + one["h"]


def test_it_is_written_so_that_a_change_is_a_small_difference() -> None:
    assert DASHBOARD.read_text(encoding="utf-8") == json.dumps(BOARD, indent=2, ensure_ascii=False) + "\n"


def named_series() -> dict[str, str]:
    """Every series of ours that a file under config/ names, with the file."""
    files = [path for folder in ("prometheus", "grafana") for path in (ROOT / "config" / folder).rglob("*.*")]
    return {
        name: path.name for path in files for name in re.findall(r"\bgpu_lease_\w+", path.read_text(encoding="utf-8"))
    }


def test_every_series_that_is_used_is_in_the_docs() -> None:
    known = {f"{name}{suffix}" for name in DOCUMENTED for suffix in ("", "_bucket", "_count", "_sum")}
    assert {name: file for name, file in named_series().items() if name not in known} == {}


def test_the_three_timeouts_are_bounds_of_buckets() -> None:
    bounds = set(re.findall(r'le=\\"([\d.]+)\\"', DASHBOARD.read_text(encoding="utf-8")))
    assert bounds == {"30.0", "60.0", "120.0"}
    assert bounds <= {str(float(bound)) for bound in WAIT_BUCKETS}


def test_grafana_finds_the_dashboard_and_prometheus_where_compose_puts_them() -> None:
    provisioning = ROOT / "config/grafana/provisioning"
    (provider,) = read(provisioning / "dashboards/gpu-lease-proxy.yaml")["providers"]
    (source,) = read(provisioning / "datasources/prometheus.yaml")["datasources"]
    services = read(ROOT / "compose.yaml")["services"]
    mounts = [volume.split(":") for volume in services["grafana"]["volumes"]]
    places = {mount[1]: mount[0] for mount in mounts}
    assert (ROOT / places[provider["options"]["path"]]) == DASHBOARD.parent
    assert (ROOT / places["/etc/grafana/provisioning"]) == provisioning
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    every = read(ROOT / "config/prometheus/prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == every


def read(path: Any) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))
