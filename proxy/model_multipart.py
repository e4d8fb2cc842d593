"""The model's name in a multipart form: RFC 7578 in the frame of RFC 2046, section 5.1.

A delimiter is `CRLF--boundary` wherever it occurs, and must be followed by CRLF or, once and last, by `--`.
Go, and every parser in use, finds the same parts in a body that keeps to this. They part ways over bare line
feeds, spaces behind a boundary, text before the first one, repeated or folded headers, backslashes in a name,
extended parameters: there the body is `Undecidable`. Contents are never looked into, so a file may be of any
size and hold anything but the delimiter.
"""

import re
from collections.abc import Callable

from proxy.model_form import MAX_NAME, Undecidable, model_values, only_name

# mime/multipart refuses more parts.
_MAX_PARTS = 1_000

# Clients send two to four headers and, with the longest file names, under 2 KiB. Ten in each of a thousand
# parts is what mime/multipart takes.
_MAX_HEAD = 8192
_MAX_HEADERS = 10

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_KIND = re.compile(rb"%b(?:/%b)?" % (_TOKEN, _TOKEN))
# What a backslash does is not agreed on (old browsers send paths); where the string ends is.
_QUOTED = rb'"((?:[^"\\\x00-\x1f\x7f]|\\[^\x00-\x1f\x7f])*+)"'
_PARAMETER = re.compile(rb";[ \t]*(%b)=(?:(%b)|%b)[ \t]*+" % (_TOKEN, _TOKEN, _QUOTED))
_HEADER = re.compile(rb"(%b):([^\x00-\x08\x0a-\x1f\x7f]*)" % _TOKEN)
# RFC 2046's characters without the space.
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=?-]{1,70}")


def kind_and_parameters(value: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Kind and parameters of a Content-Type or Content-Disposition; names in lower case, quoted values raw.

    RFC 2045, section 5.1. RFC 2231's `name*` forms pass for file names only, whose value nobody asks for.
    """
    kind, semicolon, rest = value.partition(b";")
    kind, rest = kind.strip(b" \t").lower(), semicolon + rest
    parameters: dict[bytes, bytes] = {}
    position = 0
    while match := _PARAMETER.match(rest, position):
        name, position = match[1].lower(), match.end()
        if name in parameters or (b"*" in name and not name.startswith(b"filename*")):
            raise Undecidable("A form header has a repeated or an extended parameter; send it once, plainly.")
        parameters[name] = match[2] or match[3] or b""
    if not _KIND.fullmatch(kind) or rest[position:].strip(b" \t") not in {b"", b";"}:
        raise Undecidable("A Content-Type or Content-Disposition is malformed; write it as RFC 2045 says.")
    return kind, parameters


class MultipartReader:
    """multipart/form-data, beside a query."""

    def __init__(self, boundary: bytes, query: bytes) -> None:
        self._query = query
        self._found: list[bytes] = []
        self._delimiter = b"\r\n--" + boundary
        # As if a line had just ended: then the first delimiter looks like all others.
        self._buffer = b"\r\n"
        self._position = 0
        self._parts = 0
        self._value: bytearray | None = None  # of the part being read, if it is `model`
        self._state: Callable[[MultipartReader], bool] | None = MultipartReader._opening
        self._problem: Undecidable | None = None

    @classmethod
    def from_content_type(cls, content_type: bytes, query: bytes) -> "MultipartReader":
        kind, parameters = kind_and_parameters(content_type)
        boundary = parameters.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not _BOUNDARY.fullmatch(boundary):
            raise Undecidable("The form's Content-Type has no usable boundary; let the HTTP library set it.")
        return cls(boundary, query)

    def feed(self, chunk: bytes) -> None:
        if self._state is None:
            return
        self._buffer = self._buffer[self._position :] + chunk
        self._position = 0
        try:
            while self._state(self):
                pass
        except Undecidable as problem:
            self._problem = problem
            self._state, self._buffer = None, b""

    def finish(self) -> str:
        if self._problem is not None:
            raise self._problem
        if self._state is not MultipartReader._ended or self._rest() == b"\r":
            raise Undecidable("The multipart body ends before its final boundary; send it whole.")
        return only_name(model_values(self._query) + self._found)

    # A state takes what it can from the buffer and tells whether the next state may go on.

    def _opening(self) -> bool:
        if len(self._buffer) < len(self._delimiter):
            return False
        if not self._buffer.startswith(self._delimiter):
            raise Undecidable("The multipart body does not begin with its boundary; send nothing before it.")
        return self._go_on(len(self._delimiter), MultipartReader._delimited)

    def _delimited(self) -> bool:
        mark = self._buffer[self._position : self._position + 2]
        if len(mark) < 2:
            return False
        if mark not in {b"\r\n", b"--"}:
            raise Undecidable("A multipart boundary is not followed by CRLF or '--'; write nothing else there.")
        state = MultipartReader._head if mark == b"\r\n" else MultipartReader._ended
        return self._go_on(self._position + 2, state)

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n", self._position)
        if (end if end >= 0 else len(self._buffer)) - self._position > _MAX_HEAD:
            raise Undecidable(f"A part of the form has headers of over {_MAX_HEAD} bytes; shorten them.")
        if end < 0:
            return False
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise Undecidable(f"The form has more than {_MAX_PARTS} parts; send fewer.")
        self._value = bytearray() if _is_model(self._buffer[self._position : end]) else None
        return self._go_on(end + 4, MultipartReader._content_start)

    def _content_start(self) -> bool:
        # Go takes a boundary right behind the headers for the end of an empty part, others for content.
        dashed = self._delimiter[2:]
        if len(self._buffer) - self._position < len(dashed):
            return False
        if self._buffer.startswith(dashed, self._position):
            raise Undecidable("A part of the form has no content, not even an empty line; add CRLF.")
        return self._go_on(self._position, MultipartReader._content)

    def _content(self) -> bool:
        end = self._buffer.find(self._delimiter, self._position)
        # The last bytes may be the beginning of a delimiter.
        known = end if end >= 0 else max(self._position, len(self._buffer) - len(self._delimiter) + 1)
        if self._value is not None:
            room = MAX_NAME + 1 - len(self._value)
            self._value += self._buffer[self._position : min(known, self._position + room)]
        if end < 0:
            self._position = known
            return False
        if self._value is not None:
            self._found.append(bytes(self._value))
        return self._go_on(end + len(self._delimiter), MultipartReader._delimited)

    def _ended(self) -> bool:
        if not b"\r\n".startswith(self._rest()):
            raise Undecidable("The multipart body goes on after its final boundary; end it there.")
        return False

    def _rest(self) -> bytes:
        return self._buffer[self._position :]

    def _go_on(self, position: int, state: "Callable[[MultipartReader], bool]") -> bool:
        self._position, self._state = position, state
        return True


def _is_model(head: bytes) -> bool:
    """Whether the part with these header lines is the field `model`."""
    headers = _headers(head)
    kind, parameters = kind_and_parameters(headers.get(b"content-disposition", b""))
    name = parameters.get(b"name", b"")
    if kind != b"form-data" or not name or b"\\" in name:
        raise Undecidable('A part of the form has no plain name; give it Content-Disposition: form-data; name="…".')
    encoding = headers.get(b"content-transfer-encoding", b"binary").lower()
    # Go decodes this one (RFC 7578 deprecates it), and refuses the whole form if it cannot.
    if encoding == b"quoted-printable":
        raise Undecidable("A part of the form is quoted-printable; send it as it is.")
    if name != b"model":
        return False
    if any(parameter.startswith(b"filename") for parameter in parameters):
        raise Undecidable("'model' is sent as a file; send it as a plain field.")
    if encoding not in {b"binary", b"7bit", b"8bit"}:
        raise Undecidable("The field 'model' has a Content-Transfer-Encoding; send it as it is.")
    return True


def _headers(head: bytes) -> dict[bytes, bytes]:
    lines = head.split(b"\r\n")
    matches = [_HEADER.fullmatch(line) for line in lines]
    headers = {match[1].lower(): match[2].strip(b" \t") for match in matches if match}
    if len(headers) < len(lines) or len(lines) > _MAX_HEADERS:
        raise Undecidable("A part of the form has a malformed, folded or repeated header; write each once.")
    return headers
