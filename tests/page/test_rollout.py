"""The page of one rollout: live, linked, cancelled, failed, and with text that is hostile."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Locator, Page, expect
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings
from rollout_server.testing.script import Fault, FaultKind, Script
from rollout_server.testing.trainer import StrictTrainer

from bench.programs.child import free_port
from tests.page.rollouts import HOSTILE, SHOWN, TOUR, Long, Stepped, Tour, begin, events, finished, link, play
from tests.support.bodies import QUESTION, TOKENIZER
from tests.system.conftest import Open, Service

STUCK = Script(lines=(TOUR[0], Fault(kind=FaultKind.SILENCE)))


def cards(page: Page, kind: str = "") -> Locator:
    return page.locator(f'.messages-card[data-kind="{kind}"]' if kind else ".messages-card")


def state(page: Page) -> Locator:
    return page.locator(".rollout-state")


async def current(page: Page) -> list[str]:
    """The texts of the selected messages."""
    texts = await page.locator(".messages-card[aria-current] > :not(header)").all_inner_texts()
    return [text.strip() for text in texts]


async def query_of(page: Page) -> dict[str, str]:
    """The selection in the URL."""
    found: dict[str, str] = await page.evaluate(
        "() => Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))"
    )
    return found


async def test_it_follows_a_rollout_turn_by_turn(open_here: Open, page: Page) -> None:
    model = Stepped(TOUR)
    world = await open_here(agents=[Tour()], model=model)
    try:
        await page.goto(link(world, await begin(world, "slow", "tour")))
        await expect(state(page)).to_have_text("running · live")
        await expect(page.get_by_text("waiting for turn 1 …")).to_be_visible()
        assert await cards(page, "completion").count() == 0
        model.step()
        await expect(cards(page, "completion")).to_have_count(1)
        await expect(cards(page, "completion").first).to_contain_text("Let me look up both prices.")
        await expect(page.get_by_text("waiting for turn 2 …")).to_be_visible()
        assert await cards(page, "completion").count() == 1
    finally:
        model.step(len(TOUR))
    await expect(state(page)).to_have_text("completed")
    await expect(cards(page, "completion")).to_have_count(len(TOUR))
    await expect(cards(page, "tool")).to_have_count(4)
    await expect(page.locator(".rollout-why")).to_contain_text("Completed: stop")
    await expect(page.locator(".rollout-results")).to_contain_text("0.75")
    await expect(page.locator(".rollout-results")).to_contain_text("2 of 2 trainable")
    await expect(cards(page, "completion").nth(2)).to_contain_text("masked: not the final answer")
    await expect(cards(page, "completion").nth(4)).to_contain_text("cut by its length limit")
    await expect(cards(page, "tool").nth(2)).to_contain_text("failed")
    await expect(cards(page, "tool").nth(3)).to_contain_text("characters are missing")
    await expect(page.locator(".messages-aside")).to_have_count(2)
    await expect(page.locator(".messages-aside").first).to_contain_text("critic")


@pytest.mark.parametrize("count", [2_000, 10_000])
async def test_a_long_rollout(open_here: Open, page: Page, count: int) -> None:
    world = await open_here(agents=[Long()])
    uid = await begin(world, "long", "long", metadata={"events": count})
    last = (await finished(world, uid))["last_sequence"]
    assert last > count
    await page.goto(link(world, uid))
    await expect(state(page)).to_have_text("completed", timeout=60_000)
    await expect(cards(page)).to_have_count(count + 4)
    await page.evaluate(
        """() => new MutationObserver((found) => { globalThis.drawn = (globalThis.drawn ?? 0) + found.length; })
          .observe(document.querySelector("main"), { childList: true, subtree: true })"""
    )
    await cards(page).nth(count // 2).click()
    await expect(cards(page).nth(count // 2)).to_have_attribute("aria-current", "true")
    assert await page.evaluate("() => globalThis.drawn ?? 0") < 1000  # a selection draws no card again


async def test_hostile_text_stays_text(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    labels, name = {"run": HOSTILE}, f"x{HOSTILE}"
    await world.trainer.put_script(name, Script(lines=(*TOUR[:3], Fault.error(400, HOSTILE))))
    uid = await begin(world, name, "tour", HOSTILE, labels=labels, group_id="<b>g</b>")
    await finished(world, uid)
    await page.goto(link(world, uid))
    await expect(state(page)).to_have_text("failed")
    await expect(page.locator("h1")).to_have_text(f"x{SHOWN}")
    await expect(page.locator(".rollout-label")).to_have_text(f"run={SHOWN}")
    await expect(page.locator(".rollout-message")).to_contain_text("<img src=x onerror=")
    await expect(cards(page, "request").nth(1)).to_contain_text(SHOWN)
    await expect(cards(page, "completion").nth(2)).to_contain_text(SHOWN)
    await expect(cards(page, "tool").nth(3)).to_contain_text("</script><b>bold</b>")
    await expect(page.locator(".messages-remark").first).to_contain_text(SHOWN)
    assert await page.locator("main :is(img, script, i, iframe, object, link)").count() == 0
    assert await page.title() != "1"


async def test_images_are_never_loaded(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    data = "data:image/png;base64," + 400 * "A"
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in ("https://elsewhere.example/x.png", data)]
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    message = {"role": "user", "content": [{"type": "text", "text": "See"}, *parts]}
    uid = await begin(
        world, "images", "tour", messages=[message], token_mode="messages", completions={"url": world.trainer.url}
    )
    await page.goto(link(world, uid))
    await expect(page.locator(".content-part").nth(0)).to_contain_text("elsewhere.example/x.png (not loaded)")
    await expect(page.locator(".content-part").nth(1)).to_contain_text("image/png, 300 bytes")
    assert not any("elsewhere" in url for url in requested)


async def test_cancelling(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "stuck", STUCK)
    await page.goto(link(world, uid))
    await expect(cards(page, "tool")).to_have_count(2)
    await page.get_by_role("button", name="Cancel the rollout").click()
    await page.get_by_role("button", name="Keep it running").click()
    await expect(state(page)).to_have_text("running · live")
    await page.get_by_role("button", name="Cancel the rollout").click()
    await page.get_by_role("textbox", name="Reason").fill("seen <enough>")
    await page.get_by_role("dialog").get_by_role("button", name="Cancel the rollout").click()
    await expect(state(page)).to_have_text("cancelled")
    await expect(page.locator(".rollout-why")).to_have_text("Cancelledseen <enough>")
    await expect(page.get_by_role("button", name="Cancel the rollout")).to_be_hidden()
    assert (await finished(world, uid))["outcome"]["reason"] == "seen <enough>"


async def test_a_refused_cancellation_says_why(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "stuck", STUCK)
    await page.goto(link(world, uid))
    await page.get_by_role("button", name="Cancel the rollout").click()
    # Longer than the server allows.
    reason = page.get_by_role("textbox", name="Reason")
    await reason.evaluate("(input) => { input.maxLength = 100000; input.value = 'x'.repeat(70000) }")
    await page.get_by_role("dialog").get_by_role("button", name="Cancel the rollout").click()
    await expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("reason")


async def test_a_failure_comes_first(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "fails", Script(lines=(TOUR[0], Fault.error(400, "no such prompt"))))
    await page.goto(link(world, uid))
    why = page.locator(".rollout-why")
    await expect(why).to_contain_text("Failed: trainer")
    await expect(why).to_contain_text("no such prompt")
    await expect(why).to_contain_text("For the trainer's operator")
    await expect(page.locator(".rollout-results")).to_contain_text("0 of 1 trainable (failure_trainer)")
    await why.get_by_role("link", name="turn 2").click()
    assert (await query_of(page))["turn"] == "2"


async def test_a_turn_is_selected_before_its_completion_is_there(open_here: Open, page: Page) -> None:
    """By its link and in the timeline. Its messages are marked when they arrive."""
    model = Stepped(TOUR)
    world = await open_here(agents=[Tour()], model=model)
    marked = page.locator(".messages-card[aria-current]")
    try:
        model.step()
        await page.goto(link(world, await begin(world, "slow", "tour"), "?turn=2"))
        await expect(page.get_by_text("waiting for turn 2 …")).to_be_visible()
        model.step()
        await expect(marked).to_have_count(3)
        await expect(marked.last).to_have_attribute("aria-label", "assistant, turn 2")
        await page.get_by_role("button", name="turn 3, engine").click()
        await expect(marked).to_have_count(0)
        model.step()
        await expect(marked).to_have_count(3)
        await expect(marked.last).to_have_attribute("aria-label", "assistant, turn 3")
    finally:
        model.step(len(TOUR))


async def test_links_to_turns_and_tokens(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR))
    segment = (await finished(world, uid))["outcome"]["segments"][0]
    lengths = [len(span["token_ids"]) for span in segment["spans"]]
    await page.goto(link(world, uid, "?turn=3"))
    await expect(page.locator(".messages-card[aria-current]")).to_have_count(3)
    await expect(page.locator(".messages-card[aria-current]").first).to_be_in_viewport()
    await page.goto("about:blank")
    await page.goto(link(world, uid, f"?segment=0&token={sum(lengths[:4])}"))
    await expect(page.locator(".messages-card[aria-current]")).to_have_count(2)
    assert await query_of(page) == {"segment": "0", "turn": "3", "token": str(sum(lengths[:4]))}
    await expect(page.locator('.tokens-cell[aria-selected="true"]').first).to_be_in_viewport()
    for each in range(3):
        await cards(page).nth(each).click()
    await page.go_back()
    assert page.url == "about:blank"


async def test_messages_and_tokens_select_each_other(open_here: Open, page: Page) -> None:
    """Each message selects the tokens of its turn and author, and each span of tokens selects its messages."""
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR))
    segments = (await finished(world, uid))["outcome"]["segments"]
    await page.goto(link(world, uid))
    await expect(state(page)).to_have_text("completed")
    starts: dict[tuple[str, int], list[int]] = {}
    for index in range(await cards(page).count()):
        await cards(page).nth(index).click(position={"x": 40, "y": 8})
        query = await query_of(page)
        starts.setdefault((query["segment"], int(query["token"])), []).append(index)
        await expect(page.locator('.tokens-cell[aria-selected="true"]').first).to_have_attribute(
            "data-start", query["token"]
        )
    spans = [(segment["id"], start, span) for segment in segments for start, span in placed(segment)]
    assert set(starts) == {(segment, start) for segment, start, _ in spans}
    for segment, start, span in spans:
        is_model = span["author"] == "model"
        shown = [
            await cards(page).nth(index).get_attribute("data-kind") == "completion" for index in starts[segment, start]
        ]
        assert shown == [True] if is_model else not any(shown)
        await cards(page).nth(starts[segment, start][0]).click(position={"x": 40, "y": 8})
        await page.locator(f'.tokens-cell[data-start="{start + len(span["token_ids"]) - 1}"]').click()
        chosen = await page.locator(".messages-card").evaluate_all(
            "(all) => all.flatMap((each, index) => (each.hasAttribute('aria-current') ? [index] : []))"
        )
        assert chosen == starts[segment, start]


def placed(segment: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """The spans of a segment with the index of their first token."""
    found, start = [], 0
    for span in segment["spans"]:
        found.append((start, span))
        start += len(span["token_ids"])
    return found


async def test_keys(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR))
    await page.goto(link(world, uid))
    await expect(state(page)).to_have_text("completed")
    for expected in ("1", "2"):
        await page.keyboard.press("j")
        assert (await query_of(page))["turn"] == expected
    await page.keyboard.press("k")
    assert (await query_of(page))["turn"] == "1"
    await page.keyboard.press("Escape")
    assert await query_of(page) == {}
    await page.get_by_role("tab", name="Timeline").focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.get_by_role("tab", name="Segments")).to_be_focused()
    await expect(page.get_by_role("tabpanel", name="Segments")).to_be_visible()
    await cards(page).first.focus()
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    assert "Let me look up both prices." in await current(page)
    assert (await query_of(page))["turn"] == "1"


async def test_it_survives_a_restart_of_the_server(page: Page, tmp_path: Path) -> None:
    ports: Any = {"host": "127.0.0.1", "http_port": free_port(), "grpc_port": free_port(), "drain_seconds": 0}
    chosen = Settings(
        _env_file=None, journal=str(tmp_path), tokenizers={TOKENIZER: "toy"}, tokenizers_offline=True, **ports
    )
    base = f"http://127.0.0.1:{chosen.http_port}"
    async with httpx.AsyncClient(base_url=base, timeout=60) as http, StrictTrainer(tools_from=base) as trainer:
        async with Server([Calculator()], chosen) as server:
            world = Service(server, trainer, http)
            await trainer.put_script("resumed", Script(then_model=True, lines=(Fault(kind=FaultKind.SILENCE),)))
            target = {"url": f"grpc://{trainer.grpc_target}", "replays_turn_keys": True}
            uid = await begin(world, "resumed", "calculator", QUESTION, completions=target)
            await page.goto(link(world, uid))
            await expect(state(page)).to_have_text("running · live")
        await expect(state(page)).to_have_text("running · reconnecting …")
        async with Server([Calculator()], chosen):
            await expect(state(page)).to_have_text("completed")
            kinds = [event["event"] for event in await events(world, uid)]
            assert kinds.count("resumed") == 1
            await expect(cards(page, "completion")).to_have_count(kinds.count("answered"))
            await expect(cards(page, "tool")).to_have_count(kinds.count("tool_returned"))
            await expect(page.locator(".messages-remark")).to_contain_text(["resumed after a restart"])


async def test_exports(open_here: Open, page: Page, tmp_path: Path) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR))
    rollout = await finished(world, uid)
    await page.goto(link(world, uid))
    await expect(state(page)).to_have_text("completed")

    async def exported(name: str) -> str:
        await page.locator(".rollout-export summary").click()
        async with page.expect_download() as download:
            await page.get_by_role("button", name=re.compile(re.escape(name))).click()
        await (await download.value).save_as(tmp_path / "saved")
        return (tmp_path / "saved").read_text()

    assert [json.loads(line) for line in (await exported("Samples")).splitlines()] == rollout["outcome"]["samples"]
    assert [json.loads(line) for line in (await exported("Events")).splitlines()] == await events(world, uid)
    assert json.loads(await exported("Rollout (JSON)")) == rollout
    await page.locator(".rollout-export summary").click()
    await page.keyboard.press("Escape")
    await expect(page.locator(".rollout-export[open]")).to_have_count(0)


async def test_a_page_without_a_server(open_here: Open, page: Page, tmp_path: Path) -> None:
    world = await open_here(agents=[Tour()])
    if (await world.http.get("/page/standalone.html")).status_code == 404:
        pytest.skip("the page for saved rollouts is not there")
    uid = await play(world, "tour", Script(lines=TOUR))
    await page.goto(link(world, uid))
    await expect(state(page)).to_have_text("completed")
    await page.locator(".rollout-export summary").click()
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Page (one HTML file)").click()
    await (await download.value).save_as(tmp_path / "saved.html")
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    await page.goto(f"{(tmp_path / 'saved.html').as_uri()}#/rollouts/{uid}?turn=2")
    await expect(state(page)).to_have_text("completed")
    await expect(cards(page, "completion")).to_have_count(len(TOUR))
    await expect(cards(page, "completion").nth(2)).to_contain_text(SHOWN)
    await expect(page.locator(".messages-card[aria-current]")).to_have_count(3)
    await expect(page.locator('.timeline-bar[data-lane="tools"]')).to_have_count(4)
    await expect(page.get_by_role("button", name="Cancel the rollout")).to_be_hidden()
    assert {url.split(":")[0] for url in requested} <= {"file", "data"}


async def test_narrow_windows_cut_nothing_off(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR))
    await page.goto(link(world, uid))
    await expect(state(page)).to_have_text("completed")
    wide = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.className)"
    for width in (1024, 720, 390):
        await page.set_viewport_size({"width": width, "height": 844})
        assert await page.locator("html, .rollout-column, .rollout-panel, .tokens").evaluate_all(wide) == []


async def test_without_events_the_outcome_is_shown(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR))
    await finished(world, uid)
    # This server keeps the events as long as the rollout. Saved rollouts may have none.
    error = {"error": {"code": "OUT_OF_RANGE", "message": "the events were dropped", "fields": []}}
    await page.route("**/events?**", lambda route: route.fulfill(status=400, json=error))
    await page.goto(link(world, uid))
    await expect(state(page)).to_have_text("completed")
    await expect(cards(page, "completion")).to_have_count(4)
    await expect(page.locator(".timeline-told")).to_contain_text("There are no times")
    await cards(page, "completion").nth(1).click(position={"x": 40, "y": 8})
    assert (await query_of(page))["turn"] == "2"


async def test_a_rollout_that_does_not_exist(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    await page.goto(link(world, "nowhere-1"))
    await expect(page.get_by_role("alert")).to_contain_text("there is no rollout 'nowhere-1'")
    await expect(page.get_by_text("Loading")).to_have_count(0)


HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


async def test_a_hidden_tab_keeps_no_connection(open_here: Open, page: Page) -> None:
    """It goes on with the events after those it has seen once it is visible again."""
    model = Stepped(TOUR)
    world = await open_here(agents=[Tour()], model=model)
    requests, ended = list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url) if "/events?" in request.url else None)
    page.on("requestfailed", lambda request: ended.append(request.url) if "/events?" in request.url else None)
    try:
        model.step()
        uid = await begin(world, "hidden", "tour")
        await page.goto(link(world, uid))
        await expect(cards(page, "completion")).to_have_count(1)
        async with page.expect_event("requestfailed", lambda request: "/events?" in request.url):
            await page.evaluate(HIDE, True)
    finally:
        model.step(len(TOUR))
    await finished(world, uid)
    assert (len(requests), len(ended)) == (1, 1)
    assert await cards(page, "completion").count() == 1
    await page.evaluate(HIDE, False)
    await expect(state(page)).to_have_text("completed")
    await expect(cards(page, "completion")).to_have_count(len(TOUR))
    assert "after=0" not in requests[1]


async def test_it_asks_again_while_the_server_is_away(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR))
    await finished(world, uid)
    await page.route("**/rollouts/*?view=messages", lambda route: route.abort())
    await page.route("**/events?*", lambda route: route.fulfill(status=429))
    await page.route("**/tokens?*", lambda route: route.fulfill(status=503))
    await page.goto(link(world, uid))
    await expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    await page.unroute("**/rollouts/*?view=messages")
    await expect(state(page)).to_contain_text("reconnecting")
    await page.unroute("**/events?*")
    await expect(state(page)).to_have_text("completed")
    await expect(page.get_by_text("Token ids are shown")).to_be_visible()
    await page.unroute("**/tokens?*")
    await expect(page.get_by_text("Token ids are shown")).to_be_hidden()
    await expect(page.locator(".tokens-special").first).to_be_visible()


async def test_more_tabs_than_a_browser_has_connections(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "stuck", STUCK)
    opened = page
    for _ in range(8):
        await opened.goto(link(world, uid))
        await expect(state(opened)).to_have_text("running · live")
        await opened.evaluate(HIDE, True)
        opened = await page.context.new_page()
    await page.evaluate(HIDE, False)
    await page.get_by_role("button", name="Cancel the rollout").click()
    await page.get_by_role("dialog").get_by_role("button", name="Cancel the rollout").click()
    await expect(state(page)).to_have_text("cancelled")
