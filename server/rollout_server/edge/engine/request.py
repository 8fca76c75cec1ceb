"""What engines are sent.

Fields are those of the engines' own documentation: OpenAI's chat completions; for vLLM `return_token_ids` (0.10.2 and later); for
SGLang `return_prompt_token_ids` and `return_meta_info` (0.5.13 and later) and `return_token_ids`, which is younger and tells the
same without logprobs. Engines leave out what they do not know.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import msgspec

from rollout_server.core.ledger import Tokens
from rollout_server.core.message import Message
from rollout_server.core.spec import Dialect, Sampling, Spec, Target
from rollout_server.edge.tokens.cache import as_function
from rollout_server.edge.trainer.chat_completion import RequestWriter
from rollout_server.edge.trainer.sampling_parameters import engine_parameters
from rollout_server.runtime.ports import Tool

LIMIT: Final = "max_tokens"
OTHER_LIMIT: Final = "max_completion_tokens"
"""What OpenAI calls the most tokens of an answer for models that reason, which refuse the older name."""

_TRUE: Final = msgspec.Raw(b"true")
_ASKED: Final = MappingProxyType(
    {
        Dialect.OPENAI: (),
        Dialect.VLLM: ("return_token_ids",),
        Dialect.SGLANG: ("return_token_ids", "return_prompt_token_ids", "return_meta_info"),
    }
)
_KEPT: Final = 1000
_TAIL: Final = 64


class LimitNames:
    """How engines were found to call the most tokens of an answer, by address and model. The oldest are forgotten."""

    def __init__(self) -> None:
        self._other: OrderedDict[tuple[str, str], None] = OrderedDict()

    def of(self, target: Target) -> str:
        """The name to use."""
        return OTHER_LIMIT if (target.url, target.model) in self._other else LIMIT

    def remember_other(self, target: Target) -> None:
        """This engine takes the other name."""
        self._other[target.url, target.model] = None
        while len(self._other) > _KEPT:
            self._other.popitem(last=False)


class ChatWriter:
    """Writes the chat completion requests of one rollout."""

    def __init__(self, spec: Spec, tools: Sequence[Tool]) -> None:
        self._own = _own_members(spec, tools)
        self._reports = spec.completions.dialect is not Dialect.OPENAI
        self._writer = RequestWriter(None)

    def body(
        self, messages: Sequence[Message], sampling: Sampling, limit: str = LIMIT, input_ids: Tokens | None = None
    ) -> bytes:
        """The body for a conversation that extends the one written before. Raises `WrongParameter`.

        `limit` is the name of the most tokens of an answer. `input_ids`: SGLang is to take them for its prompt.
        """
        logprobs = {"logprobs": _TRUE} if self._reports and sampling.logprobs is not False else {}
        more = b"" if input_ids is None else b',"input_ids":' + _json(input_ids)
        return self._writer.plain(messages, engine_parameters(sampling, {**self._own, **logprobs}, limit), more)


class TokenWriter:
    """Writes the bodies of vLLM's token routes: from ids to ids, and from those to a message."""

    def __init__(self, model: str) -> None:
        self._model = json.dumps(model).encode()

    def generation(self, prompt: Tokens, sampling: Sampling) -> bytes:
        """Asks for what follows the prompt. Raises `WrongParameter`."""
        own = {} if sampling.logprobs is False else {"logprobs": msgspec.Raw(b"0")}  # of the sampled token alone
        # What else vLLM's chat completions take is ignored among the parameters of its sampler.
        parameters = engine_parameters(replace(sampling, logprobs=None), own).encode()
        members = b',"return_token_ids":true,"sampling_params":{', parameters, b'},"token_ids":', _json(prompt), b"}"
        return b"".join((b'{"model":', self._model, *members))

    def rendering(self, prompt: Tokens, generated: bytes, chat: bytes) -> bytes:
        """Asks for the message in an answer, `generated`, to the request `chat`. Of the prompt its end is all that is looked at."""
        return b"".join(
            (
                b'{"model":' + self._model + b',"prompt_tokens":' + str(len(prompt)).encode(),
                b',"prompt_token_ids":' + _json(prompt[-_TAIL:]),
                b',"generate_response":' + generated + b',"chat_request":' + chat + b"}",
            )
        )


def _own_members(spec: Spec, tools: Sequence[Tool]) -> Mapping[str, msgspec.Raw]:
    """The members that are ours to set and the same in each turn, as JSON."""
    dialect = spec.completions.dialect
    own = {"model": msgspec.Raw(json.dumps(spec.completions.model).encode())}
    own |= dict.fromkeys(_ASKED[dialect], _TRUE)
    if tools:
        own["tools"] = msgspec.Raw(json.dumps([as_function(tool) for tool in tools]).encode())
    if dialect is not Dialect.OPENAI and spec.tokenizer is not None and spec.tokenizer.template_kwargs_json:
        own["chat_template_kwargs"] = msgspec.Raw(spec.tokenizer.template_kwargs_json.encode())
    return own


def _json(ids: Tokens) -> bytes:
    return msgspec.json.encode(ids.tolist())
