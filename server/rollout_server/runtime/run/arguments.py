"""How the model samples in one turn, where its agent wants it otherwise than the request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypedDict

from rollout_server.core.message import JSON, parse_object
from rollout_server.core.spec import Dialect, Sampling
from rollout_server.core.spec_validation import sampling_violations
from rollout_server.runtime.run.context import AgentMistake


class SamplingOptions(TypedDict, total=False):
    """What `Run.sample` takes; what is not given, or None, is as in the request.

    temperature: from 0 to 2.
    top_p: from 0 to 1.
    max_tokens: the most tokens of the answer, 1 or more.
    stop: texts that end the answer; an empty list for none.
    logprobs: ask for the logprobs of sampled tokens.
    extra: further parameters by name, added to the request's; a name that both have is this one's.
    """

    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    logprobs: bool | None
    extra: Mapping[str, JSON] | None


def overridden(sampling: Sampling, options: Mapping[str, object], dialect: Dialect) -> Sampling:
    """The request's sampling with an agent's own options. Raises `AgentMistake` naming the option."""
    given = {name: value for name, value in options.items() if value is not None}
    read = {name: _read(name, value) for name, value in given.items()}
    extra = read.pop("extra", None)
    found = replace(sampling, **read)
    if extra:
        found = replace(found, extra_json=_merged(sampling.extra_json, extra))
    for violation in sampling_violations(found, dialect):
        name = violation.field.rpartition(".")[2]
        if name in given:
            raise AgentMistake(f"sample: {name}={given[name]!r:.100}: {violation.description}")
    return found


def _read(name: str, value: object) -> Any:
    if name not in _READERS:
        raise AgentMistake(
            f"sample: {name}: there is no such option, there are {', '.join(_READERS)}; what a trainer understands beside them "
            f"goes into extra={{{name!r}: ...}}"
        )
    read, wanted = _READERS[name]
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError):
        raise AgentMistake(f"sample: {name}={value!r:.100}: {wanted} is needed") from None


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError
    return int(value)


def _texts(value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError
    for text in texts:
        text.encode()  # halves of surrogate pairs could not be sent
    return tuple(texts)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _object(value: object) -> Mapping[str, JSON]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError
    doubled = sorted(value.keys() & _READERS.keys())
    if doubled:
        raise AgentMistake(f"sample: extra: {doubled[0]} is an option of its own, sample({doubled[0]}=...)")
    return parse_object(json.dumps(dict(value), allow_nan=False))


def _merged(known_json: str, extra: Mapping[str, JSON]) -> str:
    """The request's extra parameters with these; verbatim, unless some are replaced."""
    known = parse_object(known_json) if known_json else {}
    if known and known.keys().isdisjoint(extra):
        return f"{known_json.rstrip()[:-1]}, {json.dumps(extra)[1:]}"
    try:
        return json.dumps({**known, **extra}, allow_nan=False)
    except ValueError:
        text = "sample: extra: the request's own extra parameters hold a number that is too large to be written again"
        raise AgentMistake(text) from None


_READERS: Mapping[str, tuple[Callable[[object], Any], str]] = MappingProxyType(
    {
        "temperature": (_number, "a number"),
        "top_p": (_number, "a number"),
        "max_tokens": (_whole, "a whole number"),
        "stop": (_texts, "a text or a list of texts"),
        "logprobs": (_flag, "True or False"),
        "extra": (_object, "a dict that JSON can hold"),
    }
)
