"""Bodies that nearly name a model: JSON with keys repeated and nested, forms with parts that are read in two ways."""

from __future__ import annotations

import json
from typing import Any

from fuzz_support import Edit, Input, edited, edits
from hypothesis import strategies as st

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
ODD_PARTS = (
    b'Content-Disposition: form-data; name="model"; filename="a"\r\n\r\ntts-a',
    b'Content-Disposition: form-data; filename=""; name="model"\r\n\r\ntts-a',
    b"Content-Disposition: form-data; name=\"model\"; filename*=UTF-8''a\r\n\r\ntts-a",
    b"Content-Disposition: form-data; name=\"x\"; name*=UTF-8''model\r\n\r\ntts-a",
    b"Content-Disposition: form-data; name*0=mo; name*1=del\r\n\r\ntts-a",
    b'Content-Disposition: form-data; name="mod\\el"\r\n\r\ntts-a',
    b'Content-Disposition: attachment; name="model"\r\n\r\ntts-a',
    b'Content-Disposition: form-data; name="model"; name="x"\r\n\r\ntts-a',
    b'Content-Disposition: form-data; name="model"\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\ntts=2da',
    b'Content-Disposition: form-data; name="model"\r\nContent-Transfer-Encoding: base64\r\n\r\ndHRzLWE=',
    b'Content-Disposition: form-data;\r\n name="model"\r\n\r\ntts-a',
    b'X: y\nContent-Disposition: form-data; name="model"\r\n\r\ntts-a',
    b'Content-Disposition: form-data; name="model"\n\ntts-a',
    b'Content-Disposition: form-data; name="x"\r\nContent-Disposition: form-data; name="model"\r\n\r\ntts-a',
    b'Content-Disposition: form-data; name="model"\r\n\r\ntts-a\r\n--bb',
    b'Content-Disposition: form-data; name="model"\r\n\r\ntts-a\r\n--b \t',
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
    *(
        b' filename="a";',
        b" filename*=UTF-8''a;",
        b" name*=UTF-8''model;",
        b" name*0=mo; name*1=del;",
        b' name="model";',
    ),
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
    others = st.lists(st.sampled_from(PARTS[3:]), max_size=1)
    one_model = st.tuples(others, st.sampled_from(PARTS[:3]), others).map(
        lambda three: [*three[0], three[1], *three[2]]
    )
    odd = st.tuples(st.sampled_from(ODD_PARTS), st.sampled_from(PARTS)).flatmap(st.permutations)
    parts = one_model | one_model | odd | st.lists(st.sampled_from(PARTS), min_size=1, max_size=3)
    return st.builds(make, paths, kinds, parts, edits(*PART_TOKENS), STEPS)
