"""The chat templates of the `trl` wheel, with the toy tokenizer's vocabulary.

`make` installs the wheel, without its dependencies, in a separate environment; the templates are read from there.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from transformers import AutoTokenizer

ENVIRONMENT: Final = Path(__file__).resolve().parents[2] / ".venv-templates"
_CONTROL: Final = re.compile(
    r"<[|｜][^\s<>{}'\"]+?>|<[a-z_]+\|>|<(?:start|end)_of_[a-z_]+>|\[/?[A-Z_]{3,}\]|</?s>|<(?:bos|eos)>"
)
"""Control tokens in a template. Tags such as `<think>` are excluded: they are in the toy vocabulary already, or plain text."""

_INSIDE: Final = re.compile("tool.call|RESPONSE")
"""Control tokens inside completions. No completion ends with one, so they are not special: the judge takes special tokens for
ends.
"""


def trl_templates() -> list[Any]:
    """One parameter per template; a single skipped one if the environment does not exist."""
    found = sorted(ENVIRONMENT.glob("lib/python*/site-packages/trl/chat_templates/*.jinja"))
    missing = pytest.mark.skip(reason="no .venv-templates: `make .venv-templates/.ready` makes it")
    return [pytest.param(path, id=path.stem) for path in found] or [pytest.param(None, id="trl", marks=missing)]


def trl_tokenizer(path: Path) -> Any:
    """The toy tokenizer with the template, and with the control tokens that the template writes."""
    template = path.read_text(encoding="utf-8")
    tokenizer = _with_control_tokens(tuple(sorted(set(_CONTROL.findall(template)))))
    made = copy.copy(tokenizer)
    made.chat_template = template
    return made


@cache
def _with_control_tokens(tokens: tuple[str, ...]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(TOY_TOKENIZER, local_files_only=True)
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    inside = [token for token in tokens if _INSIDE.search(token)]
    tokenizer.add_tokens(inside)
    tokenizer.add_tokens([token for token in tokens if token not in inside], special_tokens=True)
    return tokenizer
