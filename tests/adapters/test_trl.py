"""The adapter for TRL against the real GRPOTrainer: rows, masks, logprobs, and what its loss gets."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from rollout_client import Client
from rollout_client.adapters.sampling import sample_batch
from rollout_client.adapters.trl import TrlRollouts, draw_key, tool_environment
from rollout_client.trainer import Generated, SamplingParams, Turn, TurnImage, parsers
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.adapters.scenarios import (
    END,
    ROOT,
    SCENARIOS,
    TOY,
    TRUNCATED_TOKENS,
    Script,
    encode,
    logprobs_of,
    messages,
    metadata,
)

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
torch.set_num_threads(1)
TOKENIZER = AutoTokenizer.from_pretrained(TOY)
Row = dict[str, Any]


def model(seed: int = 0) -> Qwen2ForCausalLM:
    """A tiny Qwen2 with random weights."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(TOKENIZER),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=TOKENIZER.pad_token_id,
            eos_token_id=END,
            bos_token_id=None,
            attention_dropout=0.5,
        )
    )


class Recorded(GRPOTrainer):
    """A GRPOTrainer that keeps what its rollout function returned and what its loss got."""

    def __init__(self, **options: Any) -> None:
        given = options["rollout_func"]

        def kept(prompts: Any, trainer: Any) -> Any:
            found = given(prompts, trainer)
            self.returned.append(found)
            return {name: list(value) for name, value in found.items()}

        self.returned: list[Row] = []
        self.losses: list[Row] = []
        super().__init__(**{**options, "rollout_func": kept})

    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        self.losses.append(dict(inputs))
        return super().compute_loss(model, inputs, **options)


def trainer_of(
    rollouts: Any, rows: Sequence[Row], directory: Path, kind: Callable[..., Any] = Recorded, **changes: Any
) -> Any:
    """A trainer of all rows in one step, in their order."""
    n = changes.pop("num_generations", 2)
    more = {name: changes.pop(name) for name in ("eval_dataset", "tools", "reward_funcs") if name in changes}
    options = {
        "output_dir": str(directory),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": len(rows) * n,
        "per_device_eval_batch_size": len(rows) * n,
        "num_generations": n,
        "max_completion_length": 64,
        "max_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "seed": 7,
        "logging_steps": 1000,
    }
    return kind(
        model=model(),
        processing_class=TOKENIZER,
        rollout_func=rollouts,
        args=GRPOConfig(**options | changes),
        train_dataset=Dataset.from_list(list(rows)),
        **{"reward_funcs": TrlRollouts.reward, **more},
    )


def row_of(name: str, seed: int = 0) -> Row:
    """A row of a dataset: the prompt, and the metadata as columns."""
    return {"prompt": messages(name, seed), **metadata(name, seed)}


def scripted(server: str, script: Script, agent: str = "scenarios", **options: Any) -> TrlRollouts:
    """The adapter with the script as the model."""

    def sample(turns: Sequence[Turn], trainer: GRPOTrainer) -> list[Generated | Exception]:
        return [script.generate(turn) for turn in turns]

    return TrlRollouts(
        server, agent=agent, tokenizer="toy", parse=parsers.hermes, sample=options.pop("sample", sample), **options
    )


def check_rows(script: Script, found: Row, count: int) -> int:
    """Assert that each row is one of the script's segments, or the row of a rollout without samples. Return the trained tokens."""
    trained = 0
    assert {len(found[name]) for name in found} == {count}
    assert len(set(found["rollout_uid"])) == count
    for at, uid in enumerate(found["rollout_uid"]):
        ids, mask, logprobs = found["completion_ids"][at], found["env_mask"][at], found["logprobs"][at]
        segments = [each for each in script.expected(uid).values() if each.response_ids == ids]
        if not script.expected(uid):
            assert (found["prompt_ids"][at], ids, mask, logprobs) == ([END], [END], [0], [0.0])
            assert found["rollout_untrainable"][at]
            continue
        row = next(each for each in segments if each.prompt_ids == found["prompt_ids"][at])
        assert all(own <= expected for own, expected in zip(mask, row.response_mask, strict=True))
        assert logprobs == [value * own for value, own in zip(row.logprobs, mask, strict=True)]
        if found["rollout_untrainable"][at]:
            assert not any(mask)
        trained += sum(mask)
    return trained


def check_loss(found: Row, loss: Row) -> None:
    """Assert that the loss got the rows: ids and masks, right-padded, with the padding masked."""
    assert loss["completion_ids"].shape == loss["tool_mask"].shape == loss["completion_mask"].shape
    by_row = {tuple(ids): mask for ids, mask in zip(found["completion_ids"], found["env_mask"], strict=True)}
    for ids, present, tool in zip(loss["completion_ids"], loss["completion_mask"], loss["tool_mask"], strict=True):
        length = int(present.sum())
        assert present.tolist() == [1] * length + [0] * (len(present) - length)
        assert tool[:length].tolist() == by_row[tuple(ids[:length].tolist())]


@pytest.mark.parametrize("name", [each for each in SCENARIOS if each != "cancelled"])
def test_rows_of_each_scenario(server: str, tmp_path: Path, name: str) -> None:
    script, scenario = Script(), SCENARIOS[name]
    with scripted(server, script, scenario.agent) as rollouts:
        trainer = trainer_of(rollouts, [row_of(name), row_of(name, 1)], tmp_path)
        trainer.train()
    (found,) = trainer.returned
    check_rows(script, found, 4)
    failed = scenario.end == "failure"
    assert [reward is None for reward in found["rollout_reward"]] == [failed] * 4
    if name == "truncated":
        assert found["env_mask"] == [[1] * TRUNCATED_TOKENS] * 4
        assert found["rollout_truncated"] == [True] * 4
    elif scenario.rows:
        # The segment with the most trained tokens; of equals the first one.
        ids, mask = max(scenario.responses(), key=lambda row: sum(row[1]))
        assert found["completion_ids"] == [ids] * 4
        assert found["env_mask"] == [[0] * len(ids) if failed else mask] * 4
    (loss,) = trainer.losses
    check_loss(found, loss)
    if failed:
        assert loss["advantages"].tolist() == [0.0] * 4


def test_a_thousand_random_rollouts(server: str, tmp_path: Path) -> None:
    script, chance, version = Script(), random.Random(5), 0
    for agent, names in {"scenarios": 62, "drifting": 63}.items():

        def sample(turns: Sequence[Turn], trainer: GRPOTrainer) -> list[Generated | Exception]:
            nonlocal version
            version += 1
            script.version = f"v{version}"
            broken = ValueError("by chance")
            return [broken if chance.random() < 0.01 else script.generate(turn) for turn in turns]

        rows = [row_of("random", seed) for seed in range(names)]
        with scripted(server, script, agent, sample=sample) as rollouts:
            trainer = trainer_of(rollouts, rows, tmp_path, num_generations=8)
            trainer.train()
        (found,) = trainer.returned
        trained = check_rows(script, found, names * 8)
        generated = sum(len(each.ids) for each in script.sampled if each.uid in set(found["rollout_uid"]))
        assert generated > trained > generated / 4
        check_loss(found, trainer.losses[0])
        # A failed rollout has no reward, and the order is that of the prompts: the prompt's text is in the row.
        assert {end for end, reward in zip(found["rollout_end"], found["rollout_reward"], strict=True) if reward is None} == {
            "failure"
        }
        for at, ids in enumerate(found["prompt_ids"]):
            text = TOKENIZER.decode(ids)
            assert f"Scenario random {at // 8}." in text or ids == [END] or "Aside" in text
