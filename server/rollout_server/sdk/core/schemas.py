"""Data types of the earlier SDK: requests, responses, tools and metrics, with its field names and defaults.

docs/design.md, protocol B, describes their JSON forms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, model_validator
from pydantic_core import to_json

from rollout_server.core.message import ARGUMENTS, MalformedMessage, parse_object
from rollout_server.core.spec_validation import ID_LENGTH

MessageDict: TypeAlias = dict[str, Any]
"""A message, for example `{"role": "tool", "content": "8", "tool_call_id": "call_1"}`."""

SamplingParamsDict: TypeAlias = dict[str, Any]
"""Sampling parameters, for example `{"temperature": 0.7, "max_tokens": 512}`."""


class MetadataBound:
    """Process-wide limit of a request's metadata, in bytes of JSON. The earlier SDK lets programs change it."""

    default = 1024 * 1024

    def __init__(self) -> None:
        self.most = self.default

    def set(self, size_bytes: int) -> None:
        """Set the limit. Raises ValueError for less than one byte."""
        if size_bytes < 1:
            raise ValueError(f"the metadata limit must be at least 1 byte, not {size_bytes}")
        self.most = size_bytes


METADATA = MetadataBound()


def _not_blank(value: str) -> str:
    """Return the text. Raises ValueError if it is only white space."""
    if not value.strip():
        raise ValueError("must not be blank")
    return value


def _http_url(value: str) -> str:
    """Return the URL without trailing slashes. Raises ValueError unless it is http or https and has a host."""
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError("must be an http or https URL with a host")
    return value.rstrip("/")


RolloutId: TypeAlias = Annotated[str, Field(min_length=1, max_length=ID_LENGTH), AfterValidator(_not_blank)]
ServerUrl: TypeAlias = Annotated[str, AfterValidator(_http_url)]

DEFAULT_MAX_METADATA_SIZE_BYTES = METADATA.default


def get_max_metadata_size_bytes() -> int:
    """Return the limit of a `RolloutRequest`'s metadata, in bytes of JSON."""
    return METADATA.most


def set_max_metadata_size_bytes(size_bytes: int) -> None:
    """Set the limit for `RolloutRequest` in this process. The server's own limit is ROLLOUT_MAX_METADATA_BYTES.

    Raises ValueError for less than one byte.
    """
    METADATA.set(size_bytes)


class OpenAIFunctionPropertySchema(BaseModel):
    """One parameter of a tool."""

    type: str
    description: str | None = None
    enum: list[str] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a tool, as a JSON Schema object."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list)


def _no_parameters() -> OpenAIFunctionParametersSchema:
    return OpenAIFunctionParametersSchema(properties={})


class OpenAIFunctionSchema(BaseModel):
    """A function as it is described to the model."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=_no_parameters)
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool as it is described to models and trainers. `type` is "function"."""

    type: str
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A function call as the model wrote it, with arguments as text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A function call with parsed arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Return the call, and True if its arguments are not a JSON object; they are empty then."""
        try:
            arguments = dict(parse_object(parsed_schema.arguments, ARGUMENTS))
        except MalformedMessage:
            return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={}), True
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments), False


class OpenAIFunctionToolCall(BaseModel):
    """One tool call of a completion."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """Result of a tool: text, images and videos."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for name in ("image", "video"):
                if values.get(name) is not None and not isinstance(values[name], list):
                    raise ValueError(f"{name} must be a list, also for a single item")
        return values

    def is_empty(self) -> bool:
        """Return whether the result has no content."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Return whether the result is only text."""
        return bool(self.text) and not self.image and not self.video


class RolloutStatus(StrEnum):
    """Status of a finished rollout."""

    COMPLETED = "COMPLETED"
    ERROR = "ERROR"


class RolloutMetrics(BaseModel):
    """Usage of a rollout. Times in milliseconds."""

    total_latency_ms: float = 0.0
    llm_latency_ms: float = 0.0
    tool_latency_ms: float = 0.0
    num_llm_calls: int = 0
    num_tool_calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    max_context_tokens: int = 0


class RolloutRequest(BaseModel):
    """Request of a rollout. Within a rollout `api_key` is None, because agents do not receive credentials."""

    rollout_id: RolloutId
    server_url: ServerUrl
    messages: list[MessageDict]
    completion_params: SamplingParamsDict
    tool_server_url: str | None = None
    max_turns: int = 10
    max_tokens_total: int = 8192
    metadata: dict[str, Any] = Field(default_factory=dict)
    api_key: str | None = Field(default=None, repr=False)
    idempotency_key: str | None = None

    @model_validator(mode="after")
    def _check_metadata(self) -> RolloutRequest:
        size = len(to_json(self.metadata, inf_nan_mode="constants"))
        if size > METADATA.most:
            raise ValueError(f"metadata has {size} bytes as JSON; the limit is {METADATA.most}")
        return self


class InitResponse(BaseModel):
    """The response to `POST /v1/rollout/init`."""

    rollout_id: str
    tools: list[OpenAIFunctionToolSchema] = Field(default_factory=list)


class RolloutResponse(BaseModel):
    """The body of `POST /v1/rollout/completed`."""

    rollout_id: str
    status: RolloutStatus
    final_messages: list[MessageDict] = Field(default_factory=list)
    finish_reason: str | None = None
    error_message: str | None = None
    reward: float | None = None
    metrics: RolloutMetrics | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class CompletionsRequest(BaseModel):
    """The body of `POST /v1/chat/completions`."""

    model: str = "default"
    messages: list[MessageDict]
    rollout_id: RolloutId
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 512
    stop: list[str] | None = None
    logprobs: bool = True


class CompletionsChoice(BaseModel):
    """One choice of a completion."""

    index: int = 0
    message: MessageDict
    finish_reason: str = "stop"


class CompletionUsage(BaseModel):
    """Token counts of a completion, as the trainer reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class CompletionsResponse(BaseModel):
    """The response to `POST /v1/chat/completions`. `token_ids` and `logprobs` belong to the generated tokens."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str = "default"
    choices: list[CompletionsChoice]
    usage: CompletionUsage | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_token_ids: list[int] | None = None


def copy_message(message: Mapping[str, Any]) -> MessageDict:
    """Return a deep copy of a message. Raises TypeError or ValueError if it is not JSON."""
    made: MessageDict = json.loads(json.dumps(dict(message), allow_nan=False))
    return made
