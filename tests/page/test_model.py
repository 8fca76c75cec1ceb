"""The fold of events into what is known of a rollout, in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.async_api import Page
from rollout_server import Agent, Run
from rollout_server.testing.script import Script

from tests.page.rollouts import DRIFTING, TOUR, Tour, begin, events, finished, forgetful, play
from tests.system.conftest import Open, Service

FOLD = """async ([rollout, events]) => {
  const { RolloutModel } = await import("page/rollout/model.js");
  const model = events ? new RolloutModel(rollout) : RolloutModel.ofOutcome(rollout);
  for (const event of events ?? []) model.add(event);
  return {
    segments: [...model.segments.values()],
    turns: [...model.turns.values()],
    messages: model.messages.map(({ message, ...rest }) => ({ ...rest, role: message.role })),
    spans: model.messages.map((each) => model.spanOf(each)?.start ?? null),
    items: model.items.length,
    sequence: model.sequence,
  };
}"""


async def fold(
    page: Page, world: Service, rollout: dict[str, Any], found: list[dict[str, Any]] | None
) -> dict[str, Any]:
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
    result: dict[str, Any] = await page.evaluate(FOLD, [rollout, found])
    return result


async def tour(world: Service, *lines: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    uid = await play(world, "tour", Script(lines=lines or TOUR))
    return await finished(world, uid), await events(world, uid)


async def test_events_and_their_outcome_give_the_same(open_here: Open, page: Page) -> None:
    """The spans of the events are those of the outcome, the mask of an author included."""
    world = await open_here(agents=[Tour()])
    rollout, found = await tour(world)
    live = await fold(page, world, rollout, found[:-1])
    whole = await fold(page, world, rollout, found)
    alone = await fold(page, world, rollout, None)
    assert [segment["spans"] for segment in live["segments"]] == [segment["spans"] for segment in whole["segments"]]
    assert whole["segments"] == alone["segments"]
    main = [each for each in whole["messages"] if each["segment"] == "0"]
    assert [(each["role"], each["turn"]) for each in alone["messages"]] == [
        (each["role"], each["turn"]) for each in main
    ]
    assert [turn["masked"] for turn in whole["turns"]] == ["", "", "not the final answer", "", ""]
    assert [turn["reward"] for turn in whole["turns"]] == [0.25, 0.25, None, None, None]


async def test_a_mask_that_comes_later_is_seen(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    rollout, found = await tour(world)
    at = next(index for index, event in enumerate(found) if event["event"] == "masked")
    for event in found[:at]:
        for span in event.get("spans", []):
            span["mask_reason"] = None if span["author"] == "model" else span["mask_reason"]
    reasons = [
        [span["reason"] for span in (await fold(page, world, rollout, found[:stop]))["segments"][0]["spans"]][-1]
        for stop in (at, at + 1)
    ]
    assert reasons == [None, "author"]


async def test_events_that_come_twice_count_once(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Tour()])
    rollout, found = await tour(world)
    once = await fold(page, world, rollout, found)
    assert await fold(page, world, rollout, [*found[:12], *found[5:20], *found]) == once


async def test_messages_follow_a_drift_into_its_segment(open_here: Open, page: Page, tmp_path: Path) -> None:
    """A template that drops the thinking of earlier completions."""
    world = await open_here(agents=[Tour()])
    async with forgetful(tmp_path, DRIFTING, world) as trainer:
        target = {"url": f"grpc://{trainer.grpc_target}"}
        uid = await begin(world, "drift", "tour", completions=target, token_mode="messages")
        rollout, found = await finished(world, uid), await events(world, uid)
    assert [event["kind"] for event in found if event["event"] == "drift_found"] == ["retokenised"]
    model = await fold(page, world, rollout, found)
    assert [segment["kind"] for segment in model["segments"]][:2] == ["main", "drift"]
    placed = [(each["role"], each["segment"], each["turn"]) for each in model["messages"]][:6]
    assert placed == [
        ("system", "0", 1), ("user", "0", 1), ("assistant", "0", 1),
        ("tool", "1", 2), ("tool", "1", 2), ("assistant", "1", 2),
    ]  # fmt: skip
    assert all(start is not None for start in model["spans"][:6])


class Forgetting(Agent):
    """Asks once, and then again in a new context."""

    name = "forgetting"

    async def play(self, run: Run) -> None:
        """Two turns, with a compaction between them."""
        await run.sample()
        short = await run.fork([{"role": "user", "content": "In short?"}], kind="compaction")
        await short.sample()


async def test_after_a_compaction_the_outcome_does_not_tell_the_turns(open_here: Open, page: Page) -> None:
    world = await open_here(agents=[Forgetting()])
    await world.trainer.put_script("r", Script(lines=TOUR[3:]))
    rollout = await finished(world, await begin(world, "r", "forgetting"))
    for messages in (rollout["outcome"]["messages"], [{"role": "user", "content": "In short?"}, TOUR[4].message]):
        rollout["outcome"]["messages"] = messages
        alone = await fold(page, world, rollout, None)
        assert {each["turn"] for each in alone["messages"]} == {0}
        assert {each["kind"] for each in alone["messages"] if each["role"] == "assistant"} == {"completion"}
        assert {each["kind"] for each in alone["messages"] if each["role"] != "assistant"} == {"appended"}


SAVED = """async (rollout) => {
  const { kindOf } = await import("page/tokens/texts.js");
  const { RolloutModel } = await import("page/rollout/model.js");
  const { summaryPart } = await import("page/rollout/summary.js");
  const model = RolloutModel.ofOutcome(rollout);
  const view = { model, uid: rollout.uid, connection: "finished", selection: {}, select() {}, source: {} };
  const part = summaryPart(view);
  part.update();
  const kinds = model.segmentList.flatMap((segment) => segment.spans).map(kindOf);
  return { kinds, roles: model.messages.map((each) => each.kind), text: part.element.textContent };
}"""


async def test_words_of_a_saved_rollout_are_only_words(open_here: Open, page: Page) -> None:
    """Names that every JavaScript object has, and characters that nobody sees."""
    world = await open_here(agents=[Tour()])
    rollout, _ = await tour(world)
    outcome = rollout["outcome"]
    outcome |= {"reason": "constructor", "scores": {"\u061c\u200b\u2028\ufeff": 1}}
    outcome["messages"] += [{"content": "no role"}, {"role": "constructor", "content": 5}]
    for segment in outcome["segments"]:
        segment["spans"][0]["mask_reason"] = "constructor"
    await page.goto(f"http://127.0.0.1:{world.server.http_port}/")
    shown = await page.evaluate(SAVED, rollout)
    assert shown["kinds"][0] == "?"
    assert shown["roles"][-2:] == ["appended", "appended"]
    assert "The agent or the trainer gave this reason." in shown["text"]
    assert "⟨U+061C⟩⟨U+200B⟩⟨U+2028⟩⟨U+FEFF⟩" in shown["text"]
