"""The tree of segments: why each was opened, what it trains, and drift with the tokens of both sides."""

from __future__ import annotations

import re
from typing import Any

import httpx
from playwright.async_api import Page, expect
from rollout_server import own_loop

from tests.page.rollouts import HOSTILE, begin
from tests.page.test_tokens import SCRIPTS, Shown, outcome_of, played
from tests.system.conftest import Open


async def tree(shown: Shown) -> Any:
    """Open the page and the tab of the segments."""
    await shown.go()
    await shown.page.get_by_role("tab", name="Segments").click()
    return shown.page.get_by_role("region", name="Segments")


async def test_one_segment_takes_one_line(open_here: Open, page: Page) -> None:
    _, _, shown = await played(open_here, page, SCRIPTS["policies"])
    found = await tree(shown)
    await expect(found.get_by_role("button")).to_have_count(1)
    trained = sum(sample for each in shown.outcome["samples"] for sample in each["response_mask"])
    for text in ("Segment 0", "main", f"{len(shown.ids())} tokens", f"{trained} with mask 1", "trains", "✓ verified"):
        await expect(found).to_contain_text(text)
    box = await found.bounding_box()
    assert box
    assert box["height"] < 40


async def test_conversations_of_an_agent_are_nested(open_here: Open, page: Page) -> None:
    _, _, shown = await played(open_here, page, SCRIPTS["tools"], agent="masking")
    found = await tree(shown)
    rows = found.get_by_role("button")
    segments = shown.outcome["segments"]
    assert [each["origin"]["kind"] for each in segments] == ["main", "subagent", "compaction", "branch"]
    for segment, sample in zip(segments, shown.outcome["samples"], strict=True):
        row = rows.filter(has_text=f"Segment {segment['id']}")
        await expect(row).to_contain_text(segment["origin"]["kind"])
        await expect(row).to_contain_text(f"{sum(sample['response_mask'])} with mask 1")
        await expect(row).to_contain_text(
            "trains" if sample["trainable"] else f"does not train: {sample['untrainable_reason']}"
        )
    inner = found.locator("li li")
    await expect(inner.filter(has_text="Segment 3").last).to_contain_text("with 2")
    await expect(rows.nth(1)).to_contain_text("critic")
    await rows.nth(1).focus()
    await page.keyboard.press("Enter")
    await expect(rows.nth(1)).to_have_attribute("aria-current", "true")
    await expect(page).to_have_url(re.compile(re.escape("segment=1")))
    await expect(page.get_by_text("Segment 1 (subagent):")).to_be_visible()
    await expect(page.get_by_text("this sample does not train: role_not_trainable")).to_be_visible()


async def test_drift_is_marked_at_its_index_with_the_tokens_of_both_sides(open_here: Open, page: Page) -> None:
    _, _, shown = await played(open_here, page, SCRIPTS["drift"])
    found = await tree(shown)
    (warning,) = (each for each in shown.outcome["warnings"] if each["code"] == "token_drift")
    index = warning["index"]
    await expect(found).to_contain_text(
        f"Drift at token {index}: sampled tokens came back as other tokens of the same text"
    )
    for number, name in enumerate(("expected", "reported")):
        side = found.locator(".tree-side").filter(has_text=name)
        tokens = side.get_by_role("button")
        around = shown.ids(number)[index - 4 : index + 12]
        assert [int(each) for each in await tokens.locator("small").all_text_contents()] == around
        await expect(tokens.locator(".tree-same")).to_have_count(4)
        await expect(side).to_contain_text("</tool_call><|im_end|>")
        await tokens.click()
        await expect(page).to_have_url(re.compile(re.escape(f"segment={number}&")))
        assert await shown.token() == index
        await expect(page.locator("#tokens-active")).to_have_attribute("data-start", str(index))
        await expect(page.locator("#tokens-active")).to_have_class(re.compile("tokens-drift"))
        differs = (
            "the next prompt differs from here on: segment 1",
            "the trainer's prompt differs from the expected one",
        )
        await expect(page.locator(".tokens-detail")).to_contain_text(differs[number])


@own_loop
async def forgetful(task: str, http: httpx.AsyncClient) -> None:
    """Changes what it was told."""
    for texts in ([task], [task, "again"], [f"other {HOSTILE}"]):
        messages = [{"role": "user", "content": text} for text in texts]
        (await http.post("chat/completions", json={"model": "any", "messages": messages})).raise_for_status()


async def test_it_says_where_the_calls_of_an_agent_parted(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[forgetful])
    uid = await begin(world, "r", "forgetful", messages=[{"role": "user", "content": "Hi."}])
    shown = Shown(page, f"http://127.0.0.1:{world.server.http_port}/#/rollouts/{uid}", await outcome_of(world, uid))
    found = await tree(shown)
    partings = [each["origin"]["parting"] for each in shown.outcome["segments"] if "parting" in each["origin"]]
    assert partings
    for parting in partings:
        await expect(found).to_contain_text(
            f"a chat call diverged at message {parting['message']} ({parting['field']})"
        )
    await expect(found).to_contain_text("⟨U+202E⟩lanosrep")
