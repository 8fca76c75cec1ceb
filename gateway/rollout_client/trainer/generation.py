"""What is asked of a model and what it brings back."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from osmosis.rollout.v1 import spec_pb2

MODEL_BIT: Final = 1 << 31
"""Set in a digest for each token that the model wrote (token.proto, Checkpoint); ids are below it."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. None means that the trainer decides; 0 is a value.

    Args:
        temperature: 0 to 2.
        top_p: 0 to 1.
        max_tokens: the most tokens of this answer.
        stop: texts that end it.
        logprobs: whether logprobs are wanted.
        extra_json: further parameters, the text of a JSON object; or empty.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool | None = None
    extra_json: str = ""


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer as it was sampled.

    Args:
        ids: the sampled token ids, at least one, the end token included where one was sampled.
        logprobs: one natural logarithm for each; None: unknown.
        finish_reason: "stop", "length" or a word of your own.
        policy_version: the policy that sampled, in your words; it comes back on each span of the training sample.
    """

    ids: Sequence[int] = field(repr=False)
    logprobs: Sequence[float] | None = field(default=None, repr=False)
    finish_reason: str = "stop"
    policy_version: str = ""


Generate: TypeAlias = Callable[[Sequence[int], SamplingParams], Awaitable[Generated]]
"""Prompt ids and how to sample, to an answer. It is cancelled when nobody waits for the answer any more."""
Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Ids of an answer, without the one that ends it, to its text."""


class TryAgainLater(Exception):
    """Raised by `generate` while it cannot: nothing was generated. The server asks again after `seconds`, if its time allows."""

    def __init__(self, seconds: float = 1.0) -> None:
        if not 0 <= seconds <= 86_400:
            raise ValueError("seconds must be from 0 to 86400")
        super().__init__(f"try again in {seconds} s")
        self.seconds = seconds


def sampling_params(proto: spec_pb2.Sampling) -> SamplingParams:
    """What a request asks for."""
    return SamplingParams(
        temperature=proto.temperature if proto.HasField("temperature") else None,
        top_p=proto.top_p if proto.HasField("top_p") else None,
        max_tokens=proto.max_tokens if proto.HasField("max_tokens") else None,
        stop=tuple(proto.stop),
        logprobs=proto.logprobs if proto.HasField("logprobs") else None,
        extra_json=proto.extra_json,
    )


def token_ids(values: Sequence[int], where: str) -> array[int]:
    """Token ids, compact. Raises TypeError and ValueError, which name the place."""
    try:
        ids = array("I", [operator.index(value) for value in values])
    except OverflowError:
        raise ValueError(f"{where} holds an id that is negative or 2^31 or more") from None
    except TypeError:
        raise TypeError(f"{where} must hold integers") from None
    if ids and max(ids) >= MODEL_BIT:
        raise ValueError(f"{where} holds an id that is 2^31 or more")
    return ids


def validate_generated(generated: Generated) -> tuple[array[int], array[float] | None]:
    """Ids and logprobs, compact, the logprobs as precise as they travel. Raises TypeError and ValueError for what is no answer."""
    if not isinstance(generated, Generated):
        raise TypeError(f"generate must return a Generated, not {type(generated).__name__}")
    ids = token_ids(generated.ids, "Generated.ids")
    if not ids:
        raise ValueError("Generated.ids is empty: an answer has at least its end token")
    for name in ("finish_reason", "policy_version"):
        if not isinstance(getattr(generated, name), str):
            raise TypeError(f"Generated.{name} must be a str")
    if generated.logprobs is None:
        return ids, None
    logprobs = array("f", [float(value) for value in generated.logprobs])
    if len(logprobs) != len(ids):
        raise ValueError(f"Generated.logprobs has {len(logprobs)} values for {len(ids)} ids")
    if not all(map(math.isfinite, logprobs)):
        raise ValueError("Generated.logprobs holds a value that is not finite")
    return ids, logprobs
