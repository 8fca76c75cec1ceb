"""A trainer whose chat template rewrites the history, so that prompts drift."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollout_server.testing.script import Script
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer


@asynccontextmanager
async def rewriting(directory: Path, script: Script) -> AsyncIterator[StrictTrainer]:
    """A trainer whose template drops the thinking of all completions but the last."""
    shutil.copytree(TOY_TOKENIZER, directory / "model")
    template = directory / "model" / "chat_template.jinja"
    text = template.read_text()
    assert text.count("{%- if thought -%}") == 1
    template.write_text(text.replace("{%- if thought -%}", "{%- if thought and loop.last -%}"))
    async with StrictTrainer(directory / "model", script=script) as trainer:
        yield trainer
