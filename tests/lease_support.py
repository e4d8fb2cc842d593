"""What the tests of leases share: leases with a clock of their own, tasks that hold and wait, and a witness."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from proxy.classify import Classification
from proxy.lease import Hold, Leases
from proxy.router import ClassRouter, Mode
from proxy.rwlock import Policy
from proxy.tickets import NO_TERMS, Bounds, Terms, Ticket

MODES: dict[str, Mode] = {"llm": "read", "tts": "write", "embed": "none"}


def what(class_name: str, model: str | None = None, requested: str | None = None) -> Classification:
    model = model or f"{class_name}-a"
    return Classification(
        requested=requested or model,
        model=model,
        class_name=class_name,
        mode=MODES[class_name],
        units=frozenset({class_name}),
        models=frozenset({model}),
        label="other",
        evidence="the test",
    )


CHAT, TTS, EMBED = what("llm"), what("tts"), what("embed")


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Witness:
    """An observer that writes everything down."""

    told: list[tuple[Any, ...]] = field(default_factory=list)

    def wait_ended(self, ticket: Ticket, outcome: str, seconds: float) -> None:
        self.told.append(("waited", ticket.class_name, outcome, seconds))

    def lease_ended(self, ticket: Ticket, seconds: float) -> None:
        self.told.append(("held", ticket.class_name, seconds))

    def turn_ended(self, class_name: str, seconds: float) -> None:
        self.told.append(("turn ended", class_name, seconds))

    def turn_begun(self, class_name: str) -> None:
        self.told.append(("turn", class_name))

    def swap(self) -> None:
        self.told.append(("swap",))

    def orphan_freed(self) -> None:
        self.told.append(("orphan",))

    def hold_overlong(self, class_name: str) -> None:
        self.told.append(("overlong", class_name))

    def of(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [entry for entry in self.told if entry[0] in kinds]


class Failing(Witness):
    """An observer that fails at everything it is told."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return super().__getattribute__(name)

        def fail(*args: object) -> None:
            raise RuntimeError(name)

        return fail


class World:
    """Leases with a clock of their own, and tasks that hold and wait."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.witness = Witness()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.make()

    def make(
        self, policy: Policy | None = None, slots: int = 10, observer: Witness | None = None, **bounds: Any
    ) -> None:
        max_wait = bounds.pop("max_wait", 60.0)
        values = {"max_queue": 10, "max_queue_per_client": 10, "max_wait": lambda class_name: max_wait, **bounds}
        observers = (observer, self.witness) if observer else (self.witness,)
        policy = policy or Policy("fifo")
        self.leases = Leases(ClassRouter(), lambda _: slots, policy, Bounds(**values), observers, clock=self.clock)

    async def start(self, classification: Classification, client: str = "somebody", terms: Terms = NO_TERMS) -> Hold:
        """Begin to wait, and be where that leads to without anybody else's doing."""
        hold = self.leases.hold(classification, client, terms)

        async def run() -> None:
            async with hold:
                await asyncio.Event().wait()

        self.tasks[hold.ticket.id] = asyncio.create_task(run())
        await settle()
        return hold

    def task_of(self, hold: Hold) -> asyncio.Task[None]:
        return self.tasks[hold.ticket.id]

    async def error_of(self, hold: Hold) -> BaseException | None:
        await settle()
        task = self.task_of(hold)
        assert task.done()
        return task.exception()

    async def cancel(self, hold: Hold) -> None:
        self.task_of(hold).cancel()
        await settle()

    async def leave(self, hold: Hold) -> None:
        """What happens when the client of `hold` goes away."""
        self.task_of(hold).cancel()
        hold.left()
        await settle()

    def nothing_is_left(self) -> None:
        """The invariant after every test, when all tasks have ended."""
        assert self.states() == ([], []), "nothing may be left"
        assert not self.leases._waiting_of, "no client's count may be left"
        assert not self.leases.places._again, "no waiting retry may be left"
        self.places_agree()

    def places_agree(self) -> None:
        """The lock knows exactly the places that are kept here: one that is not could never be forgotten."""
        in_lock = [place for of_claim in self.leases.lock._places.values() for place in of_claim.values()]
        kept = [kept.place for kept in self.leases.places._kept.values()]
        assert {id(place) for place in in_lock} == {id(place) for place in kept}
        assert len(kept) <= self.leases.bounds.max_queue

    def states(self) -> tuple[list[int], list[int]]:
        """The ids of holders and of waiters."""
        snapshot = self.leases.snapshot()
        return [holder.id for holder in snapshot.holders], [waiter.id for waiter in snapshot.waiters]


async def settle() -> None:
    """Let everything that can run, run."""
    for _ in range(6):
        await asyncio.sleep(0)
