"""The laws of the machine, case by case: limits, and the metrics that they use."""

from __future__ import annotations

import pytest
from rollout_server.core.limits import Limits
from rollout_server.core.machine import LimitReached
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import Cancellation, Metrics, Stop
from rollout_server.core.record import Appended, Asked, Ended, ToolStarted

from tests.support.machine_records import (
    ANSWER,
    CALL,
    RESULT,
    USER,
    assert_refused,
    ends,
    fresh,
    ids,
    predicts,
    returned,
    starts,
    takes_turn,
)

CALLS = tuple(ToolCall(name, "add", "{}") for name in "abc")
RESULTS = tuple(Message.write({"role": "tool", "content": "8", "tool_call_id": call.id}) for call in CALLS)
STOP = Ended(Stop("stop"))


class TestLimits:
    @pytest.mark.parametrize("turns", [1, 2, 3])
    def test_turns(self, turns: int) -> None:
        machine = fresh(Limits(turns=turns))
        for _ in range(turns):
            takes_turn(machine, 5)
        assert machine.request_completion() == LimitReached(Stop("max_turns"))
        assert len(starts(machine, CALL)) == 1, "the tools of the last turn still run"

    @pytest.mark.parametrize("turns", [0, -1])
    def test_no_turns_at_all(self, turns: int) -> None:
        assert fresh(Limits(turns=turns)).request_completion() == LimitReached(Stop("max_turns"))

    @pytest.mark.parametrize(("generated", "over"), [(2, False), (3, True), (4, True)])
    def test_generated_tokens(self, generated: int, over: bool) -> None:
        machine = fresh(Limits(generated_tokens=3))
        takes_turn(machine, *range(generated))
        assert isinstance(machine.request_completion(), LimitReached) is over
        assert isinstance(machine.start_calls([CALL]), LimitReached) is over
        assert machine.natural_stop() == Stop("max_tokens" if over else "stop")
        if over:
            assert machine.request_completion() == machine.start_calls([CALL]) == LimitReached(Stop("max_tokens"))

    def test_generated_tokens_are_those_of_all_turns_and_nothing_is_cut(self) -> None:
        machine = fresh(Limits(generated_tokens=3))
        takes_turn(machine, 1, 2)
        takes_turn(machine, 3, 4, 5)
        assert machine.request_completion() == LimitReached(Stop("max_tokens"))
        assert machine.metrics.generated_tokens == 5
        assert machine.ledger.segments[0].ids() == ids(101, 1, 2, 102, 3, 4, 5)

    @pytest.mark.parametrize("calls", [1, 2])
    def test_tool_turns_count_turns_and_not_calls(self, calls: int) -> None:
        machine = fresh(Limits(tool_turns=2))
        for _ in range(2):
            takes_turn(machine, 5)
            for _ in range(2):  # also if the calls of a turn arrive in two batches
                for started in starts(machine, *CALLS[:calls]):
                    machine.accept(returned(started))
        takes_turn(machine, 5)
        assert machine.start_calls([CALL]) == LimitReached(Stop("max_turns"))
        assert isinstance(machine.request_completion(), Asked)

    @pytest.mark.parametrize("tool_turns", [0, -1])
    def test_tool_turns_may_be_none_at_all(self, tool_turns: int) -> None:
        machine = fresh(Limits(tool_turns=tool_turns))
        takes_turn(machine, 5)
        assert machine.start_calls([CALL]) == LimitReached(Stop("max_turns"))

    def test_turns_without_tools_are_no_tool_turns(self) -> None:
        machine = fresh(Limits(tool_turns=1))
        for _ in range(3):
            takes_turn(machine, 5)
        assert len(starts(machine, CALL)) == 1

    def test_bytes_are_those_of_all_messages_in_utf_8(self) -> None:
        wide = Message.write({"role": "user", "content": "ü€😀"})
        total = sum(len(m.text.encode()) for m in (wide, ANSWER, RESULT, USER))
        for limit, over in ((total, True), (total + 1, False)):
            machine = fresh(Limits(bytes=limit), wide)
            takes_turn(machine, 5)
            for started in starts(machine, CALL):
                machine.accept(returned(started))
            assert isinstance(machine.request_completion(), Asked)
            machine.accept(Appended((USER,)))
            assert (machine.request_completion() == LimitReached(Stop("max_bytes"))) is over
            assert isinstance(machine.start_calls([CALL]), tuple), "tools still run"
            assert machine.natural_stop() == Stop("stop")

    def test_half_a_surrogate_pair_counts_three_bytes(self) -> None:
        text = '{"role": "user", "content": "\ud83d"}'
        size = len(text) - 1 + 3
        assert fresh(Limits(bytes=size), Message(text, "user")).request_completion() == LimitReached(Stop("max_bytes"))
        assert isinstance(fresh(Limits(bytes=size + 1), Message(text, "user")).request_completion(), Asked)

    def test_tokens_go_before_turns_and_turns_before_bytes(self) -> None:
        machine = fresh(Limits(turns=1, generated_tokens=2, bytes=1, tool_turns=0))
        assert machine.request_completion() == LimitReached(Stop("max_bytes"))
        free = fresh(Limits(turns=1, generated_tokens=2, tool_turns=0))
        takes_turn(free, 5)
        assert free.request_completion() == LimitReached(Stop("max_turns"))
        full = fresh(Limits(turns=1, generated_tokens=2, tool_turns=0))
        takes_turn(full, 5, 6)
        assert full.request_completion() == full.start_calls([CALL]) == LimitReached(Stop("max_tokens"))
        assert fresh(Limits(turns=0, bytes=1)).request_completion() == LimitReached(Stop("max_turns"))

    @pytest.mark.parametrize("limits", [Limits(turns=1), Limits(generated_tokens=1), Limits(bytes=1000)])
    def test_asking_against_a_limit_is_illegal(self, limits: Limits) -> None:
        machine = fresh(limits)
        takes_turn(machine, 5)
        machine.accept(Appended((USER,) * 30))
        assert_refused(machine, Asked(2, "0", "u/0/2", 33))

    @pytest.mark.parametrize("limits", [Limits(generated_tokens=1), Limits(tool_turns=0)])
    def test_starting_a_call_against_a_limit_is_illegal(self, limits: Limits) -> None:
        machine = fresh(limits)
        takes_turn(machine, 5)
        assert isinstance(machine.start_calls([CALL]), LimitReached)
        assert_refused(machine, ToolStarted(1, 0, CALL))

    @pytest.mark.parametrize(
        ("finish_reason", "truncated"), [("length", True), ("".join("length"), True), ("stop", False), ("", False)]
    )
    def test_a_stop_says_whether_the_last_answer_was_cut(self, finish_reason: str, truncated: bool) -> None:
        machine = fresh(Limits(turns=2))
        assert machine.natural_stop() == Stop("stop", False)
        takes_turn(machine, 5, finish_reason="stop" if truncated else "length")
        takes_turn(machine, 5, finish_reason=finish_reason)
        assert machine.natural_stop() == Stop("stop", truncated)
        assert machine.request_completion() == LimitReached(Stop("max_turns", truncated))


class TestMetrics:
    def test_a_rollout_that_did_nothing(self) -> None:
        machine = fresh()
        assert machine.metrics == Metrics()
        assert ends(machine, Ended(Stop("stop"), total_ms=5.0, queued_ms=2.0)).metrics == Metrics(
            total_ms=5.0, queued_ms=2.0
        )

    def test_answers_add_up(self) -> None:
        machine = fresh()
        takes_turn(machine, 5, 6, predicted=predicts(1, 2, 3), attempts=2, elapsed_ms=10.0)
        takes_turn(machine, 7, predicted=predicts(4), attempts=1, elapsed_ms=5.0)
        assert machine.metrics == Metrics(
            turns=2,
            completion_ms=15.0,
            completion_attempts=3,
            generated_tokens=3,
            prompt_tokens=3 + 6,
            max_context_tokens=7,
        )

    def test_the_longest_context_stays_the_longest(self) -> None:
        machine = fresh()
        takes_turn(machine, 5, 6, reported=ids(1, 2, 3))
        takes_turn(machine, 7, reported=ids(1))
        assert (machine.metrics.max_context_tokens, machine.metrics.prompt_tokens) == (5, 4)

    @pytest.mark.parametrize(
        ("rest", "prompt", "generated"),
        [
            ({"token_ids": None, "predicted": None, "usage": (30, 4)}, 30, 4),
            ({"token_ids": None, "predicted": None}, 0, 0),
            ({"token_ids": None, "usage": (30, 4)}, 30, 4),
            ({"token_ids": None, "reported": ids(1, 2), "usage": (30, 4)}, 2, 4),
            ({"usage": (30, 4)}, 1, 2),
            ({"predicted": None, "usage": (30, 4)}, 30, 2),
            ({"reported": ids(1, 2, 3), "usage": (30, 4)}, 3, 2),
            ({"reported": ids(), "usage": (30, 4)}, 0, 2),
            ({"token_ids": ids(), "usage": (30, 4)}, 1, 0),
        ],
    )
    def test_tokens_are_counted_by_ids_where_there_are_any_and_by_usage_elsewhere(
        self, rest: dict[str, object], prompt: int, generated: int
    ) -> None:
        machine = fresh()
        takes_turn(machine, 5, 6, **rest)
        used = machine.metrics
        assert (used.prompt_tokens, used.generated_tokens) == (prompt, generated)
        assert used.max_context_tokens == prompt + generated

    def test_usage_counts_in_later_turns_too(self) -> None:
        machine = fresh()
        takes_turn(machine, 5, 6)
        takes_turn(machine, token_ids=None, usage=(30, 4))
        assert (machine.metrics.prompt_tokens, machine.metrics.generated_tokens) == (31, 6)

    def test_calls_of_a_turn_take_as_long_as_the_longest_and_turns_add_up(self) -> None:
        machine = fresh()
        for times in ((3.0, 7.0, 5.0), (1.0, 2.0, 0.5)):
            takes_turn(machine, 5)
            for started, ms in zip(starts(machine, *CALLS), times, strict=True):
                machine.accept(returned(started, failed=ms > 4, ms=ms))
        used = machine.metrics
        assert (used.tool_calls, used.tool_failures, used.tool_ms) == (6, 2, 9.0)

    def test_calls_count_once_all_have_returned(self) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        first, _ = starts(machine, *CALLS[:2])
        machine.accept(returned(first, ms=4.0))
        assert machine.metrics.tool_calls == 0

    @pytest.mark.parametrize(("back", "failures", "ms"), [((), 0, 0.0), ((1,), 0, 2.0), ((2, 0), 1, 3.0)])
    def test_at_the_end_calls_that_had_returned_count_and_those_that_ran_do_not(
        self, back: tuple[int, ...], failures: int, ms: float
    ) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        for started in starts(machine, *CALLS):
            machine.accept(returned(started, failed=True, ms=10.0))
        started_again = starts(machine, *CALLS)
        for index in back:
            machine.accept(returned(started_again[index], failed=index == 2, ms=1.0 + index))
        used = ends(machine, Ended(Cancellation("enough"))).metrics
        assert (used.tool_calls, used.tool_failures, used.tool_ms) == (3 + len(back), 3 + failures, 10.0 + ms)
