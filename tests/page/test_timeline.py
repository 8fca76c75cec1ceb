"""The timeline of a rollout: queue, engine, tools and delivery."""

from __future__ import annotations

import re
from itertools import pairwise

from playwright.async_api import Locator, Page, expect
from rollout_server.calculator import Calculator
from rollout_server.testing.script import Fault, FaultKind, Script

from tests.page.rollouts import TOUR, Tour, begin, finished, link, play, slow
from tests.support.bodies import QUESTION
from tests.system.conftest import Open


def bars(page: Page, lane: str) -> Locator:
    return page.locator(f'.timeline-bar[data-lane="{lane}"]')


async def test_turns_and_tools_have_bars(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR))
    await finished(world, uid)
    await page.goto(link(world, uid))
    await expect(bars(page, "engine")).to_have_count(5)
    await expect(bars(page, "tools")).to_have_count(4)
    # Calls of the same time have rows of their own.
    tops = [await bars(page, "tools").nth(index).locator("rect").get_attribute("y") for index in range(2)]
    assert tops[0] != tops[1]
    await expect(page.locator('.timeline-bar[data-lane="tools"][data-bad]')).to_have_count(1)
    await bars(page, "tools").first.hover()
    await expect(page.locator(".timeline-told")).to_contain_text("turn 1, tool price call_1: ")
    await bars(page, "engine").nth(1).click()
    await expect(page).to_have_url(re.compile(re.escape("turn=2")))
    await expect(page.locator('.timeline-bar[aria-current="true"]')).to_have_count(3)


async def test_keys_move_between_bars(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR))
    await finished(world, uid)
    await page.goto(link(world, uid))
    await bars(page, "engine").first.focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator(".timeline-told")).to_contain_text("turn 1, tool price")
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(re.compile(re.escape("turn=1")))


async def test_it_grows_while_the_rollout_runs(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "slow", Script(lines=(*slow(0.2, *TOUR[:2]), Fault(kind=FaultKind.SILENCE))))
    await page.goto(link(world, uid))
    await expect(bars(page, "engine")).to_have_count(3)
    await expect(page.locator('.timeline-bar[data-lane="engine"][data-open]')).to_have_count(1)
    first = await bars(page, "engine").nth(2).get_attribute("aria-label")
    await expect(bars(page, "engine").nth(2)).not_to_have_attribute("aria-label", first or "")


async def test_deliveries_and_attempts(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Calculator()], retry_base_seconds=0.05)
    target = {"url": f"grpc://{world.trainer.grpc_target}", "replays_turn_keys": True}
    await world.trainer.put_script("r", Script(lines=(Fault.error(503, "later"),), then_model=True))
    nowhere = {"url": "http://127.0.0.1:9"}
    uid = await begin(world, "r", "calculator", QUESTION, completions=target, outcome=nowhere)
    await finished(world, uid)
    await page.goto(link(world, uid))
    await expect(bars(page, "engine").first).to_have_attribute("data-bad", "")
    await bars(page, "engine").first.hover()
    await expect(page.locator(".timeline-told")).to_contain_text("2 requests")
    await expect(bars(page, "delivery")).to_have_attribute("data-open", "")
    await bars(page, "delivery").hover()
    await expect(page.locator(".timeline-told")).to_contain_text("delivery pending")
    await expect(page.locator(".timeline-told")).to_contain_text("attempts")
    # A server that stops tries for five seconds to deliver what it still owes.
    await world.http.post(f"/v1/rollouts/{uid}/acknowledge")


async def test_a_queued_rollout_waits_and_is_cancelled(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()], max_running=1)
    await play(world, "first", Script(lines=(Fault(kind=FaultKind.SILENCE),)))
    uid = await play(world, "second", Script(lines=TOUR))
    await page.goto(link(world, uid))
    await expect(page.locator(".rollout-state")).to_have_text("queued · live")
    await expect(bars(page, "queue")).to_have_attribute("data-open", "")
    await page.get_by_role("button", name="Cancel the rollout").click()
    await page.get_by_role("dialog").get_by_role("button", name="Cancel the rollout").click()
    await expect(page.locator(".rollout-state")).to_have_text("cancelled")
    await expect(bars(page, "queue")).to_have_accessible_name(re.compile("in the queue for "))


async def test_times_do_not_overlap(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=slow(0.1, *TOUR)))
    await finished(world, uid)
    for width in (1400, 720, 390):
        await page.set_viewport_size({"width": width, "height": 900})
        await page.goto(link(world, uid))
        await expect(page.locator(".rollout-state")).to_have_text("completed")
        times = page.locator(".timeline g > text:visible")
        await expect(times.nth(1)).to_be_visible()
        # All at once, because a new event or a new size draws them again.
        shown = await times.evaluate_all(
            "all => all.map(one => one.getBoundingClientRect()).map(at => [at.left, at.right])"
        )
        assert len(shown) > 1
        assert all(end < start for (_, end), (start, _) in pairwise(shown)), (width, shown)
