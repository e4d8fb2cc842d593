"""Cases 39, 43, 48, 49, 51, 52 and 54: what a proxy must not change, and must survive. See tests/cases.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from wire_support import EACH_PARSER, Stack, body_after, fields_of, lines, once, status_of, until

from harness import CHAT, SSE, Proxy, RawClient, Seen, Upstream, answer, chunk, event, hang, raw, slow

pytestmark = pytest.mark.asyncio(loop_scope="module")

GET = ("GET /v1/models HTTP/1.1", "Host: test")
POST = ("POST /v1/chat/completions HTTP/1.1", "Host: test", "Content-Type: application/json")
BODY = json.dumps(CHAT).encode()


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
    proxy = await stack.proxy(http_parser=request.param)
    yield proxy
    await proxy.drained(upstream)


def chat(*fields: str | bytes) -> bytes:
    return lines(*POST, f"Content-Length: {len(BODY)}", *fields, body=BODY)


async def test_case_39_repeated_fields_stay_apart_in_their_order(proxy: Proxy, upstream: Upstream) -> None:
    cookies = ["a=1", "b=2; Expires=Wed, 01 Jan 2031 00:00:00 GMT"]
    links = ['</a>; rel="next"', '</b,c>; rel="prev"']
    told = [*(f"Set-Cookie: {each}" for each in cookies), *(f"Link: {each}" for each in links)]
    upstream.script = answer(b"{}", "200 OK", *told)
    got, _ = await once(proxy, chat("X-Multi: one, two", "X-Other: -", "X-Multi: three", "X-Multi: one, two"))
    fields = [(name, value.decode()) for name, value in fields_of(got)]
    assert [value for name, value in fields if name == b"set-cookie"] == cookies
    assert [value for name, value in fields if name == b"link"] == links
    sent = [(name, value) for name, value in upstream.seen[0].headers if name in {b"x-multi", b"x-other"}]
    assert sent == [(b"x-multi", b"one, two"), (b"x-other", b"-"), (b"x-multi", b"three"), (b"x-multi", b"one, two")]


async def test_case_43_a_body_that_waits_for_100_is_asked_for_also_behind_a_full_gpu(
    proxy: Proxy, upstream: Upstream
) -> None:
    held = asyncio.Event()
    upstream.by_model["tts-a"] = hang()
    async with RawClient(proxy.port) as holder, RawClient(proxy.port) as client:
        holder.tts()
        await proxy.until(holders=1)
        client.send(lines(*POST, f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
        assert status_of(await client.head()) == 100  # while somebody else has the GPU
        client.send(BODY)
        await proxy.until(waiters=1)
        held.set()
        holder.close()
        assert status_of(await client.head()) == 200
    seen = [each for each in upstream.seen if each.body == BODY]
    assert len(seen) == 1
    assert b"expect" not in dict(seen[0].headers)


@pytest.mark.parametrize(
    ("field", "passes"),
    [
        (b"X-A: " + b"a" * 100 * 1024, None),
        (b"X-A: \xff\xfe caf\xe9", b"\xff\xfe caf\xe9"),
        (b"X-A:", b""),
        (b"X-A:   ", b""),
        (b"X-A: a\x00b", None),
        (b"X-A: a\x01b", b"a\x01b"),
        (b"X-A : b", None),
        (b": b", None),
        (b"X-A: b\nX-B: c", b"b"),
    ],
    ids=repr,
)
async def test_case_48_a_field_passes_byte_for_byte_or_is_refused(
    field: bytes, passes: bytes | None, proxy: Proxy, upstream: Upstream
) -> None:
    got, _ = await once(proxy, chat(field))
    if status_of(got) == 200:
        assert passes is not None
        assert [value for name, value in upstream.seen[0].headers if name == b"x-a"] == [passes]
    else:
        assert status_of(got) in {400, 431}
        assert not upstream.seen


async def test_case_49_a_client_that_has_said_all_and_only_reads_leaves_nothing_behind(
    proxy: Proxy, upstream: Upstream
) -> None:
    upstream.script = slow(3, 0.02)
    async with RawClient(proxy.port) as client:
        client.send(chat())
        client.writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
        got = await client.rest()
    assert b"200 OK" in got or got == b"", "the server takes it for a departure, or serves it; nothing in between"
    await proxy.until(holders=0, waiters=0)


async def test_case_49_one_that_half_closes_in_the_queue_is_not_granted_the_gpu(
    proxy: Proxy, upstream: Upstream
) -> None:
    upstream.by_model["tts-a"] = hang()
    async with RawClient(proxy.port) as holder, RawClient(proxy.port) as client:
        holder.tts()
        await proxy.until(holders=1)
        client.send(chat())
        await proxy.until(waiters=1)
        client.writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
        await proxy.until(waiters=0)
    assert [each.body for each in upstream.seen].count(BODY) == 0


@pytest.mark.parametrize("path", ["/upstream/chat-a/ws", "/comfyui/ws"])
async def test_case_51_a_websocket_that_the_upstream_does_not_take_is_no_hang_with_a_lease(
    path: str, proxy: Proxy, upstream: Upstream
) -> None:
    """That they are bridged, with which codes and leases, is in test_websockets.py."""
    upstream.script = answer(b"no", "404 Not Found")
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"ws://127.0.0.1:{proxy.port}{path}", proxy=None, open_timeout=5)
    assert refused.value.response.status_code == 404
    upstream.script = hang()
    waiting = asyncio.create_task(_opened(proxy, path))
    await until(lambda: any(seen.target.decode() == path for seen in upstream.seen[1:]))
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await proxy.until(holders=0)


async def _opened(proxy: Proxy, path: str) -> None:
    await connect(f"ws://127.0.0.1:{proxy.port}{path}", proxy=None, open_timeout=30)


async def test_case_52_each_event_arrives_when_it_was_written_whatever_codings_the_client_takes(
    proxy: Proxy, upstream: Upstream
) -> None:
    """That a reverse proxy in front keeps it so is in test_reverse_proxies.py."""
    go = asyncio.Event()

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE)
        for number in range(3):
            go.clear()
            writer.write(chunk(event(number)))
            await go.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    upstream.script = script
    async with RawClient(proxy.port) as client:
        client.send(chat("Accept-Encoding: gzip, br, zstd"))
        fields = fields_of(await client.head())
        assert (b"x-accel-buffering", b"no") in fields
        assert b"content-encoding" not in dict(fields)
        for number in range(3):
            await client.until(b"t%d " % number)  # the next is only written once this one is here
            go.set()
        await client.rest_of_chunks()
    assert dict(upstream.seen[0].headers)[b"accept-encoding"] == b"gzip, br, zstd"


async def test_case_52_what_the_upstream_says_of_buffering_stays(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = raw(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Accel-Buffering: yes\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
        close=False,
    )
    got, _ = await once(proxy, chat())
    assert [value for name, value in fields_of(got) if name == b"x-accel-buffering"] == [b"yes"]


async def test_case_54_interim_answers_and_trailers_do_no_harm(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = raw(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTrailer: X-T\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunk(b'{"a":1}')
        + b"0\r\nX-T: 1\r\n\r\n",
        close=False,
    )
    async with RawClient(proxy.port) as client:
        for request in (chat(), lines(*GET)):
            client.send(request)
            got = await client.head()
            assert status_of(got) == 200
            assert b"link" not in dict(fields_of(got))
            assert await body_after(client, got) == b'{"a":1}'
