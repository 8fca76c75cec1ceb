"""Samples as dictionaries of JSON values and as JSON Lines files, with all fields of `TrainingSample` under their names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from os import PathLike
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from rollout_client.samples import Parting, SampleSpan, TrainingSample, TurnReward

_LARGEST_ID: Final = 2**31 - 1
_Reader: TypeAlias = Callable[[object, str], Any]


def to_dict(sample: TrainingSample) -> dict[str, Any]:
    """Return all fields of a sample as JSON values. Spans, turn rewards and the parting are dictionaries. Lists are copied."""
    found = {each.name: getattr(sample, each.name) for each in fields(TrainingSample)}
    for name in ("prompt_ids", "response_ids", "response_mask", "logprobs"):
        found[name] = None if found[name] is None else list(found[name])
    found["scores"] = dict(sample.scores)
    if sample.spans is not None:
        found["spans"] = [_fields(span) for span in sample.spans]
    found["parting"] = None if sample.parting is None else _fields(sample.parting)
    found["turn_rewards"] = [_fields(given) for given in sample.turn_rewards]
    return found


def trained_mask(sample: TrainingSample) -> list[int]:
    """Return the mask that a trainer may use: all 0 if the sample is not trainable."""
    return list(sample.response_mask) if sample.trainable else [0] * len(sample.response_mask)


def trained_logprobs(sample: TrainingSample) -> list[float] | None:
    """Return the logprobs, 0.0 where `trained_mask` is 0."""
    if sample.logprobs is None or sample.trainable:
        return None if sample.logprobs is None else list(sample.logprobs)
    return [0.0] * len(sample.logprobs)


def _fields(value: SampleSpan | TurnReward | Parting) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value)}


def from_dict(values: Mapping[str, Any]) -> TrainingSample:
    """Create a sample from a dictionary of `to_dict`. Fields with a default may be missing.

    Raises ValueError that names the field if one is missing, unknown or of the wrong type, or if the sample is inconsistent.
    """
    return TrainingSample(**_read(values, TrainingSample, _SAMPLE))


def _read(values: object, kind: type, readers: Mapping[str, _Reader], where: str = "") -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'a sample'} is not an object")
    known = {each.name: each for each in fields(kind)}
    if unknown := [key for key in values if key not in known]:
        raise ValueError(f"{where}{unknown[0]!r} is not a known field")
    needed = [n for n, each in known.items() if each.default is MISSING and each.default_factory is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{where}{missing[0]} is missing")
    return {name: readers[name](value, where + name) for name, value in values.items()}


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is not a string")
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where} is neither true nor false")
    return value


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{where} is not an integer of 0 or more")
    return value


def _number(value: object, where: str) -> float:
    try:
        found = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # an int beyond the range of float
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{where} is not a finite number")
    return found


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} is not a list")
    return list(value)


def _ids(value: object, where: str) -> list[int]:
    found = _list(value, where)
    wrong = next((i for i, each in enumerate(found) if type(each) is not int or not 0 <= each <= _LARGEST_ID), None)
    if wrong is not None:
        raise ValueError(f"{where}[{wrong}] is not an integer from 0 to {_LARGEST_ID}")
    return found


def _numbers(value: object, where: str) -> list[float]:
    return [_number(each, f"{where}[{index}]") for index, each in enumerate(_list(value, where))]


def _spans(value: object, where: str) -> tuple[SampleSpan, ...]:
    listed = enumerate(_list(value, where))
    return tuple(SampleSpan(**_read(each, SampleSpan, _SPAN, f"{where}[{index}].")) for index, each in listed)


def _turn_rewards(value: object, where: str) -> tuple[TurnReward, ...]:
    listed = enumerate(_list(value, where))
    return tuple(TurnReward(**_read(each, TurnReward, _TURN_REWARD, f"{where}[{index}].")) for index, each in listed)


def _parting(value: object, where: str) -> Parting:
    return Parting(**_read(value, Parting, _PARTING, f"{where}."))


def _scores(value: object, where: str) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is not an object")
    return {_text(name, f"a name in {where}"): _number(each, f"{where}[{name!r}]") for name, each in value.items()}


def _or_none(reader: _Reader) -> _Reader:
    return lambda value, where: None if value is None else reader(value, where)


_SPAN: Final[Mapping[str, _Reader]] = MappingProxyType(
    {
        **dict.fromkeys(("author", "policy_version"), _text),
        **dict.fromkeys(("turn", "start", "stop"), _count),
        "reason": _or_none(_text),
        "policy_step": _or_none(_count),
    }
)
_TURN_REWARD: Final[Mapping[str, _Reader]] = MappingProxyType({"turn": _count, "value": _number})
_PARTING: Final[Mapping[str, _Reader]] = MappingProxyType(
    {"message": _count, **dict.fromkeys(("field", "expected", "found", "api", "client_agent"), _text)}
)
_SAMPLE: Final[Mapping[str, _Reader]] = MappingProxyType(
    {
        **dict.fromkeys(("segment_id", "kind", "parent_id", "uid", "rollout_id", "group_id", "end", "reason"), _text),
        **dict.fromkeys(("failure_class", "role", "untrainable_reason", "model"), _text),
        **dict.fromkeys(("prompt_ids", "response_ids", "response_mask"), _ids),
        **dict.fromkeys(("completion_ms", "tool_ms"), _number),
        "logprobs": _or_none(_numbers),
        "spans": _or_none(_spans),
        **dict.fromkeys(("parent_tokens", "part"), _count),
        "verified": _or_none(_flag),
        **dict.fromkeys(("truncated", "trainable"), _flag),
        "reward": _or_none(_number),
        "scores": _scores,
        "turn_rewards": _turn_rewards,
        "parting": _or_none(_parting),
    }
)


def write_jsonl(samples: Iterable[TrainingSample], path: str | PathLike[str], *, append: bool = False) -> int:
    """Write samples to a JSON Lines file and return how many were written: all of them, with `trainable` and its reason.

    Args:
        samples: the samples.
        path: the file.
        append: add to the file. By default its content is replaced.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot represent. Earlier samples stay in the file.
    """
    count = 0
    with open(path, "a" if append else "w", encoding="utf-8", newline="\n") as file:
        for sample in samples:
            file.write(_line(sample))
            count += 1
    return count


def read_jsonl(path: str | PathLike[str]) -> Iterator[TrainingSample]:
    """Iterate over the samples of a JSON Lines file. Empty lines are skipped.

    Raises ValueError with the line number for a line that is not a valid sample.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _sample(line, f"{path}, line {number}")


def _line(sample: TrainingSample) -> str:
    try:
        return json.dumps(to_dict(sample), ensure_ascii=True, allow_nan=False, separators=(",", ":")) + "\n"
    except ValueError as error:
        raise ValueError(f"rollout {sample.uid!r}, segment {sample.segment_id!r}: {error}") from None


def _sample(line: bytes, where: str) -> TrainingSample:
    try:
        return from_dict(json.loads(line.decode()))
    except RecursionError:
        raise ValueError(f"{where}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
