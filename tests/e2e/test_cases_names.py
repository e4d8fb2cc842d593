"""No request reaches the GPU under another class than its model's, whatever two parsers may make of it; see
tests/cases.md.

Every test here ends with the same comparison: for each request that came to the upstream, the class under which the
proxy answered is the class of the model that llama-swap would read from the bytes that it got. `model_read` is that
reading, written down from what was measured on llama-swap, and shares nothing with the proxy's own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from urllib.parse import parse_qsl, unquote

import pytest
import pytest_asyncio
from wire_support import EACH_PARSER, Stack, body_after, fields_of, lines, once, pieces, status_of

from harness import Proxy, RawClient, Seen, Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "POST /v1/chat/completions HTTP/1.1"
JSON = "Content-Type: application/json"
CLASSES = {"chat-a": "llm", "tts-a": "tts", "embed-a": "embed", "whisper-a": "stt"}


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


def model_read(seen: Seen) -> str | None:
    """The model that llama-swap reads from a request; None where it loads none."""
    path, _, query = seen.target.decode().partition("?")
    path = unquote(path)
    if path.startswith("/upstream/"):
        return path.split("/")[2]
    if not path.startswith("/v1/") or path == "/v1/models":
        return None
    fields = {name.lower(): value for name, value in reversed(seen.headers)}  # the first of equal names counts
    content_type = fields.get(b"content-type", b"").decode("latin-1")
    if "application/json" in content_type:
        return first_model(seen.body)
    values = parse_qsl(query, keep_blank_values=True)
    if content_type.startswith("application/x-www-form-urlencoded"):
        values = parse_qsl(seen.body.decode(), keep_blank_values=True) + values
    return next((value for name, value in values if name == "model"), None)


def first_model(body: bytes) -> str | None:
    """The first top-level member `model` of a JSON object; what follows the object does not matter."""
    pairs, _ = json.JSONDecoder(object_pairs_hook=list).raw_decode(body.decode())
    return next((value for name, value in pairs if name == "model"), None)


async def sent(proxy: Proxy, upstream: Upstream, data: bytes) -> tuple[int, str | None]:
    """Status and class of the answer to `data`. Whatever came to the upstream was one request, of that class."""
    upstream.seen.clear()
    head, _ = await once(proxy, data)
    class_name = dict(fields_of(head)).get(b"x-lease-class", b"").decode() or None
    # If more than one request was on the wire, the next one on that connection meets it.
    marker = "/v1/models?marker"
    head_of_next, _ = await once(proxy, lines(f"GET {marker} HTTP/1.1", "Host: test"))
    assert status_of(head_of_next) == 200
    *came, last = upstream.seen
    assert last.target == marker.encode()
    assert len(came) <= 1
    for seen in came:
        model = model_read(seen)
        assert class_name == (CLASSES[model] if model else None)
    return status_of(head) if head else 0, class_name if came else None


def post(body: bytes, *fields: str, request_line: str = CHAT) -> bytes:
    return lines(request_line, "Host: test", *fields, f"Content-Length: {len(body)}", body=body)


def refused(answer: tuple[int, str | None]) -> bool:
    return answer == (400, None)


# --- case 55


@pytest.mark.parametrize(
    ("body", "class_name"),
    [
        (b'{"model":"embed-a","model":"tts-a"}', "embed"),
        (b'{"model":"tts-a","model":"embed-a"}', "tts"),
        (b'{"x":{"model":"embed-a"},"model":"tts-a"}', "tts"),
        (b'{"x":[{"model":"embed-a"}],"y":"\\"model\\":\\"embed-a\\"","model":"tts-a"}', "tts"),
        (b'{"Model":"embed-a","model":"tts-a"}', "tts"),
        (b'{"model ":"embed-a","model":"tts-a"}', "tts"),
    ],
)
async def test_case_55_of_several_names_the_first_decides(
    body: bytes, class_name: str, proxy: Proxy, upstream: Upstream
) -> None:
    assert await sent(proxy, upstream, post(body, JSON)) == (200, class_name)
    assert await sent(proxy, upstream, lines(CHAT, "Host: a", JSON, "Transfer-Encoding: chunked", body=pieces(body)))
    parts = pieces(*(body[at : at + 1] for at in range(len(body))))
    answer = await sent(proxy, upstream, lines(CHAT, "Host: a", JSON, "Transfer-Encoding: chunked", body=parts))
    assert answer == (200, class_name)
    assert upstream.seen[0].body == body


async def test_case_55_the_path_does_not_decide(proxy: Proxy, upstream: Upstream) -> None:
    for path in ("/v1/embeddings", "/v1/%65mbeddings", "/v1/audio/transcriptions", "/v1/chat/completions"):
        data = post(b'{"model":"tts-a"}', JSON, request_line=f"POST {path} HTTP/1.1")
        assert await sent(proxy, upstream, data) == (200, "tts")


# --- case 56


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"tts-a"} trailing',
        b'{"model":"tts-a"}{"model":"embed-a"}',
        b'{"model":"tts-a","x":NaN}',
        b'{"model":"tts-a","x":"\\ud800"}',
        b'{"model":"tts\\u002da"}',
        b'{"\\u006dodel":"tts-a","model":"embed-a"}',
    ],
)
async def test_case_56_what_is_no_json_is_read_as_llama_swap_reads_it_or_not_at_all(
    body: bytes, proxy: Proxy, upstream: Upstream
) -> None:
    answer = await sent(proxy, upstream, post(body, JSON))
    assert refused(answer) or answer == (200, "tts")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'"model"',
        b"null",
        b'[{"model":"tts-a"}]',
        b'{"model":5}',
        b'{"model":null}',
        b'{"model":""}',
        b'{"model":true}',
        b'{"model":["tts-a"]}',
        b'{"model":{"model":"tts-a"}}',
        b'{"model":"tts-a',
        b'{"model":"tts\xff"}',
        b'{"model":"tts-a\\x"}',
        b'\xef\xbb\xbf{"x":1}',
        '{"model":"tts-a"}'.encode("utf-16"),
        '{"model":"tts-a"}'.encode("utf-32"),
        b"model=tts-a",
        b'{"messages":[]}',
        b"\x00" * 100,
    ],
)
async def test_case_56_a_body_without_a_certain_name_is_refused_and_never_forwarded(
    body: bytes, proxy: Proxy, upstream: Upstream
) -> None:
    data = post(body, JSON)
    assert refused(await sent(proxy, upstream, data))
    _, got = await once(proxy, data)
    error = json.loads(got)["error"]
    assert (error["code"], error["type"]) == ("model_undecidable", "invalid_request_error")


async def test_case_56_a_refused_body_was_read_and_the_connection_goes_on(proxy: Proxy, upstream: Upstream) -> None:
    async with RawClient(proxy.port) as client:
        for status, body in ((400, b'{"model":5}'), (200, b'{"model":"tts-a"}'), (400, b"[]")):
            client.send(post(body, JSON))
            head = await client.head()
            assert status_of(head) == status
            await body_after(client, head)


# --- fields that two parties could read differently

UNLOAD = "POST /unload HTTP/1.1"
SPEECH = b'{"model":"tts-a"}'
SMUGGLED = lines("POST /v1/audio/speech HTTP/1.1", "Host: a", JSON, f"Content-Length: {len(SPEECH)}", body=SPEECH)


@pytest.mark.parametrize(
    "name", ["content-length", "Content-Length", "transfer-encoding", "host", "close, content-length"]
)
@pytest.mark.parametrize("request_line", [UNLOAD, CHAT])
async def test_a_connection_field_cannot_turn_a_body_into_a_request(
    name: str, request_line: str, proxy: Proxy, upstream: Upstream
) -> None:
    await sent(proxy, upstream, post(SMUGGLED, f"Connection: {name}", request_line=request_line))
    body = b'{"model":"chat-a"}'
    assert (await sent(proxy, upstream, post(body, JSON, f"Connection: {name}")))[0] == 200
    chunked = lines(request_line, "Host: a", f"Connection: {name}", "Transfer-Encoding: chunked", body=pieces(SMUGGLED))
    await sent(proxy, upstream, chunked)


async def test_a_connection_field_cannot_take_the_type_of_a_body_away(proxy: Proxy, upstream: Upstream) -> None:
    """Read as JSON the body is an embedding; without its type, the query would count, and is speech."""
    data = post(
        b'{"model":"embed-a"}',
        *(JSON, "Connection: content-type"),
        request_line="POST /v1/chat/completions?model=tts-a HTTP/1.1",
    )
    assert await sent(proxy, upstream, data) == (200, "embed")


@pytest.mark.parametrize("second", ["Content-Type: text/plain", "Content-Type: application/json; charset=utf-8"])
async def test_a_type_that_is_given_twice_is_refused(second: str, proxy: Proxy, upstream: Upstream) -> None:
    for fields in ((JSON, second), (second, JSON)):
        data = post(b'{"model":"embed-a"}', *fields, request_line="POST /v1/embeddings?model=tts-a HTTP/1.1")
        assert refused(await sent(proxy, upstream, data))
        _, body = await once(proxy, data)
        assert json.loads(body)["error"]["code"] == "ambiguous_header"
    assert await sent(proxy, upstream, post(b'{"model":"embed-a"}', JSON, JSON)) == (200, "embed")


@pytest.mark.parametrize(
    ("content_type", "class_name"),
    [
        ("application/json", "embed"),
        ("application/json;charset=utf-8", "embed"),
        ("text/plain, application/json", "embed"),
        ("Application/JSON", "tts"),
        ("application/vnd.x+json", "tts"),
        ("text/plain", "tts"),
        (None, "tts"),
    ],
)
async def test_the_type_decides_whether_body_or_query_names_the_model(
    content_type: str | None, class_name: str, proxy: Proxy, upstream: Upstream
) -> None:
    fields = [f"Content-Type: {content_type}"] if content_type else []
    request_line = "POST /v1/chat/completions?model=tts-a HTTP/1.1"
    answer = await sent(proxy, upstream, post(b'{"model":"embed-a"}', *fields, request_line=request_line))
    assert refused(answer) or answer == (200, class_name)
    if class_name == "embed":
        assert answer == (200, "embed")


async def test_a_form_is_read_before_the_query(proxy: Proxy, upstream: Upstream) -> None:
    for body, query in (("model=tts-a", "model=embed-a"), ("model=embed-a", "model=tts-a"), ("x=1", "model=tts-a")):
        request_line = f"POST /v1/audio/speech?{query} HTTP/1.1"
        fields = ("Content-Type: application/x-www-form-urlencoded",)
        status, _ = await sent(proxy, upstream, post(body.encode(), *fields, request_line=request_line))
        assert status in {200, 400}


FRAMINGS = [
    ["Content-Length:  17\t "],
    ["Content-Length: 017"],
    ["Content-Length: 17", "Content-Length: 17"],
    ["Content-Length: 17, 17"],
    ["Content-Length: 17", "Content-Length: 18"],
    ["Content-Length: +17"],
    ["Content-Length: 0x11"],
    ["Content-Length: 1_7"],
    ["Content-Length: 17", "Transfer-Encoding: chunked"],
    ["Transfer-Encoding: chunked", "Content-Length: 17"],
    ["Transfer-Encoding: identity", "Content-Length: 17"],
    ["Transfer-Encoding: xchunked"],
    ["Transfer-Encoding: gzip, chunked"],
    ["Transfer-Encoding: chunked, gzip"],
    ["Transfer-Encoding: chunked", "Transfer-Encoding: identity"],
    ["Transfer-Encoding: gzip", "Transfer-Encoding: chunked"],
    ["Transfer-Encoding: Chunked"],
    ["Transfer-Encoding: \tchunked "],
    ["Transfer-Encoding : chunked"],
    ["Transfer-Encoding: \x0bchunked"],
    ["Transfer-Encoding:\r\n chunked"],
    ["X: a\nContent-Length: 17"],
    ["X: a\rContent-Length: 17"],
    ["X: a\r\n Content-Length: 17"],
    ["Connection: Upgrade, close", "Upgrade: h2c", "Content-Length: 17"],
    ["Connection: Upgrade, close", "Upgrade: h2c", "Transfer-Encoding: chunked"],
    [],
]


@pytest.mark.parametrize("request_line", [UNLOAD, "POST /v1/audio/speech HTTP/1.1", "POST /v1/audio/speech HTTP/1.0"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_however_a_body_is_framed_what_reaches_the_upstream_had_a_lease_of_its_class(
    request_line: str, chunked: bool, proxy: Proxy, upstream: Upstream
) -> None:
    wire = pieces(SPEECH) if chunked else SPEECH
    follows = lines("GET /upstream/chat-a/follows HTTP/1.1", "Host: test", "Connection: close")
    for framing in FRAMINGS:
        before = await leases(proxy)
        upstream.seen.clear()
        async with RawClient(proxy.port) as client:
            client.send(lines(request_line, "Host: test", JSON, *framing) + wire + follows)
            got = await client.rest(10)
        assert b"HTTP/1.1 500" not in got
        await proxy.until(holders=0, waiters=0)
        models = [model for seen in upstream.seen if (model := model_read(seen)) is not None]
        assert Counter(CLASSES[model] for model in models) <= await leases(proxy) - before, framing
        assert all(seen.head.startswith((request_line[:-8].encode(), b"GET /upstream")) for seen in upstream.seen)


@pytest.mark.parametrize("request_line", [UNLOAD, "POST /v1/audio/speech HTTP/1.1"])
async def test_a_length_with_whitespace_around_it_is_a_length(
    request_line: str, proxy: Proxy, upstream: Upstream
) -> None:
    for length in ("17 ", " \t17\t ", "0017"):
        head, _ = await once(proxy, lines(request_line, "Host: a", JSON, f"Content-Length: {length}", body=SPEECH))
        assert status_of(head) == 200
        assert upstream.seen[-1].body == SPEECH
        assert (b"content-length", length.strip().encode()) in upstream.seen[-1].headers


async def leases(proxy: Proxy) -> Counter[str]:
    """How many exchanges have been under a lease, by class."""
    text = (await proxy.client.get("/-/metrics")).text
    found = re.findall(r'^gpu_lease_exchanges_total\{class="(\w+)",outcome="\w+"\} (\S+)$', text, re.MULTILINE)
    counts = Counter[str]()
    for class_name, value in found:
        counts[class_name] += int(float(value))
    assert set(CLASSES.values()) <= set(counts)
    return counts


async def test_every_request_of_a_pipeline_has_its_own_class(proxy: Proxy, upstream: Upstream) -> None:
    models = ["chat-a", "tts-a", "embed-a", "tts-a", "chat-a"]
    bodies = [json.dumps({"model": model, "n": number}).encode() for number, model in enumerate(models)]
    async with RawClient(proxy.port) as client:
        client.send(b"".join(post(body, JSON) for body in bodies))
        for model in models:
            head = await client.head()
            await body_after(client, head)
            assert dict(fields_of(head))[b"x-lease-class"].decode() == CLASSES[model]
    assert [seen.body for seen in upstream.seen] == bodies


async def test_a_trailer_is_no_field(proxy: Proxy, upstream: Upstream, request: pytest.FixtureRequest) -> None:
    """A type that comes after the body must not decide how the body is read."""
    body = pieces(b'{"model":"embed-a"}').removesuffix(b"\r\n") + b"Content-Type: application/json\r\nX-T: 1\r\n\r\n"
    request_line = "POST /v1/chat/completions?model=tts-a HTTP/1.1"
    answer = await sent(proxy, upstream, lines(request_line, "Host: a", "Transfer-Encoding: chunked", body=body))
    assert refused(answer) or answer[0] == 200
    assert not any(name in {b"x-t", b"content-type"} for seen in upstream.seen for name, _ in seen.headers)


# --- targets and methods


@pytest.mark.parametrize(
    ("target", "class_name"),
    [
        ("/upstream/tts-a/x", "tts"),
        ("/upstream/tts%2Da/x", "tts"),
        ("/%75pstream/tts-a/x", "tts"),
        ("/upstream/tts-a/../chat-a/x", None),
        ("//upstream/tts-a/x", None),
        ("/upstream//tts-a/x", None),
        ("/v1/audio/speech/", None),
        ("/v1/audio/voices?model=tts-a", "tts"),
        ("/v1/audio/voices?model=embed-a&model=tts-a", None),
    ],
)
async def test_case_59_a_get_that_loads_a_model_is_of_its_class(
    target: str, class_name: str | None, proxy: Proxy, upstream: Upstream
) -> None:
    head, _ = await once(proxy, lines(f"GET {target} HTTP/1.1", "Host: test"))
    found = dict(fields_of(head)).get(b"x-lease-class", b"").decode() or None
    if status_of(head) == 400:
        assert not upstream.seen
    else:
        assert found == class_name
        assert upstream.seen[0].target == target.encode()


@pytest.mark.parametrize("method", ["post", "Post", "POST\t", "GET", "PUT", "FOO", "CONNECT", "QUERY"])
async def test_a_method_is_taken_as_it_is_or_refused(method: str, proxy: Proxy, upstream: Upstream) -> None:
    data = post(b'{"model":"tts-a"}', JSON, request_line=f"{method} /v1/audio/speech HTTP/1.1")
    head, _ = await once(proxy, data)
    if status_of(head) == 400:
        assert not upstream.seen
    else:
        assert upstream.seen[0].head.startswith(f"{method} /v1/audio/speech".encode())
        assert b"x-lease-class" not in dict(fields_of(head)), "llama-swap has this route for POST only"
