"""`queue` and `top`: what a running proxy says, in a terminal; one line and exit code 1 where nothing answers."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import Proxy, Upstream, after, clients
from proxy.__main__ import main
from proxy.asker import Asker, NoAnswer
from proxy.errors import SettingsError
from proxy.settings import Settings
from proxy.top import print_once

NAMES = {"model": "tts-a", "class": "tts", "mode": "write"}
QUEUE: dict[str, Any] = {
    "policy": "batch",
    "turn": {"class": "tts", "mode": "write", "models": ["tts-a"], "seconds": 61.0},
    "holders": [{"id": 1, **NAMES, "held_seconds": 3.25, "client": "127.0.0.1"}],
    "waiters": [{"id": 2, "position": 1, **NAMES, "waited_seconds": 125.0, "client": "key-012345", "job": True}],
    "kept": [{**NAMES, "waited_seconds": 9.0, "seconds_left": 51.0}],
    "finished": [
        {
            "id": 3,
            **NAMES,
            "outcome": "timeout",
            "waited_seconds": 60.0,
            "held_seconds": None,
            "ended_at": 0,
            "client": "b",
        }
    ],
}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GPU_LEASE_"):
            monkeypatch.delenv(name)


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    end = asyncio.Event()
    async with (
        Upstream(after(end)) as upstream,
        Proxy(upstream.url, api_keys=["secret"]) as proxy,
        clients(proxy.port, 2) as two,
    ):
        proxy.client.headers["x-api-key"] = "secret"
        for client in two:
            client.tts("X-Api-Key: secret")
        await proxy.until(waiters=1, holders=1)
        yield proxy
        end.set()


async def run(*arguments: str, **environ: str) -> tuple[int, str, str]:
    """A command in a process of its own: exit code, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", *arguments),
        env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode or 0, out.decode(), err.decode()


def printed(queue: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_once(queue, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_queue_is_shown_with_all_that_is_in_it() -> None:
    text = printed(QUEUE)
    for part in ("1 on the GPU, 1 waiting. Turn of tts (tts-a) for 1 min 01 s.", "3.2 s", "2 (job)", "2 min 05 s"):
        assert part in text
    for part in ("key-012345", "Kept places", "timeout"):
        assert part in text


def test_an_idle_queue_is_shown_too() -> None:
    text = printed({"policy": "fifo", "turn": None, "holders": [], "waiters": [], "kept": []})
    assert "0 on the GPU, 0 waiting. No turn has begun yet." in text


def test_case_77_a_name_is_neither_markup_nor_a_command_to_the_terminal() -> None:
    names = [{**QUEUE["holders"][0], "model": name} for name in ("[red]a[/red]", "[/]", "\x1b[2Jb\x07\r\n", "\u202ec")]
    text = printed({**QUEUE, "holders": names})
    assert "[red]a[/red]" in text
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)


async def test_queue_prints_what_the_proxy_says(proxy: Proxy) -> None:
    code, out, err = await run("queue", "--json", "--url", proxy.url, "--key", "secret")
    queue = json.loads(out)
    assert (code, err, len(queue["holders"]), len(queue["waiters"])) == (0, "", 1, 1)
    code, out, err = await run("queue", "--url", proxy.url, "--key", "secret")
    assert (code, err) == (0, "")
    assert "1 on the GPU, 1 waiting." in out


async def test_without_a_url_it_asks_the_proxy_of_the_settings_with_its_key(proxy: Proxy, tmp_path: Path) -> None:
    config = tmp_path / "proxy.yaml"
    config.write_text(f"listen_port: {proxy.port}\napi_keys: [secret]\n")
    code, out, _ = await run("queue", "--json", GPU_LEASE_CONFIG=str(config), HTTP_PROXY="http://127.0.0.1:9")
    assert (code, len(json.loads(out)["waiters"])) == (0, 1)


async def test_top_shows_the_queue_once_where_there_is_no_terminal(proxy: Proxy, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    code, out, err = await run("top", "--url", proxy.url, "--key-file", str(tmp_path / "key"))
    assert (code, err) == (0, "")
    assert "1 on the GPU, 1 waiting." in out


async def test_top_goes_on_in_a_terminal_until_ctrl_c(proxy: Proxy) -> None:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "top", "--url", proxy.url, "--key", "secret"),
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
        stdin=theirs,
        stdout=theirs,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    os.close(theirs)
    text = b""
    async with asyncio.timeout(30):
        while text.count(b"1 waiting") < 2:
            text += await asyncio.to_thread(os.read, ours, 65536)
        process.send_signal(2)
        reader = asyncio.create_task(asyncio.to_thread(_drain, ours))
        assert await process.wait() == 0
        await reader
    assert process.stderr is not None
    assert await process.stderr.read() == b""
    os.close(ours)


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:  # the other end is closed
        return


async def test_a_pipe_that_closes_early_is_no_error(proxy: Proxy) -> None:
    command = f"{sys.executable} -m proxy queue --json --url {proxy.url} --key secret | head -c 1"
    process = await asyncio.create_subprocess_shell(
        command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert (out, err) == (b"{", b"")


async def test_a_wrong_key_is_one_line(proxy: Proxy) -> None:
    for key, article in (((), "a"), (("--key", "wrong"), "another")):
        code, out, err = await run("queue", "--url", proxy.url, *key)
        assert (code, out) == (1, "")
        assert err == f"gpu-lease-proxy: {proxy.url} wants {article} key: --key or --key-file\n"


@pytest.mark.parametrize("command", ["queue", "top"])
def test_nothing_that_answers_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--url", "http://127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-lease-proxy: no answer from http://127.0.0.1:1: ")


async def test_another_server_is_not_taken_for_the_proxy() -> None:
    async with Upstream() as other:
        asker = Asker.of_url(other.url, None)
        with pytest.raises(NoAnswer, match="not as this proxy does; mind admin_port"):
            await asyncio.to_thread(asker.queue)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--url", "gpu:9393"], "--url: got 'gpu:9393'; it must be a host and a port"),
        (["--url", "http://gpu:x"], "it must be a host and a port"),
        (["--url", "http://gpu:9393/-/"], "it must be a host and a port"),
        (["--url", "http://a", "--key-file", "/nowhere"], "--key-file: /nowhere cannot be used: No such file"),
        (["--config", "/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_in_the_options_are_one_line(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["queue", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def test_whom_it_asks() -> None:
    settings = Settings.model_validate({"listen_host": "0.0.0.0", "listen_port": 80, "api_keys": ["a", "b"]})
    assert Asker.of_settings(settings, None) == Asker("http", "127.0.0.1", 80, "a")
    apart = Settings.model_validate({"listen_host": "::", "listen_port": 80, "admin_port": 81})
    assert Asker.of_settings(apart, "k") == Asker("http", "::1", 81, "k")
    assert Asker.of_settings(apart, "k").url == "http://[::1]:81"
    assert Asker.of_url("https://gpu", None) == Asker("https", "gpu", 443, None)
    with pytest.raises(SettingsError, match="let the proxy choose its port"):
        Asker.of_settings(Settings.model_validate({"listen_port": 0}), None)
