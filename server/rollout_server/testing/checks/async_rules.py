"""Rules of the asynchronous HTTP API (docs/design.md, B): one key for all attempts of a turn, verbatim history, no mask."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from rollout_server.testing.checks.rollout_state import JudgedRollout, OutcomeNotice, TokenCounts
from rollout_server.testing.checks.turn import CompletionCall, Keyed
from rollout_server.testing.checks.verdict import RefusalReason

_STATUSES: Final = ("COMPLETED", "ERROR")
_LATENCIES: Final = ("total_latency_ms", "llm_latency_ms", "tool_latency_ms")
_COUNTS: Final = ("num_llm_calls", "num_tool_calls", "prompt_tokens", "response_tokens", "max_context_tokens")


def call_fault(call: CompletionCall, keyed: Keyed, state: JudgedRollout) -> tuple[RefusalReason, str] | None:
    """Return what is wrong with a request, apart from its history, as reason and text; None if it is correct."""
    if keyed.fault:
        return RefusalReason.BODY, keyed.fault
    if call.mask is not None:
        return RefusalReason.MASK, "response_mask is set, but in the asynchronous HTTP API the trainer derives it"
    if not keyed.turn_key:
        return (
            RefusalReason.KEY,
            "the header Idempotency-Key is missing: every attempt of a turn must send the turn's key",
        )
    if state.delivery:
        return (
            RefusalReason.OVER,
            "the outcome of this rollout was already delivered: no completion may be requested after it",
        )
    fault = _key_fault(keyed.turn_key, call, state)
    return (RefusalReason.KEY, fault) if fault else None


def _key_fault(key: str, call: CompletionCall, state: JudgedRollout) -> str | None:
    if key in state.turn_keys[:-1]:
        return f"the Idempotency-Key is that of turn {state.turn_keys.index(key) + 1}: each turn must have its own key"
    if state.turn_keys[-1:] == [key]:
        if state.repeats_last_request(call.messages):
            return None
        return f"the Idempotency-Key is that of turn {state.next_turn - 1}, but the messages differ"
    if state.pending_key not in ("", key):
        return f"turn {state.next_turn} was requested before under another Idempotency-Key"
    return None


def outcome_fault(notice: OutcomeNotice, state: JudgedRollout) -> str | None:
    """Return what is wrong with an outcome that is delivered for the first time; None if it is correct.

    Its messages and token counts are compared only if the completions were requested through the asynchronous HTTP API too.
    """
    body = notice.body
    fault = body_fault(body)
    if fault:
        return fault
    if not notice.key:
        return "the header Idempotency-Key is missing: every delivery of an outcome must send the same key"
    if notice.key in state.turn_keys:
        return "the Idempotency-Key is that of a turn"
    if state.turn_keys and not state.turn_keys[0]:
        return None
    completed = body["status"] == "COMPLETED"
    if body["final_messages"] or completed:
        fault = state.final_fault(body["final_messages"], with_completion=completed)
    return fault or _counts_fault(body["metrics"], state.reported_counts, completed=completed)


def body_fault(body: Mapping[str, Any]) -> str | None:
    """Return which field of an outcome is missing, unknown or of the wrong type; None if all are correct."""
    known = {name: value for name, value in body.items() if value is not None}
    if unknown := set(body) - set(_FIELDS):
        return f"unknown fields {sorted(unknown)}: put further fields into extra_fields"
    for name, (wanted, needed, fits) in _FIELDS.items():
        if name not in known and needed:
            return f"{name} is missing"
        if name in known and not fits(known[name]):
            return f"{name} has to be {wanted}"
    if known["status"] == "COMPLETED":
        return "error_message came with status COMPLETED" if "error_message" in known else None
    if not str(known.get("error_message", "")).strip():
        return "error_message has to describe the failure"
    return None if known["finish_reason"] == "error" else "finish_reason of an ERROR has to be 'error'"


def _counts_fault(metrics: Mapping[str, Any], reported: Sequence[TokenCounts], *, completed: bool) -> str | None:
    """Return how `metrics` differ from the sums of the token counts that the trainer reported.

    If the rollout failed, the last completion may have been lost or malformed, so one turn may be missing.
    """
    calls = metrics["num_llm_calls"]
    if calls != len(reported) and (completed or calls != len(reported) - 1):
        return f"metrics.num_llm_calls is {calls}, this trainer answered {len(reported)} turns"
    counted = reported[:calls]
    prompts, completions = [turn.prompt for turn in counted], [turn.completion for turn in counted]
    both = [None if p is None or a is None else p + a for p, a in zip(prompts, completions, strict=True)]
    sums = {"prompt_tokens": _sum_counts(prompts), "response_tokens": _sum_counts(completions)}
    sums["max_context_tokens"] = None if None in both else max((length for length in both if length), default=0)
    for name, right in sums.items():
        if right is not None and metrics[name] != right:
            return f"metrics.{name} is {metrics[name]}, this trainer reported {right}"
    return None


def _sum_counts(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_metrics(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    durations = all(_is_duration(value.get(name)) for name in _LATENCIES)
    return durations and all(_is_count(value.get(name)) for name in _COUNTS)


def _is_messages(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


_FIELDS: Final[Mapping[str, tuple[str, bool, Callable[[Any], bool]]]] = MappingProxyType(
    {
        "rollout_id": ("a string", True, lambda value: isinstance(value, str)),
        "status": (f"one of {_STATUSES}", True, lambda value: value in _STATUSES),
        "final_messages": ("a list of objects", True, _is_messages),
        "finish_reason": ("a string that is not empty", True, lambda value: isinstance(value, str) and value != ""),
        "error_message": ("a string", False, lambda value: isinstance(value, str)),
        "reward": ("a number", False, _is_number),
        "metrics": (f"an object with numbers {_LATENCIES} and counts {_COUNTS}", True, _is_metrics),
        "extra_fields": ("an object", True, lambda value: isinstance(value, dict)),
    }
)
"""By field name: description of the expected value, whether the field is required, and a check of a value."""
