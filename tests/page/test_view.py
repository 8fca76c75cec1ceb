"""`rollout view` as a process, and what a browser sees of it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.async_api import Page, expect
from rollout_server.testing.script import Script

from tests.page.rollouts import TOUR, Tour, finished, play, slow
from tests.support.forking import forker
from tests.support.processes import command, environment
from tests.system.conftest import Open, open_world

KEY = "a-key-of-at-least-32-characters-1234"


@asynccontextmanager
async def viewing(*arguments: str, cwd: Path, **env: str) -> AsyncIterator[str]:
    """Run `rollout view`, and yield the URL that it prints. Ctrl-C must end it."""
    process = await forker().fork("view", *arguments, cwd=cwd, env=environment(**env), has_stdout=True)
    try:
        assert process.stdout is not None
        yield (await process.stdout.readline()).decode().strip()
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_journal_of_a_stopped_server(page: Page, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        world = await open_world(stack, agents=[Tour()], journal=str(tmp_path / "journal"))
        uids = [await play(world, name, Script(lines=TOUR)) for name in ("first", "second")]
        for uid in uids:
            await finished(world, uid)
    async with viewing("journal", cwd=tmp_path) as url:
        await page.goto(url)
        await expect(page.get_by_role("row")).to_have_count(3)
        await page.get_by_role("row").last.get_by_role("link").first.click()
        await expect(page).to_have_title(re.compile(uids[0]))
        await expect(page.locator('.messages-card[data-kind="completion"]')).to_have_count(len(TOUR))
        await expect(page.get_by_text("<|im_start|>").first).to_be_visible()
        await expect(page.get_by_role("button", name="Cancel the rollout")).to_be_hidden()
        parts = urlsplit(url)
        async with httpx.AsyncClient(trust_env=False) as http:
            assert len(parts.path) > 20
            assert (await http.get(f"{parts.scheme}://{parts.netloc}/v1/rollouts")).status_code == 404
    told = await command("view", "journal", "--html", "out.html", "--uid", uids[1], "--json", cwd=tmp_path)
    assert told.code == 0, told.err
    assert json.loads(told.out)["written"]["rollouts"] == 1
    await page.goto((tmp_path / "out.html").as_uri())
    await expect(page).to_have_title(re.compile(uids[1]))
    await expect(page.get_by_text("<|im_start|>").first).to_be_visible()


async def test_a_running_server_is_followed_and_not_changed(open_here: Open, page: Page, tmp_path: Path) -> None:
    world = await open_here(agents=[Tour()], api_key=KEY)
    world.http.headers["authorization"] = f"Bearer {KEY}"
    uid = await play(world, "slow", Script(lines=slow(0.7, *TOUR)))
    server = f"http://127.0.0.1:{world.server.http_port}"
    async with viewing(f"{server}/#/rollouts/{uid}", cwd=tmp_path, ROLLOUT_API_KEY=KEY) as url:
        assert url.endswith(f"/#/rollouts/{uid}")
        await page.goto(url)
        completions = page.locator('.messages-card[data-kind="completion"]')
        await expect(completions.first).to_contain_text("Let me look up both prices.")
        await expect(page.get_by_role("button", name="Cancel the rollout")).to_be_hidden()
        await expect(page.locator("dialog")).to_have_count(0)  # the key is not asked for
        async with httpx.AsyncClient(trust_env=False) as http:
            reply = await http.post(f"{url.partition('#')[0]}v1/rollouts/{uid}/cancel", json={})
            assert reply.status_code == 405
        await expect(page.locator(".rollout-state")).to_have_text("completed")
        await expect(completions).to_have_count(len(TOUR))
    env = environment(ROLLOUT_API_KEY=KEY)
    told = await command("view", f"{server}/#/rollouts/{uid}", "--html", "out.html", cwd=tmp_path, env=env)
    assert (told.code, "1 rollout, " in told.out) == (0, True), told.err
    await page.goto((tmp_path / "out.html").as_uri())
    await expect(page.locator(".rollout-state")).to_have_text("completed")
    await expect(page.get_by_text("<|im_start|>").first).to_be_visible()
    assert KEY not in (tmp_path / "out.html").read_text()


async def test_one_file_opens_its_rollout(open_here: Open, page: Page, tmp_path: Path) -> None:
    world = await open_here(agents=[Tour()])
    rollout = await finished(world, await play(world, "one", Script(lines=TOUR)))
    (tmp_path / "one.json").write_text(json.dumps(rollout))
    async with viewing("one.json", cwd=tmp_path) as url:
        assert url.endswith(f"/#/rollouts/{rollout['uid']}")
        await page.goto(url)
        await expect(page.locator(".rollout-why")).to_contain_text("Completed: stop")
        await expect(page.locator('.messages-card[data-kind="completion"]').first).to_contain_text("Let me look up")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("gone.json", "gone.json does not exist"),
        (".", "has no file with rollouts, and it is not the directory of a journal"),
        ("http://127.0.0.1:9", "cannot be reached"),
        ("http://user:secret@127.0.0.1:9", "set ROLLOUT_API_KEY to your API key"),
    ],
)
async def test_what_cannot_be_shown_is_one_line(tmp_path: Path, target: str, text: str) -> None:
    told = await command("view", target, cwd=tmp_path)
    assert told.code == 1
    [line] = told.err.splitlines()
    assert line.startswith("rollout view: ")
    assert text in line
    assert "secret" not in line


async def test_a_journal_in_use_and_a_wrong_key_are_one_line(open_here: Open, tmp_path: Path) -> None:
    world = await open_here(api_key=KEY, journal=str(tmp_path / "journal"))
    told = await command("view", "journal", cwd=tmp_path)
    assert (told.code, "is in use: a server uses it; `rollout view URL`" in told.err) == (1, True), told.err
    told = await command("view", f"http://127.0.0.1:{world.server.http_port}", "--html", "out.html", cwd=tmp_path)
    assert (told.code, "set ROLLOUT_API_KEY to your API key" in told.err) == (1, True), told.err
    assert not (tmp_path / "out.html").exists()
