"""What the gateway answers, for the OpenAPI description only: answers are spliced together, never validated."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout_gateway.body import ChatMessage


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


class RolloutAnswer(BaseModel):
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


class ToolsAnswer(BaseModel):
    """The tools of an agent, in the order in which the model is told."""

    tools: list[FunctionTool]


class HealthAnswer(BaseModel):
    """The server is up. The agent and the counts are missing where the server tells them only with a key."""

    status: Literal["healthy"] = "healthy"
    service: Literal["rollout-server"] = "rollout-server"
    agent_loop: str | None = None
    active_rollouts: int | None = None
    completed_rollouts: int | None = None


class UnhealthyAnswer(BaseModel):
    """The server cannot be reached or does not answer as it should."""

    status: Literal["unhealthy"] = "unhealthy"
    service: Literal["rollout-server"] = "rollout-server"
    detail: str


class ErrorAnswer(BaseModel):
    """Nothing was started, or nothing can be said about it."""

    detail: str


class Violation(BaseModel):
    """One fault of a body: where, and what."""

    type: str
    loc: list[str | int]
    msg: str


class InvalidBodyAnswer(BaseModel):
    """The body does not validate; nobody was called."""

    detail: list[Violation]
