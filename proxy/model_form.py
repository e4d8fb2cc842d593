"""The model's name in a query or an urlencoded form: the subset that every reader reads alike.

llama-swap reads forms with Go's net/http, which forgives much, and forgives other things than the parsers of
Python and JavaScript do. Two readings of one body would mean two models, so nothing is forgiven here: a form
counts only if there is one way to read it. `model` may occur once in body and query together, as plain text;
escapes must be complete; `;`, which some take for a separator, must be escaped. Every client library writes
such forms. Whatever else comes is `Undecidable`, even where Go would find a name in it.

The readers take chunks of any size, keep no more than one field, and look at each byte a bounded number of
times.
"""

import re
from urllib.parse import unquote_to_bytes

# No model is named with more: ids are under 100 bytes. It bounds what a reader keeps.
MAX_NAME = 1024

# net/http and net/url refuse more than this.
_MAX_URLENCODED = 10 << 20
_MAX_PAIRS = 10_000

# Pairs are cut here. The longest spelling of `model=` and a name of MAX_NAME bytes is shorter: a cut value
# is still too long to be a name.
_PAIR_KEPT = 4096

_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})|;")
_BAD_IN_QUERY = re.compile(rb"[^\x21-\x7e]|#")


class Undecidable(ValueError):
    """No model can be told from this request; the message is one sentence for the client."""


def checked_name(raw: bytes, limit: int = MAX_NAME) -> str:
    """The name that these bytes are, if they can be one."""
    if not raw:
        raise Undecidable("The model name is empty; use one that /v1/models lists.")
    if len(raw) > limit:
        raise Undecidable(f"The model name is longer than {limit} bytes; use one that /v1/models lists.")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise Undecidable("The model name is not valid UTF-8; send it in UTF-8.") from None


def only_name(found: list[bytes]) -> str:
    """The name, if exactly one value was found."""
    if not found:
        raise Undecidable(
            "No model is named; add a field 'model', or send JSON with the Content-Type application/json."
        )
    if len(found) > 1:
        raise Undecidable("'model' is given more than once in form and query; give it once.")
    return checked_name(found[0])


def model_values(query: bytes) -> list[bytes]:
    """The decoded values of `model` in a query string."""
    if _BAD_IN_QUERY.search(query) or _BAD_ESCAPE.search(query):
        raise Undecidable("The query has a ';', a raw character or a broken % escape; percent-encode it.")
    pairs = query.split(b"&")
    if len(pairs) > _MAX_PAIRS:
        raise Undecidable(f"The query has more than {_MAX_PAIRS} parameters; send fewer.")
    return [value for pair in pairs for value in _model_value(pair)]


def _model_value(pair: bytes) -> list[bytes]:
    key, _, value = pair.replace(b"+", b" ").partition(b"=")
    return [unquote_to_bytes(value)] if unquote_to_bytes(key) == b"model" else []


class QueryReader:
    """For a body that does not count: only the query names the model."""

    def __init__(self, query: bytes) -> None:
        self._query = query

    def feed(self, chunk: bytes) -> None:
        pass

    def finish(self) -> str:
        return only_name(model_values(self._query))


class UrlencodedReader:
    """application/x-www-form-urlencoded, beside a query."""

    def __init__(self, query: bytes) -> None:
        self._query = query
        self._found: list[bytes] = []
        self._pair = bytearray()
        self._edge = b""  # an escape that the next chunk may complete
        self._size = 0
        self._pairs = 1
        self._problem = ""

    def feed(self, chunk: bytes) -> None:
        if not self._problem:
            self._check(chunk)
        if self._problem:
            return
        first, *others = chunk.split(b"&")
        self._extend(first)
        for piece in others:
            self._end_pair()
            self._extend(piece)

    def finish(self) -> str:
        if self._problem or self._edge:
            raise Undecidable(self._problem or "The form ends inside a % escape; send it whole.")
        self._end_pair()
        return only_name(model_values(self._query) + self._found)

    def _check(self, chunk: bytes) -> None:
        text = self._edge + chunk
        edge = text.find(b"%", max(0, len(text) - 2))
        text, self._edge = (text, b"") if edge < 0 else (text[:edge], text[edge:])
        self._size += len(chunk)
        self._pairs += chunk.count(b"&")
        if _BAD_ESCAPE.search(text):
            self._problem = "The form has a ';' or a broken % escape; percent-encode it, or send application/json."
        elif self._size > _MAX_URLENCODED or self._pairs > _MAX_PAIRS:
            self._problem = "The form is too large to be urlencoded; send it as multipart/form-data."

    def _extend(self, piece: bytes) -> None:
        self._pair += piece[: _PAIR_KEPT - len(self._pair)]

    def _end_pair(self) -> None:
        self._found += _model_value(bytes(self._pair))
        self._pair.clear()
