"""The server around the application: signals, the listening socket, log lines. Its whole end: e2e/test_shutdown.py."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
import uvicorn

from harness import InProcess, RawClient, Upstream, hang, slow
from proxy import logs
from proxy.app import App
from proxy.errors import CutStream
from proxy.server import Server, _listen, _url
from proxy.settings import Settings


@pytest.fixture
def handlers() -> Iterator[None]:
    """What the process does at a signal, put back afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# -- signals


def make_server(grace: float = 0.0) -> Server:
    app = App(Settings.model_validate({"upstream_url": "http://127.0.0.1:9"}))
    return Server(uvicorn.Config(app, log_config=None), app, grace, lambda: None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_drains_and_the_second_cuts(handlers: None, number: int) -> None:
    server = make_server(grace=30)
    leases = server._app.leases
    with server.capture_signals():
        os.kill(os.getpid(), number)
        async with asyncio.timeout(5):
            await leases.drained.wait()
        assert leases.draining
        assert not server.force_exit
        os.kill(os.getpid(), number)
        for _ in range(100):
            if server.force_exit:
                break
            await asyncio.sleep(0.01)
        assert server.should_exit
        assert server.force_exit


async def test_a_signal_after_the_end_does_not_change_the_exit_code(handlers: None) -> None:
    with make_server().capture_signals():
        pass
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)


async def test_without_grace_the_server_does_not_wait_for_leases() -> None:
    async with (
        Upstream(hang()) as upstream,
        InProcess(upstream.url, shutdown_grace=0) as proxy,
        RawClient(proxy.port) as client,
    ):
        client.chat()
        await proxy.until(lambda: len(proxy.app.leases.lock.held) == 1)
        proxy.signal()
        await proxy.ended(within=3)
        await proxy.idle()


async def test_the_listener_is_open_for_as_long_as_a_lease_is_held() -> None:
    async with Upstream(slow(100)) as upstream, InProcess(upstream.url) as proxy, RawClient(proxy.port) as client:
        client.chat()
        await client.until(b"data: ")
        proxy.signal()
        for _ in range(3):
            await client.until(b"data: ")
            async with RawClient(proxy.port) as other:
                other.chat()
                assert (await other.answer()).status == 503
        client.close()
        await proxy.ended()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", proxy.port)


# -- the listening socket


def test_the_url_is_one_that_can_be_opened() -> None:
    with _listen("127.0.0.1", 0) as listener:
        assert _url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    try:
        listener = _listen("::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert _url(listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_a_port_that_is_taken_is_an_error_at_the_start() -> None:
    with _listen("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use"):
        _listen("127.0.0.1", listener.getsockname()[1])


def test_a_port_in_its_last_wait_can_be_taken_again() -> None:
    """A restart must not have to wait for the kernel to forget old connections."""
    with _listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.close()
            assert client.recv(1) == b""
    _listen("127.0.0.1", port).close()


# -- log lines


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Configure the log, and read back what was written; everything is put back afterwards."""
    root = logging.getLogger()
    handlers, level, server = root.handlers[:], root.level, logging.getLogger("uvicorn.error").filters[:]

    def configure(log_format: Any) -> Any:
        logs.configure(log_format)

        def read() -> list[str]:
            return capsys.readouterr().err.splitlines()

        return read

    yield configure
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("uvicorn.error").filters[:] = server
    structlog.reset_defaults()


def test_json_lines_hold_event_level_time_and_fields(lines: Any) -> None:
    read = lines("json")
    structlog.get_logger("gpu_lease_proxy").info("slow_wait", seconds=2.5, held_by=["a"])
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    ours, servers = (json.loads(line) for line in read())
    assert ours.pop("timestamp").endswith("Z")
    assert ours == {"event": "slow_wait", "level": "info", "seconds": 2.5, "held_by": ["a"]}
    assert (servers["event"], servers["level"]) == ("Invalid HTTP request received.", "warning")


def test_a_fault_is_one_json_line_with_its_traceback(lines: Any) -> None:
    read = lines("json")
    structlog.get_logger("gpu_lease_proxy").error("internal_error", exc_info=RuntimeError("a fault"))
    (line,) = read()
    assert "RuntimeError: a fault" in json.loads(line)["exception"]


def test_plain_lines_are_for_people_and_have_no_colours_in_a_file(lines: Any) -> None:
    read = lines("plain")
    structlog.get_logger("gpu_lease_proxy").info("listening", url="http://x")
    (line,) = read()
    assert "listening" in line
    assert "url=http://x" in line
    assert "\x1b" not in line


@pytest.mark.parametrize("error", [CutStream(), asyncio.CancelledError()])
def test_what_is_cut_on_purpose_leaves_no_traceback(lines: Any, error: BaseException) -> None:
    read = lines("json")
    logging.getLogger("uvicorn.error").error("Exception in ASGI application\n", exc_info=error)
    assert read() == []


def test_any_other_fault_in_the_application_is_logged(lines: Any) -> None:
    read = lines("json")
    logging.getLogger("uvicorn.error").error("Exception in ASGI application\n", exc_info=RuntimeError("a fault"))
    assert len(read()) == 1


@pytest.mark.parametrize("log_format", ["plain", "json"])
def test_the_chatter_of_libraries_is_left_out(lines: Any, log_format: str) -> None:
    read = lines(log_format)
    for name in ("httpx", "uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(name).info("chatter")
    assert read() == []
