"""Waiting requests on the wire: what a client gets before its answer, and what becomes of failures after that.

A raw client reads every byte and every chunk, under both of the server's parsers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from wire_support import EACH_PARSER, Stack, body_after, fields_of, lines, status_of, until

from harness import (
    CHAT,
    EMBED,
    SSE,
    TTS,
    Proxy,
    RawClient,
    Script,
    Seen,
    Upstream,
    after,
    answer,
    chunk,
    event,
    hang,
    head,
    raw,
    watch_close,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVERY = 0.05
KEEPALIVE: dict[str, Any] = {"keepalive_after": 0.25, "keepalive_every": EVERY}
"""Late enough for a plain answer to come first on a busy machine, and then quick."""

QUEUED = b": queued\n\n"
CHAT_PATH = "/v1/chat/completions"
APIS = (CHAT_PATH, "/v1/completions", "/v1/responses", "/v1/messages")
WHOLE = b"data: 1\n\ndata: [DONE]\n\n"


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
    proxy = await stack.proxy(http_parser=request.param, **KEEPALIVE)
    yield proxy
    await proxy.drained(upstream)


@contextlib.asynccontextmanager
async def gpu_taken(proxy: Proxy, upstream: Upstream) -> AsyncIterator[asyncio.Event]:
    """Speech holds the GPU until the event is set, at the latest at the end of the block."""
    end = asyncio.Event()
    upstream.by_model["tts-a"] = after(end)
    async with RawClient(proxy.port) as holder:
        holder.tts()
        await proxy.until(holders=1)
        try:
            yield end
        finally:
            end.set()
        await holder.answer()


async def early(client: RawClient, signs: int = 2, sign: bytes = QUEUED) -> bytes:
    """The head that was sent early, once so many signs are there."""
    got = await client.head()
    assert status_of(got) == 200
    for _ in range(signs):
        assert await piece(client) == sign
    return got


async def piece(client: RawClient) -> bytes:
    """The next chunk; empty at the last."""
    async with asyncio.timeout(5):
        size = int(await client.reader.readuntil(b"\r\n"), 16)
        return (await client.reader.readexactly(size + 2))[:-2]


async def after_signs(client: RawClient) -> bytes:
    """What follows the signs, until the connection ends; chunk borders are taken out."""
    rest = await client.rest()
    return b"".join(re.findall(rb"[0-9a-f]+\r\n(.*?)\r\n(?=[0-9a-f]+\r\n|\Z)", rest, re.DOTALL)).replace(QUEUED, b"")


async def counted(proxy: Proxy, code: int) -> float:
    """How many chats have been counted with this status."""
    series = f'gpu_lease_requests_total{{class="llm",code="{code}",model="other"}}'
    text = (await proxy.client.get("/-/metrics")).text
    return next((float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(series)), 0)


def stream(body: bytes = WHOLE, *fields: str, status: str = "200 OK") -> Script:
    """A chunked stream at once."""
    start = head(status, "Content-Type: text/event-stream", "Transfer-Encoding: chunked", *fields)
    return raw(start + chunk(body) + b"0\r\n\r\n", close=False)


def coded(body: bytes, status: str, *fields: str) -> Script:
    """An answer whose type is given by `fields`."""
    return raw(head(status, f"Content-Length: {len(body)}", *fields) + body, close=False)


# --- streams


@pytest.mark.parametrize("path", [*APIS, "/upstream/chat-a/v1/chat/completions"])
async def test_case_68_a_stream_that_waits_gets_comments_and_then_its_bytes(
    path: str, proxy: Proxy, upstream: Upstream
) -> None:
    upstream.script = stream()
    async with gpu_taken(proxy, upstream) as end, RawClient(proxy.port) as client:
        client.post(path, CHAT)
        got = await early(client, 3)
        end.set()
        body = await body_after(client, got)
    assert re.fullmatch(rb"(: queued\n\n)*: waited \d+\.\ds\n\n" + re.escape(WHOLE), body)
    assert [seen.target for seen in upstream.seen[1:]] == [path.encode()]


async def test_case_68_comments_go_on_while_the_model_loads(proxy: Proxy, upstream: Upstream) -> None:
    loaded = asyncio.Event()
    upstream.script = after(loaded, stream())
    async with RawClient(proxy.port) as client:
        client.chat()
        got = await early(client, 5)
        assert not (await proxy.queue())["waiters"]
        loaded.set()
        assert re.search(rb": waited \d+\.\ds\n\n" + re.escape(WHOLE) + rb"\Z", await body_after(client, got))


async def test_case_68_comments_follow_the_upstreams_own_head_until_its_first_byte(
    proxy: Proxy, upstream: Upstream
) -> None:
    go = asyncio.Event()

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked", "X-Own: 1"))
        await go.wait()
        writer.write(chunk(WHOLE) + b"0\r\n\r\n")

    upstream.script = script
    async with RawClient(proxy.port) as client:
        client.chat()
        got = await early(client, 3)
        assert (b"x-own", b"1") in fields_of(got)
        assert dict(fields_of(got))[b"x-lease-class"] == b"llm"
        go.set()
        assert re.fullmatch(rb"(: queued\n\n)*" + re.escape(WHOLE), await body_after(client, got))


async def test_case_68_other_answers_wait_in_silence_and_their_heads_are_true(proxy: Proxy, upstream: Upstream) -> None:
    """Speech, a recording, a picture, embeddings and a chat that is not streamed."""
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nstt-a\r\n--b--\r\n'
    upstream.script = answer(b"sound", "200 OK", "X-Own: 1")
    plain = {**CHAT, "stream": False}
    posts = [
        ("/v1/audio/speech", json.dumps({**TTS, "stream": True}).encode(), "application/json"),
        ("/v1/audio/transcriptions", form, "multipart/form-data; boundary=b"),
        ("/v1/images/generations", json.dumps({"model": "chat-a", "stream": True}).encode(), "application/json"),
        ("/v1/embeddings", json.dumps({**EMBED, "model": "chat-a"}).encode(), "application/json"),
        (CHAT_PATH, json.dumps(plain).encode(), "application/json"),
        (CHAT_PATH, json.dumps(CHAT).encode()[:-1], "application/json"),
    ]
    async with gpu_taken(proxy, upstream) as end, contextlib.AsyncExitStack() as opened:
        waiters = [await opened.enter_async_context(RawClient(proxy.port)) for _ in posts]
        for client, (path, body, kind) in zip(waiters, posts, strict=True):
            fields = (f"POST {path} HTTP/1.1", "Host: a", f"Content-Type: {kind}", f"Content-Length: {len(body)}")
            client.send(lines(*fields, body=body))
        await proxy.until(waiters=len(posts))
        async with RawClient(proxy.port) as streamed:
            streamed.chat()
            await early(streamed, 3)
        for client in waiters:
            with pytest.raises(TimeoutError):
                await client.head(within=0.02)
        upstream.by_model.clear()
        end.set()
        for client in waiters:
            got = await client.answer()
            assert (got.status, got.body, got.headers["x-own"]) == (200, b"sound", "1")
            assert "x-lease-wait" in got.headers


async def test_case_69_of_the_upstreams_head_nothing_follows_an_early_one(proxy: Proxy, upstream: Upstream) -> None:
    own = ("X-Request-Id: own", "openai-processing-ms: 12", "Cache-Control: private", "X-Accel-Buffering: yes")
    upstream.script = stream(WHOLE, *own)
    async with gpu_taken(proxy, upstream) as end, RawClient(proxy.port) as client:
        client.chat("Accept-Encoding: gzip, br")
        got = await early(client)
        end.set()
        body = await body_after(client, got)
    names = [name for name, _ in fields_of(got) if name not in {b"date", b"server"}]
    ours = [b"cache-control", b"content-type", b"transfer-encoding", b"x-accel-buffering", b"x-request-id"]
    fields = dict(fields_of(got))
    assert (sorted(names), fields[b"x-request-id"] != b"own") == (ours, True)
    assert fields[b"content-type"] == b"text/event-stream"
    assert (fields[b"cache-control"], fields[b"x-accel-buffering"]) == (b"no-cache", b"no")
    assert body.endswith(WHOLE)
    assert b"HTTP/1.1" not in body
    asked = [value for name, value in upstream.seen[-1].headers if name.lower() == b"accept-encoding"]
    assert asked == [b"identity"], "no coding could be told any more"


async def test_a_client_of_http_1_0_gets_them_without_chunks(stack: Stack, upstream: Upstream) -> None:
    """Under h11: uvicorn's other parser chunks whatever a client of HTTP/1.0 is sent."""
    proxy = await stack.proxy(http_parser="h11", **KEEPALIVE)
    upstream.script = stream()
    body = json.dumps(CHAT).encode()
    fields = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    async with gpu_taken(proxy, upstream) as end, RawClient(proxy.port) as client:
        client.send(lines(f"POST {CHAT_PATH} HTTP/1.0", *fields, body=body))
        got = await client.head()
        assert b"transfer-encoding" not in dict(fields_of(got))
        assert await client.until(QUEUED * 2) == QUEUED * 2
        end.set()
        rest = await client.rest()
    assert re.fullmatch(rb"(: queued\n\n)*: waited \d+\.\ds\n\n" + re.escape(WHOLE), rest)


async def test_the_connection_can_be_used_again(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = stream()
    async with gpu_taken(proxy, upstream) as end, RawClient(proxy.port) as client:
        client.chat()
        got = await early(client)
        end.set()
        await body_after(client, got)
        client.chat()
        assert await body_after(client, await client.head()) == WHOLE


# --- failures behind an early head


def told(path: str, event: bytes) -> dict[str, Any]:
    """The error that `event` tells a client of that API; anything else fails the test."""
    assert event.endswith(b"\n\n")
    rows = event[:-2].split(b"\n")
    names = [row for row in rows if row.startswith(b"event: ")]
    assert names == ([b"event: error"] if path in {"/v1/messages", "/v1/responses"} else [])
    data = json.loads(rows[-1].removeprefix(b"data: "))
    if path in {"/v1/messages", "/v1/responses"}:
        assert data["type"] == "error"
    error: dict[str, Any] = data["error"]
    return error


FAILURES: dict[str, tuple[Script, int, str]] = {
    "400": (answer(b'{"error":{"message":"too long","code":1}}', "400 Bad Request"), 400, "too long"),
    "503": (answer(b"llama-swap: no", "503 Service Unavailable"), 503, "llama-swap: no"),
    "dies": (raw(b""), 502, ""),
    "dies after its head": (raw(SSE), 502, "before the first byte"),
    "no stream": (answer(), 502, "application/json"),
    "coded": (coded(b"x", "200 OK", "Content-Type: text/event-stream", "Content-Encoding: br"), 502, "coded as br"),
}


@pytest.mark.parametrize(
    ("path", "how"), [*((CHAT_PATH, how) for how in FAILURES), *((path, "400") for path in APIS[1:])]
)
async def test_case_66_a_late_failure_is_the_apis_error_event_and_a_cut(
    path: str, how: str, proxy: Proxy, upstream: Upstream
) -> None:
    script, code, message = FAILURES[how]
    loaded = asyncio.Event()
    upstream.script = after(loaded, script)
    before, ok, logged = await counted(proxy, code), await counted(proxy, 200), len(proxy.lines)
    async with RawClient(proxy.port) as client:
        client.post(path, CHAT)
        await early(client)
        loaded.set()
        event = await after_signs(client)
    error = told(path, event)
    assert message in error["message"]
    assert error.get("code") == {400: 1, 502: "upstream_failed"}.get(code)
    assert await counted(proxy, code) == before + 1
    assert await counted(proxy, 200) == ok
    assert not any("Traceback" in line for line in proxy.lines[logged:])


async def test_case_66_a_failure_after_the_first_byte_is_a_cut_without_a_word(proxy: Proxy, upstream: Upstream) -> None:
    die = asyncio.Event()

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(event(0)))
        await after(die, raw(b""))(seen, reader, writer)

    upstream.script = script
    ok = await counted(proxy, 200)
    async with gpu_taken(proxy, upstream) as end, RawClient(proxy.port) as client:
        client.chat()
        await early(client)
        end.set()
        while await piece(client) != event(0):
            pass
        die.set()
        assert await client.rest() == b""
    assert await counted(proxy, 200) == ok + 1, "it had begun well"


@pytest.mark.parametrize("parser", EACH_PARSER)
@pytest.mark.parametrize("path", APIS)
async def test_case_66_a_wait_that_is_over_late_is_told_too(
    path: str, parser: str, stack: Stack, upstream: Upstream
) -> None:
    proxy = await stack.proxy(http_parser=parser, max_wait=0.4, keepalive_after=0.05, keepalive_every=EVERY)
    refused = await proxy.metric('gpu_lease_rejected_total{reason="queue_timeout"}')
    before = await counted(proxy, 503)
    async with gpu_taken(proxy, upstream), RawClient(proxy.port) as client:
        client.post(path, CHAT)
        await early(client)
        assert told(path, await after_signs(client))["code"] == "queue_timeout"
        assert await counted(proxy, 503) == before + 1
        assert await proxy.metric('gpu_lease_rejected_total{reason="queue_timeout"}') == refused + 1
    await proxy.drained()


async def test_case_66_draining_is_told_too() -> None:
    async with Upstream() as upstream, Proxy(upstream.url, **KEEPALIVE) as proxy:
        async with gpu_taken(proxy, upstream), RawClient(proxy.port) as client:
            client.chat()
            await early(client)
            proxy.signal()
            assert told(CHAT_PATH, await after_signs(client))["code"] == "draining"
        assert await proxy.exit_code() == 0


async def test_case_66_a_quick_refusal_keeps_its_status(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = answer(b"{}", "400 Bad Request", "X-Own: 1")
    async with RawClient(proxy.port) as client:
        client.chat()
        got = await client.answer()
    assert (got.status, got.headers["x-own"]) == (400, "1")


async def test_a_client_that_prefers_a_short_wait_is_refused_with_a_true_status(
    proxy: Proxy, upstream: Upstream
) -> None:
    """RFC 7240: its wait is over later than others get their heads."""
    async with gpu_taken(proxy, upstream), RawClient(proxy.port) as client:
        client.chat("Prefer: wait=1")
        got = await client.answer()
        assert (got.status, got.json["error"]["code"]) == (503, "queue_timeout")


# --- clients that leave


async def test_a_client_that_leaves_the_queue_behind_an_early_head_counts_as_499(
    proxy: Proxy, upstream: Upstream
) -> None:
    before = await counted(proxy, 499)
    async with gpu_taken(proxy, upstream):
        for leave in (RawClient.close, RawClient.reset):
            async with RawClient(proxy.port) as client:
                client.chat()
                await early(client)
                leave(client)
                await proxy.until(waiters=0)
    assert await counted(proxy, 499) == before + 2
    assert len(upstream.seen) == 1


def dribbled(start: bytes, one: bytes) -> Script:
    """`start`, and then `one` every few milliseconds until the peer closes."""

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watcher = asyncio.create_task(watch_close(seen, reader))
        writer.write(start)
        while not seen.closed.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(seen.closed.wait(), 0.02)
            if one:
                writer.write(one)
        await watcher
        raise ConnectionResetError

    return script


LEFT_IN = {
    "loading": hang(),
    "its head": dribbled(SSE, b""),
    "an error": dribbled(head("500 x", "Transfer-Encoding: chunked"), chunk(b"x")),
    "the stream": dribbled(SSE, chunk(event(0))),
}


@pytest.mark.parametrize("moment", LEFT_IN)
async def test_a_client_that_leaves_behind_an_early_head_frees_its_lease(
    moment: str, proxy: Proxy, upstream: Upstream
) -> None:
    """While the model loads, after the upstream's head, in its error, and in its stream."""
    for leave in (RawClient.close, RawClient.reset):
        loaded = asyncio.Event()
        upstream.script = after(loaded, LEFT_IN[moment])
        async with RawClient(proxy.port) as client:
            client.chat()
            await early(client)
            loaded.set()
            await client.until(event(0) if moment == "the stream" else QUEUED)
            leave(client)
            await asyncio.wait_for(upstream.seen[-1].closed.wait(), 5)
            await proxy.until(holders=0, waiters=0)


async def test_an_answer_that_cannot_follow_frees_its_lease_though_it_goes_on(proxy: Proxy, upstream: Upstream) -> None:
    go = asyncio.Event()
    endless = dribbled(head("200 OK", "Content-Type: text/html", "Transfer-Encoding: chunked"), chunk(b"x"))
    upstream.script = after(go, endless)
    async with RawClient(proxy.port) as client:
        client.chat()
        await early(client)
        go.set()
        assert told(CHAT_PATH, await after_signs(client))["code"] == "upstream_failed"
        await asyncio.wait_for(upstream.seen[-1].closed.wait(), 5)
        await proxy.until(holders=0)


# --- settings


async def test_a_class_without_keepalives_waits_in_silence(stack: Stack, upstream: Upstream) -> None:
    proxy = await stack.proxy(
        classes={"llm": {"keepalive": False}}, keepalive_after=0.01, keepalive_every=0.01, json_keepalive_after=0.01
    )
    upstream.script = stream()
    async with gpu_taken(proxy, upstream) as end, RawClient(proxy.port) as client:
        client.chat()
        await proxy.until(waiters=1)
        with pytest.raises(TimeoutError):
            await client.head(within=0.2)
        end.set()
        got = await client.head()
        assert b"x-lease-wait" in dict(fields_of(got))
        assert await body_after(client, got) == WHOLE
    await proxy.drained(upstream)


@pytest.mark.parametrize("parser", EACH_PARSER)
@pytest.mark.parametrize("path", [*APIS, "/v1/embeddings", "/rerank"])
async def test_case_68_plain_json_gets_spaces_where_that_is_wanted(
    path: str, parser: str, stack: Stack, upstream: Upstream
) -> None:
    proxy = await stack.proxy(http_parser=parser, json_keepalive_after=0.25, keepalive_every=EVERY)
    answers = {"a": [1, 2]}
    upstream.script = answer(json.dumps(answers).encode())
    async with gpu_taken(proxy, upstream) as end, RawClient(proxy.port) as client, RawClient(proxy.port) as speech:
        client.post(path, {**CHAT, "stream": False})
        speech.tts()
        got = await early(client, 3, b" ")
        assert dict(fields_of(got))[b"content-type"] == b"application/json"
        upstream.by_model.clear()
        end.set()
        body = await body_after(client, got)
        assert (await speech.answer()).json == answers, "with a true head: it has a length"
    assert json.loads(body) == answers
    assert body.lstrip(b" ") == json.dumps(answers).encode()
    await proxy.drained(upstream)


@pytest.mark.parametrize("parser", EACH_PARSER)
@pytest.mark.parametrize("how", [*FAILURES, "a stream"])
async def test_case_66_a_late_failure_of_plain_json_is_a_cut(
    how: str, parser: str, stack: Stack, upstream: Upstream
) -> None:
    proxy = await stack.proxy(http_parser=parser, json_keepalive_after=0.25, keepalive_every=EVERY)
    script, code, _ = FAILURES[how] if how in FAILURES else (stream(), 502, "")
    script, code = (stream(), 502) if how == "no stream" else (script, code)
    loaded = asyncio.Event()
    upstream.script = after(loaded, script)
    before = await counted(proxy, code)
    async with RawClient(proxy.port) as client:
        client.post(CHAT_PATH, {**CHAT, "stream": False})
        await early(client, 2, b" ")
        loaded.set()
        rest = await client.rest()
    assert re.fullmatch(rb"(1\r\n \r\n)*", rest), "no word, and no last chunk"
    assert await counted(proxy, code) == before + 1
    await proxy.drained(upstream)


async def test_the_place_is_shown_where_that_is_wanted(stack: Stack, upstream: Upstream) -> None:
    proxy = await stack.proxy(show_position=True, keepalive_after=0.25, keepalive_every=EVERY)
    upstream.script = stream()
    async with gpu_taken(proxy, upstream) as end, RawClient(proxy.port) as first, RawClient(proxy.port) as second:
        first.post("/v1/completions", CHAT)
        await proxy.until(waiters=1)
        second.chat()
        await early(first)
        got = await second.head()
        shown = json.loads((await piece(second)).removeprefix(b"data: "))
        assert await piece(second) == QUEUED
        end.set()
        body = await body_after(second, got)
    assert (
        shown["choices"][0]["delta"]["reasoning_content"] == "Waiting for the GPU: place 2 in the queue, class llm.\n"
    )
    assert (shown["model"], shown["object"]) == ("chat-a", "chat.completion.chunk")
    assert re.fullmatch(rb"(: queued\n\n)*: waited \d+\.\ds\n\n" + re.escape(WHOLE), body)
    await proxy.drained(upstream)


# --- 2,000 runs


@dataclass(frozen=True)
class Run:
    """One stream: its bytes in the pieces in which they are sent, and the seconds before the head and each piece."""

    number: int
    pieces: tuple[bytes, ...]
    pauses: tuple[float, ...]

    @classmethod
    def random(cls, number: int, rng: random.Random) -> Run:
        """Pieces that end anywhere, in an event and in a character too, and are often further apart than signs."""
        text = "".join(rng.choice(["é", ": queued", "\\n", "x" * 20, "🙂"]) for _ in range(rng.randrange(1, 12)))
        events = f'data: {{"run":{number},"text":"{text}"}}\n\n' * rng.randrange(1, 4) + "data: [DONE]\n\n"
        body = events.encode()
        cuts = (0, *sorted(rng.sample(range(1, len(body)), rng.randrange(5))), len(body))
        pieces = tuple(body[start:end] for start, end in pairwise(cuts))
        return cls(number, pieces, tuple(rng.choice([0, 0, 0.004, 0.012, 0.025]) for _ in range(len(pieces) + 1)))

    @property
    def model(self) -> str:
        """One of eight, each of which runs one request at a time: so every grant comes when it comes."""
        return f"chat-{self.number % 8}"

    async def script(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.pauses[0])
        writer.write(SSE)
        for pause, each in zip(self.pauses[1:], self.pieces, strict=True):
            await asyncio.sleep(pause)
            writer.write(chunk(each))
        writer.write(b"0\r\n\r\n")

    async def check(self, proxy: Proxy) -> str:
        """Ask, and fail unless comments, and then exactly the bytes, come; returns what kind of head there was."""
        async with RawClient(proxy.port) as client:
            client.post(CHAT_PATH, {"model": self.model, "stream": True, "run": self.number})
            got, body = await client.head(within=60), b""
            while each := await piece(client):
                body += each
        is_early = b"x-lease-class" not in dict(fields_of(got))
        waited = rb": waited \d+\.\ds\n\n" if is_early else rb""
        found = re.fullmatch(rb"((?:: queued\n\n)*)" + waited + re.escape(b"".join(self.pieces)), body)
        assert found, body
        return "early" if is_early else "signs behind the upstream's head" if found[1] else "silent"


@pytest.mark.parametrize("parser", EACH_PARSER)
@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
async def test_every_stream_is_comments_and_then_exactly_the_upstreams_bytes(
    count: int, parser: str, stack: Stack, upstream: Upstream
) -> None:
    """Comments every 10 ms, and grants, heads and pieces at random times."""
    rng = random.Random(count)
    proxy = await stack.proxy(http_parser=parser, slots=1, keepalive_after=0.02, keepalive_every=0.01)
    runs = [Run.random(number, rng) for number in range(count)]

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await runs[seen.json["run"]].script(seen, reader, writer)

    upstream.script = script
    free = asyncio.Semaphore(32)

    async def one(run: Run) -> str:
        async with free:
            return await run.check(proxy)

    async with asyncio.timeout(110):
        kinds = await asyncio.gather(*map(one, runs))
    assert set(kinds) == {"early", "signs behind the upstream's head", "silent"}
    assert kinds.count("early") > count / 10
    await until(lambda: not upstream.open_in_use)
    await proxy.drained()


async def test_the_cases_are_told_in_words() -> None:
    told = (Path(__file__).parents[1] / "cases.md").read_text(encoding="utf-8")
    for number in (66, 68, 69):
        assert f"**{number}. " in told
