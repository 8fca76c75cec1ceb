"""The page starts without internet access, under a strict policy, and asks for the key of the API once."""

from __future__ import annotations

from playwright.async_api import Page, expect

from tests.system.conftest import Open

KEY = "a-key-of-at-least-32-characters-1234"


async def test_it_starts(open_here: Open, page: Page) -> None:
    world = await open_here()
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
    await expect(page).to_have_title("Rollouts")
    await expect(page.get_by_role("link", name="Rollouts")).to_be_visible()


async def test_what_parses_html_is_refused(open_here: Open, page: Page) -> None:
    world = await open_here()
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
    refused = await page.evaluate("() => { try { document.body.innerHTML = '<b>x</b>' } catch (e) { return e.name } }")
    assert refused == "TypeError"
