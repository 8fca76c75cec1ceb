"""Tool-call parsers for model families: completion text to `ParsedCompletion`.

A malformed call raises no exception: its text stays in `content`, where the model sees it in the next turn. Arguments keep the
exact characters that the model generated.
"""

from __future__ import annotations

from rollout_client.trainer.completion import plain
from rollout_client.trainer.parsers.hermes import hermes, thinking
from rollout_client.trainer.parsers.llama import llama
from rollout_client.trainer.parsers.mistral import mistral

__all__ = ["hermes", "llama", "mistral", "plain", "thinking"]
