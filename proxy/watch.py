"""Notice that the client has left, and end the exchange there and then.

uvicorn does not cancel an application whose client has gone; it only says so to whoever calls `receive`. So one task
calls it for as long as the block runs. Used after the request body has been read, since the server looks at the
socket only then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive

from proxy.errors import ClientGone


class ClientWatch:
    """`async with ClientWatch(receive):` raises ClientGone out of the block as soon as the client leaves.

    The block is cancelled at its current await, like `asyncio.timeout` does it; a cancellation from elsewhere passes.
    With `until`, only for as long as that is false: from then on the block runs to its end, whoever leaves.
    """

    def __init__(
        self,
        receive: Receive,
        after: asyncio.Event | None = None,
        *,
        until: Callable[[], bool] = lambda: False,
        left: Callable[[], object] = lambda: None,
    ) -> None:
        """Watch `receive`, from the moment on at which `after` says that nobody else reads from it.

        `left` is called with the cancellation, before the block has seen it.
        """
        self._receive = receive
        self._after, self._until, self._left = after, until, left
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._gone = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        if self._after is not None:
            await self._after.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._until():  # asked in the tick of the departure, so that a grant in the same tick counts or does not
            return
        self._gone = True
        if self._task is not None:
            self._task.cancel()
        self._left()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        task, watcher = self._task, self._watcher
        self._task = self._watcher = None  # each knows the other: a cycle for the garbage collection, per request
        if watcher is not None:
            watcher.cancel()
        if self._gone and task is not None and task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGone from error
