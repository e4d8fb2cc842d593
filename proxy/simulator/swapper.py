"""Which request runs when: llama-swap's scheduler, as measured.

A request whose model is ready and which stops nothing runs at once, past everybody who waits. One whose
model is being loaded joins that load. Any other one needs a swap, and waits in the queue while the swap
would stop a model in use or get in the way of a swap under way; whenever a model falls idle or a swap ends
the queue is gone through in order, and all that can go on does. Hence the two properties that the proxy
exists for: requests for the loaded model keep overtaking the queue, so that while they overlap nobody else
is ever served, and the waiting happens here, inside, where a client sees nothing of it.

Waiting and running requests of a model together are bounded by its limit. A waiter whose client leaves is
dropped; a load, once begun, is completed, whoever has left.

Everything that decides is synchronous. Only swaps take time; each is a task.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxy.simulator.eviction import stopped_by
from proxy.simulator.journal import now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from proxy.simulator.config import Config
    from proxy.simulator.journal import Entry, Journal
    from proxy.simulator.scripts import Scripts


class OverLimitError(Exception):
    """The model has as many requests, waiting or running, as its concurrencyLimit allows."""


class NotServedError(Exception):
    """The model failed to load, or was unloaded while the request waited for it."""


@dataclass(eq=False, slots=True)
class Turn:
    """One request's way through: it waits for `granted`, runs, and leaves; `killed` if its server dies."""

    model: str
    entry: Entry
    granted: asyncio.Future[None]
    killed: asyncio.Future[None]
    holds_place: bool = True  # counts against the model's limit


@dataclass(eq=False, slots=True)
class Swap:
    model: str
    stops: set[str]
    began: float
    waiters: list[Turn] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class Swapper:
    def __init__(
        self,
        config: Config,
        scripts: Scripts,
        journal: Journal,
        time_scale: float,
        on_change: Callable[[], None],
    ) -> None:
        self.config = config
        self.scripts = scripts
        self.states = dict.fromkeys(config.models, "stopped")
        self.running: dict[str, set[Turn]] = {model: set() for model in config.models}
        self.queue: list[Turn] = []
        self.time_scale = time_scale
        self._swaps: dict[str, Swap] = {}
        self._places: Counter[str] = Counter()
        self._journal = journal
        self._on_change = on_change

    # What a request does.

    def arrive(self, model: str, entry: Entry) -> Turn:
        """A turn for `model`: granted at once, or waiting.

        Raises:
            OverLimitError: the model's limit is reached.
        """
        if self._places[model] >= self.config.models[model].limit:
            raise OverLimitError
        self._places[model] += 1
        loop = asyncio.get_running_loop()
        turn = Turn(model, entry, loop.create_future(), loop.create_future())
        if not self._go_on(turn):
            self._enqueue(turn)
        return turn

    def leave(self, turn: Turn) -> None:
        """Ends `turn`, whether it ran, waits, or was refused. May be called more than once."""
        running = self.running[turn.model]
        if turn in self.queue:
            self.queue.remove(turn)
        for swap in self._swaps.values():
            if turn in swap.waiters:
                swap.waiters.remove(turn)
        self._free_place(turn)
        if turn in running:
            running.remove(turn)
            if not running:
                self._go_through_queue()

    def as_dict(self) -> dict[str, Any]:
        """The state of all of it, for tests to look at."""
        return {
            "models": self.states,
            "running": {model: len(turns) for model, turns in self.running.items() if turns},
            "queue": [turn.model for turn in self.queue],
            "swaps": {swap.model: len(swap.waiters) for swap in self._swaps.values()},
        }

    # What llama-swap decides.

    def resident(self, model: str) -> set[str]:
        """What counts as loaded when `model` is asked for: all that is not stopped, and what swaps load."""
        loaded = {other for other, state in self.states.items() if state != "stopped"}
        return loaded | (set(self._swaps) - {model})

    def _go_on(self, turn: Turn) -> bool:
        """Grants `turn`, or lets it join or begin a swap; False if it has to wait."""
        if turn.granted.done():
            return True  # its client has left in this very moment
        if turn.model in self._swaps:
            self._swaps[turn.model].waiters.append(turn)
            return True
        stops = stopped_by(self.config, turn.model, self.resident(turn.model))
        if self._collides(turn.model, stops) or any(self.running[model] for model in stops):
            return False
        if self.states[turn.model] == "ready" and not stops:
            self._grant(turn)
        else:
            self._begin_swap(turn, stops)
        return True

    def _collides(self, model: str, stops: set[str]) -> bool:
        return any(swap.model in stops or model in swap.stops or stops & swap.stops for swap in self._swaps.values())

    def _enqueue(self, turn: Turn) -> None:
        priority = self.config.priority
        mine = priority.get(turn.model, 0)
        behind = [place for place, other in enumerate(self.queue) if priority.get(other.model, 0) < mine]
        self.queue.insert(behind[0] if behind else len(self.queue), turn)
        self._journal.queued(turn.entry, len(self.queue))

    def _go_through_queue(self) -> None:
        self.queue, waiting = [], self.queue
        for turn in waiting:
            if not self._go_on(turn):
                self.queue.append(turn)

    def _grant(self, turn: Turn) -> None:
        if turn.granted.done():
            return
        self.running[turn.model].add(turn)
        turn.entry.model = turn.model
        turn.entry.begin()
        turn.granted.set_result(None)

    def _refuse(self, turn: Turn, error: Exception) -> None:
        self._free_place(turn)
        if not turn.granted.done():
            turn.granted.set_exception(error)

    def _free_place(self, turn: Turn) -> None:
        if turn.holds_place:
            turn.holds_place = False
            self._places[turn.model] -= 1

    # Swaps.

    def _begin_swap(self, turn: Turn, stops: set[str]) -> None:
        swap = Swap(turn.model, stops, now(), [turn])
        self._swaps[turn.model] = swap
        turn.entry.model = turn.model
        turn.entry.loads = self.states[turn.model] != "ready"
        swap.task = asyncio.get_running_loop().create_task(self._carry_out(swap))

    async def _carry_out(self, swap: Swap) -> None:
        error: Exception | None = None
        try:
            await asyncio.gather(*(self._stop(model) for model in sorted(swap.stops)))
            await self._load(swap.model)
        except NotServedError as failure:
            error = failure
        if self._swaps.get(swap.model) is not swap:
            return
        del self._swaps[swap.model]
        for turn in swap.waiters:
            turn.entry.loaded(since=swap.began)
            if error is None:
                self._grant(turn)
            else:
                self._refuse(turn, error)
        self._go_through_queue()

    async def _stop(self, model: str) -> None:
        if self.states[model] in {"stopped", "starting"}:
            self._set_state(model, "stopped")
            return
        self._journal.stopped(model, busy=bool(self.running[model]))
        self._kill_turns(model)
        self._set_state(model, "stopping")
        await asyncio.sleep(self.scripts[model].stop * self.time_scale)
        self._set_state(model, "stopped")

    async def _load(self, model: str) -> None:
        if self.states[model] == "ready":
            return
        self._journal.load_begun(model)
        self._set_state(model, "starting")
        await asyncio.sleep(self.scripts[model].load * self.time_scale)
        if self.scripts.load_fails(model):
            self._set_state(model, "stopped")
            raise NotServedError("unspecific error: upstream command exited prematurely")
        self._set_state(model, "ready")

    def _set_state(self, model: str, state: str) -> None:
        self.states[model] = state
        self._on_change()

    # What happens to models from outside.

    async def unload(self, models: Iterable[str]) -> None:
        """Stops `models`, in use or not; those who wait for them are refused."""
        targets = set(models)
        refusal = NotServedError("unspecific error: model unloaded")
        for model in targets & set(self._swaps):
            swap = self._swaps.pop(model)
            for turn in list(swap.waiters):
                self._refuse(turn, refusal)
            if swap.task is not None and self.states[model] == "starting":
                swap.task.cancel()
        dropped = [turn for turn in self.queue if turn.model in targets]
        self.queue = [turn for turn in self.queue if turn.model not in targets]
        for turn in dropped:
            self._refuse(turn, refusal)
        await asyncio.gather(*(self._stop(model) for model in sorted(targets)))
        self._go_through_queue()

    def close(self) -> None:
        """Ends all of it: what runs is cut, who waits is refused, what is being loaded is dropped."""
        refusal = NotServedError("unspecific error: shutting down")
        waiting = [*self.queue, *(turn for swap in self._swaps.values() for turn in swap.waiters)]
        for swap in self._swaps.values():
            if swap.task is not None:
                swap.task.cancel()
        self.queue, self._swaps = [], {}
        for turn in waiting:
            self._refuse(turn, refusal)
        for model in self.states:
            self._kill_turns(model)

    def server_died(self, model: str) -> None:
        """The model's server has ended by itself, and with it all that ran on it."""
        self._kill_turns(model)
        if self.states[model] == "ready":
            self._set_state(model, "stopped")

    def _kill_turns(self, model: str) -> None:
        for turn in self.running[model]:
            if not turn.killed.done():
                turn.killed.set_result(None)
