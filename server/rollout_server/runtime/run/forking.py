"""What an agent says when it opens a conversation or adds to one, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rollout_server.core.ledger import SegmentKind
from rollout_server.core.message import JSON, MalformedMessage, Message
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.run.context import AgentMistake

_KINDS = {kind.value: kind for kind in (SegmentKind.BRANCH, SegmentKind.SUBAGENT, SegmentKind.COMPACTION)}


def fork_kind(word: str | None, messages: int | None, *, has_tools: bool) -> SegmentKind:
    """The kind of conversation that is wanted; with so many messages, None for none given. Raises `AgentMistake`."""
    if word is not None and word not in _KINDS:
        raise AgentMistake(f"fork: kind is {word!r}, it must be one of {', '.join(_KINDS)}")
    kind = _KINDS[word] if word else SegmentKind.BRANCH if messages is None else SegmentKind.SUBAGENT
    branches = kind is SegmentKind.BRANCH
    if branches and messages is not None:
        raise AgentMistake("fork: a branch goes on from this conversation as it is; append to the Run that it returns")
    if branches and has_tools:
        raise AgentMistake(
            "fork: a branch has the tokens of this conversation, which tell its tools; others need messages"
        )
    if not branches and not messages:
        raise AgentMistake(f"fork: a {kind.value} needs the messages that it begins with")
    return kind


def forkable_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Tools by which a conversation may go. Raises `AgentMistake` for what is none, and for two of one name."""
    for tool in tools:
        texts = [getattr(tool, name, None) for name in ("name", "description", "parameters_json_schema")]
        if not all(isinstance(text, str) for text in texts) or not callable(getattr(tool, "run", None)):
            raise AgentMistake(f"fork: {tool!r} is not a tool; `tool` makes one of a function")
    names = [tool.name for tool in tools]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise AgentMistake(f"fork: more than one tool has the name {', '.join(map(repr, doubled))}")
    return tuple(tools)


def written(messages: Iterable[Mapping[str, JSON]]) -> tuple[Message, ...]:
    """An agent's messages as the conversation holds them. Raises `AgentMistake`."""
    try:
        return tuple(Message.write(message) for message in messages)
    except (MalformedMessage, TypeError, ValueError) as error:
        raise AgentMistake(f"not a message: {error}") from error
