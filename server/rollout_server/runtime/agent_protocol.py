"""An agent, as the runtime sees it, and the request that it sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout_server.core.limits import Limits
from rollout_server.core.message import parse_object
from rollout_server.core.outcome import RewardResult
from rollout_server.core.spec import Sampling, Spec
from rollout_server.runtime.ports import Tool


@dataclass(frozen=True, slots=True)
class Request:
    """A rollout as its caller wants it. `spec` is all of it, in the server's own words."""

    spec: Spec

    @property
    def rollout_id(self) -> str:
        """The caller's id of the rollout."""
        return self.spec.rollout_id

    @property
    def group_id(self) -> str:
        """Of the rollouts that belong together, as the caller groups them; may be empty."""
        return self.spec.group_id

    @property
    def labels(self) -> Mapping[str, str]:
        """What rollouts are selected by."""
        return self.spec.labels

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the request says beside the conversation, parsed anew at each look."""
        return parse_object(self.spec.metadata_json) if self.spec.metadata_json else {}

    @property
    def source(self) -> Mapping[str, Any]:
        """What the caller's own protocol said and nothing else here keeps as it was written, parsed anew at each look."""
        return parse_object(self.spec.source_json) if self.spec.source_json else {}

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The conversation that the rollout begins with, parsed anew at each look."""
        return [message.fields() for message in self.spec.messages]

    @property
    def sampling(self) -> Sampling:
        """How the model samples where a turn says nothing else; None leaves it to the trainer."""
        return self.spec.sampling

    @property
    def limits(self) -> Limits:
        """What the rollout may use up: of the request's own limits and the agent's the lower ones."""
        return self.spec.limits


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
