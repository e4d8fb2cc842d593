"""Who and what may come in: keys, trusted peers, the size of bodies, and the fields that go on to llama-swap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from proxy.body import Spool
from proxy.errors import KeyMissing, Unauthorized
from proxy.forward import request_headers
from proxy.inbound import Inbound, Keys, RawHeaders, Trust


@dataclass(frozen=True, slots=True)
class Entrance:
    """Who and what may come in.

    `keys` are the proxy's own: where there are any, `upstream_key` takes the place of the client's credential. Else
    `llama_swap_keys` count, which llama-swap checks again: the credential passes.
    """

    keys: Keys
    trust: Trust
    spool: Spool
    max_body: int
    body_timeout: float
    llama_swap_keys: Callable[[], tuple[str, ...]]
    upstream_key: Callable[[], str | None]

    def identify(self, inbound: Inbound, *, keyless: bool) -> str:
        """Who the request counts against. Raises Unauthorized or KeyMissing where a key is needed and there is none."""
        if self.keys and not keyless:
            return self.keys.check(inbound)
        if not keyless and (keys := _keys(self.llama_swap_keys())):
            try:
                return keys.check(inbound)
            except Unauthorized:
                raise KeyMissing from None
        return self.trust.client_address(inbound)

    @property
    def keyed(self) -> bool:
        """Whether requests on model routes need a key."""
        return bool(self.keys) or any(self.llama_swap_keys())

    def headers(self, inbound: Inbound) -> RawHeaders:
        """The fields for llama-swap."""
        return request_headers(inbound, self.trust.forwarded(inbound), self.upstream_key(), keyed=bool(self.keys))


@lru_cache(1)
def _keys(keys: tuple[str, ...]) -> Keys:
    return Keys(keys)
