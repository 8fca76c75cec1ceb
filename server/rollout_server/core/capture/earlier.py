"""The main conversation of an agent that owns its loop, as the server had it before a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from rollout_server.core.message import Message


@dataclass(frozen=True, slots=True)
class EarlierMain:
    """How the main conversation began. The calls before a restart are unknown, so none of its turns can be continued.

    Args:
        tools: the names of its tools.
        system: the system messages at its start.
        first: the message after them, if any.
        foreign: the client's ids of sub-agents whose conversations begin like it.
    """

    tools: tuple[str, ...]
    system: tuple[Message, ...]
    first: tuple[Message, ...]
    foreign: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tools: Sequence[str], messages: Sequence[Message]) -> EarlierMain:
        """Return the start of a conversation with these tools and messages."""
        system = tuple(takewhile(lambda message: message.role == "system", messages))
        return cls(tuple(tools), system, tuple(messages[len(system) : len(system) + 1]))

    def goes_on_in(self, tools: Sequence[str], messages: Sequence[Message], client_agent: str = "") -> bool:
        """Return whether a conversation with these tools and messages, of this agent, is a later part of it: see `Lineage`."""
        other = EarlierMain.of(tools, messages)
        begins_alike = self.first == other.first or self.system == other.system
        return client_agent not in self.foreign and self.tools == other.tools and begins_alike
