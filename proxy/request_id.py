"""A name for each request, by which its log lines, its exemplar and llama-swap's own lines are found again.

A client's own `X-Request-Id` is kept if it is short and plain; for any other one, and where there is none, one is made.
It is put among the request's fields, so that it goes wherever they go: upstream, and to the disk with a job.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import replace

from proxy.inbound import Inbound, RawHeaders

FIELD = b"x-request-id"

_PLAIN = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,100}")
"""An exemplar may have 128 characters, its label's name included; and nothing in a log has to be escaped."""


def read_request_id(headers: RawHeaders) -> str:
    """The name that the request came with, or a new one."""
    given = next((value for name, value in headers if name == FIELD), b"").strip(b" \t")
    return given.decode() if _PLAIN.fullmatch(given) else secrets.token_hex(12)


def named(inbound: Inbound, request_id: str) -> Inbound:
    """The request with this name among its fields, once; a field that says so already stays where it is."""
    name = request_id.encode()
    if [value for field, value in inbound.headers if field == FIELD] == [name]:
        return inbound
    fields = [(field, value) for field, value in inbound.headers if field != FIELD]
    return replace(inbound, headers=[*fields, (FIELD, name)])
