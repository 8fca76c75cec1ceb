"""Trainer side of a rollout server, for any training loop. It has no dependencies beyond those of `rollout_client`.

`Trainer` takes a function that generates from token ids, and yields groups of finished rollouts with their training samples. The
server applies the chat template and sends only new token ids. Both sides keep a ledger of every token and its author. They
compare digests in every turn, and the samples at the end.

    async with Trainer("localhost:50051", generate=generate, decode=decode, parse=parsers.hermes) as trainer:
        async for group in trainer.rollouts(prompts, n=8, tokenizer="Qwen/Qwen3-8B"):
            train_on([sample for rollout in group.rollouts for sample in rollout.own])

`SyncTrainer` is the same for training loops without asyncio.
"""

from __future__ import annotations

from rollout_client.samples import SampleSpan, TrainingSample
from rollout_client.trainer import parsers
from rollout_client.trainer.batches import GenerateBatch
from rollout_client.trainer.completion import Parse, ParsedCompletion, ToolCall
from rollout_client.trainer.generation import (
    Decode,
    Generate,
    Generated,
    SamplingParams,
    TryAgainLater,
    Turn,
    TurnImage,
)
from rollout_client.trainer.prompts import Render
from rollout_client.trainer.results import Finished, Group, Prompt, PromptLike, RecordMismatch
from rollout_client.trainer.server import Serving
from rollout_client.trainer.sync_trainer import SyncTrainer
from rollout_client.trainer.trainer import ModelFields, RolloutFields, Trainer
from rollout_client.trainer.verify import Mismatch

__all__ = [
    "Decode",
    "Finished",
    "Generate",
    "GenerateBatch",
    "Generated",
    "Group",
    "Mismatch",
    "ModelFields",
    "Parse",
    "ParsedCompletion",
    "Prompt",
    "PromptLike",
    "RecordMismatch",
    "Render",
    "RolloutFields",
    "SampleSpan",
    "SamplingParams",
    "Serving",
    "SyncTrainer",
    "ToolCall",
    "Trainer",
    "TrainingSample",
    "TryAgainLater",
    "Turn",
    "TurnImage",
    "parsers",
]
