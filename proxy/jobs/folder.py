"""Where jobs lie: one folder with the table, the key, a lock, and two files for each job's bodies.

All of it is for the proxy's own user alone, since requests and answers are private. The lock keeps two proxies from
working on one folder: each would run the other's jobs. It ends with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import IO

from proxy.errors import SettingsError

NAME = "jobs"
TABLE = "jobs.sqlite3"
REQUEST, RESULT = ".request", ".result"


class Folder:
    """An open folder of jobs. Raises SettingsError where it cannot be used."""

    def __init__(self, data_dir: Path | None) -> None:
        """Below `data_dir`; without one in a temporary directory, which `close` removes."""
        self._temporary = data_dir is None
        try:
            if data_dir is None:
                self.path = Path(tempfile.mkdtemp(prefix="gpu-lease-jobs-"))
            else:
                self.path = data_dir / NAME
                self.path.mkdir(mode=0o700, exist_ok=True)
            self._lock = _private(self.path / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise SettingsError([f"data_dir: {data_dir} cannot be used for jobs: {error.strerror}"]) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.secret = self._secret()
            self.table = self.path / TABLE
            os.close(_private(self.table, os.O_RDWR | os.O_CREAT))  # SQLite gives its other files the same mode
        except BlockingIOError as error:
            os.close(self._lock)
            raise SettingsError([f"data_dir: another proxy runs on {data_dir}; each needs its own"]) from error
        except OSError as error:
            os.close(self._lock)
            raise SettingsError([f"data_dir: {self.path} cannot be used: {error.strerror}"]) from error

    def _secret(self) -> bytes:
        """The key of the hashes that stand for clients' keys; made once, for whoever made a job to be known again."""
        path = self.path / "secret"
        with contextlib.suppress(FileNotFoundError):
            if secret := path.read_bytes():
                return secret
        secret = secrets.token_bytes(32)
        with self.create("secret.new") as file:
            file.write(secret)
            os.fsync(file.fileno())
        (self.path / "secret.new").replace(path)
        self.sync()
        return secret

    def create(self, name: str) -> IO[bytes]:
        """A new empty file for the proxy's user alone."""
        return os.fdopen(_private(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", buffering=0)

    def sync(self) -> None:
        """Make new names in the folder survive a loss of power."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def sweep(self, keep: Collection[str]) -> None:
        """Remove the bodies that belong to no job; `keep` are the names of those that do."""
        for path in self.path.iterdir():
            if path.suffix in {REQUEST, RESULT} and path.name not in keep:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the lock, and of everything if it was temporary."""
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _private(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
