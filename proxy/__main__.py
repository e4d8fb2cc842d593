"""The command line: `gpu-lease-proxy serve | check | demo | healthcheck | --version`.

What a command does not need is not imported for it, so that the health check of a container is cheap. A mistake in the
settings is one line on standard error and exit code 2; a traceback is always a bug. `serve` handles SIGTERM before it
loads anything large: for the first process of a container the kernel drops a signal that has no handler.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from proxy import __version__
from proxy.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.settings import Settings

PROGRAM = "gpu-lease-proxy"
OK, FAILED, MISTAKE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 when it failed, 2 for a mistake in options or settings."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except SettingsError as error:
        _complain(error.problems)
        return MISTAKE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Every model waits for its turn on the GPU.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.set_defaults(run=_serve, config=None, workers=1)
    _add_options(parser, workers=True)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", description="Without one: serve.")
    for name, run, text in (
        ("serve", _serve, "stand in front of llama-swap; the demo where no upstream_url is set"),
        ("check", _check, "print the settings, and how models are classified"),
        ("demo", _demo, "stand in front of a simulated llama-swap"),
        ("healthcheck", _healthcheck, "exit 0 if the proxy with these settings answers"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        _add_options(command, workers=name == "serve")
        if name == "check":
            command.add_argument("names", nargs="*", metavar="NAME", help="a further model name to classify")
    return parser


def _add_options(parser: argparse.ArgumentParser, *, workers: bool) -> None:
    # SUPPRESS: an option before the command must not be overwritten by its default after the command.
    parser.add_argument(
        "--config", type=Path, metavar="PATH", default=argparse.SUPPRESS, help="the YAML file (else GPU_LEASE_CONFIG)"
    )
    if workers:
        parser.add_argument("--workers", type=int, metavar="1", default=argparse.SUPPRESS, help="only 1 is possible")


def _complain(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"{PROGRAM}: {line}", file=sys.stderr)


def _worker_problems(workers: int, environ: Mapping[str, str]) -> list[str]:
    why = "must be 1: the lock that shares the GPU lives in one process, and two locks are none"
    problems = [f"--workers: {workers} {why}"] if workers != 1 else []
    concurrency = environ.get("WEB_CONCURRENCY", "").strip()
    if concurrency not in {"", "1"}:
        problems.append(f"WEB_CONCURRENCY: {concurrency} {why}; unset it")
    return problems


def _load(options: argparse.Namespace) -> Settings:
    """The settings. Raises SettingsError, which holds a wrong number of workers too."""
    from proxy.settings import load  # noqa: PLC0415 - see the module's text

    problems = _worker_problems(options.workers, os.environ)
    try:
        settings = load(options.config, os.environ)
    except SettingsError as error:
        problems += error.problems
    if problems:
        raise SettingsError(problems)
    return settings


def _serve(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(OK))  # until the server has handlers of its own
    settings = _load(options)
    if settings.upstream_url is None:
        return _run_demo(settings)
    from proxy.server import run  # noqa: PLC0415

    try:
        return run(settings, environ=os.environ)
    except OSError as error:
        return _cannot_listen(settings, error)


def _demo(options: argparse.Namespace) -> int:
    return _run_demo(_load(options))


def _run_demo(settings: Settings) -> int:
    from proxy.demo import DemoFailed, run_demo  # noqa: PLC0415

    try:
        return run_demo(settings)
    except DemoFailed as error:
        _complain([str(error)])
        return FAILED
    except OSError as error:
        return _cannot_listen(settings, error)


def _cannot_listen(settings: Settings, error: OSError) -> int:
    _complain([f"cannot listen on {settings.listen_host}, port {settings.listen_port}: {error.strerror or error}"])
    return FAILED


def _check(options: argparse.Namespace) -> int:
    from proxy.check import report  # noqa: PLC0415
    from proxy.settings import read  # noqa: PLC0415

    _load(options)
    print(report(*read(options.config, os.environ), options.names), end="")
    return OK


def _healthcheck(options: argparse.Namespace) -> int:
    """A container's health check may exit with 0 or 1 only; everything that is wrong is 1."""
    from proxy.healthcheck import problem  # noqa: PLC0415
    from proxy.settings import load  # noqa: PLC0415

    try:
        wrong = problem(load(options.config, os.environ))
    except SettingsError as error:
        _complain(error.problems)
        return FAILED
    if wrong:
        _complain([wrong])
    return FAILED if wrong else OK


if __name__ == "__main__":
    sys.exit(main())
