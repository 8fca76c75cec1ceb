"""Parse responses of inference engines: chat completions with token ids and logprobs.

vLLM (`return_token_ids`): `prompt_token_ids` next to `choices`; `token_ids` and `logprobs.content[].logprob` in the choice.
SGLang (`return_prompt_token_ids`, `return_token_ids`, `return_meta_info`): all in the choice: `prompt_token_ids`, `token_ids`
and `meta_info.output_token_logprobs`, a list of [logprob, id, text]. One parser accepts both forms from any engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TypeAlias

import msgspec

from rollout_server.core.ledger import Logprobs, PolicyRun, Tokens, pack_logprobs, pack_tokens
from rollout_server.core.message import MalformedMessage, Message
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.segment import MAX_STEP
from rollout_server.edge.trainer.chat_completion import NULL, ChatCompletion, TokenId, read_message, read_usage
from rollout_server.edge.trainer.response_limits import class_of_response_error, decode_response
from rollout_server.runtime.errors import RolloutFailed

_Sampled: TypeAlias = tuple[float | None, TokenId, msgspec.Raw]
"""Logprob, id and text of a token, as SGLang lists them."""

_LONGEST_WORD = 256
"""Maximum characters of `finish_reason` and of the weights' version."""


class _Meta(msgspec.Struct):
    output_token_logprobs: list[_Sampled] | None = None


class _EngineChoice(msgspec.Struct):
    message: msgspec.Raw = NULL
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    logprobs: msgspec.Raw = NULL
    meta_info: _Meta | None = None


class _EngineBody(msgspec.Struct):
    choices: list[_EngineChoice]
    prompt_token_ids: list[TokenId] | None = None
    usage: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL


class _Token(msgspec.Struct):
    logprob: float


class _LogprobContent(msgspec.Struct):
    content: list[_Token] | None = None


class _Metadata(msgspec.Struct):
    weight_version: str = ""


class Sampled(msgspec.Struct, frozen=True):
    """The tokens that an engine sampled.

    Args:
        finish_reason: as reported.
        token_ids: generated token ids, int; None if not sent.
        reported: token ids of the prompt, int; None if not sent.
        logprobs: one float per generated token; None unless there is a finite one for each.
        usage: (prompt tokens, completion tokens); None if not sent.
        policy_version: the version of the weights, as reported; "" if unknown.
        runs: the versions that sampled the tokens, if there are several.
    """

    finish_reason: str
    token_ids: Tokens | None
    reported: Tokens | None
    logprobs: Logprobs | None
    usage: tuple[int, int] | None
    policy_version: str
    runs: tuple[PolicyRun, ...] = ()

    @property
    def policy_step(self) -> int | None:
        """The step of the policy, if its version is one."""
        return _step(self.policy_version)

    def completion(self, message: Message, tool_calls: int, finish_reason: str) -> ChatCompletion:
        """Return the completion with its parsed message.

        `finish_reason` comes from the parser of the message, which knows more than the sampler (`tool_calls`).
        """
        return ChatCompletion(
            message=message,
            tool_calls=tool_calls,
            finish_reason=finish_reason,
            token_ids=self.token_ids,
            reported=self.reported,
            logprobs=self.logprobs,
            usage=self.usage,
            policy_version=self.policy_version,
            policy_step=self.policy_step,
            runs=self.runs,
        )


def joined_response(body: bytes, sampled: Sampled) -> bytes:
    """Return the last response of a completion in several parts, with the tokens of all of them. The rest is copied.

    Args:
        body: the body of the last response, of which `read_sampled` read `sampled`'s last part.
        sampled: the whole completion.
    """
    parsed = msgspec.json.decode(body)
    choice = parsed["choices"][0]
    choice["token_ids"], choice["finish_reason"] = list(sampled.token_ids or ()), sampled.finish_reason
    choice["logprobs"] = None  # the parsers of messages read the tokens only
    return msgspec.json.encode(parsed)


_decoder = msgspec.json.Decoder(_EngineBody)
_content_decoder = msgspec.json.Decoder(_LogprobContent | None)
_metadata_decoder = msgspec.json.Decoder(_Metadata | None)


def read_sampled(body: bytes, turn: int) -> Sampled:
    """Parse a response that contains only ids. Raises `RolloutFailed` (VALIDATION) with the turn and the field."""
    return _sampled(_parse(body, turn))


def read_completion(body: bytes, turn: int, most_calls: int) -> ChatCompletion:
    """Parse a chat completion. Raises `RolloutFailed` (VALIDATION) with the turn and the field."""
    parsed = _parse(body, turn)
    raw = parsed.choices[0].message
    if bytes(raw) == b"null":
        raise malformed_response(turn, "`choices[0].message` is missing")
    try:
        message, calls = read_message(raw, most_calls)
    except MalformedMessage as error:
        raise malformed_response(turn, f"`choices[0].message`: {error}", error) from None
    sampled = _sampled(parsed)
    return sampled.completion(message, calls, sampled.finish_reason)


def malformed_response(turn: int, what: str, error: MalformedMessage | None = None) -> RolloutFailed:
    """Return the failure of a turn whose response cannot be used."""
    text = f"turn {turn}: the engine's response is malformed: {what}"
    source = class_of_response_error(error, FailureClass.ENGINE)
    return RolloutFailed(Failure(Category.VALIDATION, text, turn, source=source))


def _parse(body: bytes, turn: int) -> _EngineBody:
    try:
        parsed = decode_response(_decoder, body)
    except MalformedMessage as error:
        raise malformed_response(turn, str(error)) from None
    if not parsed.choices:
        raise malformed_response(turn, "`choices` is empty")
    return parsed


def _sampled(parsed: _EngineBody) -> Sampled:
    choice = parsed.choices[0]
    listed = choice.meta_info.output_token_logprobs if choice.meta_info is not None else None
    ids = choice.token_ids
    if ids is None and listed is not None:
        ids = [token for _, token, _ in listed]
    prompt = parsed.prompt_token_ids if parsed.prompt_token_ids is not None else choice.prompt_token_ids
    return Sampled(
        finish_reason=(choice.finish_reason or "")[:_LONGEST_WORD],
        token_ids=pack_tokens(ids) if ids is not None else None,
        reported=pack_tokens(prompt) if prompt is not None else None,
        logprobs=_logprobs(ids, listed, choice.logprobs) if ids is not None else None,
        usage=read_usage(parsed.usage),
        policy_version=_weights(parsed.metadata),
    )


def _logprobs(ids: Sequence[int], listed: Sequence[_Sampled] | None, raw: msgspec.Raw) -> Logprobs | None:
    """Return one logprob per id, or None.

    SGLang's list is used if its ids equal `ids`, otherwise OpenAI's form.
    """
    if listed is not None and [token for _, token, _ in listed] == list(ids):
        values: Sequence[float | None] = [value for value, _, _ in listed]
    else:
        try:
            content = _content_decoder.decode(raw)
        except msgspec.DecodeError:
            return None
        values = [token.logprob for token in content.content or ()] if content is not None else []
    known = [value for value in values if value is not None]
    if len(known) != len(ids):
        return None
    packed = pack_logprobs(known)
    return packed if all(map(isfinite, packed)) else None


def _step(version: str) -> int | None:
    """Return the step that a version of the weights is, if it is a whole number; any other name has no order."""
    if not (version.isascii() and version.isdecimal()) or len(version) > len(str(MAX_STEP)):
        return None
    step = int(version)
    return step if step <= MAX_STEP and str(step) == version else None


def _weights(raw: msgspec.Raw) -> str:
    """Return the version of the weights, which SGLang reports; other engines send other metadata or none."""
    try:
        found = _metadata_decoder.decode(raw)
    except msgspec.DecodeError:
        return ""
    return found.weight_version[:_LONGEST_WORD] if found is not None else ""
