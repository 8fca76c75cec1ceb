"""The spec of a rollout: what the caller requested. It contains no secret, because it is fingerprinted, stored and displayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from rollout_server.core.limits import Limits
from rollout_server.core.message import Message, utf8_length
from rollout_server.core.outcome import FailureClass


class Dialect(Enum):
    """The protocol of a target.

    HTTP_MASKED: the synchronous HTTP API. HTTP_PLAIN: the asynchronous HTTP API. STREAM: a trainer that connected as a client.
    OPENAI, VLLM and SGLANG: inference engines. MCP: a server of the Model Context Protocol, which only runs tools.
    """

    GRPC = "grpc"
    HTTP_MASKED = "http_masked"
    HTTP_PLAIN = "http_plain"
    OPENAI = "openai"
    VLLM = "vllm"
    SGLANG = "sglang"
    STREAM = "stream"
    MCP = "mcp"


ENGINES = frozenset({Dialect.OPENAI, Dialect.VLLM, Dialect.SGLANG})
"""Dialects of inference engines. An engine serves models by name and has no notion of rollouts."""


class DriftPolicy(Enum):
    """What happens on drift: WARN records it and continues, FAIL ends the rollout as a failure."""

    WARN = "warn"
    FAIL = "fail"


class InterruptPolicy(IntEnum):
    """What happens to a rollout that a stop of the server interrupts. The numbers are those of the proto enum."""

    UNSET = 0
    RESUME = 1
    FAIL = 2


class StaleAction(Enum):
    """What happens to tokens that are too old. `StaleAction` in the proto file describes the values."""

    CANCEL = "cancel"
    MASK = "mask"
    SPLIT = "split"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Staleness:
    """How old the tokens of a rollout may become.

    Args:
        max_lag: the largest lag that is not stale, in policy steps, from 0. The lag of a token is the newest step that was
            announced for the rollout or that sampled one of its tokens, minus the step that sampled the token. A token of an
            unknown step has no lag.
        action: what happens to a larger one.
    """

    max_lag: int
    action: StaleAction = StaleAction.KEEP


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint that the server calls.

    Args:
        url: without a trailing slash.
        dialect: the protocol of the endpoint.
        replays_turn_keys: whether the endpoint declares that it returns the same completion again for the same turn key.
        model: the model's name at an engine, else empty.
    """

    url: str
    dialect: Dialect
    replays_turn_keys: bool = False
    model: str = ""

    @property
    def failure_class(self) -> FailureClass:
        """The class of a failure that this endpoint causes when it generates completions."""
        return FailureClass.ENGINE if self.dialect in ENGINES else FailureClass.TRAINER


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of the model; None leaves a parameter to the trainer.

    Args:
        temperature: from 0 to 2.
        top_p: from 0 to 1.
        max_tokens: generated tokens of one turn, at least 1.
        stop: at most 64 stop strings.
        logprobs: whether the trainer should return the logprobs of generated tokens.
        extra_json: further parameters that only the trainer knows, as one JSON object, or empty.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool | None = None
    extra_json: str = ""


@dataclass(frozen=True, slots=True)
class TokenizerName:
    """The tokenizer and chat template of the trainer's model. `template_kwargs_json` is one JSON object, or empty."""

    name: str
    revision: str = ""
    template_kwargs_json: str = ""


@dataclass(frozen=True, slots=True)
class Spec:
    """A rollout as its caller requested it.

    Args:
        rollout_id: the caller's id, sent to trainers.
        messages: the conversation so far; at least one message, except over the asynchronous HTTP API.
        completions: the target that generates completions.
        group_id: rollouts of one prompt have the same group, as in GRPO.
        agent: name of the agent; empty until the default is filled in.
        typed: whether messages came in the typed form; replies then use it too (D13).
        outcome: the target that receives the outcome, or None.
        tools: the toolset whose tools the rollout has beside those of its agent, or None.
        sampling: sampling parameters of all turns.
        limits: limits of the request; after `settle`, those in force.
        tokenizer: the trainer's tokenizer; None if the ledger is built from the trainer's ids alone.
        on_drift: policy on drift; None uses the server's setting.
        on_interrupt: what happens when the server stops. UNSET: as the server's settings say.
        token_mode: number of the proto enum as it came; 0 is unset.
        cancel_after_detach: seconds without an attached client after which the rollout is cancelled; None is never.
        priority: of the waiting rollouts of one caller, higher ones start first.
        metadata_json: data for the agent, as one JSON object, or empty.
        labels: keys and values for selecting rollouts.
        source_json: fields of an HTTP request that no other field keeps verbatim, as one JSON object, or empty.
        train_on: the failure classes whose samples train; None is the default, `TRAIN_BY_DEFAULT`.
        group_index: position of the rollout in its group, from 0; None if it has none.
        models: further models that the agent may call, by name.
        staleness: how old the tokens may become; None: of any age.
    """

    rollout_id: str
    messages: tuple[Message, ...]
    completions: Target
    group_id: str = ""
    agent: str = ""
    typed: bool = False
    outcome: Target | None = None
    tools: Target | None = None
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    tokenizer: TokenizerName | None = None
    on_drift: DriftPolicy | None = None
    on_interrupt: InterruptPolicy = InterruptPolicy.UNSET
    token_mode: int = 0
    cancel_after_detach: float | None = None
    priority: int = 0
    metadata_json: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    source_json: str = ""
    train_on: frozenset[FailureClass] | None = None
    group_index: int | None = None
    models: Mapping[str, Target] = field(default_factory=dict)
    staleness: Staleness | None = None

    @property
    def attached_bytes(self) -> int:
        """Size of what the rollout carries beside its messages, in bytes of UTF-8."""
        return utf8_length(self.metadata_json, self.source_json, self.sampling.extra_json)
