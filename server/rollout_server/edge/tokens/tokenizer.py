"""A loaded tokenizer together with its chat template."""

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
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.edge.tokens.chat_template import Options, Templated, Templates
from rollout_server.edge.tokens.encoding import AddedToken, Encoded, GrowingEncoder, RecentOpenings, composes
from rollout_server.edge.tokens.rendering_form import Fields
from rollout_server.edge.tokens.template_probe import TOOL, StopToken, TemplateTraits, probe
from rollout_server.runtime.errors import PromptRefused

_T = TypeVar("_T")
_LONGEST_REASON = 300
_SWITCHES = 64


class ChatTokenizer(Templated, Protocol):
    """The part of a transformers tokenizer that this package uses."""

    eos_token_id: int | None
    is_fast: bool
    chat_template: str | Mapping[str, str] | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Added tokens by id."""

    def __len__(self) -> int:
        """Return the number of tokens, including added ones."""

    def encode(self, text: str, **options: object) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, token_ids: list[int], **options: object) -> str:
        """Return the text of token ids."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The template's inputs other than the messages. They stay the same in all turns of a rollout.

    Args:
        tools: in OpenAI's format for function tools. Some templates render None and an empty list differently.
        template_kwargs: further template variables.
        date: the time that the template prints as the current time.
    """

    tools: Sequence[Fields] | None = None
    template_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    date: datetime = field(default_factory=datetime.now)


class LoadedTokenizer:
    """Render conversations to text and encode text to token ids. Shared by rollouts and threads.

    `text`, `encode` and `grow` use milliseconds to seconds of CPU time. Call them through `run` from the event loop. No other
    code may hold the tokenizer: it could enable truncation on it.
    """

    def __init__(
        self,
        name: str,
        tokenizer: ChatTokenizer,
        executor: Executor,
        ends: Sequence[int] = (),
        *,
        digest: str = "",
        is_trusted: bool = False,
    ) -> None:
        """Probe the template by rendering a few conversations.

        `ends` are the stop ids of the model's generation config, in addition to the tokenizer's `eos_token`. `digest`: see
        `TokenizerFiles`. `is_trusted`: the operator chose the tokenizer, so short renderings may run on the event loop.
        """
        self.name = name
        self.digest = digest
        self.is_trusted = is_trusted and tokenizer.is_fast
        self._tokenizer = tokenizer
        self._executor = executor
        # Rust tokenizers are thread-safe. Python tokenizers give no such guarantee, so a lock serializes them.
        self._turn: AbstractContextManager[object] = nullcontext() if tokenizer.is_fast else Lock()
        added = tokenizer.added_tokens_decoder
        self._special = {index: token.content for index, token in added.items() if token.special}
        # `tokenizer.json` may enable truncation. The first call of `encode` disables it; do that before threads share the object.
        self._encoded("")
        self._growing: GrowingEncoder | None = None
        self._templates = Templates(tokenizer)
        self._eos = tokenizer.eos_token_id
        self._ends = frozenset(ends)
        self.vocabulary = max(len(tokenizer), max(added, default=-1) + 1)
        """Size of the vocabulary: every token id is smaller."""
        self.literals = self._templates.literals(_texts(tokenizer.chat_template))
        self.probed = self._probed({})
        self._switched: dict[str, LoadedTokenizer] = {}  # least recently used first
        self._switching = Lock()
        self._growing = self._make_growing(added)
        self._openings = RecentOpenings()

    def switched(self, template_kwargs: Mapping[str, JSON]) -> LoadedTokenizer:
        """Return this tokenizer, probed with these template variables: they may change how completions are closed."""
        if not template_kwargs:
            return self
        key = json.dumps(template_kwargs, sort_keys=True)
        # The lock protects the table only: a probe takes long, and two threads that probe the same variables do no harm.
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
        """Call `work` in a renderer thread.

        If the caller is cancelled, it returns at once; the thread finishes the work and the result is dropped.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    def text(self, messages: Sequence[Fields], frame: Frame, *, generation_prompt: bool = True) -> str:
        """Return the conversation as the chat template renders it.

        Raises `PromptRefused` (TOKENIZER) with the template's own reason if the template refuses the conversation.
        """
        return self._rendered(self._templates.text, messages, frame, generation_prompt)

    def encode(self, text: str) -> Tokens:
        """Return the ids of a text. Added tokens are recognised; nothing is prepended (no BOS) and nothing is truncated.

        Raises `PromptRefused` (VALIDATION) for unpaired surrogates, which no tokenizer can encode.
        """
        with _surrogates_refused():
            return self._encoded(text) if self._growing is None else self._growing.ids(text)

    def grow(self, before: Encoded, text: str) -> Encoded:
        """Return the encoding of a text, reusing the ids it shares with `before`. Raises `PromptRefused` as `encode` does."""
        if self._growing is None:
            return before if before.text == text else Encoded(text, self.encode(text))
        with _surrogates_refused():
            return self._growing.grown(before, text)

    def open(self, text: str) -> Encoded:
        """Return the encoding of a first prompt. Rollouts of a group have the same one, and those of an agent begin alike.

        Raises `PromptRefused` as `encode` does.
        """
        encoded = self.grow(self._openings.closest(text), text)
        self._openings.add(encoded)
        return encoded

    def decode(self, ids: Tokens) -> str:
        """Return the text of ids, for display."""
        with self._turn:
            return self._tokenizer.decode(list(ids))

    def decode_exactly(self, ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens and all spaces; `decode` may remove spaces, depending on the tokenizer."""
        with self._turn:
            return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def is_closed(self, ids: Tokens, stop: StopToken, *, cut: bool) -> bool:
        """Return whether a completion with these ids ends with `stop` or with a token that replaces it.

        Nothing replaces a stop token that also begins the next message, because only it says which role comes next: a model of GLM
        may end a tool call with `<|endoftext|>`, and the result still begins with `<|observation|>`.
        """
        if not ids or ids[-1] == stop.id:
            return bool(ids)
        return not stop.opens_next and self.ends_completion(ids[-1], cut=cut)

    def ends_completion(self, token_id: int, *, cut: bool) -> bool:
        """Return whether a completion whose last token is `token_id` is closed. `cut`: it was cut at `max_tokens`.

        A stop token of the template closes a completion, and so do `eos_token` and the stop ids of the generation config.
        gpt-oss needs the latter: a final completion ends with `<|return|>`, which the template replaces with `<|end|>` in the
        history.

        Without a generation config, any special token closes a completion that was not cut, except the tokens that the template
        writes inside completions, such as the end of a tool call. This fallback is off if a stop token also begins the next
        message (GLM), because no other token can say which role comes next.
        """
        stops = self.probed.stops
        if token_id == self._eos or token_id in self._ends or any(token_id == stop.id for stop in stops):
            return True
        if self._ends or cut or any(stop.opens_next for stop in stops):
            return False
        return token_id in self._special and token_id not in self.probed.inside

    def is_special(self, token_id: int) -> bool:
        """Return whether the id is a special added token, which message text should not contain."""
        return token_id in self._special

    def _encoded(self, text: str) -> Tokens:
        """Return the ids of a text, encoded by transformers."""
        with self._turn:
            return pack_tokens(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

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
        except Exception as error:  # templates are third-party code: any exception means that the template refuses
            reason = " ".join(str(error).split()) or type(error).__name__
            line = getattr(error, "lineno", None)  # set for syntax errors in the template
            reason += "" if line is None else f" (line {line} of the template)"
            text = f"the chat template of tokenizer {self.name!r} refuses the conversation: {reason}"
            raise PromptRefused(Failure(Category.TOKENIZER, text[:_LONGEST_REASON])) from error

    def _make_growing(self, added: Mapping[int, AddedToken]) -> GrowingEncoder | None:
        """Return None for tokenizers without the Rust library, and for those that fail the test of `composes`."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None) if self._tokenizer.is_fast else None
        if backend is None:
            return None
        growing = GrowingEncoder(backend, added)
        words = (*list(self._special.values())[:50], *(stop.text for stop in self.probed.stops))
        sample = "".join(f"{word} Hello\n{word}é12 " for word in words)
        return growing if composes(growing, sample, self._encoded) else None


def _texts(chat_template: str | Mapping[str, str] | None) -> Sequence[str]:
    if isinstance(chat_template, Mapping):
        return tuple(chat_template.values())
    return () if chat_template is None else (chat_template,)


@contextmanager
def _surrogates_refused() -> Iterator[None]:
    try:
        yield
    except (TypeError, UnicodeEncodeError) as error:
        reason = (
            "the conversation contains an unpaired surrogate (\\ud800 to \\udfff), which cannot be tokenized; remove it"
        )
        raise PromptRefused(Failure(Category.VALIDATION, reason, source=FailureClass.ENVIRONMENT)) from error
