"""One HTTP/1.1 request as bytes: its head, and its body held to the length that the head announces.

Everything else in this package decides *which* request is sent; this module makes sure that it is one. A line break in
a field, or a body one byte longer or shorter than announced, and the peer would read another request than the one that
was classified.
"""

from __future__ import annotations

import httpx

RawHeaders = list[tuple[bytes, bytes]]

LAST_CHUNK = b"0\r\n\r\n"


def request_head(method: bytes, target: bytes, headers: RawHeaders) -> bytes:
    """The head on the wire. A line break or space in a part of it would make it another request, or two."""
    lines = [b"%b %b HTTP/1.1" % (method, target), *(b"%b: %b" % field for field in headers), b"", b""]
    head = b"\r\n".join(lines)
    breaks = len(lines) - 1
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or lines[0].count(b" ") != 2:
        raise httpx.LocalProtocolError("the request holds a line break or a space where none may be")
    return head


class Framing:
    """The framing of one request body (RFC 9112, section 6), held to what its head announces."""

    def __init__(self, headers: RawHeaders) -> None:
        lengths = [value for name, value in headers if name.lower() == b"content-length"]
        self._chunked = any(name.lower() == b"transfer-encoding" for name, _ in headers)
        if len(lengths) + self._chunked > 1:
            raise httpx.LocalProtocolError("a request body has one length")
        self._left = int(lengths[0]) if lengths else 0

    def piece(self, data: bytes) -> bytes:
        """`data` as it goes on the wire. As a chunk (section 7.1) it must not be empty, for that one ends the body."""
        if self._chunked:
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        self._left -= len(data)
        if self._left < 0:
            raise httpx.LocalProtocolError("the request body is longer than its Content-Length")
        return data

    def end(self) -> bytes:
        """What follows the last piece."""
        if self._left:
            raise httpx.LocalProtocolError("the request body is shorter than its Content-Length")
        return LAST_CHUNK if self._chunked else b""
