"""Sampling parameters of a model call: what the rollout sets, what the agent asks for, and what its trainer can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from rollout_server.core.error import CallRefused
from rollout_server.core.message import JSON, MalformedMessage, parse_object
from rollout_server.core.spec import ENGINES, Dialect, Sampling, Spec
from rollout_server.core.spec_validation import MOST_MASKED_TOKENS, sampling_violations
from rollout_server.runtime.run.arguments import SamplingOptions

TOKEN_MODE: Final = 2
"""`Spec.token_mode` of a rollout whose prompts this server renders: `TOKEN_MODE_TOKENS` in the proto file."""
_EXTRAS: Final = ("tool_choice", "parallel_tool_calls", "response_format")


def call_sampling(
    asked: Sampling, spec: Spec, *, client: bool, has_tools: bool = True
) -> tuple[SamplingOptions, tuple[str, ...]]:
    """Return the options with which a call is sampled, and the names of its parameters that have no effect.

    Temperature and top_p are the rollout's where it sets them, so that the logprobs of its turns can be compared; with `client`
    they are the agent's. The lower `max_tokens` applies. The rollout's stop strings and the agent's both apply; with `client`
    only the agent's, if it has some. Whether logprobs are requested is never up to the agent. Tool choice and response format
    need an inference engine that renders; `has_tools`: the call offers tools.

    Raises:
        CallRefused: for an invalid parameter, and for one that the rollout's trainer does not support.
    """
    own, extra = spec.sampling, _extra(asked, spec, has_tools)
    first, second = (asked, own) if client else (own, asked)
    chosen = replace(
        own,
        temperature=second.temperature if first.temperature is None else first.temperature,
        top_p=second.top_p if first.top_p is None else first.top_p,
        max_tokens=_lower(own.max_tokens, asked.max_tokens, spec.completions.dialect),
        stop=asked.stop if client and asked.stop else tuple(dict.fromkeys((*own.stop, *asked.stop))),
    )
    for violation in sampling_violations(replace(chosen, extra_json=""), spec.completions.dialect):
        raise CallRefused("INVALID_CALL", violation.field.removeprefix("spec."), violation.description)
    given: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "max_tokens", "stop")
        if (value := getattr(chosen, name)) != getattr(own, name)
    }
    unused = [name for name in ("temperature", "top_p") if getattr(asked, name) not in (None, getattr(chosen, name))]
    further = {name: value for name, value in extra.items() if client or name not in _extra_of(own)}
    options: SamplingOptions = {**given, "extra": further} if further else {**given}  # type: ignore[typeddict-item]
    return options, (*unused, *(extra.keys() - further.keys()))


def _lower(own: int | None, asked: int | None, dialect: Dialect) -> int | None:
    """Return the lower of two limits. Clients ask for more than the synchronous HTTP API allows, so theirs is reduced to that."""
    if asked is not None and dialect is Dialect.HTTP_MASKED:
        asked = min(asked, MOST_MASKED_TOKENS)
    return min((each for each in (own, asked) if each is not None), default=None)


def _extra(asked: Sampling, spec: Spec, has_tools: bool) -> Mapping[str, JSON]:
    """Return the agent's further parameters, without those that ask for the default behaviour."""
    given = {name: value for name, value in _extra_of(asked).items() if value is not None}
    unknown = sorted(given.keys() - set(_EXTRAS))
    if unknown:
        text = f"is not supported; extra_json may have {', '.join(_EXTRAS)}"
        raise CallRefused("INVALID_CALL", f"sampling.extra_json.{unknown[0]:.100}", text)
    wanted = {name: value for name, value in given.items() if not _is_default(name, value, has_tools)}
    if wanted and (spec.completions.dialect not in ENGINES or spec.token_mode == TOKEN_MODE):
        name = next(iter(wanted))
        text = (
            "is not supported with this rollout's trainer: it needs an inference engine that applies the chat template itself "
            "(an engine without TOKEN_MODE_TOKENS)"
        )
        raise CallRefused("UNSUPPORTED", f"sampling.extra_json.{name}", text)
    return wanted


def _is_default(name: str, value: JSON, has_tools: bool) -> bool:
    """Return whether a parameter asks for what happens without it. Without tools, the model cannot call one in any case."""
    if name == "response_format":
        return isinstance(value, Mapping) and value.get("type") == "text"
    if name == "tool_choice":
        return value == "auto" or (value == "none" and not has_tools)
    return value is True or not has_tools


def _extra_of(sampling: Sampling) -> Mapping[str, JSON]:
    if not sampling.extra_json:
        return {}
    try:
        return parse_object(sampling.extra_json)
    except MalformedMessage as error:
        raise CallRefused("INVALID_CALL", "sampling.extra_json", f"must be one JSON object: {error}") from None
