"""The list of rollouts: counts, filters, search, pages, live rows, keys and the keyboard, in Chromium against a real server."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from playwright.async_api import Locator, Page, Route, expect
from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.edge.api_keys import entry_of
from rollout_server.runtime.registry import pages
from rollout_server.settings import Settings

from tests.gateway.rest.test_real_server import body, finished, start
from tests.page.conftest import FETCHES, asked_in
from tests.support.agents import Gated, Idle, Quoting
from tests.system.conftest import Open, Service

ALICE, BOB = "key-of-alice-0123456789-0123456789", "key-of-bob-0123456789-0123456789"
BIDI = "\u202e\u2066"
MARKUP = "<img src=x onerror=alert(1)>"


class Failing(Agent):
    """Fails at once."""

    name = "failing"

    async def play(self, run: Run) -> None:
        """Raise an exception."""
        raise LookupError("nothing there")


async def show(page: Page, world: Service, fragment: str = "#/") -> None:
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/{fragment}")


def rows(page: Page) -> Locator:
    """The rollouts of the table, without the row of headings."""
    return page.get_by_role("table", name="Rollouts, newest first").locator("tbody tr")


def ids(page: Page) -> Locator:
    return rows(page).locator("td.live-id")


async def test_rows_change_in_place(open_here: Open, page: Page) -> None:
    gated = Gated()
    world = await open_here(agents=[gated, Calculator(), Failing()])
    await finished(world, await start(world, "sum", agent="calculator", metadata={"ground_truth": "16"}, group_id="g"))
    waiting = await start(world, "waiting", agent="gated")
    await show(page, world)
    await expect(ids(page)).to_have_text(["waiting", "sum"])
    await expect(rows(page).first).to_contain_text("running")
    for text in ("completed", "calculator", "91", "stop"):
        await expect(rows(page).last).to_contain_text(text)
    await expect(rows(page).last.get_by_role("link", name="g", exact=True)).to_have_attribute("href", "#/groups/g")
    link = rows(page).first.get_by_role("link")
    await expect(link).to_have_attribute("href", f"#/rollouts/{waiting}")
    # The focus is in one row and the selection in another one; rows arrive above, and the first row finishes.
    await link.focus()
    await rows(page).last.locator("td.live-id span").evaluate("cell => getSelection().selectAllChildren(cell)")
    await finished(world, await start(world, "failed", agent="failing"))
    gated.gate.set()
    await expect(ids(page)).to_have_text(["failed", "waiting", "sum"])
    await expect(rows(page).nth(1)).to_contain_text("completed")
    await expect(link.and_(page.locator(":focus")).or_(page.locator(":focus"))).to_have_attribute(
        "href", f"#/rollouts/{waiting}"
    )
    assert await page.evaluate("getSelection().toString()") == "sum"
    failed = rows(page).first
    await expect(failed).to_contain_text("environment: ")
    await expect(failed.locator("td.live-end")).to_have_attribute("title", re.compile("the server's log"))
    figures = page.get_by_role("group", name="Server")
    await expect(figures).to_contain_text(re.compile(r"running\s*0 of"))
    await expect(figures).to_contain_text(re.compile(r"finished\s*3 in \d+ s"))
    await expect(figures).to_contain_text(re.compile(r"failed\s*1 33 %"))
    await expect(figures).to_contain_text(re.compile(r"rollouts/min\s*\d"))


async def test_a_hidden_tab_reads_nothing(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Idle()])
    await page.add_init_script(FETCHES)
    await page.clock.install()
    await show(page, world)
    await expect(page.get_by_text("There are no rollouts yet")).to_be_visible()
    await expect(page.get_by_text("rollout start --prompt")).to_be_visible()
    hide = "hidden => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden }); "
    hide += "document.dispatchEvent(new Event('visibilitychange')) }"
    await page.evaluate(hide, True)
    await start(world, "r")
    assert await asked_in(page, 10) == []
    await page.evaluate(hide, False)
    await expect(ids(page)).to_have_text(["r"])


async def test_filters_are_in_the_link(open_here: Open, page: Page) -> None:
    gated = Gated()
    world = await open_here(agents=[gated, Idle(), Failing()])
    gated_uid, *_ = [
        await start(world, f"of {agent}", agent=agent, group_id=f"group/{agent}")
        for agent in ("gated", "idle", "failing")
    ]
    await show(page, world)
    await expect(ids(page)).to_have_text(["of failing", "of idle", "of gated"])
    state, agents = page.get_by_label("State"), page.get_by_label("Agent")
    await state.select_option("finished")
    await expect(ids(page)).to_have_text(["of failing", "of idle"])
    await expect(page).to_have_url(re.compile(re.escape("#/?state=finished") + "$"))
    await expect(agents.get_by_role("option")).to_have_text(["any agent", "failing", "gated", "idle"])
    await agents.select_option("idle")
    await expect(ids(page)).to_have_text(["of idle"])
    await page.go_back()
    await expect(ids(page)).to_have_text(["of failing", "of idle"])
    await page.get_by_label("Failure class").select_option("environment")
    await expect(ids(page)).to_have_text(["of failing"])
    await expect(page).to_have_url(re.compile(re.escape("#/?state=finished&failure_class=environment") + "$"))
    await page.reload()
    await expect(state).to_have_value("finished")
    await expect(ids(page)).to_have_text(["of failing"])
    await page.get_by_role("button", name="Clear", exact=True).click()
    await expect(page.get_by_label("Search")).to_be_focused()
    await expect(ids(page)).to_have_count(3)
    # Letters are one step of the history.
    await page.get_by_label("Search").press_sequentially("of ga", delay=150)
    await expect(ids(page)).to_have_text(["of gated"])
    await expect(page).to_have_url(re.compile(r"#/\?text=of\+ga$"))
    await page.go_back()
    await expect(ids(page)).to_have_count(3)
    await page.get_by_label("Group").fill("group/idle")
    await expect(ids(page)).to_have_text(["of idle"])
    await page.get_by_label("Group").fill("")
    await page.get_by_label("Search").fill(gated_uid[-8:])
    await expect(ids(page)).to_have_text(["of gated"])
    await show(page, world, "#/?agent=gone")
    await expect(page.get_by_text("No rollout matches these filters.")).to_be_visible()
    await expect(agents).to_have_value("gone")
    await page.get_by_role("button", name="Clear the filters").click()
    await expect(ids(page)).to_have_count(3)
    await show(page, world, "#/?state=asleep")
    await expect(page.get_by_role("alert")).to_contain_text("state")


async def test_pages_lead_both_ways(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Idle()])
    for number in range(120):
        await start(world, str(number))
    await show(page, world)
    newer, older = page.get_by_role("button", name="Newer"), page.get_by_role("button", name="Older")
    await expect(page.get_by_role("status").filter(has_text="Page 1: 50 rollouts")).to_be_visible()
    await expect(newer).to_be_disabled()
    await older.click()
    await expect(ids(page).first).to_have_text("69")
    await start(world, "120")
    async with page.expect_event("requestfinished", lambda request: "/v1/rollouts?" in request.url):
        pass  # the next poll
    await expect(ids(page).first).to_have_text("69")
    await older.click()
    await expect(ids(page)).to_have_text([str(number) for number in range(19, -1, -1)])
    await expect(older).to_be_disabled()
    # The page is kept on the way back from a rollout, and over a reload.
    await rows(page).first.get_by_role("link").click()
    await expect(page).to_have_url(re.compile("#/rollouts/"))
    await page.go_back()
    await expect(ids(page).first).to_have_text("19")
    await page.reload()
    await expect(ids(page).first).to_have_text("19")
    await newer.click()
    await newer.click()
    await expect(ids(page).first).to_have_text("120")
    await expect(rows(page)).to_have_count(50)
    # What one reads stays where it is while rows arrive above it.
    await page.evaluate("scrollTo(0, 300)")
    name = await ids(page).nth(30).inner_text()
    read = ids(page).get_by_text(name, exact=True)
    before = await read.evaluate("cell => cell.getBoundingClientRect().top")
    await start(world, "121")
    await expect(ids(page).first).to_have_text("121")
    assert abs(await read.evaluate("cell => cell.getBoundingClientRect().top") - before) < 2
    # A token that does not belong to the filters leads to the first page.
    await page.evaluate("history.replaceState({ tokens: ['', 'wrong'] }, '')")
    await page.reload()
    await expect(ids(page).first).to_have_text("121")


async def test_a_long_search_goes_on_and_can_be_stopped(
    open_here: Open, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request examines only two rollouts."""
    monkeypatch.setattr(pages, "SLICE", 0)
    monkeypatch.setattr(pages, "_SLICES", 2)
    gated = Gated()
    world = await open_here(agents=[Idle(), gated])
    for number in range(60):
        await start(world, "needle" if number % 29 == 1 else f"r{number}", agent="gated" if number == 30 else "idle")
    await show(page, world, "#/?text=needle")
    await expect(ids(page)).to_have_text(["needle"] * 3)
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    # What is new is found without another search through all rollouts, and what changes is shown.
    await start(world, "new needle")
    gated.gate.set()
    await expect(ids(page)).to_have_text(["new needle", *["needle"] * 3])
    await expect(rows(page).filter(has_text="running")).to_have_count(0)
    await page.route("**/v1/rollouts?*", _slowly)
    await page.get_by_label("Search").fill("hay")
    await expect(page.get_by_text("Searching older rollouts; found 0 so far.")).to_be_visible()
    await page.get_by_role("button", name="Stop").click()
    await expect(page.get_by_text("Stopped before the end; found 0.")).to_be_visible()
    await page.unroute_all()
    await page.get_by_role("button", name="Continue").click()
    await expect(page.get_by_text("No rollout matches these filters.")).to_be_visible()


async def _slowly(route: Route) -> None:
    await asyncio.sleep(0.2)
    await route.continue_()


async def test_nothing_is_said_of_a_list_before_it_was_read(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Idle()])
    answer = asyncio.Event()

    async def away(route: Route) -> None:
        await answer.wait()
        await route.abort()

    await page.route("**/v1/rollouts?*", away)
    async with page.expect_request("**/v1/rollouts?*"):
        await show(page, world)
    buttons = {name: page.get_by_role("button", name=name, exact=True) for name in ("← Newer", "Older →", "Clear")}
    for button in buttons.values():
        await expect(button).to_be_disabled()
    for name in ("Stop", "Continue"):
        await expect(page.get_by_role("button", name=name)).to_be_hidden()
    await expect(page.get_by_role("table")).to_be_hidden()
    answer.set()
    await expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    await expect(page.get_by_text("Page 1")).to_have_count(0)


async def test_numbers_keep_their_whole_part(open_here: Open, page: Page) -> None:
    world = await open_here()
    await show(page, world)
    numbers = [0.75, 1 / 3, 1e-17, 12.3456, 12345.67, -123456789.123, 12345678]
    shown = await page.evaluate(
        "async (numbers) => { const { decimal } = await import('page/dom.js'); return numbers.map(decimal) }", numbers
    )
    assert shown == ["0.75", "0.3333", "1e-17", "12.35", "12,346", "-123,456,789", "12,345,678"]


async def test_it_goes_on_when_the_server_is_back(page: Page) -> None:
    settings: dict[str, Any] = {"_env_file": None, "host": "127.0.0.1", "grpc_port": 0, "drain_seconds": 0}
    async with Server([Idle()], Settings(http_port=0, **settings)) as server:
        port = server.http_port
        await page.goto(f"http://127.0.0.1:{port}/")
        await expect(page.get_by_text("There are no rollouts yet")).to_be_visible()
    await expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    async with Server([Idle()], Settings(http_port=port, **settings)):
        await expect(page.get_by_role("alert")).to_have_count(0)


async def test_the_keyboard_suffices(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Idle()])
    uids = [await start(world, str(number)) for number in range(3)][::-1]
    await show(page, world)
    await expect(rows(page)).to_have_count(3)
    focused = page.locator(":focus")
    for key, uid in (("j", uids[0]), ("j", uids[1]), ("ArrowDown", uids[2]), ("j", uids[2]), ("k", uids[1])):
        await page.keyboard.press(key)
        await expect(focused).to_have_attribute("href", f"#/rollouts/{uid}")
    await page.keyboard.press("/")
    await expect(page.get_by_role("searchbox", name="Search")).to_be_focused()
    await page.keyboard.type("j/k")
    await expect(page.get_by_role("searchbox", name="Search")).to_have_value("j/k")
    await page.keyboard.press("ControlOrMeta+a")
    await page.keyboard.press("Delete")
    await expect(rows(page)).to_have_count(3)
    # Every control has a name and is reached with Tab.
    await page.locator("main").focus()
    names = list[str]()
    for _ in range(8):
        await page.keyboard.press("Tab")
        names.append(await focused.evaluate("e => (e.labels?.[0] ?? e).textContent"))
    assert [name.removesuffix("any statequeuedrunningfinished") for name in names[:1]] == ["State"]
    assert [name[:5] for name in names[1:5]] == ["Agent", "Group", "Failu", "Searc"]
    assert names[5:8] == [uid.rpartition("-")[2] for uid in uids]
    await page.keyboard.press("k")
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(re.compile("#/rollouts/"))


async def test_each_caller_sees_its_own(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Idle()], api_keys=(entry_of("alice", ALICE), entry_of("bob", BOB)))
    for key, name in ((ALICE, "alices"), (BOB, "bobs")):
        world.http.headers["authorization"] = f"Bearer {key}"
        await start(world, name)
    await show(page, world)
    for key, name in ((ALICE, "alices"), (BOB, "bobs")):
        await page.get_by_label("API key").fill(key)
        await page.get_by_role("button", name="Continue").click()
        await expect(ids(page)).to_have_text([name])
        await page.evaluate("sessionStorage.clear()")
        await page.reload()


async def test_hostile_texts_stay_text(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Quoting(), Idle()])
    hostile = (MARKUP + BIDI + "x" * 256)[:256]
    quote = [{"role": "user", "content": f"{MARKUP}{BIDI}\n" + "e" * 900}]
    await start(world, "plain", agent="idle")
    changes: dict[str, Any] = {"agent": "quoting", "group_id": hostile, "labels": {hostile: hostile}, "messages": quote}
    await finished(world, await start(world, hostile, metadata={"by": "finish"}, **changes))
    reply = await world.http.post("/v1/rollouts", json=body("x", world.trainer.url, agent=MARKUP))
    assert reply.status_code == 404
    for width in (1400, 1280, 1024, 700, 400, 380):
        await page.set_viewport_size({"width": width, "height": 900})
        await show(page, world, "#/?agent=%3Cimg%20src%3Dx%3E" if width == 400 else "#/")
        await expect(page.get_by_text("No rollout matches") if width == 400 else rows(page).first).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        heights = await rows(page).evaluate_all("rows => rows.map(row => row.offsetHeight)")
        assert not heights or max(heights) - min(heights) <= 1
        for reason in await rows(page).locator("td.live-end").all():
            assert await reason.evaluate("cell => cell.clientWidth") >= 60
        assert await page.locator("main img").count() == 0
    await page.set_viewport_size({"width": 1400, "height": 900})
    await show(page, world)
    shown = hostile.replace(BIDI, "⟨U+202E⟩⟨U+2066⟩")
    await expect(ids(page).first).to_have_text(shown)
    await expect(rows(page).first.locator("td.live-end")).to_contain_text(MARKUP)
    await rows(page).first.get_by_role("link").last.click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(f"Group {shown}")
