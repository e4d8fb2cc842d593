"""The image, the compose file and the service as text: well formed, and they agree with the settings and each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.settings import Settings, load

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = (ROOT / "compose.yaml").read_text(encoding="utf-8")
PROXY: dict[str, Any] = yaml.safe_load(COMPOSE)["services"]["proxy"]

# What is not commented out in .env.example holds only once it is copied to .env; the rest shows what holds anyway.
EXAMPLE = re.findall(r"^(#?)([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE)
# ${NAME:-default} in compose.yaml; and the names that it hands on to the proxy without a value.
DEFAULTS = dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", COMPOSE.replace("${NAME:-value}", "")))
HANDED_ON = {name for name, value in PROXY["environment"].items() if value is None}


def test_hadolint_finds_nothing() -> None:
    run(Path(sys.executable).with_name("hadolint"), "Dockerfile")


def test_compose_file_follows_the_specification() -> None:
    program = Path(sys.executable).with_name("check-jsonschema")
    run(program, "--builtin-schema", "vendor.compose-spec", "compose.yaml")


def test_docker_waits_longer_than_streams_may_take_to_end() -> None:
    grace = re.fullmatch(r"(\d+)s", DEFAULTS["PROXY_STOP_GRACE_PERIOD"])
    assert grace is not None
    assert int(grace[1]) >= load(None, {}).shutdown_grace + 10


def test_env_example_names_every_variable_that_compose_reads_and_no_other() -> None:
    assert sorted(name for _, name, _ in EXAMPLE) == sorted({*DEFAULTS, *HANDED_ON})


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_env_example_and_compose_agree_on_what_holds_without_env(name: str) -> None:
    assert [value for _, other, value in EXAMPLE if other == name] == [DEFAULTS[name]]


def test_env_example_shows_the_defaults_of_the_settings() -> None:
    assert load(None, {name: value for _, name, value in EXAMPLE if name in HANDED_ON}) == load(None, {})


def test_every_setting_of_image_and_compose_file_exists() -> None:
    names = {*re.findall(r"\bGPU_LEASE_[A-Z_]+(?==)", DOCKERFILE), *PROXY["environment"]} - {"GPU_LEASE_CONFIG"}
    assert {name.removeprefix("GPU_LEASE_").lower() for name in names} <= set(Settings.model_fields)


def test_image_and_compose_file_check_health_alike() -> None:
    found = re.search(r"^HEALTHCHECK (.*) CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    check = dict(option.removeprefix("--").split("=") for option in found[1].split())
    check = {name.replace("-", "_"): value for name, value in check.items()}
    declared = {name: str(value) for name, value in PROXY["healthcheck"].items() if name != "test"}
    assert declared == check
    assert PROXY["healthcheck"]["test"] == ["CMD", *yaml.safe_load(found[2])]


def test_the_image_reads_a_file_that_is_in_it_and_changes_nothing() -> None:
    assert "COPY config/proxy.yaml /config/proxy.yaml\n" in DOCKERFILE
    assert "GPU_LEASE_CONFIG=/config/proxy.yaml" in DOCKERFILE
    assert load(ROOT / "config/proxy.yaml", {}) == load(None, {})


def test_llama_swap_is_not_published() -> None:
    assert "ports" not in yaml.safe_load(COMPOSE)["services"]["llama-swap"]


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_monitoring_is_started_on_demand_published_to_this_machine_only_and_pinned(name: str) -> None:
    service = yaml.safe_load(COMPOSE)["services"][name]
    assert service["profiles"] == ["monitoring"]
    assert [port.startswith("127.0.0.1:") for port in service["ports"]] == [True]
    assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", DEFAULTS[f"{name.upper()}_IMAGE"])
    for volume in service["volumes"]:
        source = volume.partition(":")[0]
        assert volume.endswith(":ro") and (ROOT / source).is_dir() if source.startswith(".") else source == name


def test_prometheus_asks_where_compose_has_the_services() -> None:
    services = yaml.safe_load(COMPOSE)["services"]
    config = yaml.safe_load((ROOT / "config/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    targets = {each["job_name"]: each["static_configs"][0]["targets"] for each in config["scrape_configs"]}
    inside = services["proxy"]["ports"][0].rpartition(":")[2]
    assert targets == {
        "gpu-lease-proxy": [f"proxy:{inside}"],
        "llama-swap": [f"llama-swap:{services['llama-swap']['expose'][0]}"],
    }


UNIT = (ROOT / "config/systemd/gpu-lease-proxy.service").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_service(tmp_path: Path) -> None:
    path = tmp_path / "gpu-lease-proxy.service"
    path.write_text(UNIT.replace("/opt/gpu-lease-proxy/bin/gpu-lease-proxy", sys.executable), encoding="utf-8")
    assert run("systemd-analyze", "verify", "--man=no", path) == ""  # an unknown key is a warning to it


def test_systemd_waits_longer_than_streams_may_take_to_end() -> None:
    (limit,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(limit) >= load(None, {}).shutdown_grace + 10


def test_every_setting_of_the_service_exists() -> None:
    names = {name.lower().removesuffix("_file") for name in re.findall(r"GPU_LEASE_([A-Z_]+)=", UNIT)}
    assert names == {"api_keys", "data_dir", "spool_dir"} <= set(Settings.model_fields)


def run(*command: str | Path) -> str:
    """What the command prints; it must succeed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
