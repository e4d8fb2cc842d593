"""One call of a real client, what came of it, and what a client has to offer to be tried."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar, Self

PATIENCE_OF_PLAIN = 30.0
"""Seconds. A plain answer gives no sign before it is there, so its client has to be patient."""


@dataclass(frozen=True, slots=True)
class Call:
    """`model` decides what the upstream does; see `stage.py`."""

    api: str
    model: str
    stream: bool = True


@dataclass(slots=True)
class Outcome:
    """The text that a client handed to its program, and the error that it raised, if any."""

    pieces: list[str] = field(default_factory=list)
    error: str = ""
    kind: str = ""
    """The error's type, or what the program calls it."""

    @property
    def text(self) -> str:
        """All that was said."""
        return "".join(self.pieces)

    def fail(self, error: BaseException) -> None:
        """Keep what the client raised."""
        codes = [str(code) for code in error.args if isinstance(code, int)]
        self.error, self.kind = self.error or str(error), " ".join([type(error).__name__, *codes])


class Client(ABC):
    """A client with an idle timeout. It never tries again, so that nothing but its patience is tried.

    It is told the text on each of `apis`, and meets every other fate on each of `fails_on`. One that is not `patient`
    gives up before its turn whatever it sees; one that is not `exact` may take seconds longer than it was told.
    """

    name: ClassVar[str]
    apis: ClassVar[tuple[str, ...]]
    fails_on: ClassVar[tuple[str, ...]]
    patient: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def __init__(self, url: str, idle: float) -> None:
        self._url, self._idle, self._stack = url, idle, AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def run(self, calls: Iterable[Call]) -> dict[Call, Outcome]:
        """All the calls at once."""
        calls = list(calls)
        return dict(zip(calls, await asyncio.gather(*map(self._outcome, calls)), strict=True))

    async def _outcome(self, call: Call) -> Outcome:
        outcome = Outcome()
        try:
            await self._call(call, outcome, self._idle if call.stream else PATIENCE_OF_PLAIN)
        except Exception as error:  # what it raises is what is asked for
            outcome.fail(error)
        return outcome

    @abstractmethod
    async def _call(self, call: Call, outcome: Outcome, idle: float) -> None:
        """One call, whose text goes to `outcome`. Raises what the client raises."""
        ...
