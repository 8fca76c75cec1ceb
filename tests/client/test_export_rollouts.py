"""Samples of real rollouts, compared with a strict trainer's count; and docs/samples.md, run as written."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollout_client import AsyncClient, TrainingSample, samples
from rollout_client.export import read_jsonl, to_trl, to_verl, write_jsonl
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings
from rollout_server.testing.script import Fault, Script, ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.client.conftest import ServerAndTrainer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "samples.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
ADD = (tool_call("c1", "add", '{"a": 5, "b": 3}'),)


async def played(world: ServerAndTrainer, client: AsyncClient, *lines: ScriptedReply | Fault) -> list[TrainingSample]:
    """Run the rollout "r/1" with a script and return its samples."""
    if lines:
        await world.trainer.put_script("r/1", Script(lines))
    started = await client.start(**world.asked(rollout_id="r/1", group_id="g"))
    return samples(await client.wait(started.uid, timeout=60, view="full"))


async def test_every_shape_holds_what_the_trainer_counted(
    world: ServerAndTrainer, client: AsyncClient, tmp_path: Path
) -> None:
    (sample,) = await played(world, client)
    verdict = world.trainer.verdict("r/1")
    assert verdict is not None
    assert verdict.accepted
    theirs = verdict.sample
    expected = [
        list(theirs.prompt_ids),
        list(theirs.response_ids),
        list(theirs.response_mask),
        list(theirs.logprobs or ()),
    ]
    verl, trl = to_verl(sample), to_trl([sample])
    assert [verl["prompt_ids"], verl["response_ids"], verl["response_mask"], verl["response_logprobs"]] == expected
    assert trl["logprobs"] is not None
    assert [trl["prompt_ids"][0], trl["completion_ids"][0], trl["env_mask"][0], trl["logprobs"][0]] == expected
    write_jsonl([sample], tmp_path / "s")
    assert list(read_jsonl(tmp_path / "s")) == [sample]
    assert verl["num_turns"] == 2 * len(verdict.turns)
    assert (sample.rollout_id, sample.group_id, sample.end, sample.kind) == ("r/1", "g", "stop", "main")


async def test_a_sampled_end_token_trains_and_one_that_closes_a_cut_turn_does_not(
    world: ServerAndTrainer, client: AsyncClient
) -> None:
    """The first completion is truncated and closed, the second ends with its stop token, the last is truncated and not closed."""
    (sample,) = await played(
        world,
        client,
        ScriptedReply(content="Adding.", tool_calls=ADD, cut=True),
        ScriptedReply(content="Again.", tool_calls=ADD),
        ScriptedReply(content="Eig", cut=True),
    )
    assert sample.spans is not None
    ids = sample.prompt_ids + sample.response_ids
    mask = [0] * len(sample.prompt_ids) + sample.response_mask
    answers = [span for span in sample.spans if span.author == "model"]
    (closing,) = [span for span in sample.spans if span.reason == "closing"]
    end = ids[closing.start]
    assert (mask[closing.start], closing.stop - closing.start, closing.turn) == (0, 1, 2)
    assert [ids[span.stop - 1] == end for span in answers] == [False, True, False]
    assert all(mask[span.stop - 1] == 1 for span in answers)
    assert mask[-1] == 1
    assert sample.truncated


async def test_a_failure_leaves_the_samples_up_to_there(world: ServerAndTrainer, client: AsyncClient) -> None:
    (sample,) = await played(
        world, client, ScriptedReply(content="Adding.", tool_calls=ADD), Fault.error(500, "engine died")
    )
    assert (sample.end, sample.reason, sample.truncated) == ("failure", "trainer_server", False)
    assert set(sample.response_mask) == {1}


async def test_drift_makes_two_samples_and_unknown_tokens_none(world: ServerAndTrainer, client: AsyncClient) -> None:
    before, after = await played(
        world, client, ScriptedReply(content="Adding.", tool_calls=ADD, surplus=(5, 6, 7)), ScriptedReply(content="8")
    )
    assert (before.kind, after.kind, after.parent_id) == ("main", "drift", before.segment_id)
    whole = before.prompt_ids + before.response_ids
    assert after.prompt_ids[: after.parent_tokens] == whole[: after.parent_tokens]
    assert after.uid == before.uid
    with pytest.raises(ValueError, match="2 samples"):
        to_trl([before, after])


async def test_one_answer_without_logprobs_leaves_none_to_the_sample(
    world: ServerAndTrainer, client: AsyncClient
) -> None:
    (sample,) = await played(
        world,
        client,
        ScriptedReply(content="Adding.", tool_calls=ADD, omit=frozenset({"logprobs"})),
        ScriptedReply(content="8"),
    )
    assert sample.logprobs is None
    assert to_verl(sample)["response_logprobs"] is None


SAID = (
    r"\d+ prompt \d+ of \d+ train\n1 other prompt 0 \d+ \n1 model None \d+ \d+ \n2 other environment(?:.*\n)*",
    r"\['extra_fields', 'metrics', .*\]\n\['completion_ids', 'env_mask', .*\]\n",
    r"1 written\nTrue True\n",
)


@pytest.fixture
async def addresses() -> AsyncIterator[dict[str, str]]:
    """The page's addresses, mapped to a server and a trainer that run here."""
    settings = Settings(
        _env_file=None, host="127.0.0.1", http_port=0, grpc_port=0, tokenizers={"Qwen/Qwen3-8B": TOY_TOKENIZER}
    )
    async with (
        Server([Calculator()], settings) as server,
        StrictTrainer(tools_from=f"http://127.0.0.1:{server.http_port}") as trainer,
    ):
        yield {"http://localhost:9001": trainer.url, "localhost:50051": f"127.0.0.1:{server.grpc_port}"}


@pytest.mark.parametrize("number", range(len(SAID)))
async def test_a_snippet(number: int, addresses: dict[str, str], tmp_path: Path) -> None:
    code = BLOCKS[number]
    for written, real in addresses.items():
        code = code.replace(written, real)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert re.fullmatch(SAID[number], output.decode()), output.decode()


def test_every_snippet_is_run_and_every_field_told() -> None:
    assert len(BLOCKS) == len(SAID)
    assert {name for name in TrainingSample.__slots__ if f"`{name}`" not in PAGE} == set()
