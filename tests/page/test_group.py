"""The page of a group: rewards side by side, what teaches nothing, refills, and groups that are only a label."""

from __future__ import annotations

import re
from typing import Any

from playwright.async_api import Locator, Page, expect
from rollout_server import Agent, RewardResult, Run
from rollout_server.calculator import Calculator

from tests.gateway.rest.test_real_server import body, finished, start
from tests.support.agents import Gated
from tests.support.bodies import QUESTION
from tests.system.conftest import Open, Service

HOSTILE = "<img src=x onerror=alert(1)>\u202e\u2066/../" + "g" * 210


class Graded(Agent):
    """Rewards each rollout by its index; index 2 gets none, and index 3 of the first try fails."""

    name = "graded"

    async def play(self, run: Run) -> None:
        """Take one turn."""
        await run.sample()
        if run.request.rollout_id.endswith("/3"):
            raise LookupError("nothing there")

    async def reward(self, run: Run) -> RewardResult:
        """Return half the index as the reward."""
        index = run.request.group_index or 0
        return RewardResult(reward=None if index == 2 else index / 2, scores={"index": index, "format": 0.5})


async def start_group(world: Service, group_id: str, **changes: Any) -> None:
    reply = await world.http.post("/v1/groups", json=body(group_id, world.trainer.url, group_id=group_id, **changes))
    assert reply.status_code == 201, reply.text


def _shown(text: str) -> str:
    """How the page writes control characters."""
    return text.replace("\u202e", "⟨U+202E⟩").replace("\u2066", "⟨U+2066⟩")


async def show(page: Page, world: Service, group_id: str) -> None:
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
    await page.evaluate("id => { location.hash = `#/groups/${encodeURIComponent(id)}` }", group_id)
    await expect(page.get_by_role("heading", level=1)).to_have_text(f"Group {_shown(group_id)}")


def column(page: Page, name: str) -> Locator:
    return page.get_by_role("table", name="Rollouts of the group, by index").locator(f"td.live-{name}")


async def test_members_stand_side_by_side(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Graded()])
    await start_group(world, "step/1", count=4, refill=1, agent="graded", min_usable=4)
    await show(page, world, "step/1")
    await expect(column(page, "index")).to_have_text(["0", "1", "2", "3", "3"])
    await expect(column(page, "state")).to_have_text(["completed", "completed", "completed", "failed", "completed"])
    await expect(column(page, "reward")).to_have_text(["0", "0.5", "none", "", "1.5"])
    await expect(column(page, "advantage")).to_have_text(["−0.6667", "−0.1667", "", "", "+0.8333"])
    await expect(column(page, "scores").last).to_have_text("format 0.5, index 3")
    await expect(column(page, "end").nth(3)).to_have_text(re.compile("^environment: "))
    await expect(column(page, "usable")).to_have_text(["yes", "yes", "yes", "replaced", "yes"])
    await expect(column(page, "trained").last).to_have_text(await column(page, "tokens").last.inner_text())
    await expect(column(page, "trained").nth(3)).to_have_text("0")
    figures = page.get_by_role("group", name="Rewards")
    for text in (
        r"finished\s*4 of 4",
        r"usable\s*4 of 4 needed",
        r"mean reward\s*0.6667",
        r"std\s*0.7638",
        r"max\s*1.5",
    ):
        await expect(figures).to_contain_text(re.compile(text))
    await expect(page.get_by_role("status")).to_have_text("1 of 4 finished rollouts has no reward.")
    await expect(page.get_by_label("Prompt")).to_have_text(QUESTION)
    await expect(page.get_by_text("Prompt for graded")).to_be_visible()
    await expect(page.get_by_text("1 of 1 refills")).to_be_visible()


async def test_equal_rewards_teach_nothing(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Calculator()])
    await start_group(world, "zero", count=3, metadata={"ground_truth": "16"})
    await show(page, world, "zero")
    sign = "Zero advantage: all 3 rewards are 0. This group teaches nothing."
    await expect(page.get_by_role("status")).to_have_text(sign)
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await expect(page.locator(":focus")).to_have_attribute("href", await _href(column(page, "uid").nth(1)))
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(re.compile("#/rollouts/"))


async def _href(cell: Locator) -> str:
    return await cell.get_by_role("link").get_attribute("href") or ""


async def test_a_label_is_a_group_too_and_stays_text(open_here: Open, page: Page) -> None:
    gated = Gated()
    world = await open_here(agents=[gated])
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{HOSTILE}\n" + "p" * 10_000}]
    uids = [await start(world, f"{HOSTILE}{number}", group_id=HOSTILE, messages=prompt) for number in range(3)]
    await show(page, world, HOSTILE)
    await expect(column(page, "state")).to_have_text(["running"] * 3)
    await expect(column(page, "id")).to_have_text([f"{_shown(HOSTILE)}{number}" for number in range(3)])
    await expect(page.get_by_text("started one by one")).to_be_visible()
    await expect(page.get_by_label("Prompt")).to_contain_text(_shown(HOSTILE))
    gated.gate.set()
    for uid in uids:
        await finished(world, uid)
    await expect(column(page, "state")).to_have_text(["completed"] * 3)
    await expect(page.get_by_role("status")).to_have_text("3 of 3 finished rollouts have no reward.")
    for width in (1400, 700):
        await page.set_viewport_size({"width": width, "height": 900})
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert await page.locator("main img").count() == 0
    await show(page, world, "..")
    await expect(page.get_by_text("No rollouts of this group")).to_be_visible()
