"""One planted fault of each kind in random rows: found in its row, at its index, and nothing else fatal."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server.edge.tokens.loader import TokenizerFiles
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.verification.findings import FindingKind, SampleFinding
from rollout_server.verification.shapes import SampleShape
from rollout_server.verification.token_rules import TokenRules, token_rules
from rollout_server.verification.verify import VerifiedFiles

from tests.support.tokenizers import directory, needs_real, tokenizer_of
from tests.tokencheck.conftest import spoilt
from tests.verification.rows import (
    FORMATS,
    STOP,
    Row,
    add,
    codes,
    encode,
    field_path,
    lines,
    row,
    rows,
    trace,
    verified,
)

SEEDS = st.integers(0, 2**32)


@dataclass(frozen=True)
class Planted:
    """Where a finding is expected: the row from 0, its list, and the index there (None: the whole list)."""

    kind: FindingKind
    number: int
    part: str
    index: int | None = None


Planter = Callable[[list[Row], Random], Planted]


def any_row(made: list[Row], random: Random) -> tuple[int, Row]:
    number = random.randrange(len(made))
    return number, made[number]


def value_at(part: str, kind: FindingKind, *values: Any, trained: bool = False) -> Planter:
    """Replace one value of a list, of a trained token if that matters."""

    def plant(made: list[Row], random: Random) -> Planted:
        number, found = any_row(made, random)
        values_of = getattr(found, part)
        at = [i for i, trains in enumerate(found.mask) if trains] if trained else range(len(values_of))
        index = random.choice(at)
        values_of[index] = random.choice(values)
        return Planted(kind, number, part, index)

    return plant


def length(part: str, change: int) -> Planter:
    def plant(made: list[Row], random: Random) -> Planted:
        number, found = any_row(made, random)
        values = getattr(found, part)
        setattr(found, part, [*values, values[-1]] if change > 0 else values[:-1])
        return Planted(FindingKind.LENGTHS, number, part)

    return plant


def late(made: list[Row], random: Random) -> Planted:
    number, found = any_row(made, random)
    (_, _), (start, _), *_ = found.spans()
    found.mask = [0, *found.mask[:-1]]
    found.logprobs = None
    return Planted(FindingKind.MASK_SHIFTED, number, "mask", start)


def early(made: list[Row], random: Random) -> Planted:
    number, found = any_row(made, random)
    (_, _), (start, _), *_ = found.spans()
    found.mask = [*found.mask[1:], 0]
    found.logprobs = None
    return Planted(FindingKind.MASK_SHIFTED, number, "mask", start - 1)


def shifted_logprobs(made: list[Row], random: Random) -> Planted:
    """The prompt is cut, so that only the logprobs show the shift."""
    number, found = any_row(made, random)
    found.prompt = found.prompt[:2]
    if random.random() < 0.5:
        found.mask = [0, *found.mask[:-1]]
        return Planted(FindingKind.MASK_SHIFTED, number, "mask", 0)
    (_, stop), *_ = found.spans()
    found.mask = [*found.mask[1:], 0]
    return Planted(FindingKind.MASK_SHIFTED, number, "mask", stop - 1)


def all_ones(made: list[Row], random: Random) -> Planted:
    number, found = any_row(made, random)
    start = found.spans()[1][0] - 4  # the generation prompt, whose last four tokens are compared
    found.mask = [1] * len(found.mask)
    return Planted(FindingKind.ALL_ONES, number, "mask", start)


def first_masked(made: list[Row], random: Random) -> Planted:
    number, found = any_row(made, random)
    found.mask[0], found.logprobs = 0, None
    return Planted(FindingKind.MASK_EDGE, number, "mask", 0)


def none_trains(made: list[Row], random: Random) -> Planted:
    number, found = any_row(made, random)
    found.mask, found.logprobs = [0] * len(found.mask), None
    return Planted(FindingKind.ROW_WITHOUT_TRAINING, number, "mask")


def no_logprobs(made: list[Row], random: Random) -> Planted:
    number, found = any_row(made, random)
    found.logprobs = [0.0] * len(found.mask)
    return Planted(FindingKind.ZERO_LOGPROBS, number, "logprobs", 0)


def twice(made: list[Row], random: Random) -> Planted:
    """A second row of a rollout that trains its first completion again, and then its own."""
    _, found = any_row(made, random)
    stop = found.spans()[0][1]
    again = Row(
        found.prompt, found.response[:stop], found.mask[:stop], found.logprobs[:stop], found.uid, found.group, 0.5
    )
    add(again, encode("\n<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"), random, trains=False)
    add(again, encode(f"It is {random.random()}{STOP}"), random, trains=True)
    made.append(again)
    return Planted(FindingKind.TRAINS_TWICE, len(made) - 1, "mask", 0)


def equal(made: list[Row], random: Random) -> Planted:
    _, found = any_row(made, random)
    found.uid = ""
    made.append(Row(found.prompt, found.response, found.mask, found.logprobs, "", "", None))
    return Planted(FindingKind.DUPLICATE_ROW, len(made) - 1, "response")


def reward(made: list[Row], random: Random) -> Planted:
    number, found = any_row(made, random)
    found.reward = random.choice([float("nan"), float("inf"), "1.0", True])
    return Planted(FindingKind.REWARD, number, "reward")


FAULTS: Final[dict[str, Planter]] = {
    "long_mask": length("mask", 1),
    "short_mask": length("mask", -1),
    "long_logprobs": length("logprobs", 1),
    "short_logprobs": length("logprobs", -1),
    "prompt_id": value_at("prompt", FindingKind.TOKEN_IDS, -1, 2**31, 1.0, "7", True, None),
    "response_id": value_at("response", FindingKind.TOKEN_IDS, -1, 2**31, 10**50, 1.5, "7", False, None, [], {}),
    "mask_value": value_at("mask", FindingKind.MASK_VALUES, 2, -1, 0.5, "1", None, float("nan"), []),
    "logprob": value_at(
        "logprobs", FindingKind.LOGPROBS, 0.5, 1e-9, float("nan"), float("inf"), -float("inf"), "-1", []
    ),
    "missing_logprob": value_at("logprobs", FindingKind.MISSING_LOGPROBS, None, trained=True),
    "late": late,
    "early": early,
    "shifted_logprobs": shifted_logprobs,
    "all_ones": all_ones,
    "first_masked": first_masked,
    "none_trains": none_trains,
    "no_logprobs": no_logprobs,
    "twice": twice,
    "equal": equal,
    "reward": reward,
}


def only_finding(report: VerifiedFiles, kind: FindingKind) -> SampleFinding:
    """The finding of a kind. Other kinds of findings may follow from the fault, but none that is fatal."""
    (found,) = [each for each in report.log.first() if each.kind is kind]
    others = {each.kind.code for each in report.log.first() if each.kind.severity.value == "FATAL"} - {kind.code}
    assert others == set()
    return found


@pytest.mark.parametrize("shape", FORMATS)
@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=8)
@given(SEEDS)
def test_a_fault_is_found_where_it_is(shape: SampleShape, fault: str, seed: int) -> None:
    random = Random(seed)
    made = rows(random)
    planted = FAULTS[fault](made, random)
    with tempfile.TemporaryDirectory() as folder:
        report = verified(Path(folder) / "samples", FORMATS[shape](made))
    found = only_finding(report, planted.kind)
    assert found.location is not None
    place = field_path(shape, planted.number, planted.part)
    assert ((found.location.number, found.field_path), found.index) == (place, planted.index), found
    assert report.ok == (planted.kind.severity.value == "WARN")


@settings(max_examples=20)
@given(SEEDS, st.sampled_from([-1, 1]))
def test_with_a_tokenizer_a_shift_needs_no_prompt(rules: TokenRules, seed: int, shift: int) -> None:
    random = Random(seed)
    made = row(random, random.randint(2, 5))
    made.prompt = [1, 2]
    (_, _), (start, _), *_ = made.spans()
    made.mask = [0, *made.mask[:-1]] if shift > 0 else [*made.mask[1:], 0]
    made.logprobs = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples"
        report = verified(path, FORMATS[SampleShape.GENERIC]([made]), rules=rules)
    found = only_finding(report, FindingKind.MASK_SHIFTED)
    assert (found.index, "late" in found.text) == (start if shift > 0 else start - 1, shift > 0)


def test_a_completion_that_was_cut_is_no_shift(rules: TokenRules, tmp_path: Path) -> None:
    """Its stop token was added with mask 0, as in an early mask, but the next completion begins where it should."""
    random = Random(5)
    made = row(random, 3)
    for _, stop in made.spans()[:-1]:
        made.mask[stop - 1], made.logprobs[stop - 1] = 0, 0.0
    assert codes(verified(tmp_path / "s", FORMATS[SampleShape.GENERIC]([made]), rules=rules)) == {}


def test_a_mask_without_the_final_stop_token(rules: TokenRules, tmp_path: Path) -> None:
    made = row(Random(5), 1)
    made.mask[-1], made.logprobs[-1] = 0, 0.0
    report = verified(tmp_path / "s", FORMATS[SampleShape.GENERIC]([made]), rules=rules)
    assert only_finding(report, FindingKind.MASK_EDGE).index == len(made.mask) - 1


def test_ids_beyond_the_vocabulary(rules: TokenRules, tmp_path: Path) -> None:
    made = row(Random(5), 2)
    made.response[3] = rules.loaded.vocabulary
    report = verified(tmp_path / "s", FORMATS[SampleShape.GENERIC]([made]), rules=rules)
    assert only_finding(report, FindingKind.TOKEN_IDS).index == 3
    assert codes(verified(tmp_path / "s", FORMATS[SampleShape.GENERIC]([made]))) == {}


def test_markers_of_tool_results_that_train(rules: TokenRules, tmp_path: Path) -> None:
    made = row(Random(5), 3)
    (first,) = encode("<tool_response>")
    index = made.response.index(first)
    for at in range(index, index + 4):
        made.mask[at], made.logprobs[at] = 1, -1.0
    found = only_finding(
        verified(tmp_path / "s", FORMATS[SampleShape.GENERIC]([made]), rules=rules), FindingKind.TRAINED_MARKERS
    )
    assert found.index == index
    assert "'<tool_response>'" in found.text


HEADER = "{{- '<|im_start|>assistant\\n' -}}\n        {%- if thought -%}"
THINKS = "{%- if loop.last -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"


@pytest.mark.parametrize("change", [("", ""), (HEADER, HEADER.replace("{%- if thought", THINKS + "{%- if thought"))])
def test_the_end_of_a_call_is_no_marker(change: tuple[str, str]) -> None:
    """Also if a template writes the last completion in another way than earlier ones."""
    tokenizer = tokenizer_of(TOY_TOKENIZER, spoilt(change))
    markers = token_rules("changed", TokenizerFiles(tokenizer)).markers
    assert {tokenizer.decode([index]) for index in markers} == {"<|im_start|>", "<tool_response>", "</tool_response>"}


@pytest.mark.parametrize("family", [pytest.param(each, marks=needs_real(each)) for each in ("qwen3", "deepseek-v3")])
def test_markers_of_released_models(family: str) -> None:
    tokenizer = tokenizer_of(directory(family))
    found = token_rules(family, TokenizerFiles(tokenizer))
    texts = {tokenizer.decode([index]) for index in found.markers}
    expected = {"qwen3": {"<|im_start|>", "<tool_response>"}, "deepseek-v3": {"<｜User｜>", "<｜tool▁output▁begin｜>"}}
    assert expected[family] <= texts
    assert not {"<tool_call>", "</tool_call>", "<｜tool▁calls▁end｜>", "<think>"} & texts


def test_completions_in_other_tokens_are_counted(rules: TokenRules, tmp_path: Path) -> None:
    made = row(Random(5), 1)
    split = [token for letter in "multiply" for token in encode(letter)]
    assert split != encode("multiply")
    made.response, made.mask = [*split, *encode(STOP)], [1] * (len(split) + 1)
    made.logprobs = [-1.0] * len(made.mask)
    report = verified(tmp_path / "s", FORMATS[SampleShape.GENERIC]([made]), rules=rules)
    assert (codes(report), report.completions, report.retokenized) == ({}, 1, 1)


def test_what_only_the_first_tokens_share_is_no_overlap(tmp_path: Path) -> None:
    """Two subagents of one rollout have one prompt, and their completions begin with the same tokens."""
    random = Random(5)
    one = row(random, 1, uid="u")
    other = Row(one.prompt, [], [], [], "u")
    add(other, [*one.response[:3], *encode(f" or not{STOP}")], random, trains=True)
    assert codes(verified(tmp_path / "s", FORMATS[SampleShape.GENERIC]([one, other]))) == {}


def spans_of(made: Row, turns: list[int]) -> list[dict[str, Any]]:
    """Spans as in a file of this project."""
    start = len(made.prompt)
    spans: list[dict[str, Any]] = [{"author": "other", "reason": "prompt", "turn": 1, "start": 0, "stop": start}]
    edges = [0, *(edge for span in made.spans() for edge in span if 0 < edge < len(made.mask)), len(made.mask)]
    for number, (a, b) in enumerate(pairwise(edges)):
        author = {"author": "model", "reason": None} if not number % 2 else {"author": "other", "reason": "environment"}
        spans.append({**author, "turn": turns[number // 2], "start": start + a, "stop": start + b})
    return spans


def test_equal_completions_of_different_turns_are_no_overlap(tmp_path: Path) -> None:
    random = Random(5)
    one = row(random, 2, uid="u")
    one.more = {"spans": spans_of(one, [1, 2])}
    other = Row(one.prompt, one.response, one.mask, one.logprobs, "u", more={"spans": spans_of(one, [3, 4])})
    content = FORMATS[SampleShape.ROLLOUT]
    assert codes(verified(tmp_path / "s", content([one, other]))) == {}
    other.more = {"spans": spans_of(one, [3, 2])}
    found = only_finding(verified(tmp_path / "s", content([one, other])), FindingKind.TRAINS_TWICE)
    assert found.index == one.spans()[1][0]


def test_parts_of_one_segment_are_no_overlap(tmp_path: Path) -> None:
    """Stale tokens split a segment, also within a completion: the later part has the completion so far in its prompt."""
    whole = row(Random(5), 2, uid="u")
    whole.more = {"spans": spans_of(whole, [1, 2])}
    (start, stop), cut = whole.spans()[1], len(whole.prompt) + whole.spans()[1][0] + 2

    def part(index: int, first: int, last: int) -> Row:
        """Tokens `first` to `last` as the response of a sample."""
        ids, before = [*whole.prompt, *whole.response][:last], first - len(whole.prompt)
        inside = slice(before, last - len(whole.prompt))
        spans = [
            {**span, "start": max(first, span["start"]), "stop": min(last, span["stop"])}
            for span in whole.more["spans"]
            if first < span["stop"] and span["start"] < last
        ]
        prompt = {"author": "other", "reason": "prompt", "turn": spans[0]["turn"], "start": 0, "stop": first}
        more = {"spans": [prompt, *spans], "part": index}
        return Row(ids[:first], ids[first:], whole.mask[inside], whole.logprobs[inside], "u", more=more)

    opening, end = len(whole.prompt), len(whole.prompt) + stop
    assert start < cut - opening < stop
    content = FORMATS[SampleShape.ROLLOUT]
    made = [part(0, opening, cut), part(1, cut, end)]
    assert codes(verified(tmp_path / "s", content(made))) == {}
    made = [part(0, opening, cut + 1), part(1, cut, end)]
    assert codes(verified(tmp_path / "s", content(made))) == {"trains_twice": 1}


@pytest.mark.parametrize("more", [{"part": 1}, {}])
def test_a_completion_that_is_partly_too_old_is_no_shift(tmp_path: Path, more: dict[str, Any]) -> None:
    """Its first token is stale. Without spans it looks as if the mask were one token late."""
    made = row(Random(5), 2, uid="u")
    spans = spans_of(made, [1, 2])
    start = made.spans()[1][0]
    made.mask[start], made.logprobs[start] = 0, 0.0
    first = {**spans[3], "stop": spans[3]["start"] + 1, "reason": "stale"}
    content = FORMATS[SampleShape.ROLLOUT]
    assert codes(verified(tmp_path / "s", content([made]))) == {"mask_shifted": 1}
    made.more = {"spans": [*spans[:3], first, {**spans[3], "start": first["stop"]}], **more}
    assert codes(verified(tmp_path / "s", content([made]))) == {}


def test_rows_of_a_group_in_verl_are_not_one_rollout(tmp_path: Path) -> None:
    """verl's own column "uid" names the group."""
    made = row(Random(5), 1)
    line = {"prompt_ids": made.prompt, "response_ids": made.response, "response_mask": made.mask, "uid": "prompt-1"}
    content = "".join(json.dumps({**line, "reward_score": reward}) + "\n" for reward in (0.0, 1.0))
    report = verified(tmp_path / "s", content)
    assert codes(report) == {"duplicate_row": 1}
    assert report.rows == {SampleShape.VERL: 2}


def test_groups(tmp_path: Path) -> None:
    random = Random(5)
    made = [row(random, 1, uid=f"{g}{n}", group=g, reward=n % 2) for g in "abc" for n in range(4)]
    small = [row(random, 1, uid=f"d{n}", group="d", reward=1.0) for n in range(2)]
    random.shuffle(made)
    report = verified(tmp_path / "s", FORMATS[SampleShape.GENERIC]([*made, *small]))
    assert codes(report) == {"group_sizes": 1, "constant_reward": 1}
    texts = {found.kind.code: (found.text, found.location and found.location.number) for found in report.log.first()}
    assert texts == {
        "group_sizes": ("group 'd' has 2 rollouts; most groups have 4", 13),
        "constant_reward": ("all 2 rollouts of group 'd' have reward 1, so their advantages are 0", 13),
    }


def test_rows_that_say_why_they_do_not_train_need_no_token(tmp_path: Path) -> None:
    made = rows(Random(5))
    made[1].mask, made[1].logprobs = [0] * len(made[1].mask), None
    made[1].more = {"trainable": False, "untrainable_reason": "failure_engine"}
    for shape in (SampleShape.ROLLOUT, SampleShape.GENERIC):
        assert codes(verified(tmp_path / "s", FORMATS[shape](made))) == {}


def test_files_in_which_nothing_trains(tmp_path: Path) -> None:
    made = rows(Random(5))
    for each in made:
        each.more = {"trainable": False}
    report = verified(tmp_path / "s", FORMATS[SampleShape.ROLLOUT](made))
    assert codes(report) == {"nothing_trains": 1}
    assert not report.ok


def test_a_sample_that_contradicts_its_spans(tmp_path: Path) -> None:
    made = row(Random(5), 2, uid="u")
    made.more = {"spans": spans_of(made, [1, 2])}
    made.mask[1], made.logprobs[1] = 0, 0.0
    report = verified(tmp_path / "s", FORMATS[SampleShape.ROLLOUT]([made]))
    found = only_finding(report, FindingKind.INCONSISTENT)
    assert (found.field_path, found.index) == ("response_mask", 1)
    made.more["spans"][1]["stop"] += 1  # spans that overlap, and imply the mask
    made.mask[1], made.logprobs[1] = 1, -1.0
    made.mask[made.spans()[0][1]] = 1
    report = verified(tmp_path / "s", FORMATS[SampleShape.ROLLOUT]([made]))
    assert "without gaps" in only_finding(report, FindingKind.INCONSISTENT).text


def test_columns_of_unequal_length(tmp_path: Path) -> None:
    columns = json.loads(FORMATS[SampleShape.TRL](rows(Random(5))))
    columns["env_mask"].pop()
    report = verified(tmp_path / "s", json.dumps(columns))
    found = [(each.kind, each.field_path) for each in report.log.first() if each.kind is FindingKind.LENGTHS]
    assert found == [(FindingKind.LENGTHS, "env_mask")]


def test_no_mask(tmp_path: Path) -> None:
    columns = json.loads(FORMATS[SampleShape.TRL](rows(Random(5))))
    del columns["env_mask"]
    report = verified(tmp_path / "s", json.dumps(columns))
    assert (codes(report)["no_mask"], codes(report)["all_ones"], report.ok) == (6, 6, True)


TRACES: Final[dict[str, tuple[Callable[[dict[str, Any]], None], tuple[FindingKind, str, int | None]]]] = {
    "mask_of_the_completion": (
        lambda turn: turn.update(loss_mask=[1] * len(turn["completion_token_ids"])),
        (FindingKind.LENGTHS, "turns[1].loss_mask", None),
    ),
    "trained_prompt": (
        lambda turn: turn["loss_mask"].__setitem__(2, 1),
        (FindingKind.PROMPT_TRAINS, "turns[1].loss_mask", 2),
    ),
    "other_prompt": (
        lambda turn: turn["prompt_token_ids"].__setitem__(5, 0),
        (FindingKind.PROMPT_DIVERGES, "turns[1].prompt_token_ids", 5),
    ),
    "no_number": (
        lambda turn: turn["per_token_logps"].__setitem__(1, float("nan")),
        (FindingKind.LOGPROBS, "turns[1].per_token_logps", 1),
    ),
    "same_node": (lambda turn: turn.update(node_id="n0"), (FindingKind.INCONSISTENT, "turns[1].node_id", None)),
    "no_ids": (
        lambda turn: turn.pop("completion_token_ids"),
        (FindingKind.MISSING_FIELD, "turns[1].completion_token_ids", None),
    ),
}


@pytest.mark.parametrize("fault", TRACES)
def test_a_fault_of_a_trace(tmp_path: Path, fault: str) -> None:
    made = [trace(row(Random(seed), 2)) for seed in range(3)]
    plant, expected = TRACES[fault]
    plant(made[1]["turns"][1])
    report = verified(tmp_path / "s", "".join(json.dumps(each) + "\n" for each in made))
    (found,) = report.log.first()
    assert found.location is not None
    assert (found.kind, found.field_path, found.index) == expected
    assert found.location.number == 2


def test_a_fork_of_a_trace_extends_an_earlier_turn(tmp_path: Path) -> None:
    made = trace(row(Random(1), 3))
    turns = made["turns"]
    turns.append({**turns[1], "node_id": "n9", "completion_token_ids": encode("Else"), "per_token_logps": [-1.0]})
    turns[-1]["per_token_logps"] = [-1.0] * len(turns[-1]["completion_token_ids"])
    turns[-1]["loss_mask"] = [0] * len(turns[1]["prompt_token_ids"]) + [1] * len(turns[-1]["completion_token_ids"])
    assert codes(verified(tmp_path / "s", json.dumps(made))) == {}


def test_another_version_of_a_trace(tmp_path: Path) -> None:
    made = {**trace(row(Random(1), 1)), "schema_version": 2}
    assert codes(verified(tmp_path / "s", json.dumps(made))) == {"unknown_shape": 1}


def test_a_forced_shape(tmp_path: Path) -> None:
    made = rows(Random(1))
    report = verified(
        tmp_path / "s", lines(lambda each: {"completion_ids": each.response})(made), shape=SampleShape.VERL
    )
    assert codes(report) == {"missing_field": 2 * len(made)}
