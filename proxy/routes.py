"""From method and path to the route: whether a request can make llama-swap load a model, and where its name is.

Routes are matched as llama-swap's router matches them, Go's `http.ServeMux` (Go 1.26), because a request that loads a
model on a path which we hold for harmless would pass the lock. Its rules, from net/http and net/url:

- The path is taken as sent. If a `//`, `.` or `..` segment stands in it the answer is a redirect, and nothing loads.
- Otherwise it is split at `/` and each segment is decoded by itself: `/v1/%63hat/completions` is a route, `/v1%2Fchat/
  completions` is none.
- But a path with a character that a path must not hold raw, such as `"` or `|`, is first decoded whole and escaped
  anew (`URL.EscapedPath`): then `%2F` does divide segments, and `%2E%2E` is `..`.

What Go itself refuses, or this proxy and its HTTP client could treat differently, is refused here: a method that is
not in capitals (the client would send it in capitals), CONNECT, control characters, raw non-ASCII, broken escapes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import unquote_to_bytes

from proxy.errors import BadTarget


class NameIn(Enum):
    """Where a request carries its model's name."""

    NOWHERE = "nowhere"
    BODY = "body"
    QUERY = "query"
    PATH = "path"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Route:
    """What method and path say of a request.

    `name` is the model's where the path holds or fixes it; under /upstream it is the first segment, and `path` all of
    them, since an id may contain slashes. `class_hint` is the class that the route is made for, where that is evidence.
    `anthropic` asks for the error envelope of that API; `keyless` routes need no API key. `api` is the text API of the
    path, one of TEXT_APIS, whose answers can be streamed.
    """

    name_in: NameIn
    name: str | None = None
    class_hint: str | None = None
    anthropic: bool = False
    keyless: bool = False
    api: str | None = None
    rest: str = field(default="", compare=False)


COMFYUI_MODEL = "comfyui_auto"

_CHAT = (
    *("chat/completions", "completions", "responses", "messages", "messages/count_tokens"),
    *("embeddings", "rerank", "reranking"),
)
_BODY_ROUTES: dict[str, str | None] = {
    **{f"/{version}/{name}": None for version in ("v1", "v") for name in _CHAT},
    **dict.fromkeys(("/rerank", "/reranking", "/infill", "/completion")),
    **dict.fromkeys(("/v1/audio/speech", "/v1/audio/voices", "/audioapi/v1/tasks/run"), "tts"),
    "/v1/audio/transcriptions": "stt",
    **dict.fromkeys(("/v1/images/generations", "/v1/images/edits", "/sdapi/v1/txt2img", "/sdapi/v1/img2img"), "image"),
}
_QUERY_ROUTES: dict[str, str | None] = {"/v1/audio/voices": "tts", "/props": None, "/sdapi/v1/loras": "image"}
_KEYLESS = ("/", "/health", "/wol-health", "/upstream", "/-/healthz", "/-/readyz")
_IGNORED = (".js", ".json", ".css", ".png", ".gif", ".jpg", ".jpeg", ".ico", ".txt")
"""Ends of paths under /upstream/MODEL for which llama-swap loads nothing (its default `upstream.ignorePaths`)."""


TEXT_APIS = ("chat/completions", "completions", "responses", "messages")
_TEXT_API = re.compile(rf"/v1?/({'|'.join(TEXT_APIS)})$")


def _anthropic(path: str) -> bool:
    return re.search(r"/v1?/messages(/|$)", path) is not None


def _text_api(path: str) -> str | None:
    found = _TEXT_API.search(path)
    return found[1] if found else None


def _table() -> dict[tuple[str, bytes], Route]:
    """Every path that is known whole. HEAD takes the GET patterns, yet llama-swap then reads the name as in a POST."""
    table = {(method, path.encode()): PASS_KEYLESS for path in _KEYLESS for method in ("GET", "HEAD")}
    for path, hint in _BODY_ROUTES.items():
        table["POST", path.encode()] = Route(
            NameIn.BODY, class_hint=hint, anthropic=_anthropic(path), api=_text_api(path)
        )
    for path, hint in _QUERY_ROUTES.items():
        table["GET", path.encode()] = Route(NameIn.QUERY, class_hint=hint)
        table["HEAD", path.encode()] = Route(NameIn.BODY, class_hint=hint)
    return table


PASS = Route(NameIn.NOWHERE)
PASS_KEYLESS = Route(NameIn.NOWHERE, keyless=True)
_PASS_ANTHROPIC = Route(NameIn.NOWHERE, anthropic=True)
_COMFYUI = Route(NameIn.FIXED, name=COMFYUI_MODEL, class_hint="image")
_TABLE = _table()

_REFUSED_BYTE = re.compile(rb"[\x00-\x20\x7f-\xff]")
_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
# What net/url's validEncoded lets stand in a path; any other character makes Go escape the decoded path anew.
_AS_SENT = re.compile(rb"[A-Za-z0-9\-_.~$&+,/:;=@!'()*\[\]%]*")


def match_route(method: str, raw_path: bytes) -> Route:
    """The route of a request; `raw_path` is the target in origin form, undecoded, without its query.

    Raises BadTarget for what llama-swap could read differently.
    """
    known = _TABLE.get((method, raw_path))
    return known if known is not None else _match_segments(method, _segments(method, raw_path))


def _segments(method: str, raw_path: bytes) -> list[bytes] | None:
    """The decoded segments that llama-swap's router compares; None where it redirects. Raises BadTarget."""
    if not raw_path.startswith(b"/"):
        raise BadTarget
    if _REFUSED_BYTE.search(raw_path) or b"?" in raw_path:
        raise BadTarget("The request target holds a byte that must be percent-encoded there.")
    if _BROKEN_ESCAPE.search(raw_path):
        raise BadTarget("The request target holds a % without two hexadecimal digits after it.")
    if method == "CONNECT" or method != method.upper():
        raise BadTarget("The method must be in capital letters, and CONNECT is not forwarded.")
    as_sent = _AS_SENT.fullmatch(raw_path) is not None
    segments = (raw_path if as_sent else unquote_to_bytes(raw_path)).split(b"/")[1:]
    if b"" in segments[:-1] or b"." in segments or b".." in segments:
        return None
    return [unquote_to_bytes(segment) for segment in segments] if as_sent else segments


def _match_segments(method: str, segments: list[bytes] | None) -> Route:
    if method == "OPTIONS":
        return PASS_KEYLESS  # answered before anything else, by llama-swap's CORS middleware
    if segments is None:
        return PASS
    if segments[0] == b"upstream" and len(segments) > 1:
        return _under_upstream(b"/".join(segments[1:]).decode(errors="replace"))
    if segments in ([b"comfyui", b""], [b"comfyui", b"/"]):
        return _COMFYUI
    path = b"/" + b"/".join(segments)
    divided = path.count(b"/") == len(segments)  # otherwise a segment holds an escaped slash, and no pattern does
    if divided and not path.startswith(b"/-/") and (method, path) in _TABLE:
        return _TABLE[method, path]
    return _PASS_ANTHROPIC if _anthropic(path.decode(errors="replace")) else PASS


def _under_upstream(rest: str) -> Route:
    """The route of /upstream/`rest`. Once decoded, llama-swap no longer knows which slashes were escaped."""
    anthropic = _anthropic(rest)
    parts = [part for part in rest.split("/") if part]
    loads = len(parts) > 1 or (len(parts) == 1 and rest.endswith("/"))
    if not loads or rest.endswith(_IGNORED):
        return Route(NameIn.NOWHERE, anthropic=anthropic, rest=rest)
    hint = next((hint for path, hint in _BODY_ROUTES.items() if hint and rest.endswith(path)), None)
    return Route(NameIn.PATH, name=parts[0], class_hint=hint, anthropic=anthropic, api=_text_api("/" + rest), rest=rest)
