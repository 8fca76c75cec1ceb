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
from rollout_server.core.conversation import Conversation
from rollout_server.core.ledger import SegmentKind
from rollout_server.core.outcome import Category, Failure, FailureClass, RewardResult
from rollout_server.core.record import (
    Answered,
    Asked,
    CaptureSettled,
    Forked,
    GivenUp,
    Input,
    Masked,
    Observed,
    Record,
    Resumed,
)
from rollout_server.runtime.agent_protocol import AGAIN
from rollout_server.runtime.capture.endpoint import FinishedWork
from rollout_server.runtime.rollout import Rollout

UNSEEN: Final = "the server was restarted, and nothing shows that the agent received this completion"
EARLIER_ATTEMPT: Final = "the server was restarted, and the agent was run anew"
_FINISH: Final = "finish"
_SETTLE_SECONDS: Final = 5.0
"""How long `finish` waits until what the calls were is recorded, too. An agent class may do something else before."""


def goes_on(rollout: Rollout) -> bool:
    """Return whether an earlier process ran the rollout, and its agent goes on live."""
    return rollout.is_restored and rollout.replay is None and len(rollout.log.entries) > 1


def go_on(rollout: Rollout) -> None:
    """Record that a rollout goes on. Called before its agent runs."""
    records = _records(rollout)
    rollout.record(Resumed(1 + sum(isinstance(record, Resumed) for record in records)))
    for record in _closing_records(rollout, records):
        rollout.record(record)
    if rollout.agent.on_restart == AGAIN:
        fork = rollout.machine.fork(SegmentKind.MAIN, tuple(rollout.spec.messages))
        rollout.record(replace(fork, tools=tuple(tool.name for tool in rollout.tools)))


def _closing_records(rollout: Rollout, records: Sequence[Record]) -> Iterator[Input]:
    """Yield what ends the calls of the earlier process: open turns are given up, and some completions are masked."""
    opened = {record.turn: record.segment_id for record in records if isinstance(record, Asked)}
    ended = {record.turn for record in records if isinstance(record, Answered | GivenUp)}
    yield from (GivenUp(turn, segment_id) for turn, segment_id in opened.items() if turn not in ended)
    turns, reason = _unseen_turns(rollout, records), UNSEEN
    if rollout.agent.on_restart == AGAIN:
        turns, reason = {record.turn for record in records if isinstance(record, Answered)}, EARLIER_ATTEMPT
    masked = {record.turn for record in records if isinstance(record, Masked)}
    yield from (Masked(turn, reason) for turn in sorted(turns - masked))


def _unseen_turns(rollout: Rollout, records: Sequence[Record]) -> set[int]:
    """Return the last turns of the conversations that no call continued; none if the calls were settled by their end."""
    if _are_settled(records):
        return set()
    last, seen = dict[Conversation, int](), set[int]()
    for record in records:
        match record:
            case Asked(turn=turn):
                seen.add(last.get(rollout.machine.of_turn(turn), 0))
            case Answered(turn=turn):
                last[rollout.machine.of_turn(turn)] = turn
            case Forked(after_turn=turn):
                seen.add(turn)
    return set(last.values()) - seen


def has_turns(rollout: Rollout) -> bool:
    """Return whether this process has requested a turn of the rollout."""
    latest = (record for record in reversed(_records(rollout)) if isinstance(record, Asked | Resumed))
    return isinstance(next(latest, None), Asked)


def is_settled(rollout: Rollout) -> bool:
    """Return whether the calls of the rollout's agent were counted, perhaps by an earlier process, and there was none since."""
    return _are_settled(_records(rollout))


def earlier_main(rollout: Rollout) -> tuple[EarlierMain, Conversation] | None:
    """Return how the main conversation of an earlier process began, and the conversation in which it got its last completion.

    None: it has no completion, or the agent is run anew.
    """
    main, tools = rollout.machine.main, dict[Conversation, tuple[str, ...]]()
    if not main.ends:
        return None
    tools[main] = tuple(tool.name for tool in rollout.tools)
    for record in _records(rollout):
        if isinstance(record, Forked):
            tools[rollout.machine.find(record)] = record.tools
    earlier = EarlierMain.of(tools[main], main.messages)
    parts = [each for each in tools if each.ends and each.role.trainable and not each.role.model]
    later = [each for each in parts if earlier.goes_on_in(tools[each], each.messages)]
    return earlier, max(later, key=lambda each: max(each.ends), default=main)


async def finish(rollout: Rollout, work: FinishedWork) -> bool:
    """End the work of an agent that runs elsewhere, and store its result: see `AgentEndpoint.finish`."""
    repeated = await rollout.capture.finish(work)
    if not repeated:
        rollout.record(Observed(_FINISH, json.dumps(asdict(work), default=lambda value: value.value)))
        await rollout.capture.closed(
            _SETTLE_SECONDS
        )  # after a crash, nothing shows that the last completion was received
    await rollout.stored()
    return repeated


def finished_work(records: Sequence[Record]) -> FinishedWork | None:
    """Return the result of the agent's work from the log of a rollout; None if it has not ended."""
    for record in reversed(records):
        if isinstance(record, Observed) and record.what == _FINISH:
            return _read_work(json.loads(record.value_json))
    return None


def _read_work(value: dict[str, Any]) -> FinishedWork:
    failure = value["failure"]
    if failure is not None:
        source = failure["source"] and FailureClass(failure["source"])
        failure = Failure(**{**failure, "category": Category(failure["category"]), "source": source})
    return FinishedWork(RewardResult(**value["reward"]), failure)


def _records(rollout: Rollout) -> Sequence[Record]:
    return [entry.record for entry in rollout.log.entries]


def _are_settled(records: Sequence[Record]) -> bool:
    latest = (record for record in reversed(records) if isinstance(record, Asked | CaptureSettled))
    return isinstance(next(latest, None), CaptureSettled)
