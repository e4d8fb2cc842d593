"""A request that waits is kept alive, and nothing of that ever stands between two bytes of its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message

from proxy.error_event import ERROR_LIMIT, answered, error_event, refused
from proxy.errors import CutStream, Draining, QueueTimeout, Refusal, UpstreamFailed
from proxy.inbound import Inbound
from proxy.keepalive import KeepAlive
from proxy.keepalive_plan import QUEUED, KeepAlives, Plan, Waiting
from proxy.reply import Reply
from proxy.routes import TEXT_APIS, match_route

SSE_HEAD = [(b"content-type", b"text/event-stream")]
JSON_HEAD = [(b"content-type", b"application/json; charset=utf-8"), (b"content-length", b"2")]
EVENT = b"data: 1\n\n"
NEVER = 3600.0


class Socket:
    """An ASGI `send` as uvicorn's: it waits for room, and then writes at once."""

    def __init__(self) -> None:
        self.written: list[Message] = []
        self.room = asyncio.Event()
        self.room.set()
        self.asked: asyncio.Queue[Message] = asyncio.Queue()

    async def __call__(self, message: Message) -> None:
        self.asked.put_nowait(message)
        await self.room.wait()
        self.written.append(message)

    @property
    def heads(self) -> list[Message]:
        return [message for message in self.written if message["type"] == "http.response.start"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.written)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not true():  # noqa: ASYNC110 - what is waited for is on the other side of a callable
                await asyncio.sleep(0.001)

    async def until_early(self) -> None:
        """Return once a head and a sign are out."""
        await self.until(lambda: len(self.written) >= 2)


def waiting(place: Callable[[], int | None] = lambda: None) -> Waiting:
    return Waiting("llm", "chat-a", lambda: 12.34, place)


def stream(api: str = "chat/completions", *, after: float = 0.0, every: float = NEVER) -> Plan:
    return Plan(api, after, every)


def head(status: int = 200, headers: Any = SSE_HEAD) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def piece(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def error_of(event: bytes) -> dict[str, Any]:
    """The `error` in the last event of a stream."""
    data = event.rstrip(b"\n").rpartition(b"data: ")[2]
    error: dict[str, Any] = json.loads(data)["error"]
    return error


# --- comments, then the upstream's bytes


async def test_a_quick_answer_is_passed_on_as_it_came() -> None:
    socket = Socket()
    async with KeepAlive(Reply(socket), stream(after=NEVER), waiting()) as send:
        for message in (head(), piece(EVENT), piece(b"", more=False)):
            await send(message)
    assert socket.written == [head(), piece(EVENT), piece(b"", more=False)]


async def test_a_head_and_comments_go_out_early_and_end_with_the_first_byte() -> None:
    socket = Socket()
    reply = Reply(socket)
    async with KeepAlive(reply, stream(every=0.002), waiting()) as send:
        await socket.until(lambda: len(socket.written) >= 4)
        assert reply.status is None
        await send(head(headers=[*SSE_HEAD, (b"x-request-id", b"1"), (b"content-length", b"9")]))
        await socket.until(lambda: len(socket.written) >= 6)
        await send(piece(EVENT))
        so_far = len(socket.written)
        await asyncio.sleep(0.02)
        assert len(socket.written) == so_far
        await send(piece(b"", more=False))
    assert len(socket.heads) == 1
    assert socket.heads[0]["status"] == 200
    assert socket.heads[0]["headers"] == [
        (b"content-type", b"text/event-stream"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    signs, _, rest = socket.body.partition(b": waited 12.3s\n\n")
    assert signs == QUEUED * signs.count(QUEUED)
    assert rest == EVENT
    assert reply.status == 200


async def test_comments_follow_the_upstreams_own_head_too_until_its_first_byte() -> None:
    socket = Socket()
    async with KeepAlive(Reply(socket), stream(after=0.01, every=0.002), waiting()) as send:
        await send(head())
        await socket.until(lambda: len(socket.written) >= 3)
        await send(piece(EVENT, more=False))
    assert socket.heads == [head()]
    assert socket.body == QUEUED * socket.body.count(QUEUED) + EVENT


async def test_behind_the_upstreams_head_there_is_no_status_left_to_be_silent_for() -> None:
    socket = Socket()
    async with KeepAlive(Reply(socket), stream(every=0.002).silent_for(NEVER), waiting()) as send:
        await asyncio.sleep(0.01)
        assert not socket.written
        await send(head())
        await socket.until(lambda: len(socket.written) >= 3)
    assert socket.body == QUEUED * socket.body.count(QUEUED)


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, [*SSE_HEAD, (b"content-length", b"9")]),
        (200, [*SSE_HEAD, (b"content-encoding", b"gzip")]),
        (200, JSON_HEAD),
        (200, []),
        (400, SSE_HEAD),
    ],
)
async def test_nothing_is_added_to_an_answer_that_is_counted_coded_or_no_stream(status: int, headers: Any) -> None:
    socket = Socket()
    async with KeepAlive(Reply(socket), stream(after=0.002, every=0.001), waiting()) as send:
        await send(head(status, headers))
        await asyncio.sleep(0.02)
        await send(piece(EVENT, more=False))
    assert socket.written == [head(status, headers), piece(EVENT, more=False)]


async def test_a_head_that_still_waits_for_room_gives_way_to_the_upstreams() -> None:
    socket = Socket()
    reply = Reply(socket)
    socket.room.clear()
    async with KeepAlive(reply, stream(), waiting()) as send:
        await socket.asked.get()
        assert not reply.started
        passing = asyncio.create_task(_send_all(send, head(400, JSON_HEAD), piece(b"{}", more=False)))
        await socket.asked.get()
        socket.room.set()
        await passing
    assert socket.written == [head(400, JSON_HEAD), piece(b"{}", more=False)]
    assert reply.status == 400


async def test_a_comment_that_still_waits_for_room_is_not_written_after_the_first_byte() -> None:
    socket = Socket()
    async with KeepAlive(Reply(socket), stream(every=0.001), waiting()) as send:
        await socket.until_early()
        await send(head())
        socket.room.clear()
        while not socket.asked.empty():
            socket.asked.get_nowait()
        await socket.asked.get()
        passing = asyncio.create_task(_send_all(send, piece(b"da"), piece(b"ta: 1\n\n", more=False)))
        await socket.asked.get()
        socket.room.set()
        await passing
    assert socket.body.endswith(b": queued\n\n: waited 12.3s\n\n" + EVENT)


async def _send_all(send: KeepAlive, *messages: Message | BaseException) -> None:
    """Send the messages of an answer; an exception is where it fails."""
    for message in messages:
        if isinstance(message, BaseException):
            raise message
        await send(message)


async def test_without_a_plan_messages_only_pass() -> None:
    socket = Socket()
    async with KeepAlive(Reply(socket), None, waiting()) as send:
        await _send_all(send, head(500), piece(b"x", more=False))
        assert send.forwarded(INBOUND) is INBOUND
    assert socket.written == [head(500), piece(b"x", more=False)]


INBOUND = Inbound("POST", b"/", b"", [(b"accept-encoding", b"gzip, br"), (b"host", b"a")], "127.0.0.1", "http")


async def test_behind_an_early_head_no_coding_is_asked_for() -> None:
    socket = Socket()
    async with KeepAlive(Reply(socket), stream(), waiting()) as send:
        assert send.forwarded(INBOUND) is INBOUND
        await socket.until_early()
        assert send.forwarded(INBOUND).headers == [(b"host", b"a"), (b"accept-encoding", b"identity")]


# --- failures behind an early head


async def failed(reply: Reply, plan: Plan, *messages: Message | BaseException) -> BaseException | None:
    """Take `messages` behind an early head; returns what is raised in the end."""
    assert isinstance(reply.send, Socket)
    try:
        async with KeepAlive(reply, plan, waiting()) as send:
            await reply.send.until_early()
            await _send_all(send, *messages)
    except BaseException as error:
        return error
    return None


async def refused_late(reply: Reply, error: BaseException | None) -> None:
    """What the gateway does with it."""
    assert isinstance(error, Refusal)
    with pytest.raises(CutStream):
        await reply.refuse(error, _receive)


@pytest.mark.parametrize("api", TEXT_APIS)
async def test_an_error_of_the_upstream_is_told_in_its_words_and_the_stream_is_cut(api: str) -> None:
    socket = Socket()
    reply = Reply(socket)
    body = b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}'
    messages = head(400, JSON_HEAD), piece(body[:20]), piece(body[20:], more=False)
    assert isinstance(await failed(reply, stream(api), *messages), CutStream)
    assert reply.status == 400
    assert len(socket.heads) == 1
    assert socket.body == QUEUED + error_event(api, answered(400, body))
    assert error_of(socket.body)["message"] == "too long"
    assert all(message["more_body"] for message in socket.written[1:])


async def test_comments_go_on_while_an_error_is_still_coming() -> None:
    socket = Socket()
    reply = Reply(socket)
    async with KeepAlive(reply, stream(every=0.002), waiting()) as send:
        await socket.until_early()
        await _send_all(send, head(503, JSON_HEAD), piece(b"busy"))
        so_far = len(socket.written)
        await socket.until(lambda: len(socket.written) >= so_far + 2)
        with pytest.raises(CutStream):
            await send(piece(b"", more=False))
        so_far = len(socket.written)
        await asyncio.sleep(0.01)
    assert len(socket.written) == so_far
    assert error_of(socket.body)["message"] == "busy"


@pytest.mark.parametrize(
    ("headers", "pieces", "told"),
    [
        (SSE_HEAD, [b"x" * 50_000] * 3, "x" * ERROR_LIMIT),
        ([(b"content-encoding", b"gzip")], [b"\x1f\x8b"], "llama-swap answered with the status 429, without a word."),
        ([], [], "llama-swap answered with the status 429, without a word."),
    ],
)
async def test_of_a_long_error_the_beginning_is_told_and_of_a_coded_one_the_status(
    headers: Any, pieces: list[bytes], told: str
) -> None:
    socket = Socket()
    messages = head(429, headers), *map(piece, pieces), piece(b"", more=False)
    assert isinstance(await failed(Reply(socket), stream(), *messages), CutStream)
    assert error_of(socket.body)["message"] == told


async def test_an_error_that_breaks_off_is_told_as_far_as_it_came() -> None:
    socket = Socket()
    reply = Reply(socket)
    error = await failed(reply, stream(), head(500, []), piece(b"out of mem"), CutStream())
    assert isinstance(error, CutStream)
    assert error_of(socket.body)["message"] == "out of mem"
    assert reply.status == 500


async def test_an_answer_that_breaks_off_before_its_first_byte_is_a_failed_upstream() -> None:
    socket = Socket()
    reply = Reply(socket)
    await refused_late(reply, await failed(reply, stream(), head(), CutStream()))
    assert reply.status == 502
    assert error_of(socket.body)["code"] == "upstream_failed"


async def test_an_answer_that_breaks_off_later_is_cut_and_nothing_is_added() -> None:
    socket = Socket()
    reply = Reply(socket)
    assert isinstance(await failed(reply, stream(), head(), piece(EVENT), CutStream()), CutStream)
    assert socket.body.endswith(EVENT)
    await refused_late(reply, Refusal())
    assert socket.body.endswith(EVENT)
    assert reply.status == 200


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, JSON_HEAD),
        (200, []),
        (200, [*SSE_HEAD, (b"content-encoding", b"br")]),
        (204, []),
        (302, [(b"location", b"/"), *SSE_HEAD]),
    ],
)
async def test_an_answer_that_cannot_follow_an_early_head_is_a_failed_upstream(status: int, headers: Any) -> None:
    socket = Socket()
    reply = Reply(socket)
    error = await failed(reply, stream(), head(status, headers))
    assert isinstance(error, UpstreamFailed)
    assert str(status) in error.message
    assert socket.body == QUEUED
    await refused_late(reply, error)
    assert (reply.status, len(socket.heads)) == (502, 1)


@pytest.mark.parametrize("error", [QueueTimeout(), Draining(), UpstreamFailed(), Refusal()])
@pytest.mark.parametrize("api", TEXT_APIS)
async def test_a_refusal_behind_an_early_head_is_the_apis_error_event(api: str, error: Refusal) -> None:
    socket = Socket()
    reply = Reply(socket)
    await refused_late(reply, await failed(reply, stream(api), error))
    assert socket.body == QUEUED + error_event(api, refused(error))
    assert (reply.status, len(socket.heads)) == (error.status, 1)


async def test_a_refusal_that_overtakes_the_early_head_keeps_its_status() -> None:
    socket = Socket()
    reply = Reply(socket)
    socket.room.clear()
    async with KeepAlive(reply, stream(), waiting()):
        await socket.asked.get()
    refusing = asyncio.create_task(reply.refuse(QueueTimeout(), _receive))
    await socket.asked.get()
    socket.room.set()
    await refusing
    assert [message["status"] for message in socket.heads] == [503]


async def test_a_client_that_leaves_meanwhile_ends_the_signs() -> None:
    socket = Socket()
    reply = Reply(socket)
    error = await failed(reply, stream(every=0.001), asyncio.CancelledError())
    assert isinstance(error, asyncio.CancelledError)
    so_far = len(socket.written)
    await asyncio.sleep(0.01)
    assert len(socket.written) == so_far
    assert reply.status is None


async def test_signs_that_fail_do_not_fail_the_request() -> None:
    socket = Socket()

    def broken() -> int:
        raise RuntimeError

    async with KeepAlive(
        Reply(socket), Plan("chat/completions", 0, 0.001, shows_position=True), waiting(broken)
    ) as send:
        await socket.until(lambda: bool(socket.heads))
        await asyncio.sleep(0.01)
        await _send_all(send, head(), piece(EVENT, more=False))
    assert socket.body.endswith(EVENT)


async def _receive() -> Message:
    raise AssertionError


# --- plain JSON


async def test_plain_json_gets_its_head_and_spaces() -> None:
    socket = Socket()
    reply = Reply(socket)
    async with KeepAlive(reply, Plan(None, 0, 0.001), waiting()) as send:
        await socket.until(lambda: len(socket.written) >= 4)
        await _send_all(send, head(200, JSON_HEAD), piece(b'{"a":', more=True), piece(b"1}", more=False))
    assert [message["headers"][0] for message in socket.heads] == [(b"content-type", b"application/json")]
    assert socket.body == b" " * (len(socket.body) - 7) + b'{"a":1}'
    assert json.loads(socket.body) == {"a": 1}


async def test_plain_json_that_is_answered_before_is_as_it_came() -> None:
    socket = Socket()
    async with KeepAlive(Reply(socket), Plan(None, 0.005, 0.001), waiting()) as send:
        await send(head(200, JSON_HEAD))
        await asyncio.sleep(0.02)
        await send(piece(b"{}", more=False))
    assert socket.written == [head(200, JSON_HEAD), piece(b"{}", more=False)]


async def test_a_late_failure_of_plain_json_is_a_cut_and_no_word() -> None:
    socket = Socket()
    reply = Reply(socket)
    messages = head(400, JSON_HEAD), piece(b'{"error":"x"}', more=False)
    assert isinstance(await failed(reply, Plan(None, 0, NEVER), *messages), CutStream)
    assert (socket.body, reply.status) == (b" ", 400)


@pytest.mark.parametrize("headers", [SSE_HEAD, [], [*JSON_HEAD, (b"content-encoding", b"gzip")]])
async def test_what_is_not_json_cannot_follow_a_head_that_says_so(headers: Any) -> None:
    socket = Socket()
    reply = Reply(socket)
    await refused_late(reply, await failed(reply, Plan(None, 0, NEVER), head(200, headers)))
    assert (socket.body, reply.status) == (b" ", 502)


# --- the place


async def test_the_place_is_told_in_whole_chunks_and_comments_stand_between() -> None:
    socket = Socket()
    places = iter([3, 2])
    async with KeepAlive(
        Reply(socket), Plan("chat/completions", 0, 0.001, shows_position=True), waiting(lambda: next(places))
    ) as send:
        await socket.until(lambda: len(socket.written) >= 5)
        await _send_all(send, head(), piece(EVENT, more=False))
    chunk, _, rest = socket.body.partition(b"\n\n")
    told = json.loads(chunk.removeprefix(b"data: "))
    assert rest.startswith(QUEUED * 3)
    assert {"id", "object", "created", "model", "choices"} == told.keys()
    assert (told["object"], told["model"]) == ("chat.completion.chunk", "chat-a")
    (choice,) = told["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, None)
    assert "place 3" in choice["delta"]["reasoning_content"]
    assert "llm" in choice["delta"]["reasoning_content"]


# --- who is kept alive


ALL = KeepAlives(3, 4, json_after=5, show_position=True, silent_classes=frozenset({"tts"}))
ONLY_STREAMS = KeepAlives(3, 4)


@pytest.mark.parametrize(
    ("path", "streamed", "expected"),
    [
        ("/v1/chat/completions", True, Plan("chat/completions", 3, 4, shows_position=True)),
        ("/v/chat/completions", True, Plan("chat/completions", 3, 4, shows_position=True)),
        ("/upstream/a/v1/chat/completions", True, Plan("chat/completions", 3, 4, shows_position=True)),
        ("/v1/completions", True, Plan("completions", 3, 4)),
        ("/v1/responses", True, Plan("responses", 3, 4)),
        ("/v1/messages", True, Plan("messages", 3, 4)),
        ("/v1/chat/completions", False, Plan(None, 5, 4)),
        ("/upstream/a/v1/messages", False, Plan(None, 5, 4)),
        ("/v1/embeddings", False, Plan(None, 5, 4)),
        ("/v1/messages/count_tokens", False, Plan(None, 5, 4)),
        ("/rerank", False, Plan(None, 5, 4)),
        ("/completion", False, Plan(None, 5, 4)),
        ("/completion", True, None),
        ("/v1/chat/completions", None, None),
        ("/v1/embeddings", None, None),
        ("/upstream/a/v1/embeddings", False, None),
        ("/v1/audio/speech", True, None),
        ("/v1/audio/speech", False, None),
        ("/v1/audio/transcriptions", False, None),
        ("/v1/images/generations", False, None),
        ("/sdapi/v1/txt2img", False, None),
    ],
)
def test_which_requests_are_kept_alive(path: str, streamed: bool | None, expected: Plan | None) -> None:
    route = match_route("POST", path.encode())
    assert ALL.plan("POST", route, "llm", streamed=streamed) == expected
    assert ALL.plan("POST", route, "tts", streamed=streamed) is None
    only = ONLY_STREAMS.plan("POST", route, "llm", streamed=streamed)
    assert (only.api if only else None) == (expected.api if expected else None)
    assert expected is None or ALL.asks_about_stream("POST", route)
    assert expected is None or (expected.silent_for(9).after, expected.silent_for(None)) == (9, expected)


def test_other_methods_wait_in_silence_and_other_bodies_are_not_looked_through() -> None:
    chat, speech = match_route("POST", b"/v1/chat/completions"), match_route("POST", b"/v1/audio/speech")
    for method in ("HEAD", "GET", "PUT"):
        assert ALL.plan(method, chat, "llm", streamed=True) is None
        assert not ALL.asks_about_stream(method, chat)
    assert not ALL.asks_about_stream("POST", speech)
    assert ONLY_STREAMS.asks_about_stream("POST", chat)
    assert not ONLY_STREAMS.asks_about_stream("POST", match_route("POST", b"/v1/embeddings"))


# --- error events


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (400, b'{"error":{"message":"m","type":"t","code":"c"}}', ("m", "t", "c")),
        (400, b'{"error":{"message":"m","type":"t","code":400}}', ("m", "t", 400)),
        (400, b'{"error":{"message":"m","type":null,"code":{}}}', ("m", "invalid_request_error", None)),
        (500, b'{"error":"m"}', ("m", "server_error", None)),
        (503, b'{"message":"m","code":"c"}', ("m", "server_error", "c")),
        (404, b"llama-swap: no such model\n", ("llama-swap: no such model", "invalid_request_error", None)),
        (500, b'["x"]', ('["x"]', "server_error", None)),
        (500, b'{"error":{"message":', ('{"error":{"message":', "server_error", None)),
        (500, b"\xff", ("\ufffd", "server_error", None)),
        (502, b"", ("llama-swap answered with the status 502, without a word.", "server_error", None)),
        (500, b"[" * ERROR_LIMIT, ("[" * ERROR_LIMIT, "server_error", None)),
    ],
)
def test_what_the_upstream_says_of_its_error(status: int, body: bytes, told: tuple[object, ...]) -> None:
    failure = answered(status, body)
    assert (failure.status, failure.message, failure.type, failure.code) == (status, *told)


def test_each_api_has_its_own_event() -> None:
    failure = refused(QueueTimeout("a\nb"))
    error = {"message": "a\nb", "type": "server_error", "param": None, "code": "queue_timeout"}
    for api in ("chat/completions", "completions"):
        assert _event(error_event(api, failure)) == (None, {"error": error})
    name, data = _event(error_event("messages", failure))
    assert name == "error"
    assert data == json.loads(QueueTimeout("a\nb").body(anthropic=True))
    name, data = _event(error_event("responses", failure))
    assert (name, data["type"], data["message"], data["code"]) == ("error", "error", "a\nb", "queue_timeout")
    assert data["error"] == error


def test_anthropics_own_word_for_an_error_stays() -> None:
    said = b'{"type":"error","error":{"type":"rate_limit_error","message":"m"}}'
    assert _event(error_event("messages", answered(503, said)))[1]["error"]["type"] == "rate_limit_error"
    assert _event(error_event("messages", answered(503, b"busy")))[1]["error"]["type"] == "overloaded_error"


def _event(raw: bytes) -> tuple[str | None, Any]:
    """Name and data of a single event."""
    assert raw.endswith(b"\n\n")
    fields = dict(line.split(": ", 1) for line in raw[:-2].decode().split("\n"))
    return fields.get("event"), json.loads(fields["data"])
