"""Random requests as bytes on a wire: right ones, and ones that are right but for a single flaw."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from wire_parts_support import Fields, chunks, name, path, payload, query, trailer_section, value

MODELS = {b"chat-a": b"llm", b"vision-a": b"llm", b"tts-a": b"tts", b"embed-a": b"embed", b"whisper-a": b"stt"}
"""Names of models, and the class of each by the built-in patterns."""

METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"PROPFIND", b"M-SEARCH", b"REPORT")
NAMES = (
    *(b"X-Odd", b"x-odd", b"X-Two", b"Accept", b"Accept-Encoding", b"User-Agent", b"Cookie", b"Forwarded", b"Via"),
    *(b"Range", b"If-None-Match", b"Origin", b"Referer", b"Content-Language", b"Content-Encoding", b"Pragma"),
    *(b"X-Forwarded-For", b"x-forwarded-proto", b"X-FORWARDED-HOST", b"Warning", b"x_y", b"0", b"Link"),
)


@dataclass(frozen=True, slots=True)
class Request:
    """A request on the wire. `flaw` says for what it must be refused, None where it must pass."""

    number: int
    head: bytes
    body: bytes = b""
    """As it is on the wire, chunks and trailers included."""
    expects: bool = False
    last: bool = False
    """Whether the connection ends with it."""
    class_name: bytes | None = None
    """The class of the lease that it needs, if it needs one."""
    flaw: str | None = None

    @property
    def is_head(self) -> bool:
        """Whether its answer has no body."""
        return self.head.startswith(b"HEAD ")


def request(random: Random, number: int, *, flaw: str | None = None, may_hold_back: bool = False) -> Request:
    """A request; with `flaw` one that is right but for that."""
    draft = Draft(random, number)
    if flaw is not None:
        FLAWS[flaw](draft)
    fields = [*draft.fields, *draft.framing()]
    random.shuffle(fields)
    expects = may_hold_back and draft.version == b"1.1" and bool(draft.wire_body) and random.random() < 0.15
    if expects:
        fields.append((b"Expect", b"100-continue"))
    fields[0:0] = draft.front
    head = b"\r\n".join([draft.request_line(), *(name + b":" + value for name, value in fields), b"", b""])
    last = draft.last or flaw is not None
    return Request(number, head, draft.wire_body, expects and flaw is None, last, draft.class_name, flaw)


class Draft:
    """A request whose parts can still be spoiled."""

    def __init__(self, random: Random, number: int) -> None:
        self.random = random
        self.front: Fields = []
        """Fields that come before all others."""
        self.class_name: bytes | None = None
        self.content = payload(random)
        self.method, self.target = random.choice(METHODS), b"/free" + path(random) + query(random)
        kind = random.random()
        if kind < 0.2:
            model = random.choice(list(MODELS))
            self.target = b"/upstream/" + model + path(random, odd=False) + b"/x" + query(random)
            self.class_name = None if self.method == b"OPTIONS" else MODELS[model]
        elif kind < 0.4:
            model = random.choice(list(MODELS))
            self.method, self.class_name = b"POST", MODELS[model]
            self.target = b"/v1/chat/completions" + query(random)
            self.content = json.dumps({"model": model.decode(), "x": self.content.decode("latin-1")}).encode()
        self.version = b"1.1" if random.random() < 0.9 else b"1.0"
        self.last = self.version == b"1.0"
        self.fields: Fields = [(b"X-Number", b" %d" % number)]
        if kind >= 0.2 and kind < 0.4:
            self.fields.append((b"Content-Type", b" application/json"))
        self._add_fields()
        self._frame()

    def request_line(self) -> bytes:
        return b"%b %b HTTP/%b" % (self.method, self.target, self.version)

    def _add_fields(self) -> None:
        random = self.random
        self.fields += [(name(random, NAMES), value(random)) for _ in range(random.randint(0, 8))]
        self.host: Fields = [(b"Host", b" llm.home:8080")]
        if self.version == b"1.0" and random.random() < 0.3:
            self.host = []
        elif random.random() < 0.1:
            self.target = b"http://other.home:9" + self.target
        self.fields += [(b"Authorization", b" Bearer k")] * (random.random() < 0.1)
        if random.random() < 0.25:
            self.fields += random.choice(_CONNECTION_FIELDS)
        elif random.random() < 0.1:
            self.fields.append((b"Connection", b" close"))
            self.last = True

    def _frame(self) -> None:
        random = self.random
        self.trailers: Fields = []
        bodyless = not self.class_name and random.random() < 0.4
        self.frame = (
            "none" if bodyless else "length" if self.version == b"1.0" else random.choice(("length", "chunked"))
        )
        if self.frame == "chunked":
            self.trailers = [(name(random, NAMES), value(random)) for _ in range(random.choice((0, 0, 1, 3)))]
            self.wire_body = chunks(random, self.content) + trailer_section(self.trailers)
        else:
            self.wire_body = b"" if self.frame == "none" else self.content

    def framing(self) -> Fields:
        """The fields that name host and framing."""
        fields = list(self.host)
        if self.frame == "length":
            fields.append((b"Content-Length", b" %d" % len(self.content)))
        elif self.frame == "chunked":
            coding = self.random.choice((b" chunked", b"chunked ", b" Chunked", b"\tCHUNKED"))
            fields.append((self.random.choice((b"Transfer-Encoding", b"transfer-encoding")), coding))
        return fields


_CONNECTION_FIELDS: list[Fields] = [
    [(b"Connection", b" keep-alive, X-Foo"), (b"X-Foo", b" 1")],
    [(b"Connection", b"keep-alive"), (b"Keep-Alive", b" timeout=5"), (b"Proxy-Connection", b" keep-alive")],
    [(b"Connection", b" TE , x-odd"), (b"TE", b" trailers")],
    [(b"Proxy-Authorization", b" Basic eDp5"), (b"Trailer", b" X-Odd")],
    [(b"Connection", b" Upgrade, HTTP2-Settings"), (b"Upgrade", b" h2c"), (b"HTTP2-Settings", b" AAMAAABk")],
    [(b"connection", b" content-length, host, content-type, authorization")],
    [(b"Connection", b" x-two"), (b"Connection", b" X-Bar"), (b"X-Bar", b""), (b"Upgrade", b" TLS/1.0")],
]


# -- flaws


def _target(*targets: bytes) -> Callable[[Draft], None]:
    def spoil(draft: Draft) -> None:
        draft.target = draft.random.choice(targets)

    return spoil


def _method(*methods: bytes) -> Callable[[Draft], None]:
    def spoil(draft: Draft) -> None:
        draft.method, draft.target, draft.class_name = draft.random.choice(methods), b"/free/x", None

    return spoil


def _field(*lines: bytes) -> Callable[[Draft], None]:
    def spoil(draft: Draft) -> None:
        name, _, value = draft.random.choice(lines).partition(b":")
        draft.fields.append((name, value))

    return spoil


def _hosts(*values: bytes) -> Callable[[Draft], None]:
    def spoil(draft: Draft) -> None:
        draft.version, draft.host = b"1.1", [(b"Host", value) for value in values]
        draft.target = draft.target.removeprefix(b"http://other.home:9")

    return spoil


def _framing(content: bytes, *lines: bytes) -> Callable[[Draft], None]:
    """These fields, and this body, in the place of the right ones."""

    def spoil(draft: Draft) -> None:
        draft.target, draft.class_name, draft.version = b"/free/x", None, b"1.1"
        draft.frame, draft.wire_body = "none", content
        draft.fields += [(line.partition(b":")[0], line.partition(b":")[2]) for line in lines]

    return spoil


def _named(content: bytes, *types: bytes) -> Callable[[Draft], None]:
    """A request on a model route, with this body and these types."""

    def spoil(draft: Draft) -> None:
        draft.method, draft.target, draft.version = b"POST", b"/v1/chat/completions", b"1.1"
        draft.fields = [(name, value) for name, value in draft.fields if name != b"Content-Type"]
        draft.fields += [(b"Content-Type", value) for value in types]
        draft.frame, draft.content, draft.wire_body = "length", content, content

    return spoil


FLAWS: dict[str, Callable[[Draft], None]] = {
    "raw non-ASCII in the target": _target(b"/free/\xc3\xa9", b"/free?\xff"),
    "a space in the target": _target(b"/free/a b", b"/free?a b"),
    "a broken escape in the path": _target(b"/free/%zz", b"/free/%", b"/upstream/chat-a/%4"),
    "a target that is no path": _target(b"*", b"free", b"ftp://a/free", b"http://"),
    "a method in lower case": _method(b"get", b"Post"),
    "a method that opens a tunnel": _method(b"CONNECT"),
    "a method that nobody registered": _method(b"FOO"),
    "two hosts": _hosts(b" a", b" b"),
    "no host": _hosts(),
    "a NUL in a value": _field(b"X-Bad: a\x00b"),
    "a control character in a value": _field(b"X-Bad: a\x01b", b"X-Bad: \x1b[0m"),
    "a line break of another kind in a value": _field(b"X-Bad: a\rb", b"X-Bad: a\x0bb"),
    "a folded value": _field(b"X-Bad: a\r\n b"),
    "a space before a colon": _field(b"X-Bad : a"),
    "a name that is none": _field(b"X Bad: a", b"X-B\xe9d: a", b": a", b"X(Bad): a", b"X-Bad\x00: a"),
    "no colon": _field(b"X-Odd: a\r\nX-Bad\r\nX-Odd: b"),
    "a coding other than chunked": _framing(b"0\r\n\r\n", b"Transfer-Encoding: gzip, chunked"),
    "a length beside chunks": _framing(b"2\r\nab\r\n0\r\n\r\n", b"Transfer-Encoding: chunked", b"Content-Length: 12"),
    "two lengths": _framing(b"ab", b"Content-Length: 1", b"Content-Length: 2"),
    "one length twice": _framing(b"ab", b"Content-Length: 2", b"Content-Length: 2"),
    "a length that is none": _framing(b"ab", b"Content-Length: +2"),
    "a chunk's size that is none": _framing(b"2\r\nab\r\nx\r\n\r\n", b"Transfer-Encoding: chunked"),
    "a chunk without its end": _framing(b"2\r\nabc\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "no model": _named(b'{"x": 1}', b" application/json"),
    "two types": _named(b'{"model": "tts-a"}', b" application/json", b"text/plain"),
    "a head of 70 KB": _field(b"X-Bad: " + b"a" * 70_000),
}
"""Each makes a request one that must be refused, by one of the parsers or by both (`ONLY_BY`)."""

ONLY_BY = {
    "a method that nobody registered": "httptools",
    "a control character in a value": "httptools",
    "a folded value": "httptools",
    "a length beside chunks": "httptools",
    "one length twice": "httptools",
}
"""What only one of the parsers refuses; under the other it must pass as it is."""
