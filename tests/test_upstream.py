"""The client to llama-swap, against peers that do as told: connections, the order of events, and every way to go wrong.

After each test nothing may be left: no task, no descriptor, and no error that nobody asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httptools
import httpx
import pytest

from harness import Seen, Upstream, after, answer, chunk, hang, head, linger, raw, slow
from proxy import connection as connection_module
from proxy.connection import MAX_HEAD, Connection
from proxy.response_body import ReadAhead, ResponseBody
from proxy.upstream import Transport

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

MEGABYTE = 1024 * 1024
RECEIVE = 256 * 1024  # what asyncio reads from a socket at once
OK = head("200 OK", "Content-Length: 2") + b"ok"


@pytest.fixture(scope="module", autouse=True)
def collecting_is_cheap() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[list[dict[str, Any]]]:
    """The errors that the loop was told of, for a test that expects one: it takes them out of the list."""
    loop, unheard = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    descriptors = open_descriptors()
    yield unheard
    gc.collect()
    await until(lambda: len(asyncio.all_tasks()) == 1)
    await until(lambda: open_descriptors() == descriptors)
    gc.collect()
    await asyncio.sleep(0)
    assert not unheard


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until(true: Callable[[], bool], within: float = 5.0) -> None:
    """Return once `true` is."""
    async with asyncio.timeout(within):
        while not true():  # noqa: ASYNC110 - the state of a socket has no event of its own
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def client(origin: str, **options: Any) -> AsyncIterator[Transport]:
    async with Transport(origin, **options) as transport:
        yield transport


@contextlib.asynccontextmanager
async def peer(handler: Handler, host: str = "127.0.0.1", **options: Any) -> AsyncIterator[str]:
    """A server whose connections are each given to `handler`; gives its origin."""
    tasks = set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(serve, host, 0, **options)
    port = server.sockets[0].getsockname()[1]
    scheme = "https" if "ssl" in options else "http"
    try:
        yield f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


@contextlib.contextmanager
def blackhole() -> Iterator[str]:
    """The origin of a port that neither accepts nor refuses: the backlog of its listener is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def request(
    method: str = "GET",
    target: bytes = b"/x",
    body: bytes | AsyncIterator[bytes] = b"",
    fields: tuple[tuple[bytes, bytes], ...] = (),
    **callbacks: Any,
) -> httpx.Request:
    """A request as forward.py makes it. A body given as bytes has its length added."""
    headers = [(b"host", b"test"), *fields]
    stream: httpx.AsyncByteStream = httpx.ByteStream(b"")
    if isinstance(body, bytes):
        if body:
            headers.append((b"content-length", str(len(body)).encode()))
        stream = httpx.ByteStream(body)
    else:
        stream = Source(body)
    extensions = {"method": method.encode(), "target": target, **callbacks}
    return httpx.Request(method, "http://upstream", headers=headers, stream=stream, extensions=extensions)


class Source(httpx.AsyncByteStream):
    """A body that is not there at once."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces


CHUNKED = ((b"transfer-encoding", b"chunked"),)


async def read(response: httpx.Response) -> bytes:
    """The whole body."""
    return await read_all(body_of(response))


async def read_all(body: ResponseBody) -> bytes:
    return b"".join([piece async for piece in body])


def body_of(response: httpx.Response) -> ResponseBody:
    assert isinstance(response.stream, ResponseBody)
    return response.stream


async def ask(transport: Transport, method: str = "GET", **options: Any) -> tuple[int, bytes]:
    """Status and body of one exchange."""
    response = await transport.handle_async_request(request(method, **options))
    async with contextlib.aclosing(response):
        return response.status_code, await read(response)


# --- what is sent


async def test_method_target_and_fields_are_written_byte_for_byte() -> None:
    async with Upstream() as upstream, client(upstream.url) as transport:
        fields = ((b"X-Odd", b"a  b\xff"), (b"x-two", b"1"), (b"x-two", b"2"), (b"x-empty", b""))
        await ask(transport, "PROPFIND", target=b'/a%2fb/../c//"d";?x=%7E&', fields=fields)
        assert upstream.seen[0].head == (
            b'PROPFIND /a%2fb/../c//"d";?x=%7E& HTTP/1.1\r\n'
            b"host: test\r\nX-Odd: a  b\xff\r\nx-two: 1\r\nx-two: 2\r\nx-empty: \r\n\r\n"
        )


async def test_a_request_made_by_httpx_itself_is_sent_too() -> None:
    async with Upstream() as upstream, httpx.AsyncClient(transport=Transport(upstream.url)) as own:
        response = await own.post(f"{upstream.url}/a?b=1", json={"x": 1})
        assert response.json() == {"ok": True}
        assert upstream.seen[0].target == b"/a?b=1"
        assert upstream.seen[0].json == {"x": 1}


@pytest.mark.parametrize("length", [0, 1, 100, MEGABYTE, 5 * MEGABYTE])
async def test_a_body_at_once_or_in_pieces_with_a_length_or_in_chunks(length: int) -> None:
    body = random.Random(length).randbytes(length)
    fields = ((b"content-length", str(length).encode()),)

    async def pieces() -> AsyncIterator[bytes]:
        yield b""
        for start in range(0, length, 100_000):
            yield body[start : start + 100_000]
            await asyncio.sleep(0)
        yield b""

    async with Upstream() as upstream, client(upstream.url) as transport:
        await ask(transport, "POST", body=body)
        await ask(transport, "POST", body=pieces(), fields=fields)
        await ask(transport, "POST", body=pieces(), fields=CHUNKED)
        assert [seen.body == body for seen in upstream.seen] == [True] * 3
        assert upstream.connections == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"target": b"/x HTTP/1.1\r\n\r\nGET /y"},
        {"target": b"/x y"},
        {"target": b"/x\ny"},
        {"method": "GET /y HTTP/1.1\r\nX:"},
        {"fields": ((b"x", b"a\r\nb: c"),)},
        {"fields": ((b"x", b"a\nb: c"),)},
        {"fields": ((b"x", b"a\rb"),)},
        {"fields": ((b"x\r\ny", b"a"),)},
        {"body": b"12345", "fields": ((b"content-length", b"4"),)},
        {"body": b"12345", "fields": CHUNKED},
        {"fields": ((b"content-length", b"5"),)},
    ],
)
async def test_what_the_peer_could_read_as_another_request_is_not_sent(bad: dict[str, Any]) -> None:
    async with Upstream() as upstream, client(upstream.url) as transport:
        with pytest.raises(httpx.LocalProtocolError):
            await ask(transport, **bad)
        assert await ask(transport) == (200, b'{"ok":true}')
        assert len(upstream.seen) == 1


@pytest.mark.parametrize("given", [b"12345", b"123"])
async def test_a_body_in_pieces_that_is_not_as_long_as_announced_ends_the_connection(given: bytes) -> None:
    arrived = asyncio.get_running_loop().create_future()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set_result(await reader.read())

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(len(given)):
            yield given[number : number + 1]

    async with peer(handler) as origin, client(origin) as transport:
        with pytest.raises(httpx.LocalProtocolError):
            await ask(transport, "POST", body=pieces(), fields=((b"content-length", b"4"),))
        assert (await arrived).endswith(b"\r\n\r\n" + given[:4])


# --- what is received


@pytest.mark.parametrize(
    ("wire", "status", "body"),
    [
        pytest.param(OK, 200, b"ok", id="length"),
        pytest.param(head("200 OK", "Content-Length: 0"), 200, b"", id="empty"),
        pytest.param(head("200", "Content-Length: 2") + b"ok", 200, b"ok", id="no reason phrase"),
        pytest.param(head("204 No Content"), 204, b"", id="204"),
        pytest.param(head("304 Not Modified"), 304, b"", id="304"),
        pytest.param(head("304 Not Modified", "Content-Length: 100"), 304, b"", id="304 with the length of the 200"),
        pytest.param(head("599 Odd", "Content-Length: 0"), 599, b"", id="599"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"ok", id="100"),
        pytest.param(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 3 + OK, 200, b"ok", id="103"),
        pytest.param(
            head("200 OK", "Transfer-Encoding: chunked") + b"1;a=b\r\no\r\n01\r\nk\r\n0\r\nX-T: 1\r\n\r\n",
            200,
            b"ok",
            id="chunks with an extension and a trailer",
        ),
        pytest.param(head("200 OK", "X-E:", "Content-Length: 2") + b"ok", 200, b"ok", id="empty value"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_an_answer_is_read_at_every_split_and_its_connection_is_used_again(
    wire: bytes, status: int, body: bytes, size: int
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while await reader.readuntil(b"\r\n\r\n"):
            for start in range(0, len(wire), size):
                writer.write(wire[start : start + size])
                await asyncio.sleep(0)

    async with peer(handler) as origin, client(origin) as transport:
        assert await ask(transport) == (status, body)
        (kept,) = transport._idle
        assert await ask(transport) == (status, body)
        assert list(transport._idle) == [kept]


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        pytest.param(head("200 OK") + b"until the end", b"until the end", id="no length"),
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end", id="HTTP/1.0"),
        pytest.param(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok", id="HTTP/1.0 with a length"),
        pytest.param(head("200 OK", "Connection: close", "Content-Length: 2") + b"ok", b"ok", id="close"),
        pytest.param(head("200 OK", "Transfer-Encoding: gzip") + b"until the end", b"until the end", id="gzip"),
    ],
)
async def test_an_answer_that_ends_its_connection_is_whole(wire: bytes, body: bytes) -> None:
    async with Upstream(raw(wire)) as upstream, client(upstream.url) as transport:
        for _ in range(2):
            assert await ask(transport) == (200, body)
            assert not transport._idle
        assert upstream.connections == 2


async def test_fields_keep_their_order_case_and_bytes_and_lose_only_the_whitespace_around_them() -> None:
    wire = head("200 OK", "Set-Cookie: a=1", "X-B: \t a  b \t", "set-cookie: b=2", "X-C: \xff", "Content-Length: 0")
    async with (
        Upstream(raw(wire.decode().encode("latin-1"), close=False)) as upstream,
        client(upstream.url) as transport,
    ):
        response = await transport.handle_async_request(request())
        assert response.headers.raw[:4] == [
            (b"Set-Cookie", b"a=1"),
            (b"X-B", b"a  b"),
            (b"set-cookie", b"b=2"),
            (b"X-C", b"\xff"),
        ]


async def test_head_announces_a_body_and_has_none() -> None:
    wire = head("200 OK", "Content-Length: 1000")
    async with Upstream(raw(wire, close=False)) as upstream, client(upstream.url) as transport:
        assert await ask(transport, "HEAD") == (200, b"")
        assert not transport._idle
        await asyncio.wait_for(upstream.seen[0].closed.wait(), 5)


BROKEN_OFF = {
    "length": head("200 OK", "Content-Length: 100") + b"half",
    "chunks": head("200 OK", "Transfer-Encoding: chunked") + chunk(b"half"),
    "last chunk": head("200 OK", "Transfer-Encoding: chunked") + chunk(b"half") + b"0\r\n",
    "not a chunk": head("200 OK", "Transfer-Encoding: chunked") + chunk(b"half") + b"zz\r\n",
}


@pytest.mark.parametrize(
    ("wire", "reset"),
    [
        *(
            pytest.param(wire, reset, id=f"{name}-{reset}")
            for name, wire in BROKEN_OFF.items()
            for reset in (False, True)
        ),
        pytest.param(head("200 OK") + b"half", True, id="no length-True"),
    ],
)
async def test_an_answer_that_breaks_off_is_told_from_one_that_ends(wire: bytes, reset: bool) -> None:
    ends = list[Exception | None]()
    async with Upstream(raw(wire, reset=reset)) as upstream, client(upstream.url) as transport:
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)) as caught:
            await read(await transport.handle_async_request(request(on_end=ends.append)))
        # A reset may overtake the head.
        assert ends == [caught.value] or (reset and not ends)
        assert not transport._idle


async def test_what_came_before_an_answer_broke_off_is_not_lost() -> None:
    go = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head("200 OK", "Transfer-Encoding: chunked") + chunk(b"half"))
        await go.wait()
        linger(writer)

    async with peer(handler) as origin, client(origin) as transport:
        body = body_of(await transport.handle_async_request(request()))
        assert await anext(body) == b"half"
        go.set()
        with pytest.raises(httpx.ReadError):
            await anext(body)


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"HTTP/1.1 2000 x\r\n\r\n",
        b"HTTP/1.1 20 x\r\n\r\n",
        b"HTTP/1.1 099 x\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 600 x\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.2 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX y: a\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x0bb\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n",
    ],
)
async def test_what_is_no_answer_is_an_error_and_not_one_that_says_nothing_was_sent(wire: bytes) -> None:
    incomplete = wire in {b"", b"HTTP/1.1 200 OK\r\nContent-", b"HTTP/1.1 103 Early Hints\r\n\r\n"}
    async with Upstream(raw(wire, close=incomplete)) as upstream, client(upstream.url) as transport:
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await ask(transport, "POST", body=b"x")
        assert len(upstream.seen) == 1


@pytest.mark.parametrize("wire", [b"X-A: " + b"a" * 70_000, b"HTTP/1.1 103 Early Hints\r\n\r\n" * 5_000])
async def test_a_head_without_end_is_given_up(wire: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"" if wire.startswith(b"HTTP") else b"HTTP/1.1 200 OK\r\n")
        sent = 0
        while sent < 20 * MAX_HEAD:
            writer.write(wire if wire.startswith(b"HTTP") else wire + b"\r\n")
            sent += len(wire)
            await writer.drain()

    async with peer(handler) as origin, client(origin) as transport:
        with pytest.raises(httpx.RemoteProtocolError, match="too large"):
            await ask(transport)


async def test_a_large_head_passes() -> None:
    fields = [f"X-{number}: {'v' * 1000}" for number in range(400)]
    async with Upstream(answer(b"ok", "200 OK", *fields)) as upstream, client(upstream.url) as transport:
        response = await transport.handle_async_request(request())
        assert len(response.headers.raw) == 402
        assert await read(response) == b"ok"


# --- connections that are kept


async def test_connections_are_as_many_as_exchanges_at_once_and_the_last_one_used_is_used_first() -> None:
    async with Upstream(hang(0.05)) as upstream, client(upstream.url) as transport:
        await asyncio.gather(*(ask(transport) for _ in range(20)))
        assert upstream.connections == 20
        upstream.script = answer()
        for _ in range(5):
            await ask(transport)
        assert upstream.connections == 20
        assert len({seen.connection for seen in upstream.seen[20:]}) == 1


async def test_case_20_an_idle_connection_that_was_closed_is_replaced_before_a_byte_is_sent() -> None:
    async with Upstream(raw(OK)) as upstream, client(upstream.url) as transport:
        assert await ask(transport, "POST", body=b"1") == (200, b"ok")
        await upstream.seen[0].closed.wait()
        # No await in between: the end is in the socket, and the loop has not told us of it.
        assert len(transport._idle) == 1
        assert await ask(transport, "POST", body=b"2") == (200, b"ok")
        assert [seen.body for seen in upstream.seen] == [b"1", b"2"]


async def test_case_20_a_connection_that_is_closed_under_a_post_is_an_error_and_the_post_is_not_repeated() -> None:
    async with Upstream(raw(OK, close=False)) as upstream, client(upstream.url) as transport:
        await ask(transport, "POST", body=b"1")
        upstream.script = raw(b"")
        with pytest.raises(httpx.ReadError):
            await ask(transport, "POST", body=b"2")
        assert [seen.body for seen in upstream.seen] == [b"1", b"2"]
        assert upstream.connections == 1


@pytest.mark.parametrize("unasked", [OK, b"x", b"HTTP/1.1 408 Timeout\r\n\r\n"])
@pytest.mark.parametrize("later", [False, True])
async def test_what_nobody_asked_for_is_no_answer_to_the_next_request(unasked: bytes, later: bool) -> None:
    go = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK if later else OK + unasked)
        await go.wait()
        if later:
            writer.write(unasked)
        await reader.read()

    async with peer(handler) as origin, client(origin) as transport:
        assert await ask(transport) == (200, b"ok")
        go.set()
        await until(lambda: not transport._idle)
        assert await ask(transport) == (200, b"ok")


async def test_an_idle_connection_that_is_readable_is_not_used_even_before_the_loop_has_read_it() -> None:
    sent = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = list[bytes]()

        def serve() -> None:
            for _ in range(2):
                accepted, _ = listener.accept()
                served.append(accepted.recv(10_000))
                accepted.sendall(OK)
                go.wait(5)
                accepted.sendall(OK)
                sent.set()
                with contextlib.suppress(ConnectionError):
                    served.append(accepted.recv(10_000))
                accepted.close()

        go = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        async with client(f"http://127.0.0.1:{listener.getsockname()[1]}") as transport:
            await ask(transport)
            go.set()
            sent.wait(5)  # blocks the loop, so that it has not seen the second answer
            await ask(transport)
        await asyncio.to_thread(thread.join)
        assert len([data for data in served if data]) == 2


async def test_a_connection_that_was_idle_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Upstream(hang(0.02)) as upstream, client(upstream.url) as transport:
        await asyncio.gather(ask(transport), ask(transport))
        monkeypatch.setattr(connection_module, "IDLE_SECONDS", -1.0)
        await ask(transport)
        assert upstream.connections == 3
        assert len(transport._idle) == 1


async def test_each_connection_that_comes_back_has_one_closed_that_was_idle_for_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Upstream(hang(0.02)) as upstream, client(upstream.url) as transport:
        await asyncio.gather(*(ask(transport) for _ in range(4)))
        *old, newest = transport._idle
        for connection in old:
            connection.idle_since -= 61
        for count in (3, 2, 1):
            await ask(transport)
            await until(lambda: len(transport._idle) == count)  # noqa: B023
        assert list(transport._idle) == [newest]


async def test_closing_the_transport_closes_idle_connections_now_and_busy_ones_after_their_exchange() -> None:
    async with Upstream(slow(2, 0.01)) as upstream:
        transport = Transport(upstream.url)
        await ask(transport)
        response = await transport.handle_async_request(request())
        await transport.aclose()
        assert (await read(response)).endswith(b"[DONE]\n\n")
        await upstream.seen[0].closed.wait()
        assert not transport._idle


# --- the order of events


def order() -> tuple[list[str], dict[str, Any]]:
    """A list that fills with the events of an exchange, and whether a task was running when they came."""
    events = list[str]()

    def note(name: str) -> Callable[..., object]:
        return lambda *values: events.append(" ".join([name, *map(str, values), *(["in a task"] * in_task())]))

    return events, {name: note(name) for name in ("on_sent", "on_head", "on_end")}


def in_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


async def test_head_and_end_are_told_by_the_socket_and_not_by_whoever_reads() -> None:
    events, callbacks = order()
    async with Upstream(raw(OK, close=False)) as upstream, client(upstream.url) as transport:
        response = await transport.handle_async_request(request(**callbacks))
        assert events == ["on_sent in a task", "on_head 200", "on_end None"]
        assert await read(response) == b"ok"


async def test_the_end_is_told_at_the_last_byte_though_nothing_has_been_read() -> None:
    events, callbacks = order()
    body = b"x" * (5 * MEGABYTE)
    async with Upstream(answer(body)) as upstream, client(upstream.url, ahead=ReadAhead(8 * MEGABYTE)) as transport:
        response = await transport.handle_async_request(request(**callbacks))
        await until(lambda: len(events) == 3)
        assert events[1:] == ["on_head 200", "on_end None"]
        assert body_of(response)._size == len(body)
        assert await read(response) == body


async def test_an_unread_answer_is_bounded_and_goes_on_when_it_is_read() -> None:
    events, callbacks = order()
    body = random.Random(0).randbytes(20 * MEGABYTE)
    async with Upstream(answer(body)) as upstream, client(upstream.url, ahead=ReadAhead(MEGABYTE)) as transport:
        response = await transport.handle_async_request(request(**callbacks))
        stream = body_of(response)
        await until(lambda: stream in transport.ahead.held_back)
        assert len(events) == 2
        got = bytearray()
        async for piece in stream:
            got += piece
            assert stream._size <= MEGABYTE + RECEIVE
        assert got == body
        assert events[2] == "on_end None"
        assert await ask(transport, target=b"/y") == (200, body)


async def test_a_late_reader_does_not_disturb_the_next_exchange_on_the_connection() -> None:
    async with Upstream(answer(b"1" * 1000)) as upstream, client(upstream.url, ahead=ReadAhead(10)) as transport:
        first = await transport.handle_async_request(request())
        upstream.script = answer(b"2" * (20 * MEGABYTE))
        second = await transport.handle_async_request(request())
        assert upstream.connections == 1
        await until(lambda: body_of(second) in transport.ahead.held_back)
        assert await read(first) == b"1" * 1000
        assert body_of(second) in transport.ahead.held_back
        assert len(await read(second)) == 20 * MEGABYTE


async def test_a_request_is_sent_when_its_last_byte_has_left_and_not_when_it_is_buffered() -> None:
    events, callbacks = order()
    go = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(20 * MEGABYTE)
        writer.write(OK)
        await reader.read()

    async with peer(handler, limit=65536) as origin, client(origin) as transport:
        asking = asyncio.create_task(ask(transport, "POST", body=b"x" * (20 * MEGABYTE), **callbacks))
        await until(lambda: asking.get_coro().cr_await is not None)  # type: ignore[union-attr]
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert events == []
        go.set()
        assert await asking == (200, b"ok")
        assert events == ["on_sent", "on_head 200", "on_end None"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Transport]:
    """The sockets' transports of all connections, as they are made."""
    transports = list[asyncio.Transport]()
    genuine = Connection.connection_made

    def connection_made(self: Connection, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transports.append(transport)
        genuine(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    return transports


async def test_the_next_piece_is_asked_for_and_the_request_is_sent_only_when_no_byte_is_left_here(
    made: list[asyncio.Transport],
) -> None:
    go, left = asyncio.Event(), list[int]()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        while not (await reader.read(65536)).endswith(b"\r\n0\r\n\r\n"):
            pass
        writer.write(OK)
        await reader.read()

    def note() -> None:
        left.append(made[0].get_write_buffer_size())

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3000):
            note()
            yield b"x" * 10_000

    async with peer(handler, limit=65536) as origin, client(origin) as transport:
        asking = asyncio.create_task(ask(transport, "POST", body=pieces(), fields=CHUNKED, on_sent=note))
        await stands_still(lambda: len(left))
        assert made[0].get_write_buffer_size()
        go.set()
        assert await asking == (200, b"ok")
        assert left == [0] * 3001


async def test_a_connection_that_is_done_with_does_not_wait_for_a_peer_that_does_not_read(
    made: list[asyncio.Transport],
) -> None:
    async with peer(refuse_early(TOO_LARGE, "stay"), limit=65536) as origin, client(origin) as transport:
        assert await ask(transport, "POST", body=b"x" * (30 * MEGABYTE)) == (413, b"no\r\n")
        await until(lambda: made[0].get_extra_info("socket").fileno() == -1)


async def test_a_source_is_not_read_faster_than_the_peer_reads() -> None:
    go, pulled = asyncio.Event(), 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        while not (await reader.read(65536)).endswith(b"\r\n0\r\n\r\n"):
            pass
        writer.write(OK)
        await reader.read()

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal pulled
        for pulled in range(500):  # noqa: B007
            yield b"x" * 100_000

    async with peer(handler, limit=65536) as origin, client(origin) as transport:
        asking = asyncio.create_task(ask(transport, "POST", body=pieces(), fields=CHUNKED))
        await stands_still(lambda: pulled)
        assert 0 < pulled < 200
        go.set()
        assert await asking == (200, b"ok")


async def stands_still(value: Callable[[], int]) -> None:
    """Return once `value` has begun to move and does so no more: a socket's buffers are full."""
    await until(lambda: value() > 0)
    before = -1
    while before != value():
        before = value()
        await asyncio.sleep(0.1)


async def test_an_error_in_a_callback_reaches_the_log_and_does_not_leave_the_reader_waiting(
    nothing_is_left: list[dict[str, Any]],
) -> None:
    def fault(*_: object) -> None:
        raise ZeroDivisionError

    end = asyncio.Event()
    last_chunk = after(end, raw(b"0\r\n\r\n", close=False))

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("200 OK", "Transfer-Encoding: chunked") + chunk(b"all"))
        await last_chunk(seen, reader, writer)

    async with Upstream(script) as upstream, client(upstream.url) as transport:
        body = body_of(await transport.handle_async_request(request(on_end=fault)))
        assert await anext(body) == b"all"
        reading = asyncio.create_task(read_all(body))
        await asyncio.sleep(0)
        end.set()
        assert await asyncio.wait_for(reading, 5) == b""
        with pytest.raises(httpx.ReadError):
            await transport.handle_async_request(request(on_head=fault))
        await until(lambda: len(nothing_is_left) == 2)
        for context in nothing_is_left:
            assert isinstance(context["exception"], httptools.HttpParserCallbackError)
            assert isinstance(context["exception"].__context__, ZeroDivisionError)
        nothing_is_left.clear()


# --- giving up


async def given_up(asking: asyncio.Task[Any]) -> None:
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_giving_up_while_connecting() -> None:
    with blackhole() as origin:
        async with client(origin) as transport:
            asking = asyncio.create_task(ask(transport))
            await asyncio.sleep(0.02)
            await given_up(asking)


async def test_giving_up_while_the_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    looking = threading.Event()

    def getaddrinfo(*args: Any, **kwargs: Any) -> list[Any]:
        looking.set()
        release.wait(5)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with client("http://llama-swap:8080") as transport:
        asking = asyncio.create_task(ask(transport))
        await until(looking.is_set)
        await given_up(asking)
        release.set()


async def test_giving_up_while_the_body_is_written_tells_the_peer_at_once_and_ends_the_source() -> None:
    read_head, closed, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        read_head.set()
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        closed.set()

    async def pieces() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 10_000
                await asyncio.sleep(0)
        finally:
            ended.set()

    async with peer(handler) as origin, client(origin) as transport:
        asking = asyncio.create_task(ask(transport, "POST", body=pieces(), fields=CHUNKED))
        await read_head.wait()
        await given_up(asking)
        async with asyncio.timeout(5):
            await closed.wait()
            await ended.wait()


async def test_giving_up_while_a_peer_that_does_not_read_holds_up_the_body() -> None:
    arrived, done = asyncio.Event(), asyncio.Event()
    pulled = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await done.wait()

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal pulled
        while True:
            pulled += 1
            yield b"x" * 100_000

    async with peer(handler, limit=65536) as origin, client(origin) as transport:
        asking = asyncio.create_task(ask(transport, "POST", body=pieces(), fields=CHUNKED))
        await stands_still(lambda: pulled)
        await given_up(asking)
        done.set()


@pytest.mark.parametrize("script", [hang(), slow(1000)])
async def test_giving_up_while_waiting_for_the_head_or_in_the_body_closes_the_connection(script: Any) -> None:
    events, callbacks = order()
    async with Upstream(script) as upstream, client(upstream.url) as transport:
        asking = asyncio.create_task(ask(transport, "POST", body=b"x", **callbacks))
        await upstream.wait_for(lambda seen: len(seen) == 1)
        if script is not None and len(events) < 2:
            await asyncio.sleep(0.02)
        await given_up(asking)
        await asyncio.wait_for(upstream.seen[0].closed.wait(), 5)
        assert not transport._idle


async def test_a_body_that_is_not_read_is_closed() -> None:
    events, callbacks = order()
    async with Upstream(slow(1000)) as upstream, client(upstream.url) as transport:
        response = await transport.handle_async_request(request(**callbacks))
        await response.aclose()
        await response.aclose()
        assert events[2:] == ["on_end the exchange was given up in a task"]
        await asyncio.wait_for(upstream.seen[0].closed.wait(), 5)


async def test_giving_up_in_the_tick_of_the_last_byte_leaves_the_connection_to_its_next_exchange() -> None:
    """The first exchange ends and is cancelled in one event; the second has taken the connection before the first
    has learnt of either."""
    head_arrived = asyncio.get_running_loop().create_future()

    async def second() -> tuple[int, bytes]:
        await head_arrived  # woken before the first, for its future was set before
        assert len(transport._idle) == 1
        return await ask(transport, target=b"/second")

    async with Upstream(raw(OK, close=False)) as upstream, client(upstream.url) as transport:
        first: asyncio.Task[tuple[int, bytes]]
        callbacks: dict[str, Any] = {"on_head": head_arrived.set_result, "on_end": lambda _: first.cancel()}
        first = asyncio.create_task(ask(transport, **callbacks))
        following = asyncio.create_task(second())
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await following == (200, b"ok")
        assert upstream.connections == 1


async def test_case_18_hundreds_given_up_at_every_tick_leave_nothing_behind() -> None:
    async with Upstream(slow(3, 0.001)) as upstream, client(upstream.url) as transport:
        for number in range(300):
            asking = asyncio.create_task(ask(transport, "POST", body=b"x"))
            for _ in range(number % 20):
                await asyncio.sleep(0)
            asking.cancel()
            if number % 3 == 0:
                asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
        status, body = await ask(transport)
        assert status == 200
        assert body.endswith(b"[DONE]\n\n")
        await until(lambda: upstream.open_in_use == 0)


# --- an answer before the request is whole


def refuse_early(answer: bytes, then: str) -> Handler:
    """Answer after the head, and read nothing of the body."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if then == "reset":
            linger(writer)
        elif then == "half-close":
            writer.write_eof()
        if then not in {"close", "reset"}:
            await asyncio.Event().wait()

    return handler


TOO_LARGE = head("413 Too Large", "Content-Length: 4") + b"no\r\n"
TOO_LARGE_CLOSE = head("413 Too Large", "Content-Length: 4", "Connection: close") + b"no\r\n"


@pytest.mark.parametrize(
    ("early", "then"),
    [
        (TOO_LARGE, "stay"),
        (TOO_LARGE_CLOSE, "stay"),
        (TOO_LARGE_CLOSE, "close"),
        (TOO_LARGE_CLOSE, "reset"),
        (head("413 Too Large") + b"no\r\n", "half-close"),
    ],
)
@pytest.mark.parametrize("pieces", [False, True])
async def test_a_refusal_that_comes_while_a_large_body_is_sent_is_read(early: bytes, then: str, pieces: bool) -> None:
    events, callbacks = order()

    async def source() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100_000

    # In pieces the body never ends; as a whole it is more than the socket's buffers take.
    options: dict[str, Any] = {"body": b"x" * (30 * MEGABYTE)}
    if pieces:
        options = {"body": source(), "fields": CHUNKED}
    async with peer(refuse_early(early, then), limit=65536) as origin, client(origin) as transport:
        for _ in range(3):
            assert await ask(transport, "POST", **options, **callbacks) == (413, b"no\r\n")
            assert not transport._idle
            if pieces:
                options["body"] = source()
        assert events == ["on_head 413", "on_end None"] * 3


async def test_a_refusal_is_read_though_the_next_write_finds_the_connection_reset() -> None:
    reset = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            accepted, _ = listener.accept()
            accepted.recv(10)
            accepted.sendall(TOO_LARGE_CLOSE)
            accepted.close()  # with bytes unread: a reset
            reset.set()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"x" * 10_000
            reset.wait(5)  # blocks the loop: both the answer and the reset come unseen
            yield b"y"
            yield b"z"

        thread = threading.Thread(target=serve)
        thread.start()
        async with client(f"http://127.0.0.1:{listener.getsockname()[1]}") as transport:
            assert await ask(transport, "POST", body=pieces(), fields=CHUNKED) == (413, b"no\r\n")
        await asyncio.to_thread(thread.join)


async def test_a_body_that_goes_on_after_the_head_of_the_answer_is_sent_to_its_end() -> None:
    events, callbacks = order()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head("200 OK", "Transfer-Encoding: chunked"))
        while (size := await reader.readline()) != b"0\r\n":
            writer.write(chunk(await reader.readexactly(int(size, 16))))
            await reader.readline()
        writer.write(b"0\r\n\r\n")
        await reader.read()

    more = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        await more.wait()
        yield b"second"

    async with peer(handler) as origin, client(origin) as transport:
        response = await transport.handle_async_request(request("POST", body=pieces(), fields=CHUNKED, **callbacks))
        assert events == ["on_head 200"]
        more.set()
        assert await read(response) == b"firstsecond"
        assert events == ["on_head 200", "on_sent in a task", "on_end None"]


async def test_a_source_that_fails_is_the_error_and_leaves_no_half_request_waiting() -> None:
    closed = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        closed.set()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"half"
        raise KeyError("gone")

    async with peer(handler) as origin, client(origin) as transport:
        with pytest.raises(KeyError, match="gone"):
            await ask(transport, "POST", body=pieces(), fields=CHUNKED)
        await asyncio.wait_for(closed.wait(), 5)


# --- connecting


async def test_a_refused_connection_says_that_nothing_was_sent() -> None:
    async with Upstream() as upstream, client(upstream.url) as transport:
        await upstream.stop()
        with pytest.raises(httpx.ConnectError):
            await ask(transport, "POST", body=b"x")
        await upstream.restart()
        assert (await ask(transport, "POST", body=b"x"))[0] == 200


async def test_a_name_that_is_not_known_says_that_nothing_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*args: Any, **kwargs: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with client("http://llama-swap:8080") as transport:
        with pytest.raises(httpx.ConnectError, match="unknown"):
            await ask(transport)


async def test_connecting_has_a_limit_and_waiting_for_an_answer_has_none() -> None:
    with blackhole() as origin:
        async with client(origin, connect_timeout=0.1) as transport:
            with pytest.raises(httpx.ConnectTimeout):
                await ask(transport)
    async with Upstream(hang(0.5)) as upstream, client(upstream.url, connect_timeout=0.1) as transport:
        assert (await ask(transport))[0] == 200


async def test_a_name_is_looked_up_beside_the_loop_and_each_of_its_addresses_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = list[threading.Thread]()
    genuine = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: Any) -> list[Any]:
        threads.append(threading.current_thread())
        assert host == "llama-swap"
        refused = genuine("127.0.0.1", 1, type=socket.SOCK_STREAM)
        return refused + genuine("127.0.0.1", port, type=socket.SOCK_STREAM)

    async with Upstream() as upstream, client(f"http://llama-swap:{upstream.port}") as transport:
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        assert (await ask(transport))[0] == 200
    assert threads
    assert threading.main_thread() not in threads


async def test_ipv6() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.read()

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
    async with peer(handler, "::1") as origin, client(origin) as transport:
        assert "[::1]" in origin
        assert await ask(transport) == (200, b"ok")


# --- TLS

KEY = """
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgEMXDwyPrx81Ao/Ff
9Cg7nAvtvmsmWqayuLNPLvuN/sWhRANCAAQkMt9ruhafF7x2iQ5+1noAxO22mhW7
mWpC1/2CgV7KvLF/QRjXLqgT9Sn1CMW45nnWmoLl4f5dWAsVvhhzpjBD
-----END PRIVATE KEY-----
"""  # of localhost and 127.0.0.1, made for these tests, valid from 2020 to 2120
CERTIFICATE = """
-----BEGIN CERTIFICATE-----
MIIBZzCCAQ2gAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv
c3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
CWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABCQy32u6Fp8XvHaJ
Dn7WegDE7baaFbuZakLX/YKBXsq8sX9BGNcuqBP1KfUIxbjmedaaguXh/l1YCxW+
GHOmMEOjTjBMMA8GA1UdEwEB/wQFMAMBAf8wHQYDVR0OBBYEFGjU6WIG8FSz/u0Q
aenR/xloW8MDMBoGA1UdEQQTMBGCCWxvY2FsaG9zdIcEfwAAATAKBggqhkjOPQQD
AgNIADBFAiBcDJT3NR7ZaARK008zlfQWc/elMXDBvTL7VwG4Ly6jhQIhALnTNPZ1
R83hPGI37wolIvOvo8PQswJi4wB5k2vv8CsB
-----END CERTIFICATE-----
"""


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "certificate.pem"
    path.write_text(KEY + CERTIFICATE)
    return path


def encrypted(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request with its own body."""
    while True:
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length")), 0)
        body = await reader.readexactly(length)
        writer.write(head("200 OK", f"Content-Length: {length}") + body)


async def test_an_encrypted_upstream_is_believed_only_with_a_certificate_that_can_be_verified(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peer(echo, ssl=encrypted(certificate)) as origin:
        async with client(origin) as transport:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await ask(transport, "POST", body=b"secret")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        events, callbacks = order()
        async with client(origin) as transport:
            body = random.Random(0).randbytes(3 * MEGABYTE)
            for _ in range(2):
                assert await ask(transport, "POST", body=body, **callbacks) == (200, body)
            assert len(transport._idle) == 1
        assert [event.removesuffix(" in a task") for event in events] == ["on_sent", "on_head 200", "on_end None"] * 2


async def test_an_encrypted_upstream_is_believed_only_under_its_own_name(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with peer(echo, "127.0.0.2", ssl=encrypted(certificate)) as origin, client(origin) as transport:
        with pytest.raises(httpx.ConnectError, match="IP address mismatch"):
            await ask(transport)


async def test_giving_up_on_an_encrypted_upstream_that_does_not_answer_the_handshake() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with peer(handler) as origin, client(origin.replace("http:", "https:"), connect_timeout=0.1) as transport:
        with pytest.raises(httpx.ConnectTimeout):
            await ask(transport)
