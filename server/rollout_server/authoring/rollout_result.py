"""How one rollout ended: what is written to a file of results, one line each, and what summaries and reports are made of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from osmosis.rollout.v1 import outcome_pb2
from rollout_client import messages
from rollout_client.samples import category_of

REFUSED = "refused"
"""The end of a rollout that the server did not take."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Counts over all turns; `longest` is the longest prompt and answer."""

    prompt: int = 0
    generated: int = 0
    longest: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds: all of it, waiting for completions, and waiting for tools."""

    total: float = 0.0
    completions: float = 0.0
    tools: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """One rollout.

    Args:
        end: "stop", "failure", "cancellation", or "refused" where the server did not take it.
        reason: why: a word of the agent's or a limit's, the category of a failure, or what was said of a cancellation.
        message: what went wrong, for a person.
        tool_errors: how often each tool answered with an error.
        warnings: texts.
        row: of the dataset, from 1; 0: there is none.
        repeat: which rollout of its row, from 1.
        fingerprint: of the row's content.
    """

    rollout_id: str
    end: str
    reason: str
    message: str = ""
    reward: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    tool_calls: int = 0
    tool_errors: dict[str, int] = field(default_factory=dict)
    tokens: Tokens = Tokens()
    ms: Times = Times()
    warnings: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    uid: str = ""
    row: int = 0
    repeat: int = 1
    fingerprint: str = ""

    @property
    def finished(self) -> bool:
        """It came to its own end; nothing went wrong on the way."""
        return self.end == "stop"

    def passes(self, threshold: float) -> bool:
        """Its reward reaches a threshold."""
        return self.finished and self.reward is not None and self.reward >= threshold


def result_of(rollout_id: str, uid: str, outcome: outcome_pb2.Outcome, tool_errors: dict[str, int]) -> Result:
    """What an outcome says, in the detail in which messages are told."""
    end = outcome.WhichOneof("end") or "failure"
    used = outcome.metrics
    reasons = {"stop": outcome.stop.reason, "cancellation": outcome.cancellation.reason}
    return Result(
        rollout_id=rollout_id,
        uid=uid,
        end=end,
        reason=reasons.get(end) or category_of(outcome.failure),
        message=outcome.failure.message if end == "failure" else "",
        reward=outcome.reward if outcome.HasField("reward") else None,
        scores=dict(outcome.scores),
        turns=used.turns,
        tool_calls=used.tool_calls,
        tool_errors=tool_errors,
        tokens=Tokens(used.prompt_tokens, used.generated_tokens, used.max_context_tokens),
        ms=Times(used.total_ms, used.completion_ms, used.tool_ms),
        warnings=_unique(f"{each.code}: {each.message}" for each in outcome.warnings),
        messages=_utf8_messages(messages(outcome)),
    )


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _utf8_messages(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without halves of surrogate pairs, which JSON may hold and UTF-8 may not."""
    text = json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
    messages_read: list[dict[str, Any]] = json.loads(text)
    return messages_read
