"""Real clients that have to wait: each is patient for less time than the queue takes, and than the model needs to load.

What they are asked, and what the upstream does, is told in `clients/stage.py`; each test reads one part of what came of
it. The clients are told never to try again, so that it is the first answer that counts.
"""

from __future__ import annotations

import shutil
from typing import TypeAlias

import pytest
import pytest_asyncio
from clients.calls import Call, Client, Outcome
from clients.node import OpenAINode, Unavailable
from clients.python_sdks import AnthropicPython, OpenAIPython
from clients.raw import Aiohttp, AiohttpTotal, Curl, Httpx, Requests
from clients.stage import play
from clients.streams import BROKEN, TEXT

from proxy.errors import QueueTimeout, UpstreamFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")

Played: TypeAlias = dict[str, dict[Call, Outcome]]

SDKS = {"openai-python", "anthropic-python", "openai-node"}

BROKEN_OFF = {
    "httpx": "RemoteProtocolError",
    "requests": "ChunkedEncodingError",
    "aiohttp": "ClientPayloadError",
    "curl": "CurlFailed 18",
}
"""What a client without SDK raises at the cut that follows an error event."""

GIVES_UP = {
    "APITimeoutError",
    "APIConnectionTimeoutError",
    "ReadTimeout",
    "SocketTimeoutError",
}
"""What they raise when their patience ends."""

FAST: tuple[type[Client], ...] = (
    OpenAIPython,
    AnthropicPython,
    Httpx,
    Requests,
    Aiohttp,
    AiohttpTotal,
    *([Curl] if shutil.which("curl") else []),
)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["python", pytest.param("node", marks=pytest.mark.slow)]
)
async def played(request: pytest.FixtureRequest) -> Played:
    try:
        return await play(FAST if request.param == "python" else (OpenAINode,))
    except Unavailable as reason:
        pytest.skip(str(reason))


def of_model(played: Played, model: str, *, stream: bool = True) -> dict[tuple[str, str], Outcome]:
    """What came of the calls for `model`, by client and API; of patient clients alone."""
    return {
        (client, call.api): outcome
        for client, outcomes in played.items()
        if client != AiohttpTotal.name
        for call, outcome in outcomes.items()
        if call.model == model and call.stream == stream
    }


def assert_failed(outcomes: dict[tuple[str, str], Outcome], reason: str) -> None:
    """Each client raised, and each program could read why."""
    assert {where: reason in outcome.error for where, outcome in outcomes.items()} == dict.fromkeys(outcomes, True)
    for (client, _), outcome in outcomes.items():
        assert outcome.text == ""
        if client in SDKS:
            assert outcome.kind in {"APIError", "APIStatusError", "InternalServerError"}
        else:
            assert outcome.kind == BROKEN_OFF[client]


async def test_case_68_a_stream_that_waited_is_whole_in_every_client(played: Played) -> None:
    outcomes = of_model(played, "told")
    assert {where: (outcome.text, outcome.error) for where, outcome in outcomes.items()} == dict.fromkeys(
        outcomes, (TEXT, "")
    )


async def test_without_keepalives_every_one_of_them_gives_up(played: Played) -> None:
    """So it is the keep-alives that made the others wait. (curl is not asked: it notices only after some seconds.)"""
    outcomes = of_model(played, "silent")
    assert {where: outcome.text for where, outcome in outcomes.items()} == dict.fromkeys(outcomes, "")
    assert {where: outcome.kind in GIVES_UP for where, outcome in outcomes.items()} == dict.fromkeys(outcomes, True)


async def test_a_wait_that_was_too_long_raises_with_the_reason(played: Played) -> None:
    assert_failed(of_model(played, "hasty"), QueueTimeout.default_message)


async def test_an_upstreams_error_after_the_early_head_raises_with_its_message(played: Played) -> None:
    assert_failed(of_model(played, "broken"), BROKEN)


async def test_an_upstream_that_dies_after_the_early_head_raises(played: Played) -> None:
    assert_failed(of_model(played, "dead"), UpstreamFailed.default_message)


async def test_an_upstream_that_dies_in_mid_stream_raises_after_what_it_said(played: Played) -> None:
    for outcome in of_model(played, "cut").values():
        assert outcome.kind
        assert 0 < len(outcome.text) < len(TEXT)
        assert TEXT.startswith(outcome.text)


async def test_a_plain_answer_is_untouched(played: Played) -> None:
    outcomes = of_model(played, "plain", stream=False)
    assert {where: (outcome.text, outcome.error) for where, outcome in outcomes.items()} == dict.fromkeys(
        outcomes, (TEXT, "")
    )


async def test_a_plain_refusal_keeps_its_status(played: Played) -> None:
    for (client, _), outcome in of_model(played, "hasty", stream=False).items():
        assert QueueTimeout.default_message in outcome.error
        if client in SDKS:
            assert outcome.kind in {"InternalServerError", "OverloadedError", "ServiceUnavailableError"}


async def test_a_total_timer_is_helped_by_nothing(played: Played) -> None:
    """aiohttp's default is one, of five minutes; docs/clients.md says what to do."""
    if AiohttpTotal.name not in played:
        pytest.skip("aiohttp is not among these clients")
    outcomes = played[AiohttpTotal.name]
    assert {outcome.kind for call, outcome in outcomes.items() if call.model == "told"} == {"TimeoutError"}


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
async def test_curl_is_among_them(played: Played) -> None:
    assert (Curl.name in played) == (OpenAINode.name not in played)
