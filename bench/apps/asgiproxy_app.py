"""asgiproxy before the upstream that BENCH_UPSTREAM names, without limits of its own."""

import os

import aiohttp
from asgiproxy.config import BaseURLProxyConfigMixin, ProxyConfig
from asgiproxy.context import ProxyContext
from asgiproxy.simple_proxy import make_simple_proxy_app

ENDLESS = 1_000_000


class Config(BaseURLProxyConfigMixin, ProxyConfig):
    upstream_base_url = os.environ["BENCH_UPSTREAM"]


class Context(ProxyContext):
    @property
    def session(self):
        if not self._session:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        return self._session


app = make_simple_proxy_app(Context(Config(), max_concurrency=ENDLESS))
