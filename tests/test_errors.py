"""Every error has the shape that the clients of its API read, and stands in the drawing at the head of its module."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from proxy import errors
from proxy.errors import RETRY_AFTER_MAX, Busy, Cancelled, LlamaSwapRefusal, ProxyError, Refusal, SettingsError


def below(root: type[Refusal]) -> Iterator[type[Refusal]]:
    """`root` and all that derive from it."""
    yield root
    for child in root.__subclasses__():
        yield from below(child)


ABSTRACT = {Refusal, Busy, LlamaSwapRefusal}
REFUSALS = [kind for kind in below(Refusal) if kind not in {Busy, LlamaSwapRefusal}]

ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    410: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    431: "request_too_large",
    500: "api_error",
    501: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.__name__)
def test_the_shape_of_every_refusal(kind: type[Refusal]) -> None:
    error = kind()
    assert 400 <= error.status < 600
    assert json.loads(error.body()) == {
        "error": {"message": error.message, "type": error.type, "param": None, "code": error.code}
    }
    assert json.loads(error.body(anthropic=True)) == {
        "type": "error",
        "error": {"type": ANTHROPIC[error.status], "message": error.message, "code": error.code},
    }
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", error.code)
    assert error.type in {"server_error", "invalid_request_error", "authentication_error", "permission_error"}
    assert (error.type == "server_error") is (error.status >= 500 and error.status != 501)
    assert str(error) == error.message != ""
    if not isinstance(error, LlamaSwapRefusal):
        assert error.message.endswith(".")
        content_type, body = error.render(anthropic=True, accept=b"text/plain")
        assert (content_type, body) == (b"application/json", error.body(anthropic=True))
    fields = dict(error.headers())
    assert (b"retry-after" in fields) is isinstance(error, Busy)
    final = error.status in {400, 401, 403, 404, 413, 431, 501} and not isinstance(error, LlamaSwapRefusal)
    final |= isinstance(error, Cancelled)
    assert fields.get(b"x-should-retry") == (b"false" if final else None)
    assert (b"www-authenticate" in fields) is (error.status == 401)


@pytest.mark.parametrize("kind", list(below(LlamaSwapRefusal))[1:], ids=lambda kind: kind.__name__)
def test_what_llama_swap_would_say_is_said_in_its_words(kind: type[Refusal]) -> None:
    error = kind("a <b> c")
    for accept, content_type, start in (
        (b"*/*", b"application/json", b'{"src":"llama-swap","error":{"message":"a <b> c","type":'),
        (b"application/json", b"application/json", b'{"src":"llama-swap",'),
        (b"text/html,*/*", b"text/html", b"<html><body><h1>llama-swap</h1><p>a &lt;b&gt; c</p>"),
        (b"application/json, text/plain, */*", b"text/plain", b"llama-swap: a <b> c"),
    ):
        given, body = error.render(anthropic=False, accept=accept)
        assert given == content_type
        assert body.startswith(start)


@pytest.mark.parametrize(
    ("seconds", "field"),
    [(0, b"1"), (0.2, b"1"), (1.6, b"2"), (15, b"15"), (60, b"60"), (61, b"60"), (1e9, b"60"), (-5, b"1")],
)
def test_retry_after_is_an_integer_that_every_sdk_honours(seconds: float, field: bytes) -> None:
    for kind in below(Busy):
        assert dict(kind(retry_after=seconds).headers())[b"retry-after"] == field
    assert RETRY_AFTER_MAX == 60


def test_a_message_of_its_own_takes_the_place_of_the_general_one() -> None:
    for kind in REFUSALS:
        assert json.loads(kind("äöü").body())["error"]["message"] == "äöü"


def test_the_drawing_has_every_error_with_its_status_and_code() -> None:
    drawing = errors.__doc__ or ""
    entries = re.findall(r"[├└]── (\w+) *(\d{3})? *,?(.*)", drawing)
    drawn = {name: (status, rest.strip()) for name, status, rest in entries}
    kinds = {kind.__name__: kind for kind in below(Refusal)}
    others = {kind.__name__ for kind in ProxyError.__subclasses__()}
    assert drawn.keys() == kinds.keys() | others
    for name, kind in kinds.items():
        status, code = drawn[name]
        if kind not in ABSTRACT:
            assert code == kind.code
            assert status in {str(kind.status), "" if issubclass(kind, Busy) else None}
    codes = [kind.code for kind in REFUSALS]
    assert len(codes) == len(set(codes)), "a code names one error"


def test_mistakes_in_the_settings_are_told_one_in_a_line() -> None:
    error = SettingsError(["one.", "two."])
    assert error.problems == ["one.", "two."]
    assert str(error) == "one.\ntwo."
