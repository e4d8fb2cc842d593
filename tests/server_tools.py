"""Servers that the tests start themselves and that are no Python: where `scripts/server-tools` has put them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
from pathlib import Path

TOOLS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-lease-proxy/servers"
PLACES = (os.environ.get("PATH", os.defpath), "/usr/sbin", TOOLS / "usr/bin", TOOLS / "usr/sbin")


def find_program(name: str) -> str | None:
    """Its path, or None where it is neither installed nor unpacked."""
    return shutil.which(name, path=os.pathsep.join(map(str, PLACES)))


def environment() -> dict[str, str]:
    """This process's, with the libraries of the unpacked packages behind its own."""
    unpacked = [*TOOLS.glob("usr/lib/*-linux-gnu"), *TOOLS.glob("lib/*-linux-gnu")]
    libraries = [os.environ.get("LD_LIBRARY_PATH"), *map(str, unpacked)]
    path = os.pathsep.join(filter(None, libraries))
    return {**os.environ, "LD_LIBRARY_PATH": path} if path else dict(os.environ)


def free_port() -> int:
    """A port that nobody listens on, outside the range of which the system takes those of outgoing connections."""
    while True:
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port
