"""A trainer on top of a rollout server, small enough to sit in any training loop.

Give `Trainer` a function that generates from token ids, and iterate over groups of finished rollouts with their training samples.
No template is rendered here and no history is sent twice: the server sends the ids that are new, both sides keep a record of
every token and its author, and compare digests in each turn and the samples at the end.

Beside what `rollout_client` needs it needs nothing.
"""

from __future__ import annotations

from rollout_client.samples import SampleSpan, TrainingSample
from rollout_client.trainer import parsers
from rollout_client.trainer.completion import Parse, ParsedCompletion, ToolCall
from rollout_client.trainer.generation import Decode, Generate, Generated, SamplingParams, TryAgainLater
from rollout_client.trainer.prompts import Render
from rollout_client.trainer.results import Finished, Group, Prompt, PromptLike, RecordMismatch
from rollout_client.trainer.server import Serving
from rollout_client.trainer.trainer import ModelFields, RolloutFields, Trainer
from rollout_client.trainer.verify import Mismatch

__all__ = [
    "Decode",
    "Finished",
    "Generate",
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
    "ToolCall",
    "Trainer",
    "TrainingSample",
    "TryAgainLater",
    "parsers",
]
