"""Settings: what may be written where, which place wins, and that mistakes are named, all at once, without secrets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as effort
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from proxy.errors import SettingsError
from proxy.settings import BUILT_IN_CLASSES, ClassSettings, Settings, load, read
from proxy.settings.display import schema, shown
from proxy.settings.layers import SECRETS
from proxy.settings.units import LONGEST, format_duration, format_size, parse_duration, parse_size

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "config/proxy.yaml"
SCHEMA = ROOT / "config/proxy.schema.json"

Environment = dict[str, str]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def writer(text: str | bytes, name: str = "proxy.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return writer


def problems(path: Path | None = None, environ: Environment | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(path, environ or {})
    return [problem.replace(f"{path}", "FILE") for problem in caught.value.problems]


# --- defaults


def test_defaults_are_those_that_clients_dashboards_and_tests_rely_on() -> None:
    found = load(None, {}).model_dump()
    assert found.pop("classes") == {
        name: {
            "lease": "auto",
            "models": (),
            "max_wait": None,
            "keepalive": True,
            "on_disconnect": "cancel",
            "websocket": "bridge",
        }
        for name in BUILT_IN_CLASSES
    }
    assert found == {
        "upstream_url": None,
        "upstream_api_key": None,
        "llama_swap_config": None,
        "watch_config": True,
        "listen_host": "127.0.0.1",
        "listen_port": 9393,
        "admin_port": None,
        "http_parser": "httptools",
        "policy": "batch",
        "switch_after": None,
        "max_turn": None,
        "max_wait": 540,
        "max_queue": 256,
        "max_queue_per_client": 64,
        "max_head": 2**16,
        "head_timeout": 10,
        "body_timeout": 60,
        "keep_place": 60,
        "keepalive_after": 3,
        "keepalive_every": 3,
        "json_keepalive_after": None,
        "show_position": False,
        "flag_incomplete": True,
        "response_buffer": 16 * 2**20,
        "max_response_buffers": 256 * 2**20,
        "stall_timeout": 60,
        "websocket_idle": 600,
        "job_ttl": 3600,
        "jobs_max_bytes": 2**30,
        "max_body": 256 * 2**20,
        "max_spool": 2 * 2**30,
        "spool_dir": None,
        "data_dir": None,
        "slots": {"*": 10},
        "default_class": "llm",
        "api_keys": None,
        "trusted_proxies": (ip_network("127.0.0.0/8"), ip_network("::1/128")),
        "allowed_hosts": (),
        "max_hold": None,
        "shutdown_grace": 30,
        "slow_wait_log": 2,
        "log_format": "plain",
    }


def test_only_what_is_handed_over_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPU_LEASE_POLICY", "fifo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "proxy.yaml").write_text("policy: fifo")
    (tmp_path / ".env").write_text("GPU_LEASE_POLICY=fifo")
    assert load(None, {}).policy == Settings().policy == "batch"


def test_settings_do_not_change_once_they_are_read() -> None:
    settings = load(None, {})
    with pytest.raises(ValidationError, match="frozen"):
        settings.policy = "fifo"


# --- every key, in every place

HERE = Path(__file__).parent
TMP = HERE.parent
BUILT_IN = dict.fromkeys(BUILT_IN_CLASSES, ClassSettings())
KEYS: dict[str, tuple[str, object, str, object]] = {
    "upstream_url": ("http://a:1/", "http://a:1", "https://[::1]:8080", "https://[::1]:8080"),
    "upstream_api_key": ("sk-1", SecretStr("sk-1"), "sk-2", SecretStr("sk-2")),
    "llama_swap_config": (str(HERE), HERE, __file__, HERE / Path(__file__).name),
    "watch_config": ("false", False, "true", True),
    "listen_host": ("0.0.0.0", "0.0.0.0", "[::1]", "::1"),
    "listen_port": ("1", 1, "0", 0),
    "admin_port": ("9394", 9394, "0", 0),
    "http_parser": ("httptools", "httptools", "h11", "h11"),
    "policy": ("batch", "batch", "fifo", "fifo"),
    "switch_after": ("1s", 1.0, "500ms", 0.5),
    "max_turn": ("100s", 100.0, "auto", None),
    "max_wait": ("1.5", 1.5, "90", 90.0),
    "max_queue": ("1", 1, "2", 2),
    "max_queue_per_client": ("'1'", 1, "2", 2),
    "max_head": ("8KiB", 2**13, "128KiB", 2**17),
    "head_timeout": ("1s", 1.0, "1m", 60.0),
    "body_timeout": ("5s", 5.0, "2m", 120.0),
    "keep_place": ("0", 0.0, "5s", 5.0),
    "keepalive_after": ("0", 0.0, "500ms", 0.5),
    "keepalive_every": ("1s", 1.0, "10ms", 0.01),
    "json_keepalive_after": ("off", None, "2s", 2.0),
    "show_position": ("true", True, "false", False),
    "flag_incomplete": ("false", False, "true", True),
    "response_buffer": ("1MiB", 2**20, "64KiB", 2**16),
    "max_response_buffers": ("1GiB", 2**30, "32MiB", 2**25),
    "stall_timeout": ("5s", 5.0, "2m", 120.0),
    "websocket_idle": ("1m", 60.0, "1h", 3600.0),
    "job_ttl": ("10m", 600.0, "1", 1.0),
    "jobs_max_bytes": ("1MB", 1_000_000, "1GiB", 2**30),
    "max_body": ("1MB", 1_000_000, "16MiB", 16 * 2**20),
    "max_spool": ("1", 1, "1000", 1000),
    "spool_dir": (str(HERE), HERE, str(TMP), TMP),
    "data_dir": (str(HERE), HERE, str(TMP), TMP),
    "slots": ("{a: 1}", {"a": 1}, '{"b": 2, "*": 3}', {"b": 2, "*": 3}),
    "default_class": ("tts", "tts", "stt", "stt"),
    "classes": (
        *("{tts: {lease: none}}", BUILT_IN | {"tts": ClassSettings(lease="none")}),
        *('{"TTS": {"lease": "read"}}', BUILT_IN | {"tts": ClassSettings(lease="read")}),
    ),
    "api_keys": ("[a, b]", (SecretStr("a"), SecretStr("b")), "c, d", (SecretStr("c"), SecretStr("d"))),
    "trusted_proxies": ("[1.2.3.4]", (ip_network("1.2.3.4/32"),), '["10.0.0.0/8"]', (ip_network("10.0.0.0/8"),)),
    "allowed_hosts": ("[GPU.example.org]", ("gpu.example.org",), "a.example,b", ("a.example", "b")),
    "max_hold": ("off", None, "30m", 1800.0),
    "shutdown_grace": ("1s", 1.0, "0", 0.0),
    "slow_wait_log": ("1s", 1.0, "0", 0.0),
    "log_format": ("plain", "plain", "json", "json"),
}


@pytest.mark.parametrize("key", Settings.model_fields)
def test_each_key_is_read_from_the_file_and_the_environment_wins(key: str, write: Any) -> None:
    in_file, expected_from_file, in_variable, expected = KEYS[key]
    path, variable = write(f"{key}: {in_file}\n"), f"GPU_LEASE_{key.upper()}"
    settings, layer = read(path, {})
    assert (getattr(settings, key), layer.origin((key,))) == (expected_from_file, f"{path}, line 1")
    settings, layer = read(path, {variable: in_variable})
    assert (getattr(settings, key), layer.origin((key,))) == (expected, variable)


def test_the_file_is_the_argument_or_else_the_one_that_the_variable_names(write: Any) -> None:
    named, given = write("policy: fifo", "named.yaml"), write("max_queue: 5", "given.yaml")
    environ = {"GPU_LEASE_CONFIG": str(named)}
    assert load(None, environ).policy == "fifo"
    assert (load(given, environ).policy, load(given, environ).max_queue) == ("batch", 5)
    assert load(None, {"GPU_LEASE_CONFIG": " "}) == load(None, {})


def test_classes_are_merged_key_by_key_and_slots_are_replaced(write: Any) -> None:
    path = write("classes: {tts: {max_wait: 1m, models: [a, b]}, vision: {}}\nslots: {a: 1}")
    environ = {
        "GPU_LEASE_CLASSES": '{"tts": {"models": ["c"]}, "stt": {"lease": "write"}}',
        "GPU_LEASE_CLASSES__TTS__LEASE": "read",
        "gpu_lease_classes__Stt__lease": "none",
        "GPU_LEASE_CLASSES__VISION__MODELS": "d,e*",
        "GPU_LEASE_CLASSES__CLIP": '{"max_wait": "2s"}',
        "GPU_LEASE_SLOTS": '{"b": 2}',
    }
    settings = load(path, environ)
    assert settings.classes == {
        "llm": ClassSettings(),
        "tts": ClassSettings(lease="read", models=("c",), max_wait=60),
        "embed": ClassSettings(),
        "stt": ClassSettings(lease="none"),
        "image": ClassSettings(),
        "vision": ClassSettings(models=("d", "e*")),
        "clip": ClassSettings(max_wait=2),
    }
    assert settings.slots == {"b": 2}
    assert (settings.max_wait_of("tts"), settings.max_wait_of("llm")) == (60, 540)


def test_an_empty_variable_and_a_key_without_value_keep_the_default(write: Any) -> None:
    environ = {f"GPU_LEASE_{key.upper()}": " " for key in Settings.model_fields}
    path = write("".join(f"{key}:\n" for key in Settings.model_fields))
    assert load(None, environ) == load(path, {}) == load(path, environ) == load(None, {})


def test_a_class_needs_no_keys(write: Any) -> None:
    assert load(write("classes:\n  vision:\n  tts:\n"), {}).classes["vision"] == ClassSettings()


# --- secrets


def test_secrets_are_read_from_the_files_that_variables_name(write: Any) -> None:
    keys, key = write("sk-1\n sk-2 \n\nsk-3,sk-4\n", "keys"), write("sk-up\n", "key")
    settings = load(None, {"GPU_LEASE_API_KEYS_FILE": str(keys), "GPU_LEASE_UPSTREAM_API_KEY_FILE": str(key)})
    assert [entry.get_secret_value() for entry in settings.api_keys or ()] == ["sk-1", "sk-2", "sk-3", "sk-4"]
    assert settings.upstream_api_key == SecretStr("sk-up")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "api_keys (GPU_LEASE_API_KEYS_FILE): FILE cannot be read: No such file or directory"),
        (b" \n", "api_keys (GPU_LEASE_API_KEYS_FILE): FILE is empty; it must hold the secret"),
        (b"\xff\xfe", "api_keys (GPU_LEASE_API_KEYS_FILE): FILE is not UTF-8 text"),
        (b",\n,", "api_keys (GPU_LEASE_API_KEYS_FILE): it must hold at least one key"),
        (b"two words", "api_keys[0] (GPU_LEASE_API_KEYS_FILE): it must be visible ASCII characters"),
    ],
)
def test_a_secret_file_that_holds_no_secret_is_a_mistake(content: bytes | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    (found,) = problems(None, {"GPU_LEASE_API_KEYS_FILE": str(path)})
    assert found.replace(str(path), "FILE").startswith(expected)


def test_a_secret_given_twice_is_a_mistake(write: Any) -> None:
    environ = {"GPU_LEASE_API_KEYS": "sk-1", "GPU_LEASE_API_KEYS_FILE": str(write("sk-2", "keys"))}
    (found,) = problems(None, environ)
    assert "keep one of them" in found


@pytest.mark.parametrize("environ", [{"GPU_LEASE_API_KEYS": "[]"}, {"GPU_LEASE_API_KEYS": ","}])
def test_no_key_at_all_is_a_mistake_and_not_an_open_door(environ: Environment, write: Any) -> None:
    assert problems(None, environ) == [
        "api_keys (GPU_LEASE_API_KEYS): it must hold at least one key; leave it out to serve every client without a key"
    ]
    assert len(problems(write("api_keys: []"))) == 1


SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        (f"api_keys: {SECRET}", {}),
        (f"api_keys: [[{SECRET}]]", {}),
        (f"api_keys: {{{SECRET}: 1}}", {}),
        (f"api_keys: ['{SECRET} ']", {}),
        (f"api_keys: [{SECRET}, 5]", {}),
        (f"upstream_api_key: [{SECRET}]", {}),
        (f"upstream_api_key: 'ü{SECRET}'", {}),
        (f"upstream_key: {SECRET}", {}),
        (f"upstream_url: http://user:{SECRET}@host", {}),
        (f"upstream_url: ftp://user:{SECRET}@host", {}),
        (f"api_keys: [a]\napi_keys: [{SECRET}]", {}),
        ("", {"GPU_LEASE_API_KEYS": f'["{SECRET}"'}),
        ("", {"GPU_LEASE_API_KEYS": f'[{{"{SECRET}": "{SECRET}"}}]'}),
        ("", {"GPU_LEASE_API_KEYS": f'["a", "{SECRET} x"]'}),
        ("", {"GPU_LEASE_API_KEY": SECRET}),
        ("", {"GPU_LEASE_UPSTREAM_API_KEY": f"{SECRET} {SECRET}"}),
    ],
)
def test_no_message_repeats_a_secret(text: str, environ: Environment, write: Any) -> None:
    found = problems(write(text), environ)
    assert found
    assert SECRET not in "\n".join(found)


def test_a_secret_is_not_shown_by_repr_or_check() -> None:
    settings = load(None, {"GPU_LEASE_API_KEYS": f"{SECRET},{SECRET}2", "GPU_LEASE_UPSTREAM_API_KEY": SECRET})
    texts = [repr(settings), str(settings), *(shown(key, getattr(settings, key)) for key in SECRETS)]
    assert SECRET not in "\n".join(texts)


# --- mistakes


def test_every_mistake_in_file_and_environment_is_named_at_once(write: Any) -> None:
    path = write(
        "policy: fair\npolcy: fifo\nmax_turn: 10s\nswitch_after: 1m\ndefault_class: lmm\nlog_format: plain\n"
        "log_format: json\nclasses:\n  tts: {lees: read, models: [x]}\n  stt: {models: [x, 5]}\n"
    )
    environ = {"GPU_LEASE_MAX_WIAT": "1s", "GPU_LEASE_LISTEN_PORT": "eighty", "GPU_LEASE_CLASSES__TTS__LEES": "read"}
    assert sorted(problems(path, environ)) == [
        "GPU_LEASE_CLASSES__TTS__LEES: unknown variable; did you mean GPU_LEASE_CLASSES__TTS__LEASE?",
        "GPU_LEASE_MAX_WIAT: unknown variable; did you mean GPU_LEASE_MAX_WAIT?",
        "classes.stt.models[1] (FILE, line 10): got 5; it must be text; put it in quotes",
        "classes.tts.lees (FILE, line 9): unknown key; did you mean classes.tts.lease?",
        "listen_port (GPU_LEASE_LISTEN_PORT): got 'eighty'; it must be a whole number",
        "log_format (FILE, line 7): stands twice, first in line 6; keep one of them",
        "max_turn (FILE, line 3): 10s is less than switch_after, 1m; it must be at least that",
        "polcy (FILE, line 2): unknown key; did you mean policy?",
        "policy (FILE, line 1): got 'fair'; it must be 'batch' or 'fifo'",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("upstream_url: localhost:8080", "it must begin with http:// or https:// and name a host"),
        ("upstream_url: //host", "it must begin with http:// or https:// and name a host"),
        ("upstream_url: http://", "it must begin with http:// or https:// and name a host"),
        ("upstream_url: unix:///run/x", "it must begin with http:// or https:// and name a host"),
        ("upstream_url: http://host:80/v1", "it must end after the host and port"),
        ("upstream_url: http://host/?a=b", "it must end after the host and port"),
        ("upstream_url: http://host?", "it must end after the host and port"),
        ("upstream_url: 'http://host/#x'", "it must end after the host and port"),
        ("upstream_url: http://ho st", "it must name a host"),
        ("upstream_url: 'http://host\\evil'", "it must name a host"),
        ("upstream_url: http://höst", "it must name a host"),
        ("upstream_url: http://host:0", "it must name a host"),
        ("upstream_url: http://host:99999", "it must be a URL such as"),
        ("upstream_url: http://[::1", "it must be a URL such as"),
        ("upstream_url: http://127.0.0.1:9393", "is where this proxy itself listens"),
        ("upstream_url: http://localhost:9393\nlisten_host: 0.0.0.0", "is where this proxy itself listens"),
        ("upstream_url: http://gpu:80\nlisten_host: gpu\nlisten_port: 80", "is where this proxy itself listens"),
        ("listen_host: 127.0.0.1:9393", "it must be one address or host name"),
        ("listen_host: 1.2.3", "it must be one address or host name"),
        ("listen_host: http://x", "it must be one address or host name"),
        ("listen_host: ''", "it must be one address or host name"),
        ("listen_port: 65536", "it must be at most 65535"),
        ("listen_port: -1", "it must be at least 0"),
        ("listen_port: 80.0", "it must be a whole number"),
        ("listen_port: true", "it must be a whole number"),
        ("max_queue: 0", "it must be at least 1"),
        ("max_queue_per_client: -5", "it must be at least 1"),
        ("max_wait: 0", "it must be more than 0"),
        ("max_turn: 0s\nswitch_after: 0", "it must be more than 0"),
        ("switch_after: -1", "it must not be negative"),
        ("switch_after: 100\nmax_turn: 1m30s", "1m30s is less than switch_after, 1m40s"),
        ("switch_after: off", "or a number of seconds, or auto"),
        ("max_turn: 0", "it must be more than 0, or auto"),
        ("max_turn: later", "or a number of seconds, or auto"),
        ("llama_swap_config: /nonexistent/config.yaml", "must be a file or a directory that exists"),
        ("llama_swap_config: 5", "it must be the path of a file or a directory"),
        ("llama_swap_config: ''", "it must be the path of a file or a directory"),
        (f"llama_swap_config: /{'x' * 300}", "must be a file or a directory that exists"),
        ("watch_config: often", "it must be true or false"),
        ("watch_config: [true]", "it must be true or false"),
        ("max_hold: sometimes", "or a number of seconds, or off"),
        ("max_body: 0", "it must be more than 0 bytes"),
        ("slots: 0", "it must be at least 1"),
        ("slots: many", "it must be a whole number, or a mapping"),
        ("slots: {a: 2.5}", "it must be a whole number"),
        ("slots: [1]", "it must be a whole number, or a mapping"),
        ("default_class: speech", "'speech' is not one of the classes; did you mean"),
        ("classes: [tts]", "it must be a mapping"),
        ("classes: {tts: write}", "it must be a mapping"),
        ("classes: {tts: {lease: reed}}", "it must be 'auto', 'read', 'write' or 'none'"),
        ("classes: {tts: {models: a}}", "it must be a list"),
        ("classes: {tts: {models: ['']}}", "it must be a model name or a pattern"),
        ("classes: {tts: {max_wait: 0}}", "it must be more than 0"),
        ("classes: {a__b: {}}", "a class name must be"),
        ("classes: {'no spaces': {}}", "a class name must be"),
        ("classes: {1: {}}", "a class name must be"),
        ("classes: {tts: {}, TTS: {}}", "stands twice"),
        ("classes: {tts: {models: [a]}, stt: {models: [a]}}", "'a' stands in classes.tts.models too"),
        ("allowed_hosts: ['gpu:9393']", "it must be a host name without a port"),
        ("allowed_hosts: ['*']", "it must be a host name without a port"),
        ("admin_port: 9393", "is listen_port too; it must be another one"),
        ("trusted_proxies: ['*']", "it must be an address or a network"),
        ("trusted_proxies: [localhost]", "it must be an address or a network"),
        ("trusted_proxies: [192.168.1.5/24]", "did you mean 192.168.1.0/24?"),
        ("trusted_proxies: 10.0.0.0/8", "it must be a list"),
        ("spool_dir: /nonexistent/spool", "must be a directory that exists"),
        (f"spool_dir: /{'x' * 300}", "must be a directory that exists"),
        ("data_dir: 5", "it must be the path of a directory"),
        ("[policy]", "must hold keys with values"),
        ("policy", "must hold keys with values"),
        ("policy: [", "not valid YAML in line 1"),
        ("policy: batch\n---\npolicy: fifo", "not valid YAML"),
        ("policy: !!python/name:os.system x", "not valid YAML"),
        ("max_wait: !!int abc", "not valid YAML"),
        ("a: &a [*a]", "nested too deeply"),
        ("a: " + "[" * 5000, "not valid YAML"),
        ("? [policy]\n: fifo", "a key must be plain text"),
        (b"policy: \x00", "not valid YAML"),
        (b"\xff\xfe\x00", "not valid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_says_what_is_right(
    text: str | bytes, expected: str, write: Any
) -> None:
    (found,) = problems(write(text))
    assert expected in found
    assert "\n" not in found
    assert len(found) < 400


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("GPU_LEASE_", "x", "GPU_LEASE_: unknown variable; did you mean"),
        ("GPU_LEASE_CONFIGS", "x", "did you mean GPU_LEASE_CONFIG?"),
        ("GPU_LEASE_UPSTREAM", "x", "did you mean GPU_LEASE_UPSTREAM_URL?"),
        ("GPU_LEASE_API_KEYS_FILES", "x", "did you mean GPU_LEASE_API_KEYS_FILE?"),
        ("GPU_LEASE_POLICY_FILE", "x", "unknown variable"),
        ("GPU_LEASE_CLASSES__", "x", "unknown variable"),
        ("GPU_LEASE_CLASSES____LEASE", "x", "unknown variable"),
        ("GPU_LEASE_CLASSES__TTS__LEASE__X", "x", "unknown variable"),
        ("GPU_LEASE_CLASSES__TTS__MODEL", "x", "did you mean GPU_LEASE_CLASSES__TTS__MODELS?"),
        ("GPU_LEASE_CLASS__STT__LEASE", "x", "did you mean GPU_LEASE_CLASSES__STT__LEASE?"),
        ("GPU_LEASE_SLOTS__TTS", "1", "unknown variable"),
        ("GPU_LEASE_POLICY__X", "1", "unknown variable"),
        ("GPU_LEASE_MAX_WIAT", "", "did you mean GPU_LEASE_MAX_WAIT?"),
        ("GPU_LEASE_PROXY_POLICY", "fifo", "did you mean GPU_LEASE_POLICY?"),
        ("GPU_LEASE_CLASSES", "tts", "must be JSON"),
        ("GPU_LEASE_CLASSES", '["tts"]', "it must be a mapping"),
        ("GPU_LEASE_CLASSES", '{"tts": {}, "TTS": {}}', "stands twice in this JSON"),
        ("GPU_LEASE_CLASSES", '{"tts": {"lease": "read", "lease": "none"}}', "stands twice in this JSON"),
        ("GPU_LEASE_CLASSES", '{"tts": {"leese": "read"}}', "did you mean classes.tts.lease?"),
        ("GPU_LEASE_CLASSES", '{"tts": {"models": "a"}}', "it must be a list"),
        ("GPU_LEASE_CLASSES", "[" * 100_000, "nested so deeply"),
        ("GPU_LEASE_CLASSES__TTS", "read", "must be JSON"),
        ("GPU_LEASE_CLASSES__TTS", "[]", "it must be a mapping"),
        ("GPU_LEASE_SLOTS", '{"a": 1, "a": 2}', "stands twice in this JSON"),
        ("GPU_LEASE_SLOTS", "1.5", "it must be a whole number, or a mapping"),
        ("GPU_LEASE_LISTEN_PORT", "9" * 5000, "it must be a whole number"),
        ("GPU_LEASE_MAX_WAIT", "9" * 5000, "it must be a duration"),
        ("GPU_LEASE_CONFIG", "/nonexistent/proxy.yaml", "cannot be read: No such file or directory"),
        ("GPU_LEASE_CONFIG", "/", "cannot be read: Is a directory"),
    ],
)
def test_a_mistake_in_a_variable_is_one_line_that_names_it(variable: str, value: str, expected: str) -> None:
    (found,) = problems(None, {variable: value})
    assert expected in found
    assert variable in found or variable == "GPU_LEASE_CONFIG"
    assert len(found) < 400


def test_a_key_of_a_class_that_is_no_mapping_is_still_one_mistake() -> None:
    (found,) = problems(None, {"GPU_LEASE_CLASSES__TTS": '"read"', "GPU_LEASE_CLASSES__TTS__LEASE": "read"})
    assert "it must be a mapping" in found


def test_variables_that_kubernetes_makes_of_a_service_called_gpu_lease_proxy_are_not_settings() -> None:
    injected = {
        "GPU_LEASE_PROXY_SERVICE_HOST": "10.0.0.1",
        "GPU_LEASE_PROXY_SERVICE_PORT": "9393",
        "GPU_LEASE_PROXY_SERVICE_PORT_HTTP": "9393",
        "GPU_LEASE_PROXY_PORT": "tcp://10.0.0.1:9393",
        "GPU_LEASE_PROXY_PORT_9393_TCP": "tcp://10.0.0.1:9393",
        "GPU_LEASE_PROXY_PORT_9393_TCP_ADDR": "10.0.0.1",
    }
    assert load(None, injected) == load(None, {})


def test_yaml_is_read_as_editors_and_the_schema_read_it(write: Any) -> None:
    text = "max_hold: off\nmax_queue: 010\nclasses: {stt: {models: [no, on, 1:30, 0o7, 1_000, 2026-01-01, =]}}"
    settings = load(write(text), {})
    assert (settings.max_hold, settings.max_queue) == (None, 10)
    assert settings.classes["stt"].models == ("no", "on", "1:30", "0o7", "1_000", "2026-01-01", "=")


@effort(deadline=None)
@given(st.one_of(st.text(max_size=60), st.binary(max_size=60)))
@example("a: *b")
@example("? : x")
@example("%YAML 9.9\n--- a")
@example("<<: {policy: fifo}")
@example("classes: {tts: {models: !!binary abc}}")
def test_no_file_whatsoever_makes_more_than_a_settings_error(tmp_path_factory: Any, text: str | bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        load(path, {})
    except SettingsError as error:
        assert error.problems  # noqa: PT017 - both outcomes are right, anything else is not


@effort(deadline=None)
@given(st.sampled_from(sorted(Settings.model_fields)), st.text(max_size=40))
def test_no_variable_whatsoever_makes_more_than_a_settings_error(key: str, value: str) -> None:
    try:
        load(None, {f"GPU_LEASE_{key.upper()}": value})
    except SettingsError as error:
        assert error.problems  # noqa: PT017


def test_built_by_hand_they_are_checked_too() -> None:
    with pytest.raises(ValidationError, match="max_turn"):
        Settings(max_turn=1, switch_after=2)


@pytest.mark.parametrize(("written", "auto"), [("switch_after", "max_turn"), ("max_turn", "switch_after")])
def test_a_number_does_not_contradict_auto(written: str, auto: str, write: Any) -> None:
    path = write(f"{written}: 7m\n{auto}: Auto")
    settings = load(path, {f"GPU_LEASE_{auto.upper()}": "auto"})
    assert settings == load(path, {})
    assert (getattr(settings, written), getattr(settings, auto)) == (420, None)


def test_auto_and_true_are_shown_as_one_writes_them() -> None:
    assert [
        shown(key, getattr(Settings(), key)) for key in ("switch_after", "max_turn", "max_hold", "watch_config")
    ] == [*("auto", "auto", "off", "true")]


# --- units


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        *(("30s", 30), ("10m", 600), ("1h30m", 5400), ("500ms", 0.5), ("2d", 172_800), ("1m30s500ms", 90.5)),
        *((" 1h 30m ", 5400), ("1.5h", 5400), ("0", 0), ("0.5", 0.5), (2, 2), (0.25, 0.25), ("0s", 0)),
    ],
)
def test_durations_people_write(written: object, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written",
    [
        *("", " ", "s", "abc", "1 30", "30 s x", "1m1m", "30m1h", "5S", "10M", "1h-3m", "--1", "1e3", "0x10", "inf"),
        *("nan", "30sec", "1:30", "٣s", True, None, [], float("nan"), float("inf"), "31d", 10**400, -1, "-5"),
    ],
)
def test_what_is_no_duration(written: object) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_duration(written)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("16MiB", 16 * 2**20),
        ("16MB", 16_000_000),
        ("16 mib", 16 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("7", 7),
        (7, 7),
        ("9B", 9),
    ],
)
def test_sizes_people_write(written: object, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize(
    "written", ["", "MiB", "16M", "16k", "1.5", 1.5, "-1", "0", 0, True, None, "1e6", "16 Mi B", 10**400]
)
def test_what_is_no_size(written: object) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_size(written)


@effort(deadline=None)
@given(st.integers(0, int(LONGEST * 1000)))
def test_a_duration_is_written_so_that_it_reads_as_the_same(milliseconds: int) -> None:
    assert round(parse_duration(format_duration(milliseconds / 1000)) * 1000) == milliseconds


@effort(deadline=None)
@given(st.integers(1, 2**50))
def test_a_size_is_written_so_that_it_reads_as_the_same(size: int) -> None:
    assert parse_size(format_size(size)) == size


# --- the example and the schema


def uncommented() -> str:
    text = re.sub(r"(?m)^#([a-z_]+:|  [a-z]+: )", r"\1", EXAMPLE.read_text())
    return text.replace("/llama-swap/config.yaml", __file__)  # which must exist


def test_the_example_as_shipped_changes_nothing() -> None:
    assert load(EXAMPLE, {}) == load(None, {})


def test_the_example_shows_every_key_with_its_default(write: Any) -> None:
    settings, layer = read(write(uncommented()), {})
    assert set(layer.values) == set(Settings.model_fields)
    examples = {
        "upstream_url",
        "upstream_api_key",
        "admin_port",
        "api_keys",
        "spool_dir",
        "data_dir",
        "llama_swap_config",
    }  # those that are unset
    assert {key for key in Settings.model_fields if getattr(settings, key) != getattr(Settings(), key)} == examples


def test_the_committed_schema_is_up_to_date() -> None:
    assert json.loads(SCHEMA.read_text()) == schema(), "run scripts/schema"


def check_schema(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("check-jsonschema")
    command = [str(part) for part in (program, "--schemafile", SCHEMA, path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_schema_takes_the_example_and_names_what_is_wrong(write: Any) -> None:
    assert EXAMPLE.read_text().startswith("# yaml-language-server: $schema=proxy.schema.json\n")
    good = check_schema(write(uncommented()))
    assert good.returncode == 0, good.stdout
    wrong = "polcy: x\npolicy: fair\nmax_wait: 5 parsecs\nmax_body: 1PB\nclasses: {tts: {leese: x}}\nlisten_port: -1"
    wrong += "\nmax_turn: x"
    bad = check_schema(write(wrong, "bad.yaml"))
    assert bad.returncode == 1
    for key in ("polcy", "policy", "max_wait", "max_body", "classes.tts", "listen_port", "max_turn"):
        assert key in bad.stdout
