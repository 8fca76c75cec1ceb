"""An agent that owns its loop has the samples of an `Agent` that plays the same conversation, with every trainer and engine."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from osmosis.rollout.v1 import outcome_pb2
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest
from osmosis.rollout.v1.token_pb2 import SEGMENT_KIND_BRANCH, SEGMENT_KIND_MAIN
from rollout_client import AsyncClient, Target, samples
from rollout_client.spec import rollout_spec
from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.calculator import add, multiply
from rollout_server.core.capture.rules import CaptureOptions
from rollout_server.core.error import CallRefused
from rollout_server.runtime.capture.capture import Capture
from rollout_server.settings import Settings
from rollout_server.testing import TrainerDialect
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.engine.rolling import DIALECTS, check_once
from tests.support.captured_agents import Fields, OwnLoop, SameLoop, message_of, model_call, user
from tests.support.engine_model import EngineModel
from tests.support.engines import MODEL, Engine, SglangEngine, VllmEngine, serving
from tests.support.talking_agent import equal

TOOLS = (add, multiply)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
QUESTIONS = ("And twice that?", "Thanks.")
SCRIPT = Script(
    (
        ScriptedReply(
            content="Let me see.", reasoning="Add first.", tool_calls=(tool_call("c1", "add", {"a": 5, "b": 3}),)
        ),
        ScriptedReply(content=" It is 8.\n", reasoning="Done."),
        ScriptedReply(
            content=None,
            tool_calls=(
                tool_call("c2", "multiply", '{"b": 2,   "a":8.0}'),
                tool_call("c3", "add", {"a": 8, "b": 8}),
            ),
        ),
        ScriptedReply(content="It is 16."),
        ScriptedReply(content="You are welcome."),
    )
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call>'
TWICE = '<tool_call>\n{"name": "multiply", "arguments": {"a": 8, "b": 2}}\n</tool_call>'
SAYS = [f"<think>\nAdd first.\n</think>\n\n{CALL}", "It is 8.", f"Both.\n{TWICE}\n{CALL}", "It is 16.", "Welcome."]


def squeezed(message: Fields) -> Fields:
    """What clients do to an answer: reasoning dropped, arguments serialized again, ids renamed, text in parts, null for no text."""
    calls = [
        {
            "id": f"renamed_{call['id']}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(_parsed(call["function"]["arguments"]), separators=(",", ":"), sort_keys=True),
            },
        }
        for call in message.get("tool_calls") or []
    ]
    text = (message.get("content") or "").strip()
    content = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}] if text else None
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def _parsed(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


EDITS: Mapping[str, Callable[[Fields], Fields]] = {"as it is": dict, "squeezed": squeezed}


class Calls(Agent):
    """Make the calls of a test."""

    name = "calls"

    def __init__(self, calls: Callable[[Capture], Any], options: CaptureOptions = CaptureOptions()) -> None:
        self._calls = calls
        self._options = options

    async def play(self, run: Run) -> None:
        async with run.capture(self._options) as capture:
            await self._calls(capture)


@asynccontextmanager
async def served(*agents: Agent) -> AsyncIterator[str]:
    """Serve the agents and yield the address."""
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "http": False, "retry_base_seconds": 0.01}
    settings = Settings(_env_file=None, tokenizers={"toy": TOY_TOKENIZER}, tokenizers_offline=True, **ports)
    async with Server(agents, settings) as server:
        yield f"127.0.0.1:{server.grpc_port}"


@asynccontextmanager
async def connected(*agents: Agent) -> AsyncIterator[AsyncClient]:
    """Serve the agents and yield a client of their server."""
    async with served(*agents) as address, AsyncClient(address) as client:
        yield client


async def roll(client: AsyncClient, agent: str, **spec: Any) -> outcome_pb2.Outcome:
    run = client.run(**{"messages": [user("5 plus 3?")], "rollout_id": agent, "agent": agent, **spec})
    async for _ in run:
        pass
    outcome = (await client.get(run.uid, view="full")).outcome
    assert outcome.failure.message == ""
    return outcome


def assert_equal(own: outcome_pb2.Outcome, same: outcome_pb2.Outcome) -> None:
    """Assert that both outcomes have one sample, with equal tokens, mask and logprobs."""
    (mine,), (other,) = samples(own), samples(same)
    for name in ("prompt_ids", "response_ids", "response_mask", "logprobs", "kind", "verified"):
        assert getattr(mine, name) == getattr(other, name), name
    assert sum(mine.response_mask) == own.metrics.generated_tokens > 0
    assert [warning.code for warning in own.warnings] == [warning.code for warning in same.warnings]
    assert [message.json for message in own.messages] == [message.json for message in same.messages]
    assert own.capture.longest_share == 1.0


MODES: dict[str, dict[str, Any]] = {
    "messages": {},
    "predicted": {"tokenizer": "toy"},
    "tokens": {"token_mode": "tokens", "tokenizer": "toy"},
}


def loops(edit: str) -> Sequence[Agent]:
    return OwnLoop("own", TOOLS, QUESTIONS, EDITS[edit]), SameLoop("same", TOOLS, QUESTIONS)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", ["messages", "tokens"])
async def test_with_a_grpc_trainer(mode: str, edit: str) -> None:
    async with connected(*loops(edit)) as client, StrictTrainer(script=SCRIPT) as trainer:
        spec = {"completions": f"grpc://{trainer.grpc_target}", **MODES[mode]}
        assert_equal(*[await roll(client, name, **spec) for name in ("own", "same")])
        assert [verdict.refusals for verdict in trainer.verdicts()] == [(), ()]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("dialect", ["http_masked", "http_plain"])
async def test_with_an_http_trainer(dialect: Any, edit: str) -> None:
    """The agent's calls offer the tools that its class declares."""
    masked = dialect == "http_masked"
    judge = TrainerDialect.MASKED if masked else TrainerDialect.PLAIN
    async with (
        connected(*loops(edit)) as client,
        StrictTrainer(script=SCRIPT, dialect=judge, render_tools=False) as trainer,
    ):
        spec = {"completions": Target(trainer.url, dialect), "tokenizer": "toy"}
        assert_equal(*[await roll(client, name, **spec) for name in ("own", "same")])
        assert [verdict.refusals for verdict in trainer.verdicts()] == [(), ()]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(
    ("kind", "mode"), [(VllmEngine, mode) for mode in MODES] + [(SglangEngine, mode) for mode in MODES]
)
async def test_with_an_engine(kind: Callable[[EngineModel], Engine], mode: str, edit: str) -> None:
    outcomes = []
    async with connected(*loops(edit)) as client:
        for name in ("own", "same"):
            engine = kind(EngineModel(SAYS))
            async with serving(engine):
                spec = {"completions": engine_target(engine), **MODES[mode]}
                outcomes.append(await roll(client, name, **spec))
    assert_equal(*outcomes)


def engine_target(engine: Engine) -> Target:
    dialect: Any = DIALECTS[type(engine).__name__]
    return Target(engine.url, dialect, model=MODEL)


async def said(capture: Capture, *messages: Fields, **fields: Any) -> Fields:
    completed = await capture.call(model_call(*messages, **fields))
    capture.confirm(completed.id)
    return message_of(completed)


def system(text: str) -> Fields:
    return {"role": "system", "content": text}


async def a_tree(capture: Capture) -> None:
    """Continuations, branches after earlier turns and beside a running one, sub-agents with other tools, rewritten prompts."""
    begin = user("Begin.")
    first = await said(capture, begin)
    second = await said(capture, begin, first, user("Go on."))
    again = await said(capture, begin, first, user("Or this."))
    both = await asyncio.gather(
        *(said(capture, begin, first, user("Go on."), second, user(text)) for text in ("Left.", "Right.")),
        *(said(capture, begin, first, user("Or this."), again, user(text)) for text in ("Up.", "Down.")),
        said(capture, user("A subtask."), tools=[add]),
    )
    await said(capture, begin, first, user("Go on."), second, user("Right."), both[1], user("And?"))
    history: list[Fields] = [user("What time is it?")]
    for minute in range(3):
        history.append(await said(capture, system(f"It is 10:0{minute}."), *history))
        history.append(user("And now?"))


KINDS = [("branch", 3), ("drift", 2), ("main", 1), ("subagent", 2)]


@pytest.mark.parametrize("over", ["call", "stream"])
@pytest.mark.parametrize("mode", ["messages", "tokens"])
async def test_every_conversation_of_a_tree_is_the_trainers(mode: str, over: str) -> None:
    lines = tuple(ScriptedReply(content=f"Answer {number}.", delay=0.01 * (number % 3)) for number in range(12))
    spec = {"messages": [user("Begin.")], "rollout_id": "r", **MODES[mode]}
    async with served(Calls(a_tree)) as address, StrictTrainer(script=Script(lines)) as trainer:
        if over == "call":
            async with AsyncClient(address) as client:
                outcome = await roll(client, "calls", **{**spec, "completions": f"grpc://{trainer.grpc_target}"})
        else:
            async with trainer.connected(address) as stream:
                (uid,) = await stream.start(StartRolloutRequest(spec=rollout_spec(spec)))
                outcome = (await stream.outcome(uid)).outcome
        verdicts = {verdict.rollout_id: verdict for verdict in trainer.verdicts()}
    found = samples(outcome)
    assert (outcome.failure.message, outcome.stop.reason) == ("", "stop")
    assert [verdict.refusals for verdict in verdicts.values()] == [()] * len(found)
    for sample in found:
        assert equal(sample, verdicts["r" if sample.segment_id == "0" else f"r/{sample.segment_id}"].sample)
    assert sorted(Counter(sample.kind for sample in found).items()) == KINDS
    assert sum(sum(sample.response_mask) for sample in found) == outcome.metrics.generated_tokens
    assert (outcome.metrics.turns, outcome.capture.continued, outcome.capture.parted) == (12, 4, 7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_every_completion_of_a_tree_trains_once_with_an_engine(
    kind: Callable[[EngineModel], Engine], mode: str
) -> None:
    engine = kind(EngineModel([f"Answer {number}." for number in range(12)]))
    async with connected(Calls(a_tree)) as client, serving(engine):
        outcome = await roll(client, "calls", completions=engine_target(engine), **MODES[mode])
    found = samples(outcome)
    check_once(found, engine.model.seen)
    assert sorted(Counter(sample.kind for sample in found).items()) == KINDS


async def test_a_trainer_of_one_conversation_refuses_another_and_the_rollout_lives() -> None:
    refusals: list[str] = []

    async def calls(capture: Capture) -> None:
        first = await said(capture, user("Begin."))
        for messages, fields in (
            ([user("A subtask.")], {}),
            ([user("Begin."), first, user("Go on.")], {"tools": [multiply]}),
            ([system("It is 10:01."), user("Begin."), first, user("Go on.")], {}),
            ([user("A title?")], {"auxiliary": True}),
        ):
            with pytest.raises(CallRefused) as refused:
                await said(capture, *messages, **fields)
            refusals.append(refused.value.reason)
        await said(capture, user("Begin."), first, user("Go on."))

    async with connected(Calls(calls)) as client, StrictTrainer(script=SCRIPT) as trainer:
        target = Target(trainer.url, "http_masked")
        outcome = await roll(client, "calls", completions=target, tokenizer="toy")
        (verdict,) = trainer.verdicts()
    assert refusals == ["ONE_CONVERSATION"] * 4
    (sample,) = samples(outcome)
    assert equal(sample, verdict.sample)
    assert verdict.accepted
    assert outcome.capture.refused == 4


async def test_calls_beside_the_task_can_have_a_fixed_answer() -> None:
    """So an agent that first asks for a title gets one, though its trainer has one conversation."""

    async def calls(capture: Capture) -> None:
        for _ in range(2):
            title = await capture.call(model_call(user("A title?"), auxiliary=True))
            assert json.loads(title.message_json) == {"role": "assistant", "content": "Sums"}
            capture.confirm(title.id)
        first = await said(capture, user("Begin."))
        await said(capture, user("Begin."), first, user("Go on."))

    agent = Calls(calls, CaptureOptions(auxiliary_reply="Sums"))
    async with connected(agent) as client, StrictTrainer(script=SCRIPT) as trainer:
        outcome = await roll(client, "calls", completions=Target(trainer.url, "http_masked"), tokenizer="toy")
        (verdict,) = trainer.verdicts()
    (sample,) = samples(outcome)
    assert verdict.accepted
    assert equal(sample, verdict.sample)
    assert (outcome.capture.fixed_replies, outcome.capture.auxiliary, outcome.capture.continued) == (2, 0, 1)


@pytest.mark.parametrize("mode", ["predicted", "tokens"])
async def test_a_prompt_too_long_for_the_engine_is_refused_and_the_client_may_compact(mode: str) -> None:
    found: list[CallRefused] = []

    async def calls(capture: Capture) -> None:
        first = await said(capture, user("Begin."))
        with pytest.raises(CallRefused) as refused:
            await said(capture, user("Begin."), first, user("word " * 2000))
        found.append(refused.value)
        await said(capture, user("In short: begun."))

    engine = VllmEngine(EngineModel(["One.", "Two."], context=1000))
    async with connected(Calls(calls)) as client, serving(engine):
        outcome = await roll(client, "calls", completions=engine_target(engine), **MODES[mode])
    assert [refused.reason for refused in found] == ["CONTEXT_LENGTH_EXCEEDED"]
    assert found[0].maximum in (0, 1000)
    assert outcome.stop.reason == "stop"
    check_once(samples(outcome), engine.model.seen)


async def test_a_later_system_message_is_rendered_as_the_template_allows() -> None:
    """The built-in template renders it where it stands. Without a known template it is part of a user message."""

    async def calls(capture: Capture) -> None:
        first = await said(capture, system("Be brief."), user("Begin."), system("It is late."))
        await said(capture, system("Be brief."), user("Begin."), system("It is late."), first, system("Still."))

    roles: list[list[str]] = []
    async with connected(Calls(calls)) as client, StrictTrainer(script=SCRIPT) as trainer:
        for named in ({"tokenizer": "toy"}, {}):
            spec = {"completions": f"grpc://{trainer.grpc_target}", "rollout_id": f"r{len(roles)}", **named}
            outcome = await roll(client, "calls", **spec)
            assert len(outcome.samples) == 1
            roles.append([json.loads(message.json)["role"] for message in outcome.messages])
    assert roles[0] == ["system", "user", "system", "assistant", "system", "assistant"]
    assert roles[1] == ["system", "user", "assistant", "user", "assistant"]


class SeeingModel(EngineModel):
    """A model whose template has a place for images."""

    def render(self, messages: Any, *others: Any) -> Any:
        """Render each image as a word."""
        word = {"type": "text", "text": "[image]"}
        return super().render(
            [
                {**each, "content": [part if part["type"] == "text" else word for part in each["content"]]}
                if isinstance(each["content"], list)
                else each
                for each in messages
            ],
            *others,
        )


async def test_an_engine_gets_the_images_of_a_call() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}

    async def calls(capture: Capture) -> None:
        first = await said(capture, asked)
        await said(capture, asked, first, user("Go on."))

    engine = VllmEngine(SeeingModel(["One.", "Two."]))
    async with connected(Calls(calls)) as client, serving(engine):
        outcome = await roll(client, "calls", completions=engine_target(engine))
    assert [body["messages"][0] for body in engine.bodies()] == [asked, asked]
    assert outcome.capture.continued == 1


async def test_what_no_template_renders_is_refused_and_the_rollout_goes_on() -> None:
    async def calls(capture: Capture) -> None:
        first = await said(capture, user("Begin."))
        with pytest.raises(CallRefused, match="is not text"):
            await said(capture, user("Begin."), first, {"role": "user", "content": [IMAGE]})
        await said(capture, user("Begin."), first, user("Go on."))

    async with connected(Calls(calls)) as client, StrictTrainer(script=SCRIPT) as trainer:
        tokens = {"token_mode": "tokens", "tokenizer": "toy"}
        outcome = await roll(client, "calls", completions=f"grpc://{trainer.grpc_target}", rollout_id="image", **tokens)
    assert outcome.capture.refused == 1
    assert [sample.origin.kind for sample in outcome.samples] == [SEGMENT_KIND_MAIN, SEGMENT_KIND_BRANCH]


async def test_a_trainer_of_one_conversation_gets_the_call_after_one_that_was_never_sent() -> None:
    async def calls(capture: Capture) -> None:
        with pytest.raises(CallRefused, match="is not text"):
            await said(capture, {"role": "user", "content": [IMAGE]})
        first = await said(capture, user("Begin."))
        with pytest.raises(CallRefused) as refused:
            await said(capture, user("A subtask."))
        assert refused.value.reason == "ONE_CONVERSATION"
        await said(capture, user("Begin."), first, user("Go on."))

    async with connected(Calls(calls)) as client, StrictTrainer(script=SCRIPT) as trainer:
        outcome = await roll(client, "calls", completions=Target(trainer.url, "http_masked"), tokenizer="toy")
        (verdict,) = trainer.verdicts()
    (sample,) = samples(outcome)
    assert equal(sample, verdict.sample)
    assert verdict.accepted
    assert outcome.capture.refused == 2


@pytest.mark.parametrize("dialect", ["http_masked", "http_plain"])
async def test_a_first_call_with_other_tools_than_the_agents_is_told_what_to_do(dialect: Any) -> None:
    async def calls(capture: Capture) -> None:
        with pytest.raises(CallRefused, match=r"with different tools, .* declares its own with tools=\[\.\.\.\]"):
            await said(capture, user("Begin."), tools=[add])

    async with connected(Calls(calls)) as client, StrictTrainer(script=SCRIPT) as trainer:
        outcome = await roll(client, "calls", completions=Target(trainer.url, dialect), tokenizer="toy")
    assert outcome.capture.refused == 1


async def test_a_trainer_of_one_conversation_gets_the_call_after_a_later_one_that_was_never_sent() -> None:
    begun = [user("Begin."), {"role": "user", "content": [IMAGE]}]

    async def calls(capture: Capture) -> None:
        first = await said(capture, begun[0])
        for _ in range(2):
            with pytest.raises(CallRefused, match="is not text"):
                await said(capture, begun[0], first, begun[1])
        second = await said(capture, begun[0], first, user("Go on."))
        with pytest.raises(CallRefused, match="counts response_mask over a single one"):
            await said(capture, begun[0], first, user("Another way."))
        await said(capture, begun[0], first, user("Go on."), second, user("And on."))

    async with connected(Calls(calls)) as client, StrictTrainer(script=SCRIPT) as trainer:
        outcome = await roll(client, "calls", completions=Target(trainer.url, "http_masked"), tokenizer="toy")
        (verdict,) = trainer.verdicts()
    assert verdict.accepted
    assert [sample.origin.kind for sample in outcome.samples] == [SEGMENT_KIND_MAIN, SEGMENT_KIND_BRANCH]
    for sample in samples(outcome):  # the branch has the first completion in its prompt, which is trained once
        ids, whole = [*sample.prompt_ids, *sample.response_ids], verdict.sample
        assert ids == [*whole.prompt_ids, *whole.response_ids][: len(ids)]
    assert outcome.capture.refused == 3


async def test_an_engine_gets_the_tool_choice_of_a_call() -> None:
    choice = {"type": "function", "function": {"name": "add"}}

    async def calls(capture: Capture) -> None:
        first = await said(
            capture, user("Begin."), tools=[add], sampling={"extra_json": json.dumps({"tool_choice": choice})}
        )
        await said(capture, user("Begin."), first, user("Go on."), tools=[add])

    engine = VllmEngine(EngineModel(["One.", "Two."]))
    async with connected(Calls(calls)) as client, serving(engine):
        outcome = await roll(client, "calls", completions=engine_target(engine))
    assert [body.get("tool_choice") for body in engine.bodies()] == [choice, None]
    assert len(outcome.samples) == 1


async def test_large_calls_are_decided_as_small_ones() -> None:
    """They are compared in a thread, while other completions of the rollout arrive."""

    async def calls(capture: Capture) -> None:
        begun = [
            [user("x" * 300_000)],
            [user("y" * 300_000)],
            [user(f"{number}?") for number in range(300)],
            [user("?")],
        ]
        for _ in range(3):
            answers = await asyncio.gather(*(said(capture, *history) for history in begun))
            begun = [[*history, answer, user("Go on.")] for history, answer in zip(begun, answers, strict=True)]

    lines = tuple(ScriptedReply(content=f"Answer {number}.") for number in range(12))
    async with connected(Calls(calls)) as client, StrictTrainer(script=Script(lines)) as trainer:
        outcome = await roll(client, "calls", completions=f"grpc://{trainer.grpc_target}")
    assert (len(outcome.samples), outcome.capture.continued, outcome.capture.parted) == (4, 8, 3)
    assert sum(sum(sample.response_mask) for sample in samples(outcome)) == outcome.metrics.generated_tokens


async def test_many_rollouts_at_once() -> None:
    async with connected(*loops("squeezed")) as client, StrictTrainer(script=SCRIPT) as trainer:
        spec: dict[str, Any] = {"completions": f"grpc://{trainer.grpc_target}", **MODES["tokens"]}
        same = await roll(client, "same", **spec)
        names = [f"own {number}" for number in range(40)]
        outcomes = await asyncio.gather(*(roll(client, "own", **{**spec, "rollout_id": name}) for name in names))
        verdicts = trainer.verdicts()
    for outcome in outcomes:
        assert_equal(outcome, same)
    assert [verdict.refusals for verdict in verdicts] == [()] * 41
