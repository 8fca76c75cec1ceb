"""Request bodies of the REST API.

Everything except free-form JSON (messages, metadata) is validated strictly. An unknown key is an error, because it is most
often a typo.
"""

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from rollout_client.enums import (
    Dialect,
    DriftPolicy,
    FailureClass,
    InterruptPolicy,
    StaleAction,
    State,
    TokenMode,
)

MAX_UINT32: Final = 2**32 - 1
MAX_SECONDS: Final = 10**9
#: Largest integer that every JSON parser represents exactly.
MAX_EXACT: Final = 2**53
UID_PATTERN: Final = "^[A-Za-z0-9_-]{1,64}$"

Object = dict[str, Any] | None
Name = Annotated[str, Field(max_length=256)]
Secret = Annotated[
    str | None, Field(repr=False, max_length=16_384, json_schema_extra={"format": "password", "writeOnly": True})
]
Uid = Annotated[str, Field(max_length=64)]
Score = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    """Refuses unknown keys and values of the wrong type. null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True)


class EndpointBody(_Strict):
    """An endpoint that the server calls."""

    url: str = Field(
        max_length=4096,
        # Only described here: the server checks the URL and returns a more precise error.
        json_schema_extra={"pattern": "^(https?|grpcs?)://"},
        description="URL with http:, https:, grpc: or grpcs:, with a host, without user name or password.",
    )
    dialect: Dialect | None = Field(None, description="API of the endpoint; derived from the URL if absent.")
    bearer: Secret = Field(None, description="Bearer token for calls to the endpoint. No API returns it.")
    replays_turn_keys: bool | None = Field(
        None,
        description="The endpoint returns the same completion for a repeated turn key and generates nothing again.",
    )
    model: Name | None = Field(
        None, description="Model name at the endpoint. Required for openai, vllm and sglang, refused for other values."
    )


class Sampling(_Strict):
    """Sampling parameters. The trainer chooses those that are absent."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Maximum tokens of one completion.")
    stop: list[str] | None = Field(None, max_length=64)
    logprobs: bool | None = None
    extra: Object = Field(None, description="Further parameters, passed on to HTTP trainers key by key.")


class Limits(_Strict):
    """Limits of the rollout. The agent has limits too; the lower value applies."""

    turns: int | None = Field(None, ge=0, le=MAX_UINT32, description="Completions.")
    generated_tokens: int | None = Field(None, ge=0, le=MAX_EXACT, description="Token budget of all turns together.")
    seconds: float | None = Field(None, gt=0, le=MAX_SECONDS, description="Time from the first turn to the end.")
    calls_per_turn: int | None = Field(None, ge=1, le=MAX_UINT32, description="Tool calls in one turn.")
    tool_turns: int | None = Field(None, ge=0, le=MAX_UINT32, description="Turns that run tools.")
    bytes: int | None = Field(None, ge=1, le=MAX_EXACT, description="Size of all messages together.")


class Tokenizer(_Strict):
    """The tokenizer and chat template of the trainer's model."""

    name: Name
    revision: Name | None = None
    template_kwargs: Object = Field(None, description="Arguments of the chat template.")


class Staleness(_Strict):
    """How old the tokens of the rollout may become, in policy steps."""

    max_lag: int = Field(ge=0, le=MAX_EXACT, description="Largest lag behind the newest policy that is not stale.")
    action: StaleAction | None = Field(None, description="What to do with stale tokens; keep if absent.")


class StartRollout(_Strict):
    """A rollout to start. Unknown keys are errors, except in messages, metadata, extra, template_kwargs and labels."""

    rollout_id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Your name for the rollout, sent to trainers. Defaults to the request id, or to a random id."
    )
    request_id: Name | None = Field(
        None,
        description="Idempotency key: a repeated request with the same id and body attaches to the same rollout. "
        "May be sent as the header Idempotency-Key instead.",
    )
    group_id: Name | None = Field(None, description="Your name for a group of rollouts, such as those of one prompt.")
    group_index: int | None = Field(None, ge=0, le=MAX_UINT32, description="Position in the group, from 0.")
    agent: Name | None = Field(None, description="The server's default agent if absent.")
    messages: list[dict[str, Any]] = Field(
        fail_fast=True, description="The conversation so far. Passed on unchanged, including unknown keys."
    )
    completions: EndpointBody = Field(description="The trainer or inference engine that generates completions.")
    outcome: EndpointBody | None = Field(None, description="Receives the outcome. If absent, the client reads it here.")
    tools: EndpointBody | None = Field(
        None, description="More tools: a gRPC ToolService, or an MCP server (http: and https:). Not for http_masked."
    )
    sampling: Sampling | None = None
    limits: Limits | None = None
    tokenizer: Tokenizer | None = Field(None, description="Required for dialect http_masked and for token_mode tokens.")
    token_mode: TokenMode | None = Field(None, description="Form of the prompt: messages, or rendered token ids.")
    on_drift: DriftPolicy | None = Field(
        None, description="What to do if the prompt that the trainer used differs from the ledger's prediction."
    )
    on_interrupt: InterruptPolicy | None = Field(None, description="What to do when the server restarts.")
    cancel_after_detach_seconds: float | None = Field(
        None, ge=0, le=MAX_SECONDS, description="Cancel after this time without an attached client; never if absent."
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Queued rollouts with a higher priority start first."
    )
    metadata: Object = Field(None, description="Passed to the agent and its tools.")
    labels: dict[str, str] | None = Field(None, max_length=64, description="For selecting rollouts later.")
    train_on: list[FailureClass] | None = Field(
        None, max_length=8, description="Failure classes whose samples train; policy and deadline if absent."
    )
    models: dict[str, EndpointBody] | None = Field(None, max_length=16, description="Further models, such as a judge.")
    staleness: Staleness | None = Field(None, description="How old its tokens may become; of any age if absent.")


class StartGroup(StartRollout):
    """Rollouts of one prompt, started together. The server numbers them, so `group_index` must be absent."""

    count: int = Field(ge=1, le=1024, description="Rollouts of the group.")
    min_usable: int | None = Field(None, ge=0, le=1024, description="Cancel the others once this many are usable.")
    refill: int | None = Field(None, ge=0, le=1024, description="How many failed rollouts may be started anew.")


class CancelRollouts(_Strict):
    """Which rollouts to cancel: those that match every given condition. At least one condition is required."""

    uids: list[Uid] | None = Field(None, max_length=1000)
    rollout_ids: list[Name] | None = Field(None, max_length=1000)
    group_id: Name | None = None
    agent: Name | None = None
    states: list[State] | None = Field(None, max_length=8)
    labels: dict[str, str] | None = Field(None, max_length=64, description="Rollouts with all of these labels.")
    callers: list[Name] | None = Field(
        None, max_length=1000, description="API key names; an admin key may name others."
    )
    all: bool | None = Field(None, description="All of your rollouts; required if no other condition is given.")
    reason: str | None = Field(None, max_length=1000, description="Recorded in the outcomes.")


class CancelOne(_Strict):
    """Reason of a cancellation."""

    reason: str | None = Field(None, max_length=1000, description="Recorded in the outcome.")


class FinishFailure(_Strict):
    """What an agent failed with."""

    message: str = Field(max_length=10_000)
    failure_class: FailureClass | None = Field(None, description="Who has to act; environment if absent.")


class FinishRollout(_Strict):
    """The result of an agent that runs elsewhere."""

    reward: Score | None = Field(None, description="If absent, the agent's class computes it.")
    scores: dict[str, Score] | None = Field(None, max_length=256, description="Named components of the reward.")
    extra: Object = Field(None, description="Further results.")
    failure: FinishFailure | None = Field(None, description="The agent failed: the rollout has no reward.")


#: Models of the bodies that handlers read raw, for the OpenAPI description.
BODIES: Final = (StartRollout, StartGroup, CancelRollouts, CancelOne, FinishRollout)
