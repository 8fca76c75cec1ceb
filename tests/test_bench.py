"""The benchmarks run and their trainers judge. Only ratios to a floor in the same run are asserted, and no times."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from aiohttp.test_utils import TestClient, TestServer
from rollout_server.testing.checks.renderer import PlainRenderer
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from bench.judge import ratios, report
from bench.judge.result import Result, Round, Row, summary
from bench.judge.workload import ON_DISK, QUICK, WARM_UP, Api, Target
from bench.programs.conversation import Conversation, prepare
from bench.programs.machine import machine
from bench.programs.tally import Counts, Traffic
from bench.programs.trainer import Trainer

ROOT = Path(__file__).parents[1]
JUDGED = "/judged/3x400/v1/chat/completions"
SHORT = "1x500/32"
UNJUDGED = "/unjudged/3x400/v1/chat/completions"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmark reads /proc")
def test_a_quick_run_ends_well_and_every_mask_is_accepted(tmp_path: Path) -> None:
    """`make check` compares the ratios of a quick run with the recorded ones, on a machine that does nothing else."""
    written = tmp_path / "bench.json"
    command = [sys.executable, "-m", "bench", "--quick", "--workload", SHORT, "--json", str(written)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(written.read_text())
    masks = found["counts"]
    assert (masks["masks_refused"], masks["histories_refused"], masks["faults"]) == (0, 0, [])
    (workload,) = (each for each in QUICK.workloads if each.name == SHORT)
    rollouts = min(workload.concurrency, WARM_UP) + workload.rollouts * workload.rounds
    assert masks["masks_accepted"] == rollouts * workload.turns * (len(workload.apis) - 1)  # init sends no masks
    assert len(found["rows"]) == len(workload.apis)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmark reads /proc")
def test_the_benchmark_of_the_journal_measures_each_workload_and_a_restart(tmp_path: Path) -> None:
    written = tmp_path / "journal.json"
    command = [sys.executable, "-m", "bench.journal", "--quick", "--directory", str(tmp_path), "--json", str(written)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(written.read_text())
    assert [len(each["sqlite"]["cpu_us"]) for each in found["cpu"]] == [1, 1]
    for each in found["latency"]:
        assert each["written"]["turns"] == len(each["sqlite"]) == len(each["memory"]) == 32
        assert each["written"]["commits"] >= 8
    assert done.stdout.count("\n| ") == 3
    assert (found["recovery"]["finished"], found["recovery"]["unfinished"]) == (20, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["journal.json"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmark reads /proc")
def test_a_small_crowd_and_a_long_rollout_end_as_scripted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- bench crowd -->\n<!-- end -->\n")
    command = [sys.executable, "-m", "bench.crowd", "--quick", "--markdown", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|")[1:-1] for line in page.read_text().splitlines() if line.startswith("|")]
    _, _, crowd, single = ([cell.strip() for cell in cells] for cells in lines)
    assert (crowd[2], crowd[-1], single[-1]) == ("0.8", "0", "0")


def test_a_result_is_read_back_and_fills_the_markers_of_a_page(tmp_path: Path) -> None:
    file, page, chart = tmp_path / "result.json", tmp_path / "page.md", tmp_path / "chart.svg"
    page.write_text("before\n<!-- bench summary -->\nold\n<!-- end -->\nafter\n")
    report.write(_result(ratio=3.0), file, [page], chart)
    assert report.read(file) == _result(ratio=3.0)
    begin, _, table = page.read_text().partition("<!-- bench summary -->\n")
    assert (begin, table.partition("<!-- end -->")[2]) == ("before\n", "\nafter\n")
    assert "| 1 turn, 500, 32 at once | 3.00 (3.0) |  |  |" in table
    assert "old" not in table
    assert ElementTree.parse(chart).getroot().tag.endswith("svg")


def test_a_ratio_that_has_more_than_doubled_is_off(tmp_path: Path) -> None:
    file = tmp_path / "ratios.json"
    ratios.record(_result(ratio=3.0), file)
    assert not [*ratios.off(_result(ratio=5.9), file)]
    ((row, text),) = ratios.off(_result(ratio=6.1), file)
    assert (row.ratio, text) == (
        6.1,
        f"1 turn, 500, 32 at once, POST /rollout: 6.1 times the floor, recorded are 3.0 ({file})",
    )


def _result(ratio: float) -> Result:
    traffic = Traffic(requests=10, sent=100, gap_p50=1.0, gap_p99=2.0)
    server, floor = (summary([Round(10, cpu, 0.1, 0.0, 1.0, traffic)], 1, None, None) for cpu in (0.01 * ratio, 0.01))
    title = "1 turn, 500, 32 at once"
    row = Row("1x500/32", title, 1, Api.SYNC, ON_DISK, [500], server, floor, Target(2.0, "x"))
    return Result(machine(), "toy", True, [], 0, [row], Counts())


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    return prepare(PlainRenderer.load(TOY_TOKENIZER), [], turns=3, context=400)


@pytest.fixture
async def trainer(conversation: Conversation) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(Trainer({"3x400": conversation}).app())) as client:
        yield client


async def test_prompts_have_the_context_asked_for_and_extend_each_other(conversation: Conversation) -> None:
    lengths = conversation.facts.prompt_tokens
    assert abs(sum(lengths) / 3 - 400) < 40
    answers = [json.loads(turn.body) for turn in conversation.turns.values()]
    for before, after in pairwise(answers):
        seen = before["prompt_token_ids"] + before["token_ids"]
        assert after["prompt_token_ids"][: len(seen)] == seen
    for answer in answers:
        assert len(answer["logprobs"]) == len(answer["token_ids"])


async def test_a_conversation_is_answered_to_its_end(trainer: TestClient[Any, Any], conversation: Conversation) -> None:
    history: list[Any] = []
    for turn in conversation.turns.values():
        history += turn.tail
        mask = [0] * turn.new_tokens or None
        reply = await trainer.post(JUDGED, json={"messages": history, "response_mask": mask})
        assert reply.status == 200
    answer = await reply.json()
    assert answer["choices"][0]["message"]["content"] == conversation.facts.closing
    assert (await _counts(trainer))["masks_accepted"] == 3


@pytest.mark.parametrize("wrong", ["short", "long", "ones", "none"])
async def test_a_wrong_mask_is_refused_and_counted(
    trainer: TestClient[Any, Any], conversation: Conversation, wrong: str
) -> None:
    first, second, _ = conversation.turns.values()
    right = [0] * second.new_tokens
    mask = {"short": right[1:], "long": [*right, 0], "ones": [1, *right[1:]], "none": None}[wrong]
    body = {"messages": [*first.tail, *second.tail], "response_mask": mask}
    assert (await trainer.post(JUDGED, json=body)).status == 422
    assert (await trainer.post(UNJUDGED, json=body)).status == 200
    counts = await _counts(trainer)
    assert (counts["masks_refused"], counts["masks_accepted"], len(counts["faults"])) == (1, 0, 1)


async def test_a_wrong_tool_result_is_refused_and_counted(
    trainer: TestClient[Any, Any], conversation: Conversation
) -> None:
    first, second, _ = conversation.turns.values()
    answer, result = second.tail
    body = {"messages": [*first.tail, answer, {**result, "content": "0"}], "response_mask": [0] * second.new_tokens}
    for path in (JUDGED, UNJUDGED):
        assert (await trainer.post(path, json=body)).status == 422
    assert (await _counts(trainer))["histories_refused"] == 2


async def _counts(trainer: TestClient[Any, Any]) -> dict[str, Any]:
    async with trainer.get("/counts") as reply:
        counts: dict[str, Any] = await reply.json()
        return counts


@pytest.mark.timeout(400)  # it starts six servers
def test_two_workers_are_compared_with_one_process() -> None:
    command = [sys.executable, "-m", "bench.workers", "--rounds", "1"]
    table = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = [line.split()[-5:] for line in table.splitlines() if line.startswith((" POST", " gRPC"))]
    assert [row[0] for row in rows] == ["1", "1", "2", "2"]
