"""Whether the proxy with these settings answers: a container's health check without curl."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.settings import Settings

TIMEOUT = 3.0
"""Seconds. Below the five that compose files give a health check."""

PATH = "/-/healthz"
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not bound to


def reachable(listen_host: str) -> str:
    """An address of this machine for one that is listened on."""
    return _ANY_ADDRESS.get(listen_host, listen_host)


def problem(settings: Settings, timeout: float = TIMEOUT) -> str | None:
    """What is wrong with the running proxy, in one sentence, or None."""
    if settings.listen_port == 0:
        return "listen_port is 0: the port is chosen at start, so this command cannot know it"
    host = reachable(settings.listen_host)
    # Not httpx or urllib: both would go through a proxy that the environment names.
    connection = HTTPConnection(host, settings.listen_port, timeout=timeout)
    try:
        connection.request("GET", PATH)
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return f"no answer from {host}, port {settings.listen_port}: {str(error) or type(error).__name__}"
    finally:
        connection.close()
    return None if status == 200 else f"{PATH} answered {status}"
