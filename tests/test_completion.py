"""A chat stream without its last event is told from a whole one, however it is cut into pieces, and is not changed."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from httpx_sse import EventSource
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import Message

from proxy.completion import OVERLAP, Completion, LastEvent
from proxy.errors import CutStream

SSE = (b"content-type", b"text/event-stream")


def chunk(content: str = "", finish_reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish_reason, **more}
    return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"


def is_whole(*pieces: bytes) -> bool:
    last_event = LastEvent()
    for piece in pieces:
        last_event.feed(piece)
    return last_event.seen


WHOLE = [
    b"data: [DONE]\n\n",
    b"data:[DONE]",
    b"data:\t[DONE]",
    chunk("x") + b"data: [DONE]\n\n",
    chunk("x").replace(b"\n", b"\r\n") + b"data: [DONE]\r\n\r\n",
    chunk("x").replace(b"\n", b"\r") + b"data: [DONE]\r\r",
    chunk("x", "stop"),
    chunk("x", "length") + chunk("y"),
    chunk("x", ""),
    b'data: {"choices":[{"finish_reason":"tool_calls"}]}\n\n',
    b'data: {"choices":[{"finish_reason"  :  "stop"}]}\n\n',
    b'data: {"choices":[{"text":"a\\\\","finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[{"finish_reason":{"type":"stop"}}]}\n\n',
]
HALF = [
    b"",
    b"\n",
    chunk("x"),
    b'data: {"choices":[{"finish_reason": null}]}\n\n',
    b'data: {"choices":[{"finish_reason":',
    b'data: {"choices":[{"finish_reason" : null, "x": 1}]}\n\n',
    chunk("data: [DONE]"),
    chunk("\ndata: [DONE]\n\n"),
    chunk("\r\ndata:[DONE]"),
    chunk('"finish_reason":"stop"'),
    chunk(',"finish_reason":"stop"'),
    chunk('{\\"finish_reason":"stop"'),
    chunk('a\\"finish_reason":"stop"'),
    chunk(json.dumps(json.dumps({"finish_reason": "stop"}))),
    chunk("finish_reason"),
    chunk('"finish_reason'),
    chunk("x", delta={"tool_calls": [{"function": {"arguments": '{"finish_reason":"stop"}'}}]}),
    b'data: {"a\\"finish_reason":1}\n\n',
    b": data: [DONE]\n\n",
    b"event: x\nid: data: [DONE]\n\n",
    b"[DONE]\n\n",
]


@pytest.mark.parametrize("stream", WHOLE)
def test_a_stream_with_its_last_event_is_whole_at_every_split(stream: bytes) -> None:
    assert is_whole(stream)
    assert is_whole(*(stream[at : at + 1] for at in range(len(stream))))
    for at in range(len(stream)):
        assert is_whole(stream[:at], stream[at:])


@pytest.mark.parametrize("stream", HALF)
def test_what_a_model_writes_or_leaves_open_is_no_last_event_at_any_split(stream: bytes) -> None:
    assert not is_whole(stream)
    assert not is_whole(*(stream[at : at + 1] for at in range(len(stream))))
    for at in range(len(stream)):
        assert not is_whole(stream[:at], stream[at:])


TEXT = st.lists(
    st.sampled_from(
        ["data: [DONE]", "\n", "\r", '"finish_reason"', ":", '"stop"', "null", "\\", '"', "{", ",", "x" * 60]
    )
).map("".join)
EVENTS = st.lists(
    st.one_of(TEXT.map(chunk), st.sampled_from([b": queued\n\n", b"data: [DONE]\n\n", chunk("", "stop")]))
)


@given(EVENTS, st.lists(st.integers(0, 4000)), st.integers(0, 4000))
@example([chunk("x" * OVERLAP, "stop")], [1], 0)
def test_the_verdict_is_that_of_a_json_parser_and_does_not_hang_on_the_pieces(
    events: list[bytes], cuts: list[int], lost: int
) -> None:
    stream = b"".join(events)
    if lost < 20:
        stream = stream[: len(stream) - lost]
    borders = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    pieces = [stream[start:end] for start, end in pairwise(borders)]
    assert is_whole(*pieces) is is_whole(stream)
    if lost == 0 or lost >= 20:
        assert is_whole(stream) is any(_is_last(event) for event in events)


def _is_last(event: bytes) -> bool:
    if not event.startswith(b"data: {"):
        return event == b"data: [DONE]\n\n"
    return json.loads(event[6:])["choices"][0]["finish_reason"] is not None


# --- the wrapper


class Client:
    """The next `send`, and where incomplete streams are counted."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.counted: list[str] = []

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)

    def stream_incomplete(self, class_name: str) -> None:
        self.counted.append(class_name)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def ended_well(self) -> bool:
        return not self.messages[-1]["more_body"]


async def answer(
    *pieces: bytes, status: int = 200, fields: tuple[tuple[bytes, bytes], ...] = (SSE,), flag: bool = True
) -> Client:
    """What comes out where an answer of these pieces goes in."""
    client = Client()
    send = Completion(client, client, "llm", "chat-a", flag=flag)
    await send({"type": "http.response.start", "status": status, "headers": list(fields)})
    try:
        for number, piece in enumerate(pieces, 1):
            await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})
    except CutStream:
        assert not client.ended_well
    else:
        assert client.ended_well
    return client


@pytest.mark.parametrize("flag", [True, False])
async def test_a_whole_stream_passes_piece_by_piece_as_the_objects_that_came(flag: bool) -> None:
    pieces = (chunk("a"), chunk("b", "stop"), b"data: [DONE]\n\n", b"")
    client = await answer(*pieces, flag=flag)
    assert [id(message["body"]) for message in client.messages[1:]] == [id(piece) for piece in pieces]
    assert client.ended_well
    assert not client.counted


@pytest.mark.parametrize("pieces", [(chunk("a"), chunk("b")), (chunk("a"), chunk("b"), b""), (b"",)])
async def test_half_a_stream_is_counted_flagged_and_cut(pieces: tuple[bytes, ...]) -> None:
    client = await answer(*pieces)
    assert client.counted == ["llm"]
    assert not client.ended_well
    given, _, event = client.body.rpartition(b"data: ")
    assert given == b"".join(pieces)
    assert event.endswith(b"\n\n")
    error = json.loads(event)["error"]
    assert (error["code"], error["type"]) == ("incomplete_stream", "server_error")
    assert error["message"]


async def test_half_a_stream_that_is_not_to_be_flagged_is_counted_and_passes_as_it_is() -> None:
    client = await answer(chunk("a"), chunk("b"), b"", flag=False)
    assert client.counted == ["llm"]
    assert client.ended_well
    assert client.body == chunk("a") + chunk("b")


async def test_half_a_stream_of_a_length_that_the_head_told_is_only_counted() -> None:
    """Nothing can follow its last byte."""
    client = await answer(chunk("a"), fields=(SSE, (b"content-length", b"1")))
    assert client.counted == ["llm"]
    assert client.ended_well
    assert client.body == chunk("a")


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (200, ((b"content-type", b"application/json"),)),
        (200, ()),
        (200, (SSE, (b"content-encoding", b"gzip"))),
        (200, (SSE, (b"content-length", b"0"))),
        (429, (SSE,)),
        (204, ()),
    ],
)
async def test_what_is_no_stream_to_read_passes_untouched(status: int, fields: tuple[tuple[bytes, bytes], ...]) -> None:
    client = await answer(b"", status=status, fields=fields)
    assert client.messages[0]["headers"] == list(fields)
    assert client.ended_well
    assert not client.counted


async def test_a_stream_is_known_by_its_type_in_any_case_and_with_parameters() -> None:
    fields = ((b"content-type", b"Text/Event-Stream; charset=utf-8"), (b"content-encoding", b"Identity"))
    assert (await answer(chunk("a"), fields=fields)).counted == ["llm"]


END = [b"", b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b"\r", b"\r\r"]


@pytest.mark.parametrize("end", END)
@pytest.mark.parametrize("start", [b"", b": queued\n\n", b": queued\r\n\r\n"])
@pytest.mark.parametrize("whole", [True, False])
async def test_the_error_is_an_event_of_its_own_wherever_the_stream_stopped(
    start: bytes, end: bytes, whole: bool
) -> None:
    said = b'data: {"a":1}' if whole else b'data: {"a'
    client = await answer(start, said + end, b"")
    assert client.body.startswith(start + said + end)
    events = list(events_of(client.body))
    assert events[:-1] == [said.partition(b" ")[2].decode()]
    assert json.loads(events[-1])["error"]["code"] == "incomplete_stream"


def events_of(body: bytes) -> list[str]:
    """The data of all events, by httpx-sse's parser."""
    response = httpx.Response(200, headers=[SSE], content=body)
    return [event.data for event in EventSource(response).iter_sse()]
