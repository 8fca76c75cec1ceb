"""The key of the API: asked for once at a time, kept in the tab, and asked for again when the server refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from playwright.async_api import Locator, Page, Response, Route, expect
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.edge.api_keys import entry_of
from rollout_server.settings import Settings
from rollout_server.testing.script import Fault, FaultKind, Script
from rollout_server.testing.trainer import StrictTrainer

from bench.programs.child import free_port
from tests.gateway.rest.test_real_server import start
from tests.page.conftest import FETCHES, asked_in
from tests.page.rollouts import TOUR, Tour, begin, link, play
from tests.support.agents import Idle
from tests.support.bodies import QUESTION, TOKENIZER
from tests.support.toy_model import until
from tests.system.conftest import Open, Service

OLD, NEW = "the-old-key-of-at-least-32-characters", "the-new-key-of-at-least-32-characters"

# Requests whose refusals are read while the answer to the question is being stored, each one microtask later.
ASKED = """async () => {
  const { ApiSource } = await import("page/api.js");
  const refused = (ticks) => ({
    ok: false, status: 401, json: async () => {
      await answered;
      for (let tick = 0; tick < ticks; tick += 1) await null;
      return { error: { code: "UNAUTHENTICATED", message: "a key, please" } };
    },
  });
  let answer, asked = 0, requests = 0;
  const answered = new Promise((resolve) => (answer = resolve));
  globalThis.fetch = async (_, { headers }) =>
    headers.authorization ? { ok: true, json: async () => ({ agents: [] }) } : requests++ ? refused(requests) : first;
  const first = { ok: false, status: 401, json: async () => ({ error: { code: "", message: "" } }) };
  const source = new ApiSource(() => ((asked += 1), asked === 1 ? answered : Promise.resolve("second")));
  sessionStorage.clear();
  const all = Array.from({ length: 40 }, () => source.agents());
  setTimeout(() => answer("a-key"), 20);
  await Promise.all(all);
  return [asked, requests, sessionStorage.getItem("rollout-api-key")];
}"""


def fields(page: Page) -> Locator:
    return page.get_by_label("API key")


async def give(page: Page, key: str) -> None:
    await expect(fields(page)).to_have_count(1)
    await fields(page).fill(key)
    await page.keyboard.press("Enter")


async def watch(page: Page) -> set[str]:
    """Count the requests of the page from now on, and let the test move its clock. Return the paths that are refused."""
    refused = set[str]()

    def note(response: Response) -> None:
        if response.status == 401:
            refused.add(urlsplit(response.url).path.rpartition("/")[2])

    page.on("response", note)
    await page.add_init_script(FETCHES)
    await page.clock.install()
    return refused


async def test_one_question_answers_all_requests_that_were_refused(open_here: Open, page: Page) -> None:
    world = await open_here()
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
    await expect(page.get_by_text("There are no rollouts yet")).to_be_visible()
    assert await page.evaluate(ASKED) == [1, 40, "a-key"]


async def test_a_list_whose_key_is_revoked_stays_and_asks_once(open_here: Open, page: Page, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(entry_of("alice", OLD) + "\n")
    world: Service = await open_here(agents=[Idle()], api_keys_file=file)
    world.http.headers["authorization"] = f"Bearer {OLD}"
    await start(world, "seen")
    refused = await watch(page)
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
    await give(page, OLD)
    await expect(page.locator("td.live-id")).to_have_text(["seen"])
    refused.clear()
    file.write_text(entry_of("alice", NEW) + "\n")
    await expect(fields(page)).to_be_focused()
    await expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("key")
    await expect(page.locator("td.live-id")).to_have_text(["seen"])
    await until(lambda: refused == {"rollouts", "server"})  # each is read independently, and refused once
    assert await asked_in(page, 10) == []
    await expect(fields(page)).to_have_count(1)
    world.http.headers["authorization"] = f"Bearer {NEW}"
    await start(world, "later")
    await give(page, NEW)
    await expect(page.locator("td.live-id")).to_have_text(["later", "seen"])
    await expect(fields(page)).to_have_count(0)
    assert await page.evaluate("[Object.values(sessionStorage), localStorage.length]") == [[NEW], 0]


async def test_a_server_that_restarts_with_another_key(page: Page, tmp_path: Path) -> None:
    """The stream that is opened again is refused; what was shown stays, and the new key lets it go on."""
    ports: dict[str, Any] = {"host": "127.0.0.1", "http_port": free_port(), "grpc_port": free_port()}
    common: dict[str, Any] = {"_env_file": None, "journal": str(tmp_path / "journal"), "drain_seconds": 0, **ports}
    common |= {"tokenizers": {TOKENIZER: "toy"}, "tokenizers_offline": True}
    before, after = (Settings(api_keys=(entry_of("alice", key),), **common) for key in (OLD, NEW))
    base = f"http://127.0.0.1:{before.http_port}"
    async with httpx.AsyncClient(base_url=base, timeout=60) as http, StrictTrainer(tools_from=base) as trainer:
        async with Server([Calculator()], before) as server:
            world = Service(server, trainer, http)
            http.headers["authorization"] = f"Bearer {OLD}"
            await trainer.put_script("resumed", Script(then_model=True, lines=(Fault(kind=FaultKind.SILENCE),)))
            target = {"url": f"grpc://{trainer.grpc_target}", "replays_turn_keys": True}
            uid = await begin(world, "resumed", "calculator", QUESTION, completions=target)
            refused = await watch(page)
            await page.goto(link(world, uid))
            await give(page, OLD)
            await expect(page.locator(".rollout-state")).to_have_text("running · live")
        await expect(page.locator(".rollout-state")).to_have_text("running · reconnecting …")
        refused.clear()
        async with Server([Calculator()], after):
            await expect(fields(page)).to_be_focused()
            await expect(page.locator(".messages-card").first).to_be_visible()
            # The rollout and its events are read independently, and each is refused once.
            await until(lambda: refused == {uid, "events"})
            assert await asked_in(page, 10) == []
            await give(page, NEW)
            await expect(page.locator(".rollout-state")).to_have_text("completed")
            await expect(page.locator(".messages-remark")).to_contain_text(["resumed after a restart"])


async def test_what_the_key_may_not_do_is_said_and_not_tried_in_a_loop(open_here: Open, page: Page) -> None:
    async def forbid(route: Route) -> None:
        error = {"code": "PERMISSION_DENIED", "message": "this key may not read rollouts"}
        await route.fulfill(status=403, json={"error": error})

    world = await open_here(agents=[Tour(), Idle()])
    stuck = Script(lines=(TOUR[0], Fault(kind=FaultKind.SILENCE)))
    uid = await play(world, "stuck", stuck)
    await watch(page)
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
    await expect(page.locator("td.live-id")).to_have_text(["stuck"])
    await page.route("**/v1/**", forbid)
    await expect(page.get_by_role("alert")).to_have_text("this key may not read rollouts")
    await expect(page.locator("td.live-id")).to_have_text(["stuck"])
    assert 4 <= len(await asked_in(page, 10)) <= 12  # two polls, each every two seconds
    await page.unroute_all()
    await expect(page.get_by_role("alert")).to_have_count(0)
    # A stream that is opened again is refused.
    await page.goto(link(world, uid))
    await expect(page.locator('.messages-card[data-kind="tool"]')).to_have_count(2)
    await page.route("**/v1/**", forbid)
    for hidden in (True, False):
        await page.evaluate(
            """(hidden) => {
              Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
              document.dispatchEvent(new Event("visibilitychange"));
            }""",
            hidden,
        )
    await expect(page.get_by_role("alert").first).to_have_text("this key may not read rollouts")
    await expect(page.locator(".rollout-state")).to_have_text("running · not followed any more")
    await expect(page.locator('.messages-card[data-kind="tool"]')).to_have_count(2)
    polled = await asked_in(page, 10)
    assert 1 <= len(polled) <= 6
    assert set(polled) == {f"v1/rollouts/{uid}?view=basic"}
    await expect(fields(page)).to_have_count(0)
