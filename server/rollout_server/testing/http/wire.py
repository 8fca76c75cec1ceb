"""HTTP requests and responses of both trainer protocols (docs/design.md, A and B): API key, bodies and their values."""

import contextlib
import dataclasses
import hmac
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
from starlette.requests import Request

from rollout_server.testing.checks.renderer import Tools
from rollout_server.testing.checks.turn import CompletionCall, Keyed, ScriptedCompletion
from rollout_server.testing.checks.verdict import DeliveredOutcome, Verdict
from rollout_server.testing.model.engine import CompletedCall, Result
from rollout_server.testing.script import FaultKind

ID_LENGTH: Final = 256


def parse_body(raw: bytes) -> tuple[Any, str]:
    """Return the parsed body and "", or the body as text and the error if it is not JSON. Integers of any size are preserved."""
    try:
        return json.loads(raw), ""
    except ValueError as error:
        return raw.decode(errors="replace"), str(error)


def masked_call(body: object, tools: Tools | None) -> CompletionCall:
    """Return the completion request of a parsed body of the synchronous HTTP API. Raises ValueError for an invalid one.

    Messages are not changed; unknown keys are ignored.
    """
    fields, rollout_id = rollout_in(body)
    messages = messages_in(fields)
    if not messages:
        raise ValueError("messages has to be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] has to be an object with a role")
    return CompletionCall(rollout_id, messages, fields.get("response_mask"), tools)


def keyed_call(body: object, turn_key: str, tools: Tools | None) -> CompletionCall:
    """Return the completion request of a parsed body of the asynchronous HTTP API, whose messages may be any objects.

    Raises ValueError for invalid ids and messages. The judge reports other faults.
    """
    fields, rollout_id = rollout_in(body)
    messages = messages_in(fields)
    keyed = Keyed(turn_key, _parameter_fault(fields))
    return CompletionCall(rollout_id, messages, fields.get("response_mask"), tools, masked=False, keyed=keyed)


def rollout_in(body: object) -> tuple[dict[str, Any], str]:
    """Return a parsed body as an object, and its rollout id. Raises ValueError if either is invalid."""
    if not isinstance(body, dict):
        raise ValueError("the body is not a JSON object")
    rollout_id = body.get("rollout_id")
    if not isinstance(rollout_id, str) or not rollout_id.strip() or len(rollout_id) > ID_LENGTH:
        raise ValueError(f"rollout_id has to be a string of 1 to {ID_LENGTH} characters, and not blank")
    return body, rollout_id


def messages_in(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a body. Raises ValueError if they are not a list of objects."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise ValueError("messages has to be a list")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{index}] has to be an object")
    return messages


def _parameter_fault(body: Mapping[str, Any]) -> str:
    nulls = sorted(key for key, value in body.items() if value is None)
    if nulls:
        return f"null fields must be left out, but {', '.join(nulls)} is null"
    for name, (expected, fits) in _PARAMETERS.items():
        if name in body and not fits(body[name]):
            return f"{name} has to be {expected}"
    return ""


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_PARAMETERS: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = MappingProxyType(
    {
        "model": ("a string", lambda value: isinstance(value, str)),
        "temperature": ("a number", _is_number),
        "top_p": ("a number", _is_number),
        "max_tokens": ("a whole number", lambda value: type(value) is int),
        "stop": ("a list of strings", _is_strings),
        "logprobs": ("true or false", lambda value: isinstance(value, bool)),
    }
)


def completion_body(rollout_id: str, created: int, result: Result, *, with_logprobs: bool) -> bytes:
    """Return the JSON of a completion, or of a failure that looks like one. `created` is in seconds since the Unix epoch."""
    completion = result.completion
    choice = {"index": 0, "message": completion.message, "finish_reason": completion.finish_reason}
    body: dict[str, Any] = {
        "id": rollout_id,
        "object": "chat.completion",
        "created": created,
        "model": "default",
        "choices": [choice],
        **_extensions(completion, with_logprobs=with_logprobs),
    }
    if isinstance(result, CompletedCall):
        body |= {"usage": _usage(completion)} if result.reply.usage else {}
        body = {key: value for key, value in body.items() if key not in result.reply.omit} | dict(result.reply.override)
    elif result.fault.kind is FaultKind.EMPTY_CHOICES:
        body["choices"] = []
    elif result.fault.kind is FaultKind.NULL_MESSAGE:
        body["choices"] = [choice | {"message": None}]
    return msgspec.json.encode(body)


def _extensions(completion: ScriptedCompletion, *, with_logprobs: bool) -> Mapping[str, Any]:
    return {
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs if with_logprobs else None,
        "prompt_token_ids": completion.prompt_ids,
    }


def _usage(completion: ScriptedCompletion) -> Mapping[str, int]:
    prompt, generated = len(completion.prompt_ids), len(completion.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def verdict_body(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict with all its fields, `accepted` and `concluded`, for JSON."""
    fields = {field.name: getattr(verdict, field.name) for field in dataclasses.fields(verdict)}
    judged = {"accepted": verdict.accepted, "concluded": verdict.concluded}
    return {**fields, **judged, "earlier": [verdict_body(earlier) for earlier in verdict.earlier]}


def summary_body(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict without its tokens, for JSON: number of answered turns, refusals and faults."""
    return {
        "rollout_id": verdict.rollout_id,
        "accepted": verdict.accepted,
        "turns": len(verdict.turns),
        "drifted": sum(turn.drift is not None for turn in verdict.turns),
        "refusals": verdict.refusals,
        "faults": verdict.faults,
        "siblings": verdict.siblings,
        "outcome": _outcome_summary(verdict.outcome) if verdict.outcome else None,
        "earlier": len(verdict.earlier),
    }


def _outcome_summary(outcome: DeliveredOutcome) -> dict[str, Any]:
    fields = {key: outcome.body.get(key) for key in ("status", "finish_reason", "error_message", "reward")}
    return {**fields, "deliveries": outcome.deliveries, "answered": outcome.answered}


class Bearer:
    """Checks ``Authorization: Bearer KEY``. With `api_key` None every request is admitted."""

    REFUSAL: Final = "Invalid or missing API key"

    def __init__(self, api_key: str | None) -> None:
        self._accepted = None if api_key is None else _forms(f"Bearer {api_key}")

    def admits(self, request: Request) -> bool:
        """Return whether the request has the key, compared in constant time. Clients encode it in UTF-8 or in Latin-1."""
        if self._accepted is None:
            return True
        sent = request.headers.get("authorization", "").encode("latin-1")  # the bytes as received
        return any(hmac.compare_digest(sent, expected) for expected in self._accepted)


def _forms(text: str) -> tuple[bytes, ...]:
    forms = [text.encode()]
    with contextlib.suppress(UnicodeEncodeError):
        forms.append(text.encode("latin-1"))
    return tuple(forms)
