"""Inputs for the wire that are nearly right: good messages, and what edits make of them.

An edit puts a token that means something to a parser at a place, takes bytes away, doubles them or cuts the rest off.
Bodies are edited before they are framed, so that what reads bodies is reached too. All are Hypothesis strategies: a
failure is shrunk to the few edits that make it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True, slots=True)
class Input:
    """What a client sends. `body` is what it is meant to hold, where it is framed as it should be."""

    wire: bytes
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Edit:
    """At `place`, in thousandths of the length: insert a token, or that many bytes are taken away, doubled or cut."""

    kind: str
    place: int
    token: bytes
    count: int

    def of(self, text: bytes) -> bytes:
        """`text` with this edit."""
        at = len(text) * self.place // 1000
        before, after = text[:at], text[at:]
        match self.kind:
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


def edits(*tokens: bytes, most: int = 3) -> st.SearchStrategy[list[Edit]]:
    """A few edits with these tokens, or with a byte of any kind."""
    return st.lists(
        st.builds(
            Edit,
            st.sampled_from(("insert", "insert", "replace", "delete", "double", "cut")),
            st.integers(0, 1000),
            st.sampled_from(tokens) | st.binary(min_size=1, max_size=1),
            st.integers(1, 40),
        ),
        max_size=most,
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
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding:\x0bchunked\r\n"),
    *(b"0\r\n\r\n", b"0\r\n", b"\r\n", b"\n", b"\r", b";", b"f", b"-", b"00", b"0x", b" ", b"\t", b",", b"\0", b"\xff"),
    *(b"ffffffffffffffff\r\n", b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"Expect: 100-continue\r\n", b"HTTP/1.0"),
    b"POST /v1/audio/speech HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 18\r\n\r\n"
    + SPEECH,
)


def heads() -> st.SearchStrategy[Input]:
    """One or two requests, edited anywhere."""
    messages = st.lists(st.sampled_from(HEADS), min_size=1, max_size=2).map(b"".join)
    return st.builds(lambda text, changes: Input(edited(text, changes)), messages, edits(*HEAD_TOKENS))


def framings() -> st.SearchStrategy[Input]:
    """One or two requests with bodies, edited anywhere."""
    messages = st.lists(st.sampled_from(FRAMED), min_size=1, max_size=2).map(b"".join)
    return st.builds(lambda text, changes: Input(edited(text, changes)), messages, edits(*FRAMING_TOKENS))


# -- bodies

PATHS = (b"/v1/chat/completions", b"/v1/embeddings", b"/v1/audio/speech", b"/v1/images/edits", b"/v1/audio/voices")
NAMES = ("tts-a", "chat-a", "embed-a", "whisper-a", "sdxl", "org/tts", "\u00fc", "tts\ud800", "", " tts-a")
KEYS = ("model", "Model", "mod\u0065l", "x", "model ", "messages", "")


def framed(path: bytes, kind: bytes, body: bytes, step: int) -> Input:
    """A POST of `body`: with its length, or in chunks of `step` bytes."""
    head = b"POST " + path + b" HTTP/1.1\r\nHost: a\r\nContent-Type: " + kind + b"\r\n"
    if not step:
        return Input(head + b"Content-Length: %d\r\n\r\n" % len(body) + body, body)
    pieces = [body[at : at + step] for at in range(0, len(body), step)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return Input(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n", body)


class _Members(list[tuple[str, Any]]):
    """An object whose keys may repeat."""


STEPS = st.sampled_from((0, 0, 1, 7, 1000))
SCALARS: st.SearchStrategy[Any] = st.sampled_from((None, True, 1, -2.5e300, "", "\\", '"model":"tts-a"', *NAMES))
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(st.tuples(st.sampled_from(KEYS), inner), max_size=2).map(_Members)
    ),
    max_leaves=4,
)
MEMBERS = st.tuples(st.sampled_from(KEYS), VALUES)


def _text(value: Any, *, ascii_only: bool) -> str:
    if isinstance(value, _Members):
        pairs = (f"{json.dumps(key)}: {_text(inner, ascii_only=ascii_only)}" for key, inner in value)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_text(inner, ascii_only=ascii_only) for inner in value) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


JSON_TOKENS = (
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b"(", b")", b":", b",", b"NaN", b"null", b"1e", b"\\u00", b"\\ud800", b"\0"),
    *(
        b'"model":"tts-a"',
        b'"model":"embed-a",',
        b'"\\u006dodel":"chat-a",',
        b'"model":',
        b"\xef\xbb\xbf",
        b"\xff",
        b"//",
    ),
    *(b"[" * 2000, b'{"a":' * 2000, b'\\"' * 2000, b"9" * 3000, b" " * 3000),
)
JSON_TYPES = (b"application/json", b"application/json; charset=utf-8", b"text/plain", b"application/vnd.x+json")


def json_bodies() -> st.SearchStrategy[Input]:
    """JSON with a model, mostly first, and edited."""

    def make(path: bytes, kind: bytes, members: list[Any], ascii_only: bool, changes: list[Edit], step: int) -> Input:
        text = _text(_Members(members), ascii_only=ascii_only)
        return framed(path, kind, edited(text.encode("utf-8", "surrogatepass"), changes), step)

    named = st.tuples(st.just("model"), st.sampled_from(NAMES))
    members = st.tuples(st.lists(MEMBERS, max_size=2), named, st.lists(MEMBERS, max_size=2))
    return st.builds(
        make,
        st.sampled_from(PATHS),
        st.sampled_from((*JSON_TYPES[:1] * 4, *JSON_TYPES)),
        members.map(lambda parts: [*parts[0], parts[1], *parts[2]]),
        st.booleans(),
        edits(*JSON_TOKENS),
        STEPS,
    )


PARTS = (
    b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper-a',
    b"Content-Disposition: form-data; name=model\r\n\r\ntts-a",
    b'content-disposition: Form-Data; NAME="model"; x=y\r\nContent-Type: text/plain\r\n\r\nembed-a',
    b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\nRIFF\0\r\n--x',
    b'Content-Disposition: form-data; name="language"\r\n\r\nen',
)
PART_TOKENS = (
    *(
        b"--b",
        b"--b--",
        b"\r\n--b\r\n",
        b"--b--\r\n",
        b"\r\n",
        b"\n",
        b"\r",
        b'"',
        b"\\",
        b";",
        b"=",
        b" ",
        b"\t",
        b"\0",
    ),
    *(b'; filename="a"', b"; filename*=UTF-8''a", b"; name*=UTF-8''model", b"; name*0=mo; name*1=del", b'name="model"'),
    *(b"Content-Transfer-Encoding: base64\r\n", b"Content-Transfer-Encoding: quoted-printable\r\n", b"=6d", b"mod\\el"),
    *(b"\r\n" + PARTS[1] + b"\r\n--b\r\n", b"a" * 2000, b"\xff", b"X: " + b"y" * 3000 + b"\r\n", b"\r\n\r\n"),
)
PART_TYPES = (
    b"multipart/form-data; boundary=b",
    b'multipart/form-data; boundary="b"',
    b"multipart/form-data; boundary=b; charset=x",
    b"Multipart/Form-Data; boundary=b",
    b"multipart/form-data; boundary=B",
    b"multipart/form-data",
    b"application/x-www-form-urlencoded",
)


def multiparts() -> st.SearchStrategy[Input]:
    """A form with a model somewhere, edited."""

    def make(path: bytes, kind: bytes, parts: list[bytes], changes: list[Edit], step: int) -> Input:
        body = b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + b"--b--\r\n"
        return framed(path, kind, edited(body, changes), step)

    paths = st.sampled_from((*PATHS, b"/v1/audio/transcriptions", b"/v1/audio/transcriptions?model=tts-a"))
    kinds = st.sampled_from((*PART_TYPES[:1] * 6, *PART_TYPES))
    parts = st.lists(st.sampled_from(PARTS), min_size=1, max_size=3)
    return st.builds(make, paths, kinds, parts, edits(*PART_TOKENS), STEPS)
