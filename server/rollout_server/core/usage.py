"""Resource use of a rollout, summed over its conversations, and the limits that it has met."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_server.core.ledger import ConversationLedger
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message, utf8_length
from rollout_server.core.outcome import Metrics
from rollout_server.core.record import Answered, ToolReturned


class Usage:
    """Counters of one rollout. They change with each record, and `metrics` is made of them when it is read.

    Attributes:
        bytes: UTF-8 bytes of all messages, each counted once.
        observed: approximate bytes of recorded data besides messages and tokens.
        tool_turns: turns in which at least one tool call started.
        total_ms, queued_ms: see `Metrics`; 0 until the end of the rollout.
    """

    def __init__(self, limits: Limits) -> None:
        self.bytes = 0
        self.observed = 0
        self.tool_turns = 0
        self.total_ms = 0.0
        self.queued_ms = 0.0
        self._limits = limits
        self._completion_ms = 0.0
        self._completion_attempts = 0
        self._tool_ms = 0.0
        self._turns = 0
        self._tool_calls = 0
        self._tool_failures = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._max_context_tokens = 0

    @property
    def metrics(self) -> Metrics:
        """Turns, tokens, tool calls and times."""
        return Metrics(
            total_ms=self.total_ms,
            completion_ms=self._completion_ms,
            tool_ms=self._tool_ms,
            queued_ms=self.queued_ms,
            turns=self._turns,
            tool_calls=self._tool_calls,
            tool_failures=self._tool_failures,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            max_context_tokens=self._max_context_tokens,
            completion_attempts=self._completion_attempts,
        )

    def met(self, turns: int | None = None) -> str | None:
        """Return the limit that forbids the next step, as the stop reason, or None.

        With `turns`, the number of turns so far, the step is a further turn. Otherwise only the token limit counts.
        """
        limits = self._limits
        if limits.generated_tokens is not None and self._generated_tokens >= limits.generated_tokens:
            return "max_tokens"
        if turns is not None and limits.turns is not None and turns >= limits.turns:
            return "max_turns"
        if turns is not None and limits.bytes is not None and self.bytes >= limits.bytes:
            return "max_bytes"
        return None

    def met_by_calls(self, calls: int) -> str | None:
        """Return the limit that forbids a tool call in a turn in which `calls` calls started, or None."""
        met, limit = self.met(), self._limits.tool_turns
        return "max_turns" if met is None and limit is not None and not calls and self.tool_turns >= limit else met

    def add_messages(self, messages: Iterable[Message]) -> None:
        """Count messages that were added to a conversation."""
        self.bytes += utf8_length(*[message.text for message in messages])

    def add_completion(self, record: Answered, line: ConversationLedger) -> None:
        """Count the completion of a turn that the ledger already contains."""
        generated, prompt = lengths(record, line)
        self._turns += 1
        self._completion_ms += record.elapsed_ms
        self._completion_attempts += record.attempts
        self._generated_tokens += generated
        self._prompt_tokens += prompt
        self._max_context_tokens = max(self._max_context_tokens, prompt + generated)
        self.observed += len(record.extra_json) + sum(len(plane.values) for plane in record.planes)
        self.add_messages([record.message])

    def add_calls(self, returned: Iterable[ToolReturned]) -> None:
        """Count the finished tool calls of one turn.

        They ran concurrently, so the time of the turn's tools is that of the slowest call.
        """
        results = list(returned)
        self._tool_calls += len(results)
        self._tool_failures += sum(result.failed for result in results)
        self._tool_ms += max((result.elapsed_ms for result in results), default=0.0)


def lengths(record: Answered, line: ConversationLedger) -> tuple[int, int]:
    """Return the number of generated tokens and of prompt tokens of a turn."""
    generated = record.generated
    if record.reported is not None:
        return generated, record.shared + len(record.reported)
    if line.segment is not None and not line.gap:  # the turn is in the ledger
        return generated, line.tokens - generated
    return generated, (record.usage or (0, 0))[0]
