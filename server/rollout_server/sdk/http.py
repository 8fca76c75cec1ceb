"""One request of the client, and what its failures are called."""

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
    """What came back, and the milliseconds from the request to it."""

    body: bytes
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class Post:
    """What is posted: the same on each attempt."""

    url: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]

    async def send(self, client: httpx.AsyncClient) -> PostResult:
        """Sends it once. Raises an `OsmosisRolloutError`."""
        import httpx

        started = time.monotonic()
        try:
            response = await client.post(self.url, json=self.body, headers=dict(self.headers))
        except httpx.TimeoutException as error:
            raise OsmosisTimeoutError(f"no answer came in time ({type(error).__name__})") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OsmosisTransportError(f"the trainer could not be reached ({type(error).__name__})") from error
        except (TypeError, ValueError) as error:
            raise OsmosisValidationError(f"the request is not JSON: {error}", 400) from None
        status = response.status_code
        if status >= 500:
            raise OsmosisServerError(f"the trainer answered {status}: {response.text[:_EXCERPT_LENGTH]}", status)
        if not 200 <= status < 300:
            raise OsmosisValidationError(f"the trainer answered {status}: {response.text[:_EXCERPT_LENGTH]}", status)
        return PostResult(response.content, 1000 * (time.monotonic() - started))

    @staticmethod
    def may_repeat(error: OsmosisRolloutError) -> bool:
        """Whether another attempt may help."""
        return isinstance(error, OsmosisServerError | OsmosisTimeoutError | OsmosisTransportError)


class Choice(BaseModel):
    """An answer among those of a completion."""

    message: MessageDict
    finish_reason: str | None = "stop"


class UsageBody(BaseModel, extra="allow"):
    """The counts of a completion's tokens that metrics need; the others are passed on."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class CompletionBody(BaseModel):
    """What a client reads of a completion; trainers need not send the rest."""

    choices: list[Choice]
    usage: UsageBody | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_token_ids: list[int] | None = None


def read_completion(body: bytes) -> CompletionBody:
    """The completion that a body holds. Raises `OsmosisValidationError`."""
    try:
        completion = CompletionBody.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"])) or "body"
        raise OsmosisValidationError(f"the trainer's answer cannot be read: {path}: {first['msg']}", 200) from None
    if not completion.choices:
        raise OsmosisValidationError("the trainer's answer has no choices", 200)
    return completion
