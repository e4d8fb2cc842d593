"""The client's departure becomes ClientGone out of the block, and nothing else changes its meaning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext

import pytest
from starlette.types import Message

from proxy.errors import ClientGone, QueueTimeout
from proxy.watch import ClientWatch


class Client:
    """The receiving side of a request, as the server offers it."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.asked = 0
        self.messages: list[Message] = []

    async def receive(self) -> Message:
        self.asked += 1
        if self.messages:
            return self.messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture(autouse=True)
async def nobody_is_left_behind() -> AsyncIterator[None]:
    yield
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@contextmanager
def ends_with(error: type[Exception] | None) -> Iterator[None]:
    """The block ends with `error`, and whatever the watch did to this task, the next await is an ordinary one."""
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(error) if error else nullcontext():
        yield
    assert task.cancelling() == 0


async def test_a_client_that_leaves_ends_the_block_at_its_await(client: Client) -> None:
    reached = False
    asyncio.get_running_loop().call_soon(client.left.set)
    with ends_with(ClientGone):
        async with ClientWatch(client.receive):
            await asyncio.Event().wait()
            reached = True
    assert not reached


async def test_a_client_that_had_left_before_ends_the_block_at_its_first_await(client: Client) -> None:
    client.left.set()
    with ends_with(ClientGone):
        async with ClientWatch(client.receive):
            await asyncio.Event().wait()


async def test_the_departure_is_told_before_the_block_has_seen_it_and_only_a_departure(client: Client) -> None:
    told: list[str] = []
    with ends_with(None):
        async with ClientWatch(client.receive, left=lambda: told.append("nobody left")):
            await asyncio.sleep(0)
    client.left.set()
    with ends_with(ClientGone):
        async with ClientWatch(client.receive, left=lambda: told.append("left")):
            try:
                await asyncio.Event().wait()
            finally:
                told.append("ended")
    assert told == ["left", "ended"]


async def test_a_departure_that_cannot_be_told_ends_the_block_all_the_same(client: Client) -> None:
    def fail() -> None:
        raise RuntimeError

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    client.left.set()
    with ends_with(ClientGone):
        async with ClientWatch(client.receive, left=fail):
            await asyncio.Event().wait()


async def test_clean_up_inside_the_block_may_await_after_the_client_has_left(client: Client) -> None:
    cleaned = False
    client.left.set()
    with ends_with(ClientGone):
        async with ClientWatch(client.receive):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned = True
    assert cleaned


async def test_a_client_that_stays_changes_nothing(client: Client) -> None:
    with ends_with(None):
        async with ClientWatch(client.receive):
            await asyncio.sleep(0)
    client.left.set()
    await asyncio.sleep(0)


async def test_what_is_not_a_departure_is_read_over(client: Client) -> None:
    """A server may repeat the end of the body; only a disconnect counts."""
    client.messages = [{"type": "http.request", "body": b"", "more_body": False}] * 2
    client.left.set()
    with ends_with(ClientGone):
        async with ClientWatch(client.receive):
            await asyncio.Event().wait()
    assert client.asked == 3


async def test_an_error_of_the_block_stays_what_it_is(client: Client) -> None:
    with ends_with(QueueTimeout):
        async with ClientWatch(client.receive):
            await asyncio.sleep(0)
            raise QueueTimeout


async def test_an_error_of_the_clean_up_is_not_hidden_by_the_departure(client: Client) -> None:
    client.left.set()
    with ends_with(QueueTimeout):
        async with ClientWatch(client.receive):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise QueueTimeout from None


async def test_a_cancellation_from_elsewhere_passes(client: Client) -> None:
    """The server that gives up must not be mistaken for a client that left."""
    entered = asyncio.Event()

    async def exchange() -> None:
        async with ClientWatch(client.receive):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(exchange())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_from_elsewhere_wins_over_a_departure_in_the_same_tick(client: Client) -> None:
    watching = ClientWatch(client.receive)

    async def exchange() -> None:
        async with watching:
            await asyncio.Event().wait()

    task = asyncio.create_task(exchange())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.left.set()
    asyncio.get_running_loop().call_soon(task.cancel)  # after the watcher has been woken, before the block is
    with pytest.raises(asyncio.CancelledError):
        await task
    assert watching._gone


async def test_a_timeout_inside_the_block_still_times_out(client: Client) -> None:
    with ends_with(None):
        async with ClientWatch(client.receive):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await asyncio.Event().wait()


async def test_a_departure_inside_a_timeout_is_a_departure(client: Client) -> None:
    asyncio.get_running_loop().call_soon(client.left.set)
    with ends_with(ClientGone):
        async with ClientWatch(client.receive), asyncio.timeout(5):
            await asyncio.Event().wait()


async def test_nobody_else_reads_until_the_body_has_been_read(client: Client) -> None:
    """Two readers of one connection would take each other's messages."""
    body_read = asyncio.Event()
    client.left.set()
    with ends_with(ClientGone):
        async with ClientWatch(client.receive, body_read):
            for _ in range(5):
                await asyncio.sleep(0)
            assert client.asked == 0
            body_read.set()
            await asyncio.Event().wait()


async def test_from_a_moment_on_a_departure_changes_nothing(client: Client) -> None:
    held = False
    with ends_with(None):
        async with ClientWatch(client.receive, until=lambda: held):
            await asyncio.sleep(0)
            held = True
            client.left.set()
            for _ in range(5):
                await asyncio.sleep(0)
    assert client.asked == 1


async def test_until_that_moment_a_departure_is_one(client: Client) -> None:
    asyncio.get_running_loop().call_soon(client.left.set)
    with ends_with(ClientGone):
        async with ClientWatch(client.receive, until=lambda: False):
            await asyncio.Event().wait()


async def test_a_moment_that_comes_in_the_tick_of_the_departure_counts(client: Client) -> None:
    held = False
    with ends_with(None):
        async with ClientWatch(client.receive, until=lambda: held):
            await asyncio.sleep(0)
            client.left.set()
            held = True  # the watcher has been woken and has not run
            for _ in range(5):
                await asyncio.sleep(0)
