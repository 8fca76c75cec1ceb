"""What the runtime needs of the world."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from rollout_server.core.ledger import LedgerView, Origin
from rollout_server.core.limits import Limits
from rollout_server.core.message import JSON, Message
from rollout_server.core.outcome import Failure, RewardResult
from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import Sampling, Spec, Target
from rollout_server.runtime.delivery import Receipt

if TYPE_CHECKING:
    from rollout_server.runtime.request import Request
    from rollout_server.runtime.rollout import Rollout


Content: TypeAlias = "str | Sequence[Mapping[str, JSON]]"
"""The content of a tool message: a text, or content parts as OpenAI writes them."""


class RolloutFailed(Exception):
    """What was asked of the world failed, and with it the rollout. Classified once, where the failure crossed into our code."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ToolError(Exception):
    """A tool's own error: its text goes to the model after "Error: ", and the rollout goes on."""


class ArgumentError(ToolError):
    """The arguments do not fit the tool: the model reads "Error: Invalid arguments for NAME: " and this text."""


class Tool(Protocol):
    """A tool that an agent offers to the model."""

    @property
    def name(self) -> str:
        """Unique within the agent."""

    @property
    def description(self) -> str:
        """What the model reads."""

    @property
    def parameters_json_schema(self) -> str:
        """JSON Schema of the arguments object."""

    async def run(self, arguments: Mapping[str, JSON]) -> Content:
        """Runs one call and returns the content of the tool message. Raises `ToolError`; any other exception is told likewise."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Bearer tokens for the endpoints of a rollout; empty: none. They never show in a repr."""

    completions: str = field(default="", repr=False)
    outcome: str = field(default="", repr=False)
    tools: str = field(default="", repr=False)

    def refreshed(self, by: Credentials) -> Credentials:
        """With those replaced that `by` brings."""
        return Credentials(by.completions or self.completions, by.outcome or self.outcome, by.tools or self.tools)

    def secrets(self) -> tuple[str, ...]:
        """Those that are set: none of them may be repeated to anybody."""
        return tuple(secret for secret in (self.completions, self.outcome, self.tools) if secret)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One completion that is wanted.

    Args:
        asked: the record that waits for the answer.
        messages: the whole conversation. Only its first `asked.messages` messages belong to this turn.
        last: the answer before, or None.
        last_messages: how many messages had been asked for then.
        ledger: of the conversation, without this turn.
        deadline: when the rollout's time is over, on the monotonic clock; None: never.
        credentials: of the rollout.
        remark: leaves a note in the rollout's log, as (code, text).
        sampling: how the model samples in this turn, whole.
    """

    asked: Asked
    messages: Sequence[Message]
    last: Answered | None
    last_messages: int
    ledger: LedgerView
    deadline: float | None = None
    credentials: Credentials = Credentials()
    remark: Callable[[str, str], None] = field(default=lambda code, text: None, repr=False)
    sampling: Sampling = Sampling()


@dataclass(frozen=True, slots=True)
class Fork:
    """A conversation that an agent opens.

    Args:
        origin: where it comes from. A branch begins with the first `parent_tokens` tokens of the segment `parent_id`, and with all
            messages of the conversation that is forked; any other kind begins with nothing.
        tools: what its model is told; None: the same as before.
    """

    origin: Origin
    tools: Sequence[Tool] | None = None


class Sampler(Protocol):
    """Asks the trainer of one conversation for completions. Keeps what it learns about that trainer between turns."""

    async def sample(self, ask: CompletionRequest) -> Answered:
        """The answer. Raises `RolloutFailed`."""

    def fork(self, fork: Fork) -> Sampler:
        """Returns the sampler of another conversation of the rollout. Raises `RolloutFailed` where the trainer knows only one.

        Never called for a branch or a compaction while `sample` is under way.
        """


OpenSampler: TypeAlias = Callable[[str, Spec, Sequence[Tool]], Sampler]
"""Makes the sampler of a rollout from its uid, its spec and the tools that its model is told."""


@dataclass(frozen=True, slots=True)
class PackedOutcome:
    """An outcome on its way: the same `body` under the same `key` on each attempt. `credential` is a bearer token, or empty."""

    target: Target
    key: str
    body: bytes = field(repr=False)
    credential: str = field(default="", repr=False)


class Reporter(Protocol):
    """Tells receivers of outcomes."""

    def pack(self, rollout: Rollout, target: Target, key: str) -> bytes:
        """The outcome of a finished rollout as the receiver takes it."""

    async def deliver(self, parcel: PackedOutcome) -> Receipt:
        """Sends it once. Whatever goes wrong on the way is a receipt."""


class AgentProtocol(Protocol):
    """An agent, as the runtime sees it. `play` and `reward` get a `Run`."""

    @property
    def name(self) -> str:
        """Unique within the server."""

    @property
    def version(self) -> str:
        """As its author gives it."""

    @property
    def description(self) -> str:
        """What it does, for a person."""

    @property
    def replayable(self) -> bool:
        """Its `play` can run again over a log (D3)."""

    @property
    def limits(self) -> Limits:
        """Its own limits."""

    @property
    def tools(self) -> Sequence[Tool]:
        """Its tools, in the order in which the model is told."""

    def tools_for(self, request: Request) -> Sequence[Tool]:
        """Those of one rollout. Whatever it raises is its author's fault."""

    def start(self) -> object:
        """Before its first rollout: a result, or something to await."""

    def stop(self) -> object:
        """After its last one."""

    async def perform(self, run: object) -> None:
        """Plays the rollout to its end."""

    async def judge(self, run: object) -> RewardResult:
        """Judges a rollout that came to its end."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time comes from: `wall` in seconds since 1970, `monotonic` in seconds since whenever."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
