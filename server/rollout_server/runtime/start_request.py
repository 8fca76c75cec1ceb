"""Requests to start a rollout: the caller, the server's capacity, and requests that passed validation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rollout_server.core.error import NotPossible, RolloutError
from rollout_server.core.message import utf8_length
from rollout_server.core.spec import Dialect, Spec
from rollout_server.runtime.agent_protocol import AgentProtocol, Request
from rollout_server.runtime.aio.source_location import raised_at
from rollout_server.runtime.ports import Credentials, Tool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The W3C Trace Context of a call: two valid headers, or empty ones."""

    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class Caller:
    """The client behind an API key. It sees its own rollouts; an admin sees all rollouts. `trace` is that of its call."""

    name: str
    admin: bool = False
    trace: TraceContext = field(default=TraceContext(), compare=False)

    def sees(self, owner: str) -> bool:
        """Return whether this caller may see a rollout owned by `owner`."""
        return self.admin or owner == self.name


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits for one caller. None: only the server's capacity applies.

    Args:
        running: rollouts that run at the same time; further ones wait in the queue.
        queued: rollouts that wait while `running` rollouts run; further ones are refused.
        bytes: share of `Capacity.active_bytes`.
        starts_per_minute: rollouts started per minute. A caller that started none for a minute may start all of them at once.
    """

    running: int | None = None
    queued: int | None = None
    bytes: int | None = None
    starts_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many rollouts a server holds.

    Args:
        running: rollouts that run at the same time.
        queued: rollouts that wait for a slot; further ones are refused.
        active_bytes: approximate memory of active rollouts, which wait, run, or still deliver their outcome. Beyond it, starts
            are refused.
        per_caller: limits for one caller.
        shared: several callers use this server. One caller then gets at most nine tenths of queue and bytes, unless
            `per_caller` sets its own limits.
        finished: number of finished rollouts that are remembered; the oldest are dropped first. The same number of outcomes (at
            least 1) may wait for delivery; beyond it, rollouts with a delivery target are refused, but not those of a caller
            with less than its share: the callers that owe outcomes have equal shares. Rollouts under
            `Rollout.hold`, such as those whose outcome a trainer's stream has not acknowledged, are not counted.
        finished_bytes: approximate memory of finished rollouts; the oldest are dropped first.
        finished_seconds: how long a finished rollout is remembered.
    """

    running: int = 100
    queued: int = 10_000
    active_bytes: int = 2**29
    per_caller: Quota = Quota()
    shared: bool = False
    finished: int = 10_000
    finished_bytes: int = 2**30
    finished_seconds: float = 3600.0

    @property
    def total(self) -> int:
        """Maximum number of rollouts that run or wait."""
        return self.running + self.queued

    @property
    def largest_group(self) -> int:
        """Number of rollouts that one caller can start at once while the server is idle."""
        own = self.quota()
        slots = self.running if own.running is None else own.running
        return self.total if own.queued is None else min(self.total, slots + own.queued)

    def quota(self) -> Quota:
        """Return the limits of one caller. On a shared server, a caller that uses all of its quota leaves room for others."""
        own = self.per_caller
        queued, size = (total - total // 10 if self.shared else None for total in (self.queued, self.active_bytes))
        return replace(
            own,
            queued=queued if own.queued is None else own.queued,
            bytes=size if own.bytes is None else own.bytes,
        )


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A request for a rollout.

    Args:
        caller: name of the caller, which owns the rollout.
        request_id: idempotency key. A request with the same id and payload returns the same rollout. Empty: always start a new
            one.
        until_received: whether the id becomes free again once the caller has acknowledged the outcome.
        trace: see `Caller`. A repeated request may have another one.
    """

    spec: Spec
    caller: str
    request_id: str = ""
    until_received: bool = False
    credentials: Credentials = Credentials()
    trace: TraceContext = TraceContext()


@dataclass(frozen=True, slots=True)
class AdmittedStart:
    """A validated request whose spec has its defaults filled in. Capacity is checked later.

    `fingerprint` is empty if the request has no id: then no later request can repeat it.
    """

    request: StartRequest
    agent: AgentProtocol
    fingerprint: str

    @property
    def key(self) -> tuple[str, str, str] | None:
        """Idempotency key under which a repeated request finds its rollout; None if the request has no id."""
        request = self.request
        return (request.caller, request.spec.completions.url, request.request_id) if request.request_id else None

    @property
    def size(self) -> int:
        """Approximate initial size of the rollout in bytes, counted as in `Rollout.size`."""
        spec = self.request.spec
        return 2 * utf8_length(*[message.text for message in spec.messages]) + spec.attached_bytes

    def tools(self) -> Sequence[Tool]:
        """Return the tools that the agent chooses for this rollout. Raise `RolloutError` as `chosen_tools` does."""
        return chosen_tools(self.agent, self.request.spec)


def chosen_tools(agent: AgentProtocol, spec: Spec) -> Sequence[Tool]:
    """Return the tools that the agent chooses for a rollout.

    Raises `RolloutError` if the agent's code fails, and `NotPossible` if the trainer's protocol cannot transmit a choice.
    """
    try:
        tools = agent.tools_for(Request(spec))
    except Exception as error:  # the boundary to an author's code
        _log.error("agent %s could not choose its tools%s", agent.name, raised_at(error), exc_info=error)
        text = f"agent {agent.name!r} could not choose the tools of this rollout; the server's log has the reason"
        raise RolloutError(text, reason="AGENT_FAILED") from None
    if spec.completions.dialect is Dialect.HTTP_MASKED and [*tools] != [*agent.offered_tools]:
        text = (
            f"agent {agent.name!r} chooses its tools by request, but POST /rollout cannot send that choice to the trainer; use "
            "another protocol"
        )
        raise NotPossible(text, reason="TOOLS_FIXED")
    return tools
