"""Ports of a turn: what a running rollout and its agent's tools need from the outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol, TypeAlias

from rollout_server.core.ledger import LedgerView, Origin
from rollout_server.core.message import JSON, Message
from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import Sampling, Spec
from rollout_server.runtime.policy import SamplingGate

Content: TypeAlias = "str | Sequence[Mapping[str, JSON]]"
"""Content of a tool message: a text, or content parts in OpenAI's format."""


class Tool(Protocol):
    """A tool that an agent offers to the model."""

    @property
    def name(self) -> str:
        """Name, unique within the agent."""

    @property
    def description(self) -> str:
        """Description for the model."""

    @property
    def parameters_json_schema(self) -> str:
        """JSON Schema of the arguments object, as JSON text."""

    async def run(self, arguments: Mapping[str, JSON]) -> Content:
        """Run one call and return the content of the tool message.

        Raises `ToolError` with a text for the model. Any other exception is reported to the model in the same way.
        """


@dataclass(frozen=True, slots=True)
class Credentials:
    """Bearer tokens for the endpoints of a rollout, `models` by name; empty means none. They never appear in a repr."""

    completions: str = field(default="", repr=False)
    outcome: str = field(default="", repr=False)
    tools: str = field(default="", repr=False)
    models: Mapping[str, str] = field(default_factory=dict, repr=False)

    def updated(self, by: Credentials) -> Credentials:
        """Return a copy in which non-empty tokens of `by` replace the current ones."""
        models = {**self.models, **{name: bearer for name, bearer in by.models.items() if bearer}}
        return Credentials(
            by.completions or self.completions, by.outcome or self.outcome, by.tools or self.tools, models
        )

    def secrets(self) -> tuple[str, ...]:
        """Return the non-empty tokens. None of them may appear in messages or logs."""
        return tuple(secret for secret in (self.completions, self.outcome, self.tools, *self.models.values()) if secret)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for one completion.

    Args:
        asked: the record of this request.
        messages: the whole conversation. Only its first `asked.messages` messages belong to this turn.
        last: the previous completion of the conversation, or None.
        last_messages: number of messages in the request for `last`.
        ledger: the conversation's ledger before this turn.
        deadline: end of the rollout's time limit on the monotonic clock; None: no limit.
        credentials: the rollout's bearer tokens.
        note: appends a note (code, text) to the rollout's log.
        sampling: the complete sampling parameters of this turn.
        fits_context: an engine whose context cannot hold `max_tokens` is asked for what it can hold. Otherwise the turn fails.
        gate: where each request for the completion waits before it is sent; always open for further models.
        created: when the rollout was accepted, in seconds since 1970: the date that chat templates print. None: now.
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
    fits_context: bool = False
    gate: SamplingGate = field(default_factory=SamplingGate, repr=False)
    created: float | None = None

    @property
    def date(self) -> datetime | None:
        """The date that chat templates print, in the time zone of the server; None: now."""
        return None if self.created is None else datetime.fromtimestamp(self.created)


@dataclass(frozen=True, slots=True)
class Fork:
    """A conversation that an agent opens.

    Args:
        origin: its source. A branch begins with the first `parent_tokens` tokens of the segment `parent_id` and all messages of
            the forked conversation. Other kinds begin without tokens.
        tools: tools offered to the model; None: the same as in the forked conversation.
        earlier: a branch begins after a turn that is not the last one of the forked conversation, and has only the messages up to
            there. The sampler knows its tokens from the ledger of its first request.
    """

    origin: Origin
    tools: Sequence[Tool] | None = None
    earlier: bool = False


class Sampler(Protocol):
    """Requests completions for one conversation from its trainer. Keeps per-trainer state between turns."""

    async def sample(self, request: CompletionRequest) -> Answered:
        """Return the completion. Raise `RolloutFailed`."""

    def resume(self, asked: Asked, answered: Answered) -> None:
        """Take note of a turn that was completed before a restart of the server. Called instead of `sample`, for each such turn.

        The sampler of the earlier process is gone. The tokens are in the ledger of the next request.
        """

    def fork(self, fork: Fork) -> Sampler:
        """Return a sampler for another conversation of the rollout.

        Raises `RolloutFailed` if the trainer does not support the conversation. It is never called for a branch that is not
        `earlier` while `sample` is running.
        """


OpenSampler: TypeAlias = Callable[[str, Spec, Sequence[Tool]], Sampler]
"""Creates a rollout's sampler from its uid, its spec and the tools offered to the model."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Sources of time, in seconds: `wall` since 1970, `monotonic` since an arbitrary point."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
