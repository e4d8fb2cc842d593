"""The command line: exit codes, one line per mistake, and never a traceback."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import pytest

import proxy.demo
import proxy.server
from proxy import __version__
from proxy.__main__ import main
from proxy.check import report, warnings
from proxy.demo import DemoFailed
from proxy.healthcheck import problem
from proxy.settings import Settings, read

Environment = dict[str, str]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GPU_LEASE_") or name == "WEB_CONCURRENCY":
            monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What `serve` and `demo` would have run."""
    calls: list[Settings] = []

    def run(settings: Settings, **_: Any) -> int:
        calls.append(settings)
        return 0

    monkeypatch.setattr(proxy.server, "run", run)
    return calls


# --- serve


@pytest.mark.parametrize("arguments", [[], ["serve"]])
def test_without_a_command_it_serves(
    arguments: list[str], served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_LEASE_UPSTREAM_URL", "http://gpu:8080")
    assert main(arguments) == 0
    assert [settings.upstream_url for settings in served] == ["http://gpu:8080"]


@pytest.mark.parametrize("arguments", [["--config", "FILE"], ["serve", "--config", "FILE"], ["--config=FILE", "serve"]])
def test_the_file_can_be_named_before_and_behind_the_command(
    arguments: list[str], served: list[Settings], tmp_path: Path
) -> None:
    path = tmp_path / "proxy.yaml"
    path.write_text("upstream_url: http://gpu:8080\npolicy: fifo")
    assert main([argument.replace("FILE", str(path)) for argument in arguments]) == 0
    assert served[0].policy == "fifo"


@pytest.mark.parametrize(
    ("arguments", "concurrency", "mistakes"),
    [
        (["serve", "--workers", "2"], "", 1),
        (["--workers", "2"], "", 1),
        (["serve", "--workers", "0"], "", 1),
        (["serve"], "2", 1),
        ([], "auto", 1),
        (["demo"], "4", 1),
        (["check"], "4", 1),
        (["serve", "--workers=3"], "3", 2),
    ],
)
def test_case_76_more_than_one_worker_is_refused_with_the_reason(
    arguments: list[str],
    concurrency: str,
    mistakes: int,
    served: list[Settings],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GPU_LEASE_UPSTREAM_URL", "http://gpu:8080")
    monkeypatch.setenv("WEB_CONCURRENCY", concurrency)
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == mistakes
    assert all("the lock that shares the GPU lives in one process" in line for line in lines)
    assert served == []


@pytest.mark.parametrize(("arguments", "concurrency"), [(["serve", "--workers", "1"], ""), (["serve"], "1")])
def test_one_worker_may_be_asked_for(
    arguments: list[str], concurrency: str, served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_LEASE_UPSTREAM_URL", "http://gpu:8080")
    monkeypatch.setenv("WEB_CONCURRENCY", concurrency)
    assert main(arguments) == 0
    assert len(served) == 1


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_broken_llama_swap_configuration_is_one_line_for_each_mistake_and_exit_code_2(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "llama-swap.yaml"
    path.write_text(
        "apiKeys: ['hunter2', 'two words']\n"
        "models: {a: {aliases: [x]}, b: {aliases: [x]}}\n"
        "groups: {g: {members: [a, nobody]}}\n"
        "selectors: {s: {strategy: best, targets: [a]}}\n"
    )
    monkeypatch.setenv("GPU_LEASE_LLAMA_SWAP_CONFIG", str(path))
    monkeypatch.setenv("GPU_LEASE_UPSTREAM_URL", "http://gpu:8080")
    monkeypatch.setattr(asyncio, "run", lambda task: task.close())  # nothing is to be served
    assert main([command]) == 2
    captured = capsys.readouterr()
    lines = [line.partition(f"{path}: ")[2].partition(":")[0] for line in captured.err.splitlines()]
    assert sorted(lines) == ["apiKeys", "groups.g", "models.b.aliases", "selectors.s.strategy"]
    assert captured.out == ""
    assert "hunter2" not in captured.err
    assert "two words" not in captured.err


@pytest.mark.parametrize("command", ["serve", "check", "demo"])
def test_mistakes_are_one_line_each_and_exit_code_2(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPU_LEASE_POLCY", "fifo")
    monkeypatch.setenv("GPU_LEASE_MAX_WAIT", "long")
    monkeypatch.setenv("WEB_CONCURRENCY", "2")
    assert main([command]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(":")[1].split()[0] for line in captured.err.splitlines()] == [
        *("WEB_CONCURRENCY", "GPU_LEASE_POLCY", "max_wait")
    ]


def test_a_port_in_use_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("GPU_LEASE_UPSTREAM_URL", "http://gpu:8080")
        monkeypatch.setenv("GPU_LEASE_LISTEN_PORT", str(taken.getsockname()[1]))
        assert main(["serve"]) == 1
    *log, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"gpu-lease-proxy: cannot listen on 127\.0\.0\.1, port \d+: Address already in use", last)
    assert "Traceback" not in "".join(log)


@pytest.mark.parametrize(
    "arguments", [["sevre"], ["--port", "1"], ["check", "--workers", "1"], ["serve", "--workers", "x"]]
)
def test_an_option_that_does_not_exist_is_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"gpu-lease-proxy {__version__}\n"


# --- check


def check(*names: str, **environ: str) -> str:
    return report(*read(None, {f"GPU_LEASE_{key.upper()}": value for key, value in environ.items()}), names)


def rows(text: str, title: str) -> list[list[str]]:
    """The table below `title`, split where the columns are."""
    lines = text.partition(f"{title}\n")[2].partition("\n\n")[0].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines]


def test_check_prints_each_setting_with_its_source_and_no_secret() -> None:
    text = check(policy="fifo", api_keys="hunter2", upstream_api_key="hunter2")
    found = {row[0]: row[1:] for row in rows(text, "Settings")}
    assert set(Settings.model_fields) - {"classes"} <= set(found)
    assert found["policy"] == ["fifo", "GPU_LEASE_POLICY"]
    assert found["max_wait"] == ["9m", "default"]
    assert found["max_body"] == ["256MiB", "default"]
    assert found["api_keys"] == ["**********", "GPU_LEASE_API_KEYS"]
    assert "hunter2" not in text


def test_check_prints_how_names_are_classified_and_why() -> None:
    classes = '{"tts": {"models": ["speaker", "voice-*"]}, "stt": {"lease": "write"}}'
    found = rows(check("mystery", "whisper", "voice-1", classes=classes, slots='{"speaker": 2}'), "Models")
    assert found == [
        ["MODEL", "CLASS", "LEASE", "SLOTS", "WHY"],
        ["speaker", "tts", "write", "2", "class: classes.tts.models has speaker"],
        ["lease: classes.tts.lease is auto"],
        ["mystery", "llm", "read", "10", "class: default_class, except on a speech, transcription or image route"],
        ["lease: classes.llm.lease is auto"],
        ["whisper", "stt", "write", "10", "class: built-in pattern *whisper*"],
        ["lease: classes.stt.lease is write"],
        ["voice-1", "tts", "write", "10", "class: classes.tts.models has voice-*"],
        ["lease: classes.tts.lease is auto"],
    ]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"listen_host": "0.0.0.0"}, "whoever reaches it may use it"),
        ({"max_spool": "1MiB"}, "max_spool is below max_body"),
        ({"max_wait": "11m"}, "max_wait of llm is 11m: most clients give up after 10m"),
        ({"classes": '{"tts": {"max_wait": "1h"}}'}, "max_wait of tts is 1h"),
        ({"default_class": "embed"}, "default_class is embed, which waits for nothing"),
        ({"classes": '{"tts": {"lease": "none"}}'}, "classes.tts.lease is none"),
    ],
)
def test_check_warns_of_what_is_allowed_and_hardly_meant(environ: Environment, expected: str) -> None:
    quiet = check(upstream_url="http://gpu:8080").partition("Warnings\n")[2]
    assert quiet == "  none\n"
    assert expected in check(upstream_url="http://gpu:8080", **environ).partition("Warnings\n")[2]


def test_check_tells_that_without_upstream_url_the_demo_runs() -> None:
    assert warnings(Settings()) == ["upstream_url is unset: `serve` runs the demo, with a simulated llama-swap."]


def test_check_is_a_command_with_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "kokoro"]) == 0
    assert rows(capsys.readouterr().out, "Models")[1][:2] == ["kokoro", "tts"]


# --- healthcheck


@contextmanager
def answering(status: int, seconds: float = 0) -> Iterator[int]:
    """A server on a loopback port that answers every GET with `status`, and only at /-/healthz."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(seconds)
            self.send_response(status if self.path == "/-/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_healthcheck_asks_the_configured_address(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with answering(200) as port:
        monkeypatch.setenv("GPU_LEASE_LISTEN_HOST", host)
        monkeypatch.setenv("GPU_LEASE_LISTEN_PORT", str(port))
        assert main(["healthcheck"]) == 0


def test_healthcheck_is_1_for_every_failure_since_docker_knows_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(503) as port:
        assert problem(Settings(listen_port=port)) == "/-/healthz answered 503"
    assert "refused" in (problem(Settings(listen_port=port)) or "")
    with answering(200, seconds=0.5) as port:
        assert "timed out" in (problem(Settings(listen_port=port), timeout=0.1) or "")
    assert "port is chosen at start" in (problem(Settings(listen_port=0)) or "")
    monkeypatch.setenv("GPU_LEASE_LISTEN_PORT", str(port))
    assert main(["healthcheck"]) == 1
    monkeypatch.setenv("GPU_LEASE_POLCY", "x")
    assert main(["healthcheck"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_healthcheck_imports_neither_the_server_nor_an_http_client() -> None:
    program = "import sys; from proxy.__main__ import main; main(['healthcheck']); print(*sys.modules)"
    environ = os.environ | {"GPU_LEASE_LISTEN_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True)
    assert {"uvicorn", "aiohttp", "httpx", "starlette", "prometheus_client"} & {*done.stdout.split()} == set()


# --- demo


class Demo:
    """The demo as a person starts it, in a process group of its own as a terminal would make one."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        settings = {
            "GPU_LEASE_LISTEN_PORT": "0",
            **{f"GPU_LEASE_{key.upper()}": value for key, value in environ.items()},
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "proxy", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
            process_group=0,
        )
        self.text = ""
        for line in self.process.stdout or ():
            self.text += line
            if line.startswith("Ctrl-C"):
                break

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate(timeout=20)

    @property
    def commands(self) -> list[list[str]]:
        return [shlex.split(line) for line in self.text.splitlines() if line.startswith("  curl ")]

    def simulators(self) -> list[int]:
        """The children of the demo that still run."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(number) for number in path.read_text().split()]


def runs(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@needs_curl
@pytest.mark.parametrize("arguments", [[], ["demo"]])
def test_the_demo_answers_what_it_says_one_should_try(arguments: list[str], tmp_path: Path) -> None:
    with Demo(*arguments) as demo:
        answers = [run(command, tmp_path) for command in demo.commands]
        (page,) = re.findall(r"http://\S+/-/(?=\s)", demo.text)
        assert "<h1>GPU queue</h1>" in run(["curl", page], tmp_path)
    assert len(answers) == 3
    assert answers[0].startswith("data: {")
    assert answers[0].rstrip().endswith("data: [DONE]")
    assert (tmp_path / "speech.wav").read_bytes().startswith(b"RIFF")
    assert '"embedding"' in answers[2]


def run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(
        [*command, "--fail", "--silent"], cwd=cwd, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


@needs_curl
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_demo_and_simulator_within_two_seconds_also_during_a_stream(
    number: signal.Signals, tmp_path: Path
) -> None:
    with Demo() as demo:
        (simulator,) = demo.simulators()
        assert os.getsid(simulator) == simulator, "a terminal's Ctrl-C would end it before the proxy"
        stream = subprocess.Popen(demo.commands[0], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert stream.stdout is not None
        assert stream.stdout.readline().startswith(b"data:")
        begun = time.monotonic()
        os.killpg(demo.process.pid, number)
        _, errors = demo.process.communicate(timeout=20)
        assert time.monotonic() - begun < 4, "2 s are promised; twice that for a busy machine"
        assert demo.process.returncode == 0
        assert "Traceback" not in errors
        assert not runs(simulator)
        stream.communicate()


def test_a_closed_terminal_ends_the_simulator_too() -> None:
    with Demo() as demo:
        (simulator,) = demo.simulators()
        os.killpg(demo.process.pid, signal.SIGHUP)
        _, errors = demo.process.communicate(timeout=20)
        assert "Traceback" not in errors
        assert not runs(simulator)


def test_ctrl_c_while_the_demo_starts_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(proxy.demo, "_url", interrupted)
    assert main(["demo"]) == 0


def test_a_simulator_that_does_not_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proxy.demo, "_SIMULATOR", (sys.executable, "-c", "print('hello')"))
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "gpu-lease-proxy: the simulated llama-swap did not start\n"


def test_the_demo_puts_the_simulator_in_the_place_of_the_configured_upstream(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "print('listening on http://127.0.0.1:1', flush=True); import time; time.sleep(60)"
    monkeypatch.setattr(proxy.demo, "_SIMULATOR", (sys.executable, "-c", script))
    monkeypatch.setenv("GPU_LEASE_UPSTREAM_URL", "http://gpu:8080")
    monkeypatch.setenv("GPU_LEASE_LISTEN_PORT", "1234")
    assert main(["demo"]) == 0
    (settings,) = served
    assert (settings.upstream_url, settings.listen_port, settings.shutdown_grace) == ("http://127.0.0.1:1", 1234, 1.0)


def test_a_simulator_that_ignores_signals_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('listening on http://127.0.0.1:1', flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(proxy.demo, "_SIMULATOR", (sys.executable, "-c", script))
    with proxy.demo.simulator():
        begun = time.monotonic()
    assert time.monotonic() - begun < 5


def test_with_keys_the_demo_shows_where_the_key_goes() -> None:
    with Demo(api_keys="hunter2") as demo:
        assert all("Authorization: Bearer YOUR-KEY" in command for command in demo.commands)
        assert "hunter2" not in demo.text


def test_a_failed_demo_is_its_own_error() -> None:
    assert not issubclass(DemoFailed, OSError)
