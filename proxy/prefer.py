"""What a client prefers (RFC 7240): to be told no in time, or to be answered at once and served later."""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.inbound import RawHeaders

_PREFERENCE = re.compile(rb"""\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*(?:=\s*("(?:[^"\\]|\\.)*"|[^\s,;"]*))?[^,]*""")


@dataclass(frozen=True, slots=True)
class Preferences:
    """The preferences that mean something here. `wait` is seconds; a whole number of them, as RFC 7240 has it."""

    wait: int | None = None
    respond_async: bool = False


def read_preferences(headers: RawHeaders) -> Preferences:
    """The preferences of a request. What is not understood is passed over; of two of a name the first counts
    (RFC 7240, section 2)."""
    found: dict[bytes, bytes] = {}
    for field, value in headers:
        if field == b"prefer":
            for name, given in _PREFERENCE.findall(value):
                found.setdefault(name.lower(), given.strip(b'"'))
    wait = found.get(b"wait", b"")
    return Preferences(int(wait[:9]) if wait.isdigit() else None, b"respond-async" in found)
