"""The demo: a simulated llama-swap on a loopback port, and the proxy in front of it.

The simulator is a process of its own, because what the demo shows is a proxy between processes. It gets its own
session, so that Ctrl-C, which a terminal sends to everybody in front of it, ends the proxy first and in order; whoever
ends the demo in whatever way it can notice, the simulator goes with it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from proxy.settings import Settings

GRACE = 1.0
"""Seconds that running requests get at Ctrl-C; a demo must be over within two."""

START_TIMEOUT = 20.0
"""Seconds until the simulator must listen; it takes half a second on a quiet machine."""

END_TIMEOUT = 0.5
"""Seconds that the simulator has to end by itself."""

_READY = re.compile(r"listening on (http://\S+)")
_SIMULATOR = (sys.executable, "-m", "proxy.simulator", "--port", "0")


class DemoFailed(Exception):
    """The demo could not start; the message says why."""


def run_demo(settings: Settings) -> int:
    """Run the demo until Ctrl-C; returns the exit code.

    Raises DemoFailed when the simulator does not start, OSError when the proxy cannot listen.
    """
    with _ended_by_signals():
        try:
            with simulator() as url:
                demo = {"upstream_url": url, "llama_swap_config": None, "shutdown_grace": GRACE}
                return _serve(settings.model_copy(update=demo))
        except KeyboardInterrupt:
            return 0


def _serve(settings: Settings) -> int:
    from proxy.server import run  # noqa: PLC0415 - a second to import, in which the simulator starts

    return run(settings, started=lambda url: print(_welcome(url, keyed=settings.api_keys is not None), flush=True))


@contextlib.contextmanager
def simulator() -> Iterator[str]:
    """A running simulator's base URL. Raises DemoFailed."""
    with subprocess.Popen(  # noqa: S603 - our own module
        _SIMULATOR, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        output: queue.SimpleQueue[str] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(process, output), daemon=True)
        reader.start()
        try:
            yield _url(output)
        finally:
            _end(process)
            reader.join()


def _read(process: subprocess.Popen[str], output: queue.SimpleQueue[str]) -> None:
    """Read to the end, for a full pipe would stop the simulator; an empty line tells of the end."""
    for line in process.stdout or ():
        output.put(line)
    output.put("")


def _url(output: queue.SimpleQueue[str]) -> str:
    line = "\n"
    with contextlib.suppress(queue.Empty):
        while line:
            line = output.get(timeout=START_TIMEOUT)
            if match := _READY.search(line):
                return match[1]
    raise DemoFailed("the simulated llama-swap did not start")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a closed terminal, end the demo as Ctrl-C does."""

    def terminate(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            os.kill(os.getpid(), signal.SIGTERM)  # which the server handles once it runs
        else:
            raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, terminate) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


_EXAMPLES = (
    (
        "A chat, streamed",
        ("--no-buffer",),
        "/v1/chat/completions",
        '{"model":"chat-a","stream":true,"messages":[{"role":"user","content":"Tell me a story"}]}',
    ),
    (
        "Speech, into speech.wav",
        ("--output", "speech.wav"),
        "/v1/audio/speech",
        '{"model":"tts-a","input":"Hello","voice":"v"}',
    ),
    ("Embeddings", (), "/v1/embeddings", '{"model":"embed-a","input":"Hello"}'),
)


def _welcome(url: str, *, keyed: bool) -> str:
    lines = [f"The demo listens on {url}, with a simulated llama-swap behind it. Try in another terminal:", ""]
    for title, options, path, body in _EXAMPLES:
        fields = ["-H", "Content-Type: application/json"] + (["-H", "Authorization: Bearer YOUR-KEY"] if keyed else [])
        command = ["curl", *options, url + path, *fields, "-d", body]
        lines += [f"  {title}:", f"  {shlex.join(command)}", ""]
    return "\n".join([*lines, f"Who holds the GPU and who waits: {url}/-/", "Ctrl-C ends it."])
