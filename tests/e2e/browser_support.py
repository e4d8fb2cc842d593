"""A headless Chromium for the tests of the page: Debian's, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe  # type: ignore[import-untyped]
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

CHROMIUM = shutil.which("chromium")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)")

SLACK_MS = 10_000
"""What the page has for each step on a busy machine."""


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser."""
    expect.set_options(timeout=SLACK_MS)
    async with async_playwright() as playwright:
        # No sandbox: in containers the tests are root, and nothing foreign is opened.
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Tab:
    """A page, and what its console complained of."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(SLACK_MS)
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    async def violations(self) -> list[str]:
        """What axe finds: rule, and where."""
        found: dict[str, Any] = (await Axe().run(self.page)).response
        return [f"{one['id']}: {[node['html'] for node in one['nodes']]}" for one in found["violations"]]

    async def sideways(self) -> int:
        """By how many pixels the page is wider than its window."""
        wider: int = await self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return wider


async def open_tab(browser: Browser, url: str, **options: Any) -> Tab:
    """The live page of the proxy at `url`, in a browser context of its own."""
    context = await browser.new_context(base_url=url, **options)
    tab = Tab(await context.new_page())
    await tab.page.goto("/-/")
    return tab
