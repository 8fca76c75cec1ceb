"""Messages of a dataset, as every adapter sends them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
