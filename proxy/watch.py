"""Notice that the client has left, and end the exchange there and then.

uvicorn does not cancel an application whose client has gone; it only says so to whoever calls `receive`. So one task
calls it for as long as the block runs. Used after the request body has been read, since the server looks at the
socket only then.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from proxy.errors import ClientGone


class ClientWatch:
    """`async with ClientWatch(receive):` raises ClientGone out of the block as soon as the client leaves.

    The block is cancelled at its current await, like `asyncio.timeout` does it; a cancellation from elsewhere passes.
    """

    def __init__(self, receive: Receive, after: asyncio.Event | None = None) -> None:
        """Watch `receive`, from the moment on at which `after` says that nobody else reads from it."""
        self._receive = receive
        self._after = after
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
        self._gone = True
        if self._task is not None:
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self._gone and self._task is not None and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGone from error
