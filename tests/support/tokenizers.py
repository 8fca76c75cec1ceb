"""Tokenizers that are read once in a process: each takes the better part of a second, and a hundred megabytes."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def tokenizer_of(directory: Path, template: str | None = None) -> Any:
    """A tokenizer with a chat template of its own, or that of the directory, over a vocabulary that is shared."""
    found = copy.copy(_read(directory))
    found.chat_template = template or found.chat_template
    return found


@cache
def _read(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)
