"""The command line: `gpu-lease-proxy serve | check | demo | healthcheck | queue | top | --version`.

What a command does not need is not imported for it, so that the health check of a container is cheap. A mistake in the
settings is one line on standard error and exit code 2; a traceback is always a bug. `serve` handles SIGTERM before it
loads anything large: for the first process of a container the kernel drops a signal that has no handler.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy import __version__
from proxy.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.asker import Asker
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
    _add_lookers(commands)
    return parser


def _add_lookers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, run, text in (
        ("queue", _queue, "print who holds the GPU and who waits, as a running proxy tells"),
        ("top", _top, "watch it in this terminal until Ctrl-C"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text}. Without --url: the proxy of the settings.")
        command.set_defaults(run=run)
        _add_options(command, workers=False)
        command.add_argument("--url", help="where the proxy listens, such as http://gpu:9393")
        command.add_argument("--key", help="one of its api_keys; without --url the first of the settings'")
        command.add_argument("--key-file", type=Path, metavar="PATH", help="a file that holds it")
        if name == "queue":
            command.add_argument("--json", action="store_true", help="as /-/queue gives it")


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


def _asker(options: argparse.Namespace) -> Asker:
    """Whoever asks the proxy that is meant. Raises SettingsError."""
    from proxy.asker import Asker, read_key  # noqa: PLC0415
    from proxy.settings import load  # noqa: PLC0415

    key = read_key(options.key_file) if options.key_file else options.key
    if options.url:
        return Asker.of_url(options.url, key)
    return Asker.of_settings(load(options.config, os.environ), key)


def _queue(options: argparse.Namespace) -> int:
    from proxy.asker import NoAnswer  # noqa: PLC0415

    try:
        queue = _asker(options).queue()
    except NoAnswer as error:
        _complain([str(error)])
        return FAILED
    try:
        _print(queue, as_json=options.json)
    except BrokenPipeError:  # of `queue | head`; what is still in the buffer must not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK


def _print(queue: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(queue, indent=2), flush=True)
    else:
        from proxy.top import print_once  # noqa: PLC0415

        print_once(queue)


def _top(options: argparse.Namespace) -> int:
    from proxy.asker import NoAnswer  # noqa: PLC0415
    from proxy.top import watch  # noqa: PLC0415

    try:
        watch(_asker(options))
    except NoAnswer as error:
        _complain([str(error)])
        return FAILED
    except KeyboardInterrupt:
        return OK
    return OK


if __name__ == "__main__":
    sys.exit(main())
