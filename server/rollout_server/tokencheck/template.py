"""A tokenizer with its chat template and the helpers of the check."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollout_server.core.ledger import Tokens
from rollout_server.core.message import JSON, Message
from rollout_server.edge.tokens.encoding import AddedToken, Encoded, common_prefix
from rollout_server.edge.tokens.rendering_form import Arguments, Fields, parsed
from rollout_server.edge.tokens.tokenizer import Frame, LoadedTokenizer
from rollout_server.tokencheck.conversation import CheckConversation


@dataclass(frozen=True, slots=True)
class Template:
    """Render and encode with fixed template variables."""

    loaded: LoadedTokenizer
    added: Mapping[int, AddedToken]
    frame: Frame = field(default_factory=Frame)

    def with_arguments(self, more: Mapping[str, JSON]) -> Template:
        """Return a copy with additional template variables."""
        kwargs = {**self.frame.template_kwargs, **more}
        return replace(self, frame=replace(self.frame, template_kwargs=kwargs))

    @property
    def special(self) -> frozenset[str]:
        """The texts of special tokens."""
        return frozenset(token.content for token in self.added.values() if token.special and token.content)

    def common_length(self, one: str, other: str) -> int:
        """Return the length of the common prefix of two texts, shortened so that it does not end inside an added token."""
        shared = common_prefix(one, other)
        if shared in (len(one), len(other)):
            return shared
        texts = [token.content for token in self.added.values() if token.content]
        across = (
            whole.find(text, max(0, shared - len(text) + 1), shared - 1 + len(text))
            for text in texts
            for whole in (one, other)
        )
        return min((start for start in across if start >= 0), default=shared)


class RenderedConversation:
    """A conversation rendered in one form of arguments. Each rendering is computed once."""

    def __init__(self, template: Template, conversation: CheckConversation, form: Arguments) -> None:
        """Prepare the messages; rendering happens later.

        Raises `RolloutFailed` (VALIDATION) for content that is not text, and `MalformedMessage` for numbers that JSON cannot
        express.
        """
        wire = (Message.parsed(json.dumps(fields, ensure_ascii=False), fields) for fields in conversation.messages)
        self.messages = tuple(parsed(message, index, form) for index, message in enumerate(wire))
        self._template = template
        self._frame = replace(template.frame, tools=conversation.tools)
        self._texts: dict[tuple[int, bool], str] = {}
        self._encoded: dict[int, Encoded] = {}
        self._last = Encoded()

    def prompt(self, count: int) -> str:
        """Return the prompt of the first `count` messages.

        Raises `RolloutFailed` if the template refuses them, as all methods here do.
        """
        return self._text(count, True)

    def history(self, count: int) -> str:
        """Return the first `count` messages without a generation prompt."""
        return self._text(count, False)

    def encoded_prompt(self, count: int) -> Encoded:
        """Return the encoded prompt of the first `count` messages."""
        if count not in self._encoded:
            self._encoded[count] = self._last = self._template.loaded.grow(self._last, self.prompt(count))
        return self._encoded[count]

    def render(self, messages: Sequence[Fields], generation_prompt: bool) -> str:
        """Render any messages with this conversation's tools and variables."""
        return self._template.loaded.text(messages, self._frame, generation_prompt=generation_prompt)

    def without_tools(self, count: int) -> str:
        """Return the first `count` messages, rendered without tools."""
        frame = replace(self._frame, tools=None)
        return self._template.loaded.text(self.messages[:count], frame, generation_prompt=False)

    def _text(self, count: int, generation_prompt: bool) -> str:
        key = count, generation_prompt
        if key not in self._texts:
            self._texts[key] = self.render(self.messages[:count], generation_prompt)
        return self._texts[key]


def in_other_tokens(template: Template, text: str, ids: Tokens) -> Tokens | None:
    """Return the same text in tokens that an encoder would not produce, by splitting a word; None if no such split is found.

    Models sample such tokens: they generate token by token, while an encoder always applies the same merges.
    """
    added = template.added.keys()
    offsets = sorted(range(1, len(text)), key=lambda offset: abs(offset - len(text) // 3))
    for offset in offsets[:40]:
        if not (text[offset - 1].isalpha() and text[offset].isalpha()):
            continue
        other = template.loaded.encode(text[:offset]) + template.loaded.encode(text[offset:])
        same_text = [i for i in other if i in added] == [i for i in ids if i in added]
        if other != ids and same_text and template.loaded.decode(other) == template.loaded.decode(ids):
            return other
    return None
