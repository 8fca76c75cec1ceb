"""A rollout that ran undisturbed, the processes that continue it from any point of its log, and what must be equal then."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rollout_server import Agent
from rollout_server.core.outcome import Category, Failure, Outcome
from rollout_server.core.record import (
    Answered,
    Asked,
    DriftFound,
    Ended,
    Forked,
    GivenUp,
    Masked,
    ModelCalled,
    Note,
    Observed,
    Record,
    Resumed,
    Rewarded,
    SegmentOpened,
    ToolReturned,
)
from rollout_server.core.spec import Dialect, Target
from rollout_server.runtime.journal import Change, EntriesAppended
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.replay_steps import replay_obstacle
from rollout_server.runtime.rollout import Rollout

from tests.support.journal import KeptJournal
from tests.support.runtime_harness import ME, RuntimeHarness, Say, Script, outcome_of

KEYED = Target("grpc://trainer:50051", Dialect.GRPC, replays_turn_keys=True)


class ByTurn(Script):
    """A trainer whose completion depends on the messages only, so that it is the same in each process."""

    async def sample(self, ask: CompletionRequest) -> Answered:
        self.asks.append(ask)
        messages = ask.messages[: ask.asked.messages]
        seed = sum(len(message.text) for message in messages)
        await asyncio.sleep(0.1 * (seed % 7))
        say = self.says[sum(message.role == "assistant" for message in messages) % len(self.says)]
        return replace(say.answer(len(messages)), turn=ask.asked.turn)


class Recorded:
    """A rollout, and the processes that continue it."""

    rollout: Rollout
    outcome: Outcome
    changes: list[Change]
    steps: list[int]
    obstacles: list[int]

    def __init__(
        self, agent: Callable[[], Agent], *says: Say, script: type[Script] = ByTurn, harness: Any = None, **spec: Any
    ) -> None:
        self.agent = agent
        self.says = says
        self.script = script
        self.harness = harness or {}
        self.obstacles = []
        self.spec = {"completions": KEYED, **spec}

    async def run(self) -> Rollout:
        """Run it to its end."""
        journal = KeptJournal()
        harness = RuntimeHarness(self.agent(), journal=journal, **self.harness)
        harness.new_script = self.script
        self.rollout = harness.start(*self.says, **self.spec)
        self.outcome = await outcome_of(self.rollout)
        await asyncio.sleep(0.01)
        self.changes = journal.committed
        self.steps = [at for at, change in enumerate(self.changes) if isinstance(change, EntriesAppended)]
        return self.rollout

    @property
    def cuts(self) -> range:
        """The numbers of changes of the log after which a process may have stopped."""
        return range(1, len(self.steps))

    def cut_after(self, kind: type[Record], nth: int = 1) -> int:
        """Return the number of changes up to the nth record of a kind."""
        found = 0
        for number, at in enumerate(self.steps, start=1):
            change = self.changes[at]
            assert isinstance(change, EntriesAppended)
            found += sum(isinstance(entry.record, kind) for entry in change.entries)
            if found >= nth:
                return number
        raise AssertionError(f"the log has no {nth} {kind.__name__}")

    async def cut(
        self, changes: int, agent: Agent | None = None, *says: Say
    ) -> tuple[RuntimeHarness, Rollout, Sequence[Record]]:
        """Continue in a new process after this many changes of the log. Return also the records that it had."""
        journal = KeptJournal(self.changes[: self.steps[changes - 1] + 1])
        harness = RuntimeHarness(agent or self.agent(), journal=journal, **self.harness)
        harness.scripts[self.rollout.spec.rollout_id] = self.script(*(says or self.says))
        await harness.restore()
        (rollout,) = harness.rollouts = [rollout for _, rollout in harness.roster.select(Selection(ME))]
        stored = [e.record for c in journal.committed if isinstance(c, EntriesAppended) for e in c.entries]
        return harness, rollout, stored

    async def check(self, changes: int) -> None:
        """Continue after this many changes, and compare with the undisturbed run; or else it is one of the `obstacles`."""
        harness, rollout, stored = await self.cut(changes)
        outcome = await outcome_of(rollout)
        records = records_of(rollout)
        if replay_obstacle(stored):
            assert isinstance(outcome.end, Failure)
            assert outcome.end.category is Category.INTERRUPTED
            assert records[:-1] == stored
            self.obstacles.append(changes)
            return
        assert records[: len(stored)] == stored
        assert by_conversation(rollout, outcome) == by_conversation(self.rollout, self.outcome)
        before, after = Counter(map(type, stored)), Counter(map(type, records))
        assert len(harness.script(rollout).asks) == after[Asked] - before[Answered] - before[GivenUp]
        answered = {record.turn for record in stored if isinstance(record, Answered)}
        assert not answered & {ask.asked.turn for ask in harness.script(rollout).asks}
        await harness.close()


def records_of(rollout: Rollout) -> list[Record]:
    """Return the records of a log, without those that a restart adds."""
    return [entry.record for entry in rollout.log.entries if not isinstance(entry.record, Resumed)]


def by_conversation(rollout: Rollout, outcome: Outcome) -> object:
    """Return what each conversation did, and the outcome, without what may differ between runs.

    Turns and segments are numbered over all conversations, and concurrent ones may get their numbers in any order. So a
    conversation is named by where it was forked, and its turns are counted from 1.
    """
    paths, turns, forks = {"0": "0"}, {0: ("0", 0)}, Counter[str]()
    done: defaultdict[str, list[object]] = defaultdict(list)
    counts = Counter[str]()
    for record in records_of(rollout):
        turn = getattr(record, "turn", 0)
        if isinstance(record, Asked):
            path = paths[record.segment_id]
            counts[path] += 1
            turns[turn] = path, counts[path]
        path, number = turns.get(turn, ("0", 0))
        if isinstance(record, Forked):
            parent = paths[record.of]
            forks[parent] += 1
            opened = paths.setdefault(record.segment_id, f"{parent}/{forks[parent]}")
            after = turns[record.after_turn]
            done[parent].append((opened, record.origin.kind, record.count, record.messages, record.role, after))
        elif isinstance(record, SegmentOpened | DriftFound):
            paths.setdefault(record.segment_id, f"{path}~{number}")
            done[path].append((type(record), number, getattr(record, "prompt_tokens", None)))
        else:
            named = getattr(record, "segment_id", None)
            key = path if named is None else paths[named]
            if isinstance(record, ToolReturned | Masked | Rewarded | Note):  # they have no order within a turn
                key = f"{key} {number}"
            done[key].append(_plain(record, number))
    metrics = replace(outcome.metrics, total_ms=0.0, queued_ms=0.0, tool_ms=0.0)
    segments = {
        paths[s.id]: (
            list(s.ids()),
            repr(list(s.logprobs())),
            [(sp.start, sp.stop, sp.author, sp.reason) for sp in s.spans],
            s.role,
        )
        for s in outcome.segments
    }
    rewards = {turns[reward.turn]: reward.value for reward in outcome.turn_rewards}
    warnings = sorted((w.code, turns[w.turn]) for w in outcome.warnings)
    for key in done:
        if " " in key:
            done[key].sort(key=repr)
    return dict(done), outcome.end, outcome.messages, metrics, segments, rewards, outcome.reward_result, warnings


def _plain(record: Record, number: int) -> object:
    changes: dict[str, Any] = {}
    if hasattr(record, "turn"):
        changes["turn"] = number
    if hasattr(record, "segment_id"):
        changes["segment_id"] = ""
    match record:
        case Asked():
            changes["turn_key"] = ""
        case Answered():
            changes |= {"elapsed_ms": 0.0, "attempts": 1}
        case ToolReturned() | ModelCalled():
            changes["elapsed_ms"] = 0.0
        case Ended():
            changes |= {"total_ms": 0.0, "queued_ms": 0.0}
        case Observed(what=what):
            changes |= {"after": 0, **({} if what == "once" else {"value_json": ""})}
    return replace(record, **changes)
