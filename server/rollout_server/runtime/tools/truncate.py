"""Cutting results that are too long for a conversation. The model reads how much is missing."""

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
    """How long a result may be.

    Args:
        text_bytes: of all its texts together, in UTF-8.
        other_bytes: of its images together, as data URLs.
        tokens: of all its texts together; None: any number.
        measure: counts them by the tokenizer of that name, where both are there.
    """

    text_bytes: int
    other_bytes: int
    tokens: int | None = None
    measure: TokenCounter | None = None
    tokenizer: TokenizerName | None = None

    async def cut(self, content: Content) -> Content:
        """The content, or the start of it with a note. Raises `ToolError` for what cannot be cut."""
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
        whole = "".join(_text_of_part(part) or "" for part in content)
        length = await self._fitting_length(whole)
        return content if length == len(whole) else _cut_parts(content, length, len(whole))

    async def _fitting_length(self, text: str) -> int:
        """How many characters of a text are kept."""
        length = _within(text, self.text_bytes)
        if self.tokens is None or 4 * length < self.tokens:  # no character takes more than four tokens
            return length
        if self.measure is not None and self.tokenizer is not None:
            fitting = await self.measure.fitting(self.tokenizer, text[:length], self.tokens)
            if fitting is not None:
                return fitting
        return min(length, _CHARACTERS_OF_A_TOKEN * self.tokens)


def _within(text: str, size: int) -> int:
    """How many characters have at most `size` bytes in UTF-8. Halves of surrogate pairs are written as question marks."""
    raw = text[:size].encode("utf-8", "replace")
    return min(len(text), size) if len(raw) <= size else len(raw[:size].decode("utf-8", "ignore"))


def _cut_parts(content: Sequence[Mapping[str, JSON]], length: int, whole: int) -> Content:
    """The first `length` characters of all texts together, and all that is no text."""
    parts: list[Mapping[str, JSON]] = []
    left = length
    for part in content:
        text = _text_of_part(part)
        if text is None:
            parts.append(part)
        elif left > 0:
            parts.append({**part, "text": text[:left]})
            left -= len(text)
    return [*parts, {"type": "text", "text": _notice(whole - length, whole)}]


def _text_of_part(part: Mapping[str, JSON]) -> str | None:
    text = part.get("text") if part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _notice(missing: int, whole: int) -> str:
    return f"\n[Cut: the last {missing:,} of {whole:,} characters are missing]"
