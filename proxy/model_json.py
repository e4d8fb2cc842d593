"""What a JSON body says: the model as llama-swap reads it, and whether a stream is wanted as the engines read it.

llama-swap reads JSON with gjson, which takes the first top-level key `model`, never looks at what follows, and does
not validate. A parser that validates, or takes the last of two keys, will some day name another model than the one
that is loaded. So the scanner below does as gjson does: it walks over the tokens of the outermost object, skips strings
and nested values without looking into them, and takes the first `model`. Where the text before it is not JSON it
refuses, rather than guess what gjson makes of it. A valid object is never refused.

The engines read the whole object, and of two keys `stream` the last counts to them all. So where that is asked for the
scanner goes on to the end of the object; without one, nothing is certain.

Pure and incremental: chunks may be cut anywhere, time is linear in their length, memory is bounded by the longest key
or name, and nesting is a number, not a stack.
"""

import re
from collections.abc import Callable
from typing import Literal

from proxy.model_form import Undecidable, checked_name

MAX_JSON_NAME = 32 * 1024
"""Bytes. A valid object is not refused for its name; this only bounds the memory that one may take."""

# `\u0041` is the longest way to write one byte of a name.
_KEPT = 6 * MAX_JSON_NAME

_ROOT = re.compile(rb"[{\[]")
_SEPARATORS = re.compile(rb"[ \t\r\n,]*+")
_COLON = re.compile(rb"[ \t\r\n:]*+")
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]*+")
_TRUE = b"true"
_SCALAR_STARTS = frozenset(b"+-0123456789iINtfn")
_SCALAR_ENDS = frozenset(b" \t\r\n,}")

# Inside a nested value only depth counts. Strings and flat objects and arrays are skipped in one match, runs of
# brackets taken as one token. All of it is possessive, so that no byte is looked at more than a few times.
# gjson counts parentheses as brackets; valid JSON has none outside strings, so they end the scan.
_STRING = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
_FLAT = rb'(?:[^"\[\]{}()]++|"%b")*+' % _STRING
_NESTED = re.compile(
    rb"(?:[^\"\[\]{}()]++|\"%b\"|\[%b\]|\{%b\})*+([\[{]++|[\]}]++|[\"()])?" % (_STRING, _FLAT, _FLAT), re.DOTALL
)
_STRING_REST = re.compile(_STRING, re.DOTALL)

_MODEL_KEY = re.compile(rb"(?:m|\\u006[dD])(?:o|\\u006[fF])(?:d|\\u0064)(?:e|\\u0065)(?:l|\\u006[cC])")
_STREAM_KEY = re.compile(rb"(?:s|\\u0073)(?:t|\\u0074)(?:r|\\u0072)(?:e|\\u0065)(?:a|\\u0061)(?:m|\\u006[dD])")
# gjson ends an escaped key at a control character or a bad escape: such a key could be `model` to it.
_CUT = re.compile(rb'[\x00-\x1f]|\\(?!["\\/bfnrt]|u[0-9A-Fa-f]{4})')
_VALID_STRING = re.compile(rb'(?:[^\x00-\x1f"\\]|\\["\\/bfnrt]|\\u[0-9A-Fa-f]{4})*+')
_ESCAPE = re.compile(r"\\u([dD][89A-Fa-f]..)(?:\\u(....))?|\\u(....)|\\(.)")
_SHORT_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class JsonReader:
    """Takes a JSON body in chunks; then tells its model, and with `stream` whether it asks for a stream.

    Without `name` the body needs no model. There is one state per token of the outermost object; each takes what it can
    and returns where it stopped.
    """

    def __init__(self, *, name: bool = True, stream: bool = False) -> None:
        self._wants_name, self._wants_stream = name, stream
        self._state: Callable[[JsonReader, bytes, int], int] | None = JsonReader._before_object
        self._depth = 0  # below the outermost object
        self._escaped = False  # inside a string: the next character is escaped
        self._kept = bytearray()  # of the current key or the name, without quotes
        self._key: Literal["model", "stream"] | None = None  # what the current key is to us
        self._raw_name: bytes | None = None
        self._stream = self._whole = False
        self._problem = 'The JSON body ends before its "model" does; send it whole, with a top-level "model".'

    def feed(self, chunk: bytes) -> None:
        """Never raises. Once everything that is wanted is certain, costs nothing."""
        position = 0
        while self._state is not None and position < len(chunk):
            position = self._state(self, chunk, position)

    def finish(self) -> str:
        """The name, never empty. Raises Undecidable."""
        if self._raw_name is None:
            raise Undecidable(self._problem)
        return _unescaped(self._raw_name)

    @property
    def streamed(self) -> bool | None:
        """Whether the last top-level `stream` is `true`; None where the object did not come to its end."""
        return self._stream if self._whole else None

    def _before_object(self, chunk: bytes, position: int) -> int:
        root = _ROOT.search(chunk, position)
        if root is None:
            return len(chunk)
        if root[0] == b"[":
            return self._refuse('The JSON body is an array; send an object with a top-level "model".')
        self._state = JsonReader._before_key
        return root.end()

    def _before_key(self, chunk: bytes, position: int) -> int:
        position = _end(_SEPARATORS, chunk, position)
        self._key = None
        if position < len(chunk):
            if chunk[position] == ord("}"):
                self._whole = True
                return self._refuse('The JSON body has no top-level "model"; add one that names a model.')
            if chunk[position] != ord('"'):
                return self._refuse_malformed()
            self._state = JsonReader._key_or_name
        return position + 1

    def _key_or_name(self, chunk: bytes, position: int) -> int:
        end = self._string_end(chunk, position)
        self._kept += chunk[position : end if end >= 0 else len(chunk)][: _KEPT + 1 - len(self._kept)]
        if end < 0:
            return len(chunk)
        if self._key == "model":
            self._raw_name = bytes(self._kept)
            self._state = JsonReader._before_key if self._wants_stream else None
        else:
            self._take_key()
        self._kept.clear()
        return end + 1

    def _take_key(self) -> None:
        match = _MODEL_KEY.match(self._kept) if self._wants_name and self._raw_name is None else None
        self._state = JsonReader._before_value
        if match and match.end() == len(self._kept):
            self._key = "model"
        elif match and _CUT.match(self._kept, match.end()):
            self._refuse_malformed()
        elif self._wants_stream and _STREAM_KEY.fullmatch(self._kept):
            self._key = "stream"
            self._stream = False

    def _before_value(self, chunk: bytes, position: int) -> int:
        position = _end(_COLON, chunk, position)
        if position == len(chunk):
            return position
        first = chunk[position]
        if self._key == "model" and first != ord('"'):
            return self._refuse('The first top-level "model" is not a string; name a model there, in quotes.')
        if first == ord('"'):
            self._state = JsonReader._key_or_name if self._key == "model" else JsonReader._string
        elif first in b"[{":
            self._depth = 1
            self._state = JsonReader._nested
        elif first in _SCALAR_STARTS:
            self._state = JsonReader._scalar
            self._kept[:] = (first,)
        else:
            return self._refuse_malformed()
        return position + 1

    def _scalar(self, chunk: bytes, position: int) -> int:
        start, position = position, _end(_SCALAR, chunk, position)
        if self._key == "stream":
            self._kept += chunk[start : min(position, start + len(_TRUE) + 1 - len(self._kept))]
        if position < len(chunk):
            if chunk[position] not in _SCALAR_ENDS:
                return self._refuse_malformed()
            self._stream = self._kept == _TRUE if self._key == "stream" else self._stream
            self._kept.clear()
            self._state = JsonReader._before_key
        return position

    def _string(self, chunk: bytes, position: int) -> int:
        end = self._string_end(chunk, position)
        if end < 0:
            return len(chunk)
        self._state = JsonReader._nested if self._depth else JsonReader._before_key
        return end + 1

    def _nested(self, chunk: bytes, position: int) -> int:
        for match in _NESTED.finditer(chunk, position):
            token = match[1]
            if token is None:
                continue  # the end of the chunk
            if token in b"()":
                return self._refuse_malformed()
            if token == b'"':
                self._state = JsonReader._string
                return match.end()
            if token[0] in b"[{":
                self._depth += len(token)
            elif len(token) < self._depth:
                self._depth -= len(token)
            else:
                self._state = JsonReader._before_key
                end, self._depth = match.start(1) + self._depth, 0
                return end
        return len(chunk)

    def _string_end(self, chunk: bytes, position: int) -> int:
        """Where the quote is that ends the string around `position`, or -1; a cut escape is remembered."""
        if self._escaped:
            self._escaped = False
            position += 1
        quote = chunk.find(b'"', position)
        if chunk.find(b"\\", position, quote if quote >= 0 else len(chunk)) < 0:
            return quote
        end = _end(_STRING_REST, chunk, position)
        if end == len(chunk):
            return -1
        self._escaped = chunk[end] == ord("\\")
        return -1 if self._escaped else end

    def _refuse(self, problem: str) -> int:
        self._problem = problem
        self._state = None
        return 0

    def _refuse_malformed(self) -> int:
        return self._refuse('The JSON body is malformed before its "model"; send valid JSON.')


def _end(pattern: re.Pattern[bytes], chunk: bytes, position: int) -> int:
    match = pattern.match(chunk, position)
    return match.end() if match else position


def _unescaped(raw: bytes) -> str:
    """The text of a JSON string, with gjson's reading of what RFC 8259 leaves open: lone surrogates."""
    if len(raw) > _KEPT:
        return checked_name(raw, MAX_JSON_NAME)
    if not _VALID_STRING.fullmatch(raw):
        raise Undecidable('The value of "model" is not a valid JSON string; escape it as RFC 8259 says.')
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise Undecidable('The value of "model" is not valid UTF-8; send it in UTF-8.') from None
    return checked_name(_ESCAPE.sub(_character, text).encode(), MAX_JSON_NAME)


def _character(escape: re.Match[str]) -> str:
    surrogate, follower, other, short = escape.groups()
    if short:
        return _SHORT_ESCAPES.get(short, short)
    if other:
        return chr(int(other, 16))
    high, low = int(surrogate, 16), int(follower or "0", 16)
    if 0xD800 <= high < 0xDC00 <= low < 0xE000:
        return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))
    # Both are consumed, even when the second one is a character of its own.
    return "\ufffd"
