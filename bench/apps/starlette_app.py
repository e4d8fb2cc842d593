"""The proxy that one writes in an hour: Starlette and httpx.AsyncClient, streaming both ways."""

import os

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

client = httpx.AsyncClient(
    base_url=os.environ["BENCH_UPSTREAM"],
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    timeout=60,
)


async def forward(request: Request) -> StreamingResponse:
    headers = [(name, value) for name, value in request.headers.raw if name != b"connection"]
    outgoing = client.build_request(request.method, request.url.path, headers=headers, content=request.stream())
    answer = await client.send(outgoing, stream=True)
    fields = {name: value for name, value in answer.headers.items() if name != "transfer-encoding"}
    return StreamingResponse(answer.aiter_raw(), answer.status_code, fields, background=BackgroundTask(answer.aclose))


app = Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])
