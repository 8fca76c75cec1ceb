"""CompletionService of the trainer library, called as a rollout server calls it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2, spec_pb2, token_pb2
from rollout_client.trainer import Generated, ParsedCompletion, ToolCall, TryAgainLater, Turn

from tests.client.trainer.asker import MODEL, OTHER, Limits, held_after, refusal, retry_info, standing
from tests.support.toy_model import CALL, END, ToyModel, by_turns, encode, until

PROMPT = encode("<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n")
RESULT = encode("\n<|im_start|>user\n8<|im_end|>\n<|im_start|>assistant\n")


async def test_both_sides_hold_the_same_after_each_turn() -> None:
    async with standing() as stand:
        asker = stand.asker()
        first = await asker.ask(PROMPT)
        assert list(first.token_ids) == [*encode("Let me add.\n" + CALL), END]
        assert (first.finish_reason, first.policy_version) == ("tool_calls", "policy-1")
        assert first.raw_text == "Let me add.\n" + CALL
        assert len(first.logprobs.values) == len(first.token_ids)
        message = json.loads(first.message.json)
        assert message["content"] == "Let me add."
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 5, "b": 3}'}
        second = await asker.ask(RESULT)
        assert (second.finish_reason, json.loads(second.message.json)) == (
            "stop",
            {"role": "assistant", "content": "It is 8."},
        )
        assert stand.model.prompts == [PROMPT, [*PROMPT, *first.token_ids, *RESULT]]


async def test_the_ledger_is_shown_from_any_token_on() -> None:
    async with standing() as stand:
        asker = stand.asker()
        await asker.ask(PROMPT)
        await asker.ask(RESULT)
        for offset in (0, 1, len(PROMPT), len(PROMPT) + 3, len(asker.tokens), len(asker.tokens) + 9):
            answer = await stand.completions.ReadLedger(pb.ReadLedgerRequest(uid="u1", segment_id="0", offset=offset))
            shown = [(token, span.author == MODEL) for span in answer.spans for token in span.token_ids]
            assert shown == asker.tokens[offset:]
            assert answer.checkpoints[-1] == asker.base
        whole = await stand.completions.ReadLedger(pb.ReadLedgerRequest(uid="u1", segment_id="0"))
        reasons = [token_pb2.MASK_REASON_PROMPT, 0, token_pb2.MASK_REASON_ENVIRONMENT, 0]
        assert [span.mask_reason for span in whole.spans] == reasons
        assert [span.turn for span in whole.spans] == [1, 1, 2, 2]
        for uid, segment in (("u2", "0"), ("u1", "1")):
            error = await refusal(stand.completions.ReadLedger(pb.ReadLedgerRequest(uid=uid, segment_id=segment)))
            assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "SEGMENT_UNKNOWN")


async def test_an_answered_turn_is_not_generated_again() -> None:
    async with standing() as stand:
        asker = stand.asker()
        request = asker.request(PROMPT)
        first = await stand.completions.Complete(request)
        assert await stand.completions.Complete(request) == first
        asker.took(request, first)
        await asker.ask(RESULT)
        assert await stand.completions.Complete(request) == first
        assert await stand.completions.Complete(stand.asker().whole(PROMPT)) == first
        assert len(stand.model.prompts) == 2


async def test_a_key_stands_for_one_request() -> None:
    async with standing() as stand:
        asker = stand.asker()
        await stand.completions.Complete(asker.request(PROMPT))
        for other in (asker.request(RESULT), asker.request(PROMPT, sampling=spec_pb2.Sampling(temperature=0.5))):
            error = await refusal(stand.completions.Complete(other))
            assert (error.code, error.fields[0].field) == (grpc.StatusCode.INVALID_ARGUMENT, "turn_key")


async def test_a_turn_asked_for_twice_at_once_is_generated_once() -> None:
    model = ToyModel(gate=asyncio.Event())
    async with standing(model) as stand:
        request = stand.asker().request(PROMPT)
        calls = [asyncio.ensure_future(stand.completions.Complete(request)) for _ in range(3)]
        running = stand.listener._turns._running
        await until(lambda: [turn.waiting for turn in running.values()] == [3])
        calls[0].cancel()
        assert model.gate is not None
        await until(calls[0].done)
        model.gate.set()
        answers = await asyncio.gather(*calls[1:])
        assert answers[0] == answers[1]
        assert (len(model.prompts), model.cancelled) == (1, 0)


async def test_leaving_cancels_the_generation_and_the_turn_can_be_asked_for_again() -> None:
    model = ToyModel(gate=asyncio.Event())
    async with standing(model) as stand:
        asker = stand.asker()
        error = await refusal(stand.completions.Complete(asker.request(PROMPT), timeout=0.2))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: model.cancelled)
        assert model.gate is not None
        model.gate.set()
        await asker.ask(PROMPT)
        assert len(model.prompts) == 2


async def test_a_generation_that_ignores_its_cancellation_leaves_no_trace() -> None:
    left, go_on, told = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def stubborn(prompt_ids: Any, sampling: Any) -> Generated:
        if told.is_set():
            return Generated([7, END])
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.set()
            await go_on.wait()
            told.set()
        return Generated([6, END])

    async with standing(stubborn) as stand:
        asker = stand.asker()
        await refusal(stand.completions.Complete(asker.request(PROMPT), timeout=0.2))
        await left.wait()
        go_on.set()
        await told.wait()
        assert list((await asker.ask(PROMPT)).token_ids) == [7, END]


async def test_no_more_turns_are_generated_at_once_than_may_be() -> None:
    model = ToyModel(by_turns("Yes."), gate=asyncio.Event())
    async with standing(model, Limits(generating=2)) as stand:
        calls = [asyncio.ensure_future(stand.asker(uid=f"u{i}").ask(PROMPT)) for i in range(6)]
        await until(lambda: model.at_once == 2)
        assert model.gate is not None
        model.gate.set()
        await asyncio.gather(*calls)
        assert (len(model.prompts), model.most_at_once) == (6, 2)


async def test_an_unknown_base_is_told_and_the_history_taken_over() -> None:
    async with standing(limits=Limits(remembered=1)) as stand:
        asker = stand.asker()
        first = await asker.ask(PROMPT)
        await stand.asker(uid="u2").ask(PROMPT)  # u1 is forgotten
        error = await refusal(stand.completions.Complete(asker.request(RESULT)))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BASE_UNKNOWN")
        request = asker.whole(RESULT)
        asker.took(request, await stand.completions.Complete(request))
        await asker.ask(RESULT)
        assert stand.model.prompts[-2] == [*PROMPT, *first.token_ids, *RESULT]
        assert len(stand.records) == 1


async def test_a_whole_history_must_extend_what_is_held() -> None:
    async with standing() as stand:
        asker = stand.asker()
        await asker.ask(PROMPT)
        right = asker.whole(RESULT)
        asker.took(right, await stand.completions.Complete(right))
        at, held = len(PROMPT) + 1, [mark.tokens for mark in stand.records.open("u1").segments["0"].checkpoints]
        token, by_model = asker.tokens[at]
        for lie in ((token + 1, by_model), (token, not by_model)):
            asker.tokens[at] = lie
            assert await held_after(stand.completions.Complete(asker.whole(RESULT))) == held
        del asker.tokens[at:], asker.turns[at:]
        assert await held_after(stand.completions.Complete(asker.whole([]))) == held
        assert len(stand.model.prompts) == 2


async def test_digests_that_differ_stop_the_turn() -> None:
    async with standing() as stand:
        asker = stand.asker()
        await asker.ask(PROMPT)
        held = [len(asker.tokens)]
        assert asker.base is not None
        base = token_pb2.Checkpoint.FromString(asker.base.SerializeToString())
        base.digest = bytes(32)
        assert await held_after(stand.completions.Complete(asker.request(RESULT, base=base))) == held
        changed = asker.request(RESULT)
        changed.new_tokens.spans[0].token_ids[2] += 1
        assert await held_after(stand.completions.Complete(changed)) == held
        dropped = asker.request(RESULT)
        del dropped.new_tokens.spans[0].token_ids[2]
        assert await held_after(stand.completions.Complete(dropped)) == held
        claimed = asker.request(RESULT)
        claimed.new_tokens.spans[0].author = MODEL
        claimed.new_tokens.after.CopyFrom(asker.checkpoint([(token, True) for token in RESULT], 3))
        assert await held_after(stand.completions.Complete(claimed)) == held
        await asker.ask(RESULT)  # the failed turn left nothing behind
        assert len(stand.model.prompts) == 2


async def test_segments_of_a_rollout_may_branch() -> None:
    async with standing() as stand:
        asker = stand.asker()
        await asker.ask(PROMPT)
        branch = stand.asker(segment="1", tokens=list(asker.tokens), turns=list(asker.turns), base=asker.base)
        branch.turn, branch.messages = 2, 2
        await branch.ask(RESULT)
        await asker.ask([*RESULT, *RESULT])
        fresh = stand.asker(segment="2")
        fresh.turn = 3
        await fresh.ask(RESULT)
        assert stand.model.prompts[-1] == RESULT
        assert stand.records.open("u1").segments["1"].inherited == asker.turns.count(1)


async def test_the_typed_form_is_answered_in_kind() -> None:
    async with standing() as stand:
        chat = message_pb2.ChatMessage(role="user", parts=[message_pb2.ContentPart(text="Add.")])
        request = stand.asker().request(PROMPT, new_messages=[message_pb2.Message(chat=chat)])
        answer = await stand.completions.Complete(request)
        assert answer.message.chat.tool_calls[0].name == "add"


WRONG: dict[str, dict[str, Any]] = {
    "uid": {"uid": ""},
    "segment_id": {"segment_id": ""},
    "turn": {"turn": 0},
    "turn_key": {"turn_key": "u1/0/2"},
    "base.digest": {"base": token_pb2.Checkpoint(tokens=1, digest=b"short")},
    "new_tokens.after": {"new_tokens": pb.NewTokens()},
    "new_tokens.after.digest": {"new_tokens": pb.NewTokens(after=token_pb2.Checkpoint())},
    "new_tokens.spans": {"new_tokens": pb.NewTokens(after=token_pb2.Checkpoint(digest=bytes(32)))},
    "new_tokens.spans[0].author": {
        "new_tokens": pb.NewTokens(after=token_pb2.Checkpoint(digest=bytes(32)), spans=[token_pb2.Span(token_ids=[1])])
    },
    "new_tokens.spans[0].token_ids": {
        "new_tokens": pb.NewTokens(
            after=token_pb2.Checkpoint(digest=bytes(32)), spans=[token_pb2.Span(author=OTHER, token_ids=[2**31])]
        )
    },
    "new_tokens.spans[0].logprobs": {
        "new_tokens": pb.NewTokens(
            after=token_pb2.Checkpoint(digest=bytes(32)),
            spans=[token_pb2.Span(author=OTHER, token_ids=[1], logprobs=token_pb2.Logprobs())],
        )
    },
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_field_is_named(name: str) -> None:
    async with standing() as stand:
        error = await refusal(stand.completions.Complete(stand.asker().request(PROMPT, **WRONG[name])))
        assert (error.code, [each.field for each in error.fields]) == (grpc.StatusCode.INVALID_ARGUMENT, [name])
        assert not stand.model.prompts


async def test_message_mode_is_refused_clearly() -> None:
    async with standing() as stand:
        error = await refusal(stand.completions.Complete(stand.asker().request(PROMPT, new_tokens=None)))
        assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "MESSAGE_MODE")
        assert "TOKEN_MODE_TOKENS" in str(error)


async def test_strangers_are_turned_away() -> None:
    async with standing(limits=Limits(bearer="guess")) as stand:
        for call in (
            stand.completions.Complete(stand.asker().request(PROMPT)),
            stand.completions.ReadLedger(pb.ReadLedgerRequest()),
        ):
            error = await refusal(call)
            assert error.code is grpc.StatusCode.UNAUTHENTICATED
            assert stand.listener.bearer not in str(error)
        assert not stand.model.prompts


async def broken(prompt_ids: Any, sampling: Any) -> Any:
    raise ValueError("password=hunter2")


async def cancels_itself(prompt_ids: Any, sampling: Any) -> Any:
    raise asyncio.CancelledError


def returning(answer: Any) -> Any:
    async def generate(prompt_ids: Any, sampling: Any) -> Any:
        return answer

    return generate


@pytest.mark.parametrize(
    "generate",
    [
        broken,
        cancels_itself,
        returning(None),
        returning(([1], None)),
        returning(Generated([])),
        returning(Generated([2**31])),
        returning(Generated([-1])),
        returning(Generated([1.5])),  # type: ignore[list-item]
        returning(Generated([1, 2], [0.0])),
        returning(Generated([1], [float("nan")])),
        returning(Generated([1], [float("-inf")])),
        returning(Generated([1], finish_reason=None)),  # type: ignore[arg-type]
    ],
)
async def test_a_fault_of_the_model_stays_inside(generate: Any) -> None:
    async with standing(generate) as stand:
        asker = stand.asker()
        error = await refusal(stand.completions.Complete(asker.request(PROMPT)))
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "GENERATE_FAILED")
        assert "u1/0/1" in str(error)
        assert "hunter2" not in str(error)
        assert not stand.records.open("u1").segments


def wrong(*_: Any) -> Any:
    raise KeyError("password=hunter2")


@pytest.mark.parametrize(
    ("parse", "logged"),
    [
        (wrong, "hunter2"),
        (lambda text: text, "parse must return a ParsedCompletion, not str"),
        (lambda text: ParsedCompletion(None), "ParsedCompletion.content must be a str"),  # type: ignore[arg-type]
        (
            lambda text: ParsedCompletion("", [("add", "{}")]),
            "ParsedCompletion.tool_calls must contain ToolCall, not tuple",
        ),  # type: ignore[list-item]
        (lambda text: ParsedCompletion("", [ToolCall("add", {})]), "ToolCall.arguments must be a str, not dict"),  # type: ignore[arg-type]
    ],
)
async def test_a_fault_of_the_other_parts_stays_inside(
    parse: Any, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with standing(limits=Limits(parse=parse, render=wrong)) as stand:
        asker = stand.asker()
        for request, reason in ((asker.request(PROMPT), "PARSE"), (asker.request([], new_tokens=None), "RENDER")):
            error = await refusal(stand.completions.Complete(request))
            assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, f"{reason}_FAILED")
            assert "hunter2" not in str(error)
        assert not stand.records.open("u1").segments
    assert logged in caplog.text


@pytest.mark.parametrize("begun", [False, True])
async def test_one_turn_of_a_segment_at_a_time(begun: bool) -> None:
    async with standing() as stand:
        asker, model = stand.asker(), stand.model
        if begun:
            await asker.ask(PROMPT)
        held, model.gate = len(asker.turns), asyncio.Event()
        keys = [{"turn": turn, "turn_key": f"u1/0/{turn}"} for turn in (asker.turn, asker.turn + 1)]
        answers = asyncio.gather(
            *(stand.completions.Complete(asker.request(RESULT, **key)) for key in keys), return_exceptions=True
        )
        await until(lambda: model.at_once == 2)
        model.gate.set()
        refused = [each for each in await answers if isinstance(each, grpc.aio.AioRpcError)]
        assert [each.code() for each in refused] == [grpc.StatusCode.ABORTED]
        ledger = stand.records.open("u1").segments["0"]
        assert len(ledger.checkpoints) == 1 + begun
        assert ledger.tokens == held + len(RESULT) + len(ledger.runs[-1].ids)


async def test_a_model_may_ask_for_patience() -> None:
    async def busy(prompt_ids: Any, sampling: Any) -> Generated:
        raise TryAgainLater(1.5)

    async with standing(busy) as stand:
        told = await retry_info(stand.completions.Complete(stand.asker().request(PROMPT)))
        assert told is not None
        assert told.retry_delay.ToMilliseconds() == 1500


async def test_logprobs_that_nobody_wants_are_not_kept() -> None:
    async with standing() as stand:
        request = stand.asker().request(PROMPT, sampling=spec_pb2.Sampling(logprobs=False))
        assert not (await stand.completions.Complete(request)).HasField("logprobs")
        assert stand.model.samplings[0].logprobs is False


async def test_messages_are_rendered_where_a_renderer_is_given() -> None:
    seen: list[tuple[int, int]] = []

    def render(messages: Any, tools: Any) -> list[int]:
        seen.append((len(messages), len(tools)))
        return encode(
            "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
            + "<|im_start|>assistant\n"
        )

    tools = message_pb2.ToolSet(digest=bytes(32), tools=[message_pb2.Tool(name="add", parameters_json_schema="{}")])
    async with standing(ToyModel(by_turns("Yes.")), Limits(render=render)) as stand:
        asker = stand.asker()
        first = await stand.completions.Complete(asker.request([], new_tokens=None, tools=tools))
        prompt = encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert list(first.prompt_ids.values) == prompt
        asker.turn, asker.base = 2, first.after
        request = asker.request([], new_tokens=None, tools=message_pb2.ToolSet(digest=bytes(32)))
        second = await stand.completions.Complete(request)
        assert list(second.prompt_ids.values)[: first.after.tokens] == [*prompt, *first.token_ids]
        assert (second.after.messages, seen) == (4, [(1, 1), (3, 1)])
        assert await stand.completions.Complete(request) == second
        kept = pb.CompleteResponse.FromString(stand.records.open("u1").completions[request.turn_key].body)
        assert not kept.HasField("prompt_ids")  # otherwise memory would grow with the square of the turns


async def test_the_policy_step_of_a_completion_and_the_announced_one_are_passed_on() -> None:
    turns: list[Turn] = []

    async def generate(turn: Turn) -> Generated:
        turns.append(turn)
        return Generated([7, END], policy_version="v3", policy_step=0 if turn.turn == 1 else None)

    async with standing(generate) as stand:
        asker = stand.asker()
        request = asker.request(PROMPT, policy_step=4)
        first = await stand.completions.Complete(request)
        asker.took(request, first)
        second = await asker.ask(RESULT)
        assert (first.HasField("policy_step"), first.policy_step, second.HasField("policy_step")) == (True, 0, False)
        ledger = await stand.completions.ReadLedger(pb.ReadLedgerRequest(uid="u1", segment_id="0"))
        steps = [span.policy_step if span.HasField("policy_step") else None for span in ledger.spans]
        assert steps == [None, 0, None, None]
    assert [(turn.policy_step, turn.resumed) for turn in turns] == [(4, 0), (None, 0)]
