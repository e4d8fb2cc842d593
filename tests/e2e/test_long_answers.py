"""Cases 22 and 23: nothing ends what runs, however long it takes or is silent. See tests/cases.md.

The upstream, the proxy and its client share a loop whose clock jumps to the next timer, so any timer that would end an
answer does so here as it would after minutes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from wire_support import EACH_PARSER

from harness import CHAT, SSE, TTS, InProcess, RawClient, Script, Seen, Upstream, answer, chunk, event, hang, slow
from test_lock_with_simulator import in_virtual_time

GAP = 310.0
"""Seconds: longer than what common clients and proxies allow for silence, or for all of an answer (300)."""

DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def silent_between_events(seconds: float) -> Script:
    """Two events with a long silence between them."""

    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(event(0)))
        await asyncio.sleep(seconds)
        writer.write(chunk(event(1)) + DONE)

    return script


CASES: list[Any] = [
    pytest.param({**CHAT, "stream": False}, hang(GAP, answer(b'{"ok":true}')), b'{"ok":true}', id="22-head"),
    pytest.param(TTS, hang(GAP, answer(b"audio")), b"audio", id="22-audio"),
    pytest.param(CHAT, silent_between_events(GAP), b"data: [DONE]", id="22-gap"),
    pytest.param(CHAT, slow(int(GAP), 1.0), b"data: [DONE]", id="23-stream"),
]


@pytest.mark.parametrize("parser", EACH_PARSER)
@pytest.mark.parametrize(("request_body", "script", "end"), CASES)
def test_case_22_and_23_an_answer_may_take_minutes_and_be_silent_for_minutes(
    request_body: dict[str, Any], script: Script, end: bytes, parser: str
) -> None:
    async def exchange() -> None:
        began = asyncio.get_running_loop().time()
        async with (
            Upstream(script) as upstream,
            InProcess(upstream.url, http_parser=parser) as proxy,
            RawClient(proxy.port) as client,
        ):
            path = "/v1/audio/speech" if request_body is TTS else "/v1/chat/completions"
            client.post(path, request_body)
            assert (await client.head(within=2 * GAP)).startswith(b"HTTP/1.1 200")
            got = await client.until(end, within=2 * GAP)
            assert asyncio.get_running_loop().time() - began > GAP - 1
            if script is CASES[3].values[1]:
                assert got.count(b'"chat.completion.chunk"') == GAP
            assert len(upstream.seen) == 1
            await proxy.idle()

    in_virtual_time(exchange())
