"""What the plain API answers, for the OpenAPI description only: answers are written from the contract, never validated."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout_gateway.osmosis_http.openapi import FunctionTool, error
from rollout_gateway.rest import enums

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Object = dict[str, Any]


class FieldError(BaseModel):
    """One fault of a request: where, and what."""

    field: str = Field(description="As in the body, query or path: `messages[0].role`.")
    message: str


class Error(BaseModel):
    """What was wrong, and what to do."""

    code: str = Field(description="A stable word, such as ROLLOUT_NOT_FOUND.")
    message: str
    request_id: str = Field(description="Under which the logs have it.")
    fields: list[FieldError]
    retry_after: float | None = Field(None, description="In seconds; absent where waiting does not help.")


class PlainError(BaseModel):
    """Every error of this API."""

    error: Error


class EndpointModel(BaseModel):
    """An endpoint that the server calls."""

    url: str
    dialect: enums.Dialect | None = None
    replays_turn_keys: bool | None = None
    model: str | None = None


class SpecModel(BaseModel):
    """What was asked for, by the names of the body that asked, and what the server filled in. What is unset is absent."""

    model_config = ConfigDict(extra="allow")

    rollout_id: str
    group_id: str | None = None
    agent: str | None = None
    messages: list[Object] | None = Field(None, description="From view messages on.")
    completions: EndpointModel | None = None
    outcome: EndpointModel | None = None
    tools: EndpointModel | None = None
    sampling: Object | None = None
    limits: Object | None = None
    tokenizer: Object | None = None
    metadata: Object | None = None
    labels: dict[str, str] | None = None


class RolloutMetrics(BaseModel):
    """What a rollout has used so far. Times are in milliseconds."""

    total_ms: float
    completion_ms: float
    tool_ms: float
    turns: int
    tool_calls: int
    tool_failures: int
    prompt_tokens: int
    generated_tokens: int
    max_context_tokens: int
    completion_attempts: int
    queued_ms: float


class DeliveryModel(BaseModel):
    """How far the delivery of the outcome is."""

    state: enums.DeliveryState
    attempts: int
    error: str
    next_attempt_time: Time | None
    end_time: Time | None


class WarningModel(BaseModel):
    """Something that did not end the rollout but that its user should know."""

    code: str
    message: str
    turn: int
    index: int | None


class OriginModel(BaseModel):
    """Where a segment comes from."""

    parent_id: str = Field(description="The segment it follows; empty for the first.")
    parent_tokens: int = Field(description="How many tokens at its start it shares with that one.")
    kind: str = Field(description="main, drift, gap, compaction, subagent or branch.")


class SampleSpanModel(BaseModel):
    """Whose tokens stand where in a sample, counted from the start of its prompt."""

    author: str = Field(description="model or other.")
    mask_reason: str | None = Field(description="Why they do not train: prompt, environment, closing or author.")
    turn: int
    start: int
    stop: int
    policy_version: str


class Sample(BaseModel):
    """A segment as trainers use it. Mask and logprobs are as long as the response."""

    segment_id: str
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[Literal[0, 1]] = Field(description="1 exactly where the model wrote a token that trains.")
    logprobs: list[float] | None = Field(description="0.0 where masked; null: at least one answer came without them.")
    spans: list[SampleSpanModel] = Field(description="They cover prompt and response without gaps.")
    origin: OriginModel
    verified: bool = Field(description="The trainer reported every prompt of it.")


class OutcomeModel(BaseModel):
    """How a rollout ended, and what there was until then. Beside `end` stand the fields of that end."""

    model_config = ConfigDict(extra="allow")

    end: Literal["stop", "failure", "cancellation"]
    reason: str | None = Field(None, description="Of stop and cancellation.")
    truncated: bool | None = Field(None, description="Of stop: the last answer was cut by length.")
    category: str | None = Field(None, description="Of failure.")
    message: str | None = Field(None, description="Of failure: what was wrong, where, and what to do.")
    turn: int | None = Field(None, description="Of failure.")
    http_status: int | None = Field(None, description="Of failure: the trainer's, where one came back.")
    reward: float | None
    scores: dict[str, float]
    extra: Object | None
    warnings: list[WarningModel]
    metrics: RolloutMetrics
    messages: list[Object] | None = Field(None, description="The whole conversation; from view messages on.")
    samples: list[Sample] | None = Field(None, description="One for each segment; from view samples on.")
    segments: list[Object] | None = Field(None, description="The ledger; in view full.")


class RolloutModel(BaseModel):
    """A rollout as it is now."""

    uid: str
    state: enums.State
    caller: str = Field(description="The name of the API key it was started with.")
    last_sequence: int = Field(description="Of its last event.")
    create_time: Time | None
    finish_time: Time | None
    spec: SpecModel
    metrics: RolloutMetrics
    delivery: DeliveryModel | None
    outcome: OutcomeModel | None = Field(description="null until it has finished.")


class Started(BaseModel):
    """A rollout was accepted (201) or found (200)."""

    rollout: RolloutModel
    attached: bool = Field(description="It had been accepted before.")
    tools: list[FunctionTool] = Field(description="What its model is to be told.")


class Page(BaseModel):
    """Rollouts, newest first."""

    rollouts: list[RolloutModel]
    next_page_token: str = Field(description="Empty: this was the last page.")


class Cancelled(BaseModel):
    """Those that were asked to end."""

    uids: list[str]


class AgentModel(BaseModel):
    """An agent of this server."""

    name: str
    version: str
    description: str
    default: bool = Field(description="It runs where a request names no agent.")
    replayable: bool
    limits: Object
    tools: list[FunctionTool]


class Agents(BaseModel):
    """The agents, by name."""

    agents: list[AgentModel]


class Alive(BaseModel):
    """This process answers."""

    status: Literal["ok"]


class Ready(BaseModel):
    """Rollouts can be started."""

    status: Literal["ready"]
    running: int
    queued: int


class Unready(BaseModel):
    """No rollout can be started now."""

    status: Literal["draining", "unavailable"]


_ERRORS: dict[int, str] = {
    400: "This cannot be done as things are, or a header is wrong; `code` says why.",
    401: "An API key is needed, as `Authorization: Bearer KEY`.",
    403: "The key does not allow this.",
    404: "There is no such rollout or agent, or it is somebody else's.",
    408: "The body did not arrive in time.",
    409: "The request id is known with another payload.",
    413: "The body, or the answer, is too large.",
    422: "Fields are wrong; each is named.",
    429: "Too many rollouts wait; try again after Retry-After.",
    500: "A fault of ours; the log has it under the request id.",
    503: "The rollout server is away or stops; try again after Retry-After.",
    504: "The rollout server did not answer in time; try again.",
}
_RETRY_AFTER = {"Retry-After": {"description": "In whole seconds.", "schema": {"type": "integer"}}}
_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}
_ANYWHERE = (400, 401, 403, 408, 413, 422, 429, 500, 503, 504)


# Found by the connection, which reads no path: in the shape that all of HTTP's own errors have here.
_BEFORE_ANY_ROUTE: dict[int, str] = {
    414: "The URL is too long; ask for less at once.",
    431: "The header is too large.",
}


def errors(*more: int) -> dict[int | str, dict[str, Any]]:
    """The errors that any route may answer with, and those of one route."""
    found: dict[int | str, dict[str, Any]] = {
        status: error(_ERRORS[status], PlainError) | {"headers": _HEADERS.get(status, {})}
        for status in sorted({*_ANYWHERE, *more})
    }
    return found | {status: error(text) for status, text in _BEFORE_ANY_ROUTE.items()}
