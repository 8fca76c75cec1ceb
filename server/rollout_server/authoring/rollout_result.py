"""The result of one rollout, as the results file stores it and summaries and reports use it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from osmosis.rollout.v1 import outcome_pb2
from rollout_client import messages
from rollout_client.samples import category_of, failure_class_of

REFUSED = "refused"
"""`Result.end` of a rollout that the server refused to start."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token counts over all turns; `longest` is the maximum of prompt plus completion in one turn."""

    prompt: int = 0
    generated: int = 0
    longest: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """Times in milliseconds: the whole rollout, waiting for completions, and waiting for tools."""

    total: float = 0.0
    completions: float = 0.0
    tools: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one rollout.

    Args:
        rollout_id: the caller's id.
        end: "stop", "failure", "cancellation", or "refused" if the server did not start it.
        reason: the stop reason, the failure category, or the reason of the cancellation.
        message: description of the failure, for people.
        reward: the reward, or None.
        tool_errors: number of error results by tool.
        warnings: texts of warnings.
        messages: the conversation.
        uid: the server's id; empty if refused.
        failure_class: class of the failure, such as "policy" or "engine"; empty if it did not fail or the class is unknown.
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
    failure_class: str = ""

    @property
    def finished(self) -> bool:
        """Whether the rollout completed: it was not refused, did not fail and was not cancelled."""
        return self.end == "stop"

    def passes(self, threshold: float) -> bool:
        """Return whether the rollout completed with a reward of at least `threshold`.

        A reward that is only less by rounding passes too: weighted scores of 0.7, 0.2 and 0.1 add up to 0.9999999999999999.
        """
        if not self.finished or self.reward is None:
            return False
        return self.reward >= threshold or math.isclose(self.reward, threshold, rel_tol=1e-9, abs_tol=1e-9)


def result_of(rollout_id: str, uid: str, outcome: outcome_pb2.Outcome, tool_errors: dict[str, int]) -> Result:
    """Convert an outcome that was requested with the detail "messages"."""
    end = outcome.WhichOneof("end") or "failure"
    used = outcome.metrics
    reasons = {"stop": outcome.stop.reason, "cancellation": outcome.cancellation.reason}
    return Result(
        rollout_id=rollout_id,
        uid=uid,
        end=end,
        reason=reasons.get(end) or category_of(outcome.failure),
        message=outcome.failure.message if end == "failure" else "",
        failure_class=failure_class_of(outcome) if end == "failure" else "",
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
    """Replace lone surrogates, which JSON allows and UTF-8 cannot encode."""
    text = json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
    messages_read: list[dict[str, Any]] = json.loads(text)
    return messages_read
