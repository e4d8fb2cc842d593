"""As true as a wire: generated requests, sent to the upstream directly and through the proxy, arrive alike.

Every request and every answer is compared with its twin that went without the proxy, by what docs/design.md says of
"passes through" and nothing else. What a server must refuse is generated too, and must be refused under both parsers
for the same reason, before anything of it has come to the upstream; the table at the end of each run counts both.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from random import Random

import pytest
import pytest_asyncio
from answers_support import FLAWED_ANSWERS, Dialogue, dialogue
from differential_support import (
    CODING,
    Came,
    Got,
    Recorder,
    answered,
    passed,
    sent_directly,
    sent_in_dialogue,
    without_ours,
)
from known_support import table
from requests_support import FLAWS, ONLY_BY, Request
from wire_support import EACH_PARSER, Stack, descriptors, until

from harness import Proxy

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("spool"))
    stack.upstream = Recorder()
    async with stack:
        yield stack


@pytest_asyncio.fixture(params=EACH_PARSER, loop_scope="module")
async def proxy(request: pytest.FixtureRequest, stack: Stack) -> AsyncIterator[Proxy]:
    """The proxy under each parser; drained after each test."""
    recorder = stack.upstream
    assert isinstance(recorder, Recorder)
    recorder.script = recorder._planned
    recorder.seen.clear()
    # An answer of random bytes is no whole chat: its end would be marked, under the default.
    proxy = await stack.proxy(http_parser=request.param, flag_incomplete=False)
    yield proxy
    await proxy.drained(recorder)


class Comparison:
    """Sends dialogues both ways, compares, and counts."""

    def __init__(self, recorder: Recorder, proxy: Proxy, parser: str) -> None:
        self._recorder, self._proxy, self._parser = recorder, proxy, parser
        self.counts = Counter[str]()

    async def of(self, talk: Dialogue) -> None:
        """Both ways, and every difference is an AssertionError."""
        recorder = self._recorder
        recorder.plan = {request.number: answer for request, answer in zip(talk.requests, talk.answers, strict=True)}
        fine = [request for request in talk.requests if not self._refused(request)]
        usable = [request for request in fine if recorder.plan[request.number].flaw is None]
        answers = {request.number: await sent_directly(recorder.port, request) for request in usable}
        requests = {came.number: came for came in self._came()}
        got = await sent_in_dialogue(self._proxy.port, talk)
        came = self._came()
        assert [each.number for each in came] == [request.number for request in fine]
        for each in came:
            if each.number in requests:
                check_request(requests[each.number], each)
        for request, each_got in zip(talk.requests, got, strict=True):
            self._check_answer(request, each_got, answers.get(request.number))

    def _refused(self, request: Request) -> bool:
        return request.flaw is not None and ONLY_BY.get(request.flaw, self._parser) == self._parser

    def _came(self) -> list[Came]:
        """What has come to the upstream since this was asked."""
        came = [each for each in self._recorder.seen if isinstance(each, Came)]
        self._recorder.seen.clear()
        return came

    def _check_answer(self, request: Request, got: Got, direct: Got | None) -> None:
        flaw = self._recorder.plan[request.number].flaw
        if self._refused(request):
            self.counts[f"refused: {request.flaw}"] += 1
            assert got.status == (431 if request.flaw == "a head of 70 KB" else 400)
        elif direct is None:
            self.counts[f"502: {flaw}"] += 1
            assert got.status == 502
            assert b'"upstream_failed"' in got.body or request.is_head
        else:
            self.counts["passed"] += 1
            assert without_ours(got) == answered(direct, request)


def check_request(direct: Came, proxied: Came) -> None:
    """What came through the proxy is what came directly."""
    line, fields = passed(direct)
    assert proxied.head.split(b"\r\n")[0] == line
    came = [(name, value.lower() if name == CODING else value) for name, value in proxied.fields]
    assert [field for field in came if field[0] != b"x-request-id"] == fields
    assert len(came) == len(fields) + 1, "it has been given a name"
    assert proxied.body == direct.body
    assert not proxied.trailers


async def compared(stack: Stack, proxy: Proxy, parser: str, seed: str, count: int) -> Counter[str]:
    """At least `count` generated requests both ways; how many passed, and how many were refused for what."""
    recorder = stack.upstream
    assert isinstance(recorder, Recorder)
    comparison, number = Comparison(recorder, proxy, parser), 0
    while number < count:
        talk = dialogue(Random(f"{seed} {number}"), number, tuple(FLAWS))
        try:
            async with asyncio.timeout(20):
                await comparison.of(talk)
        except (AssertionError, TimeoutError, asyncio.IncompleteReadError) as error:
            error.add_note(f"in the dialogue of Random('{seed} {number}'):\n{shown(talk)}")
            raise
        number += len(talk.requests)
    assert comparison.counts.total() == number
    table(
        f"{parser}, {number} requests", ("count", "what"), [(n, what) for what, n in sorted(comparison.counts.items())]
    )
    return comparison.counts


def shown(talk: Dialogue) -> str:
    """The heads of a dialogue, and how its bodies begin."""
    how = f"{'at once' if talk.pipelined else 'one by one'}, cut at {talk.cuts}"
    pairs = zip(talk.requests, talk.answers, strict=True)
    lines = (f"{asked.head[:600]!r} {asked.body[:50]!r}\n  {told.wire[:300]!r}" for asked, told in pairs)
    return "\n".join([how, *lines])


async def test_generated_requests_and_answers_pass_as_if_sent_directly(
    proxy: Proxy, stack: Stack, request: pytest.FixtureRequest
) -> None:
    counts = await compared(stack, proxy, request.node.callspec.params["proxy"], "a", 300)
    assert counts["passed"] > 200


@pytest.mark.slow
async def test_two_thousand_requests_and_answers_pass_as_if_sent_directly(
    proxy: Proxy, stack: Stack, request: pytest.FixtureRequest
) -> None:
    parser: str = request.node.callspec.params["proxy"]
    before = len(descriptors(proxy))
    counts = await compared(stack, proxy, parser, "b", 2000)
    assert counts["passed"] > 1500
    assert {f"refused: {flaw}" for flaw in FLAWS if ONLY_BY.get(flaw, parser) == parser} <= set(counts)
    assert {f"502: {flaw}" for flaw in FLAWED_ANSWERS} <= set(counts)
    await until(lambda: len(descriptors(proxy)) <= before + 5)
