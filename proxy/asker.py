"""Asks a running proxy for its queue, on behalf of `queue` and `top`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from proxy.errors import SettingsError
from proxy.healthcheck import reachable

if TYPE_CHECKING:
    from proxy.settings import Settings

TIMEOUT = 5.0
"""Seconds."""

PATH = "/-/queue"


class NoAnswer(Exception):
    """The proxy gave no queue; the message says why, in one sentence."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks one proxy."""

    scheme: str
    host: str
    port: int
    key: str | None

    @classmethod
    def of_url(cls, url: str, key: str | None) -> Self:
        """The proxy at `url`. Raises SettingsError for what is no such URL."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in {"http", "https"} or parts.path not in {"", "/"} or parts.query:
            raise SettingsError([f"--url: got {url!r}; it must be a host and a port, such as http://gpu:9393"])
        return cls(parts.scheme, host, port or {"http": 80, "https": 443}[parts.scheme], key)

    @classmethod
    def of_settings(cls, settings: Settings, key: str | None) -> Self:
        """The proxy that has these settings. Raises SettingsError where they do not tell its port."""
        port = settings.listen_port if settings.admin_port is None else settings.admin_port
        if port == 0:
            raise SettingsError(["--url: it is needed, for these settings let the proxy choose its port at start"])
        if key is None and settings.api_keys:
            key = settings.api_keys[0].get_secret_value()
        return cls("http", reachable(settings.listen_host), port, key)

    @property
    def url(self) -> str:
        """Whom it asks."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def queue(self) -> dict[str, Any]:
        """What `/-/queue` says. Raises NoAnswer."""
        # Not httpx or urllib: both would go through a proxy that the environment names.
        connect = HTTPSConnection if self.scheme == "https" else HTTPConnection
        connection = connect(self.host, self.port, timeout=TIMEOUT)
        try:
            connection.request("GET", PATH, headers={"Authorization": f"Bearer {self.key}"} if self.key else {})
            response = connection.getresponse()
            status, body = response.status, response.read()
        except (OSError, HTTPException) as error:
            raise NoAnswer(f"no answer from {self.url}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
        return self._read(status, body)

    def _read(self, status: int, body: bytes) -> dict[str, Any]:
        if status == 401:
            raise NoAnswer(f"{self.url} wants {'another' if self.key else 'a'} key: --key or --key-file")
        try:
            queue = json.loads(body)
        except ValueError:
            queue = None
        if status != 200 or not isinstance(queue, dict) or "waiters" not in queue:
            raise NoAnswer(f"{self.url}{PATH} answered {status}, and not as this proxy does; mind admin_port")
        return queue


def read_key(path: Path) -> str:
    """The key that a file holds. Raises SettingsError."""
    try:
        return path.read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it holds no key"
        raise SettingsError([f"--key-file: {path} cannot be used: {reason}"]) from error
