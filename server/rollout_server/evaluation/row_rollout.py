"""The rollout of a row's result, as a page shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from osmosis.rollout.v1 import message_pb2, outcome_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client.enums import enum_values

from rollout_server.authoring.rollout_result import REFUSED
from rollout_server.evaluation.row_result import RowResult


def rollout_of_result(result: RowResult, agent: str, prefix: str = "") -> pb.Rollout:
    """Return the rollout of a result: its conversation and figures, without tokens. Facts of its row become labels.

    `prefix` begins the id of its group, which is that of its row, and distinguishes rows of several files.
    """
    facts = {**({} if result.ground_truth is None else {"ground truth": result.ground_truth}), **result.metadata}
    labels = {"row": str(result.row), "repetition": str(result.repeat)}
    outcome = outcome_pb2.Outcome(
        messages=_messages(result.messages or result.prompt),
        metrics=outcome_pb2.Metrics(
            total_ms=result.ms.total,
            completion_ms=result.ms.completions,
            tool_ms=result.ms.tools,
            turns=result.turns,
            tool_calls=result.tool_calls,
            tool_failures=sum(result.tool_errors.values()),
            generated_tokens=result.tokens.generated,
            prompt_tokens=result.tokens.prompt,
            max_context_tokens=result.tokens.longest,
        ),
        reward=result.reward,
        scores=result.scores,
        warnings=[_warning(text) for text in result.warnings],
    )
    set_end(outcome, result.end, result.reason, result.message, result.failure_class)
    spec = spec_pb2.RolloutSpec(
        rollout_id=result.rollout_id,
        agent=agent,
        group_id=f"{prefix}row-{result.row}",
        group_index=result.repeat - 1,
        messages=_messages(result.prompt),
        labels={**{_text(name): _text(value) for name, value in facts.items()}, **labels},
    )
    uid = result.uid or f"row-{result.row}-{result.repeat}"
    return pb.Rollout(uid=uid, spec=spec, state=pb.ROLLOUT_STATE_FINISHED, outcome=outcome, metrics=outcome.metrics)


def set_end(outcome: outcome_pb2.Outcome, end: str, reason: str, message: str, failure_class: str) -> None:
    """Set how a rollout ended, by the words of results and samples."""
    match end:
        case "stop":
            outcome.stop.reason = reason
        case "cancellation":
            outcome.cancellation.reason = reason
        case _:
            outcome.failure.category = number_of(outcome_pb2.FailureCategory.DESCRIPTOR, reason)
            outcome.failure.failure_class = number_of(outcome_pb2.FailureClass.DESCRIPTOR, failure_class)
            outcome.failure.message = f"refused: {message}" if end == REFUSED else message
            outcome.failure.SetInParent()


def _warning(text: str) -> outcome_pb2.Warning:
    code, _, message = text.partition(": ")
    return outcome_pb2.Warning(code=code, message=message)


def _messages(found: Sequence[Any]) -> list[message_pb2.Message]:
    # What `bounded` has left of a list that is too long is a text.
    shown = (each if isinstance(each, dict) else {"role": "…", "content": str(each)} for each in found)
    return [message_pb2.Message(json=json.dumps(each)) for each in shown]


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # a lone surrogate, which JSON allows, is no UTF-8


# Returns Any because the generated code has a separate type for each enum.
def number_of(enum: Any, word: str) -> Any:
    """Return the number of an enum's value by its word; 0 for an unknown one."""
    return enum_values(enum).get(word, 0)
