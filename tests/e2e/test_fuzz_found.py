"""What generated requests and fuzzing have found in the server's protocols, each as a small test of its own.

Where several requests come on one connection, the answers go back in their order (RFC 9112, section 9.3.2), and what
cannot be read is said last.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from wire_support import EACH_PARSER, Stack, body_after, error_of, lines, once, status_of

from harness import CHAT, Proxy, RawClient, Upstream, answer, begun, chunk, head, slow

pytestmark = pytest.mark.asyncio(loop_scope="module")

GET = lines("GET /v1/models HTTP/1.1", "Host: test")
JUNK = b"GET / HTTP/1.1\r\nHost : test\r\n\r\n"
HEAD_TIMEOUT = 0.3


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
    """The proxy under each parser; drained after each test, and nothing went wrong in it."""
    proxy = await stack.proxy(http_parser=request.param, head_timeout=HEAD_TIMEOUT)
    logged = len(proxy.lines)
    yield proxy
    await proxy.drained(upstream)
    assert not [line for line in proxy.lines[logged:] if "Traceback" in line]


def chat(*fields: str) -> bytes:
    body = json.dumps(CHAT).encode()
    start = ("POST /v1/chat/completions HTTP/1.1", "Host: test", "Content-Type: application/json")
    return lines(*start, f"Content-Length: {len(body)}", *fields, body=body)


async def test_a_bad_head_before_a_large_body_is_a_400_and_no_large_head(proxy: Proxy, upstream: Upstream) -> None:
    data = lines("POST /v1/models HTTP/1.1", "Host : test", "Content-Length: 200000", body=b"x" * 200_000)
    async with RawClient(proxy.port) as client:
        client.send(data)
        assert status_of(await client.head()) == 400
    assert not upstream.seen


async def test_a_bad_chunk_behind_a_head_request_is_a_400(proxy: Proxy, upstream: Upstream) -> None:
    data = lines("HEAD /v1/models HTTP/1.1", "Host: test", "Transfer-Encoding: chunked", body=b"x\r\n")
    got, _ = await once(proxy, data)
    assert status_of(got) == 400


async def test_a_large_head_that_waits_behind_another_request_is_a_431(proxy: Proxy, upstream: Upstream) -> None:
    large = lines("GET /v1/models HTTP/1.1", "Host: test", "X-Large: " + "x" * 70_000)
    async with RawClient(proxy.port) as client:
        client.send(chat() + large)
        got = await client.head()
        assert (status_of(got), await body_after(client, got)) == (200, b'{"ok":true}')
        got = await client.head()
        assert status_of(got) == 431
        assert error_of(await body_after(client, got))["code"] == "head_too_large"
        assert await client.rest() == b""
    assert len(upstream.seen) == 1


async def test_what_cannot_be_read_is_said_after_the_answers_before_it(proxy: Proxy, upstream: Upstream) -> None:
    async with RawClient(proxy.port) as client:
        client.send(chat() + GET + JUNK + GET)
        for _ in range(2):
            got = await client.head()
            assert (status_of(got), await body_after(client, got)) == (200, b'{"ok":true}')
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")
    assert len(upstream.seen) == 2


async def test_what_cannot_be_read_breaks_into_no_answer_that_has_begun(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = slow(5, 0.02)
    async with RawClient(proxy.port) as client:
        client.send(chat())
        await client.until(b"t0 ")
        client.send(JUNK)
        got = await client.rest()
    assert b"data: [DONE]\n\n\r\n0\r\n\r\nHTTP/1.1 400 " in got


async def test_a_client_that_leaves_before_it_is_told_frees_its_lease(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = begun(asyncio.Event())
    async with RawClient(proxy.port) as client:
        client.send(chat() + chat() + JUNK)
        await client.until(b"t0 ")
        await proxy.until(holders=1)
        client.reset()
    await proxy.until(holders=0, waiters=0)
    await asyncio.wait_for(upstream.seen[0].closed.wait(), 5)
    assert len(upstream.seen) == 1


async def test_a_body_that_breaks_after_its_answer_has_begun_cuts_that_off(proxy: Proxy, upstream: Upstream) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head("200 OK", "Transfer-Encoding: chunked") + chunk(b"begun"))
        await reader.read()
        writer.close()

    await upstream.stop()
    server = await asyncio.start_server(serve, "127.0.0.1", upstream.port)
    try:
        async with RawClient(proxy.port) as client:
            client.send(lines("POST /unload HTTP/1.1", "Host: test", "Transfer-Encoding: chunked", body=chunk(b"ab")))
            await client.until(b"begun\r\n")
            client.send(b"x\r\n")
            assert await client.rest() == b""
    finally:
        server.close()
        await upstream.restart()


async def test_a_long_pipeline_is_no_long_head_and_its_time_is_not_that_of_one(
    proxy: Proxy, upstream: Upstream
) -> None:
    """However the bytes are divided, each piece ends in a head."""
    async with RawClient(proxy.port) as client:
        for _ in range(30):
            wire = (
                b"X-A: b\r\n\r\n" + b"GET /v1/models HTTP/1.1\r\nHost: test\r\n\r\n" * 100 + GET.removesuffix(b"\r\n")
            )
            client.send(wire if _ else wire.removeprefix(b"X-A: b\r\n\r\n"))
            await asyncio.sleep(HEAD_TIMEOUT / 10)
        client.send(b"Connection: close\r\n\r\n")
        assert (await client.rest(30)).count(b"HTTP/1.1 200 ") == 30 * 101


async def test_a_large_read_that_ends_in_a_head_is_no_long_head(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = answer(b"")
    async with RawClient(proxy.port) as client:
        client.send(GET * 5000 + lines("GET /v1/models HTTP/1.1", "Host: test", "Connection: close"))
        assert (await client.rest(30)).count(b"HTTP/1.1 200 ") == 5001


FROZEN = """
import gc, os, signal
from proxy.server import run
from proxy.settings import Settings

def started(url):
    print(gc.get_freeze_count())
    os.kill(os.getpid(), signal.SIGTERM)

run(Settings(upstream_url="http://127.0.0.1:9", listen_port=0), started=started)
"""


async def test_what_was_loaded_at_the_start_is_no_part_of_a_collection() -> None:
    """A collection that goes through all of it stops the loop for longer than any input may."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FROZEN, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await process.communicate()
    assert int(output) > 10_000
