"""A tokenizer with its chat template, as it was loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from threading import Lock
from typing import Protocol, TypeAlias, TypeVar

from rollout_server.core.ledger import Tokens, pack_tokens
from rollout_server.core.message import JSON
from rollout_server.core.outcome import Category, Failure
from rollout_server.edge.tokens.probe import Probed, probe
from rollout_server.runtime.port import Failed

Fields: TypeAlias = Mapping[str, JSON]
"""A message, parsed."""

_T = TypeVar("_T")
_LONGEST_REASON = 300


class AddedToken(Protocol):
    """A token that was added to a vocabulary by name."""

    content: str
    special: bool


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    eos_token_id: int | None
    is_fast: bool
    chat_template: str | Mapping[str, str] | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Added tokens by id."""

    def get_chat_template(self, chat_template: str | None = None, tools: list[Fields] | None = None) -> str:
        """The template that is used with these tools."""

    def apply_chat_template(self, conversation: list[Fields], **options: object) -> str:
        """The conversation as text, if `tokenize` is False."""

    def encode(self, text: str, **options: object) -> list[int]:
        """The ids of a text."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds the messages of a rollout and stays the same in all its turns.

    Args:
        tools: as OpenAI writes function tools; None and an empty list are not the same to every template.
        template_kwargs: what the template is given besides.
        date: what the template takes for now.
    """

    tools: Sequence[Fields] | None = None
    template_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    date: datetime = field(default_factory=datetime.now)


class LoadedTokenizer:
    """Turns conversations into text and text into ids. Shared by rollouts and threads.

    `text` and `encode` take milliseconds to seconds of a core: on the event loop they are called through `run`. The tokenizer
    must not be given to others, who could set truncation on it.
    """

    def __init__(self, name: str, tokenizer: ChatTokenizer, executor: Executor) -> None:
        """Looks at what the template does with answers, by rendering a few."""
        self.name = name
        self._tokenizer = tokenizer
        self._executor = executor
        # The Rust tokenizers may be shared by threads; nothing is known about those in Python.
        self._turn: AbstractContextManager[object] = nullcontext() if tokenizer.is_fast else Lock()
        self._special = {
            index: added.content for index, added in tokenizer.added_tokens_decoder.items() if added.special
        }
        self.probed: Probed = probe(lambda messages: self.text(messages, Frame()), self._special)
        # A truncation that was saved with a tokenizer is switched off by its first use: here, before it is shared.
        self.encode("")

    async def run(self, work: Callable[..., _T], *arguments: object) -> _T:
        """Calls `work` in a thread of the tokenizers. A caller who is cancelled leaves at once; the work is finished unseen."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    def text(self, messages: Sequence[Fields], frame: Frame, *, generation_prompt: bool = True) -> str:
        """The conversation as its template writes it. Raises `Failed` with the template's own reason where it refuses.

        Templates run in a sandbox that lets them change nothing they are given, and transformers 5 hands them a copy.
        """
        tools = None if frame.tools is None else list(frame.tools)
        options = {**frame.template_kwargs, "tools": tools, "add_generation_prompt": generation_prompt}
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
            if "strftime_now" in template:
                options |= {"chat_template": _DATED + template, _DATES: _dates(template, frame.date)}
            return self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # templates are foreign code: whatever one raises is a refusal
            reason = " ".join(str(error).split()) or type(error).__name__
            text = f"the chat template of tokenizer {self.name!r} refuses the conversation: {reason}"
            raise Failed(Failure(Category.TOKENIZER, text[:_LONGEST_REASON])) from error

    def encode(self, text: str) -> Tokens:
        """The ids of a text as it stands: added tokens are recognised, none are put in front, nothing is cut.

        Raises `Failed` for halves of surrogate pairs, which no tokenizer can encode.
        """
        try:
            with self._turn:
                return pack_tokens(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
        except (TypeError, UnicodeEncodeError) as error:
            reason = "the conversation holds half of a surrogate pair (\\ud800 to \\udfff), which has no tokens"
            raise Failed(Failure(Category.VALIDATION, reason)) from error

    def ends_answer(self, token_id: int, *, cut: bool) -> bool:
        """Whether an answer that ends with this token is closed.

        The token that the template writes closes it, and so does any other special token (gpt-oss ends final answers with
        one that the template then replaces), unless the answer was cut by length and so ends anywhere.
        """
        if token_id == self._tokenizer.eos_token_id or token_id in self.probed.stop_ids:
            return True
        return token_id in self._special and not cut


# transformers gives templates a clock of its own and turns functions passed to templates into text. So a macro of that name
# goes in front of the template. The empty expression at its end keeps a line break with which the template may begin.
_DATES = "rollout_dates"
_DATED = (
    "{%- macro strftime_now(format) -%}{%- set made = namespace(text=format) -%}"
    "{%- for directive, value in "
    + _DATES
    + " -%}{%- set made.text = made.text.replace(directive, value) -%}{%- endfor -%}"
    "{{- made.text -}}{%- endmacro -%}{{- '' }}"
)
_DIRECTIVES = tuple(f"%{flag}{letter}" for flag in ("-", "") for letter in "aAwdbBmyYHIpMSfzZjUWcxXGuVeDFTR")


def _dates(template: str, date: datetime) -> list[tuple[str, str]]:
    """Replacements that, one after the other, do what strftime does with the directives of this template."""
    used = (directive for directive in _DIRECTIVES if directive in template)
    return [("%%", "\0"), *((directive, date.strftime(directive)) for directive in used), ("\0", "%")]
