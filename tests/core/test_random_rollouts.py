"""Random legal rollouts, compared with an independent oracle after every record, and replayed at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.conversation import Conversation, State
from rollout_server.core.ledger import Origin, Parting, Role, SegmentKind, pack_tokens
from rollout_server.core.limits import Limits
from rollout_server.core.machine import IllegalRecord, LimitReached, Machine, replay
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import (
    Cancellation,
    Category,
    Failure,
    RewardResult,
    RewardRule,
    Stop,
    Warned,
    segment_rewards,
)
from rollout_server.core.record import (
    Accepted,
    Answered,
    Appended,
    Asked,
    CaptureSettled,
    DriftFound,
    Ended,
    Forked,
    GivenUp,
    Input,
    Masked,
    Note,
    Record,
    Rewarded,
    SegmentOpened,
    ToolReturned,
    ToolStarted,
)

from tests.support.machine_records import assert_refused, draw_turn, shown_outcome
from tests.support.naive_ledger import assert_laws, assert_line, common

from .books import Books, Talk

texts = st.sampled_from(("", "8", "ü€😀", "\\ud83d", "a" * 50))
times = st.integers(0, 1000).map(float)
limits = st.builds(
    Limits,
    turns=st.none() | st.integers(3, 12),
    generated_tokens=st.none() | st.integers(4, 40),
    tool_turns=st.none() | st.integers(0, 4),
    bytes=st.none() | st.integers(200, 4000),
)
roles = st.builds(Role, st.sampled_from(("agent", "critic", "user")), st.booleans())
PARTED = Parting(1, "content", "8", "9")
FORKS = (
    SegmentKind.MAIN,
    *(SegmentKind.BRANCH,) * 3,
    SegmentKind.SUBAGENT,
    SegmentKind.COMPACTION,
    SegmentKind.DRIFT,
)
ROLE_REWARDS = {"critic": 0.25, "absent": 8.0}
usages = st.none() | st.tuples(st.integers(0, 50), st.integers(0, 50))


def message(role: str, text: str) -> Message:
    return Message.parse(f'{{"role": "{role}", "content": "{text}"}}')


messages = st.builds(message, st.sampled_from(("user", "system", "critic")), texts)


class RandomRollouts(RuleBasedStateMachine):
    """Any legal rollout.

    It has several conversations, each kind of drift, truncated and empty completions, missing ids, calls that return in any
    order, and limits that are met.
    """

    @initialize(limits=limits, start=st.lists(messages, max_size=2), plain=st.booleans())
    def accept(self, limits: Limits, start: list[Message], plain: bool) -> None:
        """With `plain`, nothing is predicted, so only the trainer's reports are known."""
        self.start, self.limits, self.plain = tuple(start), limits, plain
        self.machine = self._machine()
        self.books = Books(limits, start)
        self.log: list[Record] = []
        self._take(Accepted(len(start), "agent", "1"))

    def _machine(self) -> Machine:
        return Machine("u", self.start, self.limits)

    def _take(self, record: Input) -> list[Record]:
        """Pass a record to the machine and return the consequences."""
        taken = self.machine.accept(record)
        assert isinstance(record, Answered) or taken[-1] is record
        self.log += taken
        return list(taken[:-1])

    def _agrees(self, *, ended: bool = False) -> None:
        books = self.books
        assert self.machine.state is (State.ENDED if ended else books.main.state)
        assert self.machine.turn == books.turn
        assert list(self.machine.messages) == books.main.messages
        assert self.machine.metrics == books.metrics
        steps = self.machine.oldest_policy_step, self.machine.newest_policy_step
        assert steps == (books.oldest_step(), books.newest_step)
        assert_laws(self.machine.ledger, books.ledger)
        for talk in books.talks:
            real = self._real(talk)
            assert (real.state, real.turn, real.messages) == (talk.state, talk.turn, talk.messages)
            assert_line(real.line, talk.line)

    def _real(self, talk: Talk) -> Conversation:
        return self.machine.find(Appended((), talk.line.id))

    @rule(
        data=st.data(),
        wish=st.sampled_from(
            (*["ask"] * 5, "call", "call", "append", "note", "misfit", "fork", "give up", "mask", "reward")
        ),
    )
    def go_on(self, data: st.DataObject, wish: str) -> None:
        """One rule for all actions: hypothesis disables whole rules in some runs, and a run without completions tests little."""
        talk = data.draw(st.sampled_from(self.books.talks))
        if wish == "note":
            self._note()
        elif wish == "misfit":
            self._try_what_does_not_fit(data, talk)
        elif wish == "fork" and len(self.books.talks) < 5:
            self._fork(data, talk)
        elif wish in ("mask", "reward"):
            self._judge_turn(data, wish)
        elif talk.state is State.ASKING:
            self._give_up(talk) if wish == "give up" else self._answer(data, talk)
        elif talk.state is State.CALLING:
            self._return_any(data, talk)
        elif talk.state is State.OPEN and wish == "call":
            self._call(talk, data.draw(st.integers(0, 3)))
        elif talk.state is State.OPEN and wish == "append":
            self._append(talk, data.draw(st.lists(messages, max_size=2)))
        elif talk.state is State.OPEN:
            self._ask(talk)

    def _ask(self, talk: Talk) -> None:
        wish, over = self.machine.request_completion(self._real(talk)), self.books.asking_is_over()
        segment, turn = talk.line.id, self.books.turn + 1
        asked = Asked(turn, segment, f"u/{segment}/{turn}", len(talk.messages))
        if over is not None:
            assert wish == LimitReached(Stop(over, self.books.main.cut))
            assert_refused(self.machine, asked)
        else:
            assert wish == asked
            assert self._take(asked) == []
            self.books.asked(talk)
            self._agrees()

    def _answer(self, data: st.DataObject, talk: Talk) -> None:
        segments, line = self.books.ledger.segments, talk.line
        begun = line.segment is not None or bool(line.before)
        ids = data.draw(st.sampled_from((True, True, True, False)))
        turn = draw_turn(data, talk.turn, line.ids() if begun else None)
        if self.plain:
            turn = replace(turn, predicted=None)
        record = Answered(
            turn.number,
            message("assistant", data.draw(texts)),
            data.draw(st.sampled_from(("stop", "length", "tool_calls", ""))),
            turn.answer if ids else None,
            turn.logprobs if ids else None,
            turn.predicted,
            turn.reported,
            attempts=data.draw(st.integers(1, 3)),
            elapsed_ms=data.draw(times),
            usage=data.draw(usages),
            policy_version=turn.runs[-1].version if turn.runs else "p1",
            policy_step=turn.runs[-1].step if turn.runs else 7,
            runs=turn.runs if ids else (),
            notes=data.draw(st.sampled_from(((), (("resampled", "twice"),)))),
        )
        held, before, asked_in = line.ids(), len(segments), line.id
        told = self._sharing(data, record, held)
        follows = self._take(told)
        drift = self.books.answered(talk, record)
        opened = [] if len(segments) == before else segments[before:]
        extends = all(each.kind == "branch" and each.shared == len(held) for each in opened)
        self._logs_a_prompt_once(told, record, held, whole=not extends)
        drifts = [r for r in follows if isinstance(r, DriftFound)]
        found = [(r.drift.kind.value, r.drift.index, r.drift.expected, r.drift.reported) for r in drifts]
        assert found == ([] if drift is None else [drift])
        assert all(r.segment_id == asked_in for r in drifts)
        said = [(r.segment_id, r.prompt_tokens, r.turn) for r in follows if isinstance(r, SegmentOpened)]
        assert said == [(each.id, each.prompt, record.turn) for each in opened]
        self._agrees()

    def _sharing(self, data: st.DataObject, record: Answered, held: list[int]) -> Answered:
        """The same completion, without some of the prompt tokens that the segment already holds."""
        if record.reported is None:
            return record
        shared = data.draw(st.integers(0, common(held, list(record.reported))))
        return replace(record, reported=record.reported[shared:], shared=shared)

    def _logs_a_prompt_once(self, told: Answered, complete: Answered, held: list[int], *, whole: bool) -> None:
        """Assert that the log holds the completion without the prompt tokens that were held already."""
        logged = self.log[-1]
        assert isinstance(logged, Answered)
        assert self.machine.of_turn(told.turn).last_completion is logged
        if logged.reported is None or complete.token_ids is None or whole or told.shared:
            assert logged == told
        else:
            prompt = pack_tokens(held) + logged.reported
            assert (logged.shared, replace(logged, reported=prompt, shared=0)) == (len(held), complete)

    def _append(self, talk: Talk, added: list[Message]) -> None:
        assert self._take(Appended(tuple(added), talk.line.id)) == []
        self.books.says(talk, added)
        self._agrees()

    def _call(self, talk: Talk, count: int) -> None:
        calls = tuple(ToolCall(f"c{i}", "add", "{}") for i in range(count))
        wish, over = self.machine.start_calls(calls, self._real(talk)), self.books.calling_is_over(talk)
        if over is not None:
            assert wish == LimitReached(Stop(over, self.books.main.cut))
            return
        first, segment = talk.called, talk.line.id
        assert wish == tuple(ToolStarted(talk.turn, first + i, call, segment) for i, call in enumerate(calls))
        for started in wish:
            assert self._take(started) == []
            self.books.started(talk, started)
            self._agrees()

    def _return_any(self, data: st.DataObject, talk: Talk) -> None:
        started = talk.running[data.draw(st.sampled_from(sorted(talk.running)))]
        result, failed = message("tool", data.draw(texts)), data.draw(st.booleans())
        told = (started.turn, started.index, started.call, result, failed, data.draw(times), started.segment_id)
        record = ToolReturned(*told)
        assert self._take(record) == []
        self.books.returned(talk, record)
        self._agrees()

    def _fork(self, data: st.DataObject, talk: Talk) -> None:
        kind = data.draw(st.sampled_from(FORKS))
        branches, main = kind is SegmentKind.BRANCH, kind is SegmentKind.MAIN
        given = [] if branches else data.draw(st.lists(messages, min_size=1, max_size=2))
        role, parting = data.draw(roles), None if main else data.draw(st.sampled_from((None, PARTED)))
        after = data.draw(st.sampled_from((0, *talk.ends, talk.turn))) if branches else 0
        record = self.machine.fork(kind, tuple(given), self._real(talk), role, after_turn=after, parting=parting)
        if not self._may_open(talk, kind, after, parting):
            assert_refused(self.machine, record)
            return
        assert self._take(record) == []
        books = self.books
        opened = (
            books.branched(talk, role, after, parting)
            if branches
            else books.began(talk, kind.value, given, role, parting)
        )
        origin = Origin(kind, opened.line.parent, len(opened.line.before), parting)
        assert (record.segment_id, record.count) == (opened.line.id, len(opened.messages))
        assert (record.origin, record.role) == (origin, opened.line.role)
        self._agrees()

    def _may_open(self, talk: Talk, kind: SegmentKind, after: int, parting: Parting | None) -> bool:
        if kind is SegmentKind.BRANCH and after:
            return after in talk.ends
        if kind is SegmentKind.MAIN:
            return talk is self.books.main and not talk.ends and talk.state in (State.OPEN, State.CLOSED)
        if kind is SegmentKind.SUBAGENT or (parting is not None and kind is not SegmentKind.BRANCH):
            return True
        return talk.state is State.OPEN and kind is not SegmentKind.DRIFT

    def _give_up(self, talk: Talk) -> None:
        assert self._take(GivenUp(talk.turn, talk.line.id)) == []
        talk.state = State.CLOSED
        self._agrees()

    def _judge_turn(self, data: st.DataObject, wish: str) -> None:
        """Mask a completion out, or give it a reward."""
        turn = data.draw(st.integers(0, self.books.turn + 1))
        value = data.draw(st.sampled_from((-1.0, 0.0, 0.25, 0.5)))
        record = Masked(turn, "dull") if wish == "mask" else Rewarded(turn, value)
        waits = any(talk.state is State.ASKING and talk.turn == turn for talk in self.books.talks)
        if not 0 < turn <= self.books.turn or waits:
            assert_refused(self.machine, record)
            return
        assert self._take(record) == []
        if wish == "mask":
            self.books.masked(turn)
        else:
            self.books.rewards[turn] = self.books.rewards.get(turn, 0.0) + value
        self._agrees()

    def _note(self) -> None:
        assert self._take(Note(self.machine.turn, "word", "text")) == []
        self._agrees()

    def _try_what_does_not_fit(self, data: st.DataObject, talk: Talk) -> None:
        turn, state, segment = talk.turn, talk.state, talk.line.id
        call, answer = ToolCall("c0", "add", "{}"), message("assistant", "8")
        misfits: list[Input] = [
            Answered(self.books.turn + 1, answer, "", None),
            Answered(0, answer, "", None),
            Asked(self.books.turn, segment, f"u/{segment}/{turn}", len(talk.messages)),
            Appended((answer,), "99"),
            ToolReturned(turn, 99, call, answer, False, 0.0, segment),
            ToolStarted(turn + 1, 0, call, segment),
            ToolStarted(turn, 99, call, segment),
            Forked(segment, segment, Origin(SegmentKind.GAP), 1, (answer,)),
            GivenUp(turn + 1, segment),
        ]
        if state is not State.ASKING:
            misfits.append(GivenUp(turn, segment))
            misfits += [Answered(turn, answer, "", None)] if self.machine.of_turn(turn) is self._real(talk) else []
        if state is not State.OPEN:
            misfits.append(Appended((answer,), segment))
        if state is not State.CALLING:
            misfits.append(ToolReturned(turn, 0, call, answer, False, 0.0, segment))
        assert_refused(self.machine, data.draw(st.sampled_from(misfits)))
        self._agrees()

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        if len(self.log) % 2:
            self.books.main = self.books.talks[len(self.log) % len(self.books.talks)]
            assert self._take(CaptureSettled(self.books.main.line.id, CaptureReport(parted=1))) == []
        rule = list(RewardRule)[len(self.log) % 3]
        given = RewardResult(0.5, roles=ROLE_REWARDS)
        ended = Ended(_end_of(len(self.log), self.machine), given, 9.0, 4.0, reward_rule=rule)
        assert self._take(ended) == []
        self._outcome_is_what_the_books_say(ended)
        self._replays()
        self._says_so_when_the_log_was_changed()

    def _outcome_is_what_the_books_say(self, ended: Ended) -> None:
        outcome = self.machine.outcome
        assert outcome is not None
        for talk in self.books.talks:
            self.books.count_calls(talk)
        self.books.count(total_ms=9.0, queued_ms=4.0)
        self._agrees(ended=True)
        assert outcome.metrics == self.books.metrics
        assert list(outcome.messages) == self.books.main.messages
        assert outcome.segments == self.machine.ledger.segments
        assert [(w.code, w.turn, w.index) for w in outcome.warnings] == self.books.warnings
        assert all(isinstance(w, Warned) and w.message for w in outcome.warnings)
        assert outcome.reward_result == (ended.reward_result if isinstance(ended.end, Stop) else RewardResult())
        assert list(outcome.turn_rewards) == self.books.turn_rewards()
        stopped = isinstance(ended.end, Stop)
        expected = self.books.segment_rewards(ended.reward_rule, 0.5, ROLE_REWARDS, stopped=stopped)
        assert segment_rewards(outcome) == expected
        end = replace(ended.end, turn=self.books.turn) if isinstance(ended.end, Failure) else ended.end
        assert outcome.end == end
        assert_refused(self.machine, ended)

    def _replays(self) -> None:
        again = replay(self._machine(), self.log)
        assert again.outcome is not None
        assert self.machine.outcome is not None
        assert shown_outcome(again.outcome) == shown_outcome(self.machine.outcome)

    def _says_so_when_the_log_was_changed(self) -> None:
        for place, record in enumerate(self.log):
            if isinstance(record, SegmentOpened | DriftFound):
                _assert_no_log(self._machine(), [*self.log[:place], *self.log[place + 1 :]])
                _assert_no_log(self._machine(), [*self.log[:place], replace(record, turn=99), *self.log[place + 1 :]])
        _assert_no_log(self._machine(), [*self.log, self.log[-1]])


def _assert_no_log(machine: Machine, log: list[Record]) -> None:
    with pytest.raises(IllegalRecord):
        replay(machine, log)


def _end_of(seed: int, machine: Machine) -> Stop | Failure | Cancellation:
    if machine.state is State.OPEN and seed % 2:
        return machine.natural_stop()
    return Failure(Category.TIMEOUT, "late") if seed % 3 else Cancellation("enough")


TestRandomRollouts = RandomRollouts.TestCase
TestRandomRollouts.settings = settings(stateful_step_count=30)
