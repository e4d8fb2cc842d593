"""fastapi-proxy-lib before the upstream that BENCH_UPSTREAM names, without limits of its own."""

import os

import httpx
from fastapi_proxy_lib.fastapi.app import reverse_http_app

client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None, max_keepalive_connections=None), timeout=60)
app = reverse_http_app(client, base_url=os.environ["BENCH_UPSTREAM"] + "/")
