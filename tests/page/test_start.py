"""The page starts without internet access, under a strict policy, and asks for the key of the API once."""

from __future__ import annotations

import re

from playwright.async_api import Page, expect
from rollout_server.edge.api_keys import entry_of

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


async def test_it_asks_until_the_key_can_be_sent(open_here: Open, page: Page) -> None:
    world = await open_here(api_keys=(entry_of("alice", KEY),))
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
    field = page.get_by_label("API key")
    await page.set_viewport_size({"width": 390, "height": 844})
    box = await page.get_by_role("dialog").bounding_box()
    assert box
    assert box["x"] >= 8
    await field.fill("ключ")
    for _ in range(4):
        await page.keyboard.press("Escape")
    await expect(field).to_have_value("ключ")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("This cannot be a key")
    assert await page.evaluate("sessionStorage.length") == 0
    await field.fill(KEY)
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("There are no rollouts yet")).to_be_visible()


async def test_fragments_that_are_no_links_of_the_page(open_here: Open, page: Page) -> None:
    world = await open_here()
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/#/rollouts/%")
    await expect(page.get_by_text("There are no rollouts yet")).to_be_visible()
    await page.evaluate("location.hash = '#/rollouts/gone'")
    await expect(page.get_by_role("alert")).to_contain_text("gone")
    await page.get_by_role("link", name="Skip to the content").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("main")).to_be_focused()
    await expect(page).to_have_url(re.compile(re.escape("#/rollouts/gone") + "$"))
    await page.evaluate("location.hash = '#main'")
    await expect(page.get_by_role("alert")).to_contain_text("gone")
    await page.get_by_role("link", name="Rollouts").click()
    await expect(page.get_by_text("There are no rollouts yet")).to_be_visible()
    await expect(page.locator("main")).to_be_focused()
