"""Random legal rollouts, held at every record against books that are kept apart, and replayed at their end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from rollout_server.core.ledger import pack_tokens
from rollout_server.core.limits import Limits
from rollout_server.core.machine import IllegalRecord, Machine, Over, State, replay
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import Cancellation, Category, Failure, Stop, Verdict, Warned
from rollout_server.core.record import (
    Accepted,
    Answered,
    Appended,
    Asked,
    DriftFound,
    Ended,
    Input,
    Note,
    Record,
    SegmentOpened,
    ToolReturned,
    ToolStarted,
)

from .books import Books
from .naive import assert_laws, common
from .rollouts import assert_refused, draw_turn, shown_outcome

texts = st.sampled_from(("", "8", "ü€😀", "\\ud83d", "a" * 50))
times = st.integers(0, 1000).map(float)
limits = st.builds(
    Limits,
    turns=st.none() | st.integers(3, 12),
    generated_tokens=st.none() | st.integers(4, 40),
    tool_turns=st.none() | st.integers(0, 4),
    bytes=st.none() | st.integers(200, 4000),
)
usages = st.none() | st.tuples(st.integers(0, 50), st.integers(0, 50))


def message(role: str, text: str) -> Message:
    return Message.parse(f'{{"role": "{role}", "content": "{text}"}}')


messages = st.builds(message, st.sampled_from(("user", "system", "critic")), texts)


class RandomRollouts(RuleBasedStateMachine):
    """Any legal rollout: drift of each kind, cut and empty answers, missing ids, calls that return in any order, limits met."""

    @initialize(limits=limits, start=st.lists(messages, max_size=2), plain=st.booleans())
    def accept(self, limits: Limits, start: list[Message], plain: bool) -> None:
        """`plain`: nothing is predicted, so that only what the trainer reports is known."""
        self.start, self.limits, self.plain = tuple(start), limits, plain
        self.machine = self._machine()
        self.books = Books(limits, start)
        self.log: list[Record] = []
        self.running: dict[int, ToolStarted] = {}
        self.back: dict[int, ToolReturned] = {}
        self.called: dict[int, int] = {}
        self._take(Accepted(len(start), "agent", "1"))

    def _machine(self) -> Machine:
        return Machine("u", self.start, self.limits)

    def _take(self, record: Input) -> list[Record]:
        """Gives the machine a record; returns what it says follows."""
        taken = self.machine.accept(record)
        assert isinstance(record, Answered) or taken[-1] is record
        self.log += taken
        return list(taken[:-1])

    def _agrees(self, state: State) -> None:
        assert self.machine.state is state
        assert self.machine.turn == self.books.turn
        assert list(self.machine.messages) == self.books.messages
        assert self.machine.metrics == self.books.metrics
        assert_laws(self.machine.ledger, self.books.ledger)

    @rule(data=st.data(), wish=st.sampled_from((*["ask"] * 4, "call", "call", "append", "note", "misfit")))
    def go_on(self, data: st.DataObject, wish: str) -> None:
        """One rule for all: hypothesis leaves out whole rules in a run, and a run that never asks tells little."""
        if wish == "note":
            self._note()
        elif wish == "misfit":
            self._try_what_does_not_fit(data)
        elif self.machine.state is State.ASKING:
            self._answer(data)
        elif self.machine.state is State.CALLING:
            self._return_any(data)
        elif wish == "call":
            self._call(data.draw(st.integers(0, 3)))
        elif wish == "append":
            self._append(data.draw(st.lists(messages, max_size=2)))
        else:
            self._ask()

    def _ask(self) -> None:
        wish, over = self.machine.ask(), self.books.asking_is_over()
        segment = max(len(self.books.ledger.segments) - 1, 0)
        turn = self.books.turn + 1
        asked = Asked(turn, str(segment), f"u/{segment}/{turn}", len(self.books.messages))
        if over is not None:
            assert wish == Over(Stop(over, self.books.cut))
            assert_refused(self.machine, asked)
        else:
            assert wish == asked
            assert self._take(asked) == []
            self.books.turn = turn
            self._agrees(State.ASKING)

    def _answer(self, data: st.DataObject) -> None:
        segments = self.books.ledger.segments
        ids = data.draw(st.sampled_from((True, True, True, False)))
        turn = draw_turn(data, self.machine.turn, segments[-1].ids() if segments else None)
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
            policy_version=turn.policy_version,
            notes=data.draw(st.sampled_from(((), (("resampled", "twice"),)))),
        )
        held = segments[-1].ids() if segments else []
        before, asked_in = len(segments), self.machine.ledger.current_id
        told = self._sharing(data, record, held)
        follows = self._take(told)
        drift = self.books.answered(record)
        self._logs_a_prompt_once(told, record, held, opened=len(segments) > before)
        drifts = [r for r in follows if isinstance(r, DriftFound)]
        found = [(r.drift.kind.value, r.drift.index, r.drift.expected, r.drift.reported) for r in drifts]
        assert found == ([] if drift is None else [drift])
        assert all(r.segment_id == asked_in for r in drifts)
        opened = [(r.segment_id, r.prompt_tokens, r.turn) for r in follows if isinstance(r, SegmentOpened)]
        assert opened == [(str(i), segments[i].prompt, record.turn) for i in range(before, len(segments))]
        self._agrees(State.OPEN)

    def _sharing(self, data: st.DataObject, record: Answered, held: list[int]) -> Answered:
        """The same answer, told without some of the prompt's tokens that the segment holds."""
        if record.reported is None:
            return record
        shared = data.draw(st.integers(0, common(held, list(record.reported))))
        return replace(record, reported=record.reported[shared:], shared=shared)

    def _logs_a_prompt_once(self, told: Answered, whole: Answered, held: list[int], *, opened: bool) -> None:
        """What is logged is the answer as it came, without the tokens of its prompt that the segment held already."""
        logged = self.log[-1]
        assert isinstance(logged, Answered)
        assert self.machine.last_answer is logged
        if logged.reported is None or whole.token_ids is None or opened or told.shared:
            assert logged == told
        else:
            prompt = pack_tokens(held) + logged.reported
            assert (logged.shared, replace(logged, reported=prompt, shared=0)) == (len(held), whole)

    def _append(self, added: list[Message]) -> None:
        assert self._take(Appended(tuple(added))) == []
        self.books.messages += added
        self._agrees(State.OPEN)

    def _call(self, count: int) -> None:
        calls = tuple(ToolCall(f"c{i}", "add", "{}") for i in range(count))
        wish, over = self.machine.start_calls(calls), self.books.calling_is_over()
        if over is not None:
            assert wish == Over(Stop(over, self.books.cut))
            return
        first = self.called.get(self.books.turn, 0)
        assert wish == tuple(ToolStarted(self.books.turn, first + i, call) for i, call in enumerate(calls))
        self.called[self.books.turn] = first + count
        for started in wish:
            assert self._take(started) == []
            self.running[started.index] = started
            self.books.tool_turns.add(self.books.turn)
            self._agrees(State.CALLING)

    def _return_any(self, data: st.DataObject) -> None:
        started = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        result, failed = message("tool", data.draw(texts)), data.draw(st.booleans())
        record = ToolReturned(started.turn, started.index, started.call, result, failed, data.draw(times))
        assert self._take(record) == []
        self.back[record.index] = record
        if self.running:
            self._agrees(State.CALLING)
            return
        results = [self.back[index] for index in sorted(self.back)]
        self.books.returned(results)
        self.books.messages += [r.message for r in results]
        self.back.clear()
        self._agrees(State.OPEN)

    def _note(self) -> None:
        state = self.machine.state
        assert self._take(Note(self.machine.turn, "word", "text")) == []
        self._agrees(state)

    def _try_what_does_not_fit(self, data: st.DataObject) -> None:
        turn, state = self.machine.turn, self.machine.state
        call = ToolCall("c0", "add", "{}")
        answer = message("assistant", "8")
        misfits: list[Input] = [
            Answered(turn + 1, answer, "", None),
            Answered(turn - 1, answer, "", None),
            Asked(turn, "0", f"u/0/{turn}", len(self.books.messages)),
            ToolReturned(turn, 99, call, answer, False),
            ToolStarted(turn + 1, 0, call),
            ToolStarted(turn, 99, call),
        ]
        if state is not State.ASKING:
            misfits.append(Answered(turn, answer, "", None))
        if state is not State.OPEN:
            misfits.append(Appended((answer,)))
        if state is not State.CALLING:
            misfits.append(ToolReturned(turn, 0, call, answer, False))
        assert_refused(self.machine, data.draw(st.sampled_from(misfits)))
        self._agrees(state)

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        ended = Ended(_end_of(len(self.log), self.machine), Verdict(0.5), 9.0, 4.0)
        state = self.machine.state
        assert self._take(ended) == []
        self._outcome_is_what_the_books_say(ended, state)
        self._replays()
        self._says_so_when_the_log_was_changed()

    def _outcome_is_what_the_books_say(self, ended: Ended, state: State) -> None:
        outcome = self.machine.outcome
        assert outcome is not None
        self.books.returned(list(self.back.values()))
        self.books.count(total_ms=9.0, queued_ms=4.0)
        self._agrees(State.ENDED)
        assert outcome.metrics == self.books.metrics
        assert list(outcome.messages) == self.books.messages
        assert outcome.segments == self.machine.ledger.segments
        assert [(w.code, w.turn, w.index) for w in outcome.warnings] == self.books.warnings
        assert all(isinstance(w, Warned) and w.message for w in outcome.warnings)
        assert outcome.verdict is ended.verdict
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
