"""What a rollout was asked to be. Holds no secret: it is fingerprinted, stored and shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from rollout_server.core.limits import Limits
from rollout_server.core.message import Message


class Dialect(Enum):
    """The protocol an endpoint speaks."""

    GRPC = "grpc"
    HTTP_MASKED = "http_masked"
    HTTP_PLAIN = "http_plain"
    OPENAI = "openai"
    VLLM = "vllm"
    SGLANG = "sglang"
    STREAM = "stream"


ENGINES = frozenset({Dialect.OPENAI, Dialect.VLLM, Dialect.SGLANG})
"""The dialects of inference engines, which know models by name and nothing of rollouts."""


class DriftPolicy(Enum):
    """What drift means for a rollout."""

    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint that the server calls. The URL has no trailing slash. `model` is the model's name at an engine, else empty."""

    url: str
    dialect: Dialect
    replays_turn_keys: bool = False
    model: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the model samples; None leaves it to the trainer. `extra_json` is one JSON object, or empty."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool | None = None
    extra_json: str = ""


@dataclass(frozen=True, slots=True)
class TokenizerName:
    """The tokenizer and template of the trainer's model. `template_kwargs_json` is one JSON object, or empty."""

    name: str
    revision: str = ""
    template_kwargs_json: str = ""


@dataclass(frozen=True, slots=True)
class Spec:
    """A rollout as its caller wants it.

    Args:
        rollout_id: the caller's name for it, sent to trainers.
        messages: the conversation so far, at least one.
        completions: who completes.
        group_id: rollouts of one prompt, as the caller groups them.
        agent: an agent's name; empty until the default is filled in.
        typed: the messages came in the typed form, and answers go out in it.
        outcome, tools: further endpoints, or None.
        tokenizer: the trainer's tokenizer; None where only the trainer's own ids count.
        on_drift: what drift means; None: the server's setting.
        on_interrupt, token_mode: words of the contract, kept as they came; 0: unset.
        cancel_after_detach: seconds without anybody attached after which the rollout is cancelled; None: never.
        priority: higher runs earlier when rollouts of its caller wait.
        metadata_json: one JSON object, or empty.
        labels: for selecting rollouts.
        source_json: what the caller's own protocol said and no other field keeps as it was written; one JSON object, or empty.
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
    on_interrupt: int = 0
    token_mode: int = 0
    cancel_after_detach: float | None = None
    priority: int = 0
    metadata_json: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    source_json: str = ""
