"""One incoming request as the proxy reads it, before anything is decided.

Everything that llama-swap could read in two ways is settled here: the target is in origin form, a field that decides
something has one value, the credential is the one that llama-swap would take. Who the client is, for the bounds, is
its key where keys are configured and its address otherwise; what a client says of its own address counts only where
it comes through a trusted proxy.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address

from starlette.types import Scope

from proxy.errors import AmbiguousHeader, BadTarget, Unauthorized

RawHeaders = list[tuple[bytes, bytes]]

LONGEST_ADDRESS = 64
"""Characters: more than any address has, and little to remember."""

DECIDING_FIELDS = (b"authorization", b"content-type", b"content-length")
"""Fields whose first and last value could be read by different parties, to different ends."""


@dataclass(frozen=True, slots=True)
class Inbound:
    """Method, target and fields as they came; names of fields are in lower case."""

    method: str
    raw_path: bytes
    query: bytes
    headers: RawHeaders
    peer: str
    scheme: str

    @property
    def target(self) -> bytes:
        """The request target in origin form, byte for byte."""
        return self.raw_path + b"?" + self.query if self.query else self.raw_path

    def first(self, name: bytes) -> bytes | None:
        """The first value of a field, which is the one that llama-swap reads."""
        return next((value for key, value in self.headers if key == name), None)

    def has(self, name: bytes, token: bytes) -> bool:
        """Whether the comma-separated field `name` holds `token`."""
        return any(token in _tokens(value) for key, value in self.headers if key == name)

    @property
    def wants_websocket(self) -> bool:
        """Whether this is a WebSocket handshake (RFC 6455, section 4.1)."""
        return self.has(b"upgrade", b"websocket") and self.has(b"connection", b"upgrade")

    def check_fields(self) -> None:
        """Raise AmbiguousHeader where a deciding field came with two values."""
        for name in DECIDING_FIELDS:
            if len({value for key, value in self.headers if key == name}) > 1:
                raise AmbiguousHeader(f"The field {name.decode()} was sent twice with different values; send it once.")

    def content_length(self) -> int | None:
        """The announced length of the body in bytes."""
        value = self.first(b"content-length")
        return int(value) if value is not None and value.isdigit() else None


def read_scope(scope: Scope) -> Inbound:
    """The request of an ASGI scope. Raises BadTarget for a target that is no path or a host that is not one,
    and AmbiguousHeader for a transfer coding other than chunked.

    A target in absolute form (RFC 9112, section 3.2.2) is read as llama-swap reads it: its path counts, and its
    authority takes the place of Host. Whitespace around a value is no part of it (section 5.1), yet a server may have
    left it there; `Content-Length: 2 ` must not be read as no length.
    """
    raw_path: bytes = scope["raw_path"]
    headers: RawHeaders = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
    _check_message(headers, scope["http_version"])
    if not raw_path.startswith(b"/"):
        raw_path, authority = _origin_form(raw_path)
        headers = [(b"host", authority), *((name, value) for name, value in headers if name != b"host")]
    client = scope.get("client")
    peer = client[0] if client else ""
    return Inbound(scope["method"], raw_path, scope["query_string"], headers, peer, scope["scheme"])


def _check_message(headers: RawHeaders, version: str) -> None:
    """What one server checks by itself and another does not, and the next may take differently."""
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (not hosts and version == "1.1"):
        raise BadTarget("A request must have exactly one Host field.")  # RFC 9112, section 3.2
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and codings != [b"chunked"]:
        raise AmbiguousHeader("The only transfer coding that is understood is chunked, once.")  # section 6.1


def _origin_form(raw_path: bytes) -> tuple[bytes, bytes]:
    scheme, separator, rest = raw_path.partition(b"://")
    authority, slash, path = rest.partition(b"/")
    if not separator or scheme.lower() not in {b"http", b"https"} or not authority or b"@" in authority:
        raise BadTarget
    return slash + path or b"/", authority


def _tokens(value: bytes) -> set[bytes]:
    return {token.strip().lower() for token in value.split(b",")}


def credential(inbound: Inbound) -> str:
    """The key a request carries, or "": Basic password before Bearer before x-api-key, as llama-swap reads it."""
    scheme, space, value = (inbound.first(b"authorization") or b"").partition(b" ")
    if space and scheme.lower() == b"bearer" and value:
        return value.decode("latin-1")
    if space and scheme.lower() == b"basic":
        try:
            _, colon, password = base64.b64decode(value, validate=True).partition(b":")
        except binascii.Error:
            colon = password = b""
        if colon and password:
            return password.decode("latin-1")
    return (inbound.first(b"x-api-key") or b"").decode("latin-1")


class Keys:
    """The configured keys, compared in constant time: by their digests, which are all of one length."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys if key]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, inbound: Inbound) -> str:
        """A short name for the key that `inbound` carries; raises Unauthorized when it carries none of ours."""
        given = hashlib.sha256(credential(inbound).encode("latin-1")).digest()
        found = [digest for digest in self._digests if hmac.compare_digest(digest, given)]
        if not found:
            raise Unauthorized
        return "key-" + given.hex()[:16]


class Trust:
    """Which peers may speak for others (`trusted_proxies`)."""

    def __init__(self, networks: Iterable[IPv4Network | IPv6Network]) -> None:
        self._networks = list(networks)
        self._remembered = lru_cache(1024)(self._trusts)

    def trusts(self, address: str) -> bool:
        """Whether `address` is one of the trusted proxies."""
        return len(address) <= LONGEST_ADDRESS and self._remembered(address)

    def _trusts(self, address: str) -> bool:
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped  # how a socket for both families shows an IPv4 peer
        return any(parsed in network for network in self._networks)

    def client_address(self, inbound: Inbound) -> str:
        """The nearest address that no trusted proxy vouches to be another proxy."""
        address = inbound.peer
        hops = [value.decode("latin-1") for key, value in inbound.headers if key == b"x-forwarded-for"]
        for hop in reversed([hop.strip() for value in hops for hop in value.split(",")]):
            if not self.trusts(address) or not hop:
                break
            address = hop
        return address

    def forwarded(self, inbound: Inbound) -> RawHeaders:
        """The X-Forwarded fields for llama-swap: a trusted peer's are continued, any other's replaced."""
        trusted = self.trusts(inbound.peer)
        earlier = [value for key, value in inbound.headers if key == b"x-forwarded-for" and trusted]
        proto = inbound.first(b"x-forwarded-proto") if trusted else None
        host = inbound.first(b"x-forwarded-host") if trusted else None
        return [
            (b"x-forwarded-for", b", ".join([*earlier, inbound.peer.encode()])),
            (b"x-forwarded-proto", proto or inbound.scheme.encode()),
            (b"x-forwarded-host", host or inbound.first(b"host") or b""),
        ]
