"""What the upstream says to real clients: the same text on each of the four streamed APIs, and every way to fail.

The text has in it what a careless parser would trip over: what looks like a comment or an event, line breaks,
characters of more than one byte.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from harness import Script, Seen, answer, chunk, head, raw

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}

PIECES = ("Once ", "upon a time:\n", "\n: queued\n\n", "data: [DONE]", "\n\nevent: error\n", "grün 蛙 🐸 ", "The end.")

TEXT = "".join(PIECES)

BROKEN = "The model ran out of memory on this GPU."
"""What the upstream says with its 500."""


def request(api: str, model: str, *, stream: bool) -> dict[str, Any]:
    """The body of a request that asks for `TEXT`."""
    said = [{"role": "user", "content": "Tell me."}]
    asked: dict[str, dict[str, Any]] = {
        "chat": {"messages": said},
        "completions": {"prompt": "Tell me."},
        "responses": {"input": "Tell me."},
        "messages": {"messages": said, "max_tokens": 100},
    }
    return {"model": model, "stream": stream, **asked[api]}


def text_of(api: str, event: dict[str, Any]) -> str:
    """The text that one event adds, as a program that speaks no SDK would read it."""
    if api == "responses":
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    if api == "messages":
        return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""
    return "".join(_choice_text(choice) for choice in event["choices"])


def _choice_text(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def answer_text(api: str, body: dict[str, Any]) -> str:
    """The text of an answer that is not streamed."""
    if api == "responses":
        return str(body["output"][0]["content"][0]["text"])
    if api == "messages":
        return str(body["content"][0]["text"])
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


# -- scripts


def telling(after: float) -> Script:
    """The text; its first byte comes `after` seconds, in which a model would load."""

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(after)
        api = _api(seen)
        writer.write(head("200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked"))
        for event in _events(api):
            writer.write(chunk(event))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    return script


async def telling_plainly(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The text as one JSON answer."""
    await answer(plain_answer(_api(seen)))(seen, reader, writer)


async def broken(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """500 with the API's error object."""
    error = {"type": "api_error", "message": BROKEN}
    outer = {"type": "error", "error": error} if _api(seen) == "messages" else {"error": error}
    await answer(json.dumps(outer).encode(), "500 Internal Server Error")(seen, reader, writer)


dead = raw(b"")
"""Not even a head."""


async def cut(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The text up to its middle."""
    writer.write(head("200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked"))
    for event in list(_events(_api(seen)))[:4]:
        writer.write(chunk(event))
    await writer.drain()
    raise ConnectionResetError


def _api(seen: Seen) -> str:
    return next(api for api, path in PATHS.items() if path.encode() == seen.target)


def _events(api: str) -> Iterator[bytes]:
    if api in {"chat", "completions"}:
        yield from (f"data: {_json(data)}\n\n".encode() for data in _choices(api))
        yield b"data: [DONE]\n\n"
        return
    named = _response_events() if api == "responses" else _message_events()
    for data in named:
        yield f"event: {data['type']}\ndata: {_json(data)}\n\n".encode()


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False)


def _choices(api: str) -> Iterator[dict[str, Any]]:
    kind = "chat.completion.chunk" if api == "chat" else "text_completion"
    common = {"id": "c-1", "object": kind, "created": 1, "model": "m"}
    for piece in PIECES:
        said: dict[str, Any] = {"delta": {"content": piece}} if api == "chat" else {"text": piece}
        yield common | {"choices": [{"index": 0, "finish_reason": None, **said}]}
    said = {"delta": {}} if api == "chat" else {"text": ""}
    yield common | {"choices": [{"index": 0, "finish_reason": "stop", **said}]}


def _response_events() -> Iterator[dict[str, Any]]:
    response = {"id": "r-1", "object": "response", "created_at": 1, "model": "m", "output": []}
    yield {"type": "response.created", "sequence_number": 0, "response": response | {"status": "in_progress"}}
    where = {"item_id": "i-1", "output_index": 0, "content_index": 0}
    for number, piece in enumerate(PIECES, 1):
        yield {"type": "response.output_text.delta", "sequence_number": number, "delta": piece, **where}
    done = json.loads(plain_answer("responses"))
    yield {"type": "response.completed", "sequence_number": len(PIECES) + 1, "response": done}


def _message_events() -> Iterator[dict[str, Any]]:
    message: dict[str, Any] = {
        "id": "m-1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
    }
    usage = {"input_tokens": 1, "output_tokens": 1}
    yield {"type": "message_start", "message": message | {"stop_sequence": None, "usage": usage}}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield {"type": "ping"}
    for piece in PIECES:
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
    yield {"type": "content_block_stop", "index": 0}
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 9}}
    yield {"type": "message_stop"}


def plain_answer(api: str) -> bytes:
    """The text as the upstream sends it where no stream is asked for."""
    choice = {"index": 0, "finish_reason": "stop"}
    said = {"id": "a-1", "created": 1, "model": "m"}
    content = [{"type": "output_text", "text": TEXT, "annotations": []}]
    output = [{"type": "message", "id": "i-1", "role": "assistant", "status": "completed", "content": content}]
    answers: dict[str, dict[str, Any]] = {
        "chat": said
        | {"object": "chat.completion", "choices": [choice | {"message": {"role": "assistant", "content": TEXT}}]},
        "completions": said | {"object": "text_completion", "choices": [choice | {"text": TEXT}]},
        "responses": {"id": "r-1", "object": "response", "created_at": 1, "model": "m", "status": "completed"}
        | {"output": output, "parallel_tool_calls": False, "tool_choice": "auto", "tools": []},
        "messages": {"id": "m-1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn"}
        | {"stop_sequence": None, "content": [{"type": "text", "text": TEXT}]}
        | {"usage": {"input_tokens": 1, "output_tokens": 9}},
    }
    return json.dumps(answers[api]).encode()
