"""The agent protocol of the runtime, and the request that an agent sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rollout_server.core.limits import Limits
from rollout_server.core.message import parse_object
from rollout_server.core.outcome import RewardResult
from rollout_server.core.record import FINISH, Observed, Record
from rollout_server.core.spec import Sampling, Spec
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.tools.toolset import McpServer

END: Final = "end"
CONTINUE: Final = "continue"
AGAIN: Final = "again"


@dataclass(frozen=True, slots=True)
class Request:
    """The request for a rollout, as the agent sees it. `spec` holds all of it in the server's own types."""

    spec: Spec

    @property
    def rollout_id(self) -> str:
        """The caller's id of the rollout."""
        return self.spec.rollout_id

    @property
    def group_id(self) -> str:
        """The caller's id of the rollout's group; may be empty."""
        return self.spec.group_id

    @property
    def group_index(self) -> int | None:
        """The rollout's position in its group, from 0; None if it has none."""
        return self.spec.group_index

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels by which rollouts are selected."""
        return self.spec.labels

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The request's metadata object, parsed again at each access."""
        return parse_object(self.spec.metadata_json) if self.spec.metadata_json else {}

    @property
    def source(self) -> Mapping[str, Any]:
        """Fields of the caller's protocol that the spec does not hold verbatim, parsed again at each access."""
        return parse_object(self.spec.source_json) if self.spec.source_json else {}

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The initial conversation, parsed again at each access."""
        return [message.fields() for message in self.spec.messages]

    @property
    def sampling(self) -> Sampling:
        """Default sampling parameters of a turn; None leaves a parameter to the trainer."""
        return self.spec.sampling

    @property
    def limits(self) -> Limits:
        """Limits of the rollout. Of the request's limit and the agent's, the lower one holds."""
        return self.spec.limits


class AgentProtocol(Protocol):
    """An agent, as the runtime sees it. Its methods for one rollout receive a `Run`."""

    @property
    def name(self) -> str:
        """Name, unique within the server."""

    @property
    def version(self) -> str:
        """Version, as its author defines it."""

    @property
    def description(self) -> str:
        """Description for people."""

    @property
    def replayable(self) -> bool:
        """Whether `play` can run again over a log (D3)."""

    @property
    def on_restart(self) -> str:
        """What becomes of an unfinished rollout after a restart of the server if `play` cannot run over its log.

        END: it ends as interrupted. AGAIN: the agent is run from the beginning. CONTINUE: the agent runs elsewhere and goes on.
        """

    @property
    def external(self) -> bool:
        """Whether it runs elsewhere and calls the model over the model endpoint of its rollout."""

    @property
    def limits(self) -> Limits:
        """The agent's own limits."""

    @property
    def offered_tools(self) -> Sequence[Tool]:
        """Its tools, in the order in which the model sees them. Those of its toolsets are known once they are listed."""

    @property
    def toolsets(self) -> Sequence[McpServer]:
        """The MCP servers whose tools it offers."""

    def list_toolsets(self, listed: Mapping[McpServer, Sequence[Tool]]) -> None:
        """Take the tools of its toolsets. Called once, after `start`. Raises ValueError if two tools have the same name."""

    @property
    def reward_rule(self) -> str:
        """How its rewards reach the samples: the value of a `RewardRule`."""

    @property
    def cleanup_seconds(self) -> float:
        """Time limit of `run_cleanup`."""

    @property
    def reward_group_seconds(self) -> float:
        """Time limit of `judge_group`."""

    def overrides(self, method: str) -> bool:
        """Return whether the agent has a `setup`, `cleanup` or `reward_group` of its own; if not, it need not be called."""

    def tools_for(self, request: Request) -> Sequence[Tool]:
        """Return the tools of one rollout. Any exception counts as an error of the agent."""

    def start(self) -> object:
        """Run before the first rollout. Return any value, or an awaitable."""

    def stop(self) -> object:
        """Run after the last rollout. Return any value, or an awaitable."""

    async def run_setup(self, run: object) -> None:
        """Prepare the rollout."""

    async def perform(self, run: object) -> None:
        """Run the rollout to its end."""

    async def judge(self, run: object) -> RewardResult:
        """Compute the reward of a rollout that ended with a stop."""

    async def judge_group(self, runs: Sequence[object]) -> Sequence[RewardResult | None]:
        """Compute the rewards of the completed rollouts of a group, one for each run; None: the rollout's own reward stays."""

    async def run_cleanup(self, run: object) -> None:
        """Release what the rollout holds. Called once, after everything else of the rollout.

        Not called by a server that stops, if the rollout continues in its next process and the agent runs elsewhere.
        """


def goes_on_live(agent: AgentProtocol, records: Iterable[Record] = ()) -> bool:
    """Return whether an unfinished rollout of the agent goes on after a restart of the server without a replay of its log.

    `records` is that log: a rollout whose agent has ended its work elsewhere needs only its reward.
    """
    return not agent.replayable and (agent.on_restart != END or has_finished(agent, records))


def has_finished(agent: AgentProtocol, records: Iterable[Record]) -> bool:
    """Return whether the agent runs elsewhere and has ended its work, by the log of its rollout."""
    return agent.external and any(isinstance(record, Observed) and record.what == FINISH for record in records)
