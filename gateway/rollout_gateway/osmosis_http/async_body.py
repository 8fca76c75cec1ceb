"""Bodies of the asynchronous dialect's `POST /v1/rollout/init`.

Messages and `completion_params` are free-form: they are checked for what the contract needs of them, and travel on as the
texts they are.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rollout_gateway.osmosis_http.sync_body import (
    MAX_ROLLOUT_ID,
    Hints,
    RolloutId,
    Secret,
    ServerUrl,
    bound_metadata,
    not_blank,
    sliced,
    validated,
)

TURNS: Final = 10
GENERATED_TOKENS: Final = 8192

INIT_EXAMPLE: Final[dict[str, Any]] = {
    "rollout_id": "test-rollout-002",
    "server_url": "http://localhost:9001",
    "messages": [
        {"role": "system", "content": "You are a helpful calculator assistant with access to calculator tools."},
        {"role": "user", "content": "Please calculate 5 plus 3, and then multiply the result by 2."},
    ],
    "completion_params": {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512, "logprobs": True},
    "max_turns": TURNS,
    "max_tokens_total": GENERATED_TOKENS,
    "metadata": {"ground_truth": "16"},
}


class FreeMessage(BaseModel):
    """A message of the conversation, of any role. It goes through untouched."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, AfterValidator(not_blank)]


class InitBody(BaseModel):
    """Asks for a rollout of the asynchronous dialect. Unknown keys are ignored; null counts as absent."""

    model_config = ConfigDict(json_schema_extra={"examples": [INIT_EXAMPLE]})

    rollout_id: RolloutId
    server_url: ServerUrl = Field(
        description="The trainer; it answers POST {server_url}/v1/chat/completions and POST {server_url}/v1/rollout/completed."
    )
    messages: list[FreeMessage] = Field(description="May be empty.", fail_fast=True)
    completion_params: dict[str, Any] = Field(
        description="How the model samples: temperature (1.0 if absent), top_p (1.0), max_tokens (512), logprobs (true), "
        "stop (a text or a list of texts; none), and whatever else the trainer knows. A wrong value fails the rollout."
    )
    tool_server_url: str | None = Field(None, description="A gRPC server with further tools; any other URL is ignored.")
    max_turns: int | None = TURNS
    max_tokens_total: int | None = Field(GENERATED_TOKENS, description="Generated tokens of all turns together.")
    metadata: Hints | None = None
    api_key: Secret = Field(None, description="Sent to the trainer as a bearer token.")
    idempotency_key: Annotated[str, Field(max_length=MAX_ROLLOUT_ID)] | None = Field(
        None, description="A repeated request with the same key starts nothing; rollout_id if absent or blank."
    )


@dataclass(frozen=True, slots=True)
class ParsedInit:
    """A valid body: its values, and the texts that travel on verbatim.

    Args:
        body: the values.
        messages: one JSON object each.
        params: the values of `completion_params` as JSON texts, by key.
        metadata_json: one JSON object, or empty.
    """

    body: InitBody
    messages: tuple[str, ...]
    params: dict[str, msgspec.Raw]
    metadata_json: str


class _AsyncSlices(msgspec.Struct):
    messages: msgspec.Raw
    completion_params: dict[str, msgspec.Raw]
    metadata: msgspec.Raw = msgspec.Raw()


def parse_init(content: bytes, max_metadata_bytes: int) -> ParsedInit:
    """Reads the body of `POST /v1/rollout/init`. Raises InvalidBody."""
    body = validated(InitBody, content)
    slices = msgspec.json.decode(content, type=_AsyncSlices)
    metadata = b"" if body.metadata is None else bytes(slices.metadata)
    bound_metadata(metadata, max_metadata_bytes)
    return ParsedInit(
        body=body,
        messages=sliced(slices.messages),
        params=slices.completion_params,
        metadata_json=metadata.decode(),
    )
