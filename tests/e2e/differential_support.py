"""One request sent twice, to llama-swap itself and through the proxy, and what may differ between the two.

`passed` and `answered` are "passes through" of docs/design.md, written down a second time: what came to the upstream
directly, or came from it, and what must therefore come through the proxy. They share nothing with the proxy.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from answers_support import Answer, Dialogue
from requests_support import Request
from wire_parts_support import Fields

from harness import Seen, Upstream

CONNECTION_FIELDS = {
    *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"http2-settings"),
    *(b"proxy-authenticate", b"proxy-authorization", b"expect"),
}
"""What belongs to one connection: RFC 9110, section 7.6.1, and what RFC 7540 and Expect say of themselves."""

CODING = b"transfer-encoding"

NOT_THE_CONNECTIONS = {b"authorization", b"content-length", b"content-type", b"host", b"x-api-key"}
"""What crosses although a Connection field names it (tests/cases.md, case 35)."""


@dataclass(eq=False)
class Came(Seen):
    """One request as it arrived, its framing included."""

    trailers: bytes = b""

    @property
    def fields(self) -> Fields:
        """The fields in order; no whitespace but blanks and tabs is around a value (RFC 9110, section 5.5)."""
        unfolded = self.head.replace(b"\r\n ", b" ")  # as a server must read it (RFC 9112, section 5.2)
        pairs = (line.partition(b":") for line in unfolded.split(b"\r\n")[1:-2])
        return [(name, value.strip(b" \t")) for name, _, value in pairs]

    @property
    def number(self) -> int:
        """Which of the generated requests it is."""
        return int(dict(self.fields).get(b"x-number") or dict(self.fields)[b"X-Number"])


class Recorder(Upstream):
    """An upstream that reads every framing, and gives the planned answer to each numbered request."""

    def __init__(self) -> None:
        super().__init__(self._planned)
        self.plan: dict[int, Answer] = {}

    async def _planned(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(seen, Came)
        planned = self.plan[seen.number]
        writer.write(planned.wire)
        await writer.drain()
        if planned.closes:
            raise ConnectionResetError

    async def _read(self, reader: asyncio.StreamReader, number: int) -> Seen | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        came = Came(head, b"", 0.0, number)
        fields = {name.lower(): value for name, value in came.fields}
        if b"expect" in fields:
            reader._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # type: ignore[attr-defined]
        if CODING in fields:
            came.body, came.trailers = await read_chunks(reader)
        else:
            came.body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        return came


async def read_chunks(reader: asyncio.StreamReader, into: list[bytes] | None = None) -> tuple[bytes, bytes]:
    """A chunked body and its trailers. What has come is in `into` where the body breaks off."""
    parts = [] if into is None else into
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        parts.append(await _exactly(reader, size, parts))
        assert await reader.readexactly(2) == b"\r\n"
    trailers = b""
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        trailers += line
    return b"".join(parts), trailers


async def _exactly(reader: asyncio.StreamReader, size: int, parts: list[bytes]) -> bytes:
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        parts.append(error.partial)
        raise


@dataclass(frozen=True, slots=True)
class Got:
    """An answer as the client had it. `whole`: whether it ended as its head had announced."""

    status: int
    fields: Fields
    body: bytes
    whole: bool = True


async def read_answer(reader: asyncio.StreamReader, *, is_head: bool) -> Got:
    """The next answer on a connection, interim ones passed over."""
    status = 0
    while status < 200:
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        status = int(lines[0].split(b" ")[1])
    pairs = (line.partition(b":") for line in lines[1:-2])
    fields = [(name.lower(), value.strip(b" \t")) for name, _, value in pairs]
    names, parts = dict(fields), list[bytes]()
    if is_head or status in {204, 304}:
        return Got(status, fields, b"")
    try:
        if b"chunked" in names.get(CODING, b""):
            await read_chunks(reader, parts)
        elif b"content-length" in names:
            parts.append(await _exactly(reader, int(names[b"content-length"]), parts))
        else:
            parts.append(await reader.read())
    except (asyncio.IncompleteReadError, ConnectionError):
        return Got(status, fields, b"".join(parts), whole=False)
    return Got(status, fields, b"".join(parts))


# -- what may differ


def _end_to_end(fields: Fields, crossing: set[bytes]) -> Fields:
    """`fields` without those of one connection, names in lower case; so is that of a coding (RFC 9112, section 7)."""
    lower = [(name.lower(), value.lower() if name.lower() == CODING else value) for name, value in fields]
    named = {each.strip().lower() for name, value in lower if name == b"connection" for each in value.split(b",")}
    stays = (CONNECTION_FIELDS | named) - crossing
    return [(name, value) for name, value in lower if name not in stays]


def passed(direct: Came) -> tuple[bytes, Fields]:
    """Request line and fields of what must come through the proxy, where `direct` came directly."""
    method, target, _ = direct.head.split(b"\r\n")[0].split(b" ")
    fields = _end_to_end(direct.fields, NOT_THE_CONNECTIONS)
    if not target.startswith(b"/"):
        authority, _, rest = target.removeprefix(b"http://").partition(b"/")
        target = b"/" + rest
        fields = [(b"host", authority), *((name, value) for name, value in fields if name != b"host")]
    if b"host" not in dict(fields):
        fields.insert(0, (b"host", b""))
    fields = _one_framing(fields)
    target = target.removesuffix(b"?") if target.count(b"?") == 1 else target  # no ASGI server hands this byte on
    return method + b" " + target + b" HTTP/1.1", _forwarded(fields)


def _one_framing(fields: Fields) -> Fields:
    """A length beside chunks does not count (RFC 9112, section 6.3), and one that is repeated counts once."""
    first = next((at for at, (name, _) in enumerate(fields) if name == b"content-length"), None)
    counts = None if CODING in dict(fields) else first
    return [field for at, field in enumerate(fields) if field[0] != b"content-length" or at == counts]


def _forwarded(fields: Fields) -> Fields:
    """The peer is trusted: what came before it is continued, or kept."""
    ours = {b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host"}
    earlier = {name: value for name, value in reversed(fields) if name in ours | {b"host"}}  # the first of each
    hops = [value for name, value in fields if name == b"x-forwarded-for"]
    return [
        *((name, value) for name, value in fields if name not in ours),
        (b"x-forwarded-for", b", ".join([*hops, b"127.0.0.1"])),
        (b"x-forwarded-proto", earlier.get(b"x-forwarded-proto") or b"http"),
        (b"x-forwarded-host", earlier.get(b"x-forwarded-host") or earlier[b"host"]),
    ]


def answered(direct: Got, request: Request) -> Got:
    """What the client must get through the proxy, where it got `direct` directly. Framing is each connection's own."""
    fields = [field for field in _end_to_end(direct.fields, set()) if field[0] != CODING]
    names = dict(fields)
    if names[b"content-type"] == b"text/event-stream" and b"x-accel-buffering" not in names:
        fields.append((b"x-accel-buffering", b"no"))
    if request.class_name is not None:
        fields.append((b"x-lease-class", request.class_name))
    # To a client of HTTP/1.0 only a length tells that a body has broken off.
    silent = b" HTTP/1.0\r\n" in request.head and b"content-length" not in names
    return Got(direct.status, fields, direct.body, direct.whole or silent)


def without_ours(got: Got) -> Got:
    """`got` without what tells of this connection and how long the lease was waited for."""
    ours = {b"connection", CODING, b"x-lease-wait", b"server-timing", b"x-request-id"}
    return Got(got.status, [field for field in got.fields if field[0] not in ours], got.body, got.whole)


# -- sending


async def sent_directly(port: int, request: Request) -> Got:
    """`request` on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        writer.write(request.head + request.body)
        return await read_answer(reader, is_head=request.is_head)
    finally:
        writer.close()


async def sent_in_dialogue(port: int, dialogue: Dialogue) -> list[Got]:
    """All requests of `dialogue` on one connection, and the answer to each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    sending = asyncio.create_task(_pipeline(writer, dialogue)) if dialogue.pipelined else None
    try:
        got = []
        for request in dialogue.requests:
            if sending is None:
                await _send(reader, writer, request)
            got.append(await read_answer(reader, is_head=request.is_head))
        return got
    finally:
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        writer.close()


async def _send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request) -> None:
    writer.write(request.head)
    if request.expects:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    writer.write(request.body)


async def _pipeline(writer: asyncio.StreamWriter, dialogue: Dialogue) -> None:
    wire = b"".join(request.head + request.body for request in dialogue.requests)
    for start, end in zip([0, *dialogue.cuts], [*dialogue.cuts, len(wire)], strict=True):
        writer.write(wire[start:end])
        await writer.drain()
        await asyncio.sleep(0)
