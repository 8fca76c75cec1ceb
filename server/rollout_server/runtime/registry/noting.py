"""What the log of the server says of rollouts."""

from __future__ import annotations

import logging

from rollout_server.core.outcome import Failure
from rollout_server.runtime.rollout import Rollout

_log = logging.getLogger(__name__)


def log_finished(rollout: Rollout) -> None:
    """The one line about a rollout: never contents, tokens or keys."""
    outcome = rollout.outcome
    if outcome is None:
        return
    end, metrics = outcome.end, outcome.metrics
    what = {"end": type(end).__name__.lower(), "turns": metrics.turns, "tool_calls": metrics.tool_calls}
    if isinstance(end, Failure):
        what |= {"category": end.category.value}
    what |= {
        "generated_tokens": metrics.generated_tokens,
        "warnings": len(outcome.warnings),
        "ms": round(metrics.total_ms),
    }
    text = " ".join(f"{key}={value}" for key, value in what.items())
    extra = {"rollout_uid": rollout.uid, "rollout_id": rollout.spec.rollout_id, "turn": rollout.machine.turn}
    _log.info("rollout finished: %s", text, extra=extra)
