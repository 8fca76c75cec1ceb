"""Truncates results that are too long for a conversation. A note tells the model how much is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout_server.core.message import JSON
from rollout_server.core.spec import TokenizerName
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.protocols import TokenCounter

_CHARACTERS_OF_A_TOKEN = 4
_PARTS = 1000


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """Maximum size of a result.

    Args:
        text_bytes: total size of its texts in UTF-8.
        other_bytes: total size of its images as data URLs.
        tokens: total length of its texts in tokens; None: no limit.
        measure: counts tokens with `tokenizer`, if both are set.
    """

    text_bytes: int
    other_bytes: int
    tokens: int | None = None
    measure: TokenCounter | None = None
    tokenizer: TokenizerName | None = None

    async def cut(self, content: Content) -> Content:
        """Return the content, or its beginning with a note. Raise `ToolError` for content that cannot be truncated."""
        if isinstance(content, str):
            length = await self._fitting_length(content)
            return (
                content if length == len(content) else content[:length] + _notice(len(content) - length, len(content))
            )
        if len(content) > _PARTS:
            raise ToolError(f"The result has {len(content)} parts, at most {_PARTS} are allowed")
        others = sum(len(json.dumps(part, allow_nan=False)) for part in content if _text_of_part(part) is None)
        if others > self.other_bytes:
            raise ToolError(
                f"The result's images have {others:,} bytes as text, at most {self.other_bytes:,} are allowed"
            )
        full_text = "".join(_text_of_part(part) or "" for part in content)
        length = await self._fitting_length(full_text)
        return content if length == len(full_text) else _cut_parts(content, length, len(full_text))

    async def _fitting_length(self, text: str) -> int:
        """Return how many characters of a text are kept."""
        length = _within(text, self.text_bytes)
        if self.tokens is None or 4 * length < self.tokens:  # a character has at most four bytes and thus four tokens
            return length
        if self.measure is not None and self.tokenizer is not None:
            fitting = await self.measure.fitting(self.tokenizer, text[:length], self.tokens)
            if fitting is not None:
                return fitting
        return min(length, _CHARACTERS_OF_A_TOKEN * self.tokens)


def _within(text: str, size: int) -> int:
    """Return how many characters fit into `size` bytes of UTF-8. Lone surrogates count as question marks."""
    raw = text[:size].encode("utf-8", "replace")
    return min(len(text), size) if len(raw) <= size else len(raw[:size].decode("utf-8", "ignore"))


def _cut_parts(content: Sequence[Mapping[str, JSON]], length: int, total: int) -> Content:
    """Return the first `length` characters of all texts together, and all parts that are not text."""
    parts: list[Mapping[str, JSON]] = []
    left = length
    for part in content:
        text = _text_of_part(part)
        if text is None:
            parts.append(part)
        elif left > 0:
            parts.append({**part, "text": text[:left]})
            left -= len(text)
    return [*parts, {"type": "text", "text": _notice(total - length, total)}]


def _text_of_part(part: Mapping[str, JSON]) -> str | None:
    text = part.get("text") if part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _notice(missing: int, total: int) -> str:
    return f"\n[Cut: the last {missing:,} of {total:,} characters are missing]"
