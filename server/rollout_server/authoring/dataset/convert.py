"""Conversion of the rows of a source to rows of a dataset: columns, messages, metadata, sizes, fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.dataset.columns import DatasetColumns, has_value, value_at
from rollout_server.authoring.dataset.prompt import InvalidPrompt, PromptImage, prompt_messages
from rollout_server.authoring.dataset.row import DatasetRow, SourceRow, json_value
from rollout_server.core.message import MalformedMessage, parse_json

MAX_ROW_BYTES: Final = 32 * 1024 * 1024
"""Maximum size of a row as JSON, with its images as data URLs."""
MAX_ROWS: Final = 1_000_000
_encode: Final = json.JSONEncoder(sort_keys=True, allow_nan=False, ensure_ascii=False).encode
_SYSTEM_ROLES: Final = ("system", "developer")


@dataclass(frozen=True, slots=True)
class SizedRow:
    """A row and its size as JSON, in bytes."""

    row: DatasetRow
    size: int


def convert_rows(rows: Iterable[SourceRow], columns: DatasetColumns, system_prompt: str | None) -> Iterator[SizedRow]:
    """Convert rows as they are read.

    Args:
        rows: the rows of one dataset, in order.
        columns: names of the columns.
        system_prompt: replaces the system prompt of every row; empty for none. None keeps them.

    Raises:
        AuthorError: with file and line or row, if a row is invalid or there are more than `MAX_ROWS`.
    """
    converter = _Converter(columns, system_prompt)
    for number, source in enumerate(rows, start=1):
        if number > MAX_ROWS:
            raise source.error(f"the dataset has more than {MAX_ROWS:,} rows; split it, or use --limit")
        yield converter.convert(number, source)


@dataclass(frozen=True, slots=True)
class _Converter:
    columns: DatasetColumns
    system_prompt: str | None

    def convert(self, number: int, source: SourceRow) -> SizedRow:
        """Convert one row. Raises `AuthorError`."""
        messages, metadata = self._messages(source), self._metadata(source)
        parts = [(self.columns.prompt, "", messages), *((key, key, metadata[key]) for key in sorted(metadata))]
        sizes, digest = [], hashlib.sha256()
        for column, label, value in parts:
            try:
                content = _encode([label, value]).encode()
            except (ValueError, TypeError, RecursionError) as error:
                raise _not_json(source, column, error) from None
            sizes.append((len(content), column))
            digest.update(content)
        size = sum(each for each, _ in sizes)
        if size > MAX_ROW_BYTES:
            largest, column = max(sizes)
            text = f"the row has {size:,} bytes, {largest:,} of them in the column {column}"
            raise source.error(f"{text}; at most {MAX_ROW_BYTES:,} are allowed, so shorten it")
        return SizedRow(DatasetRow(number, messages, metadata, digest.hexdigest()[:16]), size)

    def _messages(self, source: SourceRow) -> list[dict[str, Any]]:
        name = self.columns.prompt
        prompt = self._value(source, name)
        if self.columns.parsed and isinstance(prompt, str):
            prompt = _parse(source, name, prompt)
        try:
            messages = prompt_messages(name, prompt, self._images(source))
        except InvalidPrompt as error:
            raise source.error(str(error)) from None
        except (TypeError, RecursionError) as error:
            raise _not_json(source, name, error) from None
        system = value_at(source.fields, self.columns.system_prompt)
        if system is not None and not isinstance(system, str):
            raise source.error(f"{self.columns.system_prompt} must be a text, not {type(system).__name__}")
        has_own = messages[0]["role"] in _SYSTEM_ROLES
        if self.system_prompt is not None:
            messages, system = messages[has_own:], self.system_prompt
            if not messages:
                raise source.error(f"{name} has only a system message; it needs a user message")
        elif system and has_own:
            text = f"{name} begins with a system message, and the column {self.columns.system_prompt} has another one"
            raise source.error(f"{text}; remove one, or use --column system_prompt= or --system-prompt TEXT")
        return [{"role": "system", "content": system}, *messages] if system else messages

    def _images(self, source: SourceRow) -> list[PromptImage]:
        name = self.columns.images
        value = value_at(source.fields, name)
        if isinstance(value, list | tuple):
            return [PromptImage(f"{name}[{index}]", each) for index, each in enumerate(value)]
        return [] if value is None else [PromptImage(name, value)]

    def _metadata(self, source: SourceRow) -> dict[str, Any]:
        columns, fields = self.columns, source.fields
        consumed = (columns.prompt, columns.images, columns.system_prompt)
        metadata: dict[str, Any] = {}
        for key, value in fields.items():
            if key in consumed:
                continue
            try:
                metadata[str(key)] = _info(value) if key == "info" else json_value(value)
            except (TypeError, RecursionError) as error:
                raise _not_json(source, key, error) from None
        if columns.ground_truth:
            if "ground_truth" in metadata and columns.ground_truth != "ground_truth":
                text = f"the ground truth is in {columns.ground_truth}, and there is a column ground_truth beside it"
                raise source.error(f"{text}; rename one, or use --column ground_truth=ground_truth")
            metadata["ground_truth"] = json_value(self._value(source, columns.ground_truth))
        return metadata

    def _value(self, source: SourceRow, name: str) -> Any:
        if not has_value(source.fields, name):
            present = ", ".join(map(str, source.fields)) or "none"
            text = f"the column {name} is missing (columns: {present})"
            raise source.error(f"{text}; the first row has it, so add it, as null for no value")
        return value_at(source.fields, name)


def _not_json(source: SourceRow, column: str, error: Exception) -> AuthorError:
    return source.error(f"the column {column} cannot be sent as JSON: {error}; change or remove it")


def _parse(source: SourceRow, name: str, text: str) -> object:
    try:
        return parse_json(text)
    except (MalformedMessage, RecursionError) as error:
        raise source.error(f"{name} is mapped to messages and is not JSON: {error}") from None


def _info(value: object) -> Any:
    """Return the column `info`, which verifiers also stores as the JSON text of an object."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return parse_json(value)
        except (MalformedMessage, RecursionError):
            return value
    return json_value(value)
