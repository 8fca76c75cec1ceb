"""The live page in a real headless Chromium, in front of a real service."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Error, Page, Playwright, async_playwright, expect

from tests.system.conftest import Open, open_world

# The background requests of a browser with an account at its vendor; none of them can succeed in a test.
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")

#: For actions and expectations. Nothing that works waits for it, however slow the machine is.
TIMEOUT_MS = 30_000
expect.set_options(timeout=TIMEOUT_MS)


#: Counts the requests of the page: `asked` are their paths, `pending` is how many have no response yet.
FETCHES = """
  globalThis.asked = [];
  globalThis.pending = 0;
  const real = fetch;
  globalThis.fetch = async (path, options) => {
    asked.push(path);
    pending += 1;
    return real(path, options).finally(() => (pending -= 1));
  };
"""


def _chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


async def launch(playwright: Playwright) -> Browser:
    """Start Chromium of the system, or else that of Playwright. Raises playwright's `Error` if there is none."""
    # A sandboxed Chromium refuses to run as root, as in a container of CI.
    arguments = [*_QUIET, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    return await playwright.chromium.launch(executable_path=_chromium(), args=arguments)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests of the page on one event loop: the browser that they share belongs to it."""
    for item in items:
        if pytest_asyncio.is_async_test(item) and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Chromium without a page. Each test opens a context of its own in it."""
    async with async_playwright() as playwright:
        try:
            opened = await launch(playwright)
        except Error as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"needs Chromium, which `make browser` installs: {error.message.splitlines()[0]}")
        yield opened
        await opened.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A new page. The test fails if the page raises an exception, or if its policy blocks something."""
    context = await browser.new_context(viewport={"width": 1400, "height": 900}, locale="en-GB", timezone_id="UTC")
    context.set_default_timeout(TIMEOUT_MS)
    opened, problems = await context.new_page(), list[str]()
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if "Content Security" in message.text else None)
    yield opened
    await context.close()
    assert not problems


@pytest_asyncio.fixture(loop_scope="session")
async def open_here() -> AsyncIterator[Open]:
    """`await open_here(agents=..., model=..., **settings)`: a service that stops after the test."""
    async with AsyncExitStack() as stack:

        async def opened(**options: Any) -> Any:
            return await open_world(stack, **options)

        yield opened


async def asked_in(page: Page, seconds: int) -> list[str]:
    """The paths that the page requests in the next seconds. The page has `page.clock` installed, and the script `FETCHES`."""
    await page.wait_for_function("pending === 0")
    await page.evaluate("asked.length = 0")
    for _ in range(seconds):
        await page.clock.run_for(1000)
        # What is requested again at once, as soon as it is refused, is requested now.
        await page.wait_for_timeout(50)
    found: list[str] = await page.evaluate("asked")
    return found
