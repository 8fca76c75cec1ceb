"""The adapter for TRL against the real GRPOTrainer: rows, masks, logprobs, and what its loss gets."""

from __future__ import annotations

import copy
import enum
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from rollout_client import Client, Tokenizer
from rollout_client.adapters.sampling import sample_batch
from rollout_client.adapters.trl import TrlRollouts, tool_environment
from rollout_client.samples import failure_class_of
from rollout_client.trainer import Generated, SamplingParams, Turn, TurnImage, parsers
from rollout_server import ToolContext, tool
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl import __file__ as trl_file

from tests.adapters.scenarios import (
    END,
    ROLLOUTS,
    SCENARIOS,
    TOY,
    TRUNCATED_TOKENS,
    Script,
    call,
    encode,
    logprobs_of,
    messages,
    metadata,
)

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
torch.set_num_threads(1)
TOKENIZER = AutoTokenizer.from_pretrained(TOY)
Row = dict[str, Any]


def model(seed: int = 0, spread: float = 0.02) -> Qwen2ForCausalLM:
    """A tiny Qwen2 with random weights of this standard deviation."""
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
            initializer_range=spread,
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
        server,
        agent=agent,
        parse=parsers.hermes,
        **{"tokenizer": "toy", "sample": sample, **options},
    )


def check_rows(script: Script, found: Row, count: int) -> int:
    """Assert that each row is one of the script's segments, or the row of a rollout without samples. Return the trained tokens."""
    trained = 0
    assert {len(found[name]) for name in found} == {count}
    assert len(set(found["rollout_uid"])) == count
    for at, uid in enumerate(found["rollout_uid"]):
        ids, mask, logprobs = found["completion_ids"][at], found["env_mask"][at], found["logprobs"][at]
        segments = [each for each in script.expected(uid).values() if each.response_ids == ids]
        if found["prompt_ids"][at] == [END]:
            assert (ids, mask, logprobs) == ([END], [0], [0.0])
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
    for ids, present, given in zip(loss["completion_ids"], loss["completion_mask"], loss["tool_mask"], strict=True):
        length = int(present.sum())
        assert present.tolist() == [1] * length + [0] * (len(present) - length)
        assert given[:length].tolist() == by_row[tuple(ids[:length].tolist())]


@pytest.mark.parametrize("name", [each for each in SCENARIOS if each != "cancelled"])
def test_rows_of_each_scenario(server: str, tmp_path: Path, name: str) -> None:
    script, scenario = Script(), SCENARIOS[name]
    failed = scenario.end == "failure"
    rows = [row_of(name), row_of(name, 1), *([row_of("parallel")] if failed else [])]
    with scripted(server, script, scenario.agent) as rollouts:
        trainer = trainer_of(rollouts, rows, tmp_path)
        trainer.train()
    (found,) = trainer.returned
    check_rows(script, found, 2 * len(rows))
    (loss,) = trainer.losses
    check_loss(found, loss)
    found = {column: values[:4] for column, values in found.items()}
    assert [reward is None for reward in found["rollout_reward"]] == [failed] * 4
    assert [bool(error) for error in found["rollout_error"]] == [failed] * 4
    if name == "truncated":
        assert found["env_mask"] == [[1] * TRUNCATED_TOKENS] * 4
        assert found["rollout_truncated"] == [True] * 4
    elif scenario.rows:
        # The segment with the most trained tokens; of equals the first one.
        ids, mask = max(scenario.responses(), key=lambda row: sum(row[1]))
        assert found["completion_ids"] == [ids] * 4
        assert found["env_mask"] == [[0] * len(ids) if failed else mask] * 4
    if failed:
        assert loss["advantages"].tolist() == [0.0] * 6


@pytest.mark.parametrize("agent", ["scenarios", "drifting"])
def test_random_rollouts(server: str, tmp_path: Path, agent: str) -> None:
    """Half of them of each agent. GRPOTrainer's own `_generate` takes the rows; the model's forward pass would take minutes."""
    script, chance, version = Script(), random.Random(5), 0

    def sample(turns: Sequence[Turn], trainer: GRPOTrainer) -> list[Generated | Exception]:
        nonlocal version
        version += 1
        script.version = f"v{version}"
        broken = ValueError("by chance")
        return [broken if chance.random() < 0.01 else script.generate(turn) for turn in turns]

    rows = [row_of("random", seed) for seed in range(ROLLOUTS // 2 // 4)]
    with scripted(server, script, agent, sample=sample) as rollouts:
        trainer = trainer_of(rollouts, rows, tmp_path, num_generations=4)
        prompts = [row["prompt"] for row in rows for _ in range(4)]
        prompt_ids, completion_ids, mask, _, logprobs, *_ = trainer._generate(prompts)
    (found,) = trainer.returned
    names = ("prompt_ids", "completion_ids", "env_mask", "logprobs")
    assert (prompt_ids, completion_ids, mask, logprobs) == tuple(found[name] for name in names)
    trained = check_rows(script, found, len(prompts))
    generated = sum(len(each.ids) for each in script.sampled)
    assert generated > trained > generated / 4
    for trained_at_all, reward in zip(map(any, mask), found["rollout_reward"], strict=True):
        assert trained_at_all == (reward is not None)
    # The order is that of the prompts. A subagent's prompt has other texts, and a rollout without samples has none.
    for at, ids in enumerate(found["prompt_ids"]):
        text = TOKENIZER.decode(ids)
        assert f"Scenario random {at // 4}." in text or "Aside" in text or ids == [END]


def test_the_loss_gets_random_rows(server: str, tmp_path: Path) -> None:
    for agent in ("scenarios", "drifting"):
        script = Script()
        with scripted(server, script, agent) as rollouts:
            trainer = trainer_of(rollouts, [row_of("random", seed) for seed in range(6)], tmp_path)
            trainer.train()
        check_rows(script, trainer.returned[0], 12)
        check_loss(trainer.returned[0], trainer.losses[0])


def test_metadata_reach_the_agent(server: str, tmp_path: Path) -> None:
    """Two rows with one prompt: equal metadata are one row, other ones cannot be told apart. A function decides otherwise."""
    same = [row_of("parallel"), row_of("parallel")]
    other = [row_of("parallel"), {**row_of("parallel"), "seed": 1}]
    with scripted(server, Script()) as rollouts:
        trainer_of(rollouts, same, tmp_path).train()
    with (
        scripted(server, Script()) as rollouts,
        pytest.raises(ValueError, match=r"rows 0 and 1 of train_dataset .* 'seed'"),
    ):
        trainer_of(rollouts, other, tmp_path).train()
    # The prompt says "parallel", the metadata say "failed": the agent plays what the metadata say.
    with scripted(server, Script(), metadata_of=lambda prompt: metadata("failed")) as rollouts:
        trainer = trainer_of(rollouts, other, tmp_path)
        with pytest.raises(RuntimeError, match=r"4 of 4 rollouts did not complete \(environment 4\); rollout .*: \w+"):
            trainer.train()
    with scripted(server, Script()) as rollouts:
        trainer = trainer_of(rollouts, same, tmp_path)
        with pytest.raises(ValueError, match=r"no row of train_dataset has the prompt .*metadata_of"):
            trainer._generate([messages("fork")] * 2)


@pytest.mark.parametrize("train_on", [None, ["policy"]])
def test_a_rollout_with_too_many_tool_calls(
    server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, train_on: list[Any] | None
) -> None:
    """The server's default trains its samples. TRL can score it only with None, so it has mask 0 unless the user decides."""
    script, more = Script(), {} if train_on is None else {"train_on": train_on}

    def sample(turns: Sequence[Turn], trainer: GRPOTrainer) -> list[Generated | Exception]:
        return [
            many(turn) if turn.group_id.endswith(":1") and turn.turn == 2 else script.generate(turn) for turn in turns
        ]

    def many(turn: Turn) -> Generated:
        ids = [*encode("\n".join([call("add", a=1, b=1)] * 17)), END]
        return Generated(ids, logprobs_of(ids, len(turn.ids)))

    with scripted(server, script, sample=sample, limits={"calls_per_turn": 2}, **more) as rollouts:
        rows = [row_of("parallel"), row_of("parallel", 1)]
        trainer = trainer_of(rollouts, rows, tmp_path, max_completion_length=1000)
        trainer.train()
    (found,) = trainer.returned
    check_rows(script, found, 4)
    assert found["rollout_end"] == ["stop"] * 2 + ["failure"] * 2
    assert found["rollout_reward"] == [3.0, 3.0, None, None]
    assert [any(mask) for mask in found["env_mask"]] == [True] * 2 + [bool(train_on)] * 2
    (warning,) = [each.getMessage() for each in caplog.records if each.name == "rollout_client.adapters.trl"]
    assert "2 of 4 rollouts did not complete (policy 2)" in warning
    assert found["rollout_error"][2] in warning


def test_arguments_of_the_chat_template_are_sent(server: str, tmp_path: Path) -> None:
    """The server renders. Other arguments there and here would be two prompts."""
    rows = [row_of("parallel")]
    for tokenizer in ("toy", Tokenizer("toy"), Tokenizer("toy", template_kwargs={"enable_thinking": False})):
        with scripted(server, Script(), tokenizer=tokenizer) as rollouts:
            trainer = trainer_of(rollouts, rows, tmp_path, chat_template_kwargs={"enable_thinking": False})
            trainer.train()
            with Client(server) as client:
                spec = client.get(trainer.returned[0]["rollout_uid"][0], view="full").spec
            assert json.loads(spec.tokenizer.template_kwargs_json) == {"enable_thinking": False}
    with (
        scripted(server, Script(), tokenizer=Tokenizer("toy", template_kwargs={"enable_thinking": True})) as rollouts,
        pytest.raises(ValueError, match="chat_template_kwargs of the trainer and the tokenizer of TrlRollouts differ"),
    ):
        trainer_of(rollouts, rows, tmp_path, chat_template_kwargs={"enable_thinking": False}).train()


def test_columns_of_other_rows_are_not_sent(server: str, tmp_path: Path) -> None:
    """`datasets` gives each message the fields of all rows, with None for those that it does not have."""
    first = row_of("parallel")
    second = {**row_of("parallel", 1)}
    second["prompt"] = [{"role": "system", "content": "Be brief.", "name": "host"}, *second["prompt"]]
    with scripted(server, Script()) as rollouts:
        trainer = trainer_of(rollouts, [first, second], tmp_path)
        trainer.train()
    assert trainer.returned[0]["rollout_reward"] == [3.0] * 4
    assert "Be brief." in TOKENIZER.decode(trainer.returned[0]["prompt_ids"][2])


def test_evaluation_has_a_group_size_and_rows_of_its_own(server: str, tmp_path: Path) -> None:
    script = Script()
    with scripted(server, script) as rollouts:
        trainer = trainer_of(
            rollouts,
            [row_of("parallel")],
            tmp_path,
            eval_dataset=Dataset.from_list([row_of("truncated", seed) for seed in (5, 6)]),
            num_generations_eval=1,
        )
        trainer.train()
        trainer.evaluate()
    assert [len(found["rollout_uid"]) for found in trainer.returned] == [2, 2]
    assert [found["rollout_truncated"] for found in trainer.returned] == [[False] * 2, [True] * 2]


def test_groups_that_are_not_whole_are_refused(server: str, tmp_path: Path) -> None:
    with scripted(server, Script()) as rollouts:
        trainer = trainer_of(rollouts, [row_of("parallel")], tmp_path)
        with pytest.raises(ValueError, match=r"prompts 0 to 1 of 2 are not 2 times .*per_device_train_batch_size"):
            rollouts([messages("parallel"), messages("fork")], trainer)
        with pytest.raises(ValueError, match=r"the prompts are texts.*make them messages"):
            rollouts(["Scenario parallel 0."] * 2, trainer)
        with pytest.raises(ValueError, match="prompts 2 to 3 of 3 are not 2 times"):
            rollouts([messages("parallel")] * 3, trainer)
        picture = [{"role": "user", "content": [{"type": "image", "image": object()}]}]
        with pytest.raises(ValueError, match="no JSON, such as an image"):
            rollouts([picture] * 2, trainer)


def test_wrong_options_are_refused(server: str, tmp_path: Path) -> None:
    def built_in(**options: Any) -> TrlRollouts:
        return TrlRollouts(server, agent="scenarios", tokenizer="toy", parse=parsers.hermes, **options)

    rows = [row_of("parallel")]
    for changes in ({"top_k": 5}, {"generation_kwargs": {"no_repeat_ngram_size": 3}}):
        with (
            built_in() as rollouts,
            pytest.raises(ValueError, match=f"not support {next(iter(changes))}; pass TrlRoll"),
        ):
            trainer_of(rollouts, rows, tmp_path, **changes).train()
    for sampling in ({"stop": ["x"]}, {"extra": {"seed": 1}}):
        with (
            built_in(sampling=sampling) as rollouts,
            pytest.raises(ValueError, match=rf"not support sampling\['{next(iter(sampling))}'\]; pass TrlRollouts"),
        ):
            trainer_of(rollouts, rows, tmp_path).train()
    with built_in() as rollouts:
        trainer = trainer_of(rollouts, rows, tmp_path)
        trainer.tools = [print]
        with pytest.raises(ValueError, match="give the tools to the server's agent"):
            rollouts([messages("parallel")] * 2, trainer)
    with scripted(server, Script()) as rollouts:
        trainer_of(rollouts, rows, tmp_path).train()
        with pytest.raises(RuntimeError, match="serves one GRPOTrainer"):
            trainer_of(rollouts, rows, tmp_path).train()


def test_a_sampler_that_raises_ends_the_step(server: str, tmp_path: Path) -> None:
    def sample(turns: Sequence[Turn], trainer: GRPOTrainer) -> list[Generated | Exception]:
        raise RuntimeError("out of memory")

    with scripted(server, Script(), sample=sample) as rollouts:
        trainer = trainer_of(rollouts, [row_of("parallel")], tmp_path)
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.train()
    with (
        scripted(server, Script(), sample=lambda turns, trainer: []) as rollouts,
        pytest.raises(ValueError, match="zip"),
    ):
        trainer_of(rollouts, [row_of("parallel")], tmp_path).train()


def test_a_cancelled_group(server: str, tmp_path: Path) -> None:
    """Rollouts that somebody cancels have rows with mask 0 and no reward; the other group trains."""
    script = Script()

    def sample(turns: Sequence[Turn], trainer: GRPOTrainer) -> list[Generated | Exception]:
        for group in {turn.group_id for turn in turns if turn.group_id.endswith(":1")}:
            threading.Timer(0.2, cancel, (group,)).start()  # soon after this batch; the agent then sleeps for an hour
        return [script.generate(turn) for turn in turns]

    def cancel(group: str) -> None:
        with Client(server) as client:
            client.cancel(group_id=group)

    with scripted(server, script, sample=sample) as rollouts:
        trainer = trainer_of(rollouts, [row_of("parallel"), row_of("cancelled")], tmp_path)
        trainer.train()
    (found,) = trainer.returned
    check_rows(script, found, 4)
    assert found["rollout_end"] == ["stop"] * 2 + ["cancellation"] * 2
    assert found["rollout_reward"] == [3.0, 3.0, None, None]
    assert [any(mask) for mask in found["env_mask"]] == [True, True, False, False]


def turn_of(ids: Sequence[int], **changes: Any) -> Turn:
    sampling = {name: changes.pop(name) for name in ("temperature", "top_p", "max_tokens", "stop") if name in changes}
    fields: dict[str, Any] = {"uid": "u", "rollout_id": "r", "group_id": "g", "index": 0, "segment_id": "0", "turn": 1}
    return Turn(**{**fields, **changes}, ids=ids, sampling=SamplingParams(**sampling))


def drawn(net: Any, turns: Sequence[Turn], keys: Sequence[str], **options: Any) -> list[Any]:
    return sample_batch(net, turns, keys, **{"end_ids": {END}, "pad_id": 0, "max_tokens": 8, **options})


def test_the_sampler_draws_from_the_distribution_of_the_model() -> None:
    """Each draw against a naive one: the whole prompt again for each token, without padding, cache or batch."""
    net = model(3, spread=0.3)  # no near ties, whose order would depend on rounding
    prompts = [
        encode(text) for text in ("Hello.", "A much longer prompt than the other one, for the padding.", "x", "y", "z")
    ]
    settings: list[dict[str, Any]] = [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.4},
        {"temperature": 0.0},
        {},
        {"top_p": 0.0},
    ]
    turns = [turn_of(ids, max_tokens=6 + at, **settings[at]) for at, ids in enumerate(prompts)]
    found = drawn(net, turns, list("abcde"))
    net.eval()
    for turn, each, key in zip(turns, found, "abcde", strict=True):
        chance, ids = random.Random(key), list(turn.ids)
        for token, logprob in zip(each.ids, each.logprobs, strict=True):
            with torch.no_grad():
                logits = net(torch.tensor([ids])).logits[0, -1].double()
            number, heat = chance.random(), 1.0 if turn.sampling.temperature is None else turn.sampling.temperature
            logs = torch.log_softmax(logits / (heat or 1.0), -1)
            assert logprob == pytest.approx(logs[token].item(), abs=1e-4)
            drawn_here = naive_draw(
                logs.exp().tolist(), number, 1.0 if turn.sampling.top_p is None else turn.sampling.top_p
            )
            assert token == (logs.argmax().item() if heat == 0 else drawn_here)
            ids.append(token)
        assert each.finish_reason == ("stop" if each.ids[-1] == END else "length")
        assert len(each.ids) == turn.sampling.max_tokens or each.ids[-1] == END


def naive_draw(probabilities: Sequence[float], number: float, top_p: float) -> int:
    kept: set[int] = set()
    for token in sorted(range(len(probabilities)), key=lambda each: -probabilities[each]):
        if kept and sum(probabilities[each] for each in kept) >= top_p:
            break
        kept.add(token)
    left = number * sum(probabilities[each] for each in kept)
    for token in sorted(kept):
        left -= probabilities[token]
        if left < 0:
            return token
    raise AssertionError("the number is not below 1")


def test_the_sampler_ends_and_repeats() -> None:
    net = model(1)
    net.train()
    turns = [turn_of(encode("Hello."), max_tokens=5), turn_of(encode("Hello."), max_tokens=1), turn_of([5, 6])]
    found = drawn(net, turns, ["a", "a", "b"])
    assert net.training
    assert [len(each.ids) for each in found] == [5, 1, 8]
    assert found[0].ids[0] == found[1].ids[0]
    assert drawn(net, turns, ["a", "a", "b"]) == found
    assert drawn(net, turns, ["c", "d", "e"]) != found
    every = range(len(TOKENIZER))
    assert [(len(each.ids), each.finish_reason) for each in drawn(net, turns, "abc", end_ids=every)] == [
        (1, "stop")
    ] * 3
    lengths = [len(each.ids) for each in drawn(net, [turn_of([5] * 1022), turn_of([5])], "ab")]
    assert lengths == [2, 8]  # at most 1024 positions


def test_a_row_that_has_ended_stays_within_learned_positions() -> None:
    """The first row ends at the last position of the model, and its column runs on beside the others."""
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    net = GPT2LMHeadModel(GPT2Config(vocab_size=len(TOKENIZER), bos_token_id=None, eos_token_id=END, **shape))
    long, short = turn_of([5] * 30), turn_of([7])
    together = drawn(net, [long, short], "ab", end_ids=())
    assert [len(each.ids) for each in together] == [2, 8]
    apart = [drawn(net, [turn], key, end_ids=())[0] for turn, key in ((long, "a"), (short, "b"))]
    assert [each.ids for each in together] == [each.ids for each in apart]


def test_the_sampler_refuses_what_it_cannot_do_for_each_turn() -> None:
    picture = TurnImage(None, None, "image/png", b"x")
    turns = [
        turn_of([5], stop=("x",)),
        turn_of([5], images=(picture,)),
        turn_of([5] * 1024),
        turn_of([5], max_tokens=1),
    ]
    found = drawn(model(), turns, "abcd")
    assert [type(each) for each in found] == [ValueError] * 3 + [Generated]
    assert ["sampling.stop" in str(found[0]), "images" in str(found[1]), "1024 positions" in str(found[2])] == [
        True
    ] * 3


def test_a_run_repeats_exactly(server: str, tmp_path: Path) -> None:
    """The model's own tokens: two runs with the same seed have equal rows and weights, and the logprobs are the model's."""
    runs = []
    for seed in (7, 7, 8):
        with TrlRollouts(
            server, agent="scenarios", tokenizer="toy", parse=parsers.hermes, limits={"turns": 3}
        ) as rollouts:
            rows = [row_of("random", number) for number in range(3)]
            trainer = trainer_of(
                rollouts,
                rows,
                tmp_path,
                num_generations=4,
                max_steps=2,
                max_completion_length=6,
                seed=seed,
                learning_rate=0.1,
            )
            before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
            trainer.train()
        names = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "rollout_reward")
        weights = list(trainer.model.state_dict().values())
        runs.append(([[found[name] for name in names] for found in trainer.returned], weights))
    assert runs[0][0] == runs[1][0] != runs[2][0]
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))
    net = model()
    net.load_state_dict(before)
    net.eval()
    prompts, completions, masks, logprobs, _ = runs[2][0][0]
    for prompt, ids, mask, given in zip(prompts, completions, masks, logprobs, strict=True):
        with torch.no_grad():
            logs = torch.log_softmax(net(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float(), -1)
        for at, own in enumerate(mask):
            assert given[at] == pytest.approx(logs[at, ids[at]].item() if own else 0.0, abs=1e-4)


PROGRAM = """
import sys, time
from pathlib import Path
from rollout_client.trainer import Generated
from tests.adapters import test_trl as t

server, directory = sys.argv[1:]

def sample(turns, trainer):
    if any(turn.turn == 2 for turn in turns):
        print(*{turn.uid for turn in turns}, flush=True)
        time.sleep(600)
    return [t.Script().generate(turn) for turn in turns]

rollouts = t.scripted(server, t.Script(), sample=sample)
t.trainer_of(rollouts, [t.row_of("parallel")], Path(directory), num_generations=4).train()
"""


@pytest.mark.heavy  # another process imports all frameworks
@pytest.mark.timeout(400)
def test_a_trainer_that_is_killed_in_a_step(server: str, tmp_path: Path) -> None:
    """Its rollouts end as failures of the trainer, and the next process works."""
    command = [sys.executable, "-c", PROGRAM, server, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        uids = process.stdout.readline().split()
        process.send_signal(signal.SIGKILL)
    assert len(uids) == 4
    with Client(server) as client:
        ended = [client.wait(uid, timeout=60).outcome for uid in uids]
    assert [failure_class_of(each) for each in ended] == ["trainer"] * 4
    script = Script()
    with scripted(server, script) as rollouts:
        trainer = trainer_of(rollouts, [row_of("parallel")], tmp_path, num_generations=4)
        trainer.train()
    assert trainer.returned[0]["rollout_reward"] == [3.0] * 4


class Fruit(enum.Enum):
    APPLE = "apple"
    PEAR = "pear"


@tool
async def put(fruit: Fruit, context: ToolContext, count: int = 1, notes: list[str] | None = None) -> str:
    """Put fruits into the basket.

    Args:
        fruit: what to put.
        count: how many,
            at least one.
    """
    basket = context.state.setdefault("basket", [])
    basket += [fruit.value] * count
    return f"{context.metadata['owner']}: {len(basket)}"


@tool
def look() -> dict[str, int]:
    """Look into the basket."""
    return {"size": 3}


def test_tools_as_an_environment_have_their_schemas() -> None:
    environment = tool_environment(put, look)()
    schema = get_json_schema(environment.put)["function"]
    assert schema == {
        "name": "put",
        "description": "Put fruits into the basket.",
        "parameters": {
            "type": "object",
            "properties": {
                "fruit": {"type": "string", "enum": ["apple", "pear"], "description": "what to put."},
                "count": {"type": "integer", "description": "how many, at least one."},
                "notes": {"type": "array", "items": {"type": "string"}, "description": "notes"},
            },
            "required": ["fruit"],
        },
    }
    assert get_json_schema(environment.look)["function"]["parameters"] == {"type": "object", "properties": {}}

    def named(name: str) -> Any:
        def act() -> str:
            """Act."""
            return ""

        act.__name__ = name
        return tool(act)

    for name in ("reset", "get_reward", "state", "metadata", "_hidden"):
        with pytest.raises(TypeError, match=f"'{name}' is reserved"):
            tool_environment(named(name))


def test_tools_as_an_environment_of_the_trainer(tmp_path: Path) -> None:
    """GRPOTrainer calls them. State and metadata belong to one rollout, and the model is told of a wrong argument."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = (Path(trl_file).parent / "chat_templates/qwen2_5.jinja").read_text()
    calls = [
        '<tool_call>\n{"name": "put", "arguments": {"fruit": "pear", "count": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "put", "arguments": {"fruit": "nut"}}\n</tool_call>',
        "Done.",
    ]
    seen: list[Row] = []

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            done = [tokenizer.decode(ids).count("</tool_response>") for ids in prompt_ids]
            return [[*encode(calls[each]), END] for each in done], None

    def reward(completions: Any, environments: Any, **_: Any) -> list[float]:
        seen.extend(
            {"completion": each, "state": one.state} for each, one in zip(completions, environments, strict=True)
        )
        return [float(len(one.state["basket"])) for one in environments]

    rows = [{"prompt": [{"role": "user", "content": "Go."}], "owner": name} for name in ("Ada", "Bo")]
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=500,
        max_steps=1,
        report_to="none",
        save_strategy="no",
        shuffle_dataset=False,
    )
    Scripted(
        model=model(),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        environment_factory=tool_environment(put, look),
    ).train()
    assert [each["state"] for each in seen] == [{"basket": ["pear", "pear"]}] * 4
    results = [[each["content"] for each in one["completion"] if each["role"] == "tool"] for one in seen]
    assert [first for first, _ in results] == ["Ada: 2", "Ada: 2", "Bo: 2", "Bo: 2"]
    assert all("fruit" in second and "apple" in second for _, second in results)


PAGE = (Path(__file__).resolve().parents[2] / "docs/adapters.md").read_text(encoding="utf-8")


def test_the_page(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets of the section on TRL, as written except for the addresses, the names of the model and the size of the run."""
    section = next(part for part in PAGE.split("\n## ") if part.startswith("TRL"))
    first, brief, second = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    model().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    changes = {
        "localhost:50051": server,
        'agent="calculator"': 'agent="scenarios"',
        'tokenizer="Qwen/Qwen3-8B"': 'tokenizer="toy"',
        'model="Qwen/Qwen3-8B"': 'model="model"',
        'GRPOConfig("out"': 'GRPOConfig("out", use_cpu=True, bf16=False, max_steps=1, report_to="none", save_strategy="no"',
        "max_completion_length=512": "max_completion_length=8",
    }
    for old, new in changes.items():
        assert old in first, old
        first = first.replace(old, new)
    found: dict[str, Any] = {}
    exec(first, found)
    assert found["trainer"].state.global_step == 1
    exec(brief, found)
    columns = {"completion_ids": [[5, 6], [5]], "rollout_untrainable": ["", "cancelled"], "rollout_end": ["stop"] * 2}
    assert found["brief"](**columns) == [-2 / 512, None]
    exec(second, found)
    assert get_json_schema(found["environment"]().price)["function"]["name"] == "price"
