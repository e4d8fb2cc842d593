"""Which model a request names, read exactly as llama-swap reads it.

llama-swap decides by the Content-Type alone. If it contains `application/json`, in lower case and anywhere,
the body is JSON (model_json) and the query does not count; otherwise body and query are a form (model_form,
model_multipart).
"""

from typing import Protocol

from proxy.model_form import QueryReader, Undecidable, UrlencodedReader
from proxy.model_json import JsonReader
from proxy.model_multipart import MultipartReader, kind_and_parameters

__all__ = [
    "NameReader",
    "Undecidable",
    "asks_for_stream",
    "body_reader",
    "is_rewritten",
    "name_from_query",
    "stream_reader",
]

# The methods whose urlencoded body net/http reads. llama-swap reads JSON and multipart for every method but GET.
_FORM_METHODS = frozenset({"POST", "PUT", "PATCH"})


class NameReader(Protocol):
    """Takes a request's body in chunks; then tells the name, or why there is none."""

    def feed(self, chunk: bytes) -> None:
        """Never raises. Once the name or its absence is certain, costs nothing."""

    def finish(self) -> str:
        """The name, never empty. Raises Undecidable."""


def body_reader(content_type: bytes | None, query: bytes, method: str = "POST", *, stream: bool = False) -> NameReader:
    """The reader that llama-swap would use; never raises, a hopeless request is refused by its `finish`.

    With `stream` it also learns whether a JSON body asks for a stream, for which it has to read all of it.
    """
    kind = content_type or b"application/octet-stream"
    if method == "GET":
        return QueryReader(query)
    if b"application/json" in kind:
        return JsonReader(stream=stream)
    try:
        if b"multipart/form-data" in kind:
            return MultipartReader.from_content_type(kind, query)
        if method in _FORM_METHODS and kind_and_parameters(kind)[0] == b"application/x-www-form-urlencoded":
            return UrlencodedReader(query)
    except Undecidable as problem:
        return _Refused(problem)
    return QueryReader(query)


def stream_reader(content_type: bytes | None) -> NameReader | None:
    """What learns whether a body asks for a stream where the model is not named in it; None where it is not JSON."""
    return JsonReader(name=False, stream=True) if b"application/json" in (content_type or b"").lower() else None


def asks_for_stream(reader: NameReader | None) -> bool | None:
    """Whether the body that `reader` was shown asks for a streamed answer; None where that is not known."""
    return reader.streamed if isinstance(reader, JsonReader) else None


def is_rewritten(content_type: bytes | None, query: bytes, method: str) -> bool:
    """Whether llama-swap applies the active profile and selectors to the name in such a request.

    It rewrites the request to do so, and can rewrite a JSON body, a multipart field that no query beats, and the query
    of a GET. In a urlencoded body, or in the query of anything else, the name stays what it is.
    """
    kind = content_type or b""
    if method == "GET" or b"application/json" in kind:
        return True
    return kind.lstrip()[:20].lower().startswith(b"multipart/form-data") and not _names_a_model(query)


def _names_a_model(query: bytes) -> bool:
    try:
        return bool(name_from_query(query))
    except Undecidable:
        return False


def name_from_query(query: bytes) -> str:
    """The name in `?model=`, for a request without a body. Raises Undecidable."""
    return QueryReader(query).finish()


class _Refused:
    def __init__(self, problem: Undecidable) -> None:
        self._problem = problem

    def feed(self, chunk: bytes) -> None:
        pass

    def finish(self) -> str:
        raise self._problem
