"""The ports of a turn: what a rollout needs of the world while it runs, and agents of their tools."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from rollout_server.core.ledger import LedgerView, Origin
from rollout_server.core.message import JSON, Message
from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import Sampling, Spec

Content: TypeAlias = "str | Sequence[Mapping[str, JSON]]"
"""The content of a tool message: a text, or content parts as OpenAI writes them."""


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

    def updated(self, by: Credentials) -> Credentials:
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
        note: leaves a note in the rollout's log, as (code, text).
        sampling: how the model samples in this turn, whole.
    """

    asked: Asked
    messages: Sequence[Message]
    last: Answered | None
    last_messages: int
    ledger: LedgerView
    deadline: float | None = None
    credentials: Credentials = Credentials()
    note: Callable[[str, str], None] = field(default=lambda code, text: None, repr=False)
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

    async def sample(self, request: CompletionRequest) -> Answered:
        """The answer. Raises `RolloutFailed`."""

    def fork(self, fork: Fork) -> Sampler:
        """Returns the sampler of another conversation of the rollout. Raises `RolloutFailed` where the trainer knows only one.

        Never called for a branch or a compaction while `sample` is under way.
        """


OpenSampler: TypeAlias = Callable[[str, Spec, Sequence[Tool]], Sampler]
"""Makes the sampler of a rollout from its uid, its spec and the tools that its model is told."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time comes from: `wall` in seconds since 1970, `monotonic` in seconds since whenever."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
