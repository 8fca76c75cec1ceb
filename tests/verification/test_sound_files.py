"""Files without faults: of the project's own exporters, in each format, of random ledgers and of real rollouts."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import TrainingSample, samples
from rollout_client.export import to_trl, to_verl, write_jsonl, write_parquet
from rollout_server.calculator import Calculator
from rollout_server.local_stack import LocalStack, LoopThread, ScriptedModel
from rollout_server.testing.script import ScriptedReply
from rollout_server.verification.findings import Severity
from rollout_server.verification.shapes import SampleShape
from rollout_server.verification.token_rules import TokenRules
from rollout_server.verification.verify import SampleVerifier

from tests.client.test_export_files import needs_arrow
from tests.support.random_rollouts import rollouts
from tests.verification.rows import FORMATS, codes, rows, trace, verified


@pytest.mark.parametrize("shape", FORMATS)
@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_sound_rows_have_no_finding(rules: TokenRules, shape: SampleShape, seed: int) -> None:
    made = rows(Random(seed))
    with tempfile.TemporaryDirectory() as folder:
        report = verified(Path(folder) / "samples", FORMATS[shape](made), rules=rules)
    assert codes(report) == {}
    assert report.ok
    assert report.rows == {shape: len(made)}
    assert report.trained_tokens == sum(sum(each.mask) for each in made)
    assert report.completions == sum(len(each.spans()) for each in made)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([None, 2]))
def test_sound_traces_have_no_finding(rules: TokenRules, seed: int, indent: int | None) -> None:
    (made, *_) = rows(Random(seed))
    with tempfile.TemporaryDirectory() as folder:
        report = verified(Path(folder) / "trace.json", json.dumps(trace(made), indent=indent), rules=rules)
    assert codes(report) == {}
    assert report.rows == {SampleShape.OPENENV: len(made.spans())}
    assert report.trained_tokens == sum(made.mask)


@settings(max_examples=60)
@given(st.lists(rollouts(split=True), min_size=1, max_size=3))
def test_what_random_ledgers_give_is_never_fatal(found: list[pb.Rollout]) -> None:
    """Random tokens may look odd, but not wrong. Every rollout has an id of its own, as from a server."""
    made: list[TrainingSample] = []
    for number, rollout in enumerate(found):
        rollout.uid = f"u{number}"
        made += samples(rollout)
    allowed = {"nothing_trains", "row_without_training", "zero_logprobs", "group_sizes", "constant_reward", "all_ones"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        write_jsonl(made, path)
        report = SampleVerifier(100).verify([path])
        assert codes(report).keys() <= allowed, report.log.first()
        path.write_text("".join(json.dumps(to_verl(sample)) + "\n" for sample in made))
        report = SampleVerifier(100).verify([path])
        assert codes(report).keys() <= allowed, report.log.first()


@pytest.fixture(scope="module")
def played() -> list[TrainingSample]:
    """The samples of four real rollouts: of several turns, with parallel calls, cut by length, and failed."""
    several = ScriptedModel().calls("add", a=5, b=3).calls("multiply", a=8, b=2).says("It is 16.")
    together = ScriptedModel().calls_together(("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})).says("3 and 7.")
    cut = (
        ScriptedModel()
        .calls("add", a=5, b=3)
        .answers(ScriptedReply(content="It is of course", cut=True, finish_reason="length"))
    )
    failed = ScriptedModel().calls("add", a=5, b=3)
    with LoopThread() as loop, LocalStack(loop, Calculator(), http=False) as stack:
        finished = [stack.play("5 + 3, times 2?", model, group_id="g") for model in (several, together, cut, failed)]
    assert finished[-1].failure is not None
    return [replace(sample, uid=each.uid) for each in finished for sample in each.samples]


@pytest.mark.parametrize("form", ["jsonl", "trl", "verl", pytest.param("parquet", marks=needs_arrow)])
def test_real_rollouts_have_no_finding(
    played: list[TrainingSample], rules: TokenRules, tmp_path: Path, form: str
) -> None:
    path = tmp_path / "samples"
    if form == "jsonl":
        write_jsonl(played, path)
    elif form == "parquet":
        write_parquet(played, path)
    elif form == "trl":
        path.write_text(json.dumps(to_trl(played)))
    else:
        path.write_text("".join(json.dumps(to_verl(sample)) + "\n" for sample in played))
    report = SampleVerifier(100, rules=rules).verify([path])
    assert codes(report) == {}, report.log.first()
    assert report.rows.total() == len(played)
    assert report.trained_tokens == sum(sum(sample.response_mask) for sample in played if sample.trainable) > 0


def test_severities_are_those_of_the_exit_code(tmp_path: Path) -> None:
    made = rows(Random(1))
    made[0].mask, made[0].logprobs = [0] * len(made[0].mask), None
    report = verified(tmp_path / "s", FORMATS[SampleShape.TRL](made))
    assert (report.log.number(Severity.WARN), report.ok) == (1, True)
