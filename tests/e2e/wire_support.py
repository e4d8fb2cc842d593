"""What the wire tests share: one scripted upstream, and proxies before it that live as long as the module's tests.

    async with Stack(directory) as stack:
        proxy = await stack.proxy(http_parser="h11")
        head, body = await once(proxy, lines("GET /v1/models HTTP/1.1", "Host: a"))
        assert stack.upstream.seen[0].target == b"/v1/models"

A test that starts its own would spend most of its time on that. What they have in common instead is `fresh` before and
`Proxy.drained` after each test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from harness import Proxy, RawClient, Upstream, answer

PARSERS = ("h11", "httptools")
EACH_PARSER = (pytest.param("h11", marks=pytest.mark.h11), "httptools")
"""What a test is parametrized by that must hold under both; the parser that is not the default has its own mark."""

MAX_BODY = 8 * 1024 * 1024
MAX_SPOOL = 12 * 1024 * 1024


class Stack:
    """The upstream and what stands before it."""

    def __init__(self, spool_dir: Path) -> None:
        self.spool_dir = spool_dir
        self.upstream = Upstream()
        self._proxies: dict[str, Proxy] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.upstream)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.gather(*(proxy.stop() for proxy in self._proxies.values()))
        await self._stack.aclose()

    async def proxy(self, **settings: Any) -> Proxy:
        """The proxy with these settings, started when it is first asked for."""
        key = repr(sorted(settings.items()))
        if key not in self._proxies:
            bounds = {"max_body": MAX_BODY, "max_spool": MAX_SPOOL, "spool_dir": str(self.spool_dir)}
            proxy = Proxy(self.upstream.url, **{**bounds, **settings})
            self._proxies[key] = await self._stack.enter_async_context(proxy)
        return self._proxies[key]

    def fresh(self) -> None:
        """Forget what was seen and what was scripted."""
        self.upstream.script = answer()
        self.upstream.by_model.clear()
        self.upstream.seen.clear()


def lines(*fields: str | bytes, body: bytes = b"") -> bytes:
    """A request from its request line, its fields and its body. Text is Latin-1, as fields are."""
    return b"\r\n".join([*(f.encode("latin-1") if isinstance(f, str) else f for f in fields), b"", body])


async def once(proxy: Proxy, data: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to these bytes, on a connection of their own; both empty where there is none."""
    async with RawClient(proxy.port) as client:
        client.send(data)
        try:
            head = await client.head()
        except (asyncio.IncompleteReadError, ConnectionError):
            return b"", b""
        while status_of(head) < 200:
            head = await client.head()
        return head, await body_after(client, head, is_head=data.startswith(b"HEAD "))


async def body_after(client: RawClient, head: bytes, *, is_head: bool = False) -> bytes:
    """The body that follows `head`, by its own framing; raises IncompleteReadError where it breaks off."""
    fields = dict(fields_of(head))
    if is_head or status_of(head) in {204, 304}:
        return b""
    async with asyncio.timeout(10):
        if b"chunked" in fields.get(b"transfer-encoding", b""):
            body = b""
            while size := int(await client.reader.readuntil(b"\r\n"), 16):
                body += (await client.reader.readexactly(size + 2))[:-2]
            await client.reader.readuntil(b"\r\n")
            return body
        if b"content-length" in fields:
            return await client.reader.readexactly(int(fields[b"content-length"]))
        return await client.reader.read()


def error_of(body: bytes) -> dict[str, Any]:
    """The error object of a refusal."""
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def status_of(head: bytes) -> int:
    return int(head.split(b" ", 2)[1])


def fields_of(head: bytes) -> list[tuple[bytes, bytes]]:
    """The fields of a head in order, names in lower case."""
    pairs = (line.partition(b":") for line in head.split(b"\r\n")[1:] if line)
    return [(name.lower(), value.strip()) for name, _, value in pairs]


def pieces(*parts: bytes) -> bytes:
    """A chunked body of these chunks."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def descriptors(proxy: Proxy) -> list[str]:
    """What the process has open, by name; sockets as `socket:[…]`."""
    assert proxy.process is not None
    directory = Path(f"/proc/{proxy.process.pid}/fd")
    found = list[str]()
    for entry in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(entry))
    return found


async def until(true: Callable[[], bool], within: float = 5.0) -> None:
    """Return once `true` is; for what another process does, of which no event tells."""
    async with asyncio.timeout(within):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def connections(proxy: Proxy, count: int = 1) -> AsyncIterator[list[RawClient]]:
    """Raw clients of the proxy."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(RawClient(proxy.port)) for _ in range(count)]
