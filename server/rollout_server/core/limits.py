"""What a rollout may use up."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds; None is no bound.

    Args:
        turns: completions asked for.
        generated_tokens: tokens generated in all turns together. An answer that crosses the limit is kept whole.
        seconds: from the first turn to the end.
        calls_per_turn: tool calls that run of one answer.
        tool_turns: turns whose tools ran.
        bytes: UTF-8 bytes of all messages together.
    """

    turns: int | None = None
    generated_tokens: int | None = None
    seconds: float | None = None
    calls_per_turn: int | None = None
    tool_turns: int | None = None
    bytes: int | None = None

    def lower(self, other: Limits) -> Limits:
        """The lower of the two, limit by limit: of the request's and the agent's limit the lower holds."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return replace(
            self, **{name: b if a is None else a if b is None else min(a, b) for name, (a, b) in pairs.items()}
        )
