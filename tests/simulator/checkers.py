"""What must hold at the end of a world, judged from the disk, the trainer, the tools and the receiver, not from the registry."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rollout_server.core.ledger import SegmentKind
from rollout_server.core.machine import IllegalRecord, Machine, replay
from rollout_server.core.outcome import Category, Failure, FailureClass, Outcome
from rollout_server.core.record import Answered, Asked, Ended, Forked, Masked, Record, SegmentOpened, ToolStarted
from rollout_server.core.spec import Spec, StaleAction
from rollout_server.runtime.outcome_delivery import DeliveryState

from tests.simulator.coverage import CoveredMachine
from tests.simulator.disk import StoredRecords
from tests.simulator.trainer import FIRST_SAMPLED
from tests.support.machine_records import shown_outcome

if TYPE_CHECKING:
    from tests.simulator.world import World

GRACE_SECONDS = 10.0
"""How much later than its time limit a rollout may end: its agent has 5 s to end, and so have its tasks."""


def check_world(world: World) -> None:
    """Note all laws that the world broke."""
    _check_known(world)
    trained: Counter[int] = Counter()
    for uid, stored in world.disk.rollouts.items():
        if stored.entries:
            outcome = _outcome(world, uid, stored)
            if outcome is not None:
                _check_outcome(world, uid, stored, outcome, trained)
    twice = sorted(token for token, count in trained.items() if count > 1)
    world.laws.require(
        not twice, f"tokens trained twice: {[(each, world.trainer.sampled.get(each)) for each in twice[:3]]}"
    )


def _check_known(world: World) -> None:
    """Every accepted rollout has one outcome, which is what its caller has seen, and which was delivered or given up."""
    require = world.laws.require
    for uid in world.callers.accepted:
        stored = world.disk.rollouts.get(uid)
        require(stored is not None and stored.ended, f"{uid} was accepted and has no outcome")
    for uid, stored in world.disk.rollouts.items():
        # A rollout may end without a turn before its start is refused, because the disk is full. Nobody hears of its end.
        refused = stored.dropped and stored.delivery is None and uid not in world.callers.accepted
        owes = stored.ended and stored.start.request.spec.outcome is not None and not refused
        require(not owes or stored.over, f"{uid}: its delivery is not over")
        # A start that could not be stored in time was refused, and is forgotten.
        require(stored.dropped or not stored.entries or stored.ended, f"{uid} was stored and has no outcome")
        state = stored.delivery.delivery.state if stored.delivery is not None else None
        if state is DeliveryState.ACKNOWLEDGED and uid not in world.receiver.acknowledged:
            received = f"{uid}/outcome" in world.receiver.bodies or stored.received
            require(received, f"{uid} counts as acknowledged, but nothing was received")


def _outcome(world: World, uid: str, stored: StoredRecords) -> Outcome | None:
    """Return the outcome that the log gives, after comparing it with what the caller saw."""
    records, spec = [entry.record for entry in stored.entries], stored.start.request.spec
    machine = CoveredMachine(world.cells, Machine(uid, spec.messages, spec.limits, spec.staleness))
    try:
        replay(machine, records)  # type: ignore[arg-type]
    except IllegalRecord as error:
        world.laws.require(False, f"{uid}: its log cannot be replayed: {error}")
        return None
    seen, outcome = world.callers.outcomes.get(uid), machine.machine.outcome
    if outcome is not None and seen is not None:
        world.laws.require(seen == shown_outcome(outcome), f"{uid}: replay of the log gives another outcome")
    events = world.callers.seen.get(uid, [])
    world.laws.require(events == stored.entries[: len(events)], f"{uid}: events that were seen are not those stored")
    return outcome


def _check_outcome(world: World, uid: str, stored: StoredRecords, outcome: Outcome, trained: Counter[int]) -> None:
    spec, records = stored.start.request.spec, [entry.record for entry in stored.entries]
    _check_limits(world, uid, spec, records)
    _check_end(world, uid, outcome)
    turns = {record.turn: record for record in records if isinstance(record, Answered)}
    found = dict.fromkeys(turns, 0)
    for token, turn in _trained_tokens(world, uid, outcome):
        trained[token] += 1
        if turn in found:
            found[turn] += 1
    excluded = {record.turn for record in records if isinstance(record, Masked)}
    unknown = _turns_without_tokens(records)
    stale = _is_stale(spec, records)
    for turn, answered in turns.items():
        size = len(answered.token_ids or ())
        fits = found[turn] == (0 if turn in excluded | unknown else size)
        world.laws.require(fits or stale, f"{uid}: {found[turn]} of the {size} tokens of turn {turn} train")


def _check_end(world: World, uid: str, outcome: Outcome) -> None:
    """No agent of a world does something else when it runs again, and no failure is the server's, but that of an interruption."""
    end = outcome.end
    if isinstance(end, Failure) and end.category is not Category.INTERRUPTED:
        world.laws.require(end.category is not Category.NOT_REPLAYABLE, f"{uid}: {end.message}")
        internal = end.category is Category.INTERNAL and uid not in world.excused
        world.laws.require(not internal, f"{uid}: an agent failed that did nothing wrong: {end.message}")
        world.laws.require(
            end.failure_class is not FailureClass.SERVER, f"{uid}: a failure of the server: {end.message}"
        )


def _trained_tokens(world: World, uid: str, outcome: Outcome) -> Iterator[tuple[int, int]]:
    """Yield each token that trains, and its turn."""
    for segment in outcome.segments:
        sample, known = segment.sample(), world.trainer.sampled
        masks = (*(0 for _ in sample.prompt_ids), *sample.response_mask)
        for token, mask in zip((*sample.prompt_ids, *sample.response_ids), masks, strict=True):
            origin = known.get(token)
            if mask:
                own = origin is not None and origin.uid == uid
                world.laws.require(own, f"{uid}: token {token} of {origin} trains in segment {segment.id}")
                yield token, origin.turn if origin is not None else 0
            elif token >= FIRST_SAMPLED:
                world.laws.require(origin is not None, f"{uid}: token {token} comes from nowhere")


def _turns_without_tokens(records: Sequence[Record]) -> set[int]:
    """Return the turns that the ledger cannot hold: without ids, or after such a turn without the whole prompt."""
    conversations: dict[str, str] = {}
    gaps: dict[str, bool] = defaultdict(bool)  # by conversation: tokens are missing
    after: dict[int, bool] = {}  # the same, right after a turn
    turns: dict[int, str] = {}
    missing: set[int] = set()
    for record in records:
        match record:
            case Asked(turn=turn, segment_id=segment_id):
                turns[turn] = conversations.get(segment_id, segment_id)
            case SegmentOpened(turn=turn, segment_id=segment_id):
                conversations[segment_id] = turns[turn]
            case Forked(segment_id=segment_id, of=of) if record.origin.kind is SegmentKind.BRANCH:
                gaps[segment_id] = after.get(record.after_turn, gaps[conversations.get(of, of)])
            case Answered(turn=turn):
                where = turns[turn]
                if record.token_ids is None or (record.reported is None and gaps[where]):
                    missing.add(turn)
                gaps[where] = after[turn] = turn in missing
    return missing


def _is_stale(spec: Spec, records: Sequence[Record]) -> bool:
    """Return whether tokens may be masked because of their age."""
    return spec.staleness is not None and spec.staleness.action in (StaleAction.MASK, StaleAction.SPLIT)


def _check_limits(world: World, uid: str, spec: Spec, records: Sequence[Record]) -> None:
    require, limits, generated, turns = world.laws.require, spec.limits, 0, 0
    calls: Counter[tuple[str, int]] = Counter()
    for record in records:
        match record:
            case Asked():
                turns += 1
                tokens = limits.generated_tokens
                require(tokens is None or generated < tokens, f"{uid}: turn {record.turn} is over the token limit")
                require(
                    limits.turns is None or turns <= limits.turns,
                    f"{uid}: turn {record.turn} is over the limit of turns",
                )
            case Answered():
                generated += len(record.token_ids) if record.token_ids is not None else (record.usage or (0, 0))[1]
            case ToolStarted():
                executed = any(tool.executions[record.call.id] for tool in world.tools)
                calls[record.segment_id, record.turn] += executed
            case Ended():
                late = record.total_ms / 1000 - (limits.seconds or 0)
                require(late <= GRACE_SECONDS, f"{uid}: it ended {late:.1f} s after its time limit")
    most = max(calls.values(), default=0)
    require(limits.calls_per_turn is None or most <= limits.calls_per_turn, f"{uid}: {most} tool calls ran in one turn")


def summary(world: World) -> dict[str, int]:
    """Return how many rollouts ended in which way."""
    ends: Counter[str] = Counter()
    for stored in world.disk.rollouts.values():
        last = stored.entries[-1].record if stored.entries else None
        if isinstance(last, Ended):
            kind = type(last.end).__name__.lower()
            ends[f"{kind} {last.end.category.value}" if isinstance(last.end, Failure) else kind] += 1
            ends["rollouts"] += 1
    return dict(ends)
