"""Completions that are aborted and resumed, requested as a rollout server does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import spec_pb2, token_pb2
from rollout_client.trainer import Generated, Turn

from tests.client.trainer.asker import MODEL, Asker, Limits, held_after, refusal, standing
from tests.support.toy_model import END, decode, encode

PROMPT = encode("<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n")
RESULT = encode("\n<|im_start|>user\n8<|im_end|>\n<|im_start|>assistant\n")
WORDS = encode("It is eight, I am sure.")


class Scripted:
    """Generate the results of a list in order and record the turns."""

    def __init__(self, *results: Generated) -> None:
        self.turns: list[Turn] = []
        self._results: Iterator[Generated] = iter(results)

    async def __call__(self, turn: Turn) -> Generated:
        self.turns.append(turn)
        return next(self._results)


def part(ids: Sequence[int], step: int | None, reason: str = "abort") -> Generated:
    """A part of a completion, with logprobs that name its step."""
    return Generated(ids, [-(step or 0) - 0.5] * len(ids), reason, "" if step is None else f"v{step}", step)


def resumed(asker: Asker, parts: Sequence[pb.CompleteResponse], ids: list[int] = PROMPT, **changes: Any) -> Any:
    """The request for the rest of a turn, of which the trainer has returned these parts."""
    spans = [
        token_pb2.Span(author=MODEL, turn=asker.turn, token_ids=each.token_ids, logprobs=each.logprobs)
        for each in parts
        if each.token_ids
    ]
    key = f"{asker.uid}/{asker.segment}/{asker.turn}/{len(parts)}"
    return asker.request(ids, **{"turn_key": key, "resumed": spans, **changes})


async def test_the_rest_of_an_aborted_turn_is_generated_after_its_parts() -> None:
    model = Scripted(part(WORDS[:3], 1), part([], 2), part(WORDS[3:4], 2), part([*WORDS[4:], END], 3, "stop"))
    async with standing(model) as stand:
        asker, parts = stand.asker(), list[pb.CompleteResponse]()
        parts.append(await stand.completions.Complete(asker.request(PROMPT)))
        for _ in range(2):
            parts.append(await stand.completions.Complete(resumed(asker, parts)))
        error = await refusal(stand.completions.ReadLedger(pb.ReadLedgerRequest(uid="u1", segment_id="0")))
        assert error.reason == "SEGMENT_UNKNOWN", "nothing enters the ledger before the turn is complete"
        last = await stand.completions.Complete(resumed(asker, parts))
        assert [list(each.token_ids) for each in parts] == [WORDS[:3], [], WORDS[3:4]]
        assert [each.finish_reason for each in (*parts, last)] == ["abort"] * 3 + ["stop"]
        assert (list(last.token_ids), last.raw_text) == ([*WORDS[4:], END], decode(WORDS))
        whole = pb.CompleteResponse(token_ids=[*WORDS, END], prompt_checkpoint=last.prompt_checkpoint, after=last.after)
        asker.took(asker.request(PROMPT), whole)
        assert [(list(each.ids), each.resumed) for each in model.turns] == [
            ([*PROMPT, *WORDS[:count]], count) for count in (0, 3, 3, 4)
        ]
        spans = (await stand.completions.ReadLedger(pb.ReadLedgerRequest(uid="u1", segment_id="0"))).spans
        assert [(each.policy_version, each.policy_step, list(each.token_ids)) for each in spans[1:]] == [
            ("v1", 1, WORDS[:3]),
            ("v2", 2, WORDS[3:4]),
            ("v3", 3, [*WORDS[4:], END]),
        ]
        assert [set(each.logprobs.values) for each in spans[1:]] == [{-1.5}, {-2.5}, {-3.5}]


async def test_each_part_is_returned_again_for_its_key() -> None:
    model = Scripted(part(WORDS[:3], 1), part(WORDS[3:5], 2), part([END], 3, "stop"), part([*WORDS, END], 4, "stop"))
    async with standing(model) as stand:
        asker = stand.asker()
        requests = [asker.request(PROMPT)]
        parts = [await stand.completions.Complete(requests[0])]
        for _ in range(2):
            requests.append(resumed(asker, parts))
            parts.append(await stand.completions.Complete(requests[-1]))
        assert [await stand.completions.Complete(each) for each in requests] == parts
        assert len(model.turns) == 3
        whole = pb.CompleteResponse(
            token_ids=[*WORDS[:5], END], prompt_checkpoint=parts[2].prompt_checkpoint, after=parts[2].after
        )
        asker.took(requests[0], whole)
        await asker.ask(RESULT)


async def test_an_aborted_completion_that_fills_its_limit_is_complete() -> None:
    async with standing(Scripted(part(WORDS[:3], 1), part(WORDS[3:5], 2))) as stand:
        asker = stand.asker()
        sampling = spec_pb2.Sampling(max_tokens=5)
        first = await stand.completions.Complete(asker.request(PROMPT, sampling=sampling))
        sampling.max_tokens = 2
        last = await stand.completions.Complete(resumed(asker, [first], sampling=sampling))
        assert (first.finish_reason, last.finish_reason, last.raw_text) == ("abort", "length", decode(WORDS[:5]))
        assert last.after.tokens == len(PROMPT) + 5


async def test_a_trainer_without_a_record_takes_over_the_parts() -> None:
    parts = []
    async with standing(Scripted(part(WORDS[:3], 1))) as stand:
        parts.append(await stand.completions.Complete(stand.asker().request(PROMPT)))
    model = Scripted(part(WORDS[3:5], 2), part([*WORDS[5:], END], 3, "stop"))
    async with standing(model) as stand:
        asker = stand.asker()
        for _ in range(2):
            parts.append(await stand.completions.Complete(resumed(asker, parts)))
        assert parts[-1].raw_text == decode(WORDS)
        record = stand.records.find("u1")
        assert record is not None
        ledger = record.segments["0"]
        assert [(run.own, run.policy_step) for run in ledger.runs] == [(False, None)] * 2 + [(True, 2), (True, 3)]
        assert (ledger.complete, ledger.ids.tolist()) == (False, [*PROMPT, *WORDS, END])


async def test_other_parts_than_those_generated_here_are_refused() -> None:
    async with standing(Scripted(part(WORDS[:3], 1))) as stand:
        asker = stand.asker()
        first = await stand.completions.Complete(asker.request(PROMPT))
        first.token_ids[0] += 1
        assert await held_after(stand.completions.Complete(resumed(asker, [first]))) == []
        other = token_pb2.Span(author=token_pb2.AUTHOR_OTHER, turn=1, token_ids=[1])
        large = token_pb2.Span(author=MODEL, turn=1, token_ids=[2**31])
        wrong = [
            (resumed(asker, [first], turn_key="u1/0/1"), "turn_key"),
            (asker.request(PROMPT, turn_key="u1/0/1/0"), "turn_key"),
            (asker.request(PROMPT, turn_key="u1/0/1/x"), "turn_key"),
            (asker.request(PROMPT, turn_key="u1/0/2/1"), "turn_key"),
            (resumed(asker, [first], resumed=[other]), "resumed[0].author"),
            (resumed(asker, [first], resumed=[large]), "resumed[0].token_ids"),
        ]
        for request, field in wrong:
            error = await refusal(stand.completions.Complete(request))
            assert (error.code, error.fields[0].field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_with_messages_the_rest_is_generated_after_the_same_prompt() -> None:
    renderings = iter([PROMPT, RESULT])  # a template with the time in it
    model = Scripted(part(WORDS[:3], 1), part([*WORDS[3:], END], 2, "stop"))
    async with standing(model, Limits(render=lambda messages, tools: next(renderings))) as stand:
        asker = stand.asker()
        first = await stand.completions.Complete(asker.request(PROMPT, new_tokens=None))
        last = await stand.completions.Complete(resumed(asker, [first], new_tokens=None))
        assert list(first.prompt_ids.values) == list(last.prompt_ids.values) == PROMPT
        assert [list(each.ids) for each in model.turns] == [PROMPT, [*PROMPT, *WORDS[:3]]]
        assert last.after.tokens == len(PROMPT) + len(WORDS) + 1
        assert json.loads(last.message.json)["content"] == decode(WORDS)


@pytest.mark.parametrize(
    "wrong", [Generated([]), Generated([], finish_reason="length"), Generated([1], [0.0, 0.0], "abort")]
)
async def test_only_an_aborted_completion_may_be_empty(wrong: Generated) -> None:
    async with standing(Scripted(wrong)) as stand:
        error = await refusal(stand.completions.Complete(stand.asker().request(PROMPT)))
        assert error.reason == "GENERATE_FAILED"
