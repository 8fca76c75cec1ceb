"""How a run opens another conversation of its rollout: for `Run.fork`, or for a call of an agent that owns its loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from rollout_server.core.conversation import Conversation, State
from rollout_server.core.ledger import AGENT, Parting, Role, SegmentKind
from rollout_server.core.message import Message
from rollout_server.core.record import Forked
from rollout_server.runtime.errors import AgentMistake
from rollout_server.runtime.ports import Fork, Sampler, Tool
from rollout_server.runtime.run.arguments import check_room, forkable_tools
from rollout_server.runtime.run.context import RunContext
from rollout_server.runtime.run.further_model import RolloutModel
from rollout_server.runtime.run.messages import Reply
from rollout_server.runtime.tools.executor import ToolExecutor

_OWN_PROMPT = (SegmentKind.SUBAGENT, SegmentKind.COMPACTION, SegmentKind.DRIFT)


@dataclass(frozen=True, slots=True)
class Opening:
    """A conversation that a call of an agent that owns its loop needs.

    Args:
        kind: MAIN: these messages replace the prompt of the main conversation, which has no completion yet. BRANCH: a continuation
            after an earlier turn. SUBAGENT, COMPACTION and DRIFT: a conversation with its own prompt. None of them ends another
            conversation.
        messages: the prompt; none for a branch.
        tools: the tools offered to the model; None: those of the run that opens it. None for a branch.
        after_turn: for a branch, the turn of the run's conversation after whose completion it begins.
        role: the role of the conversation; its `model` is ignored.
        parting: where the call parted from the conversation of the run. COMPACTION and DRIFT need one.
    """

    kind: SegmentKind
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] | None = None
    after_turn: int = 0
    role: Role = AGENT
    parting: Parting | None = None


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a `Run` works with: the rollout, and the sampler, tools and further model of its conversation."""

    context: RunContext
    conversation: Conversation
    sampler: Sampler
    executor: ToolExecutor
    model: RolloutModel | None = None


async def open_for_call(parts: RunParts, opening: Opening) -> RunParts:
    """Open a conversation for a call of an agent that owns its loop; see `Run.open`."""
    await asyncio.sleep(0)
    context, conversation = parts.context, parts.conversation
    await context.check(conversation, *State)
    check_room(context.machine, conversation, "open")
    _check(opening, parts)
    given = None if opening.tools is None else forkable_tools(opening.tools)
    role = replace(opening.role, model=conversation.role.model)
    forked = context.machine.fork(
        opening.kind, opening.messages, conversation, role, after_turn=opening.after_turn, parting=opening.parting
    )
    return await open_forked(parts, forked, given)


async def open_forked(
    parts: RunParts, forked: Forked, tools: tuple[Tool, ...] | None, model: RolloutModel | None = None
) -> RunParts:
    """Record that a conversation is opened, and return what its run works with.

    Raises `RolloutFailed`, before anything is recorded, if the trainer does not support the conversation.

    Args:
        parts: those of the conversation that is forked.
        forked: the record.
        tools: the tools offered to the model; None: the same.
        model: the further model that continues the conversation, if it is another one than in `parts`.
    """
    offered = parts.executor.tools if tools is None else tools
    if model is not None:  # the trainer does not see this conversation
        sampler = model.open(offered)
    elif forked.segment_id == parts.conversation.id and tools is None:  # nothing was sampled in it yet
        sampler = parts.sampler
    else:
        earlier = bool(forked.after_turn) and forked.after_turn != parts.conversation.turn
        sampler = parts.sampler.fork(Fork(forked.origin, tools, earlier))
    context = parts.context
    recorded = await context.issue(replace(forked, tools=tuple(tool.name for tool in offered)))
    executor = parts.executor if tools is None else parts.executor.with_tools(tools)
    return RunParts(context, context.machine.find(recorded), sampler, executor, model or parts.model)


def turn_after(reply: object, conversation: Conversation) -> int:
    """Return the turn after which a branch begins; 0 for None. Raise `AgentMistake` for a reply of another conversation."""
    if reply is None:
        return 0
    end = conversation.ends.get(reply.turn) if isinstance(reply, Reply) else None
    if end is None:
        text = f"fork: after={reply!r:.100} is not a completion of this conversation; pass what its `run.sample()` returned"
        raise AgentMistake(text)
    return end.completion.turn


def _check(opening: Opening, parts: RunParts) -> None:
    """Raise `AgentMistake` for an opening that does not fit the conversation: a mistake of the code that decided it."""
    kind, conversation = opening.kind, parts.conversation
    if kind is SegmentKind.BRANCH:
        fits = opening.after_turn in conversation.ends and not opening.messages and opening.tools is None
    elif kind is SegmentKind.MAIN:
        idle = conversation.state in (State.OPEN, State.CLOSED)
        fits = conversation is parts.context.machine.main and not conversation.ends and idle and bool(opening.messages)
    else:
        parted = opening.parting is not None or kind is SegmentKind.SUBAGENT
        fits = kind in _OWN_PROMPT and parted and bool(opening.messages) and not opening.after_turn
    if not fits:
        raise AgentMistake(
            f"open: a conversation of kind {kind.value!r} after turn {opening.after_turn}, with {len(opening.messages)} messages "
            f"and parting {opening.parting}, does not fit the {conversation.state.value} conversation {conversation.id!r}"
        )
