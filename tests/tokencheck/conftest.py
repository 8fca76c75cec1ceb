"""The toy tokenizer with modified templates, and their check."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.tokencheck.check import Subject, check
from rollout_server.tokencheck.conversation import CheckConversation
from rollout_server.tokencheck.report import TemplateReport

from tests.support.tokenizers import real_tokenizer, tokenizer_of

TOY_TEMPLATE = (TOY_TOKENIZER / "chat_template.jinja").read_text(encoding="utf-8")


def spoilt(*changes: tuple[str, str]) -> str:
    """The toy template with texts replaced, each of which must occur."""
    text = TOY_TEMPLATE
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


def checked(
    directory: Path, template: str | None = None, more: Sequence[CheckConversation] = (), **template_kwargs: Any
) -> TemplateReport:
    return check(
        Subject(
            tokenizer_of(directory, template), directory.name, "planted" if template else "its own", template_kwargs
        ),
        more,
    )


@pytest.fixture(scope="session")
def verdicts() -> Callable[[str], TemplateReport]:
    """The verdict on a family; each is computed once."""
    found: dict[str, TemplateReport] = {}

    def of(name: str) -> TemplateReport:
        if name not in found:
            found[name] = checked(TOY_TOKENIZER if name == "toy" else real_tokenizer(name))
        return found[name]

    return of
