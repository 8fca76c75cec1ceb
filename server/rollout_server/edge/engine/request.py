"""Request bodies for inference engines.

The fields follow the engines' documentation: OpenAI's chat completions; for vLLM `return_token_ids` (0.10.2 and later); for
SGLang `return_prompt_token_ids` and `return_meta_info` (0.5.13 and later), and `return_token_ids`, a newer field that returns
the same ids without logprobs. Engines ignore fields that they do not know.
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
"""OpenAI's name for `max_tokens` with reasoning models, which reject the older name."""

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
    """The name of the `max_tokens` parameter that each engine accepts, by URL and model. The oldest entries are dropped."""

    def __init__(self) -> None:
        self._other: OrderedDict[tuple[str, str], None] = OrderedDict()

    def of(self, target: Target) -> str:
        """Return the parameter name to use."""
        return OTHER_LIMIT if (target.url, target.model) in self._other else LIMIT

    def remember_other(self, target: Target) -> None:
        """Record that this engine accepts the other name."""
        self._other[target.url, target.model] = None
        while len(self._other) > _KEPT:
            self._other.popitem(last=False)


class ChatWriter:
    """Write the chat completion requests of one rollout."""

    def __init__(self, spec: Spec, tools: Sequence[Tool]) -> None:
        self._own = _own_members(spec, tools)
        self._reports = spec.completions.dialect is not Dialect.OPENAI
        self._writer = RequestWriter(None)

    def body(
        self, messages: Sequence[Message], sampling: Sampling, limit: str = LIMIT, input_ids: Tokens | None = None
    ) -> bytes:
        """Return the body for a conversation that extends the previous one. Raises `WrongParameter`.

        `limit` is the name of the `max_tokens` parameter. `input_ids`: token ids that SGLang uses as the prompt.
        """
        logprobs = {"logprobs": _TRUE} if self._reports and sampling.logprobs is not False else {}
        more = b"" if input_ids is None else b',"input_ids":' + _json(input_ids)
        return self._writer.plain(messages, engine_parameters(sampling, {**self._own, **logprobs}, limit), more)


class TokenWriter:
    """Write the bodies of vLLM's token routes: generate ids from ids, and convert ids to a message."""

    def __init__(self, model: str) -> None:
        self._model = json.dumps(model).encode()

    def generation(self, prompt: Tokens, sampling: Sampling) -> bytes:
        """Return the body that requests a completion of the prompt. Raises `WrongParameter`."""
        # vLLM's SamplingParams: `logprobs` is the number of alternatives besides the sampled token, so 0 returns the token's own.
        own = {} if sampling.logprobs is False else {"logprobs": msgspec.Raw(b"0")}
        # SamplingParams ignores the parameters of vLLM's chat completions that it does not know.
        parameters = engine_parameters(replace(sampling, logprobs=None), own).encode()
        members = b',"return_token_ids":true,"sampling_params":{', parameters, b'},"token_ids":', _json(prompt), b"}"
        return b"".join((b'{"model":', self._model, *members))

    def rendering(self, prompt: Tokens, generated: bytes, chat: bytes) -> bytes:
        """Return the body that requests the message of `generated`, the response to `chat`. Only the prompt's end is needed."""
        return b"".join(
            (
                b'{"model":' + self._model + b',"prompt_tokens":' + str(len(prompt)).encode(),
                b',"prompt_token_ids":' + _json(prompt[-_TAIL:]),
                b',"generate_response":' + generated + b',"chat_request":' + chat + b"}",
            )
        )


def _own_members(spec: Spec, tools: Sequence[Tool]) -> Mapping[str, msgspec.Raw]:
    """Return the members that this server sets, which are the same in each turn, as JSON."""
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
