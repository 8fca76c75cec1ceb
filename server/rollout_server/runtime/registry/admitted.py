"""A wish with which nothing is wrong: what is left is whether there is room for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_server.core.message import utf8_length
from rollout_server.runtime.ports import AgentProtocol, Tool
from rollout_server.runtime.request import chosen_tools
from rollout_server.runtime.start_request import StartRequest


@dataclass(frozen=True, slots=True)
class AdmittedStart:
    """Nothing has been taken yet. What the spec left open is filled in."""

    wish: StartRequest
    agent: AgentProtocol
    fingerprint: str

    @property
    def key(self) -> tuple[str, str, str] | None:
        """What a repeated request finds its rollout by; None where the request has no id."""
        wish = self.wish
        return (wish.caller, wish.spec.completions.url, wish.request_id) if wish.request_id else None

    @property
    def size(self) -> int:
        """About how many bytes its rollout begins with, counted as `Machine.size`."""
        return 2 * sum(utf8_length(message.text) for message in self.wish.spec.messages)

    def tools(self) -> Sequence[Tool]:
        """Those of its rollout, chosen by the agent. Raises `RolloutError`."""
        return chosen_tools(self.agent, self.wish.spec)
