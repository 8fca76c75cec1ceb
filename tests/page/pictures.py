"""`python -m tests.page.pictures DIRECTORY`: the pictures of the live page in the documentation, from real rollouts."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

from playwright.async_api import Page, ViewportSize, async_playwright
from rollout_server import Agent, RewardResult, Run, tool
from rollout_server.calculator import Calculator
from rollout_server.testing.script import Script, ScriptedReply, tool_call

from tests.page.conftest import launch
from tests.page.rollouts import begin, finished, link
from tests.system.conftest import Service, open_world

_SIZE = ViewportSize(width=1400, height=1120)
_QUESTION = [{"role": "user", "content": "Is it warmer in Zürich or in Oslo?"}]
_CITIES = {"Zürich": 21.5, "Oslo": 12.0, "Lisbon": 27.5}


@tool
async def temperature(city: Annotated[str, "City name"]) -> float:
    """Temperature of a city in degrees Celsius."""
    await asyncio.sleep(0.08)
    return _CITIES[city]


class Weather(Agent):
    """Answers questions about the weather, and lets a critic check the answer once."""

    name = "weather"
    tools = (temperature,)

    async def play(self, run: Run) -> None:
        """Answer, hear the critic, and answer again: the first answer does not train."""
        while (draft := await run.sample()).tool_calls:
            await run.call(draft.tool_calls)
        run.mask(draft, "a draft")
        critic = await run.fork([{"role": "user", "content": "Is the answer complete?"}], role="critic")
        await critic.sample()
        await run.append({"role": "user", "content": "Name the difference, too."})
        await run.sample()

    async def reward(self, run: Run) -> RewardResult:
        """Reward an answer with the difference."""
        return RewardResult(reward=1.0 if "9.5" in str(run.messages[-1]["content"]) else 0.0, scores={"brief": 1.0})


def script(answer: str) -> Script:
    """The replies of the model, at the pace of a small engine."""
    calls = tuple(
        tool_call(f"call_{number}", "temperature", f'{{"city": "{city}"}}')
        for number, city in ((1, "Zürich"), (2, "Oslo"))
    )
    return Script(
        (
            ScriptedReply(content="I need both temperatures.", tool_calls=calls, delay=0.4),
            ScriptedReply(content="It is warmer in Zürich.", delay=0.3),
            ScriptedReply(content="No: it does not say by how much.", delay=0.2),
            ScriptedReply(content=answer, delay=0.5),
        )
    )


async def rollouts(world: Service) -> list[str]:
    """Run a group of eight, of which the last still runs, and return the uids."""
    good, poor = "Zürich: 21.5 degrees, 9.5 more than Oslo.", "Zürich, by far."
    uids = []
    for number in range(8):
        name = f"weather-{number}"
        await world.trainer.put_script(name, script(poor if number in (2, 5) else good))
        changes = {"group_id": "step-17/weather", "group_index": number, "messages": _QUESTION}
        uids.append(await begin(world, name, "weather", **changes))
        if number < 7:
            await finished(world, uids[-1])
    return uids


async def draw(page: Page, world: Service, directory: Path) -> None:
    """Write the pictures of a group, the list and a rollout."""
    uids = await rollouts(world)
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
    await page.get_by_role("link", name="step-17/weather").first.wait_for()
    await page.screenshot(path=directory / "page-list.png")
    await finished(world, uids[-1])
    await page.get_by_role("link", name="step-17/weather").first.click()
    await page.get_by_role("link", name=uids[-1].rpartition("-")[2][:10]).wait_for()
    await page.screenshot(path=directory / "page-group.png")
    await page.goto(link(world, uids[0], "?segment=0&turn=2"))
    await page.get_by_text("Completed: stop").wait_for()
    await asyncio.sleep(1)  # the texts of the tokens
    await page.evaluate("scrollTo(0, 0)")
    await page.screenshot(path=directory / "page-rollout.png")


async def main(directory: Path) -> None:
    """Run the service, its trainer and Chromium, and take the pictures."""
    async with AsyncExitStack() as stack, async_playwright() as playwright:
        world = await open_world(stack, agents=[Weather(), Calculator()])
        browser = await launch(playwright)
        context = await browser.new_context(viewport=_SIZE, locale="en-GB", timezone_id="UTC", device_scale_factor=1.5)
        await draw(await context.new_page(), world, directory)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
