"""Send a request to llama-swap and its answer to the client; the only module that knows httpx on the hot path.

An exchange has four moments, each of which the lease must learn of at once: the request *sent* whole, the *head* of
the answer, the *end* of the upstream's body, and a *failure*. All four are plain calls made by the transport in the
event that brought them. The release is the first thing that happens at the end, before the client has even been given
the last byte; cutting a stream that broke is the client's side of the same end.

The answer is read ahead of the client (`response_body.py`). A client that takes nothing while the upstream waits for
it is given up like one that has left, unless its answer is wanted read to the end.

What passes through is RFC 9110's end-to-end part, in order and byte for byte: section 7.6.1 names the fields that
belong to one connection and stay behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, cast

import httpx
import structlog
from starlette.types import Send

from proxy.errors import AmbiguousHeader, CutStream, Refusal, UpstreamFailed, UpstreamTimeout, UpstreamUnreachable
from proxy.inbound import Inbound, RawHeaders
from proxy.response_body import ResponseBody
from proxy.upstream import Transport

log = structlog.get_logger("gpu_lease_proxy")

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"expect",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Fields of one connection. Expect has been answered by the server, and the body is here; the rest is RFC 9110."""

FOR_EVERYONE = frozenset({b"authorization", b"content-length", b"content-type", b"host", b"x-api-key"})
"""Fields that no Connection field can make ours alone: the body's length and type, the key and the host were read here
to decide the class, and llama-swap must read the same. (Without its length, a body would be the next request.)"""

FORWARDED = frozenset({b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host"})

CREDENTIALS = frozenset({b"authorization", b"x-api-key"})

RETRY_SECONDS = 10.0
"""How long a leased request keeps trying while llama-swap refuses connections: the time of its restart."""

RETRY_PAUSE = 0.1
"""Seconds between two tries; a refused connection on the same host costs next to nothing."""


class _Stalled(CutStream):
    """The client took nothing for too long."""


class Listener(Protocol):
    """Whoever must know of an exchange's moments. All calls are synchronous; some come from the socket's callbacks."""

    def sent(self) -> None:
        """The whole request has been handed to the socket."""
        ...

    def head(self, status: int, seconds: float) -> None:
        """The answer's head has arrived, `seconds` after sending began."""
        ...

    def end(self, error: Exception | None) -> None:
        """The upstream's body has ended, or broke off with `error`. At most once."""
        ...

    def failed(self) -> None:
        """There will be no answer."""
        ...

    def left(self) -> None:
        """The client is gone or has stalled, or the server gives up; called before the upstream is closed."""
        ...


@dataclass(slots=True)
class Outgoing:
    """What goes to llama-swap. `patience`: seconds to keep trying while nothing could be sent."""

    inbound: Inbound
    headers: RawHeaders
    stream: Callable[[], httpx.AsyncByteStream]
    patience: float = 0.0
    added: Callable[[], RawHeaders] = field(default=list)
    """Fields to add to the answer, asked for when its head has arrived."""
    to_its_end: bool = False
    """Read the answer to its end even when it cannot be passed on any more."""
    about: dict[str, str] = field(default_factory=dict)
    """What the log says of this request."""


def request_headers(inbound: Inbound, forwarded: RawHeaders, replace_key: str | None, *, keyed: bool) -> RawHeaders:
    """The fields for llama-swap. With `keyed`, the client's credential stays here and `replace_key` takes its place."""
    dropped = HOP_BY_HOP | FORWARDED | (_named_by_connection(inbound.headers) - FOR_EVERYONE)
    if keyed:
        dropped |= CREDENTIALS
    if inbound.has(b"transfer-encoding", b"chunked"):
        # The same framing goes on (RFC 9112, section 6.3: it overrides a length), in the field's own place.
        dropped = (dropped | {b"content-length"}) - {b"transfer-encoding"}
    headers = [(name, value) for name, value in inbound.headers if name not in dropped]
    if inbound.first(b"host") is None:
        headers.insert(0, (b"host", b""))  # from HTTP/1.0; a request of 1.1 must have it (RFC 9112, section 3.2)
    if keyed and replace_key:
        headers.append((b"authorization", b"Bearer " + replace_key.encode()))
    return headers + forwarded


def response_headers(raw: Iterable[tuple[bytes, bytes]], added: RawHeaders) -> RawHeaders:
    """The fields for the client: the upstream's, then ours, and no proxy in between may buffer an event stream."""
    headers = [(name.lower(), value) for name, value in raw]
    dropped = HOP_BY_HOP | _named_by_connection(headers)
    headers = [(name, value) for name, value in headers if name not in dropped]
    names = dict(headers)
    if names.get(b"content-type", b"").lower().startswith(b"text/event-stream") and b"x-accel-buffering" not in names:
        headers.append((b"x-accel-buffering", b"no"))
    if b"x-request-id" in names:
        added = [field for field in added if field[0] != b"x-request-id"]  # the upstream's own name for it
    return headers + added


def _named_by_connection(headers: RawHeaders) -> frozenset[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    if not values:
        return frozenset()
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))


class Forwarder:
    """Sends to one llama-swap."""

    def __init__(self, transport: Transport, origin: str) -> None:
        self._transport = transport
        self._url = httpx.URL(origin)

    async def exchange(self, outgoing: Outgoing, listener: Listener, send: Send) -> int:
        """Send, and pass the whole answer on; returns its status.

        Raises a Refusal before the response head is out, and CutStream after it: an upstream body that broke off
        must reach the client broken off.
        """
        try:
            response = await self._send(outgoing, listener)
        except Refusal:
            listener.failed()
            raise
        except BaseException:
            listener.left()
            raise
        body = cast("ResponseBody", response.stream)
        try:
            await self._pass_on(response, body, outgoing, send)
        except _Stalled:
            listener.left()
            raise
        except CutStream:
            raise
        except BaseException:
            listener.left()
            raise
        finally:
            body.close()
        return response.status_code

    async def _pass_on(self, response: httpx.Response, body: ResponseBody, outgoing: Outgoing, send: Send) -> None:
        """`_answer`, with a limit to the time for which a client may hold up the upstream."""
        try:
            async with asyncio.timeout(None) as patience:
                body.on_stall = lambda: patience.reschedule(0)
                await self._answer(response, body, outgoing, send)
        except Exception as error:
            stalled = isinstance(error, TimeoutError) and patience.expired()
            if stalled:
                log.warning("client_stalled", path=outgoing.inbound.raw_path.decode("latin-1"), **outgoing.about)
            if outgoing.to_its_end:
                body.on_stall = lambda: None
                await body.discard()
            if stalled:
                raise _Stalled from error
            raise

    async def _answer(self, response: httpx.Response, body: ResponseBody, outgoing: Outgoing, send: Send) -> None:
        headers = response_headers(response.headers.raw, outgoing.added())
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        try:
            async for chunk in body:
                last = body.exhausted
                await send({"type": "http.response.body", "body": chunk, "more_body": not last})
                if last:
                    return
        except httpx.HTTPError as error:
            raise CutStream from error
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, outgoing: Outgoing, listener: Listener) -> httpx.Response:
        deadline = time.monotonic() + outgoing.patience
        while True:
            try:
                return await self._transport.handle_async_request(self._request(outgoing, listener))
            except httpx.ConnectError as error:
                # Not one byte was sent: the only failure after which a POST may be tried again.
                if time.monotonic() + RETRY_PAUSE > deadline:
                    raise UpstreamUnreachable(retry_after=1) from error
            except httpx.ConnectTimeout as error:
                raise UpstreamTimeout from error
            except httpx.LocalProtocolError as error:
                raise AmbiguousHeader(f"The request cannot be forwarded as one request: {error}.") from error
            except httpx.HTTPError as error:
                raise UpstreamFailed from error
            await asyncio.sleep(RETRY_PAUSE)

    def _request(self, outgoing: Outgoing, listener: Listener) -> httpx.Request:
        inbound, begun = outgoing.inbound, time.monotonic()

        def on_head(status: int) -> None:
            listener.head(status, time.monotonic() - begun)

        extensions = {
            "method": inbound.method.encode(),
            "target": inbound.target,
            "on_sent": listener.sent,
            "on_head": on_head,
            "on_end": listener.end,
        }
        return httpx.Request(
            inbound.method, self._url, headers=outgoing.headers, stream=outgoing.stream(), extensions=extensions
        )
