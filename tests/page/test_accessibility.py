"""What assistive technology is told: Chromium's accessibility tree of each kind of page."""

from __future__ import annotations

from typing import Any

from playwright.async_api import Page, expect
from rollout_server.edge.api_keys import entry_of
from rollout_server.testing.script import Script

from tests.page.rollouts import TOUR, Tour, link, play
from tests.system.conftest import Open

CONTROLS = frozenset(
    {
        *("button", "link", "textbox", "searchbox", "combobox", "checkbox", "radio", "switch", "slider", "spinbutton"),
        *("tab", "menuitem", "option", "treeitem", "listbox", "gridcell", "dialog", "progressbar", "scrollbar"),
    }
)
LANDMARKS = frozenset({"banner", "main", "navigation"})
NAMED = frozenset({"img", "image", "figure", "table", "grid", "tree", "tablist", "dialog", "region", "heading"})


async def tree(page: Page) -> list[dict[str, Any]]:
    """The nodes that assistive technology sees."""
    session = await page.context.new_cdp_session(page)
    nodes: list[dict[str, Any]] = (await session.send("Accessibility.getFullAXTree"))["nodes"]
    await session.detach()
    return [node for node in nodes if not node["ignored"]]


def unnamed(nodes: list[dict[str, Any]]) -> list[str]:
    """The controls and groups of things that have no name, and the focusable nodes whose role says nothing."""
    found = []
    for node in nodes:
        role, name = node["role"]["value"], node.get("name", {}).get("value", "").strip()
        properties = {each["name"]: each["value"].get("value") for each in node.get("properties", ())}
        if role in CONTROLS | NAMED and not name:
            found.append(f"{role} without a name: {node}")
        if properties.get("focusable") and role in ("generic", "none", "paragraph", "Section"):
            found.append(f"focusable {role}: {node}")
    return found


async def test_every_control_has_a_name(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR), group_id="fruit")
    home = f"http://127.0.0.1:{world.server.http_port}/"
    for address, heading in ((link(world, uid), "tour"), (home, ""), (f"{home}#/groups/fruit", "fruit")):
        await page.goto(address)
        await expect(page.get_by_role("heading", level=1)).to_contain_text(heading)
        await expect(page.get_by_text("completed").first).to_be_attached()
        nodes = await tree(page)
        assert unnamed(nodes) == []
        assert {node["role"]["value"] for node in nodes} >= LANDMARKS


async def test_the_question_for_a_key_has_names_and_takes_the_focus(open_here: Open, page: Page) -> None:
    world = await open_here(api_keys=(entry_of("alice", "a-key-of-at-least-32-characters-x"),))
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
    await expect(page.get_by_label("API key")).to_be_focused()
    assert unnamed(await tree(page)) == []
