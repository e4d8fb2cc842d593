"""The documentation names every setting, every error code and every metric, and what it says of them is so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from config_table import config_table
from proxy.classes import BUILT_IN_PATTERNS
from proxy.errors import Refusal
from proxy.settings import ClassSettings, Settings, load
from proxy.settings.layers import SECRETS

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
METRICS = ROOT / "docs/metrics.md"

SECTIONS: dict[str, str] = dict(re.findall(r"^#### `(\w+)`\n+(.*?)(?=^#)", CONFIGURATION, re.MULTILINE | re.DOTALL))
"""The text of each setting by its name."""


def written(key: str, value: str, tmp_path: Path) -> object:
    """The setting `key` as it is read from a file with this value."""
    path = tmp_path / "proxy.yaml"
    path.write_text(f"{key}: {value}\n", encoding="utf-8")
    return getattr(load(path, {}), key)


# --- settings


def test_every_setting_has_a_section_and_every_section_a_setting() -> None:
    assert set(SECTIONS) == set(Settings.model_fields)


@pytest.mark.parametrize("key", Settings.model_fields)
def test_each_section_names_its_variables(key: str) -> None:
    wanted = {f"GPU_LEASE_{key.upper()}"} | ({f"GPU_LEASE_{key.upper()}_FILE"} if key in SECRETS else set())
    assert wanted <= set(re.findall(r"GPU_LEASE_\w+", SECTIONS[key]))


@pytest.mark.parametrize("key", sorted(set(Settings.model_fields) - {"classes"}))
def test_the_default_in_the_docs_is_the_default(key: str, tmp_path: Path) -> None:
    default = getattr(Settings(), key)
    found = re.search(r"default: (?:`([^`]*)`|(unset))", SECTIONS[key])
    assert found is not None
    assert default is None if found[2] else written(key, found[1], tmp_path) == default


@pytest.mark.parametrize("key", sorted(key for key, text in SECTIONS.items() if "example: `" in text))
def test_the_example_in_the_docs_can_be_written_so_and_changes_something(key: str, tmp_path: Path) -> None:
    (example,) = re.findall(r"example: `([^`]*)`", SECTIONS[key])
    if key not in {"data_dir", "llama_swap_config"}:  # which must exist
        assert written(key, example, tmp_path) != getattr(Settings(), key)


def test_every_key_of_a_class_is_in_the_docs() -> None:
    for key in ClassSettings.model_fields:
        assert f"`classes.NAME.{key}`" in SECTIONS["classes"]


def test_the_built_in_patterns_that_the_docs_name_exist() -> None:
    (item,) = re.findall(r"\*\*Built-in patterns\*\*.*?\n4\.", SECTIONS["classes"], re.DOTALL)
    named = set(re.findall(r"`([^`\s]*[*-][^`\s]*)`", item))
    assert len(named) > 5
    assert named <= {pattern for patterns in BUILT_IN_PATTERNS.values() for pattern in patterns}


def test_what_the_docs_show_of_check_is_what_it_prints() -> None:
    shown = CONFIGURATION.partition("\nModels\n")[2].partition("\n\n")[0].splitlines()
    assert len(shown) > 5
    assert set(shown) <= set(config_table(ROOT / "config/examples/matrix.yaml").splitlines())


def test_the_example_file_lists_every_key() -> None:
    text = (ROOT / "config/proxy.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"^#([a-z_]+):", text, re.MULTILINE)) == set(Settings.model_fields)


# --- error codes


def refusals(error: type[Refusal] = Refusal) -> Iterator[type[Refusal]]:
    """Every refusal that has a code of its own."""
    if "code" in vars(error):
        yield error
    for child in error.__subclasses__():
        if child.__module__.startswith("proxy."):
            yield from refusals(child)


def test_every_error_code_is_in_the_docs_with_its_status_and_no_other() -> None:
    table = CONFIGURATION.partition("## Error codes")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| [^|]+ \| [^|]+ \|$", table, re.MULTILINE)
    assert sorted((code, int(status)) for code, status in rows) == sorted((one.code, one.status) for one in refusals())


# --- metrics


def metric_names() -> set[str]:
    """The names of all series, as `proxy/metrics.py` spells them."""
    source = ROOT / "proxy/metrics.py"
    return set(re.findall(r'"(gpu_lease_\w+)"', source.read_text(encoding="utf-8"))) if source.exists() else set()


@pytest.mark.skipif(not METRICS.exists(), reason="docs/metrics.md is not written yet")
def test_every_metric_is_in_the_docs() -> None:
    text = METRICS.read_text(encoding="utf-8")
    assert [name for name in sorted(metric_names()) if not re.search(rf"\b{name}(_total|_info)?\b", text)] == []


# --- links


def test_links_of_the_clients_page_lead_somewhere() -> None:
    text = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", text):
        path = ROOT / "docs" / (target or "clients.md")
        headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, (target, anchor)


def test_links_inside_the_page_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.*)$", CONFIGURATION, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", CONFIGURATION)) <= anchors
    for target in re.findall(r"\]\(([^#)][^)]*)\)", CONFIGURATION):
        assert (ROOT / "docs" / target).exists(), target
