"""Counting by the plainest means there are: ``apply_chat_template`` on the messages as they were received.

This is deliberately not how the server counts. The server renders what is new and proves that it fits; a trainer renders
everything and takes differences. A judge that shared code with the judged could not find its mistakes.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rollout_server.testing.script import ScriptedReply

Message: TypeAlias = Mapping[str, Any]
Tools: TypeAlias = Sequence[Mapping[str, Any]]


class UnrenderableError(ValueError):
    """The chat template or the tokenizer does not take these messages; the text is theirs."""


class PlainRenderer:
    """One tokenizer and its chat template. Not for the event loop, and not for two threads at once."""

    def __init__(
        self, tokenizer: Any, *, parse_arguments: bool = False, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._parse_arguments = parse_arguments
        self._template_kwargs = dict(template_kwargs or {})
        self._ends = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        ) | {tokenizer.eos_token_id}
        self._after_all = self._tokens_after_all()

    @classmethod
    def load(
        cls, directory: Path, *, parse_arguments: bool = False, template_kwargs: Mapping[str, Any] | None = None
    ) -> "PlainRenderer":
        """Loads the tokenizer of a local directory, without a network; `template_kwargs` are switches of its template.

        With `parse_arguments` tool call arguments given as JSON text are rendered as objects, as trainers behind
        vLLM-style fronts do; otherwise everything is rendered as received. ValueError if there is no chat template.
        """
        from transformers import AutoTokenizer  # takes a second, and only a trainer needs it

        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer in {directory} has no chat template")
        return cls(tokenizer, parse_arguments=parse_arguments, template_kwargs=template_kwargs)

    def prompt(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """The ids of the whole prompt, generation prompt included; UnrenderableError if the template refuses."""
        return self._render(messages, tools, generation_prompt=True)

    def completion_ids(
        self, messages: Sequence[Message], tools: Tools | None, prompt: list[int], reply: ScriptedReply
    ) -> list[int]:
        """The ids that a model generates when it says `reply` after `prompt`.

        They are what the template renders for the reply after the generation prompt, up to and with the end token, so
        that under an append-only template the next prompt begins with prompt + answer. A reply that was cut lacks the
        end token; surplus ids follow at the end.
        """
        ids = self._ids_after_prompt(messages, tools, prompt, reply)
        end = next((index for index in reversed(range(len(ids))) if ids[index] in self._ends), None)
        if end is not None:
            ids = ids[: end if reply.cut else end + 1]
        surplus = self.encode(reply.surplus) if isinstance(reply.surplus, str) else reply.surplus
        return [*ids, *surplus]

    def encode(self, text: str) -> list[int]:
        """The ids of a text as it stands: control tokens are recognised, none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens and white space as they stand."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def text(self, messages: Sequence[Message], tools: Tools | None) -> str:
        """The text of the whole prompt, generation prompt included; UnrenderableError if the template refuses."""
        return str(self._apply(messages, tools, add_generation_prompt=True, tokenize=False))

    def is_end(self, token_id: int) -> bool:
        """Whether a model that generates this token may be done."""
        return token_id in self._ends

    def in_other_form(self) -> "PlainRenderer":
        """The same, but arguments are rendered as objects where this one renders them as received, and the reverse."""
        other = copy.copy(self)
        other._parse_arguments = not self._parse_arguments
        return other

    def _render(self, messages: Sequence[Message], tools: Tools | None, *, generation_prompt: bool) -> list[int]:
        return list(self._apply(messages, tools, add_generation_prompt=generation_prompt, tokenize=True))

    def _tokens_after_all(self) -> int:
        """How many tokens the template puts behind a conversation that ends, after the answer's own end token.

        Some templates close the whole text that way; no model generates it.
        """
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c d e"}]
        try:
            ended = self._render(messages, None, generation_prompt=False)
            going_on = self._render(messages, None, generation_prompt=True)
        except UnrenderableError:
            return 0
        shared = next((i for i, (a, b) in enumerate(zip(ended, going_on, strict=False)) if a != b), len(ended))
        return len(ended) - shared if self._ends.intersection(ended[shared - 2 : shared]) else 0

    def _ids_after_prompt(
        self, messages: Sequence[Message], tools: Tools | None, prompt: list[int], reply: ScriptedReply
    ) -> list[int]:
        conversation = [*messages, reply.message]
        whole = self._render(conversation, tools, generation_prompt=False)
        whole = whole[: len(whole) - self._after_all]
        if whole[: len(prompt)] == prompt:
            return whole[len(prompt) :]
        # The history of such a template does not begin with the prompt: what differs is what was said.
        prompt_text: str = self._apply(messages, tools, add_generation_prompt=True, tokenize=False)
        text: str = self._apply(conversation, tools, add_generation_prompt=False, tokenize=False)
        shared = next((i for i, (a, b) in enumerate(zip(prompt_text, text, strict=False)) if a != b), len(prompt_text))
        return self.encode(text[shared:])

    def _apply(self, messages: Sequence[Message], tools: Tools | None, **options: bool) -> Any:
        rendered = [_with_parsed_arguments(m) for m in messages] if self._parse_arguments else list(messages)
        try:
            return self._tokenizer.apply_chat_template(
                rendered, tools=list(tools) if tools else None, return_dict=False, **options, **self._template_kwargs
            )
        except Exception as error:  # a chat template is foreign code: whatever it raises is a refusal
            raise UnrenderableError(f"the messages cannot be rendered: {error}") from error


def _with_parsed_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parse_call(call) for call in calls]}


def _parse_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        parsed = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call
