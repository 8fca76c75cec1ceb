"""Bodies of the synchronous dialect's `POST /rollout` and of the asynchronous one's `POST /v1/rollout/init`.

Messages, metadata and `completion_params` are checked for what the contract needs of them, and travel on as the texts they are.
"""

from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

MAX_ROLLOUT_ID: Final = 256
TURNS: Final = 10
GENERATED_TOKENS: Final = 8192


def not_blank(value: str) -> str:
    """The text itself. Raises ValueError for one of white space only."""
    if not value.strip():
        raise ValueError("must not be blank")
    return value


def http_url(value: str) -> str:
    """The URL without trailing slashes. Raises ValueError for what no trainer can be reached at."""
    try:
        parts = urlsplit(value)
        named = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        # Its text repeats the part of the URL that may hold a password.
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
    """What a tool call calls. Unknown keys are kept."""

    name: ShortText
    arguments: str | dict[str, Any] = Field(description="JSON as the model wrote it, or already an object.")


class ToolCall(_Open):
    """One call of a tool by the model. Unknown keys are kept."""

    id: ShortText
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(_Open):
    """A message of the conversation. It goes through untouched, unknown keys included."""

    role: Literal["system", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class FreeMessage(_Open):
    """A message of the conversation, of any role. It goes through untouched."""

    role: Annotated[str, AfterValidator(not_blank)]


class SamplingParams(BaseModel):
    """How the model samples."""

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    max_tokens: int = Field(512, ge=1, le=32768, description="The most tokens of one answer.")
    stop: Annotated[list[str], Field(fail_fast=True)] | None = None
    logprobs: bool = True


class Hints(_Open):
    """For agents and tools; the keys below also mean something to the server. A key that is null counts as absent."""

    agent: str | None = Field(None, description="The agent to run; the server's default one if absent.")
    max_assistant_turns: Hint | None = Field(None, description="Lowers max_turns.")
    max_user_turns: Hint | None = Field(None, description="Bounds the turns that ran tools.")
    budget_tokens: Hint | None = Field(None, description="Lowers max_tokens_total.")
    timeout_seconds: Annotated[float, Field(strict=True, gt=0, le=10**8)] | None = Field(
        None, description="Time limit of the rollout."
    )
    on_drift: Literal["warn", "fail"] | None = Field(
        None, description="What to do when the prompt that the trainer saw is not the one predicted."
    )


class Metadata(Hints):
    """For agents and tools; the keys below also mean something to the server. A key that is null counts as absent."""

    debug_trace: Annotated[Any, WithJsonSchema({"type": "boolean"})] = Field(
        False, description="true: `extra_fields.trace` of the answer tells turn by turn what happened."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Switches of the chat template.")


class RolloutBody(BaseModel):
    """Asks for a rollout of the synchronous dialect. Unknown keys are ignored."""

    rollout_id: RolloutId
    server_url: ServerUrl = Field(description="The trainer; it answers POST {server_url}/v1/chat/completions.")
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    sampling_params: SamplingParams
    tokenizer_name: str = Field(description="The tokenizer of the trainer's model.")
    tokenizer_revision: str | None = None
    max_turns: int = Field(TURNS, ge=1, le=100)
    max_tokens_total: int = Field(
        GENERATED_TOKENS, ge=1, le=1_000_000, description="Generated tokens of all turns together."
    )
    tool_server_url: str | None = None
    callback_api_key: Secret = Field(None, description="Sent to the trainer as a bearer token.")
    metadata: Metadata = Field(default_factory=Metadata)


class InitBody(BaseModel):
    """Asks for a rollout of the asynchronous dialect. Unknown keys are ignored; null counts as absent."""

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
