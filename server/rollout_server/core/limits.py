"""What a rollout may use up."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

CALLS_PER_TURN = 128
"""Tool calls that run of one answer where neither the request nor the agent says."""
MOST_CALLS_PER_TURN = 1024
"""The highest limit of calls that a rollout can have."""
CALLS_READ = 8
"""Of an answer so many times the limit of calls are read: those beyond the limit get an error as their result."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds; None is no bound.

    Args:
        turns: completions asked for.
        generated_tokens: tokens generated in all turns together. An answer that crosses the limit is kept whole.
        seconds: from the first turn to the end.
        calls_per_turn: tool calls that run of one answer; the others get an error as their result.
        tool_turns: turns whose tools ran.
        bytes: UTF-8 bytes of all messages together.
    """

    turns: int | None = None
    generated_tokens: int | None = None
    seconds: float | None = None
    calls_per_turn: int | None = None
    tool_turns: int | None = None
    bytes: int | None = None

    @property
    def calls_read(self) -> int:
        """Tool calls that one answer may hold. One with more is refused: each call takes memory and time, run or not."""
        return CALLS_READ * (self.calls_per_turn or CALLS_PER_TURN)

    def lower(self, other: Limits) -> Limits:
        """The lower of the two, limit by limit: of the request's and the agent's limit the lower holds."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return replace(
            self, **{name: b if a is None else a if b is None else min(a, b) for name, (a, b) in pairs.items()}
        )
