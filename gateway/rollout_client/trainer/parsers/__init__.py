"""Parsers of what models write when they call tools: text to `ParsedCompletion`.

A call that cannot be read raises nothing: its text stays content, so that the model sees what it wrote. Arguments are kept as
they were written, character by character.
"""

from __future__ import annotations

from rollout_client.trainer.completion import plain
from rollout_client.trainer.parsers.hermes import hermes, thinking
from rollout_client.trainer.parsers.llama import llama
from rollout_client.trainer.parsers.mistral import mistral

__all__ = ["hermes", "llama", "mistral", "plain", "thinking"]
