"""What passes through, and what happens when either end of the wire misbehaves; see tests/cases.md.

The proxy runs as users start it, under both of the server's parsers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from wire_support import (
    EACH_PARSER,
    MAX_BODY,
    MAX_SPOOL,
    Stack,
    body_after,
    connections,
    descriptors,
    error_of,
    fields_of,
    lines,
    once,
    pieces,
    status_of,
    until,
)

from harness import (
    CHAT,
    SSE,
    TTS,
    InProcess,
    Proxy,
    RawClient,
    Seen,
    Upstream,
    answer,
    chunk,
    event,
    hang,
    head,
    raw,
    slow,
)
from proxy import gateway, routes

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT_PATH = "/v1/chat/completions"
GET = ("GET /v1/models HTTP/1.1", "Host: test")
both_parsers = pytest.mark.parametrize("parser", EACH_PARSER)


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


def chat(*fields: str, **changes: Any) -> bytes:
    """`POST chat` of the cases."""
    body = json.dumps(CHAT | changes).encode()
    head = (
        f"POST {CHAT_PATH} HTTP/1.1",
        "Host: test",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return lines(*head, *fields, body=body)


# --- the upstream client


async def test_case_18_clients_that_leave_at_every_moment_cost_no_connection(proxy: Proxy, upstream: Upstream) -> None:
    await proxy.drained(upstream)
    before = len(descriptors(proxy))
    upstream.script = slow(1000, 0.05)
    for number in range(300):
        async with RawClient(proxy.port) as client:
            client.chat()
            await asyncio.sleep(number % 20 * 0.0003)
            client.reset()
    await once(proxy, lines("GET /-/healthz HTTP/1.1", "Host: test"))  # accepted after all of them
    await proxy.drained(upstream)
    await until(lambda: len(descriptors(proxy)) <= before + 1)


async def test_case_20_a_connection_closed_under_a_post_is_a_502_and_the_post_was_sent_once(
    proxy: Proxy, upstream: Upstream
) -> None:
    reused = False
    while not reused:  # unless one of the proxy's own questions has just taken the connection
        upstream.seen.clear()
        upstream.script = answer()
        assert (await proxy.client.post(CHAT_PATH, json=CHAT)).status_code == 200
        upstream.script = raw(b"")
        response = await proxy.client.post(CHAT_PATH, json=CHAT)
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "upstream_failed"
        assert len(upstream.seen) == 2
        reused = upstream.seen[0].connection == upstream.seen[1].connection


async def test_case_20_a_connection_closed_while_idle_is_replaced(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = raw(head("200 OK", "Content-Length: 2") + b"ok")
    for number in range(1, 6):
        response = await proxy.client.post(CHAT_PATH, json=CHAT)
        assert (response.status_code, response.text) == (200, "ok")
        assert len(upstream.seen) == number
    assert len({seen.connection for seen in upstream.seen}) == 5


async def test_case_21_an_answer_that_never_comes_is_not_asked_for_twice(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = hang(0.3, raw(b""))
    response = await proxy.client.post(CHAT_PATH, json=CHAT)
    assert response.status_code == 502
    assert len(upstream.seen) == 1
    assert upstream.seen[0].json == CHAT


@both_parsers
async def test_case_24_proxies_of_the_environment_are_not_used(parser: str) -> None:
    names = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")
    env = {**dict.fromkeys(names, "http://127.0.0.1:9"), "NO_PROXY": "", "no_proxy": ""}
    async with Upstream() as upstream, Proxy(upstream.url, env=env, http_parser=parser) as proxy:
        assert (await proxy.client.post(CHAT_PATH, json=CHAT)).status_code == 200
        assert len(upstream.seen) == 1
        await proxy.drained(upstream)


async def test_case_25_a_cookie_belongs_to_the_client_that_got_it(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = answer(b"{}", "200 OK", "Set-Cookie: s=1")
    first, _ = await once(proxy, chat())
    assert (b"set-cookie", b"s=1") in fields_of(first)
    await once(proxy, chat())
    await once(proxy, chat("Cookie: mine=2"))
    cookies = [[value for name, value in seen.headers if name.lower() == b"cookie"] for seen in upstream.seen]
    assert cookies == [[], [], [b"mine=2"]]


TRUNCATED = {
    "reset": raw(SSE + b"".join(chunk(event(number)) for number in range(3)), reset=True),
    "no last chunk": raw(SSE + b"".join(chunk(event(number)) for number in range(3))),
    "short": raw(head("200 OK", "Content-Length: 100") + b"x" * 40),
}


@pytest.mark.parametrize("how", TRUNCATED)
async def test_case_30_an_answer_that_breaks_off_reaches_the_client_broken_off(
    how: str, proxy: Proxy, upstream: Upstream
) -> None:
    series = 'gpu_lease_exchanges_total{class="llm",outcome="upstream_truncated"}'
    before, logged = await proxy.metric(series), len(proxy.lines)
    go = asyncio.Event()

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await TRUNCATED[how](seen, reader, held_back(writer, go))

    upstream.script = script
    async with RawClient(proxy.port) as client:
        client.chat()
        assert status_of(await client.head()) == 200
        got = await client.until(b"x" * 40 if how == "short" else b"t2 ")
        go.set()
        got += await client.rest()
    assert b"0\r\n\r\n" not in got
    assert got.count(b"data: ") == (0 if how == "short" else 3)
    assert await proxy.metric(series) == before + 1
    assert not any("Traceback" in line for line in proxy.lines[logged:])


def held_back(writer: asyncio.StreamWriter, go: asyncio.Event) -> asyncio.StreamWriter:
    """`writer`, whose `drain` waits for `go`: what a script does after it comes when the client has seen what came
    before."""
    genuine = writer.drain

    async def drain() -> None:
        await genuine()
        await go.wait()

    writer.drain = drain  # type: ignore[method-assign]
    return writer


DEAD = {
    "closes": b"",
    "closes in the head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "four digits": b"HTTP/1.1 2000 x\r\n\r\n",
    "status 600": b"HTTP/1.1 600 x\r\nContent-Length: 0\r\n\r\n",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "unasked upgrade": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
}


@pytest.mark.parametrize("how", DEAD)
async def test_case_32_no_usable_head_is_a_502(how: str, proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = raw(DEAD[how])
    for path, body in ((CHAT_PATH, CHAT), ("/v1/audio/speech", TTS)):
        response = await proxy.client.post(path, json=body)
        assert response.status_code == 502
        assert response.headers["content-type"] == "application/json"
        assert "x-lease-class" in response.headers
        error = response.json()["error"]
        assert (error["code"], error["type"], error["param"]) == ("upstream_failed", "server_error", None)
    assert len(upstream.seen) == 2


async def test_case_32_a_refused_connection_is_a_502_at_once_where_no_lease_is_held(
    proxy: Proxy, upstream: Upstream
) -> None:
    await upstream.stop()
    try:
        response = await proxy.client.get("/v1/models")
    finally:
        await upstream.restart()
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "upstream_unreachable"
    assert response.headers["retry-after"] == "1"


async def test_case_32_anthropic_clients_get_their_envelope(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = raw(b"")
    response = await proxy.client.post("/v1/messages", json=CHAT)
    assert response.status_code == 502
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "api_error"


async def test_case_33_an_error_of_the_upstream_passes_as_it_is(proxy: Proxy, upstream: Upstream) -> None:
    body = b'{"src":"llama-swap","error":{"code":"concurrency_limit"}}'
    for status in ("429 Too Many Requests", "400 Bad Request", "500 Internal Server Error", "503 Service Unavailable"):
        upstream.script = answer(body, status, "Retry-After: 1")
        response = await proxy.client.post(CHAT_PATH, json=CHAT)
        assert response.status_code == int(status[:3])
        assert response.headers["retry-after"] == "1"
        assert response.content == body
        assert not (await proxy.queue())["holders"]
    assert len(upstream.seen) == 4


async def test_case_74_a_request_waits_in_its_lease_while_the_upstream_refuses_connections(
    proxy: Proxy, upstream: Upstream
) -> None:
    await upstream.stop()
    try:
        posting = asyncio.create_task(proxy.client.post(CHAT_PATH, json=CHAT))
        await proxy.until(holders=1)
        await asyncio.sleep(1)
        assert not posting.done()
    finally:
        await upstream.restart()
    response = await posting
    assert response.status_code == 200
    assert [seen.json for seen in upstream.seen] == [CHAT]


async def test_case_74_a_restart_of_the_upstream_is_not_noticed(proxy: Proxy, upstream: Upstream) -> None:
    for _ in range(3):
        assert (await proxy.client.post(CHAT_PATH, json=CHAT)).status_code == 200
        await upstream.stop()
        await upstream.restart()
    assert (await proxy.client.get("/v1/models")).status_code == 200


async def test_case_74_a_client_that_leaves_meanwhile_frees_its_lease(proxy: Proxy, upstream: Upstream) -> None:
    await upstream.stop()
    try:
        async with RawClient(proxy.port) as client:
            client.chat()
            await proxy.until(holders=1)
        await proxy.until(holders=0, waiters=0)
    finally:
        await upstream.restart()
    assert not upstream.seen


# --- the target


PASSING_TARGETS = [
    b"/upstream/chat-a/api/userdata/workflows%2Fa%20b.json",
    b"/upstream/chat-a/%2f%2F%7E%7e~%20%25%00%ff",
    b"/upstream/chat-a/a;b=c,d/e:f@g!h$i&j(k)l*m+n=o[p]",
    b"/upstream/chat-a/a'b\"c<d>e|f\\g^h`i{j}k",
    b"/upstream//chat-a//x",
    b"//upstream/chat-a/x",
    b"/upstream/chat-a/../tts-a/x",
    b"/upstream/chat-a/./x/.",
    b"/upstream/chat-a/%2e%2e/x",
    b"/%75pstream/chat%2Da/x",
    b"/upstream/chat-a/x?a=b?c&d=%2F&e=+&f=%zz;g='\"<>|\\^`{}",
    b"/upstream/chat-a/x?a=b&a=c&&=",
    b"/upstream/chat-a/" + b"x" * 8000,
    b"/v1/%6dodels",
    b"/v1/models/",
    b"/",
    b"/favicon.ico?",
    b"/unknown",
]

REFUSED_TARGETS = [
    b"/upstream/chat-a/%zz",
    b"/upstream/chat-a/%",
    b"/upstream/chat-a/%4",
    b"/upstream/chat-a/\xc3\xa9",
    b"/upstream/chat-a/a b",
    b"/upstream/chat-a/a\tb",
    b"*",
    b"upstream/chat-a/x",
    b"ftp://llm.home/upstream/chat-a/x",
    b"http://",
]


@both_parsers
async def test_case_45_the_target_that_was_classified_is_the_one_that_is_sent(
    parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    classified = list[bytes]()
    genuine = routes.match_route

    def match_route(method: str, raw_path: bytes) -> Any:
        classified.append(raw_path)
        return genuine(method, raw_path)

    monkeypatch.setattr(gateway, "match_route", match_route)
    async with Upstream() as upstream, InProcess(upstream.url, http_parser=parser) as server:
        for target in PASSING_TARGETS:
            async with RawClient(server.port) as client:
                client.send(b"GET %b HTTP/1.1\r\nHost: test\r\n\r\n" % target)
                await client.answer()
            if target.endswith(b"?"):
                target = target[:-1]  # the one byte that no ASGI server hands on  # noqa: PLW2901
            assert upstream.seen[-1].target == target
            assert classified[-1] == target.partition(b"?")[0]
        assert len(upstream.seen) == len(classified) == len(PASSING_TARGETS)
        await server.idle()


@pytest.mark.parametrize("target", REFUSED_TARGETS, ids=repr)
async def test_case_45_a_target_that_could_be_read_in_two_ways_is_refused(
    target: bytes, proxy: Proxy, upstream: Upstream, request: pytest.FixtureRequest
) -> None:
    got, _ = await once(proxy, b"GET %b HTTP/1.1\r\nHost: test\r\n\r\n" % target)
    assert status_of(got) == 400
    assert not upstream.seen


@pytest.mark.parametrize(
    "request_line", ["OPTIONS * HTTP/1.1", "CONNECT /v1/models HTTP/1.1", "get /v1/models HTTP/1.1"]
)
async def test_case_45_methods_that_could_be_read_in_two_ways_are_refused(
    request_line: str, proxy: Proxy, upstream: Upstream
) -> None:
    got, _ = await once(proxy, lines(request_line, "Host: test"))
    assert status_of(got) == 400
    assert not upstream.seen


async def test_case_45_a_target_in_absolute_form_is_read_by_its_path(
    proxy: Proxy, upstream: Upstream, request: pytest.FixtureRequest
) -> None:
    got, _ = await once(proxy, lines("GET http://llm.home:8/upstream/tts-a/x%2Fy?a=b HTTP/1.1", "Host: other"))
    assert (b"x-lease-class", b"tts") in fields_of(got)
    assert upstream.seen[0].target == b"/upstream/tts-a/x%2Fy?a=b"
    assert [value for name, value in upstream.seen[0].headers if name == b"host"] == [b"llm.home:8"]


async def test_case_45_what_follows_a_number_sign_passes(
    proxy: Proxy, upstream: Upstream, request: pytest.FixtureRequest
) -> None:
    await once(proxy, lines("GET /v1/models#a?b HTTP/1.1", "Host: test"))
    assert upstream.seen[0].target == b"/v1/models#a?b"


# --- the fields


async def test_the_fields_of_a_request_pass_in_order_and_four_are_added(proxy: Proxy, upstream: Upstream) -> None:
    body = json.dumps(CHAT).encode()
    fields = [
        ("Host", "llm.home:8080"),
        ("Content-Type", "application/json"),
        ("X-Odd", "a  b\xff"),
        ("X-Two", "1"),
        ("x-two", "2"),
        ("X-Empty", ""),
        ("Content-Length", str(len(body))),
        ("Cookie", "a=b"),
        ("Authorization", "Bearer client"),
        ("X-Api-Key", "client"),
        ("Accept-Encoding", "br"),
        ("Forwarded", "for=1.2.3.4"),
    ]
    head = [f"POST {CHAT_PATH}?x=y HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
    got, _ = await once(proxy, lines(*head, body=body))
    added = [
        (b"x-request-id", dict(fields_of(got))[b"x-request-id"]),
        (b"x-forwarded-for", b"127.0.0.1"),
        (b"x-forwarded-proto", b"http"),
        (b"x-forwarded-host", b"llm.home:8080"),
    ]
    expected = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields]
    assert upstream.seen[0].headers == expected + added


async def test_the_fields_of_an_answer_pass_in_order_and_four_are_added(proxy: Proxy, upstream: Upstream) -> None:
    fields = [
        "Content-Type: application/json",
        "Set-Cookie: a=1",
        "X-Odd: a  b",
        "Set-Cookie: b=2; Expires=Wed, 01 Jan 2031 00:00:00 GMT",
        "Link: </a>",
        "link: </b>",
        "X-Empty:",
        "Server: llama-swap",
        "Date: Wed, 01 Jan 2031 00:00:00 GMT",
        "Content-Length: 2",
    ]
    upstream.script = raw(head("200 OK", *fields) + b"ok", close=False)
    got, body = await once(proxy, chat())
    expected = [tuple(part.strip().encode() for part in field.split(":", 1)) for field in fields]
    found = fields_of(got)
    assert found[: len(fields)] == [(name.lower(), value) for name, value in expected]
    added = [b"x-lease-class", b"x-lease-wait", b"server-timing", b"x-request-id"]
    assert [name for name, _ in found[len(fields) :]] == added
    assert body == b"ok"
    upstream.script = raw(head("200 OK", *fields) + b"ok", close=False)
    got, _ = await once(proxy, lines(*GET))
    assert len(fields_of(got)) == len(fields), "a route without a model has none of ours"


async def test_case_35_fields_of_one_connection_do_not_cross(proxy: Proxy, upstream: Upstream) -> None:
    fields = [
        "Connection: keep-alive, X-Foo, TE",
        "X-Foo: 1",
        "TE: trailers",
        "Trailer: X-T",
        "Keep-Alive: timeout=5",
        "Proxy-Authorization: b",
        "Proxy-Connection: keep-alive",
        "HTTP2-Settings: x",
    ]
    upstream.script = raw(
        head("200 OK", "Connection: close, X-Bar", "X-Bar: 1", "Keep-Alive: timeout=5", "Transfer-Encoding: chunked")
        + chunk(b"ok")
        + b"0\r\n\r\n"
    )
    async with RawClient(proxy.port) as client:
        for number in range(2):
            client.send(chat(*fields))
            got = await client.head()
            assert await body_after(client, got) == b"ok"
            names = [name for name, _ in fields_of(got)]
            assert not {b"connection", b"keep-alive", b"x-bar"} & set(names)
            sent = {name for name, _ in upstream.seen[number].headers}
            assert sent == {
                *(b"host", b"content-type", b"content-length"),
                *(b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-request-id"),
            }


async def test_an_upgrade_that_is_not_one_leaves_the_request_as_it_is(
    proxy: Proxy, upstream: Upstream, request: pytest.FixtureRequest
) -> None:
    fields = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
    got, _ = await once(proxy, chat(*fields))
    assert status_of(got) == 200
    assert upstream.seen[0].json == CHAT
    assert not {b"connection", b"upgrade", b"http2-settings"} & dict(upstream.seen[0].headers).keys()


async def test_case_28_a_redirect_passes_and_is_not_followed(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = answer(b"", "307 Temporary Redirect", "Location: /v1/models/")
    got, _ = await once(proxy, chat())
    assert status_of(got) == 307
    assert (b"location", b"/v1/models/") in fields_of(got)
    assert len(upstream.seen) == 1


async def test_case_26_a_coded_answer_passes_as_it_is(proxy: Proxy, upstream: Upstream) -> None:
    body = gzip.compress(b"x" * 1000)
    upstream.script = answer(body, "200 OK", "Content-Encoding: gzip")
    got, received = await once(proxy, chat("Accept-Encoding: gzip"))
    assert received == body
    assert (b"content-encoding", b"gzip") in fields_of(got)


async def test_case_41_a_trusted_peer_has_its_forwarded_fields_continued(proxy: Proxy, upstream: Upstream) -> None:
    fields = ["X-Forwarded-For: 1.2.3.4, 5.6.7.8", "X-Forwarded-For: 9.9.9.9"]
    fields += ["X-Forwarded-Proto: https", "X-Forwarded-Host: llm.example"]
    await once(proxy, chat(*fields))
    assert forwarded(upstream.seen[0]) == [b"1.2.3.4, 5.6.7.8, 9.9.9.9, 127.0.0.1", b"https", b"llm.example"]


@both_parsers
async def test_case_41_any_other_peer_has_them_replaced(parser: str, stack: Stack, upstream: Upstream) -> None:
    proxy = await stack.proxy(http_parser=parser, **KEYS)
    fields = ("X-Forwarded-For: 1.2.3.4", "X-Forwarded-Proto: https", "X-Forwarded-Host: evil", "X-Api-Key: sk-one")
    await once(proxy, chat(*fields))
    assert forwarded(upstream.seen[0]) == [b"127.0.0.1", b"http", b"test"]


def forwarded(seen: Seen) -> list[bytes]:
    """The values of the three fields, each of which must be there once."""
    fields = [(name, value) for name, value in seen.headers if name.startswith(b"x-forwarded-")]
    assert [name for name, _ in fields] == [b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host"]
    return [value for _, value in fields]


async def test_a_request_of_http_1_0_may_have_no_host(proxy: Proxy, upstream: Upstream) -> None:
    got, _ = await once(proxy, lines("GET /v1/models HTTP/1.0"))
    assert status_of(got) == 200
    assert upstream.seen[0].headers[0] == (b"host", b"")


@pytest.mark.parametrize("hosts", [[], ["Host: a", "Host: b"], ["Host: a", "Host: a"]])
async def test_a_request_of_http_1_1_has_one_host(hosts: list[str], proxy: Proxy, upstream: Upstream) -> None:
    got, _ = await once(proxy, lines("GET /v1/models HTTP/1.1", *hosts))
    assert status_of(got) == 400
    assert not upstream.seen


async def test_an_event_stream_that_lacks_it_says_that_nobody_may_buffer_it(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = slow(2, 0.01)
    got, body = await once(proxy, chat())
    assert dict(fields_of(got))[b"x-accel-buffering"] == b"no"
    assert body.endswith(b"data: [DONE]\n\n")
    upstream.script = answer(b"", "200 OK", "X-Accel-Buffering: yes")
    got, _ = await once(proxy, chat())
    assert [value for name, value in fields_of(got) if name == b"x-accel-buffering"] == [b"yes"]


# --- the body of an answer


@pytest.mark.parametrize(
    ("wire", "status", "body"),
    [
        (head("200 OK") + b"until the end", 200, b"until the end"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", 200, b"until the end"),
        (head("204 No Content"), 204, b""),
        (head("304 Not Modified", 'ETag: "a"'), 304, b""),
        (head("299 Odd", "Content-Length: 2") + b"ok", 299, b"ok"),
        (head("599 Odd", "Content-Length: 0"), 599, b""),
        (b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + head("200 OK", "Content-Length: 2") + b"ok", 200, b"ok"),
        (head("200 OK", "Transfer-Encoding: chunked") + b"2;a=b\r\nok\r\n0\r\nX-T: 1\r\n\r\n", 200, b"ok"),
    ],
)
async def test_every_framing_of_an_answer_passes(
    wire: bytes, status: int, body: bytes, proxy: Proxy, upstream: Upstream
) -> None:
    upstream.script = raw(wire)
    for request in (chat(), lines(*GET)):
        async with RawClient(proxy.port) as client:
            for _ in range(2):
                client.send(request)
                got = await client.head()
                assert (status_of(got), await body_after(client, got)) == (status, body)


async def test_a_304_that_tells_the_length_of_the_200_ends_at_its_head(
    proxy: Proxy, upstream: Upstream, request: pytest.FixtureRequest
) -> None:
    upstream.script = raw(head("304 Not Modified", "Content-Length: 100"), close=False)
    async with RawClient(proxy.port) as client:
        for _ in range(2):
            client.send(lines(*GET))
            got = await client.head()
            assert status_of(got) == 304
            assert dict(fields_of(got))[b"content-length"] == b"100"


async def test_head_has_the_fields_and_no_body(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = raw(head("200 OK", "Content-Length: 1000"), close=False)
    async with RawClient(proxy.port) as client:
        for target in ("/v1/models", "/v1/audio/voices?model=tts-a", "/upstream/chat-a/x"):
            client.send(lines(f"HEAD {target} HTTP/1.1", "Host: test"))
            got = await client.head()
            assert dict(fields_of(got))[b"content-length"] == b"1000"
    assert [seen.head.split(b" ")[0] for seen in upstream.seen] == [b"HEAD"] * 3


async def test_a_stream_passes_event_by_event(proxy: Proxy, upstream: Upstream) -> None:
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
        client.chat()
        await client.head()
        for number in range(3):
            await client.until(b"t%d " % number)
            go.set()
        await client.until(b"\r\n0\r\n\r\n")


async def test_a_large_answer_passes_whole(proxy: Proxy, upstream: Upstream) -> None:
    body = random.Random(0).randbytes(20 * 1024 * 1024)
    upstream.script = answer(body)
    _, received = await once(proxy, chat())
    assert received == body


# --- the body of a request


ODD_BODIES = [
    b'{ "model" :"chat-a",\r\n\t"b":1.0,"a":1e400,"n":123456789012345678901234567890,  "a":null }',
    b'{"model":"chat-a","s":"\\u00e9\xc3\xa9\\/"}',
    b'\n {"z":[[[[{}]]]],"model":"chat-a"}\n\n',
    b'{"model":"chat-a","x":"\xff\xfe\x80"}',
    b'{"model":"chat-a"}' + b" " * 100_000,
    b'{"model":"chat-a","image":"' + b64encode(random.Random(1).randbytes(2_250_000)) + b'"}',
]


@pytest.mark.parametrize("body", ODD_BODIES, ids=lambda body: f"{len(body)} bytes")
async def test_case_65_a_body_passes_byte_for_byte(body: bytes, proxy: Proxy, upstream: Upstream, stack: Stack) -> None:
    start = (f"POST {CHAT_PATH} HTTP/1.1", "Host: test", "Content-Type: application/json")
    await once(proxy, lines(*start, f"Content-Length: {len(body)}", body=body))
    step = max(1, len(body) // 7)
    parts = [body[at : at + step] for at in range(0, len(body), step)]
    await once(proxy, lines(*start, "Transfer-Encoding: chunked", body=pieces(*parts)))
    assert [seen.body == body for seen in upstream.seen] == [True, True]
    framing = [dict(seen.headers) for seen in upstream.seen]
    assert framing[0][b"content-length"] == str(len(body)).encode()
    assert framing[1][b"transfer-encoding"] == b"chunked"
    assert b"transfer-encoding" not in framing[0]
    assert b"content-length" not in framing[1]
    assert not list(stack.spool_dir.iterdir())
    await until(lambda: not spooled(proxy, stack))


def spooled(proxy: Proxy, stack: Stack) -> list[str]:
    """The files in the spool directory that the proxy has open; they have no name there."""
    return [name for name in descriptors(proxy) if name.startswith(str(stack.spool_dir))]


async def test_case_65_forms_pass_byte_for_byte(proxy: Proxy, upstream: Upstream) -> None:
    audio = random.Random(2).randbytes(3_000_000)
    multipart = (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-a\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + audio + b"\r\n--b--\r\n"
    )
    form = b"model=whisper-a&x=%zz+%2f&x"
    for kind, body in (("multipart/form-data; boundary=b", multipart), ("application/x-www-form-urlencoded", form)):
        start = ("POST /v1/audio/transcriptions HTTP/1.1", "Host: test", f"Content-Type: {kind}")
        got, _ = await once(proxy, lines(*start, f"Content-Length: {len(body)}", body=body))
        if status_of(got) == 400:
            assert kind.endswith("urlencoded"), "only the form with a bad escape may be refused"
            continue
        assert (b"x-lease-class", b"stt") in fields_of(got)
        assert upstream.seen[-1].body == body
        assert (b"content-type", kind.encode()) in upstream.seen[-1].headers


async def test_case_65_a_body_that_takes_no_lease_passes_while_it_is_sent(proxy: Proxy, upstream: Upstream) -> None:
    arrived_here = asyncio.Queue[bytes]()
    async with peer_that_tells(upstream, arrived_here), RawClient(proxy.port) as client:
        client.send(lines("POST /unload HTTP/1.1", "Host: test", "Transfer-Encoding: chunked"))
        for part in (b"first", b"second", b"x" * 100_000):
            client.send(b"%x\r\n%b\r\n" % (len(part), part))
            await received(arrived_here, part)
        client.send(b"0\r\n\r\n")
        got = await client.head()
        assert status_of(got) == 200


@contextlib.asynccontextmanager
async def peer_that_tells(upstream: Upstream, queue: asyncio.Queue[bytes]) -> AsyncIterator[None]:
    """In the place of `upstream`, a server that passes on the bytes it gets as they come."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            piece = await reader.readuntil(b"\r\n\r\n")
            if piece.startswith(b"POST /unload"):  # and no question of the proxy's own
                await tell(reader, piece)
            writer.write(head("200 OK", "Content-Length: 0", "Connection: close"))
            await writer.drain()
        writer.close()

    async def tell(reader: asyncio.StreamReader, piece: bytes) -> None:
        try:
            while piece:
                queue.put_nowait(piece)
                piece = b"" if piece.endswith(b"0\r\n\r\n") else await reader.read(65536)
        finally:
            queue.put_nowait(b"")

    await upstream.stop()
    server = await asyncio.start_server(serve, "127.0.0.1", upstream.port)
    try:
        yield
    finally:
        server.close()
        await upstream.restart()


async def received(queue: asyncio.Queue[bytes], part: bytes) -> None:
    """Return once `part` has come; chunks may be divided anew, so only its bytes are counted."""
    got = b""
    async with asyncio.timeout(5):
        while got.count(part[:1]) < part.count(part[:1]):
            got += await queue.get()


async def test_an_early_refusal_of_a_body_that_is_still_being_sent_passes(proxy: Proxy, upstream: Upstream) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head("413 Too Large", "Content-Length: 2", "Connection: close") + b"no")
            await writer.drain()
        writer.close()

    await upstream.stop()
    server = await asyncio.start_server(serve, "127.0.0.1", upstream.port)
    try:
        async with RawClient(proxy.port) as client:
            client.send(lines("POST /unload HTTP/1.1", "Host: test", "Content-Length: 1000000"))
            client.send(b"x" * 100_000)
            got = await client.head()
            assert (status_of(got), await body_after(client, got)) == (413, b"no")
    finally:
        server.close()
        await server.wait_closed()
        await upstream.restart()


async def test_a_refusal_after_the_body_was_passed_on_leaves_the_connection_open(
    proxy: Proxy, upstream: Upstream
) -> None:
    upstream.script = raw(b"")
    async with RawClient(proxy.port) as client:
        for framing, body in (("Content-Length: 2", b"{}"), ("Transfer-Encoding: chunked", pieces(b"{}"))):
            client.send(lines("POST /unload HTTP/1.1", "Host: test", framing, body=body))
            got = await client.head()
            assert status_of(got) == 502
            assert b"connection" not in dict(fields_of(got))
            await body_after(client, got)
    assert [seen.body for seen in upstream.seen] == [b"{}", b"{}"]


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset])
async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(
    leave: Any, proxy: Proxy, upstream: Upstream, stack: Stack
) -> None:
    for path, length in ((CHAT_PATH, 5_000_000), (CHAT_PATH, 1000)):
        async with RawClient(proxy.port) as client:
            start = (f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json")
            client.send(
                lines(*start, f"Content-Length: {length}", body=b'{"model":"chat-a","x":"' + b"x" * (length // 2))
            )
            await client.writer.drain()
            if length > MEGABYTE:
                await until(lambda: bool(spooled(proxy, stack)))
            leave(client)
        await until(lambda: not spooled(proxy, stack))
    assert not upstream.seen
    assert not list(stack.spool_dir.iterdir())


MEGABYTE = 1024 * 1024


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset])
async def test_a_client_that_leaves_in_the_middle_of_a_passing_body_is_told_to_the_upstream(
    leave: Any, proxy: Proxy, upstream: Upstream
) -> None:
    arrived_here = asyncio.Queue[bytes]()
    async with peer_that_tells(upstream, arrived_here), RawClient(proxy.port) as client:
        client.send(lines("POST /unload HTTP/1.1", "Host: test", "Content-Length: 1000", body=b"half"))
        assert (await asyncio.wait_for(arrived_here.get(), 5)).startswith(b"POST /unload")
        leave(client)
        async with asyncio.timeout(5):
            while await arrived_here.get():
                pass


# --- bounds of bodies


async def test_case_61_a_body_announced_too_large_is_refused_before_it_is_sent(
    proxy: Proxy, upstream: Upstream
) -> None:
    got, body = await once(proxy, lines(*chat_head(), f"Content-Length: {MAX_BODY + 1}"))
    assert status_of(got) == 413
    assert error_of(body) == {
        "message": "The request body is larger than this proxy takes (setting max_body).",
        "type": "invalid_request_error",
        "param": None,
        "code": "body_too_large",
    }
    assert dict(fields_of(got))[b"connection"] == b"close"
    assert not upstream.seen


def chat_head() -> tuple[str, ...]:
    return (f"POST {CHAT_PATH} HTTP/1.1", "Host: test", "Content-Type: application/json")


async def test_case_61_a_chunked_body_that_grows_too_large_is_refused_and_read_no_further(
    proxy: Proxy, upstream: Upstream, stack: Stack
) -> None:
    async with RawClient(proxy.port) as client:
        client.send(lines(*chat_head(), "Transfer-Encoding: chunked"))
        piece = chunk(b" " * 100_000)
        for _ in range(MAX_BODY // 100_000 + 1):
            client.send(piece)
        got = await client.head()
        assert status_of(got) == 413
        assert dict(fields_of(got))[b"connection"] == b"close"
        assert error_of(await body_after(client, got))["code"] == "body_too_large"
    assert not upstream.seen
    await until(lambda: not spooled(proxy, stack))


async def test_case_61_a_body_of_just_the_limit_passes(proxy: Proxy, upstream: Upstream) -> None:
    body = b'{"model":"chat-a","x":"'
    body += b"x" * (MAX_BODY - len(body) - 2) + b'"}'
    got, _ = await once(proxy, lines(*chat_head(), f"Content-Length: {MAX_BODY}", body=body))
    assert status_of(got) == 200
    assert upstream.seen[0].body == body


async def test_the_bodies_that_wait_are_bounded_together_and_their_share_comes_back(
    proxy: Proxy, upstream: Upstream, stack: Stack
) -> None:
    def large(size: int) -> bytes:
        body = b'{"model":"chat-a","x":"' + b"x" * (size - 25) + b'"}'
        return lines(*chat_head(), f"Content-Length: {size}", body=body)

    for ending in ("served", "gone"):
        done = asyncio.Event()
        upstream.by_model["tts-a"] = hold_until(done)
        async with connections(proxy, 3) as (holder, waiter, refused):
            holder.tts()
            await upstream.wait_for(lambda seen: any(b'"tts-a"' in each.body for each in seen))
            waiter.send(large(7_000_000))
            await proxy.until(waiters=1, holders=1)
            assert 7_000_000 < MAX_SPOOL < 14_000_000
            refused.send(large(7_000_000))
            got = await refused.head()
            assert status_of(got) == 503
            assert error_of(await body_after(refused, got))["code"] == "spool_full"
            assert 1 <= int(dict(fields_of(got))[b"retry-after"]) <= 60
            if ending == "gone":
                waiter.reset()
                await proxy.until(waiters=0)
            done.set()
            assert status_of(await holder.head()) == 200
            if ending == "served":
                assert status_of(await waiter.head()) == 200
        upstream.seen.clear()
    got, _ = await once(proxy, large(8_000_000))
    assert status_of(got) == 200
    await until(lambda: not spooled(proxy, stack))


def hold_until(done: asyncio.Event) -> Any:
    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        await answer()(seen, reader, writer)

    return script


# --- keys


KEYS: dict[str, Any] = {
    "api_keys": ["sk-one", "sk-two"],
    "upstream_api_key": "sk-upstream",
    "trusted_proxies": [],
}


def basic(user: str, password: str) -> str:
    return "Authorization: Basic " + b64encode(f"{user}:{password}".encode()).decode()


ACCEPTED = [
    ["Authorization: Bearer sk-one"],
    ["Authorization: bearer sk-two"],
    ["X-Api-Key: sk-one"],
    [basic("anyone", "sk-one")],
    [basic("", "sk-two")],
    [basic("anyone", "sk-one"), "X-Api-Key: wrong"],
    ["Authorization: Bearer sk-one", "X-Api-Key: wrong"],
    ["Authorization: Other x", "X-Api-Key: sk-one"],
]
REJECTED = [
    [],
    ["Authorization: Bearer wrong"],
    ["Authorization: Bearer "],
    ["Authorization: Bearer sk-one,sk-two"],
    ["Authorization: sk-one"],
    ["X-Api-Key: sk-on"],
    ["X-Api-Key: sk-onee"],
    ["X-Api-Key:"],
    [basic("sk-one", "")],
    [basic("sk-one", "wrong")],
    ["Authorization: Basic !!!"],
    ["Authorization: Bearer wrong", "X-Api-Key: sk-one"],
    [basic("anyone", "wrong"), "X-Api-Key: sk-one"],
    ["Cookie: key=sk-one"],
]


@pytest_asyncio.fixture(params=EACH_PARSER, loop_scope="module")
async def locked(request: pytest.FixtureRequest, stack: Stack, upstream: Upstream) -> Proxy:
    """A proxy with keys, before which nobody is trusted."""
    return await stack.proxy(http_parser=request.param, **KEYS)


@pytest.mark.parametrize("fields", ACCEPTED, ids=" ".join)
async def test_a_key_opens_and_is_replaced_by_the_upstreams(
    fields: list[str], locked: Proxy, upstream: Upstream
) -> None:
    for request in (chat(*fields), lines(*GET, *fields)):
        got, _ = await once(locked, request)
        assert status_of(got) == 200
        credentials = [
            (name, value) for name, value in upstream.seen[-1].headers if name in {b"authorization", b"x-api-key"}
        ]
        assert credentials == [(b"authorization", b"Bearer sk-upstream")]


@pytest.mark.parametrize("fields", REJECTED, ids=" ".join)
async def test_without_a_key_nothing_is_read_and_nothing_is_sent(
    fields: list[str], locked: Proxy, upstream: Upstream
) -> None:
    for request in (chat(*fields), lines(*GET, *fields), lines("GET /-/queue HTTP/1.1", "Host: a", *fields)):
        got, body = await once(locked, request)
        assert status_of(got) == 401
        assert error_of(body)["code"] == "invalid_api_key"
        assert dict(fields_of(got))[b"www-authenticate"] == b'Basic realm="llama-swap"'
    assert not upstream.seen
    assert not any("sk-" in line for line in locked.lines)


async def test_some_routes_need_no_key(locked: Proxy, upstream: Upstream) -> None:
    for request_line in (
        *("GET / HTTP/1.1", "GET /health HTTP/1.1", "HEAD /wol-health HTTP/1.1", "GET /upstream HTTP/1.1"),
        "OPTIONS /v1/chat/completions HTTP/1.1",
    ):
        got, _ = await once(locked, lines(request_line, "Host: a", "Authorization: Bearer wrong"))
        assert status_of(got) == 200
        if b"/health" not in request_line.encode().split(b" ")[1] or request_line.startswith("HEAD"):
            assert b"Bearer wrong" not in upstream.seen[-1].head
    for page in ("/-/healthz", "/-/readyz"):
        assert status_of((await once(locked, lines(f"GET {page} HTTP/1.1", "Host: a")))[0]) in {200, 503}


async def test_without_keys_of_our_own_the_clients_credential_passes(proxy: Proxy, upstream: Upstream) -> None:
    fields = (basic("a", "b"), "X-Api-Key: c")
    await once(proxy, chat(*fields))
    sent = dict(upstream.seen[0].headers)
    assert sent[b"authorization"] == fields[0].partition(": ")[2].encode()
    assert sent[b"x-api-key"] == b"c"
