"""Bodies of the plain API.

All but messages, metadata and the like is checked strictly, and a key that is not known is an error: nobody depends on this
API yet, and a typo should not go unnoticed.
"""

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from rollout_gateway.rest import enums

MAX_UINT32: Final = 2**32 - 1
MAX_SECONDS: Final = 10**9
#: The largest integer that every JSON reader carries exactly.
MAX_EXACT: Final = 2**53
UID_PATTERN: Final = "^[A-Za-z0-9_-]{1,64}$"

Object = dict[str, Any] | None
Name = Annotated[str, Field(max_length=256)]
Secret = Annotated[
    str | None, Field(repr=False, max_length=16_384, json_schema_extra={"format": "password", "writeOnly": True})
]
Uid = Annotated[str, Field(max_length=64)]


class _Strict(BaseModel):
    """Refuses unknown keys and values of another type. null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True)


class EndpointBody(_Strict):
    """An endpoint that the server calls."""

    url: str = Field(
        max_length=4096,
        # The server checks it, and says better what is wrong.
        json_schema_extra={"pattern": "^(https?|grpcs?)://"},
        description="http:, https:, grpc: or grpcs:, with a host, without user name or password.",
    )
    dialect: enums.Dialect | None = Field(None, description="Taken from the URL if absent.")
    bearer: Secret = Field(None, description="Sent there as a bearer token. Never shown again.")
    replays_turn_keys: bool | None = Field(
        None, description="The endpoint answers a repeated turn key with the same answer and generates nothing anew."
    )
    model: Name | None = Field(
        None, description="The model's name there. Needed for the dialects openai, vllm and sglang, refused for others."
    )


class Sampling(_Strict):
    """How the model samples. What is absent is the trainer's to decide."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="The most tokens of one answer.")
    stop: list[str] | None = Field(None, max_length=64)
    logprobs: bool | None = None
    extra: Object = Field(None, description="Further parameters, passed on to HTTP trainers key by key.")


class Limits(_Strict):
    """What the rollout may use up. Of these and the agent's own limits the lower hold."""

    turns: int | None = Field(None, ge=0, le=MAX_UINT32)
    generated_tokens: int | None = Field(None, ge=0, le=MAX_EXACT)
    seconds: float | None = Field(None, gt=0, le=MAX_SECONDS, description="From the first turn to the end.")
    calls_per_turn: int | None = Field(None, ge=1, le=MAX_UINT32)
    tool_turns: int | None = Field(None, ge=0, le=MAX_UINT32)
    bytes: int | None = Field(None, ge=1, le=MAX_EXACT, description="Of all messages together.")


class Tokenizer(_Strict):
    """The tokenizer and chat template of the trainer's model."""

    name: Name
    revision: Name | None = None
    template_kwargs: Object = Field(None, description="Switches of the chat template.")


class StartRollout(_Strict):
    """Asks for a rollout. Unknown keys are errors, except within messages, metadata, extra, template_kwargs and labels."""

    rollout_id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Your name for the rollout, sent to trainers. The request id if absent, else made up."
    )
    request_id: Name | None = Field(
        None,
        description="Makes retries safe: the same id and body attach to the same rollout. Or sent as header Idempotency-Key.",
    )
    group_id: Name | None = Field(None, description="Rollouts of the same prompt, as you group them.")
    agent: Name | None = Field(None, description="The server's default agent if absent.")
    messages: list[dict[str, Any]] = Field(
        fail_fast=True, description="The conversation so far. Goes through untouched, unknown keys included."
    )
    completions: EndpointBody = Field(description="Who completes: the trainer.")
    outcome: EndpointBody | None = Field(None, description="Who is told the outcome; if absent it is to be fetched.")
    tools: EndpointBody | None = Field(None, description="A ToolService with further tools.")
    sampling: Sampling | None = None
    limits: Limits | None = None
    tokenizer: Tokenizer | None = Field(None, description="Needed for dialect http_masked and for token_mode tokens.")
    token_mode: enums.TokenMode | None = Field(None, description="Who renders: the trainer (messages) or the server.")
    on_drift: enums.DriftPolicy | None = Field(
        None, description="What to do when the prompt that the trainer saw is not ledger + what was appended."
    )
    on_interrupt: enums.InterruptPolicy | None = Field(None, description="What a restart of the server means.")
    cancel_after_detach_seconds: float | None = Field(
        None, ge=0, le=MAX_SECONDS, description="Cancelled once nobody has been attached for so long; never if absent."
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Higher runs earlier among those that wait."
    )
    metadata: Object = Field(None, description="For agents and tools.")
    labels: dict[str, str] | None = Field(None, max_length=64, description="For selecting rollouts.")


class CancelRollouts(_Strict):
    """Which rollouts to cancel: those that meet every condition that is set. At least one must be."""

    uids: list[Uid] | None = Field(None, max_length=1000)
    rollout_ids: list[Name] | None = Field(None, max_length=1000)
    group_id: Name | None = None
    agent: Name | None = None
    states: list[enums.State] | None = Field(None, max_length=8)
    labels: dict[str, str] | None = Field(None, max_length=64, description="With all of these labels.")
    callers: list[Name] | None = Field(None, max_length=1000, description="Others than yourself need an admin key.")
    all: bool | None = Field(None, description="All rollouts of yours; must be set where no other condition is.")
    reason: str | None = Field(None, max_length=1000, description="Goes into their outcomes.")


class CancelOne(_Strict):
    """Why a rollout is cancelled."""

    reason: str | None = Field(None, max_length=1000, description="Goes into its outcome.")


#: The models of bodies that handlers read raw, for the OpenAPI description.
BODIES: Final = (StartRollout, CancelRollouts, CancelOne)
