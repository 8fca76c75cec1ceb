"""Failures for an engine's error responses, with advice on what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollout_server.core.message import MalformedMessage, parse_object
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.edge.trainer.http_client import HttpResponse
from rollout_server.edge.trainer.http_errors import error_text

_LOOKED_AT: Final = 64 * 1024
_REFUSALS: Final = (400, 413, 422)
_CONTEXT: Final = re.compile(
    rb"context[ _-]?(length|window|size)|maximum model length|max_model_len|prompt is too long", re.IGNORECASE
)
_MAXIMUM: Final = re.compile(
    rb"(?:context[ _-]?(?:length|window|size)|maximum model length|max_model_len|n_ctx\")[^0-9]{0,30}([0-9]{1,9})(?![0-9])"
    rb"|> ?([0-9]{1,9}) maximum",
    re.IGNORECASE,
)
_PROMPT: Final = re.compile(
    rb"(?<!at least )(?<!upper bound for )\b([0-9]{1,9}) (?:input tokens|(?:tokens )?(?:in|from) the (?:input |prompt|messages))"
    rb"|(?:prompt|input|request) ?\((?:length )?([0-9]{1,9})"
    rb"|(?:messages resulted in|prompt is too long:|n_prompt_tokens\" ?:) ?([0-9]{1,9})",
    re.IGNORECASE,
)
_LIMIT: Final = re.compile(
    rb"max_(?:completion_)?tokens\W{1,4}is too large|at most [0-9,]{1,12} completion tokens", re.IGNORECASE
)
_TOO_LONG: Final = (
    "the conversation does not fit into the model's context; configure a longer context in the engine, or lower "
    "`sampling.max_tokens`, `limits.turns` or the size of tool results"
)


@dataclass(frozen=True, slots=True)
class EndpointNames:
    """How error messages name the fields that describe an engine's endpoint."""

    url: str = "`completions.url`"
    model: str = "`completions.model`"
    bearer: str = "`credentials.completions_bearer`"

    def hint(self, status: int) -> str:
        """Return what to check after a response with this status; empty if unknown."""
        if status in (401, 403):
            return f"the key is {self.bearer}"
        if status == 404:
            return f"check that {self.url} is the engine's URL, and {self.model} a name it serves (GET /v1/models lists them)"
        return f"check that {self.url} is the engine's URL" if status == 405 else ""


COMPLETIONS: Final = EndpointNames()


def engine_failure(
    response: HttpResponse, turn: int, secrets: Sequence[str], hint: str, names: EndpointNames
) -> Failure:
    """Return the failure for a status other than 200, or for an error body. `hint` replaces that of the status."""
    message, source = error_text(response, secrets), FailureClass.ENGINE
    hint = hint or names.hint(response.status)
    if exceeds_context(response):
        category, hint, source = Category.VALIDATION, _TOO_LONG, FailureClass.POLICY
    elif response.status == 429:
        category = Category.RATE_LIMITED
    elif response.status >= 500:
        category = Category.ENGINE_SERVER
    elif response.status >= 400:
        category = Category.ENGINE_CLIENT
    elif response.status == 200:
        category, hint = Category.ENGINE_SERVER, "with an error in place of choices"
    else:
        category, hint = Category.VALIDATION, "a completion must have status 200, and redirects are not followed"
    text = f"turn {turn}: the engine answered {response.status}" + (f" ({hint})" if hint else "")
    return Failure(category, f"{text}: {message}" if message else text, turn, response.status, source)


def is_error(response: HttpResponse) -> bool:
    """Return whether the body is an error object, regardless of the status: some proxies return errors with status 200."""
    if b'"choices"' in response.body or len(response.body) > _LOOKED_AT:
        return False
    try:
        return bool(parse_object(response.body.decode()).get("error"))
    except (MalformedMessage, UnicodeDecodeError):
        return False


def refuses_request(response: HttpResponse) -> bool:
    """Return whether the engine refuses this request and may accept another one, with other messages or parameters."""
    return response.status in _REFUSALS


def exceeds_context(response: HttpResponse) -> bool:
    """Return whether the engine refuses because prompt and completion together exceed the model's context."""
    return refuses_request(response) and _CONTEXT.search(response.body[:_LOOKED_AT]) is not None


def context_lengths(response: HttpResponse) -> tuple[int | None, int | None]:
    """Return the tokens of the prompt and of the model's context as such a refusal states them; None where it does not.

    vLLM does not count on beyond what is too much, and then states a lower bound ("at least"): that is no length of the prompt.
    """
    text = response.body[:_LOOKED_AT]
    found = [expression.search(text) for expression in (_PROMPT, _MAXIMUM)]
    tokens, maximum = [None if each is None else int(next(filter(None, each.groups()))) for each in found]
    return tokens, maximum


def exceeds_limit(response: HttpResponse) -> bool:
    """Return whether the engine refuses because it never generates as many tokens as `max_tokens`."""
    return response.status in (400, 422) and _LIMIT.search(response.body[:_LOOKED_AT]) is not None


def wants_other_limit(response: HttpResponse, other: str) -> bool:
    """Return whether the engine refuses the request and names the other parameter for the maximum number of tokens."""
    if exceeds_context(response) or exceeds_limit(response):  # vLLM then names both
        return False
    return response.status in (400, 422) and other.encode() in response.body[:_LOOKED_AT]


def abort_failure(turn: int, reason: str, attempts: int) -> Failure:
    """Return the failure of a turn that the engine aborted in every attempt."""
    text = (
        f"turn {turn}: the engine aborted the completion (finish_reason {reason!r}) in {attempts} attempts; check whether it was "
        "paused, stopped or updated"
    )
    return Failure(Category.ENGINE_SERVER, text, turn)
