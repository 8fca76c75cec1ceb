"""What an engine said instead of an answer, and what a person can do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rollout_server.core.message import MalformedMessage, parse_object
from rollout_server.core.outcome import Category, Failure
from rollout_server.edge.trainer.http_client import HttpResponse
from rollout_server.edge.trainer.http_errors import error_text

_LOOKED_AT: Final = 64 * 1024
_CONTEXT: Final = re.compile(
    rb"context[ _-]?(length|window|size)|maximum model length|max_model_len|prompt is too long", re.IGNORECASE
)
_HINTS: Final = {
    401: "the key is `credentials.completions_bearer`",
    403: "the key is `credentials.completions_bearer`",
    404: "does `completions.url` lead to the engine, and is `completions.model` a name it serves (GET /v1/models lists them)?",
    405: "does `completions.url` lead to the engine?",
}
_TOO_LONG: Final = (
    "the conversation does not fit into the model's context; have the engine serve a longer one, or lower `sampling.max_tokens`, "
    "`limits.turns` or what tools return"
)


def refused_by_engine(answer: HttpResponse, turn: int, secrets: Sequence[str], hint: str = "") -> Failure:
    """The failure of a turn that was answered with another status than 200, or an error. `hint` goes before that of the status."""
    said = error_text(answer, secrets)
    hint = hint or _HINTS.get(answer.status, "")
    if exceeds_context(answer):
        category, hint = Category.VALIDATION, _TOO_LONG
    elif answer.status == 429:
        category = Category.RATE_LIMITED
    elif answer.status >= 500:
        category = Category.ENGINE_SERVER
    elif answer.status >= 400:
        category = Category.ENGINE_CLIENT
    elif answer.status == 200:
        category, hint = Category.ENGINE_SERVER, "with an error in place of choices"
    else:
        category, hint = Category.VALIDATION, "only 200 is an answer, and redirects are not followed"
    text = f"turn {turn}: the engine answered {answer.status}" + (f" ({hint})" if hint else "")
    return Failure(category, f"{text}: {said}" if said else text, turn, answer.status)


def is_error(answer: HttpResponse) -> bool:
    """Whether an answer is an error, whatever its status says: gateways in front of engines do that."""
    if b'"choices"' in answer.body or len(answer.body) > _LOOKED_AT:
        return False
    try:
        return bool(parse_object(answer.body.decode()).get("error"))
    except (MalformedMessage, UnicodeDecodeError):
        return False


def exceeds_context(answer: HttpResponse) -> bool:
    """The engine refuses because prompt and answer together are longer than what its model takes."""
    return answer.status in (400, 413, 422) and _CONTEXT.search(answer.body[:_LOOKED_AT]) is not None


def wants_other_limit(answer: HttpResponse, other: str) -> bool:
    """The engine refuses the request and speaks of the other name for the most tokens of an answer."""
    return answer.status in (400, 422) and other.encode() in answer.body[:_LOOKED_AT]


def aborted(turn: int, reason: str, attempts: int) -> Failure:
    """The failure of a turn that the engine broke off each time."""
    text = (
        f"turn {turn}: the engine broke its answer off (finish_reason {reason!r}) in {attempts} attempts; was it being "
        "paused, stopped or updated?"
    )
    return Failure(Category.ENGINE_SERVER, text, turn)
