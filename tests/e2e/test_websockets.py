"""WebSockets through the proxy, with a real client and a real server of them on either side."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from websockets.asyncio.client import connect
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, ConnectionClosedOK, InvalidStatus
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol
from wire_support import EACH_PARSER, PARSERS

from harness import Proxy, Upstream, raw

pytestmark = pytest.mark.asyncio(loop_scope="module")

IDLE = 0.5
CONFIG = """
models:
  chat-a: {}
  tts-a: {}
  loose: {compat: {ignoreWebsockets: true}}
"""


@dataclass
class Sockets:
    """What the upstream saw, and how it treats a socket."""

    seen: list[Request] = field(default_factory=list)
    open: set[ServerConnection] = field(default_factory=set)
    closed: list[tuple[int | None, str | None]] = field(default_factory=list)
    refuse: Response | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    change: asyncio.Event = field(default_factory=asyncio.Event)
    serve: Callable[[ServerConnection], Awaitable[None]] | None = None

    def fresh(self) -> None:
        self.seen.clear()
        self.closed.clear()
        self.refuse, self.serve = None, None
        self.gate.set()

    async def on_request(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("User-Agent", "").startswith("gpu-lease-proxy"):
            return connection.respond(404, "")
        self.seen.append(request)
        await self.gate.wait()
        return self.refuse

    async def handle(self, connection: ServerConnection) -> None:
        self.open.add(connection)
        try:
            await (self.serve or echo)(connection)
        finally:
            await connection.wait_closed()
            self.open.discard(connection)
            self.closed.append((connection.close_code, connection.close_reason))
            self.change.set()

    async def until_closed(self) -> tuple[int | None, str | None]:
        async with asyncio.timeout(5):
            while self.open or not self.closed:
                await self.change.wait()
                self.change.clear()
        return self.closed[-1]


async def echo(connection: ServerConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        async for message in connection:
            await connection.send(message)


def choose(connection: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    return offered[-1] if offered else None


async def served(sockets: Sockets) -> Server:
    return await serve(
        sockets.handle,
        "127.0.0.1",
        0,
        process_request=sockets.on_request,
        select_subprotocol=choose,
        ping_interval=None,
        max_size=None,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sockets() -> AsyncIterator[tuple[Sockets, int]]:
    sockets = Sockets()
    server = await served(sockets)
    async with server:
        yield sockets, server.sockets[0].getsockname()[1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxies(
    sockets: tuple[Sockets, int], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Proxy]]:
    file = tmp_path_factory.mktemp("ws") / "config.yaml"
    file.write_text(CONFIG)
    async with contextlib.AsyncExitStack() as stack:
        yield {
            parser: await stack.enter_async_context(
                Proxy(
                    f"http://127.0.0.1:{sockets[1]}",
                    http_parser=parser,
                    websocket_idle=IDLE,
                    llama_swap_config=str(file),
                    classes='{"tts": {"models": ["tts-a"]}, "image": {"websocket": "refuse", "models": ["pic*"]}}',
                )
            )
            for parser in PARSERS
        }


@pytest_asyncio.fixture(params=EACH_PARSER, loop_scope="module")
async def proxy(request: pytest.FixtureRequest, proxies: dict[str, Proxy], upstream: Sockets) -> AsyncIterator[Proxy]:
    proxy = proxies[request.param]
    yield proxy
    await proxy.until(waiters=0, holders=0, within=5)
    assert await proxy.metric("gpu_lease_orphans_total") == 0


@pytest_asyncio.fixture(loop_scope="module")
async def upstream(sockets: tuple[Sockets, int]) -> Sockets:
    sockets[0].fresh()
    return sockets[0]


def url(proxy: Proxy, path: str = "/upstream/chat-a/ws") -> str:
    return f"ws://127.0.0.1:{proxy.port}{path}"


def client(proxy: Proxy, path: str = "/upstream/chat-a/ws", **more: object) -> connect:
    return connect(url(proxy, path), proxy=None, compression=None, **more)  # type: ignore[arg-type]


async def test_messages_of_both_kinds_pass_both_ways_as_they_are(proxy: Proxy, upstream: Sockets) -> None:
    messages: list[str | bytes] = ["", "text", "é☃\x00", b"", b"\x00\xff", "x" * 300_000, b"y" * 3_000_000]
    async with client(proxy, max_size=None) as ws:
        for message in messages:
            await ws.send(message)
            assert await ws.recv() == message
        await ws.send(["in ", "pieces"])
        assert await ws.recv() == "in pieces"
        await (await ws.ping(b"still there"))
        assert (await proxy.queue())["holders"][0]["class"] == "llm"
    assert await upstream.until_closed() == (1000, "")


async def test_the_handshake_passes_as_any_request_does(proxy: Proxy, upstream: Sockets) -> None:
    path = "/upstream/chat-a/a%2Fb;c=d/%7E?q=%20&q=2"
    fields = {"Authorization": "Bearer secret", "X-One": "é", "Cookie": "a=b"}
    async with client(
        proxy, path, subprotocols=["chat.v1", "chat.v2"], additional_headers=fields, origin="http://o"
    ) as ws:
        assert ws.subprotocol == "chat.v2"
        assert ws.response is not None
        assert ws.response.headers["X-Lease-Class"] == "llm"
        assert float(ws.response.headers["X-Lease-Wait"]) >= 0
    (seen,) = upstream.seen
    assert seen.path == path
    wanted = {**fields, "Host": f"127.0.0.1:{proxy.port}", "Origin": "http://o", "X-Forwarded-Proto": "http"}
    assert {name: seen.headers[name] for name in wanted} == wanted
    assert seen.headers["Sec-WebSocket-Protocol"].replace(" ", "") == "chat.v1,chat.v2"
    assert "Sec-WebSocket-Extensions" not in seen.headers
    assert "secret" not in "\n".join(proxy.lines)


@pytest.mark.parametrize(("code", "reason"), [(1000, "done"), (1001, ""), (3000, "ours"), (4999, "é")])
async def test_close_codes_and_reasons_pass_both_ways(code: int, reason: str, proxy: Proxy, upstream: Sockets) -> None:
    async with client(proxy) as ws:
        await ws.close(code, reason)
    assert await upstream.until_closed() == (code, reason)

    async def leave(connection: ServerConnection) -> None:
        await connection.close(code, reason)

    upstream.serve = leave
    async with client(proxy) as ws:
        with pytest.raises((ConnectionClosedOK, ConnectionClosedError)):
            await ws.recv()
        assert (ws.close_code, ws.close_reason) == (code, reason)
    await proxy.until(holders=0)


async def test_an_upstream_that_dies_is_told_of_and_its_lease_is_free(proxy: Proxy, upstream: Sockets) -> None:
    async def die(connection: ServerConnection) -> None:
        connection.transport.abort()

    upstream.serve = die
    async with client(proxy) as ws:
        with pytest.raises(ConnectionClosedError):
            await ws.recv()
        assert ws.close_code == 1014
    await proxy.until(holders=0)


async def test_a_client_that_vanishes_gives_its_lease_back(proxy: Proxy, upstream: Sockets) -> None:
    async with client(proxy) as ws:
        await ws.send("hello")
        await ws.recv()
        await proxy.until(holders=1)
        ws.transport.abort()
        await proxy.until(holders=0)
    code, _ = await upstream.until_closed()
    assert code == 1001


async def test_an_open_socket_holds_its_models_lease_and_others_wait_for_it(proxy: Proxy, upstream: Sockets) -> None:
    async with client(proxy, "/upstream/tts-a/ws") as first:
        waiting = asyncio.create_task(hello(proxy, "/upstream/chat-a/ws"))
        assert [(w["class"], w["mode"]) for w in (await proxy.until(waiters=1))["waiters"]] == [("llm", "read")]
        await first.send("still mine")
        await first.recv()
        assert len(upstream.seen) == 1
    assert await waiting == "hello"


async def hello(proxy: Proxy, path: str) -> object:
    async with client(proxy, path) as ws:
        await ws.send("hello")
        return await ws.recv()


async def test_a_socket_without_a_message_is_closed_and_each_message_counts(proxy: Proxy, upstream: Sockets) -> None:
    async with client(proxy) as ws:
        for _ in range(6):
            await ws.send("here")
            await ws.recv()
            await asyncio.sleep(IDLE / 3)
        async with asyncio.timeout(IDLE * 20):
            with pytest.raises(ConnectionClosedOK):
                await ws.recv()
        assert ws.close_code == 1001
    assert (await upstream.until_closed())[0] == 1001


@pytest.mark.parametrize("path", ["/comfyui/ws", "/upstream/loose/ws", "/upstream/chat-a/x.js"])
async def test_what_llama_swap_neither_loads_nor_holds_takes_no_lease(
    path: str, proxy: Proxy, upstream: Sockets
) -> None:
    async with client(proxy, "/upstream/tts-a/ws"), client(proxy, path) as ws:
        await ws.send("hello")
        assert await ws.recv() == "hello"
        assert len((await proxy.queue())["holders"]) == 1
        assert ws.response is not None
        assert "X-Lease-Class" not in ws.response.headers


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/models", 501, "websocket_unsupported"),
        ("/v1/audio/voices?model=tts-a", 501, "websocket_unsupported"),
        ("/upstream/nobody/ws", 404, "not_found"),
        ("/upstream/tts-a/../chat-a/ws", 501, "websocket_unsupported"),
        ("/-/queue", 501, "websocket_unsupported"),
    ],
)
async def test_other_sockets_are_refused_before_anything_is_sent(
    path: str, status: int, code: str, proxy: Proxy, upstream: Sockets
) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await client(proxy, path)
    response = refused.value.response
    assert response.status_code == status
    assert json.loads(response.body or b"")["error"]["code"] == code
    assert not upstream.seen


async def test_a_refusal_of_the_upstream_passes(proxy: Proxy, upstream: Sockets) -> None:
    upstream.refuse = Response(418, "Teapot", Headers([("X-Why", "because")]), b"short and stout")
    with pytest.raises(InvalidStatus) as refused:
        await client(proxy)
    response = refused.value.response
    assert (response.status_code, response.headers["X-Why"], response.body) == (418, "because", b"short and stout")


async def test_a_client_that_leaves_in_the_queue_or_in_the_handshake_leaves_nothing(
    proxy: Proxy, upstream: Sockets
) -> None:
    async with client(proxy, "/upstream/tts-a/ws") as holder:
        gone = asyncio.create_task(hello(proxy, "/upstream/chat-a/ws"))
        await proxy.until(waiters=1)
        gone.cancel()
        await proxy.until(waiters=0)
        await holder.send("still here")
        assert await holder.recv() == "still here"
    upstream.gate.clear()
    gone = asyncio.create_task(hello(proxy, "/upstream/chat-a/ws"))
    await proxy.until(holders=1)
    gone.cancel()
    await proxy.until(holders=0)
    upstream.gate.set()


async def test_a_side_that_does_not_read_holds_the_other_up(proxy: Proxy, upstream: Sockets) -> None:
    sent = 0

    async def flood(connection: ServerConnection) -> None:
        nonlocal sent
        with contextlib.suppress(ConnectionClosed):
            for _ in range(400):
                await connection.send(b"x" * 250_000)
                sent += 1

    upstream.serve = flood
    async with client(proxy, max_queue=1) as ws:
        await until_still(lambda: sent)
        assert sent < 200, "a hundred megabytes were taken from the upstream for a client that does not read"
        received = 0
        with contextlib.suppress(ConnectionClosed):
            while received < 400:
                await ws.recv()
                received += 1
        assert received == 400


async def test_a_client_that_never_reads_keeps_its_lease_no_longer_than_one_that_is_silent(
    proxy: Proxy, upstream: Sockets
) -> None:
    async def flood(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await connection.send(b"x" * 250_000)

    upstream.serve = flood
    async with client(proxy, max_queue=1, close_timeout=0.1) as ws:
        await proxy.until(holders=1)
        await proxy.until(holders=0, within=IDLE * 20)
        assert ws.close_code is None


async def until_still(value: Callable[[], int]) -> None:
    """Return once `value` has not changed for a while."""
    before = -1
    while value() != before:
        before = value()
        await asyncio.sleep(IDLE / 5)


async def test_case_81_the_key_reaches_the_upstream_on_a_websocket_and_ours_does_not() -> None:
    sockets = Sockets()
    sockets.fresh()
    server = await served(sockets)
    async with server:
        origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Proxy(origin, api_keys="ours", upstream_api_key="theirs") as proxy:
            with pytest.raises(InvalidStatus) as refused:
                await client(proxy)
            assert refused.value.response.status_code == 401
            assert not sockets.seen
            async with client(proxy, additional_headers={"Authorization": "Bearer ours"}):
                pass
            assert sockets.seen[0].headers.get_all("Authorization") == ["Bearer theirs"]
            assert not any("ours" in line or "theirs" in line for line in proxy.lines)


@pytest.mark.parametrize("wire", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 101 Switching Protocols\r\n\r\n"])
async def test_an_upstream_that_speaks_no_websocket_is_a_502_and_a_lease_that_failed(wire: bytes) -> None:
    async with Upstream(raw(wire)) as upstream, Proxy(upstream.url) as proxy:
        with pytest.raises(InvalidStatus) as refused:
            await client(proxy)
        assert refused.value.response.status_code == 502
        await proxy.drained(upstream)
        assert await proxy.metric('gpu_lease_requests_total{class="llm",code="502",model="other"}') == 1


async def test_a_stop_closes_open_sockets_with_the_code_of_a_restart(sockets: tuple[Sockets, int]) -> None:
    sockets[0].fresh()
    async with Proxy(f"http://127.0.0.1:{sockets[1]}", shutdown_grace=0.2) as proxy:
        async with client(proxy) as ws:
            await ws.send("hello")
            await ws.recv()
            proxy.signal()
            with pytest.raises(ConnectionClosedError):
                await ws.recv()
            assert ws.close_code == 1012
        assert await proxy.exit_code() == 0
    assert (await sockets[0].until_closed())[0] in {1001, 1006, 1012}
