"""The earlier SDK's values: requests, answers, tools and metrics, with its field names and defaults.

The shapes of the wire are in docs/design.md, dialect B.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import to_json

from rollout_server.core.message import MalformedMessage, parse_object
from rollout_server.core.spec_validation import ID_LENGTH

MessageDict: TypeAlias = dict[str, Any]
"""A message: `{"role": "tool", "content": "8", "tool_call_id": "call_1"}`."""

SamplingParamsDict: TypeAlias = dict[str, Any]
"""Sampling parameters: `{"temperature": 0.7, "max_tokens": 512}`."""


class MetadataBound:
    """The largest metadata of a request, which the earlier SDK lets a process set for itself."""

    default = 1024 * 1024

    def __init__(self) -> None:
        self.most = self.default

    def set(self, size_bytes: int) -> None:
        """Sets it. Raises ValueError for less than one byte."""
        if size_bytes < 1:
            raise ValueError(f"the largest metadata must have at least 1 byte, not {size_bytes}")
        self.most = size_bytes


METADATA = MetadataBound()


def require_id(value: str) -> str:
    """A rollout id. Raises ValueError for a blank one."""
    if not value.strip():
        raise ValueError("must not be blank")
    return value


def require_url(value: str) -> str:
    """An http or https URL with a host, without its trailing slash. Raises ValueError for another."""
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError("must be an http or https URL with a host")
    return value.rstrip("/")


DEFAULT_MAX_METADATA_SIZE_BYTES = METADATA.default


def get_max_metadata_size_bytes() -> int:
    """How many bytes of JSON the metadata of a `RolloutRequest` may have."""
    return METADATA.most


def set_max_metadata_size_bytes(size_bytes: int) -> None:
    """Sets it for requests made in this process; the server's own limit is ROLLOUT_MAX_METADATA_BYTES. ValueError below 1."""
    METADATA.set(size_bytes)


class OpenAIFunctionPropertySchema(BaseModel):
    """One parameter of a tool."""

    type: str
    description: str | None = None
    enum: list[str] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a tool, as JSON Schema of an object."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list)


def _no_parameters() -> OpenAIFunctionParametersSchema:
    return OpenAIFunctionParametersSchema(properties={})


class OpenAIFunctionSchema(BaseModel):
    """What the model is told of a function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=_no_parameters)
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool, as it is told to models and trainers. `type` is "function"."""

    type: str
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as a model wrote it: the arguments are text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call whose arguments were read."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """The call, and whether its arguments could not be read as an object: then there are none."""
        try:
            arguments = dict(parse_object(parsed_schema.arguments))
        except MalformedMessage:
            return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={}), True
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments), False


class OpenAIFunctionToolCall(BaseModel):
    """One tool call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """What a tool gave: text, and lists of images and videos."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for name in ("image", "video"):
                if values.get(name) is not None and not isinstance(values[name], list):
                    raise ValueError(f"{name} must be a list; put a single one into a list")
        return values

    def is_empty(self) -> bool:
        """There is nothing in it."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """There is text and nothing else."""
        return bool(self.text) and not self.image and not self.video


class RolloutStatus(StrEnum):
    """How a rollout ended."""

    COMPLETED = "COMPLETED"
    ERROR = "ERROR"


class RolloutMetrics(BaseModel):
    """What a rollout used; times in milliseconds."""

    total_latency_ms: float = 0.0
    llm_latency_ms: float = 0.0
    tool_latency_ms: float = 0.0
    num_llm_calls: int = 0
    num_tool_calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    max_context_tokens: int = 0


class RolloutRequest(BaseModel):
    """What a rollout was asked to be. In a rollout `api_key` is None: agents are not told credentials."""

    rollout_id: str = Field(min_length=1, max_length=ID_LENGTH)
    server_url: str
    messages: list[MessageDict]
    completion_params: SamplingParamsDict
    tool_server_url: str | None = None
    max_turns: int = 10
    max_tokens_total: int = 8192
    metadata: dict[str, Any] = Field(default_factory=dict)
    api_key: str | None = Field(default=None, repr=False)
    idempotency_key: str | None = None

    @field_validator("rollout_id")
    @classmethod
    def _check_id(cls, value: str) -> str:
        return require_id(value)

    @field_validator("server_url")
    @classmethod
    def _url(cls, value: str) -> str:
        return require_url(value)

    @model_validator(mode="after")
    def _check_metadata(self) -> RolloutRequest:
        size = len(to_json(self.metadata, inf_nan_mode="constants"))
        if size > METADATA.most:
            raise ValueError(f"metadata has {size} bytes as JSON, at most {METADATA.most} are allowed")
        return self


class InitResponse(BaseModel):
    """The answer to `POST /v1/rollout/init`."""

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
    rollout_id: str = Field(min_length=1, max_length=ID_LENGTH)
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 512
    stop: list[str] | None = None
    logprobs: bool = True

    @field_validator("rollout_id")
    @classmethod
    def _check_id(cls, value: str) -> str:
        return require_id(value)


class CompletionsChoice(BaseModel):
    """One answer among those of a completion."""

    index: int = 0
    message: MessageDict
    finish_reason: str = "stop"


class CompletionUsage(BaseModel):
    """Tokens as the trainer counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class CompletionsResponse(BaseModel):
    """The answer to `POST /v1/chat/completions`; the ids and logprobs are those of the generated tokens."""

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
    """A message of its own, with nothing in it that belongs to another. Raises TypeError or ValueError for what is not JSON."""
    made: MessageDict = json.loads(json.dumps(dict(message), allow_nan=False))
    return made
