"""The HTTP bodies of the synchronous dialect (http-wire.md, A), and the values that stand for them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from rollout_server.testing.call import Answer, Call
from rollout_server.testing.engine import Answered, Result
from rollout_server.testing.renderer import Tools
from rollout_server.testing.script import FaultKind
from rollout_server.testing.verdict import Verdict

ID_LENGTH: Final = 256


def call_from_body(body: object, tools: Tools | None) -> Call:
    """The call that a parsed body makes; ValueError says what is wrong with it.

    Messages stay as they are, unknown keys are ignored.
    """
    if not isinstance(body, dict):
        raise ValueError("the body is not a JSON object")
    rollout_id = body.get("rollout_id")
    if not isinstance(rollout_id, str) or not rollout_id.strip() or len(rollout_id) > ID_LENGTH:
        raise ValueError(f"rollout_id has to be a string of 1 to {ID_LENGTH} characters, and not blank")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages has to be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] has to be an object with a role")
    return Call(rollout_id, messages, body.get("response_mask"), tools)


def completion_body(rollout_id: str, created: int, result: Result, *, with_logprobs: bool) -> bytes:
    """The JSON of a completion, or of one of the failures that look like completions; `created` in Unix seconds."""
    answer = result.answer
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
    body: dict[str, Any] = {
        "id": rollout_id,
        "object": "chat.completion",
        "created": created,
        "model": "default",
        "choices": [choice],
        **_extensions(answer, with_logprobs=with_logprobs),
    }
    if isinstance(result, Answered):
        body = {key: value for key, value in body.items() if key not in result.reply.omit} | dict(result.reply.override)
    elif result.fault.kind is FaultKind.EMPTY_CHOICES:
        body["choices"] = []
    elif result.fault.kind is FaultKind.NULL_MESSAGE:
        body["choices"] = [choice | {"message": None}]
    return msgspec.json.encode(body)


def _extensions(answer: Answer, *, with_logprobs: bool) -> Mapping[str, Any]:
    return {
        "token_ids": answer.token_ids,
        "logprobs": answer.logprobs if with_logprobs else None,
        "prompt_token_ids": answer.prompt_ids,
    }


def verdict_body(verdict: Verdict) -> dict[str, Any]:
    """A verdict with everything in it: its fields, and `accepted`."""
    fields = {field.name: getattr(verdict, field.name) for field in dataclasses.fields(verdict)}
    return {**fields, "accepted": verdict.accepted, "earlier": [verdict_body(earlier) for earlier in verdict.earlier]}


def summary_body(verdict: Verdict) -> dict[str, Any]:
    """A verdict without its tokens: how many turns were answered, and what was wrong."""
    return {
        "rollout_id": verdict.rollout_id,
        "accepted": verdict.accepted,
        "turns": len(verdict.turns),
        "drifted": sum(turn.drift is not None for turn in verdict.turns),
        "refusals": verdict.refusals,
        "faults": verdict.faults,
        "earlier": len(verdict.earlier),
    }
