"""What the model servers behind llama-swap say: minimal, but in the shape each API's clients expect.

A streamed answer comes in pieces, one a chunk and, if its format has an end, one more. Any other comes whole,
once the work is over and, if it is generated, the time of its chunks.
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# 24 kHz, 16 bit, mono is what most speech servers send; 0.1 s of it a chunk.
RATE = 24_000
CHUNK_SAMPLES = 2_400
DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class Answer:
    content_type: str
    pieces: Sequence[bytes]
    streamed: bool = False  # a piece per chunk, else all pieces together at the end
    generated: bool = False  # takes its chunks' time on top of the work, streamed or not


@dataclass(frozen=True, slots=True)
class Question:
    model: str  # llama-swap's id
    requested: str
    path: str
    body: dict[str, Any]
    stream: bool
    chunks: int


def answer(question: Question) -> Answer | None:
    """The answer of a model server to a POST, or None where it has no such route."""
    make = ROUTES.get(question.path.removeprefix("/v1"))
    return make(question) if make is not None else None


def _json(value: Any, *, generated: bool = False) -> Answer:
    return Answer("application/json", [json.dumps(value).encode()], generated=generated)


def _events(events: Sequence[tuple[str, Any]], closing: int, opening: int = 0) -> Answer:
    """Events, of which the `opening` ones go with the first chunk and the `closing` ones make one piece."""
    texts = [_event(name, data) for name, data in events]
    chunks = texts[opening:-closing]
    first = b"".join(texts[:opening]) + b"".join(chunks[:1])
    pieces = [first, *chunks[1:], b"".join(texts[-closing:])]
    return Answer("text/event-stream", pieces, streamed=True, generated=True)


def _event(name: str, data: Any) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def _words(question: Question) -> list[str]:
    return [f"{question.model} says", *(f" word{n}" for n in range(1, question.chunks))]


def _usage(question: Question) -> dict[str, int]:
    return {"prompt_tokens": 5, "completion_tokens": question.chunks, "total_tokens": 5 + question.chunks}


def _chat(question: Question) -> Answer:
    base = {"id": "chatcmpl-sim", "created": int(time.time()), "model": question.requested}
    words = _words(question)
    if not question.stream:
        message = {"role": "assistant", "content": "".join(words)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        whole = {**base, "object": "chat.completion", "choices": [choice], "usage": _usage(question)}
        return _json(whole, generated=True)

    def chunk(delta: dict[str, str], finish: str | None = None) -> tuple[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return "", {**base, "object": "chat.completion.chunk", "choices": [choice]}

    parts = [
        chunk({"role": "assistant", "content": word} if n == 0 else {"content": word}) for n, word in enumerate(words)
    ]
    return _events([*parts, chunk({}, "stop"), ("", "[DONE]")], closing=2)


def _completion(question: Question) -> Answer:
    base = {"id": "cmpl-sim", "object": "text_completion", "created": int(time.time()), "model": question.requested}

    def choice(text: str, finish: str | None) -> dict[str, Any]:
        return {**base, "choices": [{"index": 0, "text": text, "finish_reason": finish}]}

    words = _words(question)
    if not question.stream:
        return _json({**choice("".join(words), "stop"), "usage": _usage(question)}, generated=True)
    parts = [("", choice(word, None)) for word in words]
    return _events([*parts, ("", choice("", "stop")), ("", "[DONE]")], closing=2)


def _llama_completion(question: Question) -> Answer:
    words = _words(question)
    if not question.stream:
        return _json({"content": "".join(words), "stop": True, "model": question.model}, generated=True)
    parts = [("", {"content": word, "stop": False}) for word in words]
    return _events([*parts, ("", {"content": "", "stop": True})], closing=1)


def _responses(question: Question) -> Answer:
    words = _words(question)
    item = {
        "id": "msg-sim", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "".join(words), "annotations": []}],
    }  # fmt: skip
    whole = {
        "id": "resp-sim", "object": "response", "created_at": int(time.time()), "status": "completed",
        "model": question.requested, "output": [item], "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 5, "output_tokens": question.chunks, "total_tokens": 5 + question.chunks,
            "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip
    if not question.stream:
        return _json(whole, generated=True)
    place = {"item_id": "msg-sim", "output_index": 0, "content_index": 0}
    events: list[dict[str, Any]] = [
        {"type": "response.output_text.delta", **place, "delta": word, "logprobs": []} for word in words
    ]
    events.append({"type": "response.output_text.done", **place, "text": "".join(words), "logprobs": []})
    events.append({"type": "response.completed", "response": whole})
    events.insert(0, {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}})
    numbered = [(event["type"], {**event, "sequence_number": n}) for n, event in enumerate(events)]
    return _events(numbered, opening=1, closing=2)


def _messages(question: Question) -> Answer:
    words = _words(question)
    message: dict[str, Any] = {
        "id": "msg-sim", "type": "message", "role": "assistant", "model": question.requested,
        "content": [{"type": "text", "text": "".join(words)}], "stop_reason": "end_turn",
        "stop_sequence": None, "usage": {"input_tokens": 5, "output_tokens": question.chunks},
    }  # fmt: skip
    if not question.stream:
        return _json(message, generated=True)
    opening = {**message, "content": [], "stop_reason": None, "usage": {"input_tokens": 5, "output_tokens": 0}}
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": opening},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ]
    events += [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in words
    ]
    events += [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": question.chunks}},
        {"type": "message_stop"},
    ]
    return _events([(event["type"], event) for event in events], opening=2, closing=3)


def _embeddings(question: Question) -> Answer:
    given = question.body.get("input", "")
    texts = given if isinstance(given, list) else [given]
    data = [
        {"object": "embedding", "index": n, "embedding": [round((n + 1) / (k + 2), 6) for k in range(DIMENSIONS)]}
        for n in range(len(texts) or 1)
    ]
    usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
    return _json({"object": "list", "data": data, "model": question.requested, "usage": usage})


def _rerank(question: Question) -> Answer:
    documents = question.body.get("documents")
    count = len(documents) if isinstance(documents, list) else 0
    results = [{"index": n, "relevance_score": round(1 / (n + 1), 6)} for n in range(count)]
    return _json({"model": question.requested, "results": results})


def _speech(question: Question) -> Answer:
    return Answer("audio/wav", speech(question.chunks), streamed=True, generated=True)


def speech(chunks: int) -> list[bytes]:
    """A WAV file of a quiet 240 Hz square tone, in as many pieces; its head rides on the first one."""
    half = RATE // 240 // 2
    period = struct.pack("<h", 1_000) * half + struct.pack("<h", -1_000) * half
    tone = period * (CHUNK_SAMPLES // (2 * half))
    size = len(tone) * chunks
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF", 36 + size, b"WAVE", b"fmt ", 16, 1, 1, RATE, RATE * 2, 2, 16, b"data", size,
    )  # fmt: skip
    return [head + tone, *[tone] * (chunks - 1)] if chunks else [head]


def _transcription(question: Question) -> Answer:
    text = f"{question.model} heard you"
    if question.body.get("response_format") == "text":
        return Answer("text/plain", [text.encode() + b"\n"])
    return _json({"text": text})


def _images(_question: Question) -> Answer:
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    return _json({"created": int(time.time()), "data": [{"b64_json": pixel}]})


def _stable_diffusion(_question: Question) -> Answer:
    return _json({"images": [], "parameters": {}, "info": ""})


def _voices(_question: Question) -> Answer:
    return _json({"voices": ["alloy", "echo"]})


# By the path as the model server sees it, without a leading /v1.
ROUTES: dict[str, Callable[[Question], Answer]] = {
    "/chat/completions": _chat,
    "/completions": _completion,
    "/completion": _llama_completion,
    "/infill": _llama_completion,
    "/responses": _responses,
    "/messages": _messages,
    "/messages/count_tokens": lambda _: _json({"input_tokens": 5}),
    "/embeddings": _embeddings,
    "/rerank": _rerank,
    "/reranking": _rerank,
    "/audio/speech": _speech,
    "/audio/voices": _voices,
    "/audio/transcriptions": _transcription,
    "/images/generations": _images,
    "/images/edits": _images,
    "/sdapi/v1/txt2img": _stable_diffusion,
    "/sdapi/v1/img2img": _stable_diffusion,
    "/sdapi/v1/loras": lambda _: _json([]),
    "/props": lambda question: _json({"model_path": question.model}),
    "/tasks/run": lambda question: _json({"model": question.model}),
}
