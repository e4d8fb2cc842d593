"""Whether what came to the upstream is what was sent, under a lease of the class of the model that is loaded for it.

The model is read by the simulated llama-swap, and from forms as Go does, neither of which shares code with the proxy;
the class of a name is the documented one. Of the sent bytes nothing is parsed: whatever reached the upstream must be
found in them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes

from differential_support import Came
from go_multipart_support import form_values

from proxy.classify import Classifier
from proxy.routes import NameIn, Route
from proxy.settings import Settings
from proxy.simulator.config import DEFAULT_IGNORE_PATHS
from proxy.simulator.mux import Found, match
from proxy.simulator.reading import read_request

CLASSES = Classifier(Settings())

HINTS = {"audio/speech": "tts", "audio/voices": "tts", "audio/transcriptions": "stt", "images/edits": "image"}
"""The class that a route is made for; it decides where the name does not."""

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
ONE_REQUEST = re.compile(
    rb"%b /[\x21-\x7e]* HTTP/1\.1\r\n(?:%b: (?:[^\r\n\0 \t](?:[^\r\n\0]*[^\r\n\0 \t])?)?\r\n)*\r\n" % (TOKEN, TOKEN)
)
"""A head that no two parties can read differently."""

ANSWER = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[^\r\n]*\r\n)*?)\r\n((?s:.*))")


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer as the client got it."""

    status: int
    fields: dict[bytes, bytes]

    @property
    def seen(self) -> int | None:
        """Which of the requests at the upstream it answers; None for one of the proxy's own answers."""
        number = self.fields.get(b"x-seen")
        return int(number) if number is not None else None


def heard(data: bytes) -> list[Heard]:
    """The answers in what came on a connection, each with no body, or one of the announced length."""
    answers = []
    for piece in re.split(rb"(?=HTTP/1\.1 \d{3} )", data):
        if not piece:
            continue
        found = ANSWER.fullmatch(piece)
        assert found is not None, piece
        lines = (line.partition(b":") for line in found[2].split(b"\r\n") if line)
        answer = Heard(int(found[1]), {name.lower(): value.strip() for name, _, value in lines})
        assert not found[3] or _is_framed(answer, found[3]), piece
        if answer.status >= 200:
            answers.append(answer)
    return answers


def _is_framed(answer: Heard, body: bytes) -> bool:
    if b"transfer-encoding" in answer.fields:
        return re.fullmatch(rb"(?s:[0-9a-f]+\r\n.*\r\n)?0\r\n\r\n", body) is not None
    length = answer.fields.get(b"content-length")
    return len(body) == int(length) if length is not None else answer.fields.get(b"connection") == b"close"


def class_needed(came: Came) -> str | None:
    """The class of the model that llama-swap loads for this request; None where it loads none."""
    method, target, _ = came.head.split(b"\r\n")[0].split(b" ")
    raw_path, _, query = target.partition(b"?")
    found = match(method.decode(), _as_routed(raw_path))
    if not isinstance(found, Found) or method == b"OPTIONS":
        return None
    if found.handler == "upstream":
        return _under_upstream(found.rest)
    if found.handler == "comfyui":
        return "image" if not found.rest else None
    if found.handler != "named":
        return None
    first = dict(reversed([(name.lower(), value) for name, value in came.fields]))
    kind = first.get(b"content-type", b"").decode("latin-1")
    name = _name_read(method.decode(), query, kind, came.body)
    path = unquote_to_bytes(raw_path).decode()
    hint = next((hint for end, hint in HINTS.items() if path.endswith(end)), None)
    return CLASSES.classify(Route(NameIn.BODY, class_hint=hint), name).class_name if name else None


def _name_read(method: str, query: bytes, kind: str, body: bytes) -> str:
    if method == "GET" or "application/json" in kind or "multipart/form-data" not in kind:
        return read_request(method, query, kind, body).model
    values = [value for name, value in form_values(kind.encode("latin-1"), body) if name == b"model"]
    in_query = read_request("GET", query, "", b"").model
    return in_query or (values[0].decode(errors="replace") if values else "")


def _as_routed(raw_path: bytes) -> str:
    """The path that Go's router compares: escaped anew where it holds what a path must not (`URL.EscapedPath`)."""
    if re.fullmatch(rb"[A-Za-z0-9\-_.~$&+,/:;=@!'()*\[\]%]*", raw_path):
        return raw_path.decode()
    return quote(unquote_to_bytes(raw_path), safe="$&+,/:;=@~")


def _under_upstream(rest: str) -> str | None:
    parts = rest.split("/")
    at = next((at for at, part in enumerate(parts) if part), None)
    if at is None or at == len(parts) - 1:
        return None
    path = "/" + "/".join(parts[at + 1 :])
    if any(re.search(pattern, path) for pattern in DEFAULT_IGNORE_PATHS):
        return None
    hint = next((hint for end, hint in HINTS.items() if path.endswith(f"/v1/{end}")), None)
    return CLASSES.classify(Route(NameIn.BODY, class_hint=hint), parts[at]).class_name


def check_faithful(came: Came, sent: bytes, body: bytes | None) -> None:
    """All of what came is in what was `sent`; its body is `body` where that is known."""
    assert ONE_REQUEST.fullmatch(came.head), came.head
    names = [name for name, _ in came.fields]
    assert sum(name in {b"content-length", b"transfer-encoding"} for name in names) <= 1
    unfolded = re.sub(rb"\r?\n[ \t]+", b" ", sent)
    assert came.target == b"/" or came.target in sent
    lower = sent.lower()
    for name, value in came.fields:
        if not name.startswith(b"x-forwarded-") and name != b"x-request-id" and value:
            assert name in lower
            assert value in sent or value in unfolded or name == b"transfer-encoding"
    if body is not None and came.target != END_TARGET:
        assert came.body == body
    rest = iter(sent)
    assert all(byte in rest for byte in came.body), "its bytes are not all there in this order"


END_TARGET = b"/end"
END = b"GET " + END_TARGET + b" HTTP/1.1\r\nHost: end\r\nConnection: close\r\n\r\n"
"""Sent after every input: where that is whole, this is the next request, and the connection closes."""
