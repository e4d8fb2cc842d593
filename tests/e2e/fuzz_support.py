"""Inputs for the wire that are nearly right: good messages, and what edits make of them.

An edit puts a token that means something to a parser at a place, takes bytes away, doubles them or cuts the rest off.
Bodies (`fuzz_bodies_support`) are edited before they are framed, so that what reads bodies is reached too. All are
Hypothesis strategies.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st


@dataclass(frozen=True, slots=True)
class Input:
    """What a client sends. `body` is what it is meant to hold, where it is framed as it should be."""

    wire: bytes
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Edit:
    """At `place`, in thousandths of the length, insert a token, or take away, double or cut that many bytes.

    The border of a line, a member or a parameter is where a token means most: "border" takes the next one.
    """

    kind: str
    place: int
    token: bytes
    count: int

    def of(self, text: bytes) -> bytes:
        """`text` with this edit."""
        at = len(text) * self.place // 1000
        before, after = text[:at], text[at:]
        match self.kind:
            case "border":
                after_border = next((each + 1 for each in range(at, len(text)) if text[each] in b"\n,{;"), at)
                return text[:after_border] + self.token + text[after_border:]
            case "insert":
                return before + self.token + after
            case "replace":
                return before + self.token + after[len(self.token) :]
            case "delete":
                return before + after[self.count :]
            case "double":
                return before + after[: self.count] * 2 + after[self.count :]
            case _:
                return before


def generated(strategy: st.SearchStrategy[Input], count: int) -> list[Input]:
    """`count` different inputs, always the same ones. (They are collected first, to be sent several at a time.)"""
    found = dict[bytes, Input]()

    def collect(one: Input) -> None:
        found.setdefault(one.wire, one)

    effort = settings(
        max_examples=min(500, 2 * count),
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    for number in range(100):
        if len(found) < count:
            seed(number)(effort(given(strategy)(collect)))()
    inputs = list(found.values())
    Random(count).shuffle(inputs)
    assert len(inputs) >= count
    return inputs[:count]


def edits(*tokens: bytes, least: int = 0) -> st.SearchStrategy[list[Edit]]:
    """A few edits with these tokens, or with a byte of any kind."""
    return st.lists(
        st.builds(
            Edit,
            st.sampled_from(("border", "border", "border", "insert", "replace", "delete", "double", "cut")),
            st.integers(0, 1000),
            st.sampled_from(tokens) | st.sampled_from(tokens) | st.binary(min_size=1, max_size=1),
            st.integers(1, 40),
        ),
        min_size=least,
        max_size=2,
    )


def edited(text: bytes, changes: list[Edit]) -> bytes:
    """`text` after all changes."""
    for change in changes:
        text = change.of(text)
    return text


# -- heads and framing

SPEECH = b'{"model": "tts-a"}'
CHAT_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
HEADS = (
    b"GET /v1/models?a=b HTTP/1.1\r\nHost: llm.home:8080\r\nAccept: */*\r\nX-Odd: a  b\xff\r\n\r\n",
    b"GET /upstream/tts-a/props%2Fx?y=%20 HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, X-Foo\r\nX-Foo: 1\r\n\r\n",
    b"GET /v1/audio/voices?model=tts-a HTTP/1.0\r\nX-Forwarded-For: 1.2.3.4\r\n\r\n",
    b"HEAD http://llm.home/upstream/chat-a/x HTTP/1.1\r\nHost: b\r\nCookie: a=b; c=d\r\nCookie: e=f\r\n\r\n",
    b"OPTIONS /v1/audio/speech HTTP/1.1\r\nHost: a\r\nOrigin: http://b\r\n\r\n",
    CHAT_HEAD + b"Content-Length: 18\r\nExpect: 100-continue\r\nAuthorization: Bearer k\r\n\r\n" + SPEECH,
    CHAT_HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 18\r\n\r\n" + SPEECH,
)
HEAD_TOKENS = (
    *(b"\r\n", b"\n", b"\r", b"\0", b":", b": ", b" ", b"\t", b"\r\n ", b"%", b"%2e%2e/", b"//", b"?", b"#", b"\xff"),
    *(b"HTTP/1.0", b"HTTP/2.0", b"Host: a\r\n", b"Content-Type: text/plain\r\n", b"Connection: content-length\r\n"),
    *(b"/upstream/", b"tts-a", b"chat-a", b"/v1/audio/speech", b"http://", b"@", b"\r\n\r\n", b"a" * 3000),
)

FRAMED = (
    CHAT_HEAD + b"Content-Length: 18\r\n\r\n" + SPEECH,
    CHAT_HEAD + b"Transfer-Encoding: chunked\r\n\r\n12;a=b\r\n" + SPEECH + b"\r\n0\r\nX-T: 1\r\n\r\n",
    CHAT_HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"mod\r\nD\r\nel": "tts-a"}\r\n0\r\n\r\n',
    b"POST /unload HTTP/1.1\r\nHost: a\r\nContent-Length: 18\r\n\r\n" + SPEECH,
    b"POST /unload HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n12\r\n" + SPEECH + b"\r\n0\r\n\r\n",
    b"PUT /upstream/chat-a/x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
)
FRAMING_TOKENS = (
    *(b"Content-Length: 18\r\n", b"Content-Length: 0\r\n", b"Content-Length: +5\r\n", b"Content-Length: 99\r\n"),
    *(b"Connection: content-length\r\n", b"Connection: transfer-encoding, host\r\n", b"Content-Type: text/plain\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding:\x0bchunked\r\n"),
    *(b"0\r\n\r\n", b"0\r\n", b"\r\n", b"\n", b"\r", b";", b"f", b"-", b"00", b"0x", b" ", b"\t", b",", b"\0", b"\xff"),
    *(b"ffffffffffffffff\r\n", b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"Expect: 100-continue\r\n", b"HTTP/1.0"),
    b"POST /v1/audio/speech HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 18\r\n\r\n"
    + SPEECH,
)


def heads() -> st.SearchStrategy[Input]:
    """One or two requests, edited anywhere."""
    messages = st.lists(st.sampled_from(HEADS), min_size=1, max_size=2).map(b"".join)
    return st.builds(lambda text, changes: Input(edited(text, changes)), messages, edits(*HEAD_TOKENS, least=1))


def framings() -> st.SearchStrategy[Input]:
    """One or two requests with bodies, edited anywhere."""
    messages = st.lists(st.sampled_from(FRAMED), min_size=1, max_size=2).map(b"".join)
    return st.builds(lambda text, changes: Input(edited(text, changes)), messages, edits(*FRAMING_TOKENS, least=1))
