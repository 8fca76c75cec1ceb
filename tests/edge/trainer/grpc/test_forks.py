"""Agents with several conversations, over gRPC: each segment is one sample, and both sides hold the same ones, token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from osmosis.rollout.v1 import outcome_pb2, spec_pb2, token_pb2
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest
from rollout_client import AsyncClient, TrainingSample, samples
from rollout_client.spec import rollout_spec
from rollout_client.trainer import Generated, Prompt, SamplingParams, Serving, Trainer, parsers
from rollout_server import Agent, Run, tool
from rollout_server.app import Server
from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.ledger import Parting, SegmentKind
from rollout_server.core.message import Message
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.run.opening import Opening
from rollout_server.settings import Settings
from rollout_server.testing import TrainerDialect
from rollout_server.testing.checks.verdict import Verdict
from rollout_server.testing.script import Fault, FaultKind, Script, ScriptedReply
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.support.http_trainer import Act, HttpTrainer, answer, raw_trainer
from tests.support.rewriting_trainer import rewriting
from tests.support.toy_model import END, ToyModel, decode, encode

MODES = pytest.mark.parametrize("mode", ["tokens", "messages"])
BRANCH, SUBAGENT = token_pb2.SEGMENT_KIND_BRANCH, token_pb2.SEGMENT_KIND_SUBAGENT
COMPACTION, MAIN, DRIFT = (
    token_pb2.SEGMENT_KIND_COMPACTION,
    token_pb2.SEGMENT_KIND_MAIN,
    token_pb2.SEGMENT_KIND_DRIFT,
)


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@tool
async def look(place: str) -> str:
    """Looks somewhere."""
    return f"nothing in {place}"


class Forking(Agent):
    """Fork as the request's metadata says."""

    name = "forking"

    async def play(self, run: Run) -> None:
        if run.metadata["does"] == "calls":
            await self.calls(run)
            return
        run.state["first"] = await run.sample()
        await getattr(self, str(run.metadata["does"]))(run)

    async def branches(self, run: Run) -> None:
        """Two branches in parallel, and the continuation of this conversation."""
        forks = [await run.fork() for _ in range(2)]
        await asyncio.gather(*(self._talks(fork, f"Try {n}.") for n, fork in enumerate(forks)))
        await self._talks(run, "Now you.")

    async def late(self, run: Run) -> None:
        """A branch of a conversation that is already in its second turn and continues in parallel."""
        await run.append(said("Go on."))
        await run.sample()
        branch = await run.fork()
        await asyncio.gather(self._talks(branch, "Try this."), self._talks(run, "Or that."))

    async def earlier(self, run: Run) -> None:
        """Branches after the first completion: one of a conversation in its third turn, one of that branch, one during a turn."""
        first = run.state["first"]
        await self._talks(run, "Go on.")
        branch = await run.fork(after=first)
        again = await branch.fork()
        await run.append(said("Or that."))
        async with asyncio.TaskGroup() as group:
            group.create_task(run.sample())
            await asyncio.sleep(0)
            late = await run.fork(after=first)
            for each, text in ((branch, "Try this."), (again, "Try that."), (late, "Try it late.")):
                group.create_task(self._talks(each, text))

    async def calls(self, run: Run) -> None:
        """What the calls of an agent with a loop of its own open. A trainer of one conversation refuses all but the first."""
        prompt = Message.write(said("Begin again."))
        main = await run.open(Opening(SegmentKind.MAIN, (prompt,)))
        first = await main.attempt()
        await self._talks(main, "Go on.")
        parting = Parting(2, "content", "Go on.", "Try this.", "chat")
        for opening, text in (
            (Opening(SegmentKind.BRANCH, after_turn=first.turn, parting=parting), "Try this."),
            (Opening(SegmentKind.DRIFT, (prompt,), parting=parting), "Or that."),
        ):
            try:
                other = await main.open(opening)
            except RolloutFailed as failed:
                main.note("refused", failed.failure.message)
            else:
                await self._talks(other, text)
        await self._talks(main, "And on.")
        run.settle(main, CaptureReport(continued=6, parted=2))

    async def subagents(self, run: Run) -> None:
        """Two subagents with their own tools, one of them parallel to this conversation; the second is forked once more."""
        first = await run.fork([said("Help with a.")], tools=[look])
        await run.append(said("Go on."))
        async with asyncio.TaskGroup() as group:
            group.create_task(run.sample())
            group.create_task(self._talks(first, "And then?"))
            await asyncio.sleep(0)
            second = await run.fork([said("Help with b.")])
            group.create_task(self._talks(second, "And b?"))
        again = await second.fork()
        await self._talks(again, "Once more.")

    async def compaction(self, run: Run) -> None:
        """A compaction, twice."""
        shorter = await run.fork([said("In short: yes.")], kind="compaction")
        await self._talks(shorter, "What else?")
        await self._talks(await shorter.fork([said("Shorter still.")], kind="compaction"), "And now?")

    async def race(self, run: Run) -> None:
        """Two branches, of which the slower one is cancelled; then one more, whose second turn is not awaited."""
        forks = [await run.fork() for _ in range(2)]
        for fork, text in zip(forks, ("Fast.", "Slow."), strict=True):
            await fork.append(said(text))
        asking = [asyncio.create_task(fork.sample()) for fork in forks]
        _, slow = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        for task in slow:
            task.cancel()
        late = await run.fork([said("Fast.")])
        await late.sample()
        await late.append(said("Slow."))
        with suppress(TimeoutError):
            await asyncio.wait_for(late.sample(), 0.05)
        for _ in range(3):
            await self._talks(run, "Slow.")

    async def limit(self, run: Run) -> None:
        """Three in parallel, of which the last one meets the limit of turns."""
        forks = [await run.fork() for _ in range(2)]
        for fork in forks:
            await fork.append(said("Go."))
        await run.append(said("Go."))
        await asyncio.gather(*(fork.sample() for fork in forks), self._late(run))

    async def _late(self, run: Run) -> None:
        await asyncio.sleep(0)
        await run.sample()

    async def _talks(self, run: Run, text: str) -> None:
        await run.append(said(text))
        await run.sample()
        await run.append(said("More?"))
        await run.sample()

    async def reward(self, run: Run) -> float:
        return float(len(run.messages))


WANTED: dict[str, list[tuple[str, int, str, int]]] = {
    "branches": [("0", MAIN, "", 3), ("1", BRANCH, "0", 2), ("2", BRANCH, "0", 2)],
    "subagents": [("0", MAIN, "", 2), ("1", SUBAGENT, "0", 2), ("2", SUBAGENT, "0", 2), ("3", BRANCH, "2", 2)],
    "late": [("0", MAIN, "", 4), ("1", BRANCH, "0", 2)],
    "earlier": [("0", MAIN, "", 4), ("1", BRANCH, "0", 2), ("2", BRANCH, "0", 2), ("3", BRANCH, "0", 2)],
    "calls": [("0", MAIN, "", 5), ("1", BRANCH, "0", 2), ("2", DRIFT, "0", 2)],
    "compaction": [("0", MAIN, "", 1), ("1", COMPACTION, "0", 2), ("2", COMPACTION, "1", 2)],
}
TURNS = {"branches": 7, "late": 6, "earlier": 10, "calls": 9, "subagents": 8, "compaction": 5}


@asynccontextmanager
async def serving_forks() -> AsyncIterator[str]:
    """Serve the agent and yield the address."""
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "http": False, "retry_base_seconds": 0.01}
    settings = Settings(_env_file=None, tokenizers={"toy": TOY_TOKENIZER}, tokenizers_offline=True, **ports)
    async with Server([Forking()], settings) as server:
        yield f"127.0.0.1:{server.grpc_port}"


@pytest.fixture
async def client() -> AsyncIterator[AsyncClient]:
    async with serving_forks() as address, AsyncClient(address) as client:
        yield client


def as_mode(mode: str) -> dict[str, Any]:
    return {"tokenizer": "toy"} if mode == "tokens" else {}


async def roll(client: AsyncClient, url: str | spec_pb2.Target, does: str, **spec: Any) -> outcome_pb2.Outcome:
    run = client.run(
        messages=[said("Begin.")],
        completions=url,
        rollout_id="r",
        metadata={"does": does},
        limits={"turns": 20},
        **spec,
    )
    async for _ in run:
        pass
    return (await client.get(run.uid, view="full")).outcome


def told(sample: outcome_pb2.Outcome) -> list[tuple[str, int, str, int]]:
    """The segment, kind and parent of each sample, and its number of trained completions."""
    found = []
    for each in sample.samples:
        answers = [s for s in each.spans if s.author == token_pb2.AUTHOR_MODEL and not s.mask_reason]
        found.append((each.segment_id, int(each.origin.kind), each.origin.parent_id, len(answers)))
    return sorted(found)


def assert_same(sample: TrainingSample, verdict: Verdict) -> None:
    theirs = verdict.sample
    assert verdict.refusals == ()
    assert sample.prompt_ids == list(theirs.prompt_ids)
    assert sample.response_ids == list(theirs.response_ids)
    assert sample.response_mask == list(theirs.response_mask)
    assert sample.logprobs == pytest.approx(list(theirs.logprobs))
    assert sample.verified


@MODES
@pytest.mark.parametrize("does", list(WANTED))
async def test_each_conversation_is_a_sample_of_its_own(client: AsyncClient, mode: str, does: str) -> None:
    script = Script(tuple(ScriptedReply(content=f"Answer {n}.", delay=0.01 * (n % 3)) for n in range(TURNS[does])))
    async with StrictTrainer(script=script) as trainer:
        outcome = await roll(client, f"grpc://{trainer.grpc_target}", does, **as_mode(mode))
        verdicts = {verdict.rollout_id: verdict for verdict in trainer.verdicts()}
    assert (outcome.failure.message, outcome.stop.reason, list(outcome.warnings)) == ("", "stop", [])
    assert told(outcome) == WANTED[does]
    found = samples(outcome)
    for sample in found:
        assert_same(sample, verdicts["r" if sample.segment_id == "0" else f"r/{sample.segment_id}"])
    assert len(verdicts) == len(found)
    assert outcome.metrics.turns == TURNS[does]
    assert sum(sum(sample.response_mask) for sample in found) == outcome.metrics.generated_tokens
    by_id = {sample.segment_id: sample for sample in outcome.samples}
    for each in outcome.samples:
        if each.origin.kind == BRANCH:
            parent = by_id[each.origin.parent_id]
            shared = [*parent.prompt_ids, *parent.response_ids][: each.origin.parent_tokens]
            assert list(each.prompt_ids)[: len(shared)] == shared
            assert len(each.prompt_ids) > len(shared) > len(parent.prompt_ids)
        else:
            assert each.origin.parent_tokens == 0


async def test_watchers_and_samples_say_why_a_call_opened_a_conversation(client: AsyncClient) -> None:
    async with StrictTrainer(script=Script(tuple(ScriptedReply(content=f"Answer {n}.") for n in range(9)))) as trainer:
        run = client.run(
            messages=[said("Begin.")],
            completions=f"grpc://{trainer.grpc_target}",
            rollout_id="r",
            metadata={"does": "calls"},
        )
        events = [event async for event in run]
        outcome = (await client.get(run.uid, view="full")).outcome
    parting = token_pb2.Parting(message=2, field="content", expected="Go on.", found="Try this.", api="chat")
    forked = [event.forked for event in events if event.WhichOneof("event") == "forked"]
    assert [(each.after_turn, each.count, each.origin.kind) for each in forked] == [
        (0, 1, MAIN),
        (1, 2, BRANCH),
        (0, 1, DRIFT),
    ]
    opened = [event.segment_opened.origin for event in events if event.WhichOneof("event") == "segment_opened"]
    for origins in (
        [each.origin for each in forked],
        opened,
        [each.origin for each in outcome.segments],
        [each.origin for each in outcome.samples],
    ):
        assert [each.parting if each.HasField("parting") else None for each in origins] == [None, parting, parting]
    trained = [sum(each.response_mask) for each in outcome.samples]
    report = outcome_pb2.CaptureReport(continued=6, parted=2, longest_share=max(trained) / sum(trained))
    assert outcome.capture == report
    (settled,) = [event for event in events if event.WhichOneof("event") == "capture_settled"]
    assert (settled.capture_settled.report, settled.segment_id) == (report, "0")
    assert json.loads(outcome.messages[0].json) == said("Begin again.")


STREAMED = [(mode, does, False) for mode in ("tokens", "messages") for does in WANTED]
STREAMED += [("tokens", "branches", True), ("messages", "subagents", True)]


@pytest.mark.parametrize(("mode", "does", "cut"), STREAMED)
async def test_over_a_stream_each_conversation_is_a_sample_too(mode: str, does: str, cut: bool) -> None:
    """`cut`: the connection breaks at every third completion."""
    lines: list[ScriptedReply | Fault] = []
    for number in range(TURNS[does]):
        lines += [Fault(kind=FaultKind.LOST)] if cut and not number % 3 else []
        lines.append(ScriptedReply(content=f"Answer {number}.", delay=0.01 * (number % 3)))
    spec = rollout_spec({"messages": [said("Begin.")], "rollout_id": "r", "metadata": {"does": does}, **as_mode(mode)})
    async with serving_forks() as address, StrictTrainer(script=Script(tuple(lines))) as trainer:
        async with trainer.connected(address) as stream:
            (uid,) = await stream.start(StartRolloutRequest(spec=spec))
            outcome = (await stream.outcome(uid)).outcome
        verdicts = {verdict.rollout_id: verdict for verdict in trainer.verdicts()}
    assert (stream.faults, stream.connections > 1) == ((), cut)
    assert (outcome.failure.message, outcome.stop.reason, list(outcome.warnings)) == ("", "stop", [])
    assert told(outcome) == WANTED[does]
    for sample in samples(outcome):
        assert_same(sample, verdicts["r" if sample.segment_id == "0" else f"r/{sample.segment_id}"])
    assert len(verdicts) == len(outcome.samples)


@MODES
@pytest.mark.parametrize("does", list(WANTED))
async def test_a_trainer_that_forgets_everything_is_told_everything(client: AsyncClient, mode: str, does: str) -> None:
    lines = tuple(ScriptedReply(content=f"Answer {n}.", forgets=True) for n in range(TURNS[does]))
    async with StrictTrainer(script=Script(lines)) as trainer:
        outcome = await roll(client, f"grpc://{trainer.grpc_target}", does, **as_mode(mode))
        verdicts = trainer.verdicts()
    assert (outcome.failure.message, outcome.stop.reason) == ("", "stop")
    assert told(outcome) == WANTED[does]
    assert [refusal for verdict in verdicts for refusal in verdict.refusals] == []
    assert sum(sum(sample.response_mask) for sample in samples(outcome)) == outcome.metrics.generated_tokens


@MODES
@pytest.mark.parametrize("does", list(WANTED))
async def test_the_trainer_library_finds_nothing_else(mode: str, does: str) -> None:
    model = ToyModel(lambda prompt: f"Answer {len(prompt)}.")
    fields: dict[str, Any] = {} if mode == "tokens" else {"render": rendered}
    async with (
        serving_forks() as address,
        Trainer(address, generate=model, decode=decode, parse=parsers.hermes, end_ids={END}, **fields) as trainer,
    ):
        prompt = Prompt([said("Begin.")], metadata={"does": does})
        (group,) = [each async for each in trainer.rollouts([prompt], n=2, limits={"turns": 20}, **as_mode(mode))]
    for rollout in group.rollouts:
        assert (rollout.mismatch, rollout.error, rollout.checked) == (None, "", True)
        assert told(rollout.rollout.outcome) == WANTED[does]


def rendered(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    text = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
    return encode(f"{len(tools)} tools\n{text}<|im_start|>assistant\n")


class Paced(ToyModel):
    """A model that is slow for prompts that end with a slow question, and ignores cancellation."""

    async def __call__(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generated:
        generated = await super().__call__(prompt_ids, sampling)
        if "Slow." in decode(prompt_ids).rpartition("<|im_start|>user")[2]:
            await asyncio.shield(asyncio.sleep(0.1))
        return generated


@MODES
@pytest.mark.parametrize("serving", [None, Serving()], ids=["stream", "serving"])
@pytest.mark.parametrize(("does", "turns"), [("race", 20), ("limit", 3)])
async def test_turns_that_nobody_waited_for_are_not_missed(
    mode: str, serving: Serving | None, does: str, turns: int
) -> None:
    fields: dict[str, Any] = {} if mode == "tokens" else {"render": rendered}
    model = Paced(lambda prompt: f"Answer {len(prompt)}.")
    async with (
        serving_forks() as address,
        Trainer(
            address, serving=serving, generate=model, decode=decode, parse=parsers.hermes, end_ids={END}, **fields
        ) as trainer,
    ):
        prompt = Prompt([said("Begin.")], metadata={"does": does})
        (group,) = [each async for each in trainer.rollouts([prompt], n=4, limits={"turns": turns}, **as_mode(mode))]
    for rollout in group.rollouts:
        assert (rollout.mismatch, rollout.error, rollout.end) == (None, "", "stop")
        outcome = rollout.rollout.outcome
        assert sum(sum(sample.response_mask) for sample in rollout.samples) == outcome.metrics.generated_tokens


async def test_the_library_finds_nothing_else_where_prompts_drift() -> None:
    """A template that shows only the last completion, so that a branch continues from a prompt that began a new segment."""

    def newest(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        return rendered([each for at, each in enumerate(messages) if at not in answers[:-1]], tools)

    model = ToyModel(lambda prompt: f"Answer {len(prompt)}.")
    async with (
        serving_forks() as address,
        Trainer(address, generate=model, decode=decode, parse=parsers.hermes, end_ids={END}, render=newest) as trainer,
    ):
        prompts = [Prompt([said("Begin.")], metadata={"does": does}) for does in WANTED]
        groups = [each async for each in trainer.rollouts(prompts, n=1, limits={"turns": 20})]
    kinds = [sample.kind for group in groups for sample in group.rollouts[0].samples]
    assert {"branch", "drift", "subagent", "compaction"} <= set(kinds)
    for rollout in (group.rollouts[0] for group in groups):
        assert (rollout.mismatch, rollout.error, rollout.checked) == (None, "", True)
        outcome = rollout.rollout.outcome
        assert sum(sum(sample.response_mask) for sample in rollout.samples) == outcome.metrics.generated_tokens


@pytest.mark.parametrize("does", [does for does in WANTED if does != "calls"])
async def test_branches_of_a_prompt_that_drifted(client: AsyncClient, tmp_path: Path, does: str) -> None:
    """The template drops the thinking of all completions but the last, so each conversation drifts in its second turn."""
    lines = tuple(ScriptedReply(content=f"Answer {n}.", reasoning=f"Thought {n}.") for n in range(TURNS[does]))
    async with rewriting(tmp_path, Script(lines)) as trainer:
        outcome = await roll(client, f"grpc://{trainer.grpc_target}", does)
        verdicts = trainer.verdicts()
    assert (outcome.failure.message, outcome.stop.reason) == ("", "stop")
    assert [refusal for verdict in verdicts for refusal in verdict.refusals] == []
    assert {warning.code for warning in outcome.warnings} == {"token_drift"}
    assert sum(sum(sample.response_mask) for sample in samples(outcome)) == outcome.metrics.generated_tokens
    keys = {verdict.rollout_id for verdict in verdicts}
    assert len(keys) == len({each.segment_id for each in outcome.samples if each.origin.kind != DRIFT})
    by_id = {each.segment_id: [*each.prompt_ids, *each.response_ids] for each in outcome.samples}
    for each in outcome.samples:
        if each.origin.parent_tokens:
            parent = by_id[each.origin.parent_id][: each.origin.parent_tokens]
            assert by_id[each.segment_id][: len(parent)] == parent


def plainly(trainers: list[HttpTrainer]) -> Act:
    """Complete a conversation like trainers of the asynchronous HTTP API that report prompt ids."""

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(trainers[0].requests[-1].body)
        ids = [*encode(f"Answer {len(trainers[0].requests)}."), END]
        message = {"role": "assistant", "content": decode(ids[:-1])}
        told = {"choices": [{"message": message, "finish_reason": "stop"}], "token_ids": ids}
        told |= {"prompt_token_ids": rendered(asked["messages"], ()), "logprobs": [-0.5] * len(ids)}
        await answer(json.dumps(told).encode())(reader, writer)

    return act


@pytest.mark.parametrize("does", ["branches", "compaction", "calls"])
async def test_over_http_a_trainer_that_says_what_the_model_saw_is_believed(client: AsyncClient, does: str) -> None:
    trainers: list[HttpTrainer] = []
    async with raw_trainer(plainly(trainers)) as trainer:
        trainers.append(trainer)
        url = spec_pb2.Target(url=trainer.url, dialect=spec_pb2.DIALECT_HTTP_PLAIN)
        outcome = await roll(client, url, does)
    assert (outcome.failure.message, told(outcome)) == ("", WANTED[does])
    assert [warning.code for warning in outcome.warnings] == ["conversation_unnamed"] * 2


async def test_a_trainer_that_counts_masks_gets_the_prompt_of_the_first_call_and_refuses_another(
    client: AsyncClient,
) -> None:
    async with StrictTrainer(script=Script(tuple(ScriptedReply(content=f"Answer {n}.") for n in range(5)))) as trainer:
        url = spec_pb2.Target(url=trainer.url, dialect=spec_pb2.DIALECT_HTTP_MASKED)
        outcome = await roll(client, url, "calls", tokenizer="toy")
        (verdict,) = trainer.verdicts()
    assert (outcome.failure.message, outcome.stop.reason, list(outcome.warnings)) == ("", "stop", [])
    assert (json.loads(outcome.messages[0].json), len(outcome.messages)) == (said("Begin again."), 10)
    assert told(outcome) == [("0", MAIN, "", 5)]
    assert_same(samples(outcome)[0], verdict)


async def test_over_http_tools_are_told_once(client: AsyncClient) -> None:
    async with StrictTrainer(dialect=TrainerDialect.PLAIN) as trainer:
        url = spec_pb2.Target(url=trainer.url, dialect=spec_pb2.DIALECT_HTTP_PLAIN)
        outcome = await roll(client, url, "subagents")
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_VALIDATION
    assert "with different tools" in outcome.failure.message


async def test_a_trainer_that_counts_masks_knows_one_conversation(client: AsyncClient) -> None:
    async with StrictTrainer() as trainer:
        url = spec_pb2.Target(url=trainer.url, dialect=spec_pb2.DIALECT_HTTP_MASKED)
        outcome = await roll(client, url, "branches", tokenizer="toy")
    assert (outcome.failure.category, outcome.failure.turn) == (outcome_pb2.FAILURE_CATEGORY_VALIDATION, 1)
    assert "For several conversations use a gRPC trainer" in outcome.failure.message
    assert told(outcome) == [("0", MAIN, "", 1)]
