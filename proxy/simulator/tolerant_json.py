"""The first top-level value under a key, as llama-swap's JSON reader (gjson) finds it in almost anything.

It never checks that the text is JSON: it looks for the first `{`, then for one quoted key and one value after
the other until the key is found or the object ends, and reads that value alone. So trailing garbage, a
missing end, NaN and a byte order mark do no harm, and of two equal keys the first wins.
"""

from __future__ import annotations

import re
from decimal import Decimal

_OPENING = re.compile(rb"[{\[]")
_KEY_OR_END = re.compile(rb'["}]')
_VALUE = re.compile(rb'["{\[tfn+\-0-9iIN]')
_STRING = re.compile(rb'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_NESTED = re.compile(rb'["{}()\[\]]')
_LITERAL = re.compile(rb".[a-z]*", re.DOTALL)
_NUMBER = re.compile(rb".[^\x00- ,\]}]*", re.DOTALL)
_ESCAPE = re.compile(rb"\\(u[^\\\"]{4}|.)|\\|[\x00-\x1f]", re.DOTALL)
_SIMPLE = {b"b": "\b", b"f": "\f", b"n": "\n", b"r": "\r", b"t": "\t", b"/": "/", b"\\": "\\", b'"': '"'}


def first_value(text: bytes, key: str) -> str | bool | None:
    """The value as text (a number or an object as it is written), or True, False, or None for null and none."""
    opening = _OPENING.search(text)
    if opening is None or opening[0] != b"{":
        return None
    position = opening.end()
    while (start := _KEY_OR_END.search(text, position)) is not None and start[0] == b'"':
        name = _STRING.match(text, start.start())
        value = _VALUE.search(text, name.end()) if name is not None else None
        if name is None or value is None:
            return None
        raw = _raw_value(text, value.start())
        if raw is None:
            return None
        if _unescaped(name[1]) == key:
            return _as_value(raw)
        position = value.start() + len(raw)
    return None


def _raw_value(text: bytes, start: int) -> bytes | None:
    """The value that begins at `start`, as written; None for a string without an end."""
    first = text[start : start + 1]
    if first == b'"':
        string = _STRING.match(text, start)
        return string[0] if string is not None else None
    if first in b"{[":
        return text[start : _end_of_nested(text, start)]
    literal = first in b"tf" or text[start : start + 2] == b"nu"
    match = (_LITERAL if literal else _NUMBER).match(text, start)
    return match[0] if match is not None else None


def _end_of_nested(text: bytes, start: int) -> int:
    depth, position = 0, start
    while (sign := _NESTED.search(text, position)) is not None:
        position = sign.end()
        if sign[0] == b'"':
            string = _STRING.match(text, sign.start())
            if string is None:
                return len(text)
            position = string.end()
        else:
            depth += 1 if sign[0] in b"{[(" else -1
            if depth == 0:
                return position
    return len(text)


def _as_value(raw: bytes) -> str | bool | None:
    if raw[:1] == b'"':
        return _unescaped(raw[1:-1])
    if raw[:1] in {b"t", b"f"}:
        return raw[:1] == b"t"
    if raw[:2] == b"nu":
        return None
    text = raw.decode("utf-8", "surrogateescape")
    return text if raw[:1] in {b"{", b"["} or re.fullmatch(r"-?[0-9]*", text) else _number(text)


def _number(text: str) -> str:
    """A number that is not written as a plain integer, as Go prints it without an exponent."""
    try:
        number = Decimal(repr(float(text)))
    except ValueError:
        return "0"
    if number.is_infinite():
        return "+Inf" if number > 0 else "-Inf"
    return format(number.normalize(), "f")


def _unescaped(raw: bytes) -> str:
    """The string without its escapes, if it has any: then it ends at a control character or an unknown one."""
    if b"\\" not in raw:
        return raw.decode("utf-8", "surrogateescape")
    parts: list[str] = []
    position = 0
    while True:
        escape = _ESCAPE.search(raw, position)
        parts.append(raw[position : escape.start() if escape else None].decode("utf-8", "surrogateescape"))
        if escape is None or escape[1] is None:
            return "".join(parts)
        if escape[1] in _SIMPLE:
            parts.append(_SIMPLE[escape[1]])
            position = escape.end()
        elif len(escape[1]) == 5:
            character, position = _unicode(raw, escape.start())
            parts.append(character)
        else:
            return "".join(parts)


def _unicode(raw: bytes, start: int) -> tuple[str, int]:
    """The character of the `\\u` escape at `start`, a pair of surrogates taken together, and where it ends."""
    code, end = _hex(raw[start + 2 : start + 6]), start + 6
    if 0xD800 <= code < 0xE000 and len(raw) >= end + 6 and raw[end : end + 2] == b"\\u":
        low, end = _hex(raw[end + 2 : end + 6]), end + 6
        pair = code < 0xDC00 and 0xDC00 <= low < 0xE000
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if pair else 0xFFFD
    return ("\ufffd" if 0xD800 <= code < 0xE000 else chr(code)), end


def _hex(digits: bytes) -> int:
    return int(digits, 16) if re.fullmatch(rb"[0-9A-Fa-f]{4}", digits) else 0
