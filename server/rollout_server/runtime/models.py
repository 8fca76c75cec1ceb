"""Further models of a rollout, such as a judge or a simulated user: what agents use, and the port to their endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Unpack

from rollout_server.core.message import JSON, Message
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import ModelCalled
from rollout_server.core.spec import Spec, Target
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import CompletionRequest, Sampler, Tool
from rollout_server.runtime.run.arguments import SamplingOptions
from rollout_server.runtime.run.messages import text_of


@dataclass(frozen=True, slots=True)
class ModelReply:
    """A message of a further model.

    Args:
        message: the assistant message, parsed.
        finish_reason: as the endpoint reports it, such as "stop" or "length"; empty if it reports none.
        usage: numbers of prompt and generated tokens, as the endpoint reports them; None if it reports none.
    """

    message: Mapping[str, JSON]
    finish_reason: str = ""
    usage: tuple[int, int] | None = None

    @classmethod
    def of(cls, called: ModelCalled) -> ModelReply:
        """Return the reply for a record. A replay gets the same one."""
        return cls(called.message.fields(), called.finish_reason, called.usage)

    @property
    def content(self) -> str:
        """Text of the message; text parts are concatenated."""
        return text_of(self.message.get("content"))


class ModelClient(Protocol):
    """A further model, as `run.model(name)` returns it."""

    async def sample(self, messages: Sequence[Mapping[str, JSON]], **sampling: Unpack[SamplingOptions]) -> ModelReply:
        """Request the message that follows these messages.

        The sampling parameters are those given here; the rollout's own do not apply. Call, tokens and text are recorded as the
        event `model_called`. They are in no sample and do not count for the rollout's limits.

        Raises:
            ModelFailed: if the endpoint returns no completion after all retries. An agent may catch it; otherwise the rollout
                ends with this failure.
            AgentMistake: for invalid messages or options, and once the rollout has used up its calls or tokens of this model.
            RolloutEnded: when the rollout has ended.
        """


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """Where a further model is served. `bearer`: its key, "" for none; it is sent to this target only."""

    target: Target
    bearer: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of one rollout for each of its further models: calls, and generated tokens as the endpoints report them."""

    calls: int = 1000
    generated_tokens: int = 1_000_000


@dataclass(slots=True)
class ModelUsage:
    """What a rollout has used of one further model: calls that began, and generated tokens."""

    calls: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelCompletion:
    """A completion of a further model, as in the record `ModelCalled`."""

    message: Message
    finish_reason: str
    usage: tuple[int, int] | None
    attempts: int


class FurtherModels(Protocol):
    """Calls the endpoints of further models."""

    @property
    def endpoints(self) -> Mapping[str, ModelEndpoint]:
        """The server's own models by name. A request's model of the same name replaces one."""

    @property
    def limits(self) -> ModelLimits:
        """Limits of each rollout."""

    async def complete(self, target: Target, request: CompletionRequest) -> ModelCompletion:
        """Request a completion, with retries. `request.credentials.completions` is the endpoint's key. Raise `RolloutFailed`."""

    def open(self, target: Target, spec: Spec, tools: Sequence[Tool]) -> Sampler:
        """Return a sampler for a conversation that the endpoint continues, with token ids if it reports any."""


class NoFurtherModels:
    """A server without endpoints: the default."""

    endpoints: Mapping[str, ModelEndpoint] = {}
    limits = ModelLimits()

    async def complete(self, target: Target, request: CompletionRequest) -> ModelCompletion:
        """Raise `RolloutFailed`, because this server has no endpoints."""
        raise _unavailable()

    def open(self, target: Target, spec: Spec, tools: Sequence[Tool]) -> Sampler:
        """Raise `RolloutFailed`, because this server has no endpoints."""
        raise _unavailable()


def _unavailable() -> RolloutFailed:
    return RolloutFailed(Failure(Category.ENGINE_CLIENT, "this server calls no further models"))
