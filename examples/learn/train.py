"""One run: GRPO of TRL on rollouts of the server, with a check of every token that trains."""

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout_func is experimental in TRL, and says so on each start

import torch
from datasets import Dataset
from rollout_client.adapters.sampling import sample_batch
from rollout_client.adapters.trl import TrlRollouts, draw_key
from rollout_client.trainer import Generated, Turn, parsers
from tiny_model import PAIRS
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

MASKS = ("right", "late", "early", "ones")
Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Prompt ids, completion ids and the mask of the completion."""


def question(a: int, b: int) -> list[dict[str, str]]:
    """Return the prompt of a rollout."""
    return [{"role": "user", "content": f"What is {a} plus {b}?"}]


def moved(mask: Sequence[int], kind: str) -> list[int]:
    """Return the mask as it is ("right"), one token late or early, or with ones only."""
    if kind == "ones":
        return [1] * len(mask)
    return {"right": [*mask], "late": [0, *mask[:-1]], "early": [*mask[1:], 0]}[kind]


@dataclass
class TokenCheck:
    """Compares the rows of a step with what was sampled, and what TRL trains with the rows.

    Args:
        kind: one of `MASKS`: the mask with which the rows train.
    """

    kind: str
    rows: int = 0
    environment_tokens: int = 0
    batches: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    _sampled: dict[str, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)
    _given: Counter[Row] = field(default_factory=Counter)

    def sampled(self, turns: Sequence[Turn], results: Sequence[Generated]) -> None:
        """Record completions: where each begins, and its ids."""
        self.batches += 1
        for turn, generated in zip(turns, results, strict=True):
            self._sampled.setdefault(turn.uid, []).append((len(turn.ids), tuple(generated.ids)))

    def take(self, output: Any) -> None:
        """Check that each row's mask is 1 exactly for the sampled tokens, and replace it by the mask of `kind`."""
        for uid, prompt, completion, mask in zip(
            *(output[key] for key in ("rollout_uid", "prompt_ids", "completion_ids", "env_mask")), strict=True
        ):
            ids = [*prompt, *completion]
            expected = [0] * len(ids)
            for start, sampled in self._sampled.pop(uid):
                assert ids[start : start + len(sampled)] == [*sampled], f"rollout {uid}: token {start}: not as sampled"
                expected[start : start + len(sampled)] = [1] * len(sampled)
            assert expected == [0] * len(prompt) + mask, f"rollout {uid}: the mask differs from what was sampled"
            self.rows += 1
            self.environment_tokens += mask.count(0)
        assert not self._sampled, f"no row for the rollouts {sorted(self._sampled)}"
        self.digest.update(
            repr([output[key] for key in ("prompt_ids", "completion_ids", "logprobs", "rollout_reward")]).encode()
        )
        output["env_mask"] = [moved(mask, self.kind) for mask in output["env_mask"]]
        columns = zip(output["prompt_ids"], output["completion_ids"], output["env_mask"], strict=True)
        self._given = Counter(tuple(map(tuple, row)) for row in columns)

    def trained(self, inputs: Any) -> None:
        """Check that the tensors of the loss have the rows that were given, token by token, and no others."""
        found = Counter[Row]()
        columns = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
        for prompt, there, completion, real, mask in zip(*(inputs[key].tolist() for key in columns), strict=True):
            length = sum(real)
            ids = [each for each, one in zip(prompt, there, strict=True) if one]
            found[tuple(ids), tuple(completion[:length]), tuple(mask[:length])] += 1
        assert found == self._given, "TRL trains other rows than it was given"


class CheckedTrainer(GRPOTrainer):
    """A GRPOTrainer that checks the inputs of its loss."""

    check: TokenCheck

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **more: Any) -> Any:
        self.check.trained(inputs)
        return super().compute_loss(model, inputs, *arguments, **more)


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Args:
        seed: seed of the warm start, of the order of prompts and of every sampled token.
        kind: one of `MASKS`.
        steps: optimizer steps, each on `groups` prompts with `n` rollouts.
        rate: learning rate.
    """

    seed: int
    kind: str
    steps: int
    groups: int = 8
    n: int = 8
    rate: float = 1e-3


def config(settings: Settings) -> GRPOConfig:
    """Return TRL's settings of a run: those of its defaults that fit a GPU or a large model are replaced."""
    return GRPOConfig(
        output_dir="build/learn",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=settings.groups * settings.n,
        num_generations=settings.n,
        max_completion_length=32,  # of one completion
        learning_rate=settings.rate,
        lr_scheduler_type="constant",
        max_steps=settings.steps,
        seed=settings.seed,
        temperature=1.0,
        beta=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        activation_checkpointing=False,
        logging_strategy="no",
    )


def grpo(
    server: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    on_step: Callable[[int, float], None],
) -> dict[str, Any]:
    """Train a model and return the mean reward of each step, and counts and a digest of what was sampled.

    Args:
        server: address of the rollout server.
        model: the model; it is changed.
        tokenizer: its tokenizer.
        settings: the settings of the run.
        on_step: called with the number of each step, from 0, and its mean reward.

    Raises AssertionError if a row's mask differs from the ledger, or if TRL trains other tokens than those of the masks.
    """
    torch.manual_seed(settings.seed)
    pairs = random.Random(f"prompts {settings.seed}").sample(PAIRS, len(PAIRS))
    data = Dataset.from_list([{"prompt": question(a, b), "ground_truth": a + b} for a, b in pairs])
    check, rewards = TokenCheck(settings.kind), list[float]()

    def reward(**columns: Any) -> list[float]:
        found = TrlRollouts.reward(**columns)
        rewards.append(sum(found) / len(found))
        on_step(len(rewards) - 1, rewards[-1])
        return found

    def sample(turns: Sequence[Turn], trainer: GRPOTrainer) -> list[Generated | Exception]:
        """Sample as TrlRollouts does by default, and record what was sampled."""
        keys = [draw_key(turn, settings.seed) for turn in turns]
        ends, pad = trainer.eos_token_ids, tokenizer.pad_token_id
        results = sample_batch(
            trainer.model, turns, keys, end_ids=ends, pad_id=pad, max_tokens=trainer.max_completion_length
        )
        check.sampled(turns, results)
        return results

    with TrlRollouts(server, agent="adder", tokenizer="toy", parse=parsers.hermes, sample=sample) as rollouts:

        def rollout_func(prompts: Any, trainer: Any) -> Any:
            output = rollouts(prompts, trainer)
            check.take(output)
            return output

        trainer = CheckedTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            rollout_func=rollout_func,
            args=config(settings),
            train_dataset=data,
        )
        trainer.check = check
        trainer.remove_callback(PrinterCallback)  # it prints a dictionary at the end
        trainer.train()
    for weights in model.state_dict().values():
        check.digest.update(weights.numpy().tobytes())
    return {
        "reward": [round(each, 4) for each in rewards],
        "rows": check.rows,
        "environment_tokens": check.environment_tokens,
        "batches": check.batches,
        "digest": check.digest.hexdigest()[:16],
    }
