"""The page as one HTML file: it works from a disk without network access, and shows hostile contents as text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from playwright.async_api import Page, Request, expect
from rollout_gateway.page.standalone import standalone_document, standalone_page
from rollout_server.evaluation.report import report
from rollout_server.evaluation.row_result import RowResult
from rollout_server.evaluation.summary import summary_of
from rollout_server.testing.script import Script

from tests.page.rollouts import TOUR, Tour, events, finished, play
from tests.system.conftest import Open, Service

#: The number of lines of an element's text.
LINES = """(element) => {
  const range = document.createRange();
  range.selectNodeContents(element);
  return range.getClientRects().length;
}"""
HOSTILE = "</script><script>document.title='run'</script><!--<script>\u2028\u2029\ud800 \"ROLLOUTS-DATA\""


async def saved(world: Service, uid: str) -> dict[str, Any]:
    rollout = await finished(world, uid)
    texts = {}
    for segment in rollout["outcome"]["segments"]:
        reply = await world.http.get(f"/v1/rollouts/{uid}/segments/{segment['id']}/tokens")
        texts[segment["id"]] = reply.json()["texts"]
    return {"rollout": rollout, "events": await events(world, uid), "texts": texts}


async def show(page: Page, path: Path, *found: dict[str, Any], fragment: str = "") -> list[str]:
    """Open a document with these rollouts. Return the URLs of all further requests."""
    path.write_bytes(standalone_document(json.dumps({"rollouts": found}).encode()))  # noqa: ASYNC240 - a small file
    requests: list[str] = []

    def note(request: Request) -> None:
        requests.append(request.url)

    page.on("request", note)
    await page.goto(f"{path.as_uri()}{fragment}")
    return [url for url in requests if not url.startswith(("file:", "data:"))]


async def test_one_rollout_is_shown_at_once(open_here: Open, page: Page, tmp_path: Path) -> None:
    world = await open_here(agents=[Tour()])
    uid = await play(world, "tour", Script(lines=TOUR))
    found = await saved(world, uid)
    requests = await show(page, tmp_path / "one.html", found)
    await expect(page).to_have_title(re.compile(uid))
    await expect(page.locator('.messages-card[data-kind="completion"]')).to_have_count(len(TOUR))
    await expect(page.locator(".rollout-state")).to_have_text("completed")
    await expect(page.get_by_role("button", name="Cancel the rollout")).to_be_hidden()
    await expect(page.get_by_text("<|im_start|>").first).to_be_visible()
    assert requests == []


async def test_several_are_listed_filtered_and_linked(open_here: Open, page: Page, tmp_path: Path) -> None:
    world = await open_here(agents=[Tour()])
    uids = [await play(world, name, Script(lines=TOUR), group_id="g") for name in ("first", "second")]
    found = [await saved(world, uid) for uid in uids]
    path = tmp_path / "two.html"
    await show(page, path, *found)
    await expect(page.get_by_role("row")).to_have_count(3)
    await page.get_by_role("searchbox").fill("second")
    await expect(page.get_by_role("row")).to_have_count(2)
    await page.get_by_role("row").last.get_by_role("link").first.click()
    await expect(page).to_have_title(re.compile(uids[1]))
    await page.goto(f"{path.as_uri()}#/rollouts/{uids[0]}?turn=2")
    await expect(page.locator(".messages-card[aria-current]").first).to_be_visible()
    await page.goto(f"{path.as_uri()}#/groups/g")
    await expect(page.get_by_role("heading", name="Group g")).to_be_visible()
    await expect(page.get_by_role("row")).to_have_count(3)
    await page.goto(f"{path.as_uri()}#/rollouts/gone")
    await expect(page.get_by_role("alert")).to_contain_text("This document has no rollout gone.")


async def test_without_events_and_texts_the_outcome_is_shown(open_here: Open, page: Page, tmp_path: Path) -> None:
    world = await open_here(agents=[Tour()])
    found = await saved(world, await play(world, "tour", Script(lines=TOUR)))
    await show(page, tmp_path / "bare.html", {**found, "events": [], "texts": {}})
    await expect(page.locator('.messages-card[data-kind="completion"]').first).to_contain_text("Let me look up")
    await expect(page.locator(".rollout-why")).to_contain_text("Completed: stop")
    await expect(page.locator(".rollout-results")).to_contain_text("verified")


async def test_hostile_contents_stay_text(page: Page, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}]
    outcome = {
        "end": "failure", "category": "tool", "message": HOSTILE, "turn": 1, "http_status": None, "failure_class": "tool",
        "messages": messages,
        "segments": [], "samples": [], "metrics": {}, "reward": None, "scores": {HOSTILE: 1.0}, "extra": None,
        "warnings": [{"code": HOSTILE, "message": HOSTILE, "turn": 1, "index": None}],
    }  # fmt: skip
    spec = {"rollout_id": HOSTILE, "agent": HOSTILE, "messages": messages[:1], "labels": {HOSTILE: HOSTILE}}
    rollout = {
        "uid": HOSTILE, "spec": spec, "state": "finished", "last_sequence": 0, "create_time": None, "finish_time": None,
        "outcome": outcome, "metrics": {}, "delivery": None, "caller": HOSTILE,
    }  # fmt: skip
    await show(page, tmp_path / "hostile.html", {"rollout": rollout, "events": [], "texts": {}})
    await expect(page.locator('.messages-card[data-kind="completion"]')).to_contain_text("</script><script>")
    await expect(page.locator("script:not([id])")).to_have_count(2)  # the import map and the start
    assert await page.title() != "run"


def test_the_policy_allows_no_connections() -> None:
    page = standalone_page()
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; ")
    assert not {"connect-src", "unsafe-inline", "unsafe-eval", "http"} & set(re.split(r"[ ;:']+", policy))
    assert "require-trusted-types-for 'script'" in policy
    assert page.count('"ROLLOUTS-DATA"') == 1


async def test_the_gateway_serves_it(open_here: Open) -> None:
    world = await open_here()
    reply = await world.http.get("/page/standalone.html")
    assert (reply.status_code, reply.text) == (200, standalone_page())


async def test_the_report_of_an_evaluation_opens_its_rollouts(page: Page, tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": HOSTILE}]
    fields: dict[str, Any] = {"end": "stop", "reason": "stop", "turns": 1, "prompt": prompt, "ground_truth": "42"}
    messages = [*prompt, {"role": "assistant", "content": "42"}]
    results = [RowResult(f"row-{row}-1", row=row, reward=row / 2, messages=messages, **fields) for row in (1, 2)]
    message = "503 " + "a long reason " * 30
    failed = RowResult("row-3-1", "failure", "engine_server", message, row=3, prompt=prompt, failure_class="engine")
    path = tmp_path / "report.html"
    path.write_bytes(report({"agent": "tour"}, summary_of([*results, failed], 1.0, {}), [*results, failed]))
    await page.goto(path.as_uri())
    await expect(page.get_by_role("heading", name="Evaluation of tour")).to_be_visible()
    rows = page.locator("main").get_by_role("row")
    await expect(rows).to_have_count(4)
    await expect(rows.nth(1)).to_contain_text("engine: 503")
    await expect(rows.locator("td.live-uid")).to_have_text(["row-3-1", "row-1-1", "row-2-1"])
    await rows.nth(3).get_by_role("link").first.click()
    await expect(page.get_by_role("heading", name="Evaluation of tour")).to_be_hidden()
    await expect(page.locator('.messages-card[data-kind="completion"]')).to_contain_text("42")
    await expect(page.locator("main")).to_contain_text("ground truth=42")
    await page.get_by_role("link", name="Rollouts", exact=True).click()
    await expect(page.get_by_role("heading", name="Evaluation of tour")).to_be_visible()
    await page.set_viewport_size({"width": 390, "height": 844})
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    category = page.get_by_role("cell", name="engine_server")
    assert await category.evaluate(LINES) == 1
