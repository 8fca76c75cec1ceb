"""Bodies of `POST /rollout` (synchronous HTTP API) and `POST /v1/rollout/init` (asynchronous HTTP API).

Messages, metadata and `completion_params` are validated only as far as the contract requires, and passed on verbatim.
"""

from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

MAX_ROLLOUT_ID: Final = 256
TURNS: Final = 10
GENERATED_TOKENS: Final = 8192


def not_blank(value: str) -> str:
    """Return the text. Raises ValueError if it is empty or only white space."""
    if not value.strip():
        raise ValueError("must not be blank")
    return value


def http_url(value: str) -> str:
    """Return the URL without trailing slashes. Raises ValueError unless it is http or https with a host."""
    try:
        parts = urlsplit(value)
        named = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        # Not passed on: its text quotes the part of the URL that may contain a password.
        named = False
    if not named:
        raise ValueError("must be an http or https URL with a host")
    return value.rstrip("/")


Hint = Annotated[int, Field(strict=True, ge=1)]
RolloutId = Annotated[str, Field(min_length=1, max_length=MAX_ROLLOUT_ID), AfterValidator(not_blank)]
ServerUrl = Annotated[str, AfterValidator(http_url)]
ShortText = Annotated[str, Field(min_length=1, max_length=256)]
Secret = Annotated[str | None, Field(repr=False, json_schema_extra={"format": "password", "writeOnly": True})]


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Function(_Open):
    """The function of a tool call. Unknown keys are kept."""

    name: ShortText
    arguments: str | dict[str, Any] = Field(description="JSON text as the model generated it, or a parsed object.")


class ToolCall(_Open):
    """One tool call of the model. Unknown keys are kept."""

    id: ShortText
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(_Open):
    """A message of the conversation. Passed on unchanged, including unknown keys."""

    role: Literal["system", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class FreeMessage(_Open):
    """A message of the conversation with any role. Passed on unchanged."""

    role: Annotated[str, AfterValidator(not_blank)]


class SamplingParams(BaseModel):
    """Sampling parameters."""

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    max_tokens: int = Field(512, ge=1, le=32768, description="Maximum tokens of one completion.")
    stop: Annotated[list[str], Field(fail_fast=True)] | None = None
    logprobs: bool = True


class Hints(_Open):
    """Passed to the agent and its tools. The server also reads the keys below; null counts as absent."""

    agent: str | None = Field(None, description="Agent to run; the server's default agent if absent.")
    max_assistant_turns: Hint | None = Field(None, description="Lowers max_turns.")
    max_user_turns: Hint | None = Field(None, description="Limits the turns that run tools.")
    budget_tokens: Hint | None = Field(None, description="Lowers max_tokens_total.")
    timeout_seconds: Annotated[float, Field(strict=True, gt=0, le=10**8)] | None = Field(
        None, description="Time limit of the rollout in seconds."
    )
    on_drift: Literal["warn", "fail"] | None = Field(
        None, description="What to do if the prompt that the trainer used differs from the predicted one."
    )


class Metadata(Hints):
    """Passed to the agent and its tools. The server also reads the keys below; null counts as absent."""

    debug_trace: Annotated[Any, WithJsonSchema({"type": "boolean"})] = Field(
        False, description="true: `extra_fields.trace` of the response describes every turn."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Arguments of the chat template.")


class RolloutBody(BaseModel):
    """A rollout to run and wait for. Unknown keys are ignored."""

    rollout_id: RolloutId
    server_url: ServerUrl = Field(description="The trainer. The server calls POST {server_url}/v1/chat/completions.")
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    sampling_params: SamplingParams
    tokenizer_name: str = Field(description="Tokenizer of the trainer's model.")
    tokenizer_revision: str | None = None
    max_turns: int = Field(TURNS, ge=1, le=100)
    max_tokens_total: int = Field(GENERATED_TOKENS, ge=1, le=1_000_000, description="Token budget of all turns.")
    tool_server_url: str | None = None
    callback_api_key: Secret = Field(None, description="Bearer token for calls to the trainer.")
    metadata: Metadata = Field(default_factory=Metadata)


class InitBody(BaseModel):
    """A rollout to start. Unknown keys are ignored; null counts as absent."""

    rollout_id: RolloutId
    server_url: ServerUrl = Field(
        description="The trainer. The server calls POST {server_url}/v1/chat/completions, and finally "
        "POST {server_url}/v1/rollout/completed."
    )
    messages: list[FreeMessage] = Field(description="May be empty.", fail_fast=True)
    completion_params: dict[str, Any] = Field(
        description="Sampling parameters: temperature (default 1.0), top_p (1.0), max_tokens (512), logprobs (true), "
        "stop (a string or a list of strings; none), and others of the trainer. A wrong value fails the rollout."
    )
    tool_server_url: str | None = Field(None, description="A gRPC server with more tools; any other URL is ignored.")
    max_turns: int | None = TURNS
    max_tokens_total: int | None = Field(GENERATED_TOKENS, description="Token budget of all turns.")
    metadata: Hints | None = None
    api_key: Secret = Field(None, description="Bearer token for calls to the trainer.")
    idempotency_key: Annotated[str, Field(max_length=MAX_ROLLOUT_ID)] | None = Field(
        None, description="A repeated request with the same key starts nothing. Defaults to rollout_id, also if blank."
    )
