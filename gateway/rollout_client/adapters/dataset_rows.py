"""Rows of a dataset: their messages and values as every adapter sends them, and the row of a prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""A prompt as a dataset has it: messages."""


def dataset_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the keys that `datasets` and Parquet add, with the value None, because other rows have them.

    Also inside content parts and tool calls. The content None stays beside tool calls, where it says that the model wrote no text.
    """
    found: dict[str, Any] = _without_none(message)
    if found.get("tool_calls") and "content" in message:
        found.setdefault("content", None)
    return found


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_without_none(each) for each in value]
    return value


def json_value(value: Any) -> Any:
    """Return a value with dictionaries for mappings, lists for tuples, and Python's values for those of numpy, at every depth."""
    if isinstance(value, Mapping):
        return {key: json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    return json_value(value.tolist()) if hasattr(value, "tolist") else value


class DatasetRows:
    """Finds the row of a prompt, for frameworks that pass on only the column "prompt" of their datasets.

    Args:
        datasets: the datasets. Each has a length, and its rows are mappings that are found by their numbers.
        name: name of the datasets in errors.
        otherwise: what a user can do for datasets that do not serve, for errors, such as "pass metadata_of=...".

    Raises ValueError if a dataset cannot be searched, or if rows with the same prompt differ in another column.
    """

    def __init__(self, datasets: Sequence[Any], name: str, otherwise: str) -> None:
        self._datasets = datasets
        self._name = name
        self._otherwise = otherwise
        self._places: dict[bytes, tuple[int, int]] = {}
        for number, each in enumerate(datasets):
            if not hasattr(each, "__getitem__") or not hasattr(each, "__len__"):
                raise ValueError(f"{name} cannot be searched for a prompt; {otherwise}")
            for at, prompt in enumerate(_prompts(each)):
                self._add(prompt, (number, at))

    def columns(self, prompt: Conversation) -> dict[str, Any]:
        """Return the other columns of a prompt's row. Raises ValueError if there is no such row."""
        place = self._places.get(_digest(prompt))
        if place is None:
            raise ValueError(f"no row of {self._name} has the prompt {str(prompt)[:200]!r}; {self._otherwise}")
        return self._columns_at(place)

    def _add(self, prompt: Conversation, place: tuple[int, int]) -> None:
        first = self._places.setdefault(_digest(prompt), place)
        if first == place:
            return
        one, other = self._columns_at(first), self._columns_at(place)
        differing = next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)
        if differing is not None:
            raise ValueError(
                f"rows {first[1]} and {place[1]} of {self._name} have the same prompt and different values of {differing!r}. "
                f"Rows are found by the prompt only, so they cannot be told apart: change a prompt, or {self._otherwise}"
            )

    def _columns_at(self, place: tuple[int, int]) -> dict[str, Any]:
        row = self._datasets[place[0]][place[1]]
        return {name: value for name, value in row.items() if name != "prompt"}


def _prompts(dataset: Any) -> Iterable[Conversation]:
    if hasattr(dataset, "column_names"):  # of `datasets`, which reads one column faster than whole rows
        return cast(Iterable[Conversation], dataset["prompt"])
    return (dataset[at]["prompt"] for at in range(len(dataset)))


def _digest(prompt: Conversation) -> bytes:
    try:
        text = json.dumps(prompt, sort_keys=True)
    except (TypeError, ValueError):
        raise ValueError(
            "a prompt has a value that is no JSON, such as an image; this server renders texts only"
        ) from None
    return hashlib.sha256(text.encode()).digest()
