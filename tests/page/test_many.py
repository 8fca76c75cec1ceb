"""The page beside a server at work: many rollouts run, one is followed, and a caller sees only its own."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.support.bodies import body
from tests.support.gated_model import GatedModel
from tests.system.conftest import Open, Service


def entry(name: str, key: str) -> str:
    """An entry of ROLLOUT_API_KEYS."""
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}"


async def start(world: Service, rollout_id: str, **headers: str) -> str:
    """Start a rollout whose trainer answers when the gate is open, and return its uid."""
    trainer = body(rollout_id, world.trainer.url)
    start = {
        "rollout_id": rollout_id,
        "messages": trainer["messages"],
        "completions": {"url": world.trainer.url, "dialect": "http_masked"},
        "tokenizer": {"name": trainer["tokenizer_name"]},
    }
    reply = await world.http.post("/v1/rollouts", json=start, headers=headers)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["rollout"]["uid"])


@pytest.mark.parametrize("count", [60, 200])  # more than a page of the list has
async def test_one_of_many_running_rollouts_is_followed(open_here: Open, page: Page, count: int) -> None:
    model = GatedModel()
    world: Service = await open_here(model=model, max_running=count)
    try:
        uids = await asyncio.gather(*(start(world, f"task-{number}") for number in range(count)))
        await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
        await expect(page.get_by_text(f"{count} of {count}")).to_be_visible()
        await page.get_by_label("Search").fill("task-7")
        await page.get_by_role("link", name=uids[7].rpartition("-")[2][:10]).click()
        await expect(page.get_by_role("heading", name="task-7")).to_be_visible()
        await expect(page.get_by_role("status").first).to_contain_text("running")
    finally:
        model.open()
    await expect(page.get_by_text("Completed: stop")).to_be_visible(timeout=60_000)
    await expect(page.get_by_text("Multiplying 8 by 2 gives 16.")).to_be_visible()
    found = (await world.http.get(f"/v1/rollouts/{uids[7]}?view=samples")).json()["outcome"]["samples"][0]
    trained, tokens = sum(found["response_mask"]), len(found["prompt_ids"]) + len(found["response_ids"])
    await expect(page.get_by_text(f"{trained} of {tokens} tokens train")).to_be_visible()
    await page.get_by_role("link", name="Rollouts", exact=True).click()
    await expect(page.get_by_text(f"0 of {count}")).to_be_visible()


async def test_a_caller_sees_its_own_rollouts(open_here: Open, page: Page) -> None:
    keys = {name: f"{name}-key-of-at-least-32-characters" for name in ("alice", "bob")}
    world: Service = await open_here(api_keys=[entry(name, key) for name, key in keys.items()])
    mine, theirs = [await start(world, f"of-{name}", authorization=f"Bearer {key}") for name, key in keys.items()]
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
    await page.get_by_label("API key").fill("wrong")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_be_visible()
    await page.get_by_label("API key").fill(keys["alice"])
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("of-alice")).to_be_visible()
    await expect(page.get_by_text("of-bob")).to_have_count(0)
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/#/rollouts/{theirs}")
    await expect(page.get_by_role("alert")).to_contain_text("there is no rollout")
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/#/rollouts/{mine}")
    await expect(page.get_by_role("heading", name="of-alice")).to_be_visible()
    stored = await page.evaluate("() => [Object.keys(localStorage).length, document.cookie, location.href]")
    assert stored[:2] == [0, ""]
    assert keys["alice"] not in stored[2]


async def test_a_key_that_is_revoked_while_a_rollout_is_followed_is_asked_for_again(
    open_here: Open, page: Page, tmp_path: Path
) -> None:
    model, file = GatedModel(), tmp_path / "keys"
    old, new = (f"{which}-key-of-at-least-32-characters" for which in ("the-old", "the-new"))
    file.write_text(entry("alice", old) + "\n")
    world: Service = await open_here(model=model, api_keys_file=file, synchronous_needs_key=False)
    try:
        uid = await start(world, "mine", authorization=f"Bearer {old}")
        await page.goto(f"http://127.0.0.1:{world.server.http_port}/#/rollouts/{uid}")
        await page.get_by_label("API key").fill(old)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("status").first).to_contain_text("running")
        file.write_text(entry("alice", new) + "\n")
        await expect(page.get_by_label("API key")).to_be_visible()
        await page.get_by_label("API key").fill(new)
        await page.keyboard.press("Enter")
    finally:
        model.open()
    await expect(page.get_by_text("Completed: stop")).to_be_visible()
