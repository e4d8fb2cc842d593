"""On what terms a request waits, read from the request itself.

A retry is known by what makes it the same request to the model behind: who sends it, to what, and its body. No other
field counts, for SDKs count their tries and date their requests in some. What clients say of their own patience is
read leniently: it is absent, NOT_GIVEN or nonsense often enough.
"""

from __future__ import annotations

import hashlib
import re

from proxy.inbound import Inbound
from proxy.prefer import read_preferences
from proxy.tickets import Terms

TIMEOUT_FIELDS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
"""How the SDKs of OpenAI and Anthropic tell their timeout: seconds. The first is the closer one: between two bytes."""

ATTEMPT_FIELD = b"x-stainless-retry-count"

_SECONDS = re.compile(rb"\d{1,9}(\.\d{1,9})?")
_COUNT = re.compile(rb"\d{1,6}")


def read_terms(inbound: Inbound, client: str, digest: bytes) -> Terms:
    """The terms of a request by `client`, whose body has this digest."""
    attempt = inbound.first(ATTEMPT_FIELD) or b""
    return Terms(
        identity=_identity(inbound, client, digest),
        attempt=int(attempt) if _COUNT.fullmatch(attempt) else 0,
        wait=read_preferences(inbound.headers).wait,
        client_timeout=_client_timeout(inbound),
    )


def _identity(inbound: Inbound, client: str, digest: bytes) -> bytes:
    parts = (client.encode("utf-8", "surrogateescape"), inbound.method.encode(), inbound.raw_path, inbound.query)
    lengths = b"".join(len(part).to_bytes(8, "big") for part in parts)
    return hashlib.sha256(lengths + b"".join(parts) + digest).digest()


def _client_timeout(inbound: Inbound) -> float | None:
    values = (inbound.first(name) or b"" for name in TIMEOUT_FIELDS)
    seconds = (float(value) for value in values if _SECONDS.fullmatch(value))
    return next((each for each in seconds if each > 0), None)
