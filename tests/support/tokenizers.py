"""Tokenizers for tests. Each is read once per process, because reading takes almost a second and 100 MB.

The tokenizers of released models are too large for the repository. They are read from `../shared/tokenizers`, beside the
clone. Tests that need one are skipped with that reason if it does not exist.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from transformers import AutoTokenizer

REAL_TOKENIZERS = Path(__file__).resolve().parents[3] / "shared" / "tokenizers"
VECTORS = sorted((REAL_TOKENIZERS / "vectors").glob("*.jsonl")) or [
    REAL_TOKENIZERS / "vectors" / "qwen2.5-instruct.jsonl"
]
"""Golden turn boundaries of real templates."""

FAMILIES = (
    "toy",
    "qwen2.5",
    "qwen3-instruct",
    "qwen3",
    "llama3",
    "deepseek-v3",
    "gpt-oss",
    "mistral-small-3.2",
    "phi-3.5",
)
"""The toy tokenizer, and the real ones, each with the template that is tested."""


def needs_real(name: str) -> pytest.MarkDecorator:
    """A mark for tests of one real tokenizer."""
    return pytest.mark.skipif(not (REAL_TOKENIZERS / name).exists(), reason=_missing(name))


def real_tokenizer(path: str) -> Path:
    """The directory of a real tokenizer, or a file next to them. Skips the test if it does not exist."""
    found = REAL_TOKENIZERS / path
    if not found.exists():
        pytest.skip(_missing(path))
    return found


def _missing(path: str) -> str:
    return f"needs the large tokenizer data ../shared/tokenizers/{path}, which is not in the repository"


def directory(family: str) -> Path:
    """The directory of a family's tokenizer. `qwen3-instruct` is qwen3 with another template."""
    if family == "toy":
        return TOY_TOKENIZER
    return real_tokenizer("qwen3" if family == "qwen3-instruct" else family)


def tokenizer_of(directory: Path, template: str | None = None) -> Any:
    """A tokenizer with its own chat template, or the directory's, over a shared vocabulary."""
    found = copy.copy(_read(directory))
    found.chat_template = template or found.chat_template
    return found


@cache
def _read(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)
