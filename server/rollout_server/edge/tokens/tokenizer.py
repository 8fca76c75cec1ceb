"""A tokenizer with its chat template, as it was loaded."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from threading import Lock
from typing import Protocol, TypeVar

from rollout_server.core.ledger import Tokens, pack_tokens
from rollout_server.core.message import JSON
from rollout_server.core.outcome import Category, Failure
from rollout_server.edge.tokens.chat_template import Options, Templated, Templates
from rollout_server.edge.tokens.encoding import AddedToken, Encoded, GrowingEncoder, composes
from rollout_server.edge.tokens.rendering_form import Fields
from rollout_server.edge.tokens.template_probe import TOOL, TemplateTraits, probe
from rollout_server.runtime.errors import RolloutFailed

_T = TypeVar("_T")
_LONGEST_REASON = 300
_SWITCHES = 64


class ChatTokenizer(Templated, Protocol):
    """The part of a transformers tokenizer that is used here."""

    eos_token_id: int | None
    is_fast: bool
    chat_template: str | Mapping[str, str] | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Added tokens by id."""

    def __len__(self) -> int:
        """How many tokens there are, added ones included."""

    def encode(self, text: str, **options: object) -> list[int]:
        """The ids of a text."""

    def decode(self, token_ids: list[int], **options: object) -> str:
        """The text of ids."""


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

    `text`, `encode` and `grow` take milliseconds to seconds of a core: on the event loop they are called through `run`. The
    tokenizer must not be given to others, who could set truncation on it.
    """

    def __init__(self, name: str, tokenizer: ChatTokenizer, executor: Executor, ends: Sequence[int] = ()) -> None:
        """Looks at what the template does with answers, by rendering a few.

        `ends` are the ids with which the model's generation config says that answers end, besides the tokenizer's `eos_token`.
        """
        self.name = name
        self._tokenizer = tokenizer
        self._executor = executor
        # The Rust tokenizers may be shared by threads; nothing is known about those in Python.
        self._turn: AbstractContextManager[object] = nullcontext() if tokenizer.is_fast else Lock()
        added = tokenizer.added_tokens_decoder
        self._special = {index: token.content for index, token in added.items() if token.special}
        # A truncation that was saved with a tokenizer is switched off by its first use: here, before it is shared.
        self.encode("")
        self._templates = Templates(tokenizer)
        self._eos = tokenizer.eos_token_id
        self._ends = frozenset(ends)
        self.vocabulary = max(len(tokenizer), max(added, default=-1) + 1)
        """How many ids there are: all tokens have smaller ones."""
        self.literals = self._templates.literals(_texts(tokenizer.chat_template))
        self.probed = self._probed({})
        self._switched: dict[str, LoadedTokenizer] = {}  # the last used is last
        self._switching = Lock()
        self._growing = self._make_growing(added)

    def switched(self, template_kwargs: Mapping[str, JSON]) -> LoadedTokenizer:
        """The same tokenizer, looked at anew with these switches of its template: they may change how answers are closed."""
        if not template_kwargs:
            return self
        key = json.dumps(template_kwargs, sort_keys=True)
        with self._switching:
            known = self._switched.pop(key, None)
        if known is None:
            known = copy.copy(self)
            known._templates = copy.copy(self._templates)
            known.probed = known._probed(template_kwargs)
        with self._switching:
            self._switched[key] = known
            if len(self._switched) > _SWITCHES:
                del self._switched[next(iter(self._switched))]
        return known

    async def run(self, work: Callable[..., _T], *arguments: object) -> _T:
        """Calls `work` in a thread of the tokenizers. A caller who is cancelled leaves at once; the work is finished unseen."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    def text(self, messages: Sequence[Fields], frame: Frame, *, generation_prompt: bool = True) -> str:
        """The conversation as its template writes it. Raises `RolloutFailed` with the template's own reason where it refuses."""
        return self._rendered(self._templates.text, messages, frame, generation_prompt)

    def encode(self, text: str) -> Tokens:
        """The ids of a text as it stands: added tokens are recognised, none are put in front, nothing is cut.

        Raises `RolloutFailed` for halves of surrogate pairs, which no tokenizer can encode.
        """
        with self._turn, _surrogates_refused():
            return pack_tokens(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def grow(self, before: Encoded, text: str) -> Encoded:
        """The ids of a text that shares much with one encoded before. Raises `RolloutFailed` as `encode` does."""
        if self._growing is None:
            return before if before.text == text else Encoded(text, self.encode(text))
        with _surrogates_refused():
            return self._growing.grown(before, text)

    def decode(self, ids: Tokens) -> str:
        """The text of ids, for people."""
        with self._turn:
            return self._tokenizer.decode(list(ids))

    def ends_completion(self, token_id: int, *, cut: bool) -> bool:
        """Whether an answer that ends with this token is closed. `cut`: it ended because it had reached its longest length.

        The tokens that the template writes behind answers close one, and so do those at which the model's generation config stops:
        gpt-oss ends final answers with one that the template then replaces. Where no config is known, any special token closes an
        answer that was not cut, except those that the template writes inside answers, such as one that ends a call. No other token
        can stand for one that also says whose message comes next.
        """
        stops = self.probed.stops
        if token_id == self._eos or token_id in self._ends or any(token_id == stop.id for stop in stops):
            return True
        if self._ends or cut or any(stop.opens_next for stop in stops):
            return False
        return token_id in self._special and token_id not in self.probed.inside

    def is_special(self, token_id: int) -> bool:
        """Whether this is an added token that no text of a message is meant to contain."""
        return token_id in self._special

    def _probed(self, template_kwargs: Mapping[str, JSON]) -> TemplateTraits:
        bare, tooled = (partial(self._compared, Frame(tools, template_kwargs)) for tools in (None, [TOOL]))
        return probe(bare, self._special, self._tokenizer.eos_token_id, tooled, self.literals)

    def _compared(self, frame: Frame, messages: Sequence[Fields], generation_prompt: bool) -> str:
        return self._rendered(self._templates.compared, messages, frame, generation_prompt)

    def _rendered(
        self,
        render: Callable[[Sequence[Fields], Options, datetime], str],
        messages: Sequence[Fields],
        frame: Frame,
        generation_prompt: bool,
    ) -> str:
        tools = None if frame.tools is None else list(frame.tools)
        options = {**frame.template_kwargs, "tools": tools, "add_generation_prompt": generation_prompt}
        try:
            return render(messages, options, frame.date)
        except Exception as error:  # templates are foreign code: whatever one raises is a refusal
            reason = " ".join(str(error).split()) or type(error).__name__
            line = getattr(error, "lineno", None)  # that of an error in the template's own text
            reason += "" if line is None else f" (line {line} of the template)"
            text = f"the chat template of tokenizer {self.name!r} refuses the conversation: {reason}"
            raise RolloutFailed(Failure(Category.TOKENIZER, text[:_LONGEST_REASON])) from error

    def _make_growing(self, added: Mapping[int, AddedToken]) -> GrowingEncoder | None:
        """None for tokenizers without the Rust library, and for those that turn out not to encode part by part."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None) if self._tokenizer.is_fast else None
        if backend is None:
            return None
        growing = GrowingEncoder(backend, added)
        words = (*list(self._special.values())[:50], *(stop.text for stop in self.probed.stops))
        sample = "".join(f"{word} Hello\n{word}é12 " for word in words)
        return growing if composes(growing, sample, self.encode) else None


def _texts(chat_template: str | Mapping[str, str] | None) -> Sequence[str]:
    if isinstance(chat_template, Mapping):
        return tuple(chat_template.values())
    return () if chat_template is None else (chat_template,)


@contextmanager
def _surrogates_refused() -> Iterator[None]:
    try:
        yield
    except (TypeError, UnicodeEncodeError) as error:
        reason = "the conversation holds half of a surrogate pair (\\ud800 to \\udfff), which has no tokens"
        raise RolloutFailed(Failure(Category.VALIDATION, reason)) from error
