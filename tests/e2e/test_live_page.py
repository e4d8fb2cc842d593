"""The live page in a real browser: what a person sees of the queue, and that nobody else can press its buttons."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from browser_support import Tab, chromium, needs_chromium, open_tab
from playwright.async_api import Browser, expect

from harness import InProcess, Proxy, RawClient, Upstream, after, answer, clients
from proxy.history import MINUTES, Minute

pytestmark = [needs_chromium, pytest.mark.slow]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as upstream:
        yield upstream


async def hold_and_wait(proxy: Proxy, upstream: Upstream, end: asyncio.Event, queue: list[RawClient]) -> None:
    """The first speech request has the GPU until `end`, the others wait in their order."""
    upstream.script = after(end)
    for count, client in enumerate(queue):
        client.tts()
        await proxy.until(waiters=count, holders=1)


async def test_a_request_appears_moves_up_and_can_be_cancelled(browser: Browser, upstream: Upstream) -> None:
    end = asyncio.Event()
    async with Proxy(upstream.url) as proxy, clients(proxy.port, 3) as three:
        tab = await open_tab(browser, proxy.url)
        page, waiters = tab.page, tab.page.locator("#waiters tr")
        await expect(page.locator("#summary")).to_have_text("0 on the GPU, 0 waiting")
        begun = time.monotonic()
        await hold_and_wait(proxy, upstream, end, three)
        await expect(page.locator("#holders tr")).to_contain_text("tts-a")
        await expect(waiters).to_have_count(2)
        print(f"three requests were sent and shown within {time.monotonic() - begun:.2f} s")
        await expect(waiters.nth(1).locator("td").first).to_have_text("2")
        number = (await proxy.queue())["waiters"][0]["id"]
        await page.get_by_role("button", name=f"Cancel request {number}").press("Enter")
        await expect(page.get_by_role("status")).to_have_text(f"Request {number} was cancelled.")
        refused = await three[1].answer()
        assert (refused.status, refused.json["error"]["code"]) == (503, "cancelled")
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
        await expect(waiters).to_have_count(1)
        await expect(waiters.locator("td").first).to_have_text("1")
        await expect(page.locator("#finished tr").first).to_contain_text("cancelled")
        await expect(page.locator("#waiters-heading")).to_be_focused()
        end.set()
        assert (await three[2].answer()).status == 200
        await expect(page.locator("#summary")).to_have_text("0 on the GPU, 0 waiting")
        assert tab.complaints == []
        await proxy.drained(upstream)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
async def test_nothing_stands_in_anyones_way(browser: Browser, upstream: Upstream, scheme: str, width: int) -> None:
    end = asyncio.Event()
    long = "a-model-whose-name-is-longer-than-any-phone-is-wide-" * 3
    async with Proxy(upstream.url) as proxy, clients(proxy.port, 4) as four:
        await hold_and_wait(proxy, upstream, end, four[:3])
        four[3].post("/v1/chat/completions", {"model": long, "messages": []})
        await proxy.until(waiters=3)
        size = {"width": width, "height": 800}
        tab = await open_tab(browser, proxy.url, color_scheme=scheme, viewport=size)
        await expect(tab.page.get_by_role("button")).to_have_count(3)
        await expect(tab.page.locator("tbody tr")).to_have_count(4)
        assert await tab.violations() == []
        assert await tab.sideways() <= 0
        assert tab.complaints == []


async def test_without_javascript_it_shows_the_same(browser: Browser, upstream: Upstream) -> None:
    end = asyncio.Event()
    async with Proxy(upstream.url) as proxy, clients(proxy.port, 2) as two:
        await hold_and_wait(proxy, upstream, end, two)
        tab = await open_tab(browser, proxy.url, java_script_enabled=False)
        await expect(tab.page.locator("#waiters tr")).to_contain_text("tts-a")
        await expect(tab.page.get_by_role("button")).to_have_count(0)
        await expect(tab.page.get_by_text("Load it again")).to_be_visible()
        await expect(tab.page.locator("#hour")).to_contain_text("1 turn")


async def test_case_77_a_name_that_looks_like_a_page_is_only_text(browser: Browser, upstream: Upstream) -> None:
    end = asyncio.Event()
    name = '<img src=x onerror="alert(1)">"\'\n{}'
    async with Proxy(upstream.url) as proxy, clients(proxy.port, 2) as two:
        await hold_and_wait(proxy, upstream, end, two[:1])
        by_script = await open_tab(browser, proxy.url)
        two[1].post("/v1/chat/completions", {"model": name, "messages": []})
        await proxy.until(waiters=1)
        by_server = await open_tab(browser, proxy.url, java_script_enabled=False)
        for tab in (by_script, by_server):
            await expect(tab.page.locator("#waiters tr")).to_have_count(1)
            assert await tab.page.locator("#waiters td[data-column=Model]").text_content() == name
            assert await tab.page.locator("img").count() == 0
            assert tab.complaints == []


async def test_a_page_of_another_origin_cannot_cancel(browser: Browser, upstream: Upstream) -> None:
    """Its requests arrive with the browser's place on the loopback, as this machine's own."""
    end, evil = asyncio.Event(), answer(b"<p>evil</p>", "200 OK")
    async with Proxy(upstream.url) as proxy, clients(proxy.port, 2) as two, Upstream(evil) as other:
        await hold_and_wait(proxy, upstream, end, two)
        number = (await proxy.queue())["waiters"][0]["id"]
        tab = Tab(await browser.new_page())
        await tab.page.goto(other.url)
        for fields in ({"Content-Type": "application/json"}, {"Content-Type": "text/plain"}, {}):
            outcome = await tab.page.evaluate(
                """([url, headers, body]) => fetch(url, {method: "POST", headers, body, mode: headers["Content-Type"]
                === "application/json" ? "cors" : "no-cors"}).then((answer) => answer.type, (error) => "blocked")""",
                [f"{proxy.url}/-/cancel", fields, f'{{"id": {number}}}'],
            )
            assert outcome in {"blocked", "opaque"}
        assert len((await proxy.queue())["waiters"]) == 1
        assert await proxy.metric('gpu_lease_rejected_total{reason="action_forbidden"}') == 2


async def test_it_connects_again_when_the_proxy_is_back(browser: Browser, upstream: Upstream) -> None:
    async with Proxy(upstream.url) as first:
        tab = await open_tab(browser, first.url)
        await expect(tab.page.locator("#summary")).to_have_text("0 on the GPU, 0 waiting")
        port = first.port
    await expect(tab.page.get_by_role("status")).to_have_text("The connection is lost; trying again.")
    async with Proxy(upstream.url, listen_port=port) as second, clients(second.port, 2) as two:
        await hold_and_wait(second, upstream, asyncio.Event(), two)
        await expect(tab.page.locator("#waiters tr")).to_have_count(1)
        await expect(tab.page.get_by_role("status")).to_have_text("Connected again.")


async def test_the_page_asks_for_a_key_and_works_with_it(browser: Browser, upstream: Upstream) -> None:
    end = asyncio.Event()
    async with Proxy(upstream.url, api_keys=["secret"]) as proxy, clients(proxy.port, 2) as two:
        upstream.script = after(end)
        proxy.client.headers["x-api-key"] = "secret"
        for count, client in enumerate(two):
            client.tts("x-api-key: secret")
            await proxy.until(waiters=count, holders=1)
        credentials = {"username": "anyone", "password": "secret"}
        tab = await open_tab(browser, proxy.url, http_credentials=credentials)
        await expect(tab.page.locator("#waiters td[data-column=Client]")).to_contain_text("key-")
        assert "secret" not in await tab.page.content()
        await tab.page.get_by_role("button").click()
        assert (await two[1].answer()).json["error"]["code"] == "cancelled"


LONGEST_TASK = """() => {
  window.longest = 0;
  new PerformanceObserver((list) => {
    for (const task of list.getEntries()) window.longest = Math.max(window.longest, task.duration);
  }).observe({ type: "longtask", buffered: true });
}"""


async def test_with_two_hundred_waiters_it_stays_responsive(browser: Browser, upstream: Upstream) -> None:
    end = asyncio.Event()
    room = 300
    async with (
        Proxy(upstream.url, max_queue=room, max_queue_per_client=room) as proxy,
        clients(proxy.port, 201) as many,
    ):
        upstream.script = after(end)
        for client in many:
            client.tts()
        await proxy.until(waiters=200, holders=1, within=20)
        tab = await open_tab(browser, proxy.url)
        await tab.page.evaluate(LONGEST_TASK)
        rows = tab.page.locator("#waiters tr")
        await expect(tab.page.get_by_role("button")).to_have_count(200)
        await expect(rows).to_have_count(200)
        last = rows.nth(199)
        number = await last.locator("td").nth(1).text_content()
        await last.get_by_role("button").click()
        await expect(tab.page.get_by_role("status")).to_have_text(f"Request {number} was cancelled.")
        await expect(rows).to_have_count(199)
        longest = await tab.page.evaluate("window.longest")
        print(f"longest task of the page: {longest} ms")
        assert longest < 1000
        assert tab.complaints == []


def an_hour() -> list[Minute]:
    """Chat, with speech every few minutes, as it is on an evening at home."""
    first = int(time.monotonic() // 60) - MINUTES + 1
    minutes = []
    for index in range(MINUTES):
        speech = 18.0 * (index % 7 == 3) + 31.0 * (index % 11 == 5)
        embed = 9.0 * (index % 5 == 1)
        longest = speech * 1.3 + index % 4
        minutes.append(
            Minute(first + index, 3, longest, 2, {"llm": 55.0 - speech - embed, "tts": speech, "embed": embed})
        )
    return minutes


async def test_the_picture_of_the_docs(browser: Browser, upstream: Upstream, tmp_path: Path) -> None:
    """With PAGE_PNG set it is written there: `PAGE_PNG=docs/images/page.png ./scripts/test -m slow -k picture`."""
    end = asyncio.Event()
    async with InProcess(upstream.url) as proxy, clients(proxy.port, 7) as several:
        for target, model in (("/v1/chat/completions", "qwen3-8b"), ("/v1/audio/speech", "kokoro")) * 2:
            await proxy.client.post(target, json={"model": model, "messages": [], "input": "x"})
        proxy.app.history._minutes.extend(an_hour())
        upstream.script = after(end)
        for index, client in enumerate(several):
            if index in {0, 3, 4}:
                client.post("/v1/audio/speech", {"model": "kokoro", "input": "x"})
            else:
                client.post("/v1/chat/completions", {"model": "qwen3-8b", "messages": []})
            await proxy.until(partial(_are_waiting, proxy, index))
        fields = {"prefer": "respond-async"}
        await proxy.client.post("/v1/audio/speech", json={"model": "kokoro", "input": "x"}, headers=fields)
        tab = await open_tab(browser, f"http://127.0.0.1:{proxy.port}", viewport={"width": 900, "height": 600})
        await expect(tab.page.get_by_role("button")).to_have_count(7)
        path = os.environ.get("PAGE_PNG") or tmp_path / "page.png"
        picture = await tab.page.screenshot(path=path, full_page=True)
        assert 10_000 < len(picture) < 200_000
        end.set()


def _are_waiting(proxy: InProcess, count: int) -> bool:
    return proxy.app.leases.lock.waiting_count == count
