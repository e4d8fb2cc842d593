"""Real tokens: a llama.cpp server behind the proxy says what it says without it, and stops when its client leaves.

llama-server serves every model name with the one model that it has, so the names here only choose the class.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from real_model_support import CannotBuildError, build, eventually, llama_server, proxy_before

if TYPE_CHECKING:
    from collections.abc import Iterator

# The limit holds the build: minutes, once. With the cache warm these tests take seconds.
pytestmark = [pytest.mark.real_model, pytest.mark.timeout(2700)]

# The model goes on with more languages and other scripts.
QUESTION: list[Any] = [{"role": "user", "content": "Translate to French: good morning."}]
# The same tokens each time: the likeliest one at every step, and no prompt cache, whose other batches round otherwise.
SAMPLING = {"temperature": 0, "seed": 7, "max_tokens": 64, "cache_prompt": False}
# Far more than a test waits for: even at 500 tokens a second this takes 12 s.
ENDLESS = {"max_tokens": 6000, "ignore_eos": True}


@pytest.fixture(scope="module")
def direct() -> Iterator[str]:
    """The URL of a llama-server that has its model loaded."""
    try:
        artifacts = build()
    except CannotBuildError as reason:
        pytest.skip(str(reason))
    with llama_server(artifacts) as url:
        yield url


@pytest.fixture(scope="module")
def proxied(direct: str) -> Iterator[str]:
    """The URL of the proxy in front of it."""
    with proxy_before(direct) as url:
        yield url


def test_the_model_itself_says_the_same_twice(direct: str) -> None:
    """Without this the comparisons below would show nothing."""
    first, second = _deltas(direct), _deltas(direct)
    assert first == second
    assert len(first) > 50


def test_streamed_chat_has_the_same_events_through_the_proxy(direct: str, proxied: str) -> None:
    """Token by token over plain HTTP; the lease is gone when the stream is."""
    assert _deltas(proxied) == _deltas(direct)
    assert eventually(lambda: _queue(proxied) == ([], []), 2.0), _queue(proxied)


def test_streamed_chat_has_the_same_text_through_the_openai_sdk(direct: str, proxied: str) -> None:
    """The client most people use, with nothing changed but its base URL."""
    text = _sdk_text(proxied)
    assert text == _sdk_text(direct)
    assert len(text) > 100
    assert eventually(lambda: _queue(proxied) == ([], []), 2.0), _queue(proxied)


def test_a_client_that_leaves_stops_the_model_and_lets_the_next_class_in(direct: str, proxied: str) -> None:
    """A chat streams; a speech model waits for its turn; the chat's client leaves, and the other is served at once."""
    with ThreadPoolExecutor(1) as pool:
        with _endless_chat(proxied):
            assert _generating(direct)
            assert _queue(proxied) == ([("llm", "chat-a")], [])
            speech = pool.submit(_plain, proxied, "tts-a")
            assert eventually(lambda: _queue(proxied)[1] == [("tts", "tts-a")], 5.0), _queue(proxied)
            assert not speech.done()
        answer = speech.result(timeout=10.0)
    assert answer.status_code == 200
    assert answer.headers["x-lease-class"] == "tts"
    assert float(answer.headers["x-lease-wait"]) > 0
    assert answer.json()["choices"][0]["message"]["content"]
    assert eventually(lambda: not _generating(direct), 2.0)
    assert eventually(lambda: _queue(proxied) == ([], []), 2.0), _queue(proxied)


def test_a_client_that_leaves_stops_the_model_when_nobody_waits(direct: str, proxied: str) -> None:
    """No later request pushes it out: the closed connection alone ends the work and the lease."""
    with _endless_chat(proxied):
        assert _generating(direct)
    assert eventually(lambda: not _generating(direct), 3.0)
    assert eventually(lambda: _queue(proxied) == ([], []), 2.0), _queue(proxied)


@contextmanager
def _stream(url: str, wish: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a chat stream, in the order in which they come; leaving the block closes the connection."""
    body = {"model": "chat-a", "messages": QUESTION, "stream": True} | SAMPLING | wish
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60.0, trust_env=False) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield _events(response)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    data = [""]
    for line in response.iter_lines():
        if line.startswith("data: "):
            data.append(line.removeprefix("data: "))
            if data[-1] != "[DONE]":
                yield json.loads(data[-1])
    assert data[-1] == "[DONE]"


def _deltas(url: str) -> list[Any]:
    """What differs from event to event, without ids and times."""
    with _stream(url, {}) as events:
        return [(choice["delta"], choice["finish_reason"]) for event in events for choice in event["choices"]]


@contextmanager
def _endless_chat(url: str) -> Iterator[None]:
    """A chat of which a few tokens have come and far more would; leaving the block hangs up."""
    with _stream(url, ENDLESS) as events:
        for _ in range(5):
            next(events)
        yield


def _sdk_text(url: str) -> str:
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60.0) as client,
        client.chat.completions.create(model="chat-a", messages=QUESTION, stream=True, extra_body=SAMPLING) as stream,
    ):
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def _plain(url: str, model: str) -> httpx.Response:
    body = {"model": model, "messages": QUESTION} | SAMPLING | {"max_tokens": 4}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0, trust_env=False)


def _generating(direct: str) -> bool:
    """Whether llama-server is at work, in its own words."""
    slots = httpx.get(f"{direct}/slots", trust_env=False).json()
    return any(slot["is_processing"] for slot in slots)


def _queue(proxied: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Class and model of those that hold a lease, and of those that wait for one."""
    page = httpx.get(f"{proxied}/-/queue", trust_env=False).json()
    holders, waiters = ([(one["class"], one["model"]) for one in page[key]] for key in ("holders", "waiters"))
    return holders, waiters
