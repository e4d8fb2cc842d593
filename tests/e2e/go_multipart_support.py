"""How Go reads a multipart form: net/http's ParseMultipartForm on a whole body, as far as it decides a value.

Written from Go's sources (mime/multipart, mime, net/textproto), to know what llama-swap reads from whatever the proxy
lets through. A form that Go refuses has no values.
"""

from __future__ import annotations

import quopri
import re
from urllib.parse import unquote_to_bytes

TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
SPECIAL = b'()<>@,;:\\"/[]?='
SPACES = b" \t"


class Malformed(Exception):
    """Go returns an error."""


def form_values(content_type: bytes, body: bytes) -> list[tuple[bytes, bytes]]:
    """The fields that are no files, in order."""
    try:
        kind, parameters = media_type(content_type)
        if kind != b"multipart/form-data" or not parameters.get(b"boundary"):
            return []
        return _fields(b"--" + parameters[b"boundary"], body)
    except Malformed:
        return []


def _fields(dashed: bytes, body: bytes) -> list[tuple[bytes, bytes]]:
    found, newline, at = [], b"\r\n", 0
    first, expected = True, False
    while True:
        line, at = _line(body, at)
        rest = line[len(dashed) :].lstrip(SPACES) if line.startswith(dashed) else None
        if first and rest == b"\n":
            newline = b"\n"
        if rest == newline:
            at, field = _part(dashed, newline, body, at)
            found += field
            first = expected = False
        elif line.startswith(dashed + b"--") and line[len(dashed) + 2 :].lstrip(SPACES) in {b"", newline}:
            return found
        elif not line.endswith(b"\n") or expected or not (first or line == newline):
            raise Malformed(line)
        else:
            expected = not first


def _line(body: bytes, at: int) -> tuple[bytes, int]:
    end = body.find(b"\n", at) + 1 or len(body)
    return body[at:end], end


def _part(dashed: bytes, newline: bytes, body: bytes, at: int) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Where the part at `at` ends, and its field."""
    headers, at = _headers(body, at)
    end = _end_of_content(dashed, newline, body, at)
    content = body[at:end]
    if headers.get(b"content-transfer-encoding", b"").lower() == b"quoted-printable":
        content = quopri.decodestring(content)
    try:
        kind, parameters = media_type(headers.get(b"content-disposition", b""))
    except Malformed:
        return end, []
    name = parameters.get(b"name")
    is_value = kind == b"form-data" and name and not parameters.get(b"filename")
    return end, [(name, content)] if is_value and name else []


def _headers(body: bytes, at: int) -> tuple[dict[bytes, bytes], int]:
    """The first value of each header."""
    headers, last = dict[bytes, bytes](), b""
    while True:
        line, at = _line(body, at)
        if not line.endswith(b"\n"):
            raise Malformed(line)
        line = line[:-1].removesuffix(b"\r")
        if not line:
            return headers, at
        name, colon, value = line.partition(b":")
        if line[:1] in (b" ", b"\t") and last:
            headers[last] += b" " + line.strip(SPACES)
        elif not colon or TOKEN.fullmatch(name.rstrip(SPACES)) is None:
            raise Malformed(line)
        elif (last := name.lower()) not in headers:
            headers[last] = value.strip(SPACES)


def _end_of_content(dashed: bytes, newline: bytes, body: bytes, at: int) -> int:
    if body.startswith(dashed, at) and _is_boundary(body, at + len(dashed)):
        return at
    end = body.find(newline + dashed, at)
    while end >= 0 and not _is_boundary(body, end + len(newline + dashed)):
        end = body.find(newline + dashed, end + len(newline + dashed))
    if end < 0:
        raise Malformed("no boundary ends this part")
    return end


def _is_boundary(body: bytes, at: int) -> bool:
    return at == len(body) or body[at : at + 1] in (b" ", b"\t", b"\r", b"\n") or body[at : at + 2] == b"--"


def media_type(text: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Go's mime.ParseMediaType."""
    kind, semicolon, rest = text.partition(b";")
    kind, rest = kind.strip().lower(), semicolon + rest
    if any(TOKEN.fullmatch(part) is None for part in kind.split(b"/", 1)):
        raise Malformed(kind)
    given = dict[bytes, bytes]()
    while rest := rest.lstrip():
        name, value, after = _parameter(rest)
        if name in given:
            raise Malformed("the same parameter twice")
        if not name:
            if rest.strip() == b";":
                break
            raise Malformed(rest)
        given[name], rest = value, after
    return kind, _continued(given)


def _parameter(text: bytes) -> tuple[bytes, bytes, bytes]:
    """Name, value and what follows; an empty name where there is none."""
    found = re.match(rb";\s*([!#$%&'*+\-.^_`|~0-9A-Za-z]+)\s*=\s*(?s:(.*))", text)
    if found is None:
        return b"", b"", text
    name, rest = found[1].lower(), found[2]
    if not rest.startswith(b'"'):
        token = TOKEN.match(rest)
        return (name, token[0], rest[token.end() :]) if token is not None else (b"", b"", text)
    value, at = b"", 1
    while at < len(rest) and rest[at] not in b'"\r\n':
        at += rest[at : at + 1] == b"\\" and at + 1 < len(rest) and rest[at + 1] in SPECIAL
        value, at = value + rest[at : at + 1], at + 1
    return (name, value, rest[at + 1 :]) if rest[at : at + 1] == b'"' else (b"", b"", text)


def _continued(given: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """RFC 2231: values in pieces, and with a character set."""
    parameters = {name: value for name, value in given.items() if b"*" not in name}
    for base in {name.partition(b"*")[0] for name in given if b"*" in name}:
        if base + b"*" in given:
            pieces = given[base + b"*"].split(b"'", 2)
            if len(pieces) == 3 and pieces[0].lower() in {b"us-ascii", b"utf-8"}:
                parameters[base] = unquote_to_bytes(pieces[2])
            continue
        number, whole = 0, b""
        while (piece := given.get(b"%b*%d" % (base, number))) is not None:
            number, whole = number + 1, whole + piece
        if number:
            parameters[base] = whole
    return parameters
