"""What a job is: its states, the request it stands for, and how it is shown. Pure data, nothing here waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from proxy.inbound import Inbound, RawHeaders
from proxy.request_id import read_request_id

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]

NAME_SHOWN = 200
"""Characters of a model's name: clients may send far longer ones."""

UPSTREAM_ERROR = "upstream_error"
"""The code of a job that llama-swap answered with a status of 400 or above."""

WITHHELD = frozenset({b"authorization", b"prefer", b"proxy-authorization", b"x-api-key"})
"""Fields of the client that do not go upstream with its job. Its key is not even written down."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job as it stands on disk; each transition makes a new one. Times are Unix seconds.

    `requested` is the model's name as sent. `client` is who the job counts against in the queue's bounds, `owner` the
    keyed hash of whoever may see it, or empty where no key was needed. `size` is bytes on disk.
    """

    id: str
    state: State
    requested: str
    class_name: str
    anthropic: bool
    client: str
    owner: str
    queued_at: float
    started_at: float | None = None
    finished_at: float | None = None
    wait_seconds: float | None = None
    error_code: str | None = None
    error_message: str | None = None
    size: int = 0

    @property
    def finished(self) -> bool:
        """Whether this is its last state."""
        return self.state not in {"queued", "running"}

    @property
    def answered(self) -> bool:
        """Whether an answer of upstream is kept for it."""
        return self.state == "succeeded" or self.error_code == UPSTREAM_ERROR

    def show(self, position: int | None = None) -> dict[str, Any]:
        """The job as clients see it; seconds are rounded to milliseconds."""
        error = {"code": self.error_code, "message": self.error_message} if self.error_code else None
        return {
            "id": self.id,
            "status": self.state,
            "class": self.class_name,
            "model": self.requested[:NAME_SHOWN],
            "position": position,
            "queued_at": _rounded(self.queued_at),
            "started_at": _rounded(self.started_at),
            "finished_at": _rounded(self.finished_at),
            "wait_seconds": _rounded(self.wait_seconds),
            "error": error,
        }

    def transitions(self) -> Iterator[Job]:
        """The job in each of the states that it has been in, the present one last."""
        at_first = replace(self, state="queued", started_at=None, finished_at=None, wait_seconds=None, error_code=None)
        if self.state != "queued":
            yield at_first
        if self.finished and self.started_at is not None:
            yield replace(at_first, state="running", started_at=self.started_at, wait_seconds=self.wait_seconds)
        yield self


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent upstream when the time has come. `name` is the model's, where the request carries one outside of
    its path; `rewritten` is whether llama-swap can write another into it."""

    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    peer: str
    scheme: str
    name: str
    rewritten: bool

    @classmethod
    def of(cls, inbound: Inbound, name: str, *, rewritten: bool) -> Self:
        """The request as it came, without the key and without what was meant for the proxy."""
        headers = [pair for pair in inbound.headers if pair[0] not in WITHHELD]
        return cls(
            inbound.method,
            inbound.raw_path.decode("latin-1"),
            inbound.query.decode("latin-1"),
            _texts(headers),
            inbound.peer,
            inbound.scheme,
            name,
            rewritten,
        )

    def inbound(self, key: str | None) -> Inbound:
        """The request as if it came now, from somebody with `key`."""
        headers = _bytes(self.headers)
        if key:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        path, query = self.path.encode("latin-1"), self.query.encode("latin-1")
        return Inbound(self.method, path, query, headers, self.peer, self.scheme)

    @property
    def request_id(self) -> str:
        """The name of the request in the log."""
        return read_request_id(_bytes(self.headers))

    def dump(self) -> str:
        """As text for the table; `load` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Self:
        """What `dump` wrote."""
        found = json.loads(text)
        return cls(**{**found, "headers": [(name, value) for name, value in found["headers"]]})


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of the upstream's answer; its body is a file."""

    status: int
    headers: RawHeaders

    def dump(self) -> str:
        """As text for the table; `load` reads it."""
        return json.dumps([self.status, _texts(self.headers)])

    @classmethod
    def load(cls, text: str) -> Self:
        """What `dump` wrote."""
        status, headers = json.loads(text)
        return cls(status, _bytes(headers))


def _texts(headers: RawHeaders) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def _bytes(headers: list[tuple[str, str]]) -> RawHeaders:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
