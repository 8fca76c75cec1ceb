"""Sampling parameters in the requests of both HTTP APIs and of inference engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from rollout_server.core.spec import Sampling

_PROTOCOL_KEYS = frozenset({"rollout_id", "messages", "response_mask", "stream"})
# These keys could request several completions or a stream, which this client cannot read, or change the conversation.
_ENGINE_KEYS = frozenset({"messages", "tools", "stream", "stream_options", "n"})
_NAMED = MappingProxyType(
    {
        "temperature": (float, "a number"),
        "top_p": (float, "a number"),
        "max_tokens": (int, "a whole number"),
        "stop": (list[str], "a list of strings"),
        "logprobs": (bool, "true or false"),
    }
)
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class WrongParameter(ValueError):
    """A sampling parameter of the wrong type. The text names the parameter and the required type."""


def masked_parameters(sampling: Sampling) -> str:
    """Return the parameters as JSON members, for the synchronous HTTP API.

    `stop` is always present, and extras cannot replace named parameters.
    """
    own = {*_PROTOCOL_KEYS, *_NAMED, "model"}
    extra = {key: value for key, value in _extra(sampling).items() if key not in own}
    return _members({"model": "default", **_set(sampling), "stop": list(sampling.stop) or None}, extra)


def plain_parameters(sampling: Sampling) -> str:
    """Return the parameters as JSON members, for the asynchronous HTTP API.

    Unset parameters are omitted, and an extra may set a named parameter that is unset. Raises `WrongParameter` for an extra of
    the wrong type: `completion_params` is free-form in that API, so its values are validated here.
    """
    named = _set(sampling)
    extra = {key: value for key, value in _extra(sampling).items() if key not in (*_PROTOCOL_KEYS, *named)}
    for key, value in extra.items():
        _check(key, value)
    return _members(named if "model" in extra else {"model": "default", **named}, extra)


def engine_parameters(sampling: Sampling, own: Mapping[str, msgspec.Raw], limit: str = "max_tokens") -> str:
    """Return the parameters as JSON members, for an inference engine.

    `own` are the members that the engine's protocol sets; nothing replaces them. `limit` is the engine's name for `max_tokens`.
    Raises `WrongParameter` as `plain_parameters` does.
    """
    named = {limit if key == "max_tokens" else key: value for key, value in _set(sampling).items() if key not in own}
    extra = {key: value for key, value in _extra(sampling).items() if key not in (*_ENGINE_KEYS, *own, *named)}
    for key, value in extra.items():
        _check(key, value)
    return _members(named, {**own, **extra})


def _set(sampling: Sampling) -> Mapping[str, Any]:
    values = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "logprobs": sampling.logprobs,
        "stop": list(sampling.stop) or None,
    }
    return {key: value for key, value in values.items() if value is not None}


def _extra(sampling: Sampling) -> Mapping[str, msgspec.Raw]:
    return _raw_decoder.decode(sampling.extra_json) if sampling.extra_json else {}


def _check(key: str, value: msgspec.Raw) -> None:
    if key not in _NAMED:
        return
    kind, words = _NAMED[key]
    try:
        msgspec.json.decode(value, type=kind)
    except msgspec.ValidationError:
        raise WrongParameter(f"the sampling parameter `{key}` must be {words}") from None


def _members(named: Mapping[str, Any], extra: Mapping[str, msgspec.Raw]) -> str:
    written = json.dumps(named, ensure_ascii=True)[1:-1]
    spliced = (f"{json.dumps(key)}: {bytes(value).decode()}" for key, value in extra.items())
    return ", ".join(part for part in (written, *spliced) if part)
