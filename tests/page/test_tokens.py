"""The token strip: each cell says what the ledger and the samples say."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect
from rollout_server import Run
from rollout_server.calculator import Calculator
from rollout_server.inspection.escape import visible
from rollout_server.testing.script import Script, ScriptedReply, tool_call

from tests.page.rollouts import HOSTILE, SHOWN, begin, slow
from tests.system.conftest import Open, Service

NAMES = {
    "prompt": "prompt",
    "environment": "environment",
    "closing": "closing",
    "author": "masked",
    "stale": "stale",
    None: "model",
}
#: Scrolls through the strip and returns its cells: everything that was in the document at some time, by its first token.
ALL_CELLS = """async () => {
  const strip = document.querySelector(".tokens-strip"), found = {};
  const frame = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 20)));
  for (let top = 0; top < strip.scrollHeight; top += strip.clientHeight / 2) {
    strip.scrollTop = top;
    do await frame(); while (strip.querySelector(".tokens-wait, .tokens-piece:not(.tokens-empty):empty"));
    for (const cell of strip.querySelectorAll(".tokens-cell")) {
      found[cell.dataset.start] = [Number(cell.dataset.start), Number(cell.dataset.stop), cell.textContent, [...cell.classList]];
    }
  }
  return Object.values(found);
}"""


#: Whether all tokens in view are drawn, with their texts.
FILLED = """() => {
  const view = document.querySelector(".tokens-strip").getBoundingClientRect();
  const isSeen = (piece) => piece.getBoundingClientRect().bottom > view.top && piece.getBoundingClientRect().top < view.bottom;
  return !document.querySelector(".tokens-wait") && ![...document.querySelectorAll(".tokens-empty")].some(isSeen);
}"""


class Masking(Calculator):
    """Masks its second completion, and continues in a shorter context and a branch of it."""

    name = "masking"

    async def play(self, run: Run) -> None:
        """Sample while there are calls; then twice more."""
        while (reply := await run.sample()).tool_calls:
            if reply.turn == 2:
                run.mask(reply, f"it repeats {HOSTILE}")
            await run.call(reply.tool_calls)
        critic = await run.fork([{"role": "user", "content": "Is it right?"}], role="critic", trainable=False)
        await critic.sample()
        short = await run.fork([{"role": "user", "content": "In short: 5 plus 3?"}], kind="compaction")
        await short.sample()
        await (await short.fork()).sample()


def add(number: int) -> tuple[Any, ...]:
    return (tool_call(f"c{number}", "add", '{"a": 5, "b": 3}'),)


def adding(*replies: ScriptedReply) -> Script:
    return Script((*replies, ScriptedReply(content="It is **8**.")), then_model=True)


TOOLS = ScriptedReply(content="I add 5 and 3.", reasoning="One step.", tool_calls=add(1))
SCRIPTS = {
    "tools": adding(TOOLS, ScriptedReply(content="Once more.", tool_calls=add(2))),
    "cut": adding(ScriptedReply(content="Adding.", tool_calls=add(1), cut=True)),
    "drift": adding(ScriptedReply(content="Adding.", tool_calls=add(1), surplus=(5, 6, 7))),
    "no logprobs": adding(ScriptedReply(content="Adding.", tool_calls=add(1), omit=frozenset({"logprobs"}))),
    "policies": adding(
        ScriptedReply(content="Adding.", tool_calls=add(1), policy_step=1),
        ScriptedReply(content="Again, and long.", tool_calls=add(2), policy_step=7, aborts=(3,)),
    ),
    "hostile": Script((ScriptedReply(content=f"{HOSTILE}\0 日本語 \U0001f469‍\U0001f467 é \t\n\n\n   end\x07"),)),
}
CHANGES: dict[str, dict[str, Any]] = {
    "tools": {"agent": "masking"},
    "policies": {"staleness": {"max_lag": 2, "action": "mask"}},
}


@dataclass
class Shown:
    """A rollout on the page, and what the API returns of it in view "full"."""

    page: Page
    url: str
    outcome: dict[str, Any]

    async def go(self, query: str = "") -> None:
        """Open the page with a link to the rollout."""
        await self.page.goto("about:blank")
        await self.page.goto(f"{self.url}{query}")
        await expect(self.page.locator(".tokens-cell").first).to_be_visible()
        await expect(self.page.locator(".tokens-wait")).to_have_count(0)

    def ids(self, segment: int = 0) -> list[int]:
        """The token ids of a segment."""
        return [token for span in self.outcome["segments"][segment]["spans"] for token in span["token_ids"]]

    def starts(self, segment: int = 0) -> list[int]:
        """The index at which each span begins."""
        found = [0]
        for span in self.outcome["segments"][segment]["spans"]:
            found.append(found[-1] + len(span["token_ids"]))
        return found

    @property
    def strip(self) -> Any:
        """The tokens of the page."""
        return self.page.locator(".tokens-strip")

    async def token(self) -> int | None:
        """The selected token, as the address names it."""
        # Playwright learns of changes of the fragment only later.
        _, _, query = (await self.page.evaluate("location.hash")).partition("token=")
        return int(query) if query else None


async def outcome_of(world: Service, uid: str) -> dict[str, Any]:
    """Wait for the outcome of a rollout and return it."""
    while (found := (await world.http.get(f"/v1/rollouts/{uid}?view=full")).json())["state"] != "finished":  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return dict(found["outcome"])


async def played(open_here: Open, page: Page, script: Script, **changes: Any) -> tuple[Service, str, Shown]:
    """Run a rollout of the calculator to its end."""
    world = await open_here(agents=[Calculator(), Masking()])
    await world.trainer.put_script("r", script)
    if script == SCRIPTS["drift"]:
        changes["completions"] = {"url": world.trainer.url}
    uid = await begin(world, "r", changes.pop("agent", "calculator"), **changes)
    outcome = await outcome_of(world, uid)
    return world, uid, Shown(page, f"http://127.0.0.1:{world.server.http_port}/#/rollouts/{uid}", outcome)


@pytest.mark.parametrize("name", SCRIPTS)
async def test_each_cell_is_as_the_samples_and_texts_say(open_here: Open, page: Page, name: str) -> None:
    world, uid, shown = await played(open_here, page, SCRIPTS[name], **CHANGES.get(name, {}))
    assert shown.outcome["segments"]
    reasons = set()
    for segment, sample in zip(shown.outcome["segments"], shown.outcome["samples"], strict=True):
        await shown.go(f"?segment={segment['id']}")
        cells = await page.evaluate(ALL_CELLS)
        path = f"/v1/rollouts/{uid}/segments/{segment['id']}/tokens"
        texts = (await world.http.get(path)).json()["texts"]
        assert [cell[:2] for cell in cells] == [[text["start"], text["stop"]] for text in texts]
        letters = [NAMES[span["mask_reason"]] for span in segment["spans"] for _ in span["token_ids"]]
        mask = [0] * len(sample["prompt_ids"]) + sample["response_mask"]
        for (start, stop, shown_text, classes), text in zip(cells, texts, strict=True):
            assert {f"tokens-{letters[start]}"} == {f"tokens-{each}" for each in NAMES.values()} & set(classes)
            assert mask[start:stop] == [int("tokens-model" in classes)] * (stop - start)
            assert ("tokens-special" in classes) == text["special"]
            plain = "·" * len(text["text"]) if text["text"].isspace() and set(text["text"]) == {" "} else text["text"]
            assert shown_text == (visible(plain) or "∅")
        for reason, count in ((each, letters.count(each)) for each in set(letters)):
            await expect(page.get_by_role("list", name="Legend")).to_contain_text(
                f"{reason}{', trains' * (reason == 'model')} {count}"
            )
        reasons |= set(letters)
    assert reasons >= {"tools": {"masked", "environment"}, "cut": {"closing"}, "policies": {"stale"}}.get(
        name, {"model"}
    )
    assert await page.title() == f"Rollout {uid}"


async def test_keys_move_select_and_extend(open_here: Open, page: Page) -> None:
    _, _, shown = await played(open_here, page, SCRIPTS["tools"])
    await shown.go()
    starts, ids = shown.starts(), shown.ids()
    await shown.strip.focus()
    for key, token in [
        ("ArrowRight", 0),
        ("ArrowRight", 1),
        ("]", starts[1]),
        ("]", starts[2]),
        ("[", starts[1]),
        ("ArrowLeft", starts[1] - 1),
        ("PageDown", starts[2]),
        ("PageDown", starts[4]),
        ("PageUp", starts[2]),
        ("End", len(ids) - 1),
        ("ArrowRight", len(ids) - 1),
        ("Home", 0),
    ]:
        await page.keyboard.press(key)
        assert await shown.token() == token, key
        active = page.locator("#tokens-active")
        await expect(active).to_have_attribute("aria-selected", "true")
        await expect(active).to_be_in_viewport()
        assert int(await active.get_attribute("data-start") or -1) <= token
    await page.keyboard.press("End")
    await page.keyboard.press("Shift+ArrowLeft")
    await page.keyboard.press("Shift+ArrowLeft")
    await expect(page.locator(".tokens-detail")).to_contain_text(f"3, index {len(ids) - 3} to {len(ids) - 1}")
    await expect(page.locator(".tokens-cell[aria-selected=true]")).to_have_count(3)
    await page.keyboard.press("Home")
    await expect(page.locator(".tokens-cell[aria-selected=true]")).to_have_count(1)
    await page.keyboard.press("ArrowDown")
    below = page.locator("#tokens-active")
    assert await below.evaluate("(cell) => cell.previousSibling.textContent") == "\n"
    await page.keyboard.press("ArrowUp")
    assert await shown.token() == 0


async def test_what_a_token_is_and_copies_of_ids(open_here: Open, page: Page) -> None:
    _, _, shown = await played(open_here, page, SCRIPTS["tools"], agent="masking")
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    spans, starts = shown.outcome["segments"][0]["spans"], shown.starts()
    masked = next(index for index, span in enumerate(spans) if span["mask_reason"] == "author")
    await page.clock.install()
    await shown.go(f"?segment=0&token={starts[masked] + 1}")
    detail, span = page.locator(".tokens-detail"), spans[masked]
    logprob = span["logprobs"][1]
    for text in [
        f"{starts[masked] + 1}; {starts[masked] + 1 - starts[1]} in the response",
        str(span["token_ids"][1]),
        f"model, turn {span['turn']}",
        f"{logprob:.4f} (p = ",
        str(span["policy_version"]),
        f"A0: the model wrote it, and the agent masked the completion out: it repeats {SHOWN}",
    ]:
        await expect(detail).to_contain_text(text)
    await shown.strip.focus()
    await page.keyboard.press("c")
    assert json.loads(await page.evaluate("navigator.clipboard.readText()")) == span["token_ids"][1:2]
    await detail.get_by_role("button", name="copy ids of the span").click()
    assert json.loads(await page.evaluate("navigator.clipboard.readText()")) == span["token_ids"]
    await page.clock.run_for(1500)  # the confirmation is over
    await page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as without HTTPS
    await detail.get_by_role("button", name="copy ids", exact=True).click()
    await detail.get_by_role("button", name="copied").click()
    await page.clock.run_for(1500)
    await expect(detail.get_by_role("button", name="copy ids", exact=True)).to_be_visible()
    await page.locator(f"[data-start='{starts[masked] + 4}']").click(modifiers=["Shift"])
    await expect(detail).to_contain_text(f"sum {sum(span['logprobs'][1:5]):.4f} of 4 model tokens")
    await expect(detail).to_contain_text("0 with mask 1, 4 by the model")
    await page.locator(f"[data-start='{starts[masked] - 1}']").hover()
    await expect(detail).to_contain_text("environment, turn")


async def test_texts_and_logprobs_that_are_not_there_are_told(open_here: Open, page: Page) -> None:
    _, _, shown = await played(open_here, page, SCRIPTS["no logprobs"], tokenizer=None)
    await shown.go()
    await expect(
        page.get_by_text("Token ids are shown, because their texts are not available: the rollout names no tokenizer")
    ).to_be_visible()
    cells = await page.evaluate(ALL_CELLS)
    assert [int(cell[2]) for cell in cells] == shown.ids()
    await page.get_by_text("logprob", exact=True).click()
    await expect(page.get_by_role("list", name="Legend")).to_contain_text("model tokens have no logprob")


async def test_an_error_holds_for_texts_that_were_wanted_while_it_came(open_here: Open, page: Page) -> None:
    _, _, shown = await played(open_here, page, SCRIPTS["tools"], agent="masking", tokenizer=None)
    answer = asyncio.Event()

    async def held(route: Route) -> None:
        await answer.wait()
        await route.continue_()

    await page.route("**/segments/*/tokens?*", held)
    async with page.expect_request("**/segments/0/tokens?*"):
        await page.goto(f"{shown.url}?segment=0")
    await page.get_by_role("tab", name="Segments").click()
    await page.get_by_role("region", name="Segments").get_by_role("button", name="Segment 1").click()
    await expect(page.get_by_text("Segment 1 (subagent):")).to_be_visible()
    await expect(page.locator(".tokens-wait").first).to_be_visible()
    answer.set()
    await expect(page.get_by_text("Token ids are shown, because their texts are not available")).to_be_visible()
    await expect(page.locator(".tokens-wait")).to_have_count(0)


async def test_colours_show_logprobs_policies_and_turns(open_here: Open, page: Page) -> None:
    _, _, shown = await played(open_here, page, SCRIPTS["policies"])
    spans, starts = shown.outcome["segments"][0]["spans"], shown.starts()
    await shown.go()
    legend = page.get_by_role("list", name="Legend")
    await page.get_by_text("policy", exact=True).last.click()
    for span in spans:
        if span["author"] == "model":
            step = "" if span["policy_step"] is None else f", step {span['policy_step']}"
            await expect(legend).to_contain_text(f"{span['policy_version']}{step}: {len(span['token_ids'])}")
    await page.get_by_text("turn", exact=True).last.click()
    cells = {cell[0]: cell[3] for cell in await page.evaluate(ALL_CELLS)}
    assert all(f"tokens-hue-{span['turn'] % 6}" in cells[start] for span, start in zip(spans, starts, strict=False))
    await page.get_by_label("logprob", exact=True).check(force=True)
    cells = {cell[0]: cell[3] for cell in await page.evaluate(ALL_CELLS)}
    heated = {start for start, classes in cells.items() if any(each.startswith("tokens-heat-") for each in classes)}
    written = {
        start + n
        for span, start in zip(spans, starts, strict=False)
        if span["logprobs"]
        for n in range(len(span["token_ids"]))
    }
    assert heated == written & cells.keys()


async def test_new_turns_are_appended_and_followed(open_here: Open, page: Page) -> None:
    world = await open_here()
    text = "A line of the model.\n" * 40
    replies = [ScriptedReply(content=f"{number} {text}", tool_calls=add(number)) for number in range(4)]
    await world.trainer.put_script("r", Script(slow(0.7, *replies, ScriptedReply(content="The end."))))
    uid = await begin(world, "r", "calculator", sampling={"max_tokens": 4096})
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/#/rollouts/{uid}")
    strip = page.locator(".tokens-strip")
    at_end = """() => {
      const { scrollTop, scrollHeight, clientHeight } = document.querySelector(".tokens-strip");
      return scrollTop > 100 && scrollHeight - scrollTop - clientHeight < 60;
    }"""
    for turn in (2, 3):
        await expect(strip.get_by_role("group", name=f"model, turn {turn},").first).to_be_visible()
        await page.wait_for_function(at_end)
    await strip.evaluate("(strip) => { strip.scrollTop = 0 }")
    await expect(strip.get_by_role("group", name="model, turn 5,").first).to_be_attached()
    assert await strip.evaluate("(strip) => strip.scrollTop") == 0


async def test_a_long_segment_keeps_the_document_small(
    open_here: Open, page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script((ScriptedReply(content="The quick brown fox jumps over the lazy dog.\n" * 1060),))
    _, _, shown = await played(open_here, page, script, sampling={"max_tokens": 32768, "logprobs": True})
    length = len(shown.ids())
    assert length > 32_000
    started = time.monotonic()
    await shown.go()
    drawn = time.monotonic() - started
    most = 0
    for part in range(11):
        await shown.strip.evaluate("(strip, part) => { strip.scrollTop = strip.scrollHeight * part / 10 }", part)
        await page.wait_for_function(FILLED)
        most = max(most, await page.locator(".tokens *").count())
    with capsys.disabled():
        print(f"\n{length} tokens: loaded and drawn in {drawn:.2f} s, at most {most} elements")  # noqa: T201
    assert most < 5000
    await shown.strip.focus()
    await page.keyboard.press("End")
    assert await shown.token() == length - 1
    await expect(page.locator("#tokens-active")).to_be_in_viewport()
