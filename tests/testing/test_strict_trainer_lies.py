"""The lies that a strict trainer tells over gRPC: each does what its name says, and the trainer's own record stays true."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import completion_service_pb2_grpc
from rollout_server.testing.model.script_json import script_from_json
from rollout_server.testing.script import Lie, Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from .test_strict_trainer_completions import status_of
from .tokens import MODEL_BIT, TokenCaller, digest

ADD = tool_call("call_1", "add", '{"a": 5, "b": 3}')
MULTIPLY = tool_call("call_2", "multiply", '{"a": 8, "b": 2}')


@pytest.fixture
async def asking(toy: Any) -> AsyncIterator[Callable[..., TokenCaller]]:
    """A factory: `asking(trainer, uid=..., ...)`."""
    channels: list[grpc.aio.Channel] = []

    def render(messages: Any) -> list[int]:
        return list(toy.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def make(trainer: StrictTrainer, **fields: Any) -> TokenCaller:
        channels.append(grpc.aio.insecure_channel(trainer.grpc_target))
        stub = completion_service_pb2_grpc.CompletionServiceStub(channels[-1])
        return TokenCaller(stub, render, sampling={"max_tokens": 60}, **fields)

    yield make
    for channel in channels:
        await channel.close()


def lying(lie: Lie, turn: int) -> Script:
    """A script of three turns, one of them with the lie."""
    replies = [
        ScriptedReply(content="Adding.", tool_calls=(ADD,)),
        ScriptedReply(content="Multiplying.", tool_calls=(MULTIPLY,)),
        ScriptedReply(content="16"),
    ]
    told = replies[turn - 1]
    replies[turn - 1] = ScriptedReply(content=told.content, tool_calls=told.tool_calls, lie=lie)
    return Script(tuple(replies))


def wrong(caller: TokenCaller, request: pb.CompleteRequest, answer: pb.CompleteResponse) -> set[str]:
    """The errors that a correct server finds in a response."""
    ids = list(answer.token_ids)
    words = caller.words + [token for span in request.new_tokens.spans for token in span.token_ids]
    tokens = len(words) + len(ids)
    found = {
        "prompt": answer.prompt_checkpoint != request.new_tokens.after,
        "after": (answer.after.tokens, answer.after.digest)
        != (tokens, digest(words + [(token | MODEL_BIT) & 0xFFFFFFFF for token in ids])),
        "oversized": any(token >= MODEL_BIT for token in ids),
        "logprobs": len(answer.logprobs.values) != len(ids),
        "too long": len(ids) > request.sampling.max_tokens,
        "policy": answer.policy_version != f"policy-{request.turn}",
    }
    return {name for name, is_wrong in found.items() if is_wrong}


SHOWN = {
    Lie.CHANGED_ID: {"after"},
    Lie.DROPPED_ID: {"after"},
    Lie.OVERSIZED_ID: {"oversized"},
    Lie.SHORT_LOGPROBS: {"logprobs"},
    Lie.TOO_LONG: {"too long"},
    Lie.OTHER_TURN: {"after"},
    Lie.REPLAYED_TURN: {"prompt", "after", "policy"},
    Lie.STALE_POLICY: {"policy"},
    Lie.PROMPT_DIGEST: {"prompt"},
    Lie.AFTER_DIGEST: {"after"},
    Lie.NO_CHECKPOINTS: {"prompt", "after"},
}


def test_every_lie_is_looked_at() -> None:
    assert set(Lie) - set(SHOWN) == {Lie.ANSWERED_TWICE}  # it occurs only on streams, in test_lies.py


@pytest.mark.parametrize("turn", [2, 3])
@pytest.mark.parametrize("lie", SHOWN)
async def test_a_lie_shows_in_what_it_is_about(asking: Callable[..., TokenCaller], lie: Lie, turn: int) -> None:
    async with StrictTrainer(scripts={"r": lying(lie, turn), "other": lying(lie, turn)}) as trainer:
        playing, other = asking(trainer), asking(trainer, uid="o", rollout_id="other")
        for _ in range(turn - 1):
            await playing.complete()
        await other.complete()
        request = playing.request()
        answer = await playing.stub.Complete(request)
        assert wrong(playing, request, answer) == SHOWN[lie]
        held = await playing.stub.ReadLedger(pb.ReadLedgerRequest(uid="u", segment_id="0"))
        verdict = trainer.verdict("r")
        untouched = trainer.verdict("other")
    assert verdict is not None
    assert untouched is not None
    assert verdict.faults == (f"turn {turn}: {lie}",)
    assert untouched.faults == ()
    truth = [(token, span.author) for span in held.spans for token in span.token_ids]
    assert len(truth) == held.checkpoints[-1].tokens
    assert verdict.sample.prompt_ids + verdict.sample.response_ids == tuple(token for token, _ in truth)


@pytest.mark.parametrize("lie", [Lie.CHANGED_ID, Lie.DROPPED_ID, Lie.OTHER_TURN])
async def test_who_believes_a_lie_about_ids_is_stopped_one_turn_later(
    asking: Callable[..., TokenCaller], lie: Lie
) -> None:
    async with StrictTrainer(scripts={"r": lying(lie, 2)}) as trainer:
        playing = asking(trainer)
        await playing.complete()
        answer = await playing.stub.Complete(playing.request())
        new = playing.new_spans()
        believed = pb.CompleteResponse()
        believed.CopyFrom(answer)
        words = playing.words + [token for span in new for token in span.token_ids]
        words += [token | MODEL_BIT for token in answer.token_ids]
        believed.after.tokens, believed.after.digest = len(words), digest(words)
        believed.after.messages = len(playing.messages) + 1
        playing.take(new, believed, playing.request())
        playing.messages.append({"role": "user", "content": "And?"})
        code, reason, _, _ = await status_of(playing.stub.Complete(playing.request()))
        assert (code, reason) == (grpc.StatusCode.ABORTED, "LEDGER_MISMATCH")


async def test_the_other_answer_is_another_rollouts_where_there_is_none_before(
    asking: Callable[..., TokenCaller],
) -> None:
    async with StrictTrainer(scripts={"r": lying(Lie.OTHER_TURN, 1)}) as trainer:
        playing = asking(trainer)
        code, reason, _, _ = await status_of(playing.stub.Complete(playing.request()))
        assert (code, reason) == (grpc.StatusCode.INTERNAL, "SCRIPT")
    async with StrictTrainer(scripts={"r": lying(Lie.OTHER_TURN, 1)}) as trainer:
        other, playing = asking(trainer, uid="o", rollout_id="o"), asking(trainer)
        theirs = await other.complete()
        answer = await playing.stub.Complete(playing.request())
    assert answer.message == theirs.message
    assert answer.token_ids == theirs.token_ids
    assert answer.prompt_checkpoint == playing.request().new_tokens.after


async def test_an_answer_is_as_long_as_it_is_where_nothing_was_asked(asking: Callable[..., TokenCaller]) -> None:
    async with StrictTrainer(scripts={"r": lying(Lie.TOO_LONG, 1)}) as trainer:
        playing = asking(trainer)
        playing.sampling = None
        await playing.complete()
        verdict = trainer.verdict("r")
    assert verdict is not None
    assert verdict.faults == ()


async def test_a_replayed_key_repeats_the_lie(asking: Callable[..., TokenCaller]) -> None:
    async with StrictTrainer(scripts={"r": lying(Lie.CHANGED_ID, 1)}) as trainer:
        playing = asking(trainer)
        request = playing.request()
        assert await playing.stub.Complete(request) == await playing.stub.Complete(request)


async def test_policy_versions_are_the_scripts(asking: Callable[..., TokenCaller]) -> None:
    script = Script((ScriptedReply(content="x", policy_version="step 7"),))
    async with StrictTrainer(scripts={"r": script}) as trainer:
        playing = asking(trainer)
        assert (await playing.complete()).policy_version == "step 7"
        held = await playing.stub.ReadLedger(pb.ReadLedgerRequest(uid="u", segment_id="0"))
    assert held.spans[-1].policy_version == "step 7"


def test_lies_in_scripts_as_json() -> None:
    line = {"reply": {"content": "x", "lie": "changed_id", "policy_version": "p", "forgets": True}}
    read = script_from_json({"lines": [line]})
    assert read == Script((ScriptedReply(content="x", lie=Lie.CHANGED_ID, policy_version="p", forgets=True),))
    with pytest.raises(ValueError, match="white"):
        script_from_json(json.loads('{"lines": [{"reply": {"lie": "white"}}]}'))
