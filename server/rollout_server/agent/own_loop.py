"""Agents that own their loop: they call the model endpoint of their rollout as an OpenAI- or Anthropic-compatible API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal, TypedDict, Unpack, cast

from rollout_server.agent.base import Agent
from rollout_server.agent.rubric import Rubric
from rollout_server.core.capture.rules import CaptureOptions
from rollout_server.core.limits import Limits
from rollout_server.core.outcome import RewardResult
from rollout_server.runtime.agent_protocol import AGAIN, END
from rollout_server.runtime.capture.endpoint import ModelAccess
from rollout_server.runtime.errors import RolloutEnded
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.programs import program_failed
from rollout_server.runtime.run.messages import text_of
from rollout_server.runtime.run.run import Run
from rollout_server.runtime.tools.toolset import McpServer

RESULT: Final = "result"
"""Key of `run.state`: the `RewardResult` that the agent itself gave; missing if it gave none."""


class AgentOptions(TypedDict, total=False):
    """Attributes that the constructors of these agents take; see `Agent` and `OwnLoopAgent`."""

    name: str
    version: str
    description: str
    tools: Sequence[Tool | McpServer]
    limits: Limits
    rubric: Rubric | None
    reward_rule: Literal["copy", "split", "own"]
    capture: CaptureOptions
    on_restart: Literal["end", "again", "continue"]


class OwnLoopAgent(Agent):
    """Base class of agents whose loop is not this server's: programs, functions and agents that run elsewhere.

    The agent gives the reward itself, or else the class's `reward` or rubric computes it. Scores of both are kept. What the agent
    gave is `run.state["result"]`, a `RewardResult`, which a `reward` may read.

    Attributes:
        tools: tools that the server runs for the agent, which calls them at the MCP server of its rollout: `ModelAccess.mcp_url`.
        capture: how its calls are taken: which of them are auxiliary, whose sampling parameters hold, and more.
        on_restart: what becomes of an unfinished rollout after a restart of the server, which ended the agent. "end": it ends as
            interrupted. "again": the agent is run from the beginning, from `setup` on. Nothing of the earlier attempt trains,
            and all limits count on. Choose it only if the agent may run twice.
    """

    description = ""
    replayable = False
    capture: CaptureOptions = CaptureOptions()
    _restarts: ClassVar[tuple[str, ...]] = (END, AGAIN)

    def __init__(self, **options: Unpack[AgentOptions]) -> None:
        self._set(options)

    async def run_setup(self, run: object) -> None:
        """Call `setup`, once it is recorded that the agent begins; the runtime's entry point."""
        await cast("Run", run).begin()
        await super().run_setup(run)

    async def perform(self, run: object) -> None:
        """Call `play`, once it is recorded that the agent begins; the runtime's entry point."""
        await cast("Run", run).begin()
        await super().perform(run)

    async def judge(self, run: object) -> RewardResult:
        """Return the agent's own reward, or else the class's; the runtime's entry point."""
        given: RewardResult = cast("Run", run).state.get(RESULT, RewardResult())
        if given.reward is not None:
            return self._checked_reward(given, f"agent {self.name!r}")
        computed = await super().judge(run)
        scores = {**(computed.scores or {}), **(given.scores or {})}
        return replace(computed, scores=scores or None, extra_json=computed.extra_json or given.extra_json)

    def _set(self, options: Mapping[str, Any]) -> None:
        """Set attributes. Raise TypeError for one that the class does not have; the metaclass checks their values."""
        for name, value in options.items():
            known = name == "name" or not callable(getattr(type(self), name, callable))  # `name` has no default
            if name.startswith("_") or not known:
                raise TypeError(f"{type(self).__name__} has no option {name!r}")
            object.__setattr__(self, name, value)

    def check_attributes(self) -> None:
        """Check what the metaclass does not know."""
        super().check_attributes()
        if self.replayable:
            text = "replayable is True, but an agent that owns its loop cannot be replayed; leave it unset"
            raise ValueError(f"agent {self.name!r}: {text}")
        if not isinstance(self.capture, CaptureOptions):
            raise TypeError(f"agent {self.name!r}: capture is {self.capture!r:.100}; it must be CaptureOptions")


def reachable(access: ModelAccess, agent: str) -> ModelAccess:
    """Return the access if a client of this server can use it. Raise `RolloutFailed` if the server has no URL."""
    if "://" not in access.base_url:
        text = (
            f"agent {agent} cannot call its model: the server has no HTTP port; switch it on or set ROLLOUT_PUBLIC_URL"
        )
        raise program_failed(text)
    return access


def task_of(run: Run) -> str:
    """Return the text of the request's last user message; empty if it has none."""
    users = [message for message in run.request.messages if message.get("role") == "user"]
    return text_of(users[-1].get("content")) if users else ""


def check_not_over(run: Run) -> None:
    """Raise `RolloutEnded` if the rollout reached an end, whatever the agent did of it: its calls were refused."""
    if run.ending.is_reached:
        raise RolloutEnded(run.ending.end)
