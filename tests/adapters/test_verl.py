"""verl's own workers of agent loops, for its v1 trainer and for the older one, with `RolloutServerLoop` and a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from osmosis.rollout.v1.outcome_pb2 import FailureClass
from osmosis.rollout.v1.rollout_service_pb2 import Rollout
from rollout_client import AsyncClient, RolloutFailed, TrainingSample, Unavailable
from rollout_client.adapters import shared_trainer
from rollout_client.adapters.verl import _only_sample
from rollout_client.chat_messages import messages as chat_messages
from rollout_client.trainer import Finished
from transformers import Qwen2Config
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, DictConfigWrap, ToolListWrap
from verl.protocol import DataProto
from verl.workers.rollout.replica import TokenOutput

from tests.adapters.scenarios import (
    END,
    ROLLOUTS,
    ROOT,
    SCENARIOS,
    TOY,
    TRUNCATED_TOKENS,
    Script,
    decode,
    encode,
    messages,
    metadata,
)

PROMPT, RESPONSE = 512, 384
PROMPTS = ROLLOUTS // 4
"""Random prompts, with four rollouts each."""
COMPLETED = [name for name, scenario in SCENARIOS.items() if scenario.end == "stop"]


@dataclass
class Completion:
    """One completion of the engine. The logprob of each of its tokens names it: see `Engine.logprob`."""

    request_id: str
    prompt_ids: list[int]
    ids: list[int]
    step: int


class Engine:
    """verl's client of its engines, with the script as the model. It reports what vLLM's server reports.

    Not a dataclass: hydra turns those into configurations.

    Args:
        steps: policy steps of the completions; the last one repeats.
        logprobs: whether it returns logprobs.
        hook: called with each request before it is generated. It may return another output, or after how many tokens a weight
            update aborts the completion, or a coroutine.
    """

    def __init__(
        self,
        steps: Sequence[int] = (7,),
        logprobs: bool = True,
        hook: Callable[[dict[str, Any]], Any] = lambda request: None,
    ) -> None:
        self.steps = steps
        self.logprobs = logprobs
        self.hook = hook
        self.completions: list[Completion] = []
        self.requests: list[dict[str, Any]] = []
        self.rest: dict[str, list[int]] = {}

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> Any:
        """Generate as `LLMServerClient` does."""
        request = {"request_id": request_id, "prompt_ids": prompt_ids, "sampling_params": dict(sampling_params), **more}
        self.requests.append(request)
        await asyncio.sleep(0)
        cut = self.hook(request)
        if asyncio.iscoroutine(cut):
            cut = await cut
        if isinstance(cut, TokenOutput):
            return cut
        # As vLLM's server, it consumes its argument.
        number, limit = len(self.completions), sampling_params.pop("max_tokens")
        ids = self.rest.pop(request_id, None)
        if ids is None:
            ids, _ = Script().complete(prompt_ids, limit, f"{request_id}/{number}")
        if cut is not None:
            ids, self.rest[request_id] = ids[:cut], ids[cut:]
        step = self.steps[min(number, len(self.steps) - 1)]
        self.completions.append(Completion(request_id, list(prompt_ids), ids, step))
        return TokenOutput(
            token_ids=ids,
            log_probs=[self.logprob(number)] * len(ids) if self.logprobs and sampling_params["logprobs"] else None,
            stop_reason="completed" if cut is None else "aborted",
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
    Qwen2Config(**sizes, num_hidden_layers=1, vocab_size=1000, architectures=["Qwen2ForCausalLM"]).save_pretrained(
        directory
    )
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
- name: judged
  _target_: rollout_client.adapters.verl.RolloutServerLoop
  server: ${oc.env:TEST_SERVER}
  tokenizer_name: toy
  agent: judged
"""


def compose_config(model: Path, entries: Path) -> DictConfig:
    """verl's own configuration, with the YAML file of the agent loops."""
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


@pytest.fixture(scope="session")
def entries(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML file of the agent loops."""
    os.environ["TEST_SERVER"] = server
    path = tmp_path_factory.mktemp("loops") / "loops.yaml"
    path.write_text(ENTRIES)
    return path


@pytest.fixture(scope="session")
def config(model: Path, entries: Path) -> DictConfig:
    return compose_config(model, entries)


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


def make_loop(config: DictConfig, engine: Engine, entry: str = "scenarios", worker: Any = None, **options: Any) -> Any:
    """An agent loop as verl's workers make it: hydra instantiates the entry of the YAML file."""
    worker = worker or AgentLoopWorker(config, llm_client=engine)
    entries = OmegaConf.load(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    return instantiate(
        config=OmegaConf.merge(next(each for each in entries if each.name == entry), options),
        trainer_config=DictConfigWrap(config=config),
        server_manager=engine,
        tokenizer=worker.tokenizer,
        processor=worker.processor,
        hf_model_type=worker.hf_model_type,
        dataset_cls=worker.dataset_cls,
        data_config=DictConfigWrap(config.data),
        tools=ToolListWrap(worker.tools),
    )


def play(config: DictConfig, engine: Engine, name: str, *, entry: str = "", v1: bool = True, **options: Any) -> Any:
    """Run one rollout in an event loop of its own, as a worker of the v1 trainer or of the older one does."""
    row = columns(name)
    entry = entry or row["agent_name"]
    del row["agent_name"]
    row |= {"session_id": 0, "global_steps": 3} if v1 else {}

    async def main() -> Any:
        return await make_loop(config, engine, entry, **options).run(dict(SAMPLING), **row)

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
    assert sorted(number for numbers in found for number in numbers) == list(range(len(engine.completions)))
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


def test_the_engine_gets_further_parameters_of_the_agent(config: DictConfig) -> None:
    engine = Engine()
    play(config, engine, "parallel", fields={"sampling": {"extra": {"top_k": 5}, "stop": ["never"]}})
    for request in engine.requests:
        given = dict(request["sampling_params"])
        del given["max_tokens"]
        assert given == {**SAMPLING, "top_k": 5, "stop": ["never"]}


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


@pytest.mark.parametrize("v1", [True, False])
def test_a_rollout_over_its_time_limit_raises_although_its_samples_train(config: DictConfig, v1: bool) -> None:
    with pytest.raises(RolloutFailed, match="time limit of 1 s") as caught:
        play(config, Engine(), "cancelled", v1=v1, fields={"limits": {"time": 1}})
    assert caught.value.failure_class == "deadline"


def test_an_exception_of_the_engine_is_the_cause(config: DictConfig) -> None:
    def broken(request: dict[str, Any]) -> None:
        raise ZeroDivisionError("the engine broke")

    with pytest.raises(RolloutFailed, match="trainer") as caught:
        play(config, Engine(hook=broken), "parallel")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_completion_that_a_weight_update_aborts_is_resumed(config: DictConfig) -> None:
    empty = TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": 1})
    plan = iter([None, 3, empty, 2, None, None])
    engine = Engine(steps=range(9), hook=lambda request: next(plan))
    (output,) = play(config, engine, "parallel")
    assert [(output.response_ids, output.response_mask)] == SCENARIOS["parallel"].responses()
    numbers = engine.check_row(output.prompt_ids, output.response_ids, output.response_mask, output.response_logprobs)
    assert numbers == [0, 1, 2, 3, 4]
    spans = [each for each in output.extra_fields["rollout_sample"]["spans"] if each["author"] == "model"]
    assert [(each["turn"], each["policy_step"]) for each in spans] == [(1, 0), (2, 1), (2, 2), (2, 3), (3, 4)]
    assert [output.extra_fields[f"{end}_global_steps"] for end in ("min", "max")] == [0, 4]


def test_tokens_of_several_policies_in_one_output_widen_the_range(config: DictConfig) -> None:
    steps = {"global_steps": 9, "min_global_steps": 5, "max_global_steps": 9}
    ids = [*encode("Well."), END]
    engine = Engine(
        hook=lambda request: TokenOutput(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            routed_experts=np.ones((len(request["prompt_ids"]) + len(ids), 2, 1)),
            extra_fields=steps,
        )
    )
    (output,) = play(config, engine, "truncated")
    assert [output.extra_fields[f"{end}_global_steps"] for end in ("min", "max")] == [5, 9]
    assert output.routed_experts.shape == (len(output.prompt_ids) + len(output.response_ids), 2, 1)
    assert output.as_dict()["routed_experts"].shape == output.routed_experts.shape


class TestBudgets:
    """What verl would cut is never generated, or raises."""

    def test_a_completion_ends_with_the_response(self, config: DictConfig) -> None:
        (output,) = play(adjusted(config, response_length=4), Engine(), "truncated")
        assert len(output.response_ids) == 4
        assert output.extra_fields["rollout_sample"]["truncated"]

    def test_a_prompt_that_is_too_long_raises(self, config: DictConfig) -> None:
        with pytest.raises(RolloutFailed) as caught:
            play(adjusted(config, prompt_length=10), Engine(), "parallel")
        assert re.search(r"prompt has \d+ tokens, more than rollout.prompt_length=10", str(caught.value.__cause__))

    def test_results_of_tools_that_fill_the_response_raise(self, config: DictConfig) -> None:
        first = SCENARIOS["parallel"].rows[0][0][1]
        with pytest.raises(RolloutFailed, match="trainer") as caught:
            play(adjusted(config, response_length=len(encode(first)) + 3), Engine(), "parallel")
        assert "turn 2 has no room for a completion" in str(caught.value.__cause__)

    def test_the_length_of_the_models_context_holds_too(self, config: DictConfig) -> None:
        (output,) = play(config, Engine(), "parallel")
        length = len(output.prompt_ids) + len(output.response_ids)
        (cut,) = play(adjusted(config, max_model_len=length - 2), Engine(), "parallel")
        assert len(cut.prompt_ids) + len(cut.response_ids) == length - 2

    def test_an_abort_that_fills_the_room_ends_the_completion(self, config: DictConfig) -> None:
        """The room of the second turn is smaller than what the server allows, because results of tools are in the response."""
        first = SCENARIOS["parallel"].rows[0][:2]
        length = sum(len(encode(text)) for _, text in first) + 5
        cuts = iter([None, 5])
        engine = Engine(hook=lambda request: next(cuts))
        (output,) = play(adjusted(config, response_length=length), engine, "parallel")
        assert len(output.response_ids) == length
        assert output.extra_fields["rollout_sample"]["truncated"]
        assert len(engine.completions) == 2

    @pytest.mark.parametrize(
        ("assistant", "user", "turns"), [(2, None, 2), (None, 1, 2), (3, 1, 2), (1, 5, 1), (None, None, 3)]
    )
    def test_limits_of_turns_hold(
        self, config: DictConfig, assistant: int | None, user: int | None, turns: int
    ) -> None:
        limits = {"multi_turn.max_assistant_turns": assistant, "multi_turn.max_user_turns": user}
        engine = Engine()
        play(adjusted(config, **limits), engine, "parallel")
        assert len(engine.completions) == turns

    def test_the_entrys_own_limit_of_turns_comes_first(self, config: DictConfig) -> None:
        engine = Engine()
        limits = {"multi_turn.max_assistant_turns": 1}
        play(adjusted(config, **limits), engine, "parallel", fields={"limits": {"turns": 2}})
        assert len(engine.completions) == 2


def test_rewards_that_verl_cannot_carry_raise(config: DictConfig) -> None:
    with pytest.raises(ValueError, match="different rewards"):
        play(config, Engine(), "fork", entry="judged")


@pytest.mark.parametrize("trainable", [True, False])
def test_a_sample_of_a_further_model_is_no_row(trainable: bool) -> None:
    own = TrainingSample("0", [1], [2], [1], [-0.5], trainable=trainable)
    critic = replace(own, segment_id="1", response_ids=[2, 3], response_mask=[1, 1], logprobs=None, model="critic")
    samples = (critic, own) if trainable else ()
    finished = Finished(Rollout(), samples, None, False, () if trainable else (critic, own))
    assert _only_sample(finished, 8) == own


def test_scores_take_no_column_of_verl(config: DictConfig) -> None:
    (output,) = play(config, Engine(), "parallel", entry="judged")
    assert output.reward_score == 1.0
    assert output.extra_fields["reward_extra_info"] == {"accuracy": 0.5, "rollout_uid": 0.25, "rollout_reward": 0.125}


def test_missing_logprobs_raise_if_verl_wants_them(config: DictConfig) -> None:
    with pytest.raises(ValueError, match="has no logprobs"):
        play(config, Engine(logprobs=False), "parallel")


def test_the_server_gets_the_columns_of_the_dataset_and_verls_settings(config: DictConfig, server: str) -> None:
    found = config.copy()
    OmegaConf.update(
        found, "data.apply_chat_template_kwargs", {"enable_thinking": False, "tone": ["dry"]}, force_add=True
    )
    (output,) = play(found, Engine(), "parallel")

    async def spec() -> Any:
        async with AsyncClient(server) as client:
            return (await client.get(output.extra_fields["rollout_sample"]["uid"], view="full")).spec

    found = asyncio.run(spec())
    expected = {"scenario": "parallel", "seed": 0, "index": 0, "ground_truth": "16"}
    assert json.loads(found.metadata_json) == expected
    assert dict(found.labels) == {"trainer": "verl"}
    assert found.limits.generated_tokens == RESPONSE
    assert json.loads(found.tokenizer.template_kwargs_json) == {"enable_thinking": False, "tone": ["dry"]}


@pytest.mark.parametrize("array", [list, np.array])
def test_what_parquet_adds_to_messages_is_not_sent(
    config: DictConfig, server: str, array: Callable[[list[Any]], Any]
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    calls = array([{**call, "index": None}])
    parts = array([{"type": "text", "text": "Scenario parallel 0.", "image": None}])
    prompt = [
        {"role": "user", "content": "What is 1 plus 2?", "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "name": None, "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "1", "tool_calls": None},
        {"role": "user", "content": parts, "name": None, "tool_calls": None},
    ]
    row = columns("parallel") | {"session_id": 0, "raw_prompt": prompt}
    row["extra_info"] = {"scenario": "truncated"}
    del row["agent_name"]

    async def sent() -> list[Any]:
        (output,) = await make_loop(config, Engine()).run(dict(SAMPLING), **row)
        async with AsyncClient(server) as client:
            found = await client.get(output.extra_fields["rollout_sample"]["uid"], view="full")
        return chat_messages(found.spec)

    assert asyncio.run(sent()) == [
        {"role": "user", "content": "What is 1 plus 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "text", "text": "Scenario parallel 0."}]},
    ]


class TestOptions:
    """Arguments of the YAML entry."""

    @pytest.mark.parametrize("array", [list, np.array])
    def test_media_are_refused_by_name(self, config: DictConfig, array: Callable[[list[Any]], Any]) -> None:
        parts = [{"type": "text", "text": "Look."}, {"type": "image", "image": "a.png"}]
        prompt = [{"role": "user", "content": array(parts)}]

        async def main() -> None:
            await make_loop(config, Engine()).run(SAMPLING, raw_prompt=prompt)

        with pytest.raises(ValueError, match=r"raw_prompt\[0\] has a part of type 'image'"):
            asyncio.run(main())

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"agent": "judged"}, "'agent' would have no effect; use the argument agent"),
            ({"tokenizer": "toy"}, "'tokenizer' .* tokenizer_name"),
            ({"sampling": {"temperature": 0.5}}, "'sampling.temperature' .* actor_rollout_ref.rollout.temperature"),
            ({"sampling": {"max_tokens": 4, "top_p": 0.5}}, "'sampling.top_p' .* actor_rollout_ref.rollout.top_p"),
            ({"sampling": {"logprobs": True}}, "'sampling.logprobs' .* actor_rollout_ref.rollout.calculate"),
        ],
    )
    def test_what_something_else_sets_is_refused_by_name(
        self, config: DictConfig, fields: dict[str, Any], text: str
    ) -> None:
        with pytest.raises(InstantiationException, match=text):
            play(config, Engine(), "parallel", fields=fields)

    def test_an_unknown_parser_is_refused_by_name(self, config: DictConfig) -> None:
        with pytest.raises(ValueError, match="no parser 'xml'; use one of hermes"):
            play(config, Engine(), "parallel", parse="xml")

    def test_a_parser_may_be_a_function(self, config: DictConfig) -> None:
        (output,) = play(config, Engine(), "parallel", parse="rollout_client.trainer.completion:plain")
        assert output.num_turns == 2

    def test_tls_and_key_come_from_yaml(
        self, config: DictConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        options = {
            "tls": {"_target_": "rollout_client.Tls"},
            "retry": {"_target_": "rollout_client.Retry", "patience": 0},
            "api_key": "not-to-be-seen",
            "colour": "blue",
        }
        with pytest.raises(Unavailable) as caught:  # the server has no TLS
            play(config, Engine(), "parallel", **options)
        assert "not-to-be-seen" not in f"{caught.value} {caplog.text}"
        assert "'colour' is unknown" in caplog.text
        play(config, Engine(), "parallel")

    def test_the_entry_of_the_page_plays(
        self, config: DictConfig, server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        page = (ROOT / "docs/adapters.md").read_text(encoding="utf-8")
        (text,) = re.findall(r"```yaml\n(- name: rollout_server.*?)```", page, re.DOTALL)
        (tmp_path / "loops.yaml").write_text(text)
        here = {"server": server, "agent": "scenarios", "tokenizer_name": "toy", "api_key": None, "tls": None}
        page_config = adjusted(config, **{"agent.agent_loop_config_path": str(tmp_path / "loops.yaml")})
        (output,) = play(page_config, Engine(), "parallel", entry="rollout_server", **here)
        assert [(output.response_ids, output.response_mask)] == SCENARIOS["parallel"].responses()
        assert "unknown" not in caplog.text

    def test_loops_of_an_event_loop_share_a_connection_and_its_slots(self, config: DictConfig) -> None:
        running: Counter[str] = Counter()
        most = []

        async def count(request: dict[str, Any]) -> None:
            running[request["request_id"]] = 1
            most.append(running.total())
            if "It is 16." in reply(request):
                running[request["request_id"]] = 0

        def reply(request: dict[str, Any]) -> str:
            return decode(Script().complete(request["prompt_ids"], None)[0])

        engine = Engine(hook=count)
        row = columns("parallel") | {"session_id": 0}
        del row["agent_name"]

        async def main() -> int:
            worker = AgentLoopWorker(config, llm_client=engine)
            loops = [make_loop(config, engine, worker=worker, at_once=3) for _ in range(8)]
            await asyncio.gather(*(loop.run(SAMPLING, **row) for loop in loops))
            return len(shared_trainer._SHARED)

        assert asyncio.run(main()) == 1
        assert not shared_trainer._SHARED
        assert len({each["request_id"] for each in engine.requests}) == 8
        assert 1 < max(most) <= 3


async def ended(server: str, group_id: str) -> list[Any]:
    """The outcomes of the rollouts of a group, once they have ended."""
    async with AsyncClient(server) as client:
        found = [each async for each in client.list() if each.spec.group_id == group_id]
        return [(await client.wait(each.uid, timeout=60)).outcome for each in found]


def test_a_cancelled_run_cancels_its_rollout(config: DictConfig, server: str) -> None:
    row = columns("parallel", 77)
    del row["agent_name"]

    async def main() -> None:
        waits = asyncio.Event()

        async def never(request: dict[str, Any]) -> None:
            waits.set()
            await asyncio.Event().wait()

        run = asyncio.create_task(make_loop(config, Engine(hook=never)).run(SAMPLING, **row))
        await waits.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(main())
    (outcome,) = asyncio.run(ended(server, "parallel-77"))
    assert outcome.cancellation.reason == "cancelled by its trainer"


WORKER = """
import asyncio, sys
from pathlib import Path
from tests.adapters.test_verl import SAMPLING, Engine, columns, compose_config, make_loop

async def stuck(request):
    print("generating", flush=True)
    await asyncio.Event().wait()

async def main():
    row = columns("parallel", 99)
    del row["agent_name"]
    await make_loop(compose_config(*map(Path, sys.argv[1:])), Engine(hook=stuck)).run(SAMPLING, **row)

asyncio.run(main())
"""


@pytest.mark.heavy  # another process imports all frameworks
@pytest.mark.timeout(300)
def test_the_rollouts_of_a_killed_worker_end_and_a_new_worker_works(
    config: DictConfig, server: str, model: Path, entries: Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WORKER, str(model), str(entries)]
    paths = {"PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | paths, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "generating\n" in process.stdout
        process.kill()
    (outcome,) = asyncio.run(ended(server, "parallel-99"))
    assert FailureClass.Name(outcome.failure.failure_class) == "FAILURE_CLASS_TRAINER"
    play(config, Engine(), "parallel")


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
            assert (row[0][:length].tolist(), row[1][:length].tolist()) in SCENARIOS[
                name
            ].responses() or name == "truncated"
            assert f"Scenario {name} {index % 2}." in decode(prompt)
            assert batch.batch["rm_scores"][index].sum() == batch.batch["rm_scores"][index][length - 1] > 0
        assert max(Counter(numbers).values()) == 1
        assert batch.meta_info["reward_extra_keys"] == []
        assert set(batch.non_tensor_batch["min_global_steps"]) <= {1, 2}

    def test_the_sample_with_the_most_trained_tokens_is_the_row(self, config: DictConfig) -> None:
        output = play(config, Engine(), "fork", v1=False)
        assert (output.response_ids, output.response_mask) == SCENARIOS["fork"].responses()[0]

    def test_a_sample_whose_prompt_is_too_long_is_no_row(self, config: DictConfig) -> None:
        first, second = play(config, Engine(), "drift")
        assert len(first.prompt_ids) < len(second.prompt_ids)
        output = play(adjusted(config, prompt_length=len(first.prompt_ids)), Engine(), "drift", v1=False)
        assert (output.prompt_ids, output.response_ids) == (first.prompt_ids, first.response_ids)

    def test_a_failed_rollout_ends_the_batch(self, config: DictConfig) -> None:
        with pytest.raises(RolloutFailed):
            self.generate(config, Engine(), [columns("parallel"), columns("failed")])


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    """The real TransferQueue, on a Ray of this machine."""
    import ray
    import transfer_queue as tq

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # otherwise it writes a key into the home directory
    for attempts_left in (2, 1, 0):
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
            break
        except Exception as error:  # Ray waits 30 s for each of its processes, which is short on a busy machine
            ray.shutdown()
            if not attempts_left or "timed out" not in str(error).lower():
                raise
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        yield tq
        tq.close()
    finally:
        ray.shutdown()


class TestV1Trainer:
    """`AgentLoopWorkerTQ`, which runs the rollouts of a prompt and puts their rows into TransferQueue."""

    def generate(
        self, queue: Any, config: DictConfig, engine: Engine, rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
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
        assert sorted(numbers) == [
            n for n, each in enumerate(engine.completions) if "Scenario failed" not in decode(each.prompt_ids)
        ]

    def check(self, queue: Any, engine: Engine, key: str, tag: Mapping[str, Any]) -> list[int]:
        """Check one row of the queue; return the numbers of its completions."""
        data = queue.kv_batch_get(keys=[key], partition_id="train")
        row = [data[name][0].tolist() for name in ("prompts", "responses", "response_mask", "rollout_log_probs")]
        assert data["input_ids"][0].tolist() == row[0] + row[1]
        assert data["rm_scores"][0].tolist()[:-1] == [0.0] * (len(row[1]) - 1)
        extra = data["extra_fields"][0]
        assert data["rm_scores"][0][-1] > 0
        assert extra["reward_extra_info"] == {}
        assert (tag["prompt_len"], tag["response_len"], tag["global_steps"]) == (len(row[0]), len(row[1]), 3)
        numbers = engine.check_row(*row)
        steps = [engine.completions[number].step for number in numbers]
        assert (tag["min_global_steps"], tag["max_global_steps"]) == (min(steps), max(steps))
        return numbers

    def test_random_rollouts_train_each_token_at_most_once(self, queue: Any, config: DictConfig) -> None:
        engine = Engine(steps=range(10**6))
        rows = [
            columns("random", seed) | {"agent_name": "drifting" if seed % 2 else "scenarios"} for seed in range(PROMPTS)
        ]
        tags = self.generate(queue, adjusted(config, n=4), engine, rows)
        keys = [key for key in tags if re.fullmatch(r"random-\d+_\d_\d", key)]
        numbers = Counter(number for key in keys for number in self.check(queue, engine, key, tags[key]))
        assert max(numbers.values()) == 1
        ends = Counter(tags[row["uid"]]["status"] for row in rows)
        assert set(ends) == {"finished", "failure"}
        assert len({key.rsplit("_", 1)[0] for key in keys}) <= 4 * PROMPTS
