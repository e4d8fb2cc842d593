"""What the server owes to clients before the application sees anything: bounds of a head, and each fault mended.

Under both parsers, with real sockets.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from wire_support import EACH_PARSER, Stack, body_after, error_of, fields_of, lines, once, status_of

from harness import CHAT, Proxy, RawClient, Upstream, answer, hang, slow

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEAD_TIMEOUT = 0.4
GET = ("GET /v1/models HTTP/1.1", "Host: test")
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with Stack(tmp_path_factory.mktemp("spool")) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def upstream(stack: Stack) -> Upstream:
    stack.fresh()
    return stack.upstream


@pytest_asyncio.fixture(params=EACH_PARSER, loop_scope="module")
async def proxy(request: pytest.FixtureRequest, stack: Stack, upstream: Upstream) -> AsyncIterator[Proxy]:
    """The proxy under each parser; drained after each test."""
    proxy = await stack.proxy(http_parser=request.param, head_timeout=HEAD_TIMEOUT, body_timeout=HEAD_TIMEOUT)
    yield proxy
    await proxy.drained(upstream)


def chat(*fields: str) -> bytes:
    body = json.dumps(CHAT).encode()
    head = ("POST /v1/chat/completions HTTP/1.1", "Host: test", "Content-Type: application/json")
    return lines(*head, f"Content-Length: {len(body)}", *fields, body=body)


# --- the time of a head


async def test_a_head_that_does_not_end_is_a_408(proxy: Proxy, upstream: Upstream) -> None:
    async with RawClient(proxy.port) as client:
        client.send(b"GET /v1/models HTTP/1.1\r\nHost: te")
        got = await client.head()
        assert status_of(got) == 408
        assert error_of(await body_after(client, got))["code"] == "head_timeout"
        assert await client.rest() == b""
    assert not upstream.seen


async def test_a_head_that_trickles_has_no_more_time_than_one_that_stands_still(proxy: Proxy) -> None:
    async with RawClient(proxy.port) as client:
        client.send(b"GET /v1/models HTTP/1.1\r\n")
        async with asyncio.timeout(HEAD_TIMEOUT * 10):
            while not client.reader._buffer and not client.reader.at_eof():  # type: ignore[attr-defined]
                client.send(b"X-A: b\r\n")
                await asyncio.sleep(HEAD_TIMEOUT / 8)
        assert status_of(await client.head()) == 408


async def test_a_connection_on_which_nothing_is_asked_is_closed_without_a_word(proxy: Proxy) -> None:
    async with RawClient(proxy.port) as client:
        assert await client.rest() == b""


async def test_the_second_head_of_a_connection_has_its_time_too(proxy: Proxy) -> None:
    async with RawClient(proxy.port) as client:
        client.send(lines(*GET))
        await body_after(client, await client.head())
        client.send(b"GET /v1/mod")
        assert status_of(await client.head()) == 408


async def test_a_connection_in_reserve_may_rest_for_longer(proxy: Proxy) -> None:
    async with RawClient(proxy.port) as client:
        for _ in range(2):
            client.send(lines(*GET))
            got = await client.head()
            await body_after(client, got)
            assert status_of(got) == 200
            await asyncio.sleep(HEAD_TIMEOUT * 2)


async def test_a_long_answer_is_no_long_head(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = slow(8, HEAD_TIMEOUT / 3)
    async with RawClient(proxy.port) as client:
        client.send(chat())
        assert status_of(await client.head()) == 200
        assert (await client.rest_of_chunks()).count(b"data: ") == 9


# --- the time of a body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/anything", "/api/profiles/active"])
async def test_a_body_that_stands_still_is_a_408(path: str, proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = hang()
    method = "PUT" if path.endswith("active") else "POST"
    async with RawClient(proxy.port) as client:
        client.send(lines(f"{method} {path} HTTP/1.1", "Host: a", "Content-Length: 9", body=b"{"))
        got = await client.head()
        assert status_of(got) == 408
        assert dict(fields_of(got))[b"connection"] == b"close"
        assert error_of(await body_after(client, got))["code"] == "body_timeout"


async def test_a_body_that_goes_on_may_take_its_time(proxy: Proxy, upstream: Upstream) -> None:
    body = json.dumps(CHAT).encode()
    async with RawClient(proxy.port) as client:
        client.send(chat()[: -len(body)])
        for place in range(0, len(body), 20):
            client.send(body[place : place + 20])
            await asyncio.sleep(HEAD_TIMEOUT / 3)
        assert status_of(await client.head()) == 200
    assert upstream.seen[0].body == body


# --- the size of a head


HUGE = {
    "one field": lines(*GET, "X-A: " + "a" * 100_000),
    "many fields": lines(*GET, *(f"X-{number}: {number}" for number in range(10_000))),
    "a target": lines("GET /v1/models?" + "a" * 100_000 + " HTTP/1.1", "Host: a"),
    "a name": lines(*GET, "X" * 100_000 + ": a"),
    "a field without an end": lines(*GET, "X-A: " + "a" * 100_000)[:-4],
    "a little too much": lines(*GET, "X-A: " + "a" * (64 * 1024 - 40)),
}


@pytest.mark.parametrize("size", [1_000, 1_000_000], ids=["in pieces", "at once"])
@pytest.mark.parametrize("what", HUGE)
async def test_a_head_above_the_limit_is_a_431(what: str, size: int, proxy: Proxy, upstream: Upstream) -> None:
    data = HUGE[what]
    async with RawClient(proxy.port) as client:
        for place in range(0, len(data), size):
            client.send(data[place : place + size])
            await asyncio.sleep(0)
        got = await client.head()
        assert status_of(got) == 431
        assert error_of(await body_after(client, got))["code"] == "head_too_large"
    assert not upstream.seen


async def test_a_head_within_the_limit_passes_and_its_size_is_that_of_one_head(
    proxy: Proxy, upstream: Upstream
) -> None:
    field = "X-A: " + "a" * 60_000
    async with RawClient(proxy.port) as client:
        for _ in range(3):
            client.send(chat(field))
            got = await client.head()
            await body_after(client, got)
            assert status_of(got) == 200
    assert [len(seen.headers) for seen in upstream.seen] == [len(upstream.seen[0].headers)] * 3


# --- the faults


async def test_case_36_a_client_of_http_1_0_gets_no_chunks(proxy: Proxy, upstream: Upstream) -> None:
    for script, request in ((slow(3, 0.01), chat()), (answer(b"{}"), lines(*GET)), (slow(3, 0.01), chat())):
        upstream.script = script
        async with RawClient(proxy.port) as client:
            client.send(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
            got = await client.head()
            assert b"transfer-encoding" not in dict(fields_of(got))
            body = await client.rest()
        assert body == b"{}" if request.startswith(b"GET") else body.endswith(b"\n\ndata: [DONE]\n\n")


async def test_case_36_a_stream_that_breaks_off_under_http_1_0_ends_with_a_close(
    proxy: Proxy, upstream: Upstream
) -> None:
    upstream.script = slow(3, 0.01, end=b"")
    async with RawClient(proxy.port) as client:
        client.send(chat().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert status_of(await client.head()) == 200
        assert b"0\r\n\r\n" not in await client.rest()


async def test_a_client_that_leaves_behind_a_pipelined_request_leaves_the_queue(
    proxy: Proxy, upstream: Upstream
) -> None:
    upstream.script = hang()
    async with RawClient(proxy.port) as holder:
        holder.tts()
        await proxy.until(holders=1)
        client = RawClient(proxy.port)
        async with client:
            client.send(chat() * 3)
            await proxy.until(waiters=1)
        await proxy.until(waiters=0)
        async with RawClient(proxy.port) as client:
            client.send(chat() * 2)
            await proxy.until(waiters=1)
            client.reset()
            await proxy.until(waiters=0)


async def test_a_running_request_ends_with_a_client_that_leaves_behind_a_pipelined_one(
    proxy: Proxy, upstream: Upstream
) -> None:
    upstream.script = hang()
    async with RawClient(proxy.port) as client:
        client.send(chat() * 2)
        await proxy.until(holders=1)
    await proxy.until(holders=0)
    assert len(upstream.seen) == 1


@pytest.mark.parametrize("pieces", [1, 2, 1000])
async def test_a_request_that_asks_for_an_upgrade_in_vain_goes_on_as_it_is(
    pieces: int, proxy: Proxy, upstream: Upstream
) -> None:
    body = json.dumps(CHAT).encode()
    chunked = lines(
        *("POST /v1/chat/completions HTTP/1.1", "Host: a", "Content-Type: application/json"),
        *("Transfer-Encoding: chunked", *H2C),
        body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
    )
    data = chat(*H2C) + chunked + lines(*GET, *H2C) + chat()
    step = -(-len(data) // pieces)
    async with RawClient(proxy.port) as client:
        for place in range(0, len(data), step):
            client.send(data[place : place + step])
            await asyncio.sleep(0)
        for _ in range(4):
            got = await client.head()
            await body_after(client, got)
            assert status_of(got) == 200
    assert [seen.body for seen in upstream.seen] == [body, body, b"", body]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_that_asks_for_http_2_is_served_with_its_body(proxy: Proxy, upstream: Upstream) -> None:
    url = f"{proxy.url}/v1/chat/completions"
    command = ("curl", "-sS", "--noproxy", "*", "--http2", "-H", "content-type: application/json")
    process = await asyncio.create_subprocess_exec(
        *command, "-d", json.dumps(CHAT), "-w", "%{http_code} %{http_version}", url, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out.endswith(b"200 1.1")
    assert upstream.seen[0].json == CHAT


async def test_every_refusal_of_the_server_is_counted(proxy: Proxy) -> None:
    before = await proxy.metric('gpu_lease_rejected_total{reason="head_too_large"}')
    await once(proxy, HUGE["one field"])
    assert await proxy.metric('gpu_lease_rejected_total{reason="head_too_large"}') == before + 1
