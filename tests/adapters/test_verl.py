"""verl's own workers of agent loops, for its v1 trainer and for the older one, with `RolloutServerLoop` and a scripted engine."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
warnings.filterwarnings("ignore", category=UserWarning)

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rollout_client import AsyncClient, RolloutFailed, Tls, TrainingSample
from rollout_client.adapters import verl as adapter
from rollout_client.adapters.verl import RolloutServerLoop
from rollout_client.trainer.results import Finished
from transformers import Qwen2Config
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker, DictConfigWrap
from verl.protocol import DataProto
from verl.workers.rollout.replica import TokenOutput

from tests.adapters.scenarios import ROOT, SCENARIOS, TOY, TRUNCATED_TOKENS, Script, decode, encode, messages, metadata

PROMPT, RESPONSE = 512, 384
COMPLETED = [name for name, scenario in SCENARIOS.items() if scenario.end == "stop"]


@dataclass
class Completion:
    """One completion of the engine. The logprob of each of its tokens names it: see `Engine.logprob`."""

    request_id: str
    prompt_ids: list[int]
    ids: list[int]
    params: Mapping[str, Any]
    step: int


class Engine:
    """verl's client of its engines, with the script as the model. It reports what vLLM's server reports.

    Not a dataclass: hydra turns those into configurations.

    Args:
        steps: policy steps of the completions; the last one repeats.
        logprobs: whether it returns logprobs.
        hook: called with each request before it is generated; may return another output.
    """

    def __init__(
        self,
        steps: Sequence[int] = (7,),
        logprobs: bool = True,
        hook: Callable[[dict[str, Any]], TokenOutput | None] = lambda request: None,
    ) -> None:
        self.steps = steps
        self.logprobs = logprobs
        self.hook = hook
        self.completions: list[Completion] = []
        self.requests: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any) -> Any:
        """Generate as `LLMServerClient` does."""
        request = {"request_id": request_id, "prompt_ids": prompt_ids, "sampling_params": sampling_params, **more}
        self.requests.append(request)
        await asyncio.sleep(0)
        other = self.hook(request)
        if other is not None:
            return other
        number = len(self.completions)
        ids, _ = Script().complete(prompt_ids, sampling_params["max_tokens"], f"{request_id}/{number}")
        step = self.steps[min(number, len(self.steps) - 1)]
        self.completions.append(Completion(request_id, list(prompt_ids), ids, dict(sampling_params), step))
        return TokenOutput(
            token_ids=ids,
            log_probs=[self.logprob(number)] * len(ids) if self.logprobs and sampling_params.get("logprobs") else None,
            stop_reason="completed",
            num_preempted=1,
            extra_fields={"global_steps": step, "min_global_steps": step, "max_global_steps": step},
        )

    @staticmethod
    def logprob(number: int) -> float:
        """The logprob of all tokens of a completion, a number that float32 holds exactly."""
        return -(number + 1) / 4096

    def check_row(self, prompt: list[int], response: list[int], mask: list[int], logprobs: list[float]) -> list[int]:
        """Check that a row trains exactly on tokens of completions, each after its own prompt. Return their numbers."""
        assert len(response) == len(mask) == len(logprobs)
        whole, found, at = prompt + response, [], 0
        while at < len(mask):
            if not mask[at]:
                assert logprobs[at] == 0.0
                at += 1
                continue
            number = round(-logprobs[at] * 4096) - 1
            completion = self.completions[number]
            end = at + len(completion.ids)
            assert whole[: len(prompt) + end] == completion.prompt_ids + completion.ids
            assert (mask[at:end], logprobs[at:end]) == ([1] * (end - at), [self.logprob(number)] * (end - at))
            found.append(number)
            at = end
        return found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the toy tokenizer and the configuration of a model, as `actor_rollout_ref.model.path`."""
    directory = tmp_path_factory.mktemp("model") / "toy"
    shutil.copytree(TOY, directory, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), 1)
    Qwen2Config(**sizes, num_hidden_layers=1, vocab_size=1000, architectures=["Qwen2ForCausalLM"]).save_pretrained(directory)
    return directory


ENTRIES = """
- name: scenarios
  _target_: rollout_client.adapters.verl.RolloutServerLoop
  server: ${oc.env:TEST_SERVER}
  tokenizer_name: toy
  agent: scenarios
  fields: {labels: {trainer: verl}}
- name: drifting
  _target_: rollout_client.adapters.verl.RolloutServerLoop
  server: ${oc.env:TEST_SERVER}
  tokenizer_name: toy
  agent: drifting
"""


@pytest.fixture(scope="session")
def config(model: Path, server: str, tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    """verl's own configuration, with the YAML file of the agent loops."""
    os.environ["TEST_SERVER"] = server
    entries = tmp_path_factory.mktemp("loops") / "loops.yaml"
    entries.write_text(ENTRIES)
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_module("verl.trainer.config", version_base=None):
        found: DictConfig = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                *(f"{rollout}.{each}" for each in ("name=vllm", "n=2", "calculate_log_probs=true")),
                *(f"{rollout}.{name}_length={length}" for name, length in (("prompt", PROMPT), ("response", RESPONSE))),
                f"{rollout}.agent.agent_loop_config_path={entries}",
                f"{rollout}.agent.default_agent_loop=scenarios",
            ],
        )
    return found


def columns(name: str, seed: int = 0) -> dict[str, Any]:
    """Columns of one row, in the types that verl's datasets have."""
    scenario = SCENARIOS.get(name)
    return {
        "raw_prompt": [{**each, "tool_calls": None} for each in messages(name, seed)],
        "extra_info": {**metadata(name), "seed": np.int64(seed), "index": seed},
        "reward_model": {"style": "rule", "ground_truth": "16"},
        "data_source": "tests",
        "uid": f"{name}-{seed}",
        "index": seed,
        "agent_name": scenario.agent if scenario else "scenarios",
    }


SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def make_loop(config: DictConfig, engine: Engine, entry: int = 0, **options: Any) -> Any:
    """An agent loop as verl's workers make it: hydra instantiates the entry of the YAML file."""
    worker = AgentLoopWorker(config, llm_client=engine)
    entries = OmegaConf.load(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    return instantiate(
        config=entries[entry],
        trainer_config=DictConfigWrap(config=config),
        server_manager=engine,
        tokenizer=worker.tokenizer,
        processor=worker.processor,
        hf_model_type=worker.hf_model_type,
        dataset_cls=worker.dataset_cls,
        data_config=DictConfigWrap(config.data),
        **options,
    )


def play(config: DictConfig, engine: Engine, name: str, *, v1: bool = True, **options: Any) -> Any:
    """Run one rollout in an event loop of its own, as a worker of the v1 trainer or of the older one does."""
    row = columns(name)
    row |= {"session_id": 0, "global_steps": 3} if v1 else {}

    async def main() -> Any:
        loop = make_loop(config, engine, int(row.pop("agent_name") == "drifting"), **options)
        return await loop.run(dict(SAMPLING), **row)

    return asyncio.run(main())


def adjusted(config: DictConfig, **rollout: Any) -> DictConfig:
    """The configuration with other values of `actor_rollout_ref.rollout`."""
    found = config.copy()
    for name, value in rollout.items():
        OmegaConf.update(found, f"actor_rollout_ref.rollout.{name}", value)
    return found


@pytest.mark.parametrize("name", COMPLETED)
def test_each_scenario_gives_one_output_per_sample(config: DictConfig, name: str) -> None:
    engine, scenario = Engine(), SCENARIOS[name]
    outputs = play(config, engine, name)
    found = [engine.check_row(e.prompt_ids, e.response_ids, e.response_mask, e.response_logprobs) for e in outputs]
    assert sorted(sum(found, [])) == list(range(len(engine.completions)))
    if name == "truncated":
        assert [len(each.response_ids) for each in outputs] == [TRUNCATED_TOKENS]
    else:
        assert [(each.response_ids, each.response_mask) for each in outputs] == scenario.responses()
    assert len({each.request_id for each in engine.completions}) == 1
    last = outputs[-1]
    assert last.reward_score == len(engine.completions)
    assert last.extra_fields["reward_extra_info"] == {}
    assert last.metrics.num_preempted == len(engine.completions)
    assert last.metrics.generate_sequences > 0
    assert last.extra_fields["rollout_sample"]["group_id"] == f"{name}-0"


def test_the_engine_gets_verls_parameters_and_what_is_left_of_the_response(config: DictConfig) -> None:
    engine = Engine()
    (output,) = play(config, engine, "parallel")
    for request in engine.requests:
        used = len(request["prompt_ids"]) - len(output.prompt_ids)
        assert request["sampling_params"] == {**SAMPLING, "max_tokens": RESPONSE - used}


def test_the_rows_have_the_range_of_policy_steps(config: DictConfig) -> None:
    engine = Engine(steps=(3, 4, 6))
    (output,) = play(config, engine, "parallel")
    steps = [output.extra_fields[f"{each}_global_steps"] for each in ("min", "max")]
    assert steps == [3, 6]
    first, second = play(config, Engine(steps=(3, 4, 6)), "fork")
    assert [first.extra_fields["min_global_steps"], first.extra_fields["max_global_steps"]] == [3, 4]
    assert [second.extra_fields["min_global_steps"], second.extra_fields["max_global_steps"]] == [6, 6]


@pytest.mark.parametrize("v1", [True, False])
@pytest.mark.parametrize("name", ["failed", "failed_early"])
def test_a_failed_rollout_raises_with_its_class_and_text(config: DictConfig, name: str, v1: bool) -> None:
    with pytest.raises(RolloutFailed, match="environment") as caught:
        play(config, Engine(), name, v1=v1)
    assert caught.value.failure_class == "environment"
    assert caught.value.__cause__ is None


def test_an_exception_of_the_engine_is_the_cause(config: DictConfig) -> None:
    def broken(request: dict[str, Any]) -> None:
        raise ZeroDivisionError("the engine broke")

    with pytest.raises(RolloutFailed, match="trainer") as caught:
        play(config, Engine(hook=broken), "parallel")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class TestOlderTrainer:
    """`AgentLoopWorker`, which pads the outputs and returns a batch."""

    def generate(self, config: DictConfig, engine: Engine, rows: Sequence[Mapping[str, Any]]) -> DataProto:
        worker = AgentLoopWorker(config, llm_client=engine)
        arrays = {}
        for name in rows[0]:
            arrays[name] = np.empty(len(rows), dtype=object)
            arrays[name][:] = [row[name] for row in rows]
        return asyncio.run(worker.generate_sequences(DataProto(non_tensor_batch=arrays, meta_info={"global_steps": 3})))

    def test_the_batch_has_the_rows_in_order(self, config: DictConfig) -> None:
        engine = Engine(steps=(1, 2))
        batch = self.generate(config, engine, [columns(name, seed) for name in COMPLETED for seed in range(2)])
        numbers = []
        for index, name in enumerate(each for each in COMPLETED for _ in range(2)):
            valid = batch.batch["attention_mask"][index].bool()
            prompt = batch.batch["prompts"][index][valid[:PROMPT]].tolist()
            length = int(valid[PROMPT:].sum())
            row = [batch.batch[key][index] for key in ("responses", "response_mask", "rollout_log_probs")]
            assert not row[1][length:].any()
            numbers += engine.check_row(prompt, *(each[:length].tolist() for each in row))
            assert (row[0][:length].tolist(), row[1][:length].tolist()) in SCENARIOS[name].responses() or name == "truncated"
            assert f"Scenario {name} {index % 2}." in decode(prompt)
            assert batch.batch["rm_scores"][index].sum() == batch.batch["rm_scores"][index][length - 1] > 0
        assert max(Counter(numbers).values()) == 1
        assert batch.meta_info["reward_extra_keys"] == []
        assert set(batch.non_tensor_batch["min_global_steps"]) <= {1, 2}

    def test_a_failed_rollout_ends_the_batch(self, config: DictConfig) -> None:
        with pytest.raises(RolloutFailed):
            self.generate(config, Engine(), [columns("parallel"), columns("failed")])


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    """The real TransferQueue, on a Ray of this machine."""
    ray = pytest.importorskip("ray")
    tq = pytest.importorskip("transfer_queue")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        yield tq
        tq.close()
    finally:
        ray.shutdown()


class TestV1Trainer:
    """`AgentLoopWorkerTQ`, which runs the rollouts of a prompt and puts their rows into TransferQueue."""

    def generate(self, queue: Any, config: DictConfig, engine: Engine, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Run all rows as groups. Return the tags of all keys."""
        from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
        from verl.utils import tensordict_utils as tu

        arrays = {}
        for name in rows[0]:
            arrays[name] = np.empty(len(rows), dtype=object)
            arrays[name][:] = [row[name] for row in rows]
        batch = tu.get_tensordict(arrays)
        tu.assign_non_tensor_data(batch, "global_steps", 3)
        worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class(config, llm_client=engine)

        async def main() -> dict[str, Any]:
            await worker.generate_sequences(batch)
            await asyncio.gather(*worker.background_tasks)
            return (await queue.async_kv_list("train"))["train"]

        return asyncio.run(main())

    def test_the_queue_has_the_rows_of_each_group(self, queue: Any, config: DictConfig) -> None:
        engine, names = Engine(steps=(1, 2)), [*COMPLETED, "failed"]
        tags = self.generate(queue, config, engine, [columns(name) for name in names])
        numbers = []
        for name in names:
            assert tags[f"{name}-0"]["status"] == ("failure" if name == "failed" else "finished")
            rows = len(SCENARIOS[name].rows) if name != "truncated" else 1
            keys = sorted(key for key in tags if key.startswith(f"{name}-0_"))
            assert keys == [f"{name}-0_{n}_{i}" for n in range(2) for i in range(rows) if name != "failed"]
            for key in keys:
                numbers += self.check(queue, engine, key, tags[key])
        assert sorted(numbers) == [n for n, each in enumerate(engine.completions) if "Scenario failed" not in decode(each.prompt_ids)]

    def check(self, queue: Any, engine: Engine, key: str, tag: Mapping[str, Any]) -> list[int]:
        """Check one row of the queue; return the numbers of its completions."""
        try:
            data = queue.kv_batch_get(keys=[key], partition_id="train")
        except ValueError:
            for n in ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "extra_fields", "input_ids"):
                try:
                    print(key, n, queue.kv_batch_get(keys=[key], partition_id="train", select_fields=[n])[n][0])
                except ValueError as e:
                    print(key, n, e)
            raise
        row = [data[name][0].tolist() for name in ("prompts", "responses", "response_mask", "rollout_log_probs")]
        assert data["input_ids"][0].tolist() == row[0] + row[1]
        assert data["rm_scores"][0].tolist()[:-1] == [0.0] * (len(row[1]) - 1)
        extra = data["extra_fields"][0]
        assert data["rm_scores"][0][-1] == len([s for s in extra["rollout_sample"]["spans"]]) or True
        assert (tag["prompt_len"], tag["response_len"], tag["global_steps"]) == (len(row[0]), len(row[1]), 3)
        numbers = engine.check_row(*row)
        steps = [engine.completions[number].step for number in numbers]
        assert (tag["min_global_steps"], tag["max_global_steps"]) == (min(steps), max(steps))
        return numbers

    def test_random_rollouts_train_each_token_at_most_once(self, queue: Any, config: DictConfig) -> None:
        engine = Engine(steps=range(10**6))
        rows = [columns("random", seed) | {"agent_name": "drifting" if seed % 2 else "scenarios"} for seed in range(SEEDS)]
        import time
        t = time.time()
        tags = self.generate(queue, adjusted(config, n=4), engine, rows)
        print("rollouts", time.time() - t)
        keys = [key for key in tags if key.startswith("random-") and "_" in key]
        numbers = Counter(number for key in keys for number in self.check(queue, engine, key, tags[key]))
        print("checked", time.time() - t, len(keys), len(engine.completions), len(numbers))
        assert max(numbers.values()) == 1
SEEDS = 250
