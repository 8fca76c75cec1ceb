"""Token counting by the simplest method: ``apply_chat_template`` on the messages as received.

This deliberately differs from the server's method. The server renders only the new part and verifies that it fits; this renderer
renders the whole conversation and takes differences. If both shared code, the judge could not find the server's bugs.
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
    """The chat template or the tokenizer rejects the messages. The text is the error of the template or tokenizer."""


class PlainRenderer:
    """One tokenizer and its chat template. Blocks while it renders, and is not thread-safe."""

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
        """Load the tokenizer of a local directory, without network access.

        Args:
            parse_arguments: render tool call arguments that are JSON text as objects, as trainers behind vLLM-style front ends
                do. By default everything is rendered as received.
            template_kwargs: arguments of the chat template.

        Raises ValueError if the tokenizer has no chat template.
        """
        from transformers import AutoTokenizer  # the import takes a second, and only a trainer needs it

        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer in {directory} has no chat template")
        return cls(tokenizer, parse_arguments=parse_arguments, template_kwargs=template_kwargs)

    def prompt(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """Return the ids of the whole prompt, including the generation prompt. Raises UnrenderableError."""
        return self._render(messages, tools, generation_prompt=True)

    def completion_ids(
        self, messages: Sequence[Message], tools: Tools | None, prompt: list[int], reply: ScriptedReply
    ) -> list[int]:
        """Return the ids that a model generates for `reply` after `prompt`.

        They are what the template renders for the reply after the generation prompt, up to and including the stop token. With an
        append-only template the next prompt therefore begins with prompt + completion. A reply that was cut has no stop token.
        Surplus ids are appended.
        """
        ids = self._ids_after_prompt(messages, tools, prompt, reply)
        end = next((index for index in reversed(range(len(ids))) if ids[index] in self._ends), None)
        if end is not None:
            ids = ids[: end if reply.cut else end + 1]
        surplus = self.encode(reply.surplus) if isinstance(reply.surplus, str) else reply.surplus
        return [*ids, *surplus]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Control tokens in it are recognized, and none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the exact text of ids, with control tokens and white space."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def text(self, messages: Sequence[Message], tools: Tools | None) -> str:
        """Return the text of the whole prompt, including the generation prompt. Raises UnrenderableError."""
        return str(self._apply(messages, tools, add_generation_prompt=True, tokenize=False))

    def is_end(self, token_id: int) -> bool:
        """Return whether this token may end a completion: any special token, or the tokenizer's eos token."""
        return token_id in self._ends

    def in_other_form(self) -> "PlainRenderer":
        """Return a copy with the opposite `parse_arguments`."""
        other = copy.copy(self)
        other._parse_arguments = not self._parse_arguments
        return other

    def _render(self, messages: Sequence[Message], tools: Tools | None, *, generation_prompt: bool) -> list[int]:
        return list(self._apply(messages, tools, add_generation_prompt=generation_prompt, tokenize=True))

    def _tokens_after_all(self) -> int:
        """Return how many tokens the template writes after the last completion's stop token if no generation prompt follows.

        Some templates close the whole text this way. A model does not generate these tokens.
        """
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c d e"}]
        try:
            ended = self._render(messages, None, generation_prompt=False)
            continued = self._render(messages, None, generation_prompt=True)
        except UnrenderableError:
            return 0
        shared = next((i for i, (a, b) in enumerate(zip(ended, continued, strict=False)) if a != b), len(ended))
        return len(ended) - shared if self._ends.intersection(ended[shared - 2 : shared]) else 0

    def _ids_after_prompt(
        self, messages: Sequence[Message], tools: Tools | None, prompt: list[int], reply: ScriptedReply
    ) -> list[int]:
        conversation = [*messages, reply.message]
        ids = self._render(conversation, tools, generation_prompt=False)
        ids = ids[: len(ids) - self._after_all]
        if ids[: len(prompt)] == prompt:
            return ids[len(prompt) :]
        # This template does not render the conversation as an extension of the prompt. The completion is then the text after the
        # first character that differs.
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
        except (
            Exception
        ) as error:  # a chat template is third-party code: any exception means that it rejects the messages
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
