"""What assistive technology is told: Chromium's accessibility tree of each kind of page."""

from __future__ import annotations

from typing import Any

from playwright.async_api import Page, Route, expect
from rollout_server.edge.api_keys import entry_of
from rollout_server.testing.script import Fault, FaultKind, Script

from tests.page.rollouts import TOUR, Tour, link, play, slow
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


async def test_live_updates_leave_the_focus_where_it_is(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "long", Script(lines=slow(0.4, *TOUR[:1] * 60)))
    await page.route("**/tokens?*", _without_texts)
    await page.goto(link(world, uid, "?segment=0&token=3"))
    completions = page.locator('.messages-card[data-kind="completion"]')
    await expect(page.locator("#tokens-active")).to_be_visible()
    names = ("copy ids", "Try again", "turn 1, engine", "Copy the uid", "Copy the JSON", "Cancel the rollout")
    places = (".messages-card", ".tokens-strip", "summary")
    targets = [page.get_by_role("button", name=name) for name in names] + [page.locator(place) for place in places]
    for target in targets:
        await target.first.focus()
        focused = await page.evaluate_handle("document.activeElement")
        await expect(completions.nth(await completions.count() + 1)).to_be_attached()
        assert await focused.evaluate("(element) => element === document.activeElement"), str(target)
    # The rows of segments are drawn again, and the focus goes to the new row.
    await page.get_by_role("tab", name="Segments").click()
    await page.locator(".tree-row").focus()
    await expect(completions.nth(await completions.count() + 1)).to_be_attached()
    await expect(page.locator(".tree-row")).to_be_focused()


async def _without_texts(route: Route) -> None:
    await route.fulfill(status=400, json={"error": {"code": "", "message": "no texts"}})


async def test_a_rollout_is_cancelled_and_a_long_text_opened_with_the_keyboard(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    long = "\n".join(f"line {number}" for number in range(100))
    uid = await play(world, "stuck", Script(lines=(Fault(kind=FaultKind.SILENCE),)), question=long)
    await page.goto(link(world, uid))
    more, text = (
        page.get_by_role("button", name="Show all 100 lines"),
        page.locator(".messages-card .content-text").nth(1),
    )
    await more.focus()
    await page.keyboard.press("Enter")
    await expect(text).to_contain_text("line 99")
    await expect(text).to_be_focused()
    cancel = page.get_by_role("button", name="Cancel the rollout")
    await cancel.focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("textbox", name="Reason")).to_be_focused()
    assert unnamed(await tree(page)) == []
    await page.keyboard.press("Escape")
    await expect(cancel).to_be_focused()
    assert await cancel.evaluate("(button) => getComputedStyle(button).outlineStyle") == "solid"
    await page.keyboard.press("Enter")
    await page.keyboard.press("ControlOrMeta+a")
    await page.keyboard.type("by keyboard")
    await page.keyboard.press("Enter")
    await expect(page.locator(".rollout-why")).to_contain_text("by keyboard")


#: The least contrast of a token's text with its background (WCAG 2.2, 1.4.3), by the classes of the token.
CONTRASTS = """(classes) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
    const [red, green, blue] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrast = (names) => {
    const cell = document.createElement("span");
    cell.className = `tokens-cell ${names}`;
    document.querySelector(".tokens-cells").append(cell);
    const { color, backgroundColor } = getComputedStyle(cell);
    const [dark, light] = [luminance(color), luminance(backgroundColor)].sort((a, b) => a - b);
    cell.remove();
    return (light + 0.05) / (dark + 0.05);
  };
  return Object.fromEntries(classes.map((names) => [names, contrast(names)]));
}"""


async def test_tokens_have_enough_contrast(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR))
    kinds = ("model", "prompt", "environment", "closing", "masked", "stale")
    colours = [f"tokens-by-author tokens-{kind}" for kind in kinds]
    colours += [f"tokens-hue-{hue}" for hue in range(6)] + [f"tokens-heat-{heat}" for heat in range(10)]
    await page.goto(link(world, uid))
    await expect(page.locator(".tokens-cells").first).to_be_visible()
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        found = await page.evaluate(CONTRASTS, [*colours, *(f"{each} tokens-id" for each in colours)])
        assert {names: round(contrast, 2) for names, contrast in found.items() if contrast < 4.5} == {}, scheme
