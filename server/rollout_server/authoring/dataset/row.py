"""A row of a dataset before and after conversion, and the conversion of values to JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from rollout_server.authoring.author_traceback import AuthorError


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One row of a dataset.

    Args:
        number: position in the dataset from 1, before shuffling.
        messages: the conversation that a rollout of the row starts with; images are content parts with URLs.
        metadata: all columns that are not part of the prompt, and `ground_truth`.
        fingerprint: hash of the content; differs if the row changed.
    """

    number: int
    messages: Sequence[Mapping[str, Any]]
    metadata: Mapping[str, Any]
    fingerprint: str

    @property
    def prompt(self) -> str:
        """Text of the last user message, or of the last message if there is none. Stands for images with `[image_url]`."""
        user = [message for message in self.messages if message["role"] == "user"]
        content = (user or self.messages)[-1].get("content") or ""
        if isinstance(content, str):
            return content
        return "\n".join(str(part.get("text", f"[{part['type']}]")) for part in content)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row as its source has it.

    Args:
        source: file or directory, for error messages.
        line: line of the file from 1; 0 if the source has no lines.
        number: position within `source`, from 1.
        fields: values by column.
    """

    source: str
    line: int
    number: int
    fields: Mapping[str, Any]

    def error(self, text: str) -> AuthorError:
        """Return an error that names file and line, or file and number of the row."""
        return AuthorError(text if self.line else f"row {self.number}: {text}", self.source, self.line)


def json_value(value: object) -> Any:
    """Convert a value of a table or of Python to JSON types.

    NaN and infinite numbers become None, because tables write missing values as NaN. Dates, times and exact decimals become texts,
    bytes become hexadecimal digits. Raises TypeError for any other type.
    """
    if value is None or isinstance(value, str | int | float):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {str(key): json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    if isinstance(value, bytes | date | time | timedelta | Decimal | UUID):
        return value.hex() if isinstance(value, bytes) else str(value)
    to_list = getattr(value, "tolist", None)  # an array or a number of NumPy
    if callable(to_list):
        return json_value(to_list())
    raise TypeError(f"{type(value).__name__} is not a type of JSON")
