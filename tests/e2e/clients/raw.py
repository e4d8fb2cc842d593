"""HTTP clients with a parser of a few lines, as scripts have: only `data:` counts, and each must hold JSON.

An answer that is not streamed must be the upstream's to the byte.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Self

import aiohttp
import httpx
import requests
from clients.calls import Call, Client, Outcome
from clients.streams import PATHS, answer_text, plain_answer, request, text_of


class UnreadableLine(Exception):
    """A line that is neither a comment nor a field, or whose data is no JSON."""


class Parser:
    """Reads one answer line by line into an outcome."""

    def __init__(self, call: Call, outcome: Outcome) -> None:
        self._api, self._stream, self._outcome = call.api, call.stream, outcome

    def line(self, line: str) -> None:
        """One line, without its end."""
        field, colon, value = line.partition(":")
        if not self._stream:
            self._plain(line)
        elif field == "data" and value.strip() != "[DONE]":
            self._event(json.loads(value))
        elif field not in {"", "event", "data"} or (line and not colon):
            raise UnreadableLine(line)

    def _plain(self, line: str) -> None:
        if line.encode() == plain_answer(self._api):
            self._outcome.pieces.append(answer_text(self._api, json.loads(line)))
        elif line.startswith('{"'):
            self._outcome.error = json.loads(line)["error"]["message"]
        else:
            raise UnreadableLine(line)

    def _event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self._outcome.error = event["error"]["message"]
        else:
            self._outcome.pieces.append(text_of(self._api, event))


class _Raw(Client):
    apis: ClassVar[tuple[str, ...]] = ("chat", "completions", "responses", "messages")
    fails_on: ClassVar[tuple[str, ...]] = ("chat",)

    async def _call(self, call: Call, outcome: Outcome, idle: float) -> None:
        parser = Parser(call, outcome)
        async for line in self._lines(
            self._url + PATHS[call.api], request(call.api, call.model, stream=call.stream), idle
        ):
            parser.line(line)

    @abstractmethod
    def _lines(self, url: str, body: dict[str, Any], idle: float) -> AsyncIterator[str]: ...


class Httpx(_Raw):
    """httpx with one timeout for everything, as its default is."""

    name = "httpx"

    async def __aenter__(self) -> Self:
        self._client = await self._stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        return self

    async def _lines(self, url: str, body: dict[str, Any], idle: float) -> AsyncIterator[str]:
        async with self._client.stream("POST", url, json=body, timeout=idle) as response:
            async for line in response.aiter_lines():
                yield line


class Requests(_Raw):
    """requests, one thread for each call."""

    name = "requests"

    async def __aenter__(self) -> Self:
        self._threads = self._stack.enter_context(ThreadPoolExecutor(50))
        return self

    async def _lines(self, url: str, body: dict[str, Any], idle: float) -> AsyncIterator[str]:
        lines: asyncio.Queue[str | BaseException | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(item: str | BaseException | None) -> None:
            loop.call_soon_threadsafe(lines.put_nowait, item)

        def read() -> None:
            try:
                for line in _requests_lines(url, body, idle):
                    put(line)
                put(None)
            except requests.RequestException as error:
                put(error)

        reading = loop.run_in_executor(self._threads, read)
        while (line := await lines.get()) is not None:
            if isinstance(line, BaseException):
                raise line
            yield line
        await reading


def _requests_lines(url: str, body: dict[str, Any], idle: float) -> Iterator[str]:
    with requests.post(url, json=body, stream=True, timeout=idle) as response:
        response.encoding = "utf-8"
        yield from map(str, response.iter_lines(decode_unicode=True))


class Aiohttp(_Raw):
    """aiohttp with an idle timeout and no total one."""

    name = "aiohttp"

    async def __aenter__(self) -> Self:
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession())
        return self

    def _timeout(self, idle: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=None, sock_read=idle)

    async def _lines(self, url: str, body: dict[str, Any], idle: float) -> AsyncIterator[str]:
        async with self._session.post(url, json=body, timeout=self._timeout(idle)) as response:
            async for line in response.content:
                yield line.decode().rstrip("\n")


class AiohttpTotal(Aiohttp):
    """aiohttp as it comes, with a total timeout: no sign of life helps it."""

    name = "aiohttp-total"
    apis = ("chat",)
    fails_on = ()
    patient = False

    def _timeout(self, idle: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=idle)


class CurlFailed(Exception):
    """curl ended with an exit code: 18 for an answer that broke off, 28 for a timeout."""


class Curl(_Raw):
    """curl with its own kind of idle timeout: less than a byte a second for so many seconds, by a mean of several."""

    name = "curl"
    exact = False

    async def _lines(self, url: str, body: dict[str, Any], idle: float) -> AsyncIterator[str]:
        patience = ("--speed-limit", "1", "--speed-time", str(round(idle)))
        fields = ("-H", "Content-Type: application/json", "--data-binary", "@-")
        process = await asyncio.create_subprocess_exec(
            *("curl", "--silent", "--no-buffer", "--noproxy", "*", *patience, *fields, url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(body).encode())
        process.stdin.close()
        async for line in process.stdout:
            yield line.decode().rstrip("\n")
        if code := await process.wait():
            raise CurlFailed(code)
