"""As hard as a server: whatever is sent, the answer is a 4xx, or llama-swap got just what was sent, under a lease of
its model's class.

Each input goes to the proxy as raw bytes on a connection of its own, with one good request behind it that closes the
connection. Every request that came to the upstream has exactly one answer at a client and the other way round, so that
nothing can slip in behind another. After each batch nothing is held, waiting, spooled or open; and at no time was the
proxy's loop blocked for 50 ms, measured by a heartbeat inside it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from differential_support import Came, Recorder
from fuzz_bodies_support import PARTS, PATHS, framed, json_bodies, multiparts
from fuzz_oracle_support import END, check_faithful, class_needed, heard
from fuzz_support import Input, framings, generated, heads
from heartbeat_support import BLOCKED, Heartbeat
from hypothesis import strategies as st
from known_support import table
from wire_support import EACH_PARSER, MAX_BODY, PARSERS, Stack, descriptors, lines, once, status_of, until

from harness import Proxy, Seen, head

pytestmark = pytest.mark.asyncio(loop_scope="module")

AT_ONCE = 16
"""Inputs that are sent at the same time, each on its own connection."""

IMPATIENCE = 0.3
"""Seconds after which an unfinished head or body is a 408."""

KINDS: dict[str, Callable[[], st.SearchStrategy[Input]]] = {
    "heads": heads,
    "framings": framings,
    "json": json_bodies,
    "multipart": multiparts,
}


class Echo(Recorder):
    """Answers each request with its number in the order of arrival."""

    async def _planned(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("200 OK", "Content-Length: 0", f"X-Seen: {self.seen.index(seen)}"))


@dataclass(frozen=True)
class Rig:
    """One proxy under one parser, and what is known of it."""

    proxy: Proxy
    upstream: Echo
    heartbeat: Heartbeat
    outcomes: Counter[str]

    async def clean(self, open_before: int, spool_dir: Path) -> None:
        """The invariant after each batch."""
        longest = await self.heartbeat.longest()
        self.outcomes["ms blocked at most"] = round(longest * 1000)
        assert longest < BLOCKED
        await until(lambda: len(descriptors(self.proxy)) <= open_before + AT_ONCE)  # idle ones to the upstream
        assert not [name for name in descriptors(self.proxy) if name.startswith(str(spool_dir))]
        assert not [line for line in self.proxy.lines if "Traceback" in line or "internal_error" in line]
        # Bodies together may take as much as one alone: not a byte of any other is counted any more.
        whole = b'{"model":"chat-a","x":"' + b"x" * (MAX_BODY - 25) + b'"}'
        start = ("POST /v1/chat/completions HTTP/1.1", "Host: a", "Content-Type: application/json")
        got, _ = await once(self.proxy, lines(*start, f"Content-Length: {len(whole)}", body=whole))
        assert status_of(got) == 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("spool"))
    stack.upstream = Echo()
    async with stack:
        yield stack


@pytest.fixture(scope="module")
def heartbeats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Heartbeat]:
    return {parser: Heartbeat(tmp_path_factory.mktemp(parser)) for parser in PARSERS}


@pytest_asyncio.fixture(params=EACH_PARSER, loop_scope="module")
async def rig(request: pytest.FixtureRequest, stack: Stack, heartbeats: dict[str, Heartbeat]) -> AsyncIterator[Rig]:
    """The proxy under each parser; clean after each test."""
    upstream, heartbeat = stack.upstream, heartbeats[request.param]
    assert isinstance(upstream, Echo)
    upstream.script = upstream._planned
    upstream.seen.clear()
    proxy = await stack.proxy(
        http_parser=request.param,
        env=heartbeat.environment,
        traced=False,
        head_timeout=IMPATIENCE,
        body_timeout=IMPATIENCE,
        max_spool=MAX_BODY,
    )
    await heartbeat.begin()
    rig = Rig(proxy, upstream, heartbeat, Counter())
    before = len(descriptors(proxy))
    yield rig
    await rig.clean(before, stack.spool_dir)
    await proxy.drained(upstream)
    table(f"{request.node.name}", ("count", "what"), [(n, what) for what, n in sorted(rig.outcomes.items())])


# -- one input


async def said(port: int, data: bytes, within: float = IMPATIENCE * 8) -> bytes:
    """All that the proxy answers to `data`, until it closes or has nothing more to say for the time being."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    got = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(within):
            while piece := await reader.read(65536):
                got += piece
    writer.close()
    return got


async def check(rig: Rig, given: Input) -> Counter[str]:
    """Sends an input and the good request behind it; what came of them."""
    sent = given.wire + END
    got = await said(rig.proxy.port, sent)
    try:
        return judged(rig, given, sent, got)
    except AssertionError as error:
        error.add_note(f"sent: {sent!r}\ngot: {got!r}"[:5000])
        raise


def judged(rig: Rig, given: Input, sent: bytes, got: bytes) -> Counter[str]:
    """What came of an input; raises AssertionError where it must not."""
    outcomes, allowed = Counter[str](), {501} if b"websocket" in sent.lower() else set[int]()
    for answer in heard(got):
        if answer.seen is None:
            outcomes[str(answer.status)] += 1
            assert 400 <= answer.status < 500 or answer.status in allowed, answer
            continue
        came = rig.upstream.seen[answer.seen]
        assert isinstance(came, Came)
        check_faithful(came, sent, given.body)
        needed = class_needed(came)
        assert answer.fields.get(b"x-lease-class") == (needed.encode() if needed else None), came
        outcomes[f"passed, {needed or 'no lease'}"] += 1
    outcomes["inputs"] += 1
    return outcomes


async def check_all(rig: Rig, inputs: list[Input]) -> None:
    """All inputs, some at once; nothing comes to the upstream that has no answer."""
    for at in range(0, len(inputs), AT_ONCE):
        rig.upstream.seen.clear()
        some = (check(rig, each) for each in inputs[at : at + AT_ONCE])
        outcomes = Counter[str]()
        for each in await asyncio.gather(*some, return_exceptions=True):
            if isinstance(each, BaseException):
                raise each
            outcomes.update(each)
        passed = sum(count for what, count in outcomes.items() if what.startswith("passed"))
        assert passed == len(rig.upstream.seen)
        await rig.proxy.until(waiters=0, holders=0)
        rig.outcomes.update(outcomes)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_sent_is_refused_or_passes_faithfully(kind: str, rig: Rig) -> None:
    await check_all(rig, generated(KINDS[kind](), 60))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
async def test_ten_thousand_inputs_are_refused_or_pass_faithfully(kind: str, rig: Rig) -> None:
    await check_all(rig, generated(KINDS[kind](), 1280))


# -- inputs that are made to be slow

MODEL = b'"model":"chat-a"'
FILLING = 1_000_000
"""Bytes of a body: enough that whatever is not linear in it, or takes it in one go, is seen."""

HEAVY_JSON = {
    "brackets": b'{"x":' + b"[" * FILLING,
    "nested objects": b'{"x":' + b'{"a":' * (FILLING // 5),
    "opened and closed": b'{"x":[' + b"[]," * (FILLING // 3) + b"1]," + MODEL + b"}",
    "members": b"{" + b'"a":1,' * (FILLING // 6) + MODEL + b"}",
    "keys that nearly are": b"{" + b'"\\u006dodeL":1,' * (FILLING // 15) + MODEL + b"}",
    "a string of escapes": b'{"x":"' + b'\\"' * (FILLING // 2) + b'",' + MODEL + b"}",
    "a string of backslashes": b'{"x":"' + b"\\\\" * (FILLING // 2) + b'",' + MODEL + b"}",
    "a number": b'{"x":' + b"9" * FILLING + b"," + MODEL + b"}",
    "blanks": b" " * FILLING + b"{" + MODEL + b"}",
    "commas": b"{" + b"," * FILLING + MODEL + b"}",
    "a name": b'{"model":"' + b"\\u0061" * (FILLING // 6) + b'"}',
}
HEAVY_FORMS = {
    "nearly boundaries": b"--b\r\n" + PARTS[3] + b"\r\n--" * (FILLING // 4) + b"\r\n--b--\r\n",
    "parts": (b"--b\r\n" + PARTS[4] + b"\r\n") * (FILLING // 60) + b"--b--\r\n",
    "headers of a part": b"--b\r\n" + b"X: y\r\n" * (FILLING // 6) + b"\r\n\r\n--b--\r\n",
    "a value": b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + b"a" * FILLING + b"\r\n--b--\r\n",
}
HEAVY = {
    **{what: framed(PATHS[0], b"application/json", body, 0) for what, body in HEAVY_JSON.items()},
    **{what: framed(PATHS[0], b"multipart/form-data; boundary=b", body, 0) for what, body in HEAVY_FORMS.items()},
    "pairs": framed(PATHS[0], b"application/x-www-form-urlencoded", b"a=b&" * (FILLING // 4), 0),
    "pairs of a query": Input(b"POST /v1/embeddings?" + b"a=b&" * 15_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"),
    "fields": Input(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + b"a:b\r\n" * 12_000 + b"\r\n"),
    "dots in a path": Input(b"GET /" + b"../%2e/" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"),
    "slashes in a path": Input(b"GET /upstream" + b"/" * 60_000 + b"chat-a/x HTTP/1.1\r\nHost: a\r\n\r\n"),
    "tokens of a Connection field": Input(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: " + b"a," * 30_000 + b"\r\n\r\n"),
    "hops of X-Forwarded-For": Input(
        b"GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: " + b"::1," * 15_000 + b"\r\n\r\n"
    ),
    "requests in a pipeline": Input(b"GET /a HTTP/1.1\r\nHost:\r\n\r\n" * 5000),
    "chunks of one byte": framed(PATHS[0], b"application/json", b"{" + MODEL + b"}" + b" " * 100_000, 1),
}


async def test_no_input_blocks_the_loop(rig: Rig) -> None:
    blocked = dict[str, float]()
    for what, heavy in HEAVY.items():
        await rig.heartbeat.begin()
        answers = heard(await said(rig.proxy.port, heavy.wire + END, within=30))
        blocked[what] = await rig.heartbeat.longest() * 1000
        assert answers, what
        assert all(answer.seen is not None or 400 <= answer.status < 500 for answer in answers), what
    table("the loop was blocked for", ("ms", "by"), [(ms, what) for what, ms in sorted(blocked.items())])
    assert {what: ms for what, ms in blocked.items() if ms >= BLOCKED * 1000} == {}
