"""A tiny Qwen2, its demonstrations, and its warm start. Nothing here knows TRL or rollouts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

PAIRS = [(a, b) for a in range(10) for b in range(10)]
Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Pieces:
    """Token ids of the pieces of a rollout.

    Args:
        prompts: for each pair of numbers, the prompt.
        calls: for each pair, the tool call and its stop token.
        results: for each pair, the tokens between the call and the last message: the tool's result.
        numbers: for each sum, the last message and its stop token.
        pad: id for padding.
    """

    prompts: dict[Pair, Sequence[int]]
    calls: dict[Pair, Sequence[int]]
    results: dict[Pair, Sequence[int]]
    numbers: dict[int, Sequence[int]]
    pad: int


@dataclass(frozen=True)
class Demonstration:
    """One rollout to imitate: token ids, and a mask that is 1 for the tokens to imitate."""

    ids: list[int]
    mask: list[int]


def new_model(seed: int, vocabulary: int) -> Qwen2ForCausalLM:
    """Return a new model with two layers. With the toy tokenizer it has 134,000 parameters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def demonstration(pieces: Pieces, pair: Pair, called: Pair, number: int) -> Demonstration:
    """Return the rollout that calls the tool with `called` and ends with `number`. It is right if they fit `pair`."""
    parts = (
        (pieces.prompts[pair], 0),
        (pieces.calls[called], 1),
        (pieces.results[called], 0),
        (pieces.numbers[number], 1),
    )
    return Demonstration([each for ids, _ in parts for each in ids], [mask for ids, mask in parts for _ in ids])


def random_demonstration(pieces: Pieces, rng: random.Random, right: float) -> Demonstration:
    """Return a demonstration whose call and last number are each right with probability `right`, and random otherwise."""
    pair = rng.choice(PAIRS)
    called = pair if rng.random() < right else rng.choice(PAIRS)
    number = sum(called) if rng.random() < right else rng.randrange(19)
    return demonstration(pieces, pair, called, number)


def token_logprobs(
    model: Qwen2ForCausalLM, rows: Sequence[Demonstration], pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprob of each token from the first one with mask 1 on, and the mask, both of shape (rows, tokens)."""
    first, longest = min(row.mask.index(1) for row in rows), max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + [pad] * (longest - len(row.ids)) for row in rows])
    mask = torch.tensor([row.mask + [0] * (longest - len(row.mask)) for row in rows])
    logits = model(ids, logits_to_keep=longest - first + 1).logits[:, :-1].float()
    return -functional.cross_entropy(logits.transpose(1, 2), ids[:, first:], reduction="none"), mask[:, first:]


@torch.no_grad()
def expected_reward(model: Qwen2ForCausalLM, pieces: Pieces) -> float:
    """Return the probability of the right call and the right number, averaged over all pairs. Nothing is sampled."""
    rows = [demonstration(pieces, pair, pair, sum(pair)) for pair in PAIRS]
    logprobs, mask = token_logprobs(model, rows, pieces.pad)
    return (logprobs * mask).sum(1).exp().mean().item()


@dataclass(frozen=True)
class Phase:
    """A phase of the warm start.

    Args:
        name: what its demonstrations are.
        right: probability that a call, and a last number, are right.
        rate: learning rate.
        every: number of steps after which the expected reward is computed.
        reached: whether the phase ends at an expected reward.
    """

    name: str
    right: float
    rate: float
    every: int
    reached: Callable[[float], bool]


PHASES = (
    Phase("right", 1.0, 6e-3, 20, lambda reward: reward >= 0.9),
    Phase("noisy", 0.4, 3e-4, 5, lambda reward: reward <= 0.12),
)
QUICK = (Phase("few right", 1.0, 6e-3, 80, lambda reward: True),)
"""Enough to call the tool, for tests."""


def warm_start(seed: int, vocabulary: int, pieces: Pieces, phases: Sequence[Phase]) -> Qwen2ForCausalLM:
    """Return a new model after the phases.

    After `PHASES` it has learned the task and lost most of it again, so that RL has a skill to recover: first it imitates right
    demonstrations until it copies digits, then noisy ones until about one rollout of eight is right. The form of its tool calls
    stays right.
    """
    model, rng = new_model(seed, vocabulary), random.Random(f"demonstrations {seed}")
    for phase in phases:
        optimizer = torch.optim.AdamW(model.parameters(), lr=phase.rate, weight_decay=0.0, betas=(0.9, 0.98))
        for step in range(1, 2001):
            for group in optimizer.param_groups:
                group["lr"] = phase.rate * min(1.0, step / 20)
            rows = [random_demonstration(pieces, rng, phase.right) for _ in range(16)]
            logprobs, mask = token_logprobs(model, rows, pieces.pad)
            loss = -(logprobs * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 100 == 0:
                print(f"{step} batches of {phase.name} demonstrations: loss {loss.item():.2f}", flush=True)
            if step % phase.every == 0 and phase.reached(reward := expected_reward(model, pieces)):
                print(f"{step} batches of {phase.name} demonstrations: expected reward {reward:.2f}", flush=True)
                break
        else:
            raise RuntimeError(f"seed {seed}: the warm start fails with {phase.name} demonstrations; take another seed")
    return model
