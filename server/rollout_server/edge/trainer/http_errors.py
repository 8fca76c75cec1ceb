"""Error messages from a trainer's HTTP error response, with secrets redacted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from rollout_server.core.message import MalformedMessage, parse_object
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.edge.trainer.http_client import HttpResponse
from rollout_server.runtime.errors import RolloutFailed

TRAINER_TEXT = 500
"""Maximum length of the trainer's own text in an error message."""

_LOOKED_AT = 256 * 1024
_MEDIA_TYPE = re.compile(r"[a-z]{1,16}/[\w.+-]{1,48}")


def different_tools() -> RolloutFailed:
    """Return the error for a conversation that offers other tools than the rollout's agent."""
    text = (
        "the agent began a conversation with different tools, but over HTTP the trainer receives the agent's tools only once, when "
        "the rollout begins. Use the agent's tools in every conversation (an agent that owns its loop declares its own with "
        "tools=[...]), or a gRPC trainer"
    )
    return RolloutFailed(Failure(Category.VALIDATION, text, source=FailureClass.ENVIRONMENT))


def response_failure(response: HttpResponse, turn: int, secrets: Sequence[str]) -> Failure:
    """Return the failure of a turn whose response has a status other than 200."""
    status = response.status
    text = error_text(response, secrets)
    message = f": {text}" if text else ""
    if status == 429:
        category = Category.RATE_LIMITED
    elif status >= 500:
        category = Category.TRAINER_SERVER
    elif status >= 400:
        category = Category.TRAINER_CLIENT
    else:
        category = Category.VALIDATION
        message = "; a completion must have status 200, and redirects are not followed"
    if response.retry_after is not None:
        message += f"; its Retry-After of {response.retry_after:g} s is more than the time that is left"
    elif status == 429:
        message += "; it has no Retry-After in seconds or as a date, so the request is not sent again"
    return Failure(category, f"turn {turn}: the trainer answered {status}{message}", turn, status, FailureClass.TRAINER)


def error_text(response: HttpResponse, secrets: Sequence[str]) -> str:
    """Return the error message of a response without secrets; otherwise its size and type; "" for an empty body.

    No other part of a body is shown. A caller who names a target may not be allowed to read that target's responses.
    """
    text = _message(response.quotable)
    if text:
        return redact(text.encode("utf-8", "replace"), secrets)
    if not response.body[:_LOOKED_AT].strip():
        return ""
    kind = f" of type {response.content_type}" if _MEDIA_TYPE.fullmatch(response.content_type) else ""
    why = "are not a JSON error, and are" if response.may_be_quoted else "are"
    return f"{len(response.body)} bytes{kind} that {why} not shown"


def _message(body: bytes) -> str:
    """Return the text of a JSON error object.

    Forms: `{"detail"}` (FastAPI), `{"error": {"message"}}` (OpenAI), `{"error"}` and `{"object": "error", "message"}`.
    """
    if len(body) > _LOOKED_AT:
        return ""
    try:
        fields = parse_object(body.decode())
    except (MalformedMessage, UnicodeDecodeError):
        return ""
    error = fields.get("error")
    message = fields.get("message") if fields.get("object") == "error" else fields.get("detail", error)
    if isinstance(error, Mapping):
        message = error.get("message")
    if isinstance(message, list):  # FastAPI's 422 for a request that fails validation
        message = "; ".join(str(each.get("msg", "")) for each in message if isinstance(each, Mapping))
    return message.strip() if isinstance(message, str) else ""


def redact(body: bytes, secrets: Sequence[str]) -> str:
    """Return the beginning of a text with secrets removed, including their JSON-escaped and URL-quoted forms."""
    window = body[:_LOOKED_AT].decode("utf-8", "replace")
    # The longest first, because one secret may contain another.
    for secret in sorted(secrets, key=len, reverse=True):
        for form in {secret, json.dumps(secret)[1:-1], quote(secret), quote(secret, safe="")}:
            window = window.replace(form, "[redacted]")
    if secrets and len(body) > _LOOKED_AT:  # the end of the window may contain the beginning of a secret
        window = window[: -6 * max(map(len, secrets))]
    return window.strip()[:TRAINER_TEXT]
