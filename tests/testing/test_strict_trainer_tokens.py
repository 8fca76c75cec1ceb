"""Token mode of the strict trainer, over a real channel: what it accepts, what it refuses, and the position it reports."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import completion_service_pb2_grpc, message_pb2, token_pb2
from rollout_server.testing.checks.verdict import RefusalReason
from rollout_server.testing.script import Fault, FaultKind, Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from .conftest import QUESTION, TOOLS, run_tool
from .test_strict_trainer_completions import digest_of, status_of
from .tokens import MAIN, TokenCaller, as_json, other, words_of

ADD = tool_call("call_1", "add", '{"a": 5, "b": 3}')
MULTIPLY = tool_call("call_2", "multiply", '{"a": 8, "b": 2}')
CLOSING, ENVIRONMENT, PROMPT = (
    token_pb2.MASK_REASON_CLOSING,
    token_pb2.MASK_REASON_ENVIRONMENT,
    token_pb2.MASK_REASON_PROMPT,
)
Asking = Callable[..., TokenCaller]


@pytest.fixture
async def asking(toy: Any) -> AsyncIterator[Asking]:
    """A factory: `asking(trainer, uid=..., ...)`."""
    channels: list[grpc.aio.Channel] = []

    def make(trainer: StrictTrainer, *, rendered_with: Any = None, **fields: Any) -> TokenCaller:
        def render(messages: Any) -> list[int]:
            return list(
                toy.apply_chat_template(messages, tools=rendered_with, add_generation_prompt=True, return_dict=False)
            )

        channels.append(grpc.aio.insecure_channel(trainer.grpc_target))
        stub = completion_service_pb2_grpc.CompletionServiceStub(channels[-1])
        return TokenCaller(stub, render, stop=toy.convert_tokens_to_ids("<|im_end|>"), **fields)

    yield make
    for channel in channels:
        await channel.close()


async def refused(call: Any, reason: str = "TOKENS") -> str:
    """The text of a call that must fail with INVALID_ARGUMENT."""
    code, why, text, _ = await status_of(call)
    assert (code, why) == (grpc.StatusCode.INVALID_ARGUMENT, reason), text
    return text


async def test_a_rollout_in_tokens(asking: Asking, toy: Any) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        await playing.play()
        verdict = trainer.verdict("r")
        held = await playing.stub.ReadLedger(pb.ReadLedgerRequest(uid="u", segment_id="0"))
    assert verdict is not None
    assert verdict.accepted
    assert playing.messages[-1]["content"] == "5 plus 3 equals 8. Multiplying 8 by 2 gives 16."
    assert list(held.spans) == playing.spans
    assert list(held.checkpoints) == [answer.after for answer in playing.answers]
    assert [answer.policy_version for answer in playing.answers] == ["policy-1", "policy-2", "policy-3"]
    assert [answer.raw_text for answer in playing.answers] == [toy.decode(a.token_ids) for a in playing.answers]
    sample = verdict.sample
    assert list(sample.prompt_ids + sample.response_ids) == playing.ids
    assert list(sample.response_mask) == [word >> 31 for word in playing.words[len(sample.prompt_ids) :]]
    assert all(turn.drift is None for turn in verdict.turns)


async def test_both_modes_and_http_give_the_same_tokens(asking: Asking, caller: Any) -> None:
    async with StrictTrainer() as trainer:
        tokens, http = asking(trainer), caller(trainer, rollout_id="http")
        await tokens.play()
        await http.play()
        samples = [trainer.verdict(name).sample for name in ("r", "http")]  # type: ignore[union-attr]
    assert samples[0] == samples[1]
    assert [list(answer.token_ids) for answer in tokens.answers] == [answer["token_ids"] for answer in http.answers]


async def test_a_cut_answer_is_closed_by_the_server(asking: Asking) -> None:
    script = Script((ScriptedReply(content="Adding", tool_calls=(ADD,), cut=True), ScriptedReply(content="8")))
    async with StrictTrainer(scripts={"r": script}) as trainer:
        playing = asking(trainer)
        await playing.complete()
        new = playing.new_spans()
        assert [span.mask_reason for span in new] == [CLOSING, ENVIRONMENT]
        whole = [*new[0].token_ids, *new[1].token_ids]
        undeclared = playing.request(new_tokens=playing.tokens([other(ENVIRONMENT, 2, whole)]))
        assert "0 tokens from token" in await refused(playing.stub.Complete(undeclared))
        without = playing.request(new_tokens=playing.tokens(new[1:]))
        assert "<|im_end|>" in await refused(playing.stub.Complete(without))
        await playing.complete()
        held = await playing.stub.ReadLedger(pb.ReadLedgerRequest(uid="u", segment_id="0"))
    assert list(held.spans) == playing.spans


async def test_an_answer_that_ended_is_not_closed_again(asking: Asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        await playing.complete()
        (environment,) = playing.new_spans()
        assert playing.stop is not None
        closed = [other(CLOSING, 2, [playing.stop]), environment]
        await refused(playing.stub.Complete(playing.request(new_tokens=playing.tokens(closed))))


WRONG_ENVIRONMENTS: dict[str, Callable[[list[int]], list[int]]] = {
    "one token less": lambda ids: ids[:-1],
    "one token more": lambda ids: [*ids, ids[-1]],
    "no newline after the end token": lambda ids: ids[1:],
    "another token": lambda ids: [*ids[:3], ids[3] ^ 1, *ids[4:]],
    "two tokens swapped": lambda ids: [*ids[:2], ids[3], ids[2], *ids[4:]],
    "nothing": lambda _: [],
}


@pytest.mark.parametrize("surplus", [(), (7, 8)], ids=["appended", "rewritten"])
@pytest.mark.parametrize("what", WRONG_ENVIRONMENTS)
async def test_a_wrong_environment_is_refused_with_its_place(
    asking: Asking, toy: Any, what: str, surplus: tuple[int, ...]
) -> None:
    script = Script((ScriptedReply(content="Adding.", tool_calls=(ADD,), surplus=surplus), ScriptedReply(content="8")))
    async with StrictTrainer(scripts={"r": script}) as trainer:
        playing = asking(trainer)
        first = await playing.complete()
        plain = playing.render(playing.messages)
        right = plain[len(playing.ids) - len(surplus) :]
        closing = [other(CLOSING, 2, [playing.stop or 0])] if surplus else []
        wrong = WRONG_ENVIRONMENTS[what](list(right))
        spans = [*closing, *([other(ENVIRONMENT, 2, wrong)] if wrong else [])]
        text = await refused(playing.stub.Complete(playing.request(new_tokens=playing.tokens(spans))))
        different = next((i for i, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b), None)
        at = min(len(right), len(wrong)) if different is None else different
        assert text.startswith(
            f"turn 2: token {first.after.tokens + len(closing) + at} is not what the messages render to"
        )
        assert repr(toy.decode(right[at : at + 1]))[1:-1] in text
        verdict = trainer.verdict("r")
        assert verdict is not None
        assert [refusal.reason for refusal in verdict.refusals] == [RefusalReason.TOKENS]
        # A refused call changes nothing: the correct one is still accepted.
        right_spans = [*closing, other(ENVIRONMENT, 2, right)]
        answer = await playing.stub.Complete(playing.request(new_tokens=playing.tokens(right_spans)))
        assert json.loads(answer.message.json)["content"] == "8"


async def test_a_first_prompt_of_other_messages_or_stale_tools_is_refused(asking: Asking) -> None:
    listed = [
        message_pb2.Tool(
            name=tool["function"]["name"],
            description=tool["function"]["description"],
            parameters_json_schema=json.dumps(tool["function"]["parameters"]),
        )
        for tool in TOOLS
    ]
    told = message_pb2.ToolSet(digest=digest_of(listed), tools=listed)
    async with StrictTrainer() as trainer:
        right = asking(trainer, rendered_with=TOOLS, tools=told)
        await right.complete()
        right.tools = message_pb2.ToolSet(digest=told.digest)
        await right.play()
        assert trainer.verdict("r").accepted  # type: ignore[union-attr]
        stale = asking(trainer, uid="s", rollout_id="s", rendered_with=TOOLS[:2], tools=told)
        assert (await refused(stale.complete())).startswith("turn 1: token ")
        without = asking(trainer, uid="w", rollout_id="w", tools=told)
        assert (await refused(without.complete())).startswith("turn 1: token ")


def respan(span: token_pb2.Span, **changes: Any) -> token_pb2.Span:
    changed = token_pb2.Span()
    changed.CopyFrom(span)
    for name, value in changes.items():
        if name == "token_ids":
            del changed.token_ids[:]
            changed.token_ids.extend(value)
        elif name == "logprobs":
            changed.logprobs.values.extend(value)
        else:
            setattr(changed, name, value)
    return changed


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"author": token_pb2.AUTHOR_UNSPECIFIED}, "new_tokens.spans[0].author"),
        ({"author": 7}, "new_tokens.spans[0].author"),
        ({"author": token_pb2.AUTHOR_MODEL}, "new_tokens.spans[0].mask_reason"),
        ({"author": token_pb2.AUTHOR_MODEL, "mask_reason": 0}, "new_tokens.spans[0]"),
        ({"mask_reason": 0}, "new_tokens.spans[0].mask_reason"),
        ({"mask_reason": 9}, "new_tokens.spans[0].mask_reason"),
        ({"mask_reason": token_pb2.MASK_REASON_AUTHOR}, "new_tokens.spans[0].mask_reason"),
        ({"mask_reason": PROMPT}, "new_tokens.spans[0]"),
        ({"turn": 1}, "new_tokens.spans"),
        ({"turn": 3}, "new_tokens.spans"),
        ({"token_ids": []}, "new_tokens.spans[0].token_ids"),
        ({"token_ids": [1 << 31]}, "new_tokens.spans[0].token_ids"),
        ({"policy_version": "x"}, "new_tokens.spans[0]"),
        ({"logprobs": [0.5]}, "new_tokens.spans[0]"),
    ],
)
async def test_spans_that_cannot_be_name_the_field(asking: Asking, changes: Any, field: str) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        await playing.complete()
        (span,) = playing.new_spans()
        request = playing.request(new_tokens=pb.NewTokens(spans=[respan(span, **changes)]))
        code, _, text, rich = await status_of(playing.stub.Complete(request))
        detail = error_details_pb2.BadRequest()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert rich.details[1].Unpack(detail)
        assert detail.field_violations[0].field == field, text
        verdict = trainer.verdict("r")
        assert verdict is not None
        assert not verdict.accepted
        await playing.complete()


@pytest.mark.parametrize("changes", [{"tokens": 5}, {"digest": b"x" * 32}, {"digest": b""}])
async def test_a_checkpoint_that_base_and_spans_do_not_give_is_a_mismatch(asking: Asking, changes: Any) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        first = await playing.complete()
        request = playing.request(new_tokens=playing.tokens(playing.new_spans(), **changes))
        code, reason, _, rich = await status_of(playing.stub.Complete(request))
        assert (code, reason) == (grpc.StatusCode.ABORTED, "LEDGER_MISMATCH")
        detail = pb.LedgerMismatch()
        assert rich.details[1].Unpack(detail)
        assert list(detail.checkpoints) == [first.after]


async def test_other_fields_of_the_contract(asking: Asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        stub = playing.stub
        new = playing.new_spans()
        text = await refused(stub.Complete(playing.request(origin=None)), "INVALID_REQUEST")
        assert text.startswith("origin: ")
        messages = playing.request(new_tokens=playing.tokens(new, messages=7))
        assert (await refused(stub.Complete(messages), "INVALID_REQUEST")).startswith("new_tokens.after.messages")
        media = playing.tokens(new)
        media.media.add(length=1)
        text = await refused(stub.Complete(playing.request(new_tokens=media)), "INVALID_REQUEST")
        assert text.startswith("new_tokens.media")
        empty = playing.request(new_tokens=playing.tokens([]))
        assert (await refused(stub.Complete(empty), "INVALID_REQUEST")).startswith("new_tokens.spans")
        await playing.complete()
        again = playing.request(origin=MAIN)
        assert (await refused(stub.Complete(again), "INVALID_REQUEST")).startswith("origin: ")
        in_messages = playing.request(new_tokens=None)
        assert (await refused(stub.Complete(in_messages), "INVALID_REQUEST")).startswith("new_tokens: is missing")


async def test_a_rewritten_history_is_refused_in_tokens_too(asking: Asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        await playing.complete()
        playing.messages[playing.known - 1] = {**playing.messages[playing.known - 1], "content": "Other."}
        assert (await refused(playing.stub.Complete(playing.whole()), "HISTORY")).startswith("messages[2]")


async def test_a_trainer_that_forgot_is_sent_the_whole_history(asking: Asking) -> None:
    script = Script(
        (
            ScriptedReply(tool_calls=(ADD,), forgets=True),
            ScriptedReply(tool_calls=(MULTIPLY,)),
            ScriptedReply(content="16"),
        )
    )
    async with StrictTrainer(scripts={"r": script}) as trainer:
        playing = asking(trainer)
        await playing.complete()
        code, reason, _, _ = await status_of(playing.stub.Complete(playing.request()))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BASE_UNKNOWN")
        code, _, _, _ = await status_of(playing.stub.ReadLedger(pb.ReadLedgerRequest(uid="u", segment_id="0")))
        assert code is grpc.StatusCode.NOT_FOUND
        await playing.complete(playing.whole())
        await playing.play()
        held = await playing.stub.ReadLedger(pb.ReadLedgerRequest(uid="u", segment_id="0"))
        verdict = trainer.verdict("r")
    assert list(held.spans) == playing.spans
    assert verdict is not None
    assert verdict.accepted
    assert list(verdict.sample.prompt_ids + verdict.sample.response_ids) == playing.ids


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("what", ["id", "author", "short"])
async def test_a_whole_history_has_to_be_what_is_held(asking: Asking, forgets: bool, what: str) -> None:
    script = Script((ScriptedReply(content="Adding.", tool_calls=(ADD,), forgets=forgets),), then_model=True)
    async with StrictTrainer(scripts={"r": script}) as trainer:
        playing = asking(trainer)
        first = await playing.complete()
        right, model = playing.new_spans(), playing.spans[1]
        ids = list(model.token_ids)
        spans = {
            "id": [playing.spans[0], respan(model, token_ids=[*ids[:2], ids[2] ^ 1, *ids[3:]]), *right],
            "author": [other(PROMPT, 2, playing.ids + list(right[0].token_ids))],
            "short": [other(PROMPT, 2, playing.ids[:5])],
        }[what]
        words = words_of(spans)
        after = token_pb2.Checkpoint(messages=len(playing.messages), tokens=len(words), digest=b"")
        request = playing.whole()
        request.new_tokens.CopyFrom(pb.NewTokens(spans=spans, after=after))
        code, reason, text, rich = await status_of(playing.stub.Complete(request))
        assert (code, reason) == (grpc.StatusCode.ABORTED, "LEDGER_MISMATCH")
        index = {"id": len(playing.spans[0].token_ids) + 2, "author": len(playing.spans[0].token_ids), "short": 5}[what]
        assert f"token {index} differs" in text
        detail = pb.LedgerMismatch()
        assert rich.details[1].Unpack(detail)
        assert list(detail.checkpoints) == [first.after]


async def test_another_trainer_takes_over_from_the_whole_history(asking: Asking) -> None:
    async with StrictTrainer() as first, StrictTrainer() as second:
        playing, next_one = asking(first), asking(second)
        await playing.complete()
        await playing.complete()
        playing.stub = next_one.stub
        code, reason, _, _ = await status_of(playing.stub.Complete(playing.request()))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BASE_UNKNOWN")
        wrong = playing.whole()
        wrong.new_tokens.spans[2].token_ids[3] ^= 1
        wrong.new_tokens.after.CopyFrom(checkpoint_of(wrong))
        assert (await refused(playing.stub.Complete(wrong))).startswith("turn 2: token ")
        await playing.complete(playing.whole())
        held = await playing.stub.ReadLedger(pb.ReadLedgerRequest(uid="u", segment_id="0"))
    assert list(held.spans) == playing.spans
    assert list(held.checkpoints) == [answer.after for answer in playing.answers]


def checkpoint_of(request: pb.CompleteRequest) -> token_pb2.Checkpoint:
    """The checkpoint of a whole history's spans."""
    caller = TokenCaller(None, list)  # type: ignore[arg-type]
    caller.messages = [None] * len(request.new_messages)
    return caller.tokens(list(request.new_tokens.spans)).after


async def test_a_branch_and_a_sub_agent(asking: Asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        first = await playing.complete()
        shared = list(playing.spans)
        branch = asking(trainer, segment_id="1", base=first.after, turn=1, spans=shared, known=3)
        branch.origin = token_pb2.SegmentOrigin(
            parent_id="0", parent_tokens=first.after.tokens, kind=token_pb2.SEGMENT_KIND_BRANCH
        )
        branch.messages = [*playing.messages[:3], {"role": "tool", "content": "80", "tool_call_id": "call_1"}]
        await playing.play()
        await branch.play()
        child = asking(trainer, segment_id="2")
        child.origin = token_pb2.SegmentOrigin(parent_id="0", kind=token_pb2.SEGMENT_KIND_SUBAGENT)
        await child.play()
        verdicts = {verdict.rollout_id: verdict for verdict in trainer.verdicts()}
        ledgers = {
            name: list((await playing.stub.ReadLedger(pb.ReadLedgerRequest(uid="u", segment_id=name))).spans)
            for name in ("0", "1", "2")
        }
    assert set(verdicts) == {"r", "r/1", "r/2"}
    assert all(verdict.accepted for verdict in verdicts.values())
    assert ledgers == {"0": playing.spans, "1": branch.spans, "2": child.spans}


async def test_a_branch_is_no_place_for_foreign_tokens_of_the_model(asking: Asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        first = await playing.complete()
        branch = asking(trainer, segment_id="1", turn=1, spans=list(playing.spans), known=3)
        branch.messages = [*playing.messages]
        branch.origin = token_pb2.SegmentOrigin(
            parent_id="0", parent_tokens=first.after.tokens - 1, kind=token_pb2.SEGMENT_KIND_BRANCH
        )
        text = await refused(branch.stub.Complete(branch.whole()), "INVALID_REQUEST")
        assert "differ from those of the parent segment" in text
        branch.origin.parent_tokens += 1
        await branch.complete(branch.whole())
        assert branch.turn == 2


async def test_max_tokens_is_kept(asking: Asking) -> None:
    script = Script((ScriptedReply(content="One two three four five six seven."), ScriptedReply(content="8")))
    async with StrictTrainer(scripts={"r": script}) as trainer:
        playing = asking(trainer, sampling={"max_tokens": 3})
        answer = await playing.complete()
        assert len(answer.token_ids) == 3
        assert answer.finish_reason == "length"
        playing.messages.append({"role": "user", "content": "Go on."})
        await playing.complete()
        assert trainer.verdict("r").accepted  # type: ignore[union-attr]


async def test_turn_keys_and_faults_as_in_message_mode(asking: Asking) -> None:
    script = Script((Fault(kind=FaultKind.LOST), ScriptedReply(tool_calls=(ADD,)), ScriptedReply(content="8")))
    async with StrictTrainer(scripts={"r": script}) as trainer:
        playing = asking(trainer)
        request = playing.request()
        code, reason, _, _ = await status_of(playing.stub.Complete(request))
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "LOST")
        first = await playing.complete()
        assert await playing.stub.Complete(request) == first
        await playing.complete()
        verdict = trainer.verdict("r")
    assert verdict is not None
    assert verdict.accepted
    assert (len(verdict.turns), verdict.faults) == (2, ("turn 1: lost",))


async def test_messages_of_a_base_may_leave_out_the_answer(asking: Asking) -> None:
    async with StrictTrainer() as trainer:
        playing = asking(trainer)
        first = await playing.complete()
        base = token_pb2.Checkpoint(messages=2, tokens=first.after.tokens, digest=first.after.digest)
        new = [first.message, as_json(run_tool(playing.messages[2]["tool_calls"][0]))]
        await playing.complete(playing.request(base=base, new_messages=new))
        assert trainer.verdict("r").accepted  # type: ignore[union-attr]
    assert playing.messages[:2] == QUESTION
