"""`python -m proxy.simulator`: the simulator as a process of its own.

It prints one line, `listening on http://HOST:PORT`, once it answers. SIGHUP makes it read its configuration
again, which stops every model. SIGTERM and SIGINT end it at once, with exit code 0: running streams are cut.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from proxy.simulator.app import DEFAULT_TIME_SCALE, create_app
from proxy.simulator.config import Config, ConfigError, default_config, load_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_hangup: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_hangup = on_hangup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        print(f"listening on http://{host}:{port}", flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal once more at the end, which makes the exit code 143.
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self.on_hangup)
        yield

    def _stop(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for nothing: what still runs is cut by the end of the event loop."""


def _is_no_cut_stream(record: logging.LogRecord) -> bool:
    """False for the traceback of a stream that the end of the process has cut."""
    return record.exc_info is None or record.exc_info[0] is not asyncio.CancelledError


def _read(path: Path | None) -> Config:
    return default_config() if path is None else load_config(path)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proxy.simulator", description="A simulated llama-swap.")
    parser.add_argument("--config", type=Path, help="a llama-swap configuration")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--time-scale", type=float, default=DEFAULT_TIME_SCALE, help="multiplies all seconds")
    parser.add_argument("--http", choices=("h11", "httptools"), default="h11")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    chosen = _parse(arguments)
    try:
        config = _read(chosen.config)
    except (OSError, ConfigError) as error:
        print(f"simulator: {error}", file=sys.stderr)
        return 2
    app = create_app(config, chosen.time_scale)

    def reload() -> None:
        try:
            app.state.reload(_read(chosen.config))
        except (OSError, ConfigError) as error:
            print(f"simulator: the old configuration stays: {error}", file=sys.stderr)

    settings = uvicorn.Config(
        app,
        http=chosen.http,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
    )
    logging.getLogger("uvicorn.error").addFilter(_is_no_cut_stream)
    with _listener(chosen.host, chosen.port) as listener:
        _Server(settings, reload).run(sockets=[listener])
    return 0


def _listener(host: str, port: int) -> socket.socket:
    # asyncio sets TCP_NODELAY only where the protocol is named; without it each answer takes 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


if __name__ == "__main__":
    sys.exit(main())
