"""What the page shows between and in messages: judges, branches, drift, long texts, JSON, tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from playwright.async_api import Page, expect
from rollout_server import Agent, Run
from rollout_server.calculator import add, multiply
from rollout_server.testing.http.mock_engine import MockEngine
from rollout_server.testing.script import Script, ScriptedReply, tool_call

from tests.page.rollouts import DRIFTING, HOSTILE, TOUR, Tour, begin, finished, forgetful, link, play, price
from tests.support.bodies import QUESTION
from tests.support.captured_agents import OwnLoop
from tests.system.conftest import Open


class Echo:
    """Replies with the last message."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the last message as a completion."""
        return ScriptedReply(content=str(messages[-1]["content"]))


class Curious(Agent):
    """Takes the time, asks a judge, and continues its first completion a second time."""

    name = "curious"
    tools = (price,)

    async def play(self, run: Run) -> None:
        """Two turns, the second in a branch."""
        run.now()
        await run.once(lambda: {"drawn": HOSTILE})
        await run.sample()
        await run.model("judge").sample([{"role": "user", "content": f"Is it good? {HOSTILE}"}])
        branch = await run.fork()
        await branch.append({"role": "user", "content": "Once more."})
        await branch.sample()


async def test_judges_branches_and_recorded_values(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Curious()])
    await world.trainer.put_script("r", Script(lines=(ScriptedReply(content="One."), ScriptedReply(content="Two."))))
    async with MockEngine({"judge": Echo()}) as judge:
        models = {"judge": {"url": judge.url, "dialect": "openai", "model": "judge"}}
        uid = await begin(world, "r", "curious", models=models)
        await finished(world, uid)
    await page.goto(link(world, uid))
    await expect(page.locator(".messages-judge")).to_contain_text("model judge")
    await expect(page.locator(".messages-judge")).to_contain_text("Is it good? <img src=x")
    await expect(page.locator(".messages-judge")).to_contain_text("in no sample")
    remarks = page.locator(".messages-remark")
    await expect(remarks.nth(0)).to_contain_text("now")
    await expect(remarks.nth(1)).to_contain_text('once {"drawn":"<img src=x')
    await expect(remarks.nth(2)).to_contain_text("conversation 1 opened from 0: branch, agent")
    await expect(page.locator(".messages-aside .messages-segment").last).to_have_text("segment 1 · branch")
    await expect(page.locator('.timeline-bar[data-lane="models"]')).to_have_count(1)


async def test_drift_is_linked_to_its_token(open_here: Open, page: Page, tmp_path: Path) -> None:
    """A template that drops the thinking of earlier completions."""
    world = await open_here(agents=[Tour()])
    async with forgetful(tmp_path, DRIFTING, world) as trainer:
        target = {"url": f"grpc://{trainer.grpc_target}"}
        uid = await begin(world, "drift", "tour", completions=target, token_mode="messages")
        (warning,) = (await finished(world, uid))["outcome"]["warnings"]
    await page.goto(link(world, uid))
    labels = page.locator('.messages-card[data-kind="tool"] .messages-segment')
    await expect(labels).to_have_text(["segment 1 · drift"] * 2)
    for place in (".messages-remark", ".rollout-warnings"):
        await page.locator(place).get_by_role("link", name=f"token {warning['index']}").click()
        await expect(page).to_have_url(re.compile(re.escape(f"?segment=1&turn=2&token={warning['index']}") + "$"))
        await expect(page.locator('.tokens-cell[aria-selected="true"]')).to_have_count(1)
        await page.keyboard.press("Escape")


async def test_long_texts_are_folded(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    text = "\n".join(f"line {number}" for number in range(500))
    uid = await play(world, "long", Script(lines=(ScriptedReply(content="ok"),)), question=text)
    await page.goto(link(world, uid))
    card = page.locator(".messages-card").nth(1)
    await expect(card).to_contain_text("line 39")
    await expect(card).not_to_contain_text("line 40")
    await card.get_by_role("button", name="Show all 500 lines").click()
    await expect(card).to_contain_text("line 499")


async def test_a_long_line_is_folded(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "long", Script(lines=(ScriptedReply(content="ok"),)), question="x" * 7000)
    await page.goto(link(world, uid))
    await page.get_by_role("button", name="Show all 7,000 characters").click()
    await expect(page.locator(".messages-card").nth(1)).to_contain_text("x" * 7000)


async def test_arguments_are_indented_only_if_that_is_the_same(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    long = json.dumps({"fruit": "apple", "notes": ["a" * 30, "b" * 30]})
    given = (long, '{"fruit": 12345678901234567890123,   "x": "' + 50 * "y" + '"}', '{"fruit": broken')
    calls = tuple(tool_call(f"c{index}", "price", text) for index, text in enumerate(given))
    uid = await play(world, "r", Script(lines=(ScriptedReply(tool_calls=calls), *TOUR[2:])))
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.goto(link(world, uid))
    shown = page.locator(".messages-call .content-text")
    await expect(shown.nth(0)).to_have_text(json.dumps(json.loads(long), indent=2))
    for index in (1, 2):
        await expect(shown.nth(index)).to_have_text(given[index], use_inner_text=True)
    await page.get_by_role("button", name="Copy the JSON").first.click()
    assert await page.evaluate("navigator.clipboard.readText()") == long


async def test_the_tools_of_the_agent_are_shown(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR))
    await page.goto(link(world, uid))
    await page.get_by_text("Tools that the agent offers (2)").click()
    await expect(page.locator(".messages-tools li").first).to_contain_text("Price of a fruit in cents.")
    await expect(page.locator(".messages-tools li").first).to_contain_text('"fruit"')


async def test_an_agent_that_owns_its_loop(open_here: Open, page: Page) -> None:
    """Its client runs the tools, so results are messages that it sends."""
    world = await open_here(agents=[OwnLoop("own", (add, multiply), ("And 2 plus 2?",))])
    uid = await begin(world, "own", "own", QUESTION)
    await finished(world, uid)
    await page.goto(link(world, uid))
    await expect(page.locator(".rollout-state")).to_have_text("completed")
    await expect(page.locator('.messages-card[data-kind="completion"]').first).to_contain_text("call add")
    await expect(page.locator('.messages-card[data-role="tool"]').first).to_contain_text("call_1")
    await expect(page.locator(".messages-remark", has_text="calls of the agent")).to_contain_text("continued")
    await expect(page.locator(".messages-remark", has_text=re.compile("opened from|start"))).to_have_count(0)
    await expect(page.locator('.messages-card[data-role="system"]')).to_have_count(1)
    await expect(page.locator('.messages-card[data-role="user"]')).to_have_count(2)


async def test_calls_in_the_messages_of_the_request_are_shown(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    shot = {"role": "assistant", "content": None, "tool_calls": [tool_call("c1", "price", '{"fruit": "fig"}')]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "7"}
    messages = [{"role": "user", "content": "A fig?"}, shot, result, {"role": "user", "content": "And a pear?"}]
    await world.trainer.put_script("r", Script(lines=(ScriptedReply(content="4."),), then_model=True))
    uid = await begin(world, "r", "tour", messages=messages)
    await page.goto(link(world, uid))
    cards = page.locator('.messages-card[data-kind="request"]')
    await expect(cards.nth(1)).to_contain_text("call price c1")
    await expect(cards.nth(1)).to_contain_text('{"fruit": "fig"}')
    await expect(cards.nth(2)).to_contain_text("c1")


async def test_a_huge_line_is_shown_in_part(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    await world.trainer.put_script("r", Script(lines=(ScriptedReply(content="4."),), then_model=True))
    uid = await begin(world, "r", "tour", "x" * 500_000)
    await page.goto(link(world, uid))
    card = page.locator('.messages-card[data-role="user"]').first
    await card.get_by_role("button", name="Show 200,000 of 500,000 characters").click()
    assert len(await card.locator("pre").inner_text()) == 200_000
    await expect(card.get_by_role("button")).to_have_text("Copy the whole text")
