"""HTTP requests of the client, and their failures as SDK errors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from rollout_server.sdk.core.exceptions import (
    OsmosisRolloutError,
    OsmosisServerError,
    OsmosisTimeoutError,
    OsmosisTransportError,
    OsmosisValidationError,
)
from rollout_server.sdk.core.schemas import MessageDict

if TYPE_CHECKING:
    import httpx

_EXCERPT_LENGTH = 500


@dataclass(frozen=True, slots=True)
class PostResult:
    """Body of a successful response, and the milliseconds from request to response."""

    body: bytes
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class Post:
    """A POST request. All attempts send the same one."""

    url: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]

    async def send(self, client: httpx.AsyncClient) -> PostResult:
        """Send the request once. Raises an `OsmosisRolloutError` unless the response is 2xx."""
        import httpx

        started = time.monotonic()
        try:
            response = await client.post(self.url, json=self.body, headers=dict(self.headers))
        except httpx.TimeoutException as error:
            raise OsmosisTimeoutError(f"the trainer did not respond in time ({type(error).__name__})") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OsmosisTransportError(f"the trainer is not reachable ({type(error).__name__})") from error
        except (TypeError, ValueError) as error:
            raise OsmosisValidationError(f"the request is not JSON: {error}", 400) from None
        status = response.status_code
        if status >= 500:
            raise OsmosisServerError(f"the trainer returned {status}: {response.text[:_EXCERPT_LENGTH]}", status)
        if not 200 <= status < 300:
            raise OsmosisValidationError(f"the trainer returned {status}: {response.text[:_EXCERPT_LENGTH]}", status)
        return PostResult(response.content, 1000 * (time.monotonic() - started))

    @staticmethod
    def may_repeat(error: OsmosisRolloutError) -> bool:
        """Return whether a retry may succeed."""
        return isinstance(error, OsmosisServerError | OsmosisTimeoutError | OsmosisTransportError)


class Choice(BaseModel):
    """One choice of a completion."""

    message: MessageDict
    finish_reason: str | None = "stop"


class UsageBody(BaseModel, extra="allow"):
    """Token counts of a completion. The named ones go into the metrics; others are passed on."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class CompletionBody(BaseModel):
    """The fields of a completion that the client reads."""

    choices: list[Choice]
    usage: UsageBody | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_token_ids: list[int] | None = None


def read_completion(body: bytes) -> CompletionBody:
    """Parse a completion. Raises `OsmosisValidationError` naming the field that is wrong."""
    try:
        completion = CompletionBody.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"])) or "body"
        raise OsmosisValidationError(f"the trainer's completion is malformed: {path}: {first['msg']}", 200) from None
    if not completion.choices:
        raise OsmosisValidationError("the trainer's completion has no choices", 200)
    return completion
