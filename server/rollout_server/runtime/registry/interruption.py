"""Which unfinished rollouts a later process of the server can continue, and why it cannot continue the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from rollout_server.core.error import NotPossible, RolloutError
from rollout_server.core.limits import Limits
from rollout_server.core.outcome import Cancellation, Category, End, Failure, RewardRule
from rollout_server.core.record import (
    Answered,
    Asked,
    Ended,
    Forked,
    GivenUp,
    Record,
    SegmentOpened,
    ToolReturned,
    ToolStarted,
    has_begun,
)
from rollout_server.core.spec import ENGINES, Dialect, InterruptPolicy, Spec
from rollout_server.runtime.agent_protocol import AGAIN, END, AgentProtocol, goes_on_live, has_finished
from rollout_server.runtime.capture.continuation import finished_work
from rollout_server.runtime.journal import JournalUnusable, StoredRollout
from rollout_server.runtime.ports import Clock, Tool
from rollout_server.runtime.replay_steps import replay_obstacle
from rollout_server.runtime.rollout import Rollout, RolloutOwner, RolloutState
from rollout_server.runtime.run.tool_listing import lost_state
from rollout_server.runtime.start_request import AdmittedStart
from rollout_server.runtime.tools.toolset import McpServer

_REQUESTED_AGAIN = ENGINES | {Dialect.STREAM}
"""Dialects whose completions are requested again after a restart, also if they may be generated twice then."""

_DECLARATION: Final = (
    "replayable = True declares that it can, and on_restart what becomes of a rollout whose agent owns its loop"
)


@dataclass(frozen=True, slots=True)
class MissingAgent:
    """Stands for the agent of a rollout of an earlier process that this server does not have. It never runs."""

    name: str
    version: str
    description: str = ""
    replayable: bool = False
    on_restart: str = END
    external: bool = False
    limits: Limits = Limits()
    offered_tools: Sequence[Tool] = ()
    toolsets: Sequence[McpServer] = ()
    reward_rule: str = RewardRule.COPY.value
    cleanup_seconds: float = 0.0
    reward_group_seconds: float = 0.0

    def overrides(self, method: str) -> bool:
        """Return False, so that no part of it is called when the rollout ends."""
        return False

    def _never(self, *_: object) -> NoReturn:
        raise AssertionError(f"agent {self.name!r} is not on this server and cannot run")

    list_toolsets = tools_for = start = stop = run_setup = perform = judge = judge_group = run_cleanup = _never


def end_without_slot(rollout: Rollout) -> None:
    """Record the requested end of a rollout that has no slot in this process. An earlier process may have run it."""
    end, ran = rollout.ending.requested.result(), 1000 * rollout.earlier_seconds
    rollout.record(Ended(end, total_ms=ran, queued_ms=rollout.queued_ms(), reward_rule=rollout.reward_rule))


def interrupted_text(obstacle: str) -> str:
    """Return the message of that end."""
    return f"the server stopped while the rollout ran; {obstacle}; start it again"


def check_resumable(spec: Spec, agent: AgentProtocol, *, durable: bool, request_id: str) -> None:
    """Raise `NotPossible` for a request that demands to be resumed and never could be. `durable`: the server has a journal."""
    if spec.on_interrupt is not InterruptPolicy.RESUME:
        return
    obstacle = "" if durable else "this server has no journal"
    obstacle = obstacle or _request_obstacle(spec, request_id) or _policy_obstacle(spec, agent, resume_by_default=True)
    if obstacle:
        text = f"on_interrupt is RESUME, but {obstacle}; leave on_interrupt unset"
        raise NotPossible(text, reason="RESUME_UNSUPPORTED")


def interrupt(rollout: Rollout, *, durable: bool, resume_by_default: bool) -> None:
    """Suspend an unfinished rollout for the next process of a server that stops, or request its end."""
    text = "the server stopped while the rollout ran; start it again"
    if durable and not (rollout.ending.requested.done() or rollout.ending.is_final):
        obstacle = obstacle_to_resume(
            rollout.spec,
            rollout.agent,
            rollout.log.records,
            request_id=rollout.request_id,
            resume_by_default=resume_by_default,
            never_ran=rollout.state is RolloutState.QUEUED,
        )
        if not obstacle:
            rollout.suspend()
            return
        text = interrupted_text(obstacle)
    rollout.ending.request(Failure(Category.INTERRUPTED, text, rollout.machine.turn))


@dataclass(frozen=True, slots=True)
class RestoredStart:
    """How a rollout of an earlier process starts in this one. `obstacle`: why it cannot be continued; empty if it can."""

    admitted: AdmittedStart
    tools: Sequence[Tool] = ()
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class RestoredRollout:
    """A rollout of an earlier process. `end`: it is unfinished and to be ended with this; None: it has finished, or continues."""

    rollout: Rollout
    admitted: AdmittedStart
    end: End | None


def restored(
    stored: StoredRollout,
    agents: Mapping[str, AgentProtocol],
    clock: Clock,
    owner: RolloutOwner,
    *,
    resume_by_default: bool,
) -> RestoredRollout:
    """Return a rollout of an earlier process. Raises `JournalUnusable` if its records contradict each other."""
    start = _restored_start(stored, agents, resume_by_default=resume_by_default)
    rollout = _rebuilt(stored, start, clock, owner)
    end: End | None = None
    if rollout.outcome is None and stored.cancelled is not None:
        end = Cancellation(stored.cancelled)
        rollout.ending.request(end)  # before its group or a caller requests another one
    elif start.obstacle:
        end = Failure(Category.INTERRUPTED, interrupted_text(start.obstacle), stored.entries[-1].turn)
    return RestoredRollout(rollout, start.admitted, end)


def _restored_start(
    stored: StoredRollout, agents: Mapping[str, AgentProtocol], *, resume_by_default: bool
) -> RestoredStart:
    """Return how a stored rollout starts. A finished one, and one that cannot be continued, has no tools."""
    start, spec = stored.start, stored.start.request.spec
    agent: AgentProtocol = agents.get(spec.agent) or MissingAgent(spec.agent, start.agent_version)
    admitted = AdmittedStart(start.request, agent, start.fingerprint)
    if isinstance(stored.entries[-1].record, Ended):
        return RestoredStart(admitted)
    if isinstance(agent, MissingAgent):
        return RestoredStart(admitted, obstacle=f"this server has no agent {agent.name!r} any more")
    if agent.version != start.agent_version:
        text = f"agent {agent.name!r} had version {start.agent_version!r} then and has {agent.version!r} now"
        return RestoredStart(admitted, obstacle=text)
    records = [entry.record for entry in stored.entries]
    try:
        tools = admitted.tools()
    except RolloutError as error:
        return RestoredStart(admitted, obstacle=error.message)
    obstacle = obstacle_to_resume(
        spec,
        agent,
        records,
        request_id=start.request.request_id,
        resume_by_default=resume_by_default,
        never_ran=not has_begun(records),
    )
    return RestoredStart(admitted, obstacle=obstacle) if obstacle else RestoredStart(admitted, tools)


def _rebuilt(stored: StoredRollout, start: RestoredStart, clock: Clock, owner: RolloutOwner) -> Rollout:
    """Return a rollout of an earlier process. Raises `JournalUnusable` if its records contradict each other."""
    uid = stored.start.uid
    try:
        rollout = Rollout(uid, start.admitted, start.tools, clock, owner, stored)
        rollout.capture.restore(stored.key_digests, finished_work([entry.record for entry in stored.entries]))
        if rollout.outcome is not None:
            rollout.capture.end()
        return rollout
    except Exception as error:  # whatever records that no server has written make the machine raise
        text = (
            f"rollout {uid} cannot be rebuilt, because its records contradict each other ({type(error).__name__}): restore the "
            "journal from a backup, or move its directory away to start without its rollouts"
        )
    # Outside of the `except`: the error has what callers and models sent, and must not get into a log.
    raise JournalUnusable(text)


def obstacle_to_resume(
    spec: Spec,
    agent: AgentProtocol,
    records: Sequence[Record],
    *,
    request_id: str,
    resume_by_default: bool,
    never_ran: bool,
) -> str:
    """Return why a later process cannot continue an unfinished rollout, as part of a sentence; empty if it can.

    Args:
        request_id: that of its start; empty if it has none.
        resume_by_default: a rollout is continued if `on_interrupt` of its spec is unset.
        never_ran: it waits for its first slot, so there is nothing to replay.
    """
    return (
        _request_obstacle(spec, request_id)
        or _policy_obstacle(spec, agent, records, resume_by_default=resume_by_default, never_ran=never_ran)
        or _agent_obstacle(spec, agent, records)
        or _lost_state(agent, records)
    )


def _request_obstacle(spec: Spec, request_id: str) -> str:
    """Return why the trainer of a rollout on a stream cannot take it over, which it does by repeating the start."""
    if spec.completions.dialect is Dialect.STREAM and not request_id:
        return "its start on the stream of its trainer has no request id under which the trainer could repeat it"
    return ""


def _policy_obstacle(
    spec: Spec,
    agent: AgentProtocol,
    records: Sequence[Record] = (),
    *,
    resume_by_default: bool,
    never_ran: bool = False,
) -> str:
    if spec.on_interrupt is InterruptPolicy.FAIL or (
        spec.on_interrupt is InterruptPolicy.UNSET and not resume_by_default
    ):
        return "it was not to be resumed (on_interrupt)"
    if not (agent.replayable or goes_on_live(agent, records) or never_ran):
        return f"the play of agent {agent.name!r} cannot be replayed ({_DECLARATION})"
    return ""


def _agent_obstacle(spec: Spec, agent: AgentProtocol, records: Sequence[Record]) -> str:
    """Return why the agent cannot go on from the end of the log."""
    if has_finished(agent, records):
        return ""
    if goes_on_live(agent):
        return _live_obstacle(spec, agent, records)
    return _open_work(spec, records) or replay_obstacle(records)


def _live_obstacle(spec: Spec, agent: AgentProtocol, records: Sequence[Record]) -> str:
    """Return why an agent that owns its loop cannot go on: its next call begins another conversation."""
    if not any(isinstance(record, Asked) for record in records):
        return ""
    if spec.completions.dialect is Dialect.HTTP_MASKED:
        return (
            "its trainer has a single conversation per rollout (POST /rollout), and the agent would begin another one"
        )
    if agent.on_restart == AGAIN and not spec.messages:
        return "its request has no messages with which its agent could be run again"
    return ""


def _lost_state(agent: AgentProtocol, records: Sequence[Record]) -> str:
    """Return which state of a tool ended with the server. An agent that is run anew begins with new sessions."""
    return "" if agent.on_restart == AGAIN else lost_state(records)


def _open_work(spec: Spec, records: Sequence[Record]) -> str:
    """Return which call was under way at the end of the log that cannot be made again."""
    turns: set[int] = set()
    calls: dict[tuple[str, int, int], ToolStarted] = {}
    of_models: set[str | int] = set()  # segments and turns of further models, which any engine generates again
    for record in records:
        match record:
            case Forked(segment_id=opened) if record.role.model:
                of_models.add(opened)
            case SegmentOpened(turn=turn, segment_id=opened) if turn in of_models:
                of_models.add(opened)
            case Asked(turn=turn, segment_id=segment_id):
                (of_models if segment_id in of_models else turns).add(turn)
            case Answered(turn=turn) | GivenUp(turn=turn):
                turns.discard(turn)
            case ToolStarted(turn, index, _, segment_id):
                calls[segment_id, turn, index] = record
            case ToolReturned(turn=turn, index=index, segment_id=segment_id):
                calls.pop((segment_id, turn, index), None)
    target = spec.completions
    if turns and not target.replays_turn_keys and target.dialect not in _REQUESTED_AGAIN:
        return f"turn {min(turns)} was being generated, and its trainer does not replay turn keys (replays_turn_keys)"
    unsafe = [started.call.name for started in calls.values() if not started.repeatable]
    return (
        f"tool {unsafe[0]} was running and must not run twice (idempotent = True declares that it may)"
        if unsafe
        else ""
    )
