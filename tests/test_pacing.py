"""What has come is parsed whole and in order, and in turns where it takes long."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from proxy.pacing import PIECE, Paced


class Transport(asyncio.Transport):
    """Notes whether it is to be read from."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.closing = True, False
        self.protocol: object = None

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing

    def get_protocol(self) -> asyncio.BaseProtocol:
        return cast("asyncio.BaseProtocol", self.protocol)


class Parser(Paced, asyncio.Protocol):
    """Keeps what it is given; each piece takes `seconds`."""

    def __init__(self, clock: Clock, seconds: float = 0.0) -> None:
        super().__init__()
        self.loop, self.wire = asyncio.get_running_loop(), Transport()
        self.transport = self.wire
        self.wire.protocol = self
        self.flow = FlowControl(self.wire)
        self.got: list[bytes] = []
        self._clock, self._seconds = clock, seconds

    def parse(self, data: bytes | memoryview) -> None:
        self.got.append(bytes(data))
        self._clock.now += self._seconds


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


DATA = bytes(range(256)) * (4 * PIECE // 256) + b"end"


async def test_little_is_parsed_at_once_and_as_it_is(clock: Clock) -> None:
    parser = Parser(clock, seconds=1)
    parser.data_received(b"a")
    parser.data_received(b"b")
    assert (parser.got, parser.wire.reading) == ([b"a", b"b"], True)


async def test_much_is_parsed_at_once_where_it_is_quick(clock: Clock) -> None:
    parser = Parser(clock)
    parser.data_received(DATA)
    assert b"".join(parser.got) == DATA
    assert max(map(len, parser.got)) == PIECE
    assert parser.wire.reading


async def test_others_run_between_pieces_that_take_long_and_nothing_is_read_meanwhile(clock: Clock) -> None:
    parser = Parser(clock, seconds=1)
    parser.data_received(DATA)
    for count in range(1, 5):
        assert (len(parser.got), parser.wire.reading) == (count, False)
        await asyncio.sleep(0)
    assert b"".join(parser.got) == DATA
    assert parser.wire.reading


async def test_what_comes_meanwhile_is_parsed_behind_it(clock: Clock) -> None:
    parser = Parser(clock, seconds=1)
    parser.data_received(DATA)
    parser.transport.resume_reading()  # as the application does when it wants more
    parser.data_received(b"more")
    assert not parser.wire.reading
    while not parser.wire.reading:  # noqa: ASYNC110 - a turn of the loop is what is counted
        await asyncio.sleep(0)
    assert b"".join(parser.got) == DATA + b"more"


async def test_reading_stays_paused_where_the_application_has_enough(clock: Clock) -> None:
    parser = Parser(clock, seconds=1)
    parser.data_received(DATA)
    parser.flow.pause_reading()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (b"".join(parser.got), parser.wire.reading) == (DATA, False)


async def test_of_a_client_that_has_left_nothing_more_is_parsed(clock: Clock) -> None:
    parser = Parser(clock, seconds=1)
    parser.data_received(DATA)
    parser.wire.closing = True
    for _ in range(5):
        await asyncio.sleep(0)
    assert (len(parser.got), parser.wire.reading) == (1, False)


async def test_the_rest_goes_to_the_protocol_that_has_taken_over(clock: Clock) -> None:
    class WebSocket(asyncio.Protocol):
        got = b""

        def data_received(self, data: bytes) -> None:
            self.got += data

    parser, socket = Parser(clock), WebSocket()
    genuine = parser.parse

    def parse(data: Any) -> None:
        genuine(data)
        parser.wire.protocol = socket

    parser.parse = parse  # type: ignore[method-assign]
    parser.data_received(DATA)
    assert parser.got[0] + socket.got == DATA
    assert len(parser.got) == 1
