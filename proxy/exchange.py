"""A leased exchange with llama-swap: what is sent under a lease, and what the lease learns of it.

Whoever holds a lease runs the exchange here, a client's request and a job alike. The lease is told of every moment in
the event that brought it, and given back in the one that ended the upstream's work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import httpx
from starlette.types import Send

from proxy.entrance import Entrance
from proxy.errors import Refusal
from proxy.forward import RETRY_SECONDS, Forwarder, Outgoing
from proxy.inbound import Inbound, RawHeaders
from proxy.lease import Hold


class Accounts(Protocol):
    """Where finished work is counted."""

    def answered(self, class_name: str, model: str, code: int) -> None:
        """A request on a model route got the status `code`."""
        ...

    def refused(self, error: Refusal) -> None:
        """The proxy gave an answer of its own."""
        ...

    def head_arrived(self, class_name: str, seconds: float) -> None:
        """The head of an answer came `seconds` after the request was sent."""
        ...

    def exchange_ended(self, class_name: str, outcome: str) -> None:
        """An exchange under a lease ended: ok, cancelled, upstream_error or upstream_truncated."""
        ...

    def stream_incomplete(self, class_name: str) -> None:
        """A stream ended well on the wire, but without its last event."""
        ...


class Exchanger:
    """Runs exchanges under leases that others hold."""

    def __init__(self, forwarder: Forwarder, entrance: Entrance, accounts: Accounts) -> None:
        self._forwarder, self._entrance, self._accounts = forwarder, entrance, accounts

    async def run(
        self,
        inbound: Inbound,
        hold: Hold,
        stream: Callable[[], httpx.AsyncByteStream],
        send: Send,
        added: Callable[[], RawHeaders] = list,
        *,
        to_its_end: bool = False,
    ) -> int:
        """Send `inbound` with the body of `stream` and pass the answer to `send`; returns its status.

        `added` are fields for the answer's head. With `to_its_end` the lease outlasts one who takes no more of it.
        Raises what `Forwarder.exchange` raises.
        """
        headers, what = self._entrance.headers(inbound), hold.ticket.classification
        outgoing = Outgoing(inbound, headers, stream, patience=RETRY_SECONDS, added=added, to_its_end=to_its_end)
        outgoing.about = {"cls": what.class_name, "model": what.model}
        return await self._forwarder.exchange(outgoing, _Leased(hold, self._accounts), send)


class Unleased:
    """Listens to an exchange that has no lease."""

    def sent(self) -> None:
        """Nothing hangs on it."""

    def head(self, status: int, seconds: float) -> None:
        """Nothing hangs on it."""

    def end(self, error: Exception | None) -> None:
        """Nothing hangs on it."""

    def failed(self) -> None:
        """Nothing hangs on it."""

    def left(self) -> None:
        """Nothing hangs on it."""


class _Leased:
    """Tells the lease what its exchange has come to, and counts how it ended. The release comes first."""

    def __init__(self, hold: Hold, accounts: Accounts) -> None:
        self._hold, self._class_name, self._accounts = hold, hold.ticket.class_name, accounts
        self._failed = self._over = False

    def sent(self) -> None:
        """The GPU can be loading for somebody else from now on."""
        self._hold.lease.sent()

    def head(self, status: int, seconds: float) -> None:
        """An answer below 500 proves the model loaded; above, nobody knows what is."""
        if status < 500:
            self._hold.lease.answered()
        else:
            self._failed = True
            self._hold.lease.fail()
        self._accounts.head_arrived(self._class_name, seconds)

    def end(self, error: Exception | None) -> None:
        """The upstream is done: so is the lease. An upstream that broke off may have lost its models."""
        if error is not None:
            self._hold.lease.fail()
        self._finish("upstream_truncated" if error else "upstream_error" if self._failed else "ok")

    def failed(self) -> None:
        """No answer: what llama-swap has loaded is in doubt."""
        self._hold.lease.fail()
        self._finish("upstream_error")

    def left(self) -> None:
        """The client is gone."""
        self._finish("cancelled")

    def _finish(self, outcome: str) -> None:
        if not self._over:
            self._hold.ticket.outcome = outcome
        self._hold.release()
        if not self._over:
            self._over = True
            self._accounts.exchange_ended(self._class_name, outcome)
