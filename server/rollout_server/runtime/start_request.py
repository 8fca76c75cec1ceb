"""Requests to start a rollout: who asks, what a server has room for, and a request that was found to be right."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollout_server.core.error import NotPossible, RolloutError
from rollout_server.core.message import utf8_length
from rollout_server.core.spec import Dialect, Spec
from rollout_server.runtime.agent_protocol import AgentProtocol, Request
from rollout_server.runtime.aio.source_location import raised_at
from rollout_server.runtime.ports import Credentials, Tool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: sees its own rollouts, and as an admin everybody's."""

    name: str
    admin: bool = False

    def sees(self, owner: str) -> bool:
        """Whether a rollout of `owner` exists for this caller."""
        return self.admin or owner == self.name


@dataclass(frozen=True, slots=True)
class Quota:
    """What one caller may take of a server; None: as much as there is.

    Args:
        running: rollouts that run at the same time; more wait.
        queued: rollouts that wait while as many run as may; one more is refused.
        bytes: the same of `Capacity.active_bytes`.
        starts_per_minute: rollouts that are started, all of them at once if none was in the minute before.
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
        queued: rollouts that wait for a slot; one more is refused.
        active_bytes: what rollouts may hold, counted roughly, until they are among those that are remembered; one more is refused.
        per_caller: what one caller may take of all that.
        shared: among several callers. Of queue and bytes one of them may then take nine tenths, unless `per_caller` says otherwise.
        finished: finished rollouts that are remembered; the oldest are forgotten first. As many outcomes, and one at least, may
            wait for their receivers; then no rollout is taken whose outcome is to be delivered. Those that are held, such as by a
            trainer's stream that owes their outcomes, come on top.
        finished_bytes: the same in bytes, counted roughly.
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
        """Rollouts that run and wait."""
        return self.running + self.queued

    def quota(self) -> Quota:
        """What one caller may take. A caller that fills the server leaves room for the first rollouts of another one."""
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
        caller: the name of who asks; the rollout is theirs.
        request_id: the same id and payload attach to the same rollout; empty: always a new one.
        until_received: the id is free again once the outcome was acknowledged.
    """

    spec: Spec
    caller: str
    request_id: str = ""
    until_received: bool = False
    credentials: Credentials = Credentials()


@dataclass(frozen=True, slots=True)
class AdmittedStart:
    """A request with which nothing is wrong, with what its spec left open filled in. Room for it is checked later."""

    request: StartRequest
    agent: AgentProtocol
    fingerprint: str

    @property
    def key(self) -> tuple[str, str, str] | None:
        """What a repeated request finds its rollout by; None where the request has no id."""
        request = self.request
        return (request.caller, request.spec.completions.url, request.request_id) if request.request_id else None

    @property
    def size(self) -> int:
        """About how many bytes its rollout begins with, counted as `Machine.size`."""
        return 2 * sum(utf8_length(message.text) for message in self.request.spec.messages)

    def tools(self) -> Sequence[Tool]:
        """Those of its rollout, chosen by the agent. Raises `RolloutError`."""
        return chosen_tools(self.agent, self.request.spec)


def chosen_tools(agent: AgentProtocol, spec: Spec) -> Sequence[Tool]:
    """The tools of a rollout. Raises `RolloutError` where choosing fails, `NotPossible` where the trainer cannot hear of them."""
    try:
        tools = agent.tools_for(Request(spec))
    except Exception as error:  # the boundary to an author's code
        _log.error("agent %s could not choose its tools%s", agent.name, raised_at(error), exc_info=error)
        text = f"agent {agent.name!r} could not choose the tools of this rollout; the server's log has the reason"
        raise RolloutError(text, reason="AGENT_FAILED") from None
    if spec.completions.dialect is Dialect.HTTP_MASKED and [*tools] != [*agent.tools]:
        text = (
            f"agent {agent.name!r} chooses its tools by request, and a trainer of POST /rollout never hears of the choice; use "
            "another protocol"
        )
        raise NotPossible(text, reason="TOOLS_FIXED")
    return tools
