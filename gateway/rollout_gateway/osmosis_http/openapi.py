"""What the gateway answers, for the OpenAPI description only: answers are spliced together, never validated."""

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout_gateway.osmosis_http.sync_body import ChatMessage


class Metrics(BaseModel):
    """What a rollout used; on errors, what was counted until then."""

    total_latency_ms: float
    llm_latency_ms: float
    tool_latency_ms: float
    num_llm_calls: int
    num_tool_calls: int
    prompt_tokens: int
    response_tokens: int
    max_context_tokens: int


class OutcomeWarning(BaseModel):
    """Something that did not end the rollout but that its user should know."""

    code: str
    message: str
    turn: int
    index: int | None = None


class ExtraFields(BaseModel):
    """Only the keys that have something to say, and what the agent adds."""

    model_config = ConfigDict(extra="allow")

    reward: float | None = None
    scores: dict[str, float] | None = None
    truncated: bool | None = None
    error_category: str | None = None
    http_status: int | None = Field(None, description="The trainer's HTTP status, where one came back.")
    warnings: list[OutcomeWarning] | None = None
    trace: list[dict[str, Any]] | None = None


class RolloutResponse(BaseModel):
    """How a rollout ended. One that failed is answered like this too, with status ERROR."""

    rollout_id: str
    status: Literal["COMPLETED", "ERROR"]
    final_messages: list[ChatMessage] = Field(description="The whole conversation; empty on ERROR.")
    finish_reason: str = Field(description="stop, max_turns, max_tokens, error or an agent's own word.")
    error_message: str | None
    metrics: Metrics
    extra_fields: ExtraFields


class ToolFunction(BaseModel):
    """A function that the model may call; `parameters` is a JSON Schema."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool | None = None


class FunctionTool(BaseModel):
    """A tool in OpenAI's form."""

    type: Literal["function"] = "function"
    function: ToolFunction


class ToolsResponse(BaseModel):
    """The tools of an agent, in the order in which the model is told."""

    tools: list[FunctionTool]


class PropertySchema(BaseModel):
    """A parameter. Further JSON Schema keys stand beside these."""

    model_config = ConfigDict(extra="allow")

    type: str
    description: str | None = None
    enum: list[str] | None = None


class ParametersSchema(BaseModel):
    """The parameters of a function."""

    model_config = ConfigDict(extra="allow")

    type: Literal["object"] = "object"
    properties: dict[str, PropertySchema]
    required: list[str]


class InitToolFunction(BaseModel):
    """A function that the model may call."""

    name: str
    description: str
    parameters: ParametersSchema
    strict: bool


class InitTool(BaseModel):
    """A tool in OpenAI's form, its schema in the plain shape that clients of the asynchronous dialect validate."""

    type: Literal["function"] = "function"
    function: InitToolFunction


_NUMBER: Final = {"type": "number", "description": "A number"}
_ADD: Final[dict[str, Any]] = {
    "name": "add",
    "description": "Add two numbers",
    "parameters": {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}, "required": ["a", "b"]},
    "strict": False,
}


class InitResponse(BaseModel):
    """A rollout was accepted; `rollout_id` is the first one's where the same idempotency key came before."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"rollout_id": "test-rollout-001", "tools": [{"type": "function", "function": _ADD}]}]
        }
    )

    rollout_id: str
    tools: list[InitTool]


class HealthResponse(BaseModel):
    """The server is up. `active_rollouts` run or wait for a place, `completed_rollouts` have ended since it started."""

    status: Literal["healthy"] = "healthy"
    service: Literal["rollout-server"] = "rollout-server"
    agent_loop: str = Field(description="The agent that runs where a request names none.")
    active_rollouts: int
    completed_rollouts: int


class UnhealthyResponse(BaseModel):
    """The server cannot be reached, does not answer as it should (then `detail` says more), or takes no new rollouts."""

    status: Literal["unhealthy", "draining"] = "unhealthy"
    service: Literal["rollout-server"] = "rollout-server"
    detail: str | None = None


class ErrorResponse(BaseModel):
    """Nothing was started, or nothing can be said about it."""

    detail: str


class Violation(BaseModel):
    """One fault of a body: where, and what."""

    type: str
    loc: list[str | int]
    msg: str


class InvalidBodyResponse(BaseModel):
    """The body does not validate; nobody was called."""

    detail: list[Violation]


def raw_body(model: type[BaseModel], examples: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """A route's `openapi_extra`, whose handler reads the raw body: FastAPI has to be told of the model.

    `examples` has `example` or `examples`, as OpenAPI has them. The model is one that the application describes.
    """
    content = {"application/json": {"schema": _reference(model), **examples}}
    return {"requestBody": {"required": required, "content": content}}


def error(description: str, model: type[BaseModel] = ErrorResponse) -> dict[str, Any]:
    """An entry of a route's `responses`. The application describes the model, once: FastAPI would compile it for every route."""
    return {"description": description, "content": {"application/json": {"schema": _reference(model)}}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
