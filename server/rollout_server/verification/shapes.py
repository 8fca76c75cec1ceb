"""Find the token lists of a training sample in the values of a file, by the names that trainers use.

The formats differ in their names, and in whether a value holds one row, one list per field with a row at each index (TRL), or a row
per turn (OpenEnv).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from rollout_server.verification.findings import FindingKind, Location, SampleFinding, shown_value


class SampleShape(StrEnum):
    """Formats of training samples.

    ROLLOUT: files of this project. TRL: the dictionary of a `rollout_func`. VERL: fields of `AgentLoopOutput`. OPENENV: a
    `TrainingTrace`. GENERIC: any object with the usual names.
    """

    ROLLOUT = "rollout"
    TRL = "trl"
    VERL = "verl"
    OPENENV = "openenv"
    GENERIC = "generic"


@dataclass(frozen=True, slots=True)
class ListNames:
    """The possible names of each list, the first one that exists is used."""

    prompt: tuple[str, ...]
    response: tuple[str, ...]
    mask: tuple[str, ...]
    logprobs: tuple[str, ...]


_NAMES: Final[Mapping[SampleShape, ListNames]] = MappingProxyType(
    {
        SampleShape.ROLLOUT: ListNames(("prompt_ids",), ("response_ids",), ("response_mask",), ("logprobs",)),
        SampleShape.TRL: ListNames(("prompt_ids",), ("completion_ids",), ("env_mask",), ("logprobs",)),
        SampleShape.VERL: ListNames(("prompt_ids",), ("response_ids",), ("response_mask",), ("response_logprobs",)),
        SampleShape.OPENENV: ListNames(
            ("prompt_token_ids",), ("completion_token_ids",), ("loss_mask",), ("per_token_logps",)
        ),
        SampleShape.GENERIC: ListNames(
            ("prompt_ids", "prompt_token_ids"),
            ("response_ids", "completion_ids", "response_token_ids", "completion_token_ids"),
            ("response_mask", "loss_mask", "env_mask", "completion_mask", "loss_masks"),
            (
                "logprobs",
                "response_logprobs",
                "rollout_log_probs",
                "per_token_logps",
                "completion_logprobs",
                "rollout_logprobs",
            ),
        ),
    }
)
_REWARDS: Final = ("reward", "reward_score", "rollout_reward", "rewards")
_UIDS: Final = ("uid", "rollout_uid", "rollout_id", "trajectory_id")
_GROUPS: Final = ("group_id", "group")
_LONGEST_ID: Final = 200
_ONLY_VERL: Final = frozenset({"response_logprobs", "reward_score", "extra_fields", "num_turns"})


class FieldNames(NamedTuple):
    """The names of a row's lists and reward, as they are in the file."""

    prompt: str
    response: str
    mask: str
    logprobs: str
    reward: str


class _Missing:
    """The type of `MISSING`."""


MISSING: Final = _Missing()
"""Stands for a field that a row does not have; None is a value."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """The lists of one row, unchecked.

    Args:
        location: of the row.
        shape: the format.
        names: of the lists and the reward.
        prompt, response, mask, logprobs, reward: the values; `MISSING` if there is none.
        uid: id of the rollout; empty: unknown.
        group: id of the group; empty: unknown.
        trainable: False if the row says that it must not train.
        turns: number of completions in the response, as the row gives it; 0: unknown.
        sample: the row itself, if it has the form of `rollout_client.export.to_dict`.
    """

    location: Location
    shape: SampleShape
    names: FieldNames
    prompt: object
    response: object
    mask: object
    logprobs: object
    reward: object
    uid: str = ""
    group: str = ""
    trainable: bool = True
    turns: int = 0
    sample: Mapping[str, Any] | None = None

    @property
    def spans(self) -> list[Any] | None:
        """The spans of a sample of this project; None: not known."""
        found = None if self.sample is None else self.sample.get("spans")
        return found if isinstance(found, list) else None

    @property
    def part(self) -> int:
        """The index of a sample of this project among those of its segment; 0: the first one, or not known."""
        found = 0 if self.sample is None else self.sample.get("part")
        return found if type(found) is int else 0


def shape_of(value: object) -> SampleShape | None:
    """Return the format of a value by its keys; None if it is no training sample."""
    if not isinstance(value, Mapping):
        return None
    if isinstance(value.get("turns"), list) and ("schema_version" in value or not _has_response(value)):
        return SampleShape.OPENENV
    if "response_ids" in value:
        if "segment_id" in value:
            return SampleShape.ROLLOUT
        if not _ONLY_VERL.isdisjoint(value):
            return SampleShape.VERL
    elif "completion_ids" in value and ("env_mask" in value or _is_columns(value["completion_ids"])):
        return SampleShape.TRL
    return SampleShape.GENERIC if _has_response(value) else None


def find_rows(value: object, location: Location, forced: SampleShape | None = None) -> Iterator[RawRow | SampleFinding]:
    """Yield the rows of a value, and findings about what holds no row.

    Args:
        value: a parsed line; a list holds one value per item.
        location: of the value.
        forced: the format to use; None: by the keys of each value.
    """
    if isinstance(value, list):
        for index, each in enumerate(value):
            # Not recursive: a list within a list is no sample.
            yield from _rows(each, Location(location.file, location.number, f"[{index}]."), forced)
    else:
        yield from _rows(value, location, forced)


def _rows(value: object, location: Location, forced: SampleShape | None) -> Iterator[RawRow | SampleFinding]:
    shape = forced or shape_of(value)
    if shape is None or not isinstance(value, Mapping):
        keys = ", ".join(map(repr, list(value)[:8])) if isinstance(value, Mapping) else f"a {type(value).__name__}"
        text = f"no training sample was recognised (found: {keys[:200] or 'no keys'}); --shape forces a format"
        yield SampleFinding(FindingKind.UNKNOWN_SHAPE, location, text)
    elif shape is SampleShape.OPENENV:
        yield from _trace(value, location)
    elif _is_columns(_first(value, _NAMES[shape].response)[1]):
        yield from _columns(value, location, shape)
    else:
        yield _row(value, location, shape)


def _has_response(value: Mapping[str, Any]) -> bool:
    return any(name in value for name in _NAMES[SampleShape.GENERIC].response)


def _is_columns(response: object) -> bool:
    """Return whether a list of token ids is a list of such lists."""
    return isinstance(response, list) and bool(response) and isinstance(response[0], list)


def _first(value: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, object]:
    """Return the first of the names that exists, with its value."""
    return next(((name, value[name]) for name in names if name in value), (names[0], MISSING))


def _row(value: Mapping[str, Any], location: Location, shape: SampleShape) -> RawRow:
    names = _NAMES[shape]
    lists = (names.prompt, names.response, names.mask, names.logprobs, _REWARDS)
    (prompt, prompt_ids), (response, response_ids), (mask, values), (logprobs, numbers), (reward, number) = (
        _first(value, each) for each in lists
    )
    sample = _sample(value, shape)
    uid, group = _text(value, _UIDS), _text(value, _GROUPS)
    if shape is SampleShape.VERL:
        # verl's own column "uid" names the group.
        uid, group = _text(sample, ("uid",)), _text(sample, ("group_id",)) or _text(value, ("uid", *_GROUPS))
    return RawRow(
        location,
        shape,
        FieldNames(prompt, response, mask, logprobs, reward),
        prompt_ids,
        response_ids,
        values,
        numbers,
        number,
        uid=uid,
        group=group,
        trainable=_is_trainable(value) and _is_trainable(sample),
        turns=_completions(value),
        sample=sample or None,
    )


def _sample(value: Mapping[str, Any], shape: SampleShape) -> Mapping[str, Any]:
    """Return the fields of our own sample in a row, if it has them."""
    if shape is SampleShape.ROLLOUT:
        return value
    extra = value.get("extra_fields")
    found = extra.get("rollout_sample") if isinstance(extra, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _text(value: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the first id that is not empty. A long one is shortened, with a digest, because ids are kept for earlier rows."""
    found = next((value[name] for name in names if value.get(name) not in (None, "")), "")
    text = str(found) if isinstance(found, str | int) else ""
    return text if len(text) <= _LONGEST_ID else f"{text[:50]}... {sha256(text.encode(errors='replace')).hexdigest()}"


def _is_trainable(value: Mapping[str, Any]) -> bool:
    """Return False if a row says that it must not train: `trainable` false, a reason why not, or slime's `remove_sample`."""
    return (
        value.get("trainable") is not False and not value.get("rollout_untrainable") and not value.get("remove_sample")
    )


def _completions(value: Mapping[str, Any]) -> int:
    """Return the number of completions by verl's `num_turns`, which counts the prompt, completions and environment messages."""
    turns = value.get("num_turns")
    return max(0, turns // 2) if type(turns) is int else 0


def _columns(value: Mapping[str, Any], location: Location, shape: SampleShape) -> Iterator[RawRow | SampleFinding]:
    """Yield the rows of an object with one list per field. A field that is null is null in all rows."""
    names = _NAMES[shape]
    lists = (
        names.prompt,
        names.response,
        names.mask,
        names.logprobs,
        _REWARDS,
        _UIDS,
        _GROUPS,
        ("rollout_untrainable",),
    )
    columns = dict(_first(value, each) for each in lists)
    response = _first(value, names.response)[0]
    count = len(value[response])
    for name, column in columns.items():
        if isinstance(column, list) and len(column) != count:
            text = f"{len(column)} rows, but {response} has {count}; trainers assign rows by position"
            yield SampleFinding(FindingKind.LENGTHS, location, text, name)
    for index in range(count):
        row = {name: _cell(column, index) for name, column in columns.items() if column is not MISSING}
        raw = _row({name: cell for name, cell in row.items() if cell is not MISSING}, location, shape)
        yield _renamed(raw, index)


def _cell(column: object, index: int) -> object:
    if not isinstance(column, list):
        return column
    return column[index] if index < len(column) else MISSING


def _renamed(raw: RawRow, index: int) -> RawRow:
    """Return the row with names such as `env_mask[2]`."""
    return replace(raw, names=FieldNames(*(f"{name}[{index}]" for name in raw.names)))


def _trace(value: Mapping[str, Any], location: Location) -> Iterator[RawRow | SampleFinding]:
    """Yield the turns of an OpenEnv trace. Its mask covers prompt and completion."""
    version, turns = value.get("schema_version", 1), value.get("turns", MISSING)
    if version != 1:
        text = f"schema_version is {shown_value(version)}; only version 1 is supported"
        yield SampleFinding(FindingKind.UNKNOWN_SHAPE, location, text, "schema_version")
    if not isinstance(turns, list):
        yield SampleFinding(FindingKind.MISSING_FIELD, location, "a list of turns is needed", "turns")
        return
    nodes: dict[str, int] = {}
    for index, turn in enumerate(turns):
        where = Location(location.file, location.number, f"{location.path}turns[{index}].")
        if not isinstance(turn, Mapping):
            yield SampleFinding(FindingKind.MISSING_FIELD, where, "a turn must be an object")
            continue
        node = turn.get("node_id")
        if isinstance(node, str) and nodes.setdefault(node, index) != index:
            text = f"the node_id of turns[{nodes[node]}] again; OpenEnv refuses such a trace"
            yield SampleFinding(FindingKind.INCONSISTENT, where, text, "node_id")
        yield _row(turn, where, SampleShape.OPENENV)
