"""Every available tokenizer and chat template, discovered and not listed."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.exact.conversations import TURNS
from tests.support.tokenizers import REAL_TOKENIZERS, needs_real, tokenizer_of

EVERYTHING = os.environ.get("ROLLOUT_EXACT") == "all"
"""Run every conversation with every way to render, which takes some minutes."""


@dataclass(frozen=True, slots=True)
class Family:
    """A tokenizer with one of its templates; `template` None is the tokenizer's own."""

    directory: Path
    template: Path | None = None

    @property
    def name(self) -> str:
        """Name for test ids."""
        own = "toy" if self.directory == TOY_TOKENIZER else self.directory.name
        return own if self.template is None else f"{own}/{self.template.stem}"

    @property
    def turns(self) -> int:
        """The turns of a conversation: fewer for large tokenizers, because judging all of them takes the square of their number."""
        return TURNS if EVERYTHING or self.directory == TOY_TOKENIZER else TURNS // 3

    def tokenizer(self) -> Any:
        """The tokenizer with this template."""
        return tokenizer_of(self.directory, self.template and self.template.read_text(encoding="utf-8"))

    def laid_out(self, at: Path) -> Path:
        """A directory that `AutoTokenizer` loads with this template: the tokenizer's own, or a new one in `at`."""
        if self.template is None:
            return self.directory
        for path in self.directory.iterdir():
            if path.is_file() and path.name != "chat_template.jinja":
                (at / path.name).symlink_to(path)
        shutil.copy(self.template, at / "chat_template.jinja")
        return at


def families() -> list[Any]:
    """One parameter per family; a skipped one if the shared test data is missing."""
    found = [Family(TOY_TOKENIZER)]
    for own in sorted(REAL_TOKENIZERS.glob("*/chat_template.jinja")):
        found.append(Family(own.parent))
        found += [Family(own.parent, path) for path in sorted(own.parent.glob("templates/*.jinja"))]
    given = [pytest.param(family, id=family.name) for family in found]
    if len(found) == 1:
        given.append(pytest.param(None, id="real", marks=needs_real("")))
    return given
