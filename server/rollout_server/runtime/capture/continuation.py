"""How the rollout of an agent that owns its loop goes on after a restart of the server.

Its log cannot be replayed: the calls were the agent's, and the rollout has only what they led to. So the machine takes over the
log, and the agent goes on live. Its calls find an endpoint that knows no earlier history. What they send is the prompt of a new
conversation and trains nothing there, so no token trains twice.

* An agent that runs elsewhere ("continue") still runs. A completion that it may not have received does not train: it repeats the
  call, and gets another one. That it received the last completion of a conversation shows only in a call that sends it back.
* A program or a function ("again") died with the server. It is run anew, in a new main conversation. Its earlier attempt trains
  nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from rollout_server.core.capture.earlier import EarlierMain
from rollout_server.core.capture.unreceived import UNSEEN, are_settled, unreceived
from rollout_server.core.conversation import Conversation
from rollout_server.core.ledger import SegmentKind
from rollout_server.core.machine import LimitReached
from rollout_server.core.outcome import Category, Failure, FailureClass, RewardResult, Stop
from rollout_server.core.record import (
    FINISH,
    RESAMPLED,
    Answered,
    Asked,
    CaptureSettled,
    Forked,
    GivenUp,
    Input,
    Masked,
    Note,
    Observed,
    Record,
    Resumed,
    has_begun,
)
from rollout_server.core.spec import ENGINES
from rollout_server.runtime.agent_protocol import AGAIN
from rollout_server.runtime.capture.endpoint import FinishedWork
from rollout_server.runtime.rollout import Rollout

EARLIER_ATTEMPT: Final = "the server was restarted, and the agent was run anew"
_SETTLE_SECONDS: Final = 5.0
"""How long `finish` waits until what the calls were is recorded, too. An agent class may do something else before."""
_GENERATED_TWICE: Final = (
    "the server was restarted while the turn was generated; the agent requests it again under another key, so it may be generated "
    "twice"
)


def goes_on(rollout: Rollout) -> bool:
    """Return whether an earlier process ran the rollout, and its agent goes on live."""
    return rollout.is_restored and rollout.replay is None and has_begun(rollout.log.records)


def go_on(rollout: Rollout) -> None:
    """Record that a rollout goes on. Called before its agent runs."""
    records = rollout.log.records
    rollout.record(rollout.log.resumption)
    for record in _closing_records(rollout, records):
        rollout.record(record)
    if rollout.agent.on_restart == AGAIN and rollout.spec.messages:
        fork = rollout.machine.fork(SegmentKind.MAIN, tuple(rollout.spec.messages))
        rollout.record(replace(fork, tools=tuple(tool.name for tool in rollout.tools)))


def _closing_records(rollout: Rollout, records: Sequence[Record]) -> Iterator[Input]:
    """Yield what ends the calls of the earlier process: open turns are given up, and some completions are masked."""
    opened = {record.turn: record.segment_id for record in records if isinstance(record, Asked)}
    ended = {record.turn for record in records if isinstance(record, Answered | GivenUp)}
    for turn, segment_id in opened.items():
        if turn not in ended:
            if rollout.spec.completions.dialect not in ENGINES:
                yield Note(turn, RESAMPLED, f"turn {turn}: {_GENERATED_TWICE}")
            yield GivenUp(turn, segment_id)
    if rollout.agent.on_restart != AGAIN:
        yield from (Masked(turn, UNSEEN) for turn in unreceived(rollout.machine, records))
        return
    masked = {record.turn for record in records if isinstance(record, Masked)}
    answered = {record.turn for record in records if isinstance(record, Answered)}
    yield from (Masked(turn, EARLIER_ATTEMPT) for turn in sorted(answered - masked))


def earlier_stop(rollout: Rollout) -> Stop | None:
    """Return the stop if a limit had ended the calls of an earlier process: then they were settled before the agent finished."""
    limit, records = rollout.machine.request_completion(), rollout.log.records
    if rollout.agent.on_restart == AGAIN or not isinstance(limit, LimitReached) or not are_settled(records):
        return None
    settled = max(at for at, record in enumerate(records) if isinstance(record, CaptureSettled))
    return limit.stop if finished_work(records[:settled]) is None else None


def has_turns_of_this_process(rollout: Rollout) -> bool:
    """Return whether a turn of the rollout was requested since its start or its last `Resumed`."""
    latest = (record for record in reversed(rollout.log.records) if isinstance(record, Asked | Resumed))
    return isinstance(next(latest, None), Asked)


def is_settled(rollout: Rollout) -> bool:
    """Return whether an earlier process has counted the calls, and there was none since. Not of an agent that is run anew."""
    return rollout.agent.on_restart != AGAIN and are_settled(rollout.log.records)


def earlier_main(rollout: Rollout) -> tuple[EarlierMain, Conversation] | None:
    """Return how the main conversation of an earlier process began, and the conversation in which it got its last completion.

    None: it has no turn, or the agent is run anew.
    """
    main, opened = rollout.machine.main, dict[Conversation, Forked]()
    if not main.turn:
        return None
    for record in rollout.log.records:
        if isinstance(record, Forked):
            opened[rollout.machine.find(record)] = record
    tools = opened[main].tools if main in opened else [tool.name for tool in rollout.tools]
    begun = EarlierMain.of(tools, main.messages)
    # A sub-agent of its own by the recorded kind, although its conversation begins like the main one: only its id tells them apart.
    foreign = {
        _client_agent(fork)
        for each, fork in opened.items()
        if _is_subagent(fork) and fork.role.trainable and begun.goes_on_in(fork.tools, each.messages)
    }
    earlier = replace(begun, foreign=frozenset(foreign - {""}))
    later = [
        each
        for each, fork in opened.items()
        if each.ends and fork.role.trainable and not fork.role.model and not _is_subagent(fork)
        if earlier.goes_on_in(fork.tools, each.messages, _client_agent(fork))
    ]
    return earlier, max(later, key=lambda each: max(each.ends), default=main)


def _is_subagent(fork: Forked) -> bool:
    return fork.origin.kind is SegmentKind.SUBAGENT


def _client_agent(fork: Forked) -> str:
    return "" if fork.origin.parting is None else fork.origin.parting.client_agent


async def finish(rollout: Rollout, work: FinishedWork) -> bool:
    """End the work of an agent that runs elsewhere, and store its result: see `AgentEndpoint.finish`."""
    repeated = await rollout.capture.finish(work)
    if not repeated:
        rollout.record(Observed(FINISH, json.dumps(asdict(work), default=lambda value: value.value)))
        # Until the settlement is recorded. If the server crashes before that, the last completion is masked out.
        await rollout.capture.closed(_SETTLE_SECONDS)
    await rollout.stored()
    return repeated


def finished_work(records: Sequence[Record]) -> FinishedWork | None:
    """Return the result of the agent's work from the log of a rollout; None if it has not ended."""
    for record in reversed(records):
        if isinstance(record, Observed) and record.what == FINISH:
            return _read_work(json.loads(record.value_json))
    return None


def _read_work(value: dict[str, Any]) -> FinishedWork:
    failure = value["failure"]
    if failure is not None:
        source = failure["source"] and FailureClass(failure["source"])
        failure = Failure(**{**failure, "category": Category(failure["category"]), "source": source})
    return FinishedWork(RewardResult(**value["reward"]), failure)
