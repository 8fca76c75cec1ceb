"""Limits of a rollout: turns, tokens, time, tool calls and bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

CALLS_PER_TURN = 128
"""Tool calls of one completion that run, if neither the request nor the agent sets a limit."""
MOST_CALLS_PER_TURN = 1024
"""The highest `calls_per_turn` that a rollout can have."""
CALLS_READ = 8
"""A completion may have this many times `calls_per_turn` calls. Those above `calls_per_turn` get an error as their result."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds of a rollout; None is unlimited, or the server's default where it has one.

    Args:
        turns: completions in all conversations together; 256 unless the request or the agent sets it.
        generated_tokens: tokens that the model generates in all turns. A completion that crosses the limit is kept whole.
        seconds: wall-clock time from the start of the run, not counting the queue, to its end.
        calls_per_turn: tool calls of one completion that run; each further call gets an error as its result. 128 by default, at
            most 1,024.
        tool_turns: turns in which tools run.
        bytes: UTF-8 bytes of all messages together, as JSON.
    """

    turns: int | None = None
    generated_tokens: int | None = None
    seconds: float | None = None
    calls_per_turn: int | None = None
    tool_turns: int | None = None
    bytes: int | None = None

    @property
    def calls_read(self) -> int:
        """The maximum number of tool calls in one completion.

        A completion with more is refused, because each call takes memory and time even if it does not run.
        """
        return CALLS_READ * (self.calls_per_turn or CALLS_PER_TURN)

    def lower(self, other: Limits) -> Limits:
        """Return the lower of the two bounds for each limit."""
        if other == Limits():
            return self
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return replace(
            self, **{name: b if a is None else a if b is None else min(a, b) for name, (a, b) in pairs.items()}
        )
