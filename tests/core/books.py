"""What a rollout comes to, counted from what was put in: what the machine is held against."""

from __future__ import annotations

from dataclasses import replace

from rollout_server.core.ledger import Tokens, Turn
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message
from rollout_server.core.outcome import Metrics
from rollout_server.core.record import Answered, ToolReturned

from .naive import NaiveLedger


class Books:
    """The books of one rollout."""

    def __init__(self, limits: Limits, start: list[Message]) -> None:
        self.limits = limits
        self.messages = list(start)
        self.ledger = NaiveLedger()
        self.metrics = Metrics()
        self.warnings: list[tuple[str, int, int | None]] = []
        self.turn = 0
        self.tool_turns: set[int] = set()
        self.cut = False

    def count(self, **amounts: float) -> None:
        more = {name: getattr(self.metrics, name) + n for name, n in amounts.items()}
        self.metrics = replace(self.metrics, **more)

    def asking_is_over(self) -> str | None:
        size = sum(len(m.text.encode()) for m in self.messages)
        for reason, used, limit in (
            ("max_tokens", self.metrics.generated_tokens, self.limits.generated_tokens),
            ("max_turns", self.turn, self.limits.turns),
            ("max_bytes", size, self.limits.bytes),
        ):
            if limit is not None and used >= limit:
                return reason
        return None

    def calling_is_over(self) -> str | None:
        tokens, turns = self.limits.generated_tokens, self.limits.tool_turns
        if tokens is not None and self.metrics.generated_tokens >= tokens:
            return "max_tokens"
        if turns is not None and self.turn not in self.tool_turns and len(self.tool_turns) >= turns:
            return "max_turns"
        return None

    def answered(self, record: Answered) -> tuple[str, int, int, int] | None:
        drift = None
        prompt, generated = record.usage or (0, 0)
        if record.token_ids is not None:
            generated = len(record.token_ids)
        known = record.reported is not None or (record.predicted is not None and not self.ledger.missing)
        if known and record.token_ids is not None:
            drift = self.committed(record, record.token_ids)
            prompt = len(self.ledger.segments[-1].tokens) - generated
        else:
            self.skipped(record)
            prompt = prompt if record.reported is None else len(record.reported)
        self.count(turns=1, completion_ms=record.elapsed_ms, completion_attempts=record.attempts)
        self.count(prompt_tokens=prompt, generated_tokens=generated)
        longest = max(self.metrics.max_context_tokens, prompt + generated)
        self.metrics = replace(self.metrics, max_context_tokens=longest)
        if drift is not None:
            self.warnings.append(("token_drift", record.turn, drift[1]))
        self.warnings += [(code, record.turn, None) for code, _ in record.notes]
        self.messages.append(record.message)
        self.cut = record.finish_reason == "length"
        return drift

    def committed(self, record: Answered, answer: Tokens) -> tuple[str, int, int, int] | None:
        if self.ledger.missing and not self.ledger.segments:
            self.warnings.append(("tokens_unknown", record.turn, None))
        turn = Turn(
            record.turn,
            answer,
            record.logprobs,
            record.predicted,
            record.reported,
            record.policy_version,
        )
        return self.ledger.commit(turn)

    def skipped(self, record: Answered) -> None:
        """Once for each gap, and only beside turns whose tokens are known."""
        if self.ledger.segments and not self.ledger.missing:
            self.warnings.append(("tokens_unknown", record.turn, None))
        self.ledger.skip()

    def returned(self, records: list[ToolReturned]) -> None:
        self.count(
            tool_calls=len(records),
            tool_failures=len([r for r in records if r.failed]),
            tool_ms=max((r.elapsed_ms for r in records), default=0.0),
        )
