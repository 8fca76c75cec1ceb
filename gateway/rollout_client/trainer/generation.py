"""Input and output of `generate`: sampling parameters, generated tokens, and their validation."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Final, TypeAlias, TypeVar

from osmosis.rollout.v1 import spec_pb2

_T = TypeVar("_T")

MODEL_BIT: Final = 1 << 31
"""In a digest, this bit marks a generated token (token.proto, Checkpoint). Token ids are below it."""
ABORT: Final = "abort"
"""The `finish_reason` of a completion that was interrupted."""
LARGEST_STEP: Final = 2**63 - 1
"""Largest policy step: an int64."""
_AWAITABLES: Final = ("Awaitable", "Coroutine", "Future", "Task")
_HOW: Final = "write `async def {}`, or use SyncTrainer"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one turn. None: the trainer chooses; 0 is a value.

    Args:
        temperature: 0 to 2.
        top_p: 0 to 1.
        max_tokens: maximum number of tokens of this completion.
        stop: texts that end the completion.
        logprobs: True: logprobs are requested. False: they are dropped.
        extra_json: further parameters as the text of a JSON object; empty: none.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool | None = None
    extra_json: str = ""


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion as sampled.

    Args:
        ids: sampled token ids (int, 0 to 2^31 - 1), at least one unless it was aborted. Includes the stop token if one was sampled.
            Without the ids that were resumed (`Turn.resumed`).
        logprobs: natural logarithm of the probability of each id (finite float), same length as `ids`. None: unknown. They are
            stored as float32.
        finish_reason: "stop", "length" or another word. "abort": generation was interrupted, for example by a weight update. The
            rest of the turn is then requested, with these ids at the end of `Turn.ids`.
        policy_version: version of the policy that sampled; it appears on the spans of the training sample.
        policy_step: step of that policy, 0 to 2^63 - 1; later policies have larger steps. None: unknown.
    """

    ids: Sequence[int] = field(repr=False)
    logprobs: Sequence[float] | None = field(default=None, repr=False)
    finish_reason: str = "stop"
    policy_version: str = ""
    policy_step: int | None = None


@dataclass(frozen=True, slots=True)
class TurnImage:
    """An image of a prompt.

    Args:
        offset: index of the first token that stands for it, counted from the start of the prompt. None: `render` placed it.
        length: number of tokens that stand for it. None: `render` placed it.
        media_type: IANA media type, such as "image/png".
        data: bytes of the image file.
    """

    offset: int | None
    length: int | None
    media_type: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn to generate.

    Args:
        uid: the server's id of the rollout. The turns of a rollout share a prefix, so an engine that routes by it finds its cache.
        rollout_id: the trainer's id of the rollout.
        group_id: id of the rollout's group.
        index: index of the rollout in its group, from 0.
        segment_id: segment that the completion continues, unique within its rollout.
        turn: number of the turn in its rollout, from 1. `uid`, `segment_id` and `turn` together identify the request.
        ids: the prompt: token ids (int), at least one.
        sampling: sampling parameters of the turn.
        images: all images of the prompt, in its order.
        seconds_left: seconds until the rollout's time limit expires, 0 or more, when the call begins. None: it has no such limit.
        policy_step: the newest policy step that was announced for the rollout. None: none.
        resumed: number of ids at the end of `ids` that earlier, aborted calls of this turn generated. `sampling.max_tokens` is what
            is left.
        traceparent: W3C Trace Context of the server's span for this turn, for a request to an engine that traces. Empty: the server
            does not trace.
    """

    uid: str
    rollout_id: str
    group_id: str
    index: int
    segment_id: str
    turn: int
    ids: Sequence[int] = field(repr=False)
    sampling: SamplingParams
    images: Sequence[TurnImage] = ()
    seconds_left: float | None = None
    policy_step: int | None = None
    resumed: int = 0
    traceparent: str = ""


Generate: TypeAlias = (
    Callable[[Turn], Awaitable[Generated]] | Callable[[Sequence[int], SamplingParams], Awaitable[Generated]]
)
"""Coroutine function `generate(turn)` or `generate(prompt_ids, sampling)`. It is cancelled when no request waits for it."""
Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Function `decode(ids)`: token ids of a completion, without a trailing id of `end_ids`, to text."""


class TryAgainLater(Exception):
    """Raised by `generate` if it cannot generate now, for example during a weight update.

    The server repeats the request after `seconds` (0 to 86,400), unless the rollout's time limit expires first.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        if not 0 <= seconds <= 86_400:
            raise ValueError("seconds must be from 0 to 86400")
        super().__init__(f"try again in {seconds} s")
        self.seconds = seconds


async def resolved(value: _T | Awaitable[_T]) -> _T:
    """Return a value, or the result of an awaitable: `SyncTrainer` turns the user's functions into coroutine functions."""
    return await value if isinstance(value, Awaitable) else value


def takes_turn(generate: Callable[..., object]) -> bool:
    """Return whether `generate` has exactly one required positional parameter, so that it is called with a `Turn`.

    Any other function, also one whose signature cannot be read, is called as `generate(prompt_ids, sampling)`.
    """
    try:
        parameters = inspect.signature(generate).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in positional and each.default is Parameter.empty for each in parameters) == 1


def check_coroutine(function: Callable[..., object], name: str) -> None:
    """Raise TypeError for a `generate` or `generate_batch` that says by its annotation that it returns no awaitable.

    A plain function without an annotation may return one. If it does not, its first call fails, see `awaited`.
    """
    while isinstance(function, functools.partial):
        function = function.func
    defined = getattr(function, "__func__", function)
    if not inspect.isfunction(defined):
        defined = type(function).__call__
    if not inspect.isfunction(defined) or inspect.iscoroutinefunction(defined) or hasattr(defined, "__wrapped__"):
        return
    returns = str(defined.__annotations__.get("return", ""))
    if "Generated" in returns and not any(each in returns for each in _AWAITABLES):
        raise TypeError(f"{name} must be a coroutine function: {_HOW.format(name)}")


async def awaited(value: Awaitable[_T], name: str) -> _T:
    """Return the result of what `generate` or `generate_batch` has returned. Raises TypeError if that is no awaitable."""
    if not isinstance(value, Awaitable):
        raise TypeError(f"{name} returned {type(value).__name__}, which is not awaitable: {_HOW.format(name)}")
    return await value


def check_signature(function: Callable[..., object], arguments: int, forms: str) -> None:
    """Raise TypeError, with the possible `forms` such as "decode(ids)", unless a function takes that many arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(arguments))
    except TypeError:
        name = forms.partition("(")[0]
        raise TypeError(f"{name} is called as {forms}, but its parameters are {signature}") from None


def sampling_params(proto: spec_pb2.Sampling) -> SamplingParams:
    """Convert the sampling parameters of a request."""
    return SamplingParams(
        temperature=proto.temperature if proto.HasField("temperature") else None,
        top_p=proto.top_p if proto.HasField("top_p") else None,
        max_tokens=proto.max_tokens if proto.HasField("max_tokens") else None,
        stop=tuple(proto.stop),
        logprobs=proto.logprobs if proto.HasField("logprobs") else None,
        extra_json=proto.extra_json,
    )


def token_ids(values: Iterable[int], where: str) -> array[int]:
    """Return token ids as an array of uint32. Raises TypeError and ValueError that name `where`."""
    try:
        ids = array("I", [operator.index(value) for value in values])
    except OverflowError:
        raise ValueError(f"{where} contains an id outside 0 to 2^31 - 1") from None
    except TypeError:
        raise TypeError(f"{where} must contain integers") from None
    if ids and max(ids) >= MODEL_BIT:
        raise ValueError(f"{where} contains an id outside 0 to 2^31 - 1")
    return ids


def check_step(step: int | None, where: str) -> None:
    """Check a policy step: an int from 0 to 2^63 - 1, or None. Raises TypeError and ValueError that name `where`."""
    if step is None:
        return
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"{where} must be an int or None, not {type(step).__name__}")
    if not 0 <= step <= LARGEST_STEP:
        raise ValueError(f"{where} must be from 0 to 2^63 - 1")


def validate_generated(generated: Generated) -> tuple[array[int], array[float] | None]:
    """Check a completion and return its ids as uint32 and its logprobs as float32, the precision on the wire.

    Raises TypeError and ValueError that name the field.
    """
    if not isinstance(generated, Generated):
        raise TypeError(f"generate must return a Generated, not {type(generated).__name__}")
    ids = token_ids(generated.ids, "Generated.ids")
    for name in ("finish_reason", "policy_version"):
        if not isinstance(getattr(generated, name), str):
            raise TypeError(f"Generated.{name} must be a str")
    check_step(generated.policy_step, "Generated.policy_step")
    if not ids and generated.finish_reason != ABORT:
        raise ValueError("Generated.ids is empty; a completion has at least one token unless it was aborted")
    if generated.logprobs is None:
        return ids, None
    logprobs = array("f", [float(value) for value in generated.logprobs])
    if len(logprobs) != len(ids):
        raise ValueError(f"Generated.logprobs has {len(logprobs)} values for {len(ids)} ids")
    if not all(map(math.isfinite, logprobs)):
        raise ValueError("Generated.logprobs contains a value that is not finite")
    return ids, logprobs
