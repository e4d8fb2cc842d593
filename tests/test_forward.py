"""One exchange: what crosses, what the lease is told and when, and every way out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message

from harness import Script, Upstream, answer, begun, chunk, hang, head, raw, slow
from proxy.errors import (
    AmbiguousHeader,
    CutStream,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from proxy.forward import Forwarder, Outgoing, request_headers, response_headers
from proxy.inbound import Inbound, RawHeaders
from proxy.upstream import Transport

MEGABYTE = 1024 * 1024


class Record:
    """Everything that happened, in order: what the listener was told and what the client was sent."""

    def __init__(self, send: Callable[[Message], Any] | None = None) -> None:
        self.events = list[str]()
        self.body = b""
        self.start: Message = {}
        self._send = send

    def sent(self) -> None:
        self.events.append("sent")

    def head(self, status: int, seconds: float) -> None:
        assert 0 <= seconds < 5
        self.events.append(f"head {status}")

    def end(self, error: Exception | None) -> None:
        self.events.append("end" if error is None else "broken")

    def failed(self) -> None:
        self.events.append("failed")

    def left(self) -> None:
        self.events.append("left")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            self.events.append("> head")
        else:
            self.body += message["body"]
            self.events.append("> more" if message["more_body"] else "> last")
        if self._send is not None:
            await self._send(message)

    @property
    def told(self) -> list[str]:
        """What the listener was told."""
        return [event for event in self.events if not event.startswith(">")]


def inbound(*fields: tuple[bytes, bytes], method: str = "POST", query: bytes = b"") -> Inbound:
    return Inbound(method, b"/x", query, [(b"host", b"test"), *fields], "10.0.0.1", "http")


def outgoing(body: bytes = b"", *, patience: float = 0, headers: RawHeaders | None = None) -> Outgoing:
    fields = [(b"content-length", str(len(body)).encode())] if headers is None else headers
    request = inbound(*fields)
    return Outgoing(request, request.headers, lambda: httpx.ByteStream(body), patience, lambda: [(b"x-added", b"1")])


class Setting:
    """An upstream and a forwarder to it."""

    def __init__(self, upstream: Upstream, transport: Transport) -> None:
        self.upstream, self.transport = upstream, transport
        self.forwarder = Forwarder(transport, upstream.url)

    async def exchange(self, record: Record, request: Outgoing | None = None) -> int:
        return await self.forwarder.exchange(request or outgoing(b"{}"), record, record.send)


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    async with Upstream() as upstream, Transport(upstream.url) as transport:
        yield Setting(upstream, transport)


def script(setting: Setting, value: Script) -> None:
    setting.upstream.script = value


# --- the moments


async def test_the_lease_hears_of_the_end_before_the_client_gets_a_byte_of_it(setting: Setting) -> None:
    record = Record()
    assert await setting.exchange(record) == 200
    assert record.events == ["sent", "head 200", "end", "> head", "> last"]
    assert record.body == b'{"ok":true}'
    assert record.start["headers"][-1] == (b"x-added", b"1")


async def test_the_lease_ends_with_the_upstream_however_slow_the_client_is(setting: Setting) -> None:
    """The client takes nothing at all; the answer is below what is read ahead for it."""
    go, stuck = asyncio.Event(), asyncio.Event()

    async def take_nothing(message: Message) -> None:
        stuck.set()
        await go.wait()

    end = asyncio.Event()
    script(setting, begun(end))
    record = Record(take_nothing)
    exchange = asyncio.create_task(setting.exchange(record))
    await stuck.wait()
    assert record.told == ["sent", "head 200"]
    end.set()
    async with asyncio.timeout(5):
        while "end" not in record.events:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert record.events == ["sent", "head 200", "> head", "end"]
    go.set()
    assert await exchange == 200
    assert record.body.endswith(b"data: [DONE]\n\n")


async def test_past_what_is_read_ahead_the_client_sets_the_pace(setting: Setting) -> None:
    body = random.Random(0).randbytes(20 * MEGABYTE)
    script(setting, answer(body))
    pieces = 0

    async def take_one(message: Message) -> None:
        nonlocal pieces
        pieces += 1
        await asyncio.sleep(0.001)

    record = Record(take_one)
    await setting.exchange(record)
    assert record.body == body
    assert record.told == ["sent", "head 200", "end"]
    assert record.events.index("end") > record.events.index("> more")
    assert pieces > 10


async def test_no_event_of_a_stream_waits_for_the_next(setting: Setting) -> None:
    end = asyncio.Event()
    script(setting, begun(end))
    got = asyncio.Event()

    async def note(message: Message) -> None:
        if message.get("body"):
            got.set()

    record = Record(note)
    exchange = asyncio.create_task(setting.exchange(record))
    await asyncio.wait_for(got.wait(), 5)
    assert record.events == ["sent", "head 200", "> head", "> more"]
    end.set()
    await exchange


# --- failures


@pytest.mark.parametrize("wire", [b"", b"HTTP/1.1 2000 x\r\n\r\n", b"HTTP/1.1 200 OK\r\nA"])
async def test_no_head_is_a_refusal_and_one_try(wire: bytes, setting: Setting) -> None:
    script(setting, raw(wire))
    record = Record()
    with pytest.raises(UpstreamFailed) as caught:
        await setting.exchange(record, outgoing(b"{}", patience=5))
    assert not isinstance(caught.value, UpstreamUnreachable)
    assert record.events == ["sent", "failed"]
    assert len(setting.upstream.seen) == 1


async def test_a_body_that_breaks_off_is_cut(setting: Setting) -> None:
    script(setting, raw(head("200 OK", "Transfer-Encoding: chunked") + chunk(b"half")))
    record = Record()
    with pytest.raises(CutStream):
        await setting.exchange(record)
    assert record.told == ["sent", "head 200", "broken"]
    assert "> last" not in record.events
    assert record.body == b"half"


async def test_case_32_a_refused_connection_is_tried_again_for_as_long_as_there_is_patience(setting: Setting) -> None:
    await setting.upstream.stop()
    loop = asyncio.get_running_loop()
    for patience in (0, 0.35):
        record = Record()
        started = loop.time()
        with pytest.raises(UpstreamUnreachable) as caught:
            await setting.exchange(record, outgoing(b"{}", patience=patience))
        assert dict(caught.value.headers())[b"retry-after"] == b"1"
        assert patience - 0.15 < loop.time() - started < patience + 2
        assert record.events == ["failed"]


async def test_case_74_an_upstream_that_comes_back_gets_the_request_once(setting: Setting) -> None:
    await setting.upstream.stop()
    record = Record()
    exchange = asyncio.create_task(setting.exchange(record, outgoing(b'{"a":1}', patience=10)))
    await asyncio.sleep(0.3)
    assert record.events == []
    await setting.upstream.restart()
    assert await exchange == 200
    assert [seen.body for seen in setting.upstream.seen] == [b'{"a":1}']
    assert record.told == ["sent", "head 200", "end"]


async def test_an_upstream_that_does_not_take_the_connection_is_a_504(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*args: Any, **options: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    record = Record()
    forwarder = Forwarder(Transport("http://llama-swap", connect_timeout=0.05), "http://llama-swap")
    with pytest.raises(UpstreamTimeout) as caught:
        await forwarder.exchange(outgoing(patience=5), record, record.send)
    assert caught.value.status == 504
    assert record.events == ["failed"]


async def test_a_request_that_would_not_be_one_is_refused_and_not_sent(setting: Setting) -> None:
    record = Record()
    with pytest.raises(AmbiguousHeader, match="shorter than its Content-Length"):
        await setting.exchange(record, outgoing(b"{}", headers=[(b"content-length", b"3")]))
    assert record.events == ["failed"]
    assert not setting.upstream.seen


# --- giving up


@pytest.mark.parametrize("when", ["trying again", "before the head", "in the body", "while sending"])
async def test_a_client_that_leaves_ends_the_exchange_and_the_upstream_hears_of_it(when: str, setting: Setting) -> None:
    stuck = asyncio.Event()

    async def take_nothing(message: Message) -> None:
        stuck.set()
        if when == "while sending":
            await asyncio.Event().wait()

    script(setting, hang() if when == "before the head" else slow(1000))
    if when == "trying again":
        await setting.upstream.stop()
    record = Record(take_nothing)
    exchange = asyncio.create_task(setting.exchange(record, outgoing(b"{}", patience=10)))
    if when == "trying again":
        await asyncio.sleep(0.05)
    else:
        await setting.upstream.wait_for(lambda seen: len(seen) == 1)
        if when != "before the head":
            await asyncio.wait_for(stuck.wait(), 5)
    exchange.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange
    if when == "trying again":
        assert record.told == ["left"]
        return
    await asyncio.wait_for(setting.upstream.seen[0].closed.wait(), 5)
    # The lease is given back before the upstream is closed, of which it hears after that.
    assert record.told[-2:] == (["sent", "left"] if when == "before the head" else ["left", "broken"])
    assert not setting.transport._idle


async def test_an_error_of_the_server_ends_the_exchange_too(setting: Setting) -> None:
    async def fail(message: Message) -> None:
        raise RuntimeError("the server does not like this field")

    script(setting, slow(1000))
    record = Record(fail)
    with pytest.raises(RuntimeError):
        await setting.exchange(record)
    assert record.told == ["sent", "head 200", "left", "broken"]
    await asyncio.wait_for(setting.upstream.seen[0].closed.wait(), 5)


async def held_up(setting: Setting, record: Record, request: Outgoing) -> asyncio.Task[int]:
    """An exchange whose upstream waits for the client."""
    setting.transport.ahead.each = 1000
    exchange = asyncio.create_task(setting.exchange(record, request))
    async with asyncio.timeout(5):
        while not setting.transport.ahead.held_back:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return exchange


async def take_nothing(message: Message) -> None:
    if message["type"] == "http.response.body":
        await asyncio.Event().wait()


async def test_a_client_that_takes_nothing_is_given_up_like_one_that_has_left(setting: Setting) -> None:
    script(setting, answer(bytes(20 * MEGABYTE)))
    setting.transport.ahead.patience = 0.05
    record = Record(take_nothing)
    exchange = await held_up(setting, record, outgoing(b"{}"))
    with pytest.raises(CutStream):
        await exchange
    assert record.told == ["sent", "head 200", "left", "broken"]
    assert setting.transport.ahead.used == 0
    await asyncio.wait_for(setting.upstream.seen[0].closed.wait(), 5)


@pytest.mark.parametrize("ticks", range(4))
async def test_a_cancellation_around_the_end_of_patience_leaves_nothing(ticks: int, setting: Setting) -> None:
    script(setting, answer(bytes(20 * MEGABYTE)))
    record = Record(take_nothing)
    exchange = await held_up(setting, record, outgoing(b"{}"))
    (body,) = setting.transport.ahead.held_back
    body._stalled()
    for _ in range(ticks):
        await asyncio.sleep(0)
    exchange.cancel()
    with pytest.raises((CutStream, asyncio.CancelledError)):
        await exchange
    assert record.told == ["sent", "head 200", "left", "broken"]
    assert (setting.transport.ahead.used, len(setting.transport.ahead.held_back)) == (0, 0)


@pytest.mark.parametrize("how", ["stalls", "fails"])
async def test_an_answer_that_is_wanted_to_its_end_is_read_to_it_for_nobody(how: str, setting: Setting) -> None:
    async def take(message: Message) -> None:
        if how == "fails":
            raise UpstreamFailed
        await take_nothing(message)

    script(setting, answer(bytes(20 * MEGABYTE)))
    setting.transport.ahead.patience = 0.05
    record, request = Record(take), outgoing(b"{}")
    request.to_its_end = True
    with pytest.raises(CutStream if how == "stalls" else UpstreamFailed):
        await setting.exchange(record, request)
    assert record.told[:3] == ["sent", "head 200", "end"]
    assert not setting.upstream.seen[0].closed.is_set()
    assert setting.transport.ahead.used == 0


async def test_a_server_that_ends_does_not_wait_for_an_end_that_nobody_reads(setting: Setting) -> None:
    end = asyncio.Event()
    script(setting, begun(end))

    async def fail(message: Message) -> None:
        raise UpstreamFailed

    record, request = Record(fail), outgoing(b"{}")
    request.to_its_end = True
    exchange = asyncio.create_task(setting.exchange(record, request))
    async with asyncio.timeout(5):
        while "> head" not in record.events:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    exchange.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange
    assert record.told == ["sent", "head 200", "left", "broken"]
    await asyncio.wait_for(setting.upstream.seen[0].closed.wait(), 5)


async def test_a_client_that_leaves_after_the_end_takes_nothing_with_it(setting: Setting) -> None:
    async def take_nothing(message: Message) -> None:
        await asyncio.Event().wait()

    record = Record(take_nothing)
    exchange = asyncio.create_task(setting.exchange(record))
    async with asyncio.timeout(5):
        while "> head" not in record.events:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    exchange.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange
    assert record.told == ["sent", "head 200", "end", "left"]
    assert len(setting.transport._idle) == 1, "the connection had done its work"


async def test_a_failing_source_is_no_refusal(setting: Setting) -> None:
    class Failing(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"{"
            raise OSError("the disk is gone")

    request = outgoing(headers=[(b"content-length", b"2")])
    request.stream = Failing
    record = Record()
    with pytest.raises(OSError, match="the disk is gone"):
        await setting.exchange(record, request)
    assert record.events == ["left"]


async def test_early_answer_then_next_request(setting: Setting) -> None:
    """A head that comes before the body is whole does not count as sent, and nothing is told twice."""
    more = asyncio.Event()

    class Slow(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"{"
            await more.wait()
            yield b"}"

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head("413 Too Large", "Content-Length: 2") + b"no")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(early, "127.0.0.1", 0)
    origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with Transport(origin) as transport:
        request = outgoing(headers=[(b"content-length", b"2")])
        request.stream = Slow
        record = Record()
        assert await Forwarder(transport, origin).exchange(request, record, record.send) == 413
        assert record.events == ["head 413", "end", "> head", "> last"]
        assert not transport._idle
    server.close()


# --- fields of the request

FORWARDED = [(b"x-forwarded-for", b"10.0.0.1")]


def crossing(*fields: tuple[bytes, bytes], key: str | None = None, keyed: bool = False) -> RawHeaders:
    """What crosses of `fields`, beside Host and what is added."""
    (first, *middle), last = (
        (headers := request_headers(inbound(*fields), FORWARDED, key, keyed=keyed))[:-1],
        headers[-1],
    )
    assert first == (b"host", b"test")
    assert [last] == FORWARDED
    return middle


def test_fields_cross_in_order() -> None:
    fields = ((b"b", b"1"), (b"a", b"\xff"), (b"b", b"2"), (b"cookie", b"c"), (b"expires", b""), (b"via", b"x"))
    assert crossing(*fields) == list(fields)


@pytest.mark.parametrize(
    "name",
    [
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"proxy-authenticate"),
        *(b"te", b"trailer", b"upgrade", b"http2-settings", b"expect", b"transfer-encoding"),
        *(b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto"),
    ],
)
def test_fields_of_one_connection_and_our_own_do_not_cross(name: bytes) -> None:
    assert crossing((b"a", b"1"), (name, b"x"), (name, b"y")) == [(b"a", b"1")]


def test_what_a_connection_field_names_does_not_cross() -> None:
    fields = [
        (b"connection", b"X-A, close"),
        (b"x-a", b"1"),
        (b"x-b", b"2"),
        (b"connection", b"x-b ,,x-c"),
        (b"x-d", b""),
    ]
    assert crossing(*fields) == [(b"x-d", b"")]


def test_no_connection_field_takes_away_what_the_class_was_decided_by() -> None:
    kept = [
        (b"content-type", b"application/json"),
        (b"content-length", b"2"),
        (b"authorization", b"Bearer a"),
        (b"x-api-key", b"b"),
    ]
    names = b", ".join([b"host", *(name for name, _ in kept)])
    assert crossing((b"connection", names), *kept) == kept


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b"gzip, chunked"])
def test_a_chunked_body_stays_one_in_the_place_of_its_field(coding: bytes) -> None:
    fields = [(b"a", b"1"), (b"transfer-encoding", coding), (b"content-length", b"5"), (b"b", b"2")]
    expected = [(b"a", b"1"), (b"transfer-encoding", coding), (b"b", b"2")]
    assert crossing(*fields) == expected
    assert crossing((b"connection", b"transfer-encoding"), *fields) == expected


def test_with_keys_of_our_own_the_clients_credential_stays_here() -> None:
    fields = [(b"authorization", b"Bearer a"), (b"b", b"1"), (b"x-api-key", b"c"), (b"authorization", b"Bearer a")]
    assert crossing(*fields) == fields
    assert crossing(*fields, key="sk", keyed=False) == fields
    assert crossing(*fields, keyed=True) == [(b"b", b"1")]
    assert crossing(*fields, key="sk", keyed=True) == [(b"b", b"1"), (b"authorization", b"Bearer sk")]


def test_a_host_is_added_where_there_is_none() -> None:
    request = Inbound("GET", b"/", b"", [(b"a", b"1")], "10.0.0.1", "http")
    assert request_headers(request, FORWARDED, None, keyed=False) == [(b"host", b""), (b"a", b"1"), *FORWARDED]


# --- fields of the answer


def test_an_answers_fields_cross_in_order_and_ours_follow() -> None:
    raw_fields = [(b"Set-Cookie", b"a"), (b"X-B", b"\xff"), (b"set-cookie", b"b"), (b"Server", b"x"), (b"Date", b"y")]
    expected = [(name.lower(), value) for name, value in raw_fields]
    assert response_headers(raw_fields, [(b"x-lease-class", b"llm")]) == [*expected, (b"x-lease-class", b"llm")]


def test_an_answers_fields_of_one_connection_do_not_cross() -> None:
    raw_fields = [
        (b"Connection", b"close, X-A"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Trailer", b"X-T"),
        (b"Upgrade", b"h2c"),
        (b"X-a", b"1"),
        (b"X-B", b"2"),
    ]
    assert response_headers(raw_fields, []) == [(b"x-b", b"2")]


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ([(b"Content-Type", b"text/event-stream")], True),
        ([(b"content-type", b"Text/Event-Stream; charset=utf-8")], True),
        ([(b"Content-Type", b"text/event-stream"), (b"X-Accel-Buffering", b"yes")], False),
        ([(b"Content-Type", b"application/json")], False),
        ([], False),
    ],
)
def test_nobody_may_buffer_an_event_stream(fields: RawHeaders, added: bool) -> None:
    expected = [(name.lower(), value) for name, value in fields]
    assert response_headers(fields, []) == expected + [(b"x-accel-buffering", b"no")] * added
