"""The laws of the machine, case by case: how a completion changes the ledger, and which part of it is logged."""

from __future__ import annotations

import tracemalloc

import pytest
from rollout_server.core.ledger import Drift, DriftKind, Ledger, Origin, SegmentKind, Turn, pack_logprobs
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import Stop, Warned
from rollout_server.core.record import (
    Answered,
    DriftFound,
    Ended,
    SegmentOpened,
)
from rollout_server.core.segment import Plane

from tests.support.machine_records import (
    ANSWER,
    SYSTEM,
    USER,
    answered,
    asks,
    ends,
    fresh,
    ids,
    predicts,
    shown,
    takes_turn,
)

CALLS = tuple(ToolCall(name, "add", "{}") for name in "abc")
RESULTS = tuple(Message.write({"role": "tool", "content": "8", "tool_call_id": call.id}) for call in CALLS)
STOP = Ended(Stop("stop"))


class TestLedger:
    def test_a_prompt_may_be_told_without_what_the_segment_holds(self) -> None:
        whole, short = fresh(), fresh()
        for machine in (whole, short):
            takes_turn(machine, 5, 6)
        logged = takes_turn(whole, 7, reported=ids(101, 5, 6, 9))
        assert takes_turn(short, 7, reported=ids(9), shared=3) == logged
        assert shown(short) == shown(whole)
        assert whole.metrics.prompt_tokens == 1 + 4

    def test_what_travels_beside_tokens_is_kept_counted_and_not_shown(self) -> None:
        plane, machine, bare = Plane("experts", "uint8", b"\x01\x02"), fresh(), fresh()
        takes_turn(machine, 5, 6, planes=(plane,))
        takes_turn(bare, 5, 6)
        assert [span.planes for span in machine.ledger.segments[0].spans] == [(), (plane,)]
        assert machine.size == bare.size + 2
        assert repr(plane) == "Plane(name='experts', dtype='uint8')"

    def test_a_turn_copies_nothing_of_what_the_segment_holds(self) -> None:
        machine, many = fresh(), 500_000
        takes_turn(machine, 5, predicted=None, reported=ids(*range(many)))
        takes_turn(machine, 6, reported=ids(102), shared=many + 1)  # growing arrays over-allocate for the next turns
        tracemalloc.start()
        try:
            takes_turn(machine, 7, reported=ids(103), shared=many + 3)
            takes_turn(machine, 8)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < many
        assert machine.ledger.segments[0].ids(many) == ids(5, 102, 6, 103, 7, 104, 8)

    @pytest.mark.parametrize("shared", [-1, 3])
    def test_a_prompt_cannot_share_more_with_a_line_than_it_holds(self, shared: int) -> None:
        ledger = Ledger()
        ledger.main.commit(Turn(1, ids(2), reported=ids(1)))
        with pytest.raises(ValueError, match="shares more tokens"):
            ledger.main.commit(Turn(2, ids(4), reported=ids(3), shared=shared))

    def test_what_is_told_of_a_drifted_prompt_is_logged_as_it_came(self) -> None:
        machine = fresh()
        takes_turn(machine, 5, 6)
        drift, opened, answer = takes_turn(machine, 7, reported=ids(9), shared=2)
        assert (drift, opened) == (
            DriftFound(2, "0", Drift(DriftKind.RETOKENISED, 2, 4, 3)),
            SegmentOpened(2, "1", Origin(SegmentKind.DRIFT, "0", 2), 3),
        )
        assert isinstance(answer, Answered)
        assert (answer.reported, answer.shared) == (ids(9), 2)
        assert machine.ledger.segments[1].ids() == ids(101, 5, 9, 7)

    @pytest.mark.parametrize("rest", [{"token_ids": None, "reported": ids(101, 5, 9)}, {}])
    def test_an_answer_without_ids_or_prompt_is_logged_as_it_came(self, rest: dict[str, object]) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        answer = answered(asks(machine).turn, 7, **rest)
        assert machine.accept(answer)[-1] is answer
        assert machine.main.last_completion is answer

    def test_the_first_answer_opens_the_main_segment(self) -> None:
        machine = fresh()
        answer = answered(asks(machine).turn, 5, predicted=predicts(1, 2, 3))
        assert machine.accept(answer) == (SegmentOpened(1, "0", Origin(SegmentKind.MAIN), 3), answer)
        assert len(takes_turn(machine, 6)) == 1

    def test_a_prompt_of_nothing_opens_one_too(self) -> None:
        assert takes_turn(fresh(), 5, predicted=None, reported=ids())[0] == SegmentOpened(
            1, "0", Origin(SegmentKind.MAIN), 0
        )

    def test_drift_is_told_before_the_segment_it_opens_and_both_before_the_answer(self) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        drift, opened, answer = takes_turn(machine, 6, reported=ids(101, 9, 9))
        assert drift == DriftFound(2, "0", Drift(DriftKind.RETOKENISED, 1, 3, 3))
        assert opened == SegmentOpened(2, "1", Origin(SegmentKind.DRIFT, "0", 1), 3)
        assert isinstance(answer, Answered)

    def test_drift_of_the_environment_opens_nothing(self) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        takes_turn(machine, 6, reported=ids(1))
        drift, answer = takes_turn(machine, 7, reported=ids(1, 6, 9))
        assert drift == DriftFound(3, "1", Drift(DriftKind.ENVIRONMENT, 2, 3, 3))
        assert isinstance(answer, Answered)

    def test_each_drift_is_a_warning_of_the_outcome(self) -> None:
        machine = fresh()
        takes_turn(machine, 5, reported=ids(7, 8))
        takes_turn(machine, 6, reported=ids(7, 8, 9, 9))
        assert ends(machine, STOP).warnings == (
            Warned("token_drift", "turn 1: the reported prompt differs from the prediction at token 0 (prompt)", 1, 0),
            Warned(
                "token_drift", "turn 2: the reported prompt differs from the prediction at token 2 (retokenised)", 2, 2
            ),
        )

    def test_an_answer_carries_logprobs_and_policy_into_the_ledger(self) -> None:
        machine = fresh()
        takes_turn(machine, 5, logprobs=pack_logprobs([-0.5]), policy_version="p7")
        span = machine.ledger.segments[0].spans[1]
        assert (span.turn, span.policy_version, span.logprobs_known) == (1, "p7", True)
        assert machine.ledger.segments[0].sample().logprobs == pack_logprobs([-0.5])

    @pytest.mark.parametrize(
        "rest", [{"token_ids": None}, {"token_ids": None, "reported": ids(1)}, {"predicted": None}]
    )
    def test_without_ids_or_without_a_prompt_there_is_nothing_to_record(self, rest: dict[str, object]) -> None:
        machine = fresh()
        assert len(takes_turn(machine, 5, **rest)) == 1
        assert machine.ledger.segments == ()
        assert tuple(machine.messages) == (SYSTEM, USER, ANSWER)
