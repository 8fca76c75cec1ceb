"""Completions that are aborted and resumed: requested as a rollout server does, and by a real server."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import spec_pb2, token_pb2
from rollout_client.samples import SampleSpan, TrainingSample
from rollout_client.trainer import Finished, Generated, Serving, Trainer, Turn
from rollout_client.trainer.ledger import LedgerRun, SegmentLedger
from rollout_client.trainer.rollout_records import Record
from rollout_client.trainer.verify import find_mismatch
from rollout_server.app import Server
from rollout_server.calculator import Calculator

from tests.client.trainer.asker import MODEL, Asker, Limits, held_after, refusal, standing
from tests.support.start_requests import settings
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


class Parted:
    """Generate "It is eight, I am sure." in parts, which end after these numbers of tokens. The step of a part is its number."""

    def __init__(self, *cuts: int) -> None:
        self.cuts = cuts
        self.turns: list[Turn] = []
        self.trainer: Trainer | None = None

    async def __call__(self, turn: Turn) -> Generated:
        self.turns.append(turn)
        number = sum(each.uid == turn.uid and each.turn == turn.turn for each in self.turns)
        whole = [*WORDS, END]
        stop, reason = (self.cuts[number - 1], "abort") if number <= len(self.cuts) else (len(whole), "stop")
        if self.trainer is not None:
            self.trainer._records.forget(turn.uid)  # what a restart of the trainer would do
        return part(whole[turn.resumed : stop], number, reason)


def one_turn(messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
    return PROMPT


async def finished_one(server: Any, model: Any, **fields: Any) -> Finished:
    given = {"generate": model, "decode": decode, "end_ids": {END}, **fields}
    async with Trainer(server, **given) as trainer:
        if isinstance(model, Parted) and model.trainer is not None:
            model.trainer = trainer
        tokenizer = None if "render" in fields else "toy"
        (group,) = [each async for each in trainer.rollouts(["Is it eight?"], n=1, tokenizer=tokenizer)]
    return group.rollouts[0]


def parts_of(finished: Finished) -> list[tuple[list[int], int | None, str, set[float]]]:
    """The sampled tokens of each span, with step, version and logprobs."""
    (sample,) = finished.samples
    assert sample.logprobs is not None
    opening = len(sample.prompt_ids)
    return [
        (
            sample.response_ids[span.start - opening : span.stop - opening],
            span.policy_step,
            span.policy_version,
            set(sample.logprobs[span.start - opening : span.stop - opening]),
        )
        for span in sample.spans or ()
        if span.trains
    ]


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with Server([Calculator()], settings()) as server:
        yield f"127.0.0.1:{server.grpc_port}"


@pytest.mark.parametrize(
    "fields", [{}, {"serving": Serving()}, {"render": one_turn}, {"render": one_turn, "serving": Serving()}]
)
@pytest.mark.parametrize("cuts", [(3,), (0,), (3, 3, 5), (0, 0, 1), (len(WORDS),)])
async def test_a_sample_has_a_span_for_each_part(address: str, cuts: Sequence[int], fields: dict[str, Any]) -> None:
    model, whole = Parted(*cuts), [*WORDS, END]
    finished = await finished_one(address, model, **fields)
    assert (finished.mismatch, finished.checked, finished.error) == (None, True, "")
    edges = [0, *cuts, len(whole)]
    assert parts_of(finished) == [
        (whole[start:stop], number, f"v{number}", {-number - 0.5})
        for number, (start, stop) in enumerate(pairwise(edges), start=1)
        if start < stop
    ]
    assert finished.messages[-1]["content"] == decode(WORDS)
    assert [turn.resumed for turn in model.turns] == edges[:-1]
    assert finished.rollout.outcome.metrics.turns == 1


async def test_the_limit_of_tokens_holds_for_all_parts(address: str) -> None:
    model = Parted(3, 5)
    async with Trainer(address, generate=model, decode=decode, end_ids={END}) as trainer:
        fields: dict[str, Any] = {"tokenizer": "toy", "sampling": {"max_tokens": 5}}
        (group,) = [each async for each in trainer.rollouts(["Is it eight?"], n=1, **fields)]
    (finished,) = group.rollouts
    assert [turn.sampling.max_tokens for turn in model.turns] == [5, 2]
    assert [len(ids) for ids, *_ in parts_of(finished)] == [3, 2]
    assert (finished.checked, finished.samples[0].truncated) == (True, True)


@pytest.mark.parametrize("serving", [None, Serving()])
async def test_a_trainer_that_lost_its_record_resumes_from_the_servers(address: str, serving: Serving | None) -> None:
    model = Parted(3, 5)
    model.trainer = Trainer(address, generate=model, decode=decode)  # replaced by the one that runs
    finished = await finished_one(address, model, serving=serving)
    assert (finished.mismatch, finished.checked, finished.error) == (None, False, "")
    assert [(step, version) for _, step, version, _ in parts_of(finished)] == [(1, "v1"), (2, "v2"), (3, "v3")]
    assert finished.messages[-1]["content"] == decode(WORDS)


async def test_logprobs_that_a_part_lacks_are_unknown_for_all(address: str) -> None:
    parts = iter([part(WORDS[:3], 1), replace(part([*WORDS[3:], END], 2, "stop"), logprobs=None)])

    async def generate(turn: Turn) -> Generated:
        return next(parts)

    finished = await finished_one(address, generate)
    assert (finished.mismatch, finished.checked, finished.error) == (None, True, "")
    assert finished.samples[0].logprobs is None


def split_segment() -> tuple[Record, list[TrainingSample]]:
    """A turn of three parts, the first of which is stale, and its two samples."""
    record = Record()
    runs = [
        LedgerRun(1, True, array("I", [number] * 2), array("f", [-number] * 2), f"v{number}", True, number)
        for number in (1, 2, 3)
    ]
    ledger = record.segments["0"] = SegmentLedger()
    ledger.append((LedgerRun(1, False, array("I", [9])), *runs))
    ledger.checkpoints.append(ledger.checkpoint(2))
    spans = [SampleSpan("model", None, 1, 2 * n - 1, 2 * n + 1, f"v{n}", n) for n in (1, 2, 3)]
    first = TrainingSample(
        "0", [9], [1, 1], [1, 1], [-1.0, -1.0], (SampleSpan("other", "prompt", 1, 0, 1), spans[0]), trainable=False
    )
    prompt = SampleSpan("other", "prompt", 1, 0, 3)
    values = [-2.0, -2.0, -3.0, -3.0]
    return record, [first, TrainingSample("0", [9, 1, 1], [2, 2, 3, 3], [1] * 4, values, (prompt, *spans[1:]), part=1)]


def test_the_samples_of_a_split_segment_equal_the_ledger() -> None:
    record, parts = split_segment()
    assert find_mismatch(record, parts, turns=1) is None
    assert parts[1].policy_steps == (2, 3)


def test_a_token_of_a_split_segment_in_no_sample_or_in_two_is_found() -> None:
    record, (first, second) = split_segment()
    wrong = find_mismatch(record, [second], turns=1)
    assert (wrong and (wrong.field, wrong.index)) == ("part", 1)
    spans = (*(first.spans or ()), *(second.spans or ())[1:])
    longer = replace(first, response_ids=[1, 1, 2, 2, 3, 3], response_mask=[1] * 6, logprobs=None, spans=spans)
    wrong = find_mismatch(record, [replace(longer, logprobs=[-1.0, -1.0, -2.0, -2.0, -3.0, -3.0]), second], turns=1)
    assert (wrong and (wrong.field, wrong.index)) == ("part", 3)


@pytest.mark.parametrize(
    ("change", "field", "index"),
    [
        ({"response_ids": [2, 2, 3, 4]}, "ids", 6),
        ({"logprobs": [-2.0, -2.0, -3.0, -4.0]}, "logprobs", 6),
        ({"logprobs": None}, "logprobs", None),
    ],
)
def test_a_wrong_part_is_found(change: dict[str, Any], field: str, index: int | None) -> None:
    record, (first, second) = split_segment()
    wrong = find_mismatch(record, [first, replace(second, **change)], turns=1)
    assert (wrong and (wrong.field, wrong.index)) == (field, index)


@pytest.mark.parametrize(
    ("change", "field"), [({"policy_step": 7}, "policy_step"), ({"policy_version": "x"}, "policy_version")]
)
def test_a_wrong_policy_of_a_part_is_found(change: dict[str, Any], field: str) -> None:
    record, (first, second) = split_segment()
    *spans, last = second.spans or ()
    wrong = find_mismatch(record, [first, replace(second, spans=(*spans, replace(last, **change)))], turns=1)
    assert (wrong and (wrong.field, wrong.index)) == (field, 5)
