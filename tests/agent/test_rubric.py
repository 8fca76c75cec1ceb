"""Rubrics and judges: arguments by name, weights, timeouts, failures, groups and parsers."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from rollout_server import (
    Agent,
    Judge,
    ModelFailed,
    RewardResult,
    Rubric,
    Run,
    json_field,
    number_from,
    tool,
    yes_or_no,
)
from rollout_server.core.message import Message
from rollout_server.core.outcome import Category, Failure, FailureClass, Stop
from rollout_server.core.record import ModelCalled, Note
from rollout_server.core.spec import Dialect, Target
from rollout_server.runtime.errors import AgentMistake, RewardFailed, RolloutEnded, RolloutFailed
from rollout_server.runtime.models import ModelCompletion, ModelEndpoint, ModelLimits, ModelReply
from rollout_server.runtime.ports import CompletionRequest

from tests.support.runtime_harness import FOREVER, RuntimeHarness, Say, call, outcome_of, wait

NewWorld = Callable[..., RuntimeHarness]
METADATA = '{"ground_truth": "8", "level": 2}'


def graded(rubric: Rubric, **fields: Any) -> Agent:
    return type("Graded", (Agent,), {"name": "graded", "rubric": rubric, **fields})()


async def rewarded(new_world: NewWorld, rubric: Rubric, **harness: Any) -> RewardResult:
    """The reward of a rollout whose last message is "It is 8."."""
    world = new_world(graded(rubric), **harness)
    outcome = await outcome_of(world.start(Say("It is 8."), metadata_json=METADATA))
    assert outcome.end == Stop("stop"), outcome.end
    return outcome.reward_result


async def failed(new_world: NewWorld, rubric: Rubric, **harness: Any) -> Failure:
    world = new_world(graded(rubric), **harness)
    outcome = await outcome_of(world.start(Say("It is 8."), metadata_json=METADATA))
    assert isinstance(outcome.end, Failure)
    assert outcome.reward_result == RewardResult()
    return outcome.end


def exact(response: str, answer: str) -> bool:
    return answer in response


async def short(completion: Sequence[Mapping[str, Any]]) -> float:
    return 0.5 if len(completion) == 1 else 0.0


def line_of(function: Callable[..., object]) -> str:
    code = function.__code__
    return f"({code.co_filename}:{code.co_firstlineno})"


async def test_the_reward_is_the_weighted_sum_and_scores_keep_their_names(new_world: NewWorld) -> None:
    result = await rewarded(new_world, Rubric(funcs=[exact, short], weights=[1.0, 0.2]))
    assert (result.reward, result.scores) == (1.1, {"exact": 1.0, "short": 0.5})


async def test_a_function_gets_what_its_parameters_name(new_world: NewWorld) -> None:
    seen: dict[str, Any] = {}

    async def everything(
        *, run: Run, prompt: Any, completion: Any, response: str, answer: str, state: Any, metadata: Any, more: int = 3
    ) -> float:
        seen.update(locals())
        return 1

    def by_keywords(response: str, **kwargs: Any) -> float:
        seen["keywords"] = {"response", *kwargs}
        return 0.0

    rubric = Rubric().add(everything, 2).add(by_keywords, 0, name="keywords")
    assert rubric.names == ("everything", "keywords")
    assert (await rewarded(new_world, rubric)).reward == 2.0
    assert seen["prompt"] == [{"role": "user", "content": "5 + 3?"}]
    assert seen["completion"] == [{"role": "assistant", "content": "It is 8."}]
    assert (seen["response"], seen["answer"], seen["more"]) == ("It is 8.", "8", 3)
    assert (seen["metadata"]["level"], seen["state"], seen["run"].turn) == (2, {}, 1)
    assert seen["keywords"] == {"run", "prompt", "completion", "response", "answer", "state", "metadata"}


async def test_functions_run_concurrently_and_plain_ones_in_threads(new_world: NewWorld) -> None:
    met, threads = threading.Barrier(2, timeout=20), set()

    def one(response: str) -> float:
        threads.add(threading.get_ident())
        met.wait()
        return 1

    def two(response: str) -> float:
        return one(response)

    assert (await rewarded(new_world, Rubric([one, two]))).reward == 2.0
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_a_callable_that_returns_an_awaitable(new_world: NewWorld) -> None:
    rubric = Rubric().add(lambda response: short([{}]), name="later")
    assert (await rewarded(new_world, rubric)).scores == {"later": 0.5}


def raising(response: str) -> float:
    raise KeyError("secret text of the exception")


def none(response: str) -> Any:
    return None


def infinite(response: str) -> float:
    return float("inf")


async def endless(response: str) -> float:
    await wait(FOREVER)
    return 1.0


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (raising, "raised KeyError"),
        (none, "returned None; it must return a finite number"),
        (infinite, "returned inf; it must return a finite number"),
        (endless, "did not return within 0.05 s"),
    ],
)
async def test_a_failing_function_is_a_failure_and_never_a_reward_of_0(
    new_world: NewWorld, function: Callable[..., Any], what: str
) -> None:
    end = await failed(new_world, Rubric([exact, function], timeout=0.05 if function is endless else 60))
    assert end.category is Category.INTERNAL
    assert end.message.startswith(f"reward function {function.__name__!r} {line_of(function)} {what}")
    assert "secret" not in end.message
    optional = Rubric([exact]).add(function, timeout=0.05 if function is endless else 60, optional=True)
    result = await rewarded(new_world, optional)
    assert (result.reward, result.scores) == (1.0, {"exact": 1.0})


async def test_an_optional_failure_is_noted(new_world: NewWorld) -> None:
    world = new_world(graded(Rubric().add(raising, optional=True)))
    rollout = world.start()
    outcome = await outcome_of(rollout)
    assert outcome.reward_result == RewardResult()
    (note,) = [entry.record for entry in rollout.log.entries if isinstance(entry.record, Note)]
    assert (note.code, "'raising'" in note.text) == ("reward_function_failed", True)


async def test_the_other_functions_are_cancelled_after_a_failure(new_world: NewWorld) -> None:
    ended: list[str] = []

    async def waiting(response: str) -> float:
        try:
            return await endless(response)
        finally:
            ended.append("cancelled")

    assert "'raising'" in (await failed(new_world, Rubric([waiting, raising]))).message
    assert ended == ["cancelled"]


async def leaving(response: str) -> float:
    raise SystemExit(3)


async def sampling(run: Run) -> float:
    return float((await run.sample()).content)


@pytest.mark.parametrize(
    ("function", "what"), [(leaving, "raised SystemExit"), (sampling, "used a method of run that is not possible")]
)
async def test_a_function_ends_neither_the_server_nor_the_rollout(
    new_world: NewWorld, function: Callable[..., Any], what: str
) -> None:
    end = await failed(new_world, Rubric([exact, function]))
    assert end.message.startswith(f"reward function {function.__name__!r} {line_of(function)} {what}")
    assert (await rewarded(new_world, Rubric([exact]).add(function, optional=True))).scores == {"exact": 1.0}


async def test_the_response_is_the_models_and_never_a_tools(new_world: NewWorld) -> None:
    async def play(self: Agent, run: Run) -> None:
        await run.sample()
        await run.append({"role": "user", "content": "It is 8."})

    world = new_world(graded(Rubric([exact]), play=play))
    outcome = await outcome_of(world.start(Say("It is 9."), metadata_json=METADATA))
    assert outcome.reward_result.reward == 0.0


def test_a_subclass_extends_a_copy_of_its_base_classes_rubric() -> None:
    class Base(Agent):
        name = "base"
        rubric = Rubric([exact], timeout=5)

    with pytest.raises(
        AgentMistake, match=r"the rubric of agent class Base, which would change, too; use rubric\.copy"
    ):
        Base.rubric.add(short)

    class Extended(Base):
        rubric = Base.rubric.copy().add(short)

    assert (Base().rubric.names, Extended().rubric.names) == (("exact",), ("exact", "short"))


def nothing_known(price: float) -> float:
    return price


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Rubric([exact], [1.0, 2.0]), ValueError, "1 funcs and 2 weights"),
        (lambda: Rubric([exact, exact]), ValueError, "already has a score of this name"),
        (lambda: Rubric([lambda response: 1.0]), ValueError, "give its score a name"),
        (lambda: Rubric([exact], [float("nan")]), TypeError, "the weight is nan"),
        (lambda: Rubric([exact], timeout=0), ValueError, "the timeout is 0"),
        (lambda: Rubric([nothing_known]), TypeError, "its parameter 'price' is none of run, prompt, completion"),
        (
            lambda: Rubric([ranking_by_answer]),
            TypeError,
            "its parameter 'answer' is not available together with 'runs'",
        ),
        (lambda: graded("a rubric"), TypeError, "rubric is 'a rubric'; it must be a Rubric"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_found_before_the_first_rollout(
    make: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_a_mistake_names_file_and_line() -> None:
    with pytest.raises(TypeError, match=re.escape(line_of(nothing_known))):
        Rubric([nothing_known])


class Collecting(Agent):
    """Keeps the runs of its rollouts, whose reward is the length of the last message."""

    name = "collecting"

    def __init__(self) -> None:
        self.runs: list[Run] = []

    async def reward(self, run: Run) -> float:
        self.runs.append(run)
        return 0.5


def ranking(runs: Sequence[Run]) -> list[float]:
    lengths = [len(str(run.messages[-1]["content"])) for run in runs]
    return [sorted(lengths).index(length) / (len(runs) - 1) for length in lengths]


def ranking_by_answer(runs: Sequence[Run], answer: str) -> list[float]:
    return [float(answer in str(run.messages)) for run in runs]


async def test_functions_of_a_group_add_to_the_rewards(new_world: NewWorld) -> None:
    agent = Collecting()
    world = new_world(agent)
    for text in ("long text", "", "short"):
        await outcome_of(world.start(Say(text)))
    rubric = Rubric(funcs=[exact, ranking], weights=[1.0, 2.0])
    assert rubric.scores_groups
    assert not Rubric([exact]).scores_groups
    before = [RewardResult(0.5, {"exact": 0.5}), RewardResult(), RewardResult(1.0)]
    after = await rubric.score_group(agent.runs, before)
    assert [(each.reward, each.scores) for each in after] == [
        (2.5, {"exact": 0.5, "ranking": 1.0}),
        (0.0, {"ranking": 0.0}),
        (2.0, {"ranking": 0.5}),
    ]
    assert await rubric.score_group([], []) == []
    array = await Rubric().add(lambda runs: np.array([0, 1, 2]), name="array").score_group(agent.runs, before)
    assert [each.reward for each in array] == [0.5, 1.0, 3.0]
    wrong = Rubric().add(lambda runs: [1.0], name="one")
    with pytest.raises(RewardFailed, match="it must return a list of 3 numbers, one per rollout"):
        await wrong.score_group(agent.runs, before)
    assert await Rubric().add(lambda runs: [1.0], name="one", optional=True).score_group(agent.runs, before) == before


class Judging:
    """The models of a server: each returns its replies in order."""

    limits = ModelLimits()

    def __init__(self, *replies: str | Failure) -> None:
        self.endpoints = {"judge": ModelEndpoint(Target("http://j", Dialect.OPENAI, model="m"), "key")}
        self.replies = list(replies)
        self.asked: list[list[str]] = []

    async def complete(self, target: Target, request: CompletionRequest) -> ModelCompletion:
        await asyncio.sleep(0)
        assert request.credentials.completions == "key"
        self.asked.append([str(message.fields()["content"]) for message in request.messages])
        reply = self.replies.pop(0)
        if isinstance(reply, Failure):
            raise RolloutFailed(reply)
        return ModelCompletion(Message.write({"role": "assistant", "content": reply}), "stop", (7, 2), 1)


async def test_a_judge_reads_question_answer_and_response(new_world: NewWorld) -> None:
    judge, models = Judge(prompt="Q {question} A {answer} R {response} {other}"), Judging("Because {answer}.\nYes.")
    result = await rewarded(new_world, Rubric([judge]), models=models)
    assert (result.reward, result.scores) == (1.0, {"judge": 1.0})
    assert models.asked == [["Q 5 + 3? A 8 R It is 8. {other}"]]


async def test_an_unreadable_reply_is_requested_again_a_few_times(new_world: NewWorld) -> None:
    models = Judging("Well.", "Yes and no.", "no")
    assert (await rewarded(new_world, Rubric([Judge()]), models=models)).reward == 0.0
    assert [len(asked) for asked in models.asked] == [1, 3, 5]
    assert models.asked[1][1:] == [
        "Well.",
        "No score can be read from this reply. Please end with a line that says yes or no.",
    ]
    end = await failed(new_world, Rubric([Judge(attempts=2)]), models=Judging("Well.", "Perhaps."))
    assert end.category is Category.ENGINE_CLIENT
    assert "reward function 'judge' (" in end.message
    assert f"{__file__}:" in end.message
    assert (
        "no score in 2 replies; the last one (finish_reason 'stop') must end with a line that says yes or no"
        in end.message
    )


async def test_a_judge_that_fails_is_the_engines_failure_and_not_the_trainers(new_world: NewWorld) -> None:
    broken = Failure(Category.NETWORK, "turn 1: the engine at j:80 could not be reached", 1)
    end = await failed(new_world, Rubric([exact, Judge()]), models=Judging(broken))
    assert end.category is Category.ENGINE_SERVER
    assert end.message.endswith("model 'judge', in turn 1: its endpoint at j:80 could not be reached")
    optional = Rubric([exact]).add(Judge(), 5, optional=True)
    assert (await rewarded(new_world, optional, models=Judging(broken))).reward == 1.0


async def judged_in_a_task(run: Run) -> float:
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(run.model("judge").sample([{"role": "user", "content": "?"}]))
    return float(asked.result().content or 0)


@tool
async def consult(run: Run) -> float:
    """Asks a further model in a task."""
    return await judged_in_a_task(run)


@pytest.mark.parametrize("where", ["tool", "rubric", "reward"])
async def test_a_judge_that_fails_in_a_task_of_a_group_is_the_engines_failure_too(
    new_world: NewWorld, where: str
) -> None:
    """Otherwise the model would read an error that it cannot help, and the rollout would train."""
    rubric = Rubric([judged_in_a_task] if where == "rubric" else [])
    methods: dict[str, Any] = {"reward": lambda self, run: judged_in_a_task(run)} if where == "reward" else {}
    broken = Failure(Category.NETWORK, "turn 1: the engine at j:80 could not be reached", 1)
    world = new_world(graded(rubric, tools=(consult,), **methods), models=Judging(broken))
    first = Say("Hm.", (call("consult"),)) if where == "tool" else Say("It is 8.")
    end = (await outcome_of(world.start(first, Say("It is 8."), metadata_json=METADATA))).end
    assert isinstance(end, Failure)
    assert (end.category, end.failure_class) == (Category.ENGINE_SERVER, FailureClass.ENGINE)
    assert end.message.endswith("model 'judge', in turn 1: its endpoint at j:80 could not be reached")


async def test_a_judge_without_a_model_says_where_to_name_it(new_world: NewWorld) -> None:
    end = await failed(new_world, Rubric([Judge("critic")]))
    assert "there is no model 'critic'; this rollout has none; name it in `models` of the request" in end.message


async def test_a_replay_gets_the_recorded_reply(new_world: NewWorld) -> None:
    replies: list[ModelReply] = []

    class Asking(Agent):
        name = "asking"

        async def play(self, run: Run) -> None:
            replies.append(await run.model("judge").sample([{"role": "user", "content": "?"}]))
            await run.sample()

    rollout = new_world(Asking(), models=Judging("8")).start()
    await outcome_of(rollout)  # replays the log, too
    (record,) = [entry.record for entry in rollout.log.entries if isinstance(entry.record, ModelCalled)]
    assert [ModelReply.of(record)] == replies
    assert (replies[0].content, replies[0].usage, record.model) == ("8", (7, 2), "judge")


async def test_a_caught_failure_may_become_anything(new_world: NewWorld) -> None:
    broken = Failure(Category.TIMEOUT, "turn 1: timeout: the engine", 1)
    caught: list[Category] = []

    async def careful(run: Run) -> float:
        try:
            await run.model("judge").sample([{"role": "user", "content": "?"}])
        except ModelFailed as error:
            caught.append(error.failure.category)
        return 0.25

    assert (await rewarded(new_world, Rubric([careful]), models=Judging(broken))).reward == 0.25
    assert caught == [Category.ENGINE_SERVER]


async def test_models_can_be_called_until_the_outcome(new_world: NewWorld) -> None:
    models, runs = Judging("8"), []

    async def cleanup(self: Agent, run: Run) -> None:
        await run.model("judge").sample([{"role": "user", "content": "?"}])
        runs.append(run)

    agent = graded(Rubric([exact]), cleanup=cleanup)
    rollout = new_world(agent, models=models).start(metadata_json=METADATA)
    outcome = await outcome_of(rollout)
    assert (outcome.warnings, len(models.asked)) == ((), 1)
    with pytest.raises(RolloutEnded):
        await runs[0].model("judge").sample([{"role": "user", "content": "?"}])
    assert len(models.asked) == 1


@pytest.mark.parametrize(
    ("parser", "reply", "score"),
    [
        (yes_or_no, "yes", 1.0),
        (yes_or_no, "It is wrong.\n\n**No**\n", 0.0),
        (yes_or_no, "No, wait.\nYES", 1.0),
        (yes_or_no, "Yes\nor no matter", 0.0),
        (yes_or_no, "nothing", None),
        (yes_or_no, "yes or no", None),
        (number_from(0, 10), "7", 7.0),
        (number_from(0, 10), "2 of 3 points.\nScore: 7/10", 7.0),
        (number_from(0, 10), "Score: 10 out of 10.", 10.0),
        (number_from(0, 1), "0.5", 0.5),
        (number_from(-1, 1), "-0.5", -0.5),
        (number_from(-10, 10), "Score: \N{MINUS SIGN}5", -5.0),
        (number_from(-10, 10), "Score: \N{EN DASH}3.5", -3.5),
        (number_from(-10, 10), "\N{NON-BREAKING HYPHEN}7/10", -7.0),
        (number_from(0, 10), "Score: \N{MINUS SIGN}5", None),
        (number_from(-10, 10), "between 1\N{EN DASH}5", None),
        (number_from(0, 10), "Score: 11", None),
        (number_from(0, 10), "between 7 and 8", None),
        (number_from(0, 10), "70%", None),
        (number_from(0, 10), "7.5%", None),
        (number_from(0, 10), "7.5.", 7.5),
        (number_from(0, 10), "", None),
        (json_field("score"), '```json\n{"score": 0.5, "why": "{}"}\n```', 0.5),
        (json_field("ok"), '{"ok": true}', 1.0),
        (json_field("score", 0, 10), '{"score": 11}', None),
        (json_field("score"), '{"score": "1"}', None),
        (json_field("score"), '{"score": NaN}', None),
        (json_field("score"), "} {", None),
        (json_field("score"), "[1]", None),
    ],
)
def test_parsers(parser: Callable[[str], float], reply: str, score: float | None) -> None:
    if score is None:
        with pytest.raises(ValueError, match=r"^(end|reply) with "):
            parser(reply)
    else:
        assert parser(reply) == score


def test_a_judge_needs_an_attempt_and_shows_the_response() -> None:
    with pytest.raises(ValueError, match="attempts is 0"):
        Judge(attempts=0)
    with pytest.raises(ValueError, match=r"the prompt has no \{response\}"):
        Judge(prompt="Is {reponse} correct?")
    assert (Judge("critic").name, Judge("critic", name="taste").name) == ("critic", "taste")
