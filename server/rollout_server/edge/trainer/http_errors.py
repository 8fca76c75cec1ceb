"""What a trainer said instead of an answer, without the secrets it may repeat."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from rollout_server.core.message import MalformedMessage, parse_object
from rollout_server.core.outcome import Category, Failure
from rollout_server.edge.trainer.http_client import HttpResponse

TRAINER_TEXT = 500
"""How much of a trainer's own words goes into an error message."""

_LOOKED_AT = 256 * 1024
_MEDIA_TYPE = re.compile(r"[a-z]{1,16}/[\w.+-]{1,48}")


def response_failure(response: HttpResponse, turn: int, secrets: Sequence[str]) -> Failure:
    """The failure of a turn that was answered with another status than 200."""
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
        message = "; only 200 is an answer, and redirects are not followed"
    return Failure(category, f"turn {turn}: the trainer answered {status}{message}", turn, status)


def error_text(response: HttpResponse, secrets: Sequence[str]) -> str:
    """The error message in an answer, without secrets; where there is none, what came instead, in numbers. Empty: nothing did.

    Nothing else of a body is ever shown. Whoever names a target may not be allowed to read what answers there.
    """
    text = _message(response.quotable)
    if text:
        return redact(text.encode("utf-8", "replace"), secrets)
    if not response.body[:_LOOKED_AT].strip():
        return ""
    kind = f" of type {response.content_type}" if _MEDIA_TYPE.fullmatch(response.content_type) else ""
    why = "are no JSON error, and are" if response.may_be_quoted else "are"
    return f"{len(response.body)} bytes{kind} that {why} not shown"


def _message(body: bytes) -> str:
    """The text of `{"detail"}` (FastAPI), `{"error": {"message"}}` (OpenAI), `{"error"}` or `{"object": "error", "message"}`."""
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
    if isinstance(message, list):  # FastAPI, of a request that it could not read
        message = "; ".join(str(each.get("msg", "")) for each in message if isinstance(each, Mapping))
    return message.strip() if isinstance(message, str) else ""


def redact(body: bytes, secrets: Sequence[str]) -> str:
    """The beginning of a text without the secrets that it may repeat, escaped or cut off."""
    window = body[:_LOOKED_AT].decode("utf-8", "replace")
    # The longest first: one secret may be a part of another.
    for secret in sorted(secrets, key=len, reverse=True):
        for form in {secret, json.dumps(secret)[1:-1], quote(secret), quote(secret, safe="")}:
            window = window.replace(form, "[redacted]")
    if secrets and len(body) > _LOOKED_AT:  # its end may be a part of one
        window = window[: -6 * max(map(len, secrets))]
    return window.strip()[:TRAINER_TEXT]
