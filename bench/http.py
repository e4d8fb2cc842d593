"""The little of HTTP/1.1 that the load generator and the upstream need, and nothing else, to cost next to nothing.

Both sides are ours or a proxy's, so the shortcuts hold: a message has a length, or is chunked and its last five bytes
are those of the last chunk, which no payload here contains.
"""

from __future__ import annotations

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

TOKEN = b"bench-"
"""What is wanted of the upstream is named by a word with this prefix: in a header field, or as the model's name."""


def chunk(data: bytes) -> bytes:
    """`data` as a chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Message:
    """One message as it arrives: `feed` returns whether it is whole now."""

    __slots__ = ("_left", "_tail", "head")

    def __init__(self) -> None:
        self.head = b""
        self._left: int | None = -1
        self._tail = b""

    @property
    def begun(self) -> bool:
        """Whether the head is whole."""
        return self._left != -1

    def feed(self, data: bytes, *, answer: bool = False) -> bool:
        """Take bytes. An `answer` without a length or chunks ends with its connection, which is not seen here."""
        if self._left == -1:
            self.head += data
            end = self.head.find(HEAD_END)
            if end < 0:
                return False
            data = self.head[end + 4 :]
            self.head = self.head[: end + 4]
            self._left = _length(self.head, none=None if answer else 0)
        if self._left is None:
            self._tail = (self._tail + data)[-5:] if len(data) < 5 else data[-5:]
            return self._tail == LAST_CHUNK
        self._left -= len(data)
        return self._left <= 0


def _length(head: bytes, none: int | None) -> int | None:
    """The length of the body; None where it is chunked."""
    fields = head.lower()
    at = fields.find(b"\r\ncontent-length:")
    if at >= 0:
        return int(fields[at + 17 : fields.index(b"\r\n", at + 17)])
    return None if b"\r\ntransfer-encoding:" in fields else none
