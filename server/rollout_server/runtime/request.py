"""What an agent is told of a request before its rollout is accepted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_server.core.error import NotPossible, RolloutError
from rollout_server.core.limits import Limits
from rollout_server.core.message import parse_object
from rollout_server.core.spec import Dialect, Sampling, Spec
from rollout_server.runtime.aio.source_location import raised_at
from rollout_server.runtime.ports import AgentProtocol, Tool

_log = logging.getLogger(__name__)


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
