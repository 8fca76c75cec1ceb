"""`Environment`: the world speaks. With a real server and a strict trainer, which verifies every token and mask."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rollout_server import Environment, Limits, Reply, RewardResult, Rubric, Run, Step, tool
from rollout_server.local_stack import LocalStack, ScriptedModel

Serving = Callable[..., LocalStack]


class Countdown(Environment):
    """Count down from a number that the world says; each right number is worth 0.5."""

    name = "countdown"
    limits = Limits(turns=6)

    async def reset(self, run: Run) -> str:
        run.state["next"] = int(str(run.metadata["from"]))
        return f"Count down from {run.state['next']}."

    async def step(self, run: Run, reply: Reply) -> Step:
        expected = run.state["next"]
        if reply.content != str(expected):
            return Step(f"No, {expected}.", 0.0)
        run.state["next"] = expected - 1
        return Step("Go on." if expected > 1 else "Done.", 0.5, done=expected == 1)


def test_the_world_and_the_model_take_turns(serving: Serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.says("3").says("1").says("2").says("1")
    rollout = serving(Countdown()).play([{"role": "system", "content": "Play."}], model, metadata={"from": 3})
    assert [(message["role"], message["content"]) for message in rollout.messages] == [
        ("system", "Play."),
        ("user", "Count down from 3."),
        ("assistant", "3"),
        ("user", "Go on."),
        ("assistant", "1"),
        ("user", "No, 2."),
        ("assistant", "2"),
        ("user", "Go on."),
        ("assistant", "1"),
        ("user", "Done."),
    ]
    (sample,) = rollout.samples
    assert (rollout.stop, rollout.reward, sample.reward, sample.role) == ("stop", 1.5, 1.5, "agent")
    assert [(each.turn, each.value) for each in sample.turn_rewards] == [(1, 0.5), (2, 0.0), (3, 0.5), (4, 0.5)]
    assert sample.turn_scores == [0.5, 0.0, 0.5, 0.5]
    assert [event.rewarded.value for event in rollout.events if event.HasField("rewarded")] == [0.5, 0.0, 0.5, 0.5]
    assert sample.spans is not None
    assert {span.reason for span in sample.spans if span.author != "model"} == {"prompt", "environment"}


def test_a_limit_ends_the_episode_with_the_rewards_so_far(serving: Serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.says("2").says("x").says("x").says("x").says("x").says("x").says("x")
    rollout = serving(Countdown()).play("Play.", model, metadata={"from": 2})
    assert (rollout.stop, rollout.reward, len(rollout.samples[0].turn_rewards)) == ("max_turns", 0.5, 6)


@tool
async def look() -> str:
    """Look around."""
    return "a door"


class Room(Environment):
    """An environment with a tool, in plain functions."""

    name = "room"
    tools = (look,)
    reward_rule = "own"

    def reset(self, run: Run) -> list[dict[str, str]]:
        run.state["thread"] = threading.current_thread()
        return [{"role": "system", "content": "A room."}, {"role": "user", "content": "You wake up."}]

    def step(self, run: Run, reply: Reply) -> tuple[dict[str, str] | None, float | None, bool]:
        assert threading.current_thread() is not threading.main_thread()
        assert not reply.tool_calls
        if "door" in reply.content:
            return None, 1, True
        return {"role": "user", "content": "Nothing happens."}, None, False

    async def reward(self, run: Run) -> RewardResult:
        return RewardResult(7.0, scores={"turns": float(run.turn)})


def test_tools_run_before_the_world_reacts(serving: Serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.calls("look").says("I wait.").calls("look").calls("look").says("I open the door.")
    rollout = serving(Room()).play("Begin.", model)
    assert (rollout.tool_results, rollout.stop, rollout.reward) == (["a door"] * 3, "stop", 7.0)
    (sample,) = rollout.samples
    assert ([(each.turn, each.value) for each in sample.turn_rewards], sample.reward) == ([(5, 1.0)], 1.0)
    assert sample.turn_scores == [0.0, 0.0, 0.0, 0.0, 1.0]


class Forgetful(Environment):
    """Each step replaces the conversation by a shorter one. Without a reward."""

    name = "forgetful"

    async def step(self, run: Run, reply: Reply) -> Step:
        done = "end" in reply.content
        if not done:
            await run.fork([{"role": "user", "content": f"You said {reply.content}"}], kind="compaction")
        return Step("And now?", done=done)


def test_the_episode_goes_on_in_a_compaction(serving: Serving, scripted_model: ScriptedModel) -> None:
    rollout = serving(Forgetful()).play("Begin.", scripted_model.says("a").says("b").says("end"))
    assert [sample.kind for sample in rollout.samples] == ["main", "compaction", "compaction"]
    assert [message["content"] for message in rollout.messages] == ["You said b", "And now?", "end", "And now?"]
    assert (rollout.stop, rollout.reward, rollout.failure) == ("stop", None, None)


def test_without_tools_the_world_gets_what_the_model_calls(serving: Serving, scripted_model: ScriptedModel) -> None:
    class Bare(Environment):
        name = "bare"

        def step(self, run: Run, reply: Reply) -> Step:
            return Step(reward=len(reply.tool_calls), done=True)

    assert serving(Bare()).play("Begin.", scripted_model.calls("look")).reward == 1.0


def polite(response: str) -> float:
    return float("please" not in response)


def test_a_rubrics_reward_is_added_to_that_of_the_turns(serving: Serving, scripted_model: ScriptedModel) -> None:
    class Polite(Countdown):
        name = "polite"
        rubric = Rubric([polite], [3.0])

        async def reset(self, run: Run) -> str:
            shorter = await run.fork([{"role": "user", "content": "Be polite."}], kind="compaction")
            run.state["next"] = 1
            return f"{len(shorter.messages)} message so far."

    rollout = serving(Polite()).play("Begin.", scripted_model.says("please").says("1"))
    assert [message["content"] for message in rollout.messages][:3] == ["Be polite.", "1 message so far.", "please"]
    assert (rollout.reward, rollout.samples[-1].turn_scores) == (3.5, [0.0, 0.5])
    assert rollout.scores == {"polite": 1.0}


class Failing(Environment):
    """Fail as the request's metadata says."""

    name = "failing"

    async def reset(self, run: Run) -> Any:
        if run.metadata["at"] == "reset":
            raise LookupError("no such level")
        return run.metadata.get("says")

    async def step(self, run: Run, reply: Reply) -> Any:
        at = str(run.metadata["at"])
        if at == "step":
            raise LookupError("no such level")
        return {
            "text": "Go on.",
            "two": ("Go on.", 1.0),
            "done": ("Go on.", 1.0, "no"),
            "reward": ("Go on.", "much", False),
            "message": ({"content": "no role"}, 1.0, False),
            "messages": ([7], 1.0, False),
        }[at]


FAILURES = [
    ("reset", None, "LookupError: no such level", "reset"),
    ("step", None, "LookupError: no such level", "step"),
    ("step", 7, "reset returned 7; it must be a text, a message, a list of messages, or None", "reset"),
    ("step", {"content": "no role"}, "not a message", "reset"),
    ("text", None, "step returned 'Go on.'; it must return a Step or a tuple (messages, reward, done)", "step"),
    ("two", None, "step returned ('Go on.', 1.0); it must return a Step or a tuple", "step"),
    ("done", None, "step returned done='no'; it must be True or False", "step"),
    ("reward", None, "give_reward: the reward is 'much'", "step"),
    ("message", None, "not a message", "step"),
    ("messages", None, "step returned [7]; it must be a text", "step"),
]


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_names_file_and_line(
    serving: Serving, scripted_model: ScriptedModel, caplog: pytest.LogCaptureFixture, case: tuple[str, Any, str, str]
) -> None:
    at, says, text, method = case
    rollout = serving(Failing()).play("Begin.", scripted_model.says("I go."), metadata={"at": at, "says": says})
    assert rollout.failure is not None
    assert "agent's play failed" in rollout.failure
    assert (rollout.reward, [sample.reward for sample in rollout.samples if sample.reward is not None]) == (None, [])
    assert text in caplog.text
    lines, first = inspect.getsourcelines(getattr(Failing, method))
    named = {int(line) for line in re.findall(r"test_environment\.py:(\d+)", caplog.text)}
    assert named & set(range(first, first + len(lines)))


def test_a_class_is_checked_when_it_is_defined() -> None:
    with pytest.raises(
        TypeError, match=r"class Deaf: step is called with \(self, run, reply\): .*test_environment.py:"
    ):

        class Deaf(Environment):
            name = "deaf"

            async def step(self, run: Run) -> Step:  # type: ignore[override]
                return Step()

    class Mute(Environment):
        name = "mute"

    with pytest.raises(TypeError, match=r"abstract.*step"):
        Mute()  # type: ignore[abstract]


def test_what_a_subclass_inherits() -> None:
    class Silent(Environment):
        name = "silent"

        async def step(self, run: Run, reply: Reply) -> Step:
            return Step()

    class Repeatable(Silent):
        replayable = True

    assert (Silent().replayable, Repeatable().replayable, Silent().description) == (False, True, "")
    assert Countdown().description.startswith("Count down")


class Helpdesk(Environment):
    """A simulated user, whose own completions do not train."""

    name = "helpdesk"
    reward_rule = "split"

    async def step(self, run: Run, reply: Reply) -> Step:
        user = run.state.get("user")
        if user is None:
            goal = {"role": "system", "content": "You want a refund. Say DONE once you have it."}
            user = run.state["user"] = await run.fork([goal], role="user", trainable=False)
        await user.append({"role": "user", "content": reply.content})
        said = (await user.sample()).content
        return Step(said, reward=1.0, done=True) if "DONE" in said else Step(said)


def test_a_simulated_user_does_not_train_and_its_mask_says_who_wrote_it(
    serving: Serving, scripted_model: ScriptedModel
) -> None:
    model = scripted_model.says("Hello.").says("A refund, please.").says("Here it is.").says("DONE")
    rollout = serving(Helpdesk()).play("Hi.", model)
    agent, user = rollout.samples
    assert (agent.role, agent.trainable, agent.reward, rollout.reward) == ("agent", True, 1.0, 1.0)
    assert (user.role, user.trainable, user.reward, user.kind) == ("user", False, None, "subagent")
    assert user.untrainable_reason == "role_not_trainable"
    assert agent.turn_scores == [0.0, 1.0]
    assert user.spans is not None
    written = [span for span in user.spans if span.author == "model"]
    assert [span.trains for span in written] == [True, True]
    assert sum(user.response_mask) == sum(span.stop - span.start for span in written)
    (forked,) = [event.forked for event in rollout.events if event.HasField("forked")]
    assert (forked.role, forked.trainable) == ("user", False)
