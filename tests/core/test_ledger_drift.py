"""Drift: its kind, its index, and the segment that it opens."""

from __future__ import annotations

import pytest
from rollout_server.core.ledger import (
    Drift,
    DriftKind,
    Ledger,
    Origin,
    SegmentKind,
    Turn,
)

from tests.support.machine_records import begun, ids, predicts, shown_segment, spans_of


class TestDrift:
    @pytest.mark.parametrize(
        ("reported", "drift"),
        [
            ((1, 2), Drift(DriftKind.TRUNCATED, 2, 7, 2)),
            ((), Drift(DriftKind.TRUNCATED, 0, 7, 0)),
            ((1, 2, 3, 10), Drift(DriftKind.TRUNCATED, 4, 7, 4)),
            ((9, 2, 3, 10, 11, 8, 20), Drift(DriftKind.HISTORY_REWRITTEN, 0, 7, 7)),
            ((1, 2, 9, 10, 11), Drift(DriftKind.HISTORY_REWRITTEN, 2, 7, 5)),
            ((1, 2, 3, 9, 11, 8, 20, 21), Drift(DriftKind.RETOKENISED, 3, 7, 8)),
            ((1, 2, 3, 10, 9), Drift(DriftKind.RETOKENISED, 4, 7, 5)),
        ],
    )
    def test_a_prompt_that_does_not_extend_the_segment_opens_another(
        self, reported: tuple[int, ...], drift: Drift
    ) -> None:
        ledger = begun()
        first = shown_segment(ledger.segments[0])
        assert ledger.main.commit(Turn(2, ids(30), None, predicts(20, closing=[8]), ids(*reported))) == drift
        assert ledger.main.id == "1"
        segment = ledger.segments[1]
        assert segment is ledger.main.segment
        assert (segment.id, segment.origin) == ("1", Origin(SegmentKind.DRIFT, "0", drift.index))
        assert segment.sample().prompt_ids == ids(*reported), "the prompt is exactly what the model saw"
        assert (segment.sample().response_ids, segment.sample().response_mask) == (ids(30), b"\x01")
        assert spans_of(ledger)[0] == ("prompt", 2, 0, len(reported))
        assert shown_segment(ledger.segments[0]) == first, "recorded segments do not change"

    def test_without_a_prediction_the_ledger_alone_was_expected(self) -> None:
        drift = begun().main.commit(Turn(2, ids(30), None, None, ids(1, 9)))
        assert drift == Drift(DriftKind.HISTORY_REWRITTEN, 1, 5, 2)

    @pytest.mark.parametrize(
        ("added", "index"),
        [((21,), 5), ((8, 21), 6), ((8, 20, 22), 7), ((8,), 6), ((), 5), ((9, 20), 5), ((20, 8), 5)],
    )
    def test_other_environment_than_predicted_goes_on_with_the_trainers(
        self, added: tuple[int, ...], index: int
    ) -> None:
        ledger = begun()
        drift = ledger.main.commit(Turn(2, ids(30), None, predicts(20, closing=[8]), ids(1, 2, 3, 10, 11, *added)))
        assert drift == Drift(DriftKind.ENVIRONMENT, index, 7, 5 + len(added))
        assert len(ledger.segments) == 1
        environment = [("environment", 2, 5, 5 + len(added))] if added else []
        assert spans_of(ledger)[2:] == [*environment, ("model", 2, 5 + len(added), 6 + len(added))]

    def test_another_first_prompt_than_predicted_is_the_trainers(self) -> None:
        ledger = Ledger()
        drift = ledger.main.commit(Turn(1, ids(30), None, predicts(1, 2, 3), ids(1, 9)))
        assert drift == Drift(DriftKind.PROMPT, 1, 3, 2)
        assert ledger.segments[0].origin == Origin(SegmentKind.MAIN)
        assert ledger.segments[0].sample().prompt_ids == ids(1, 9)

    def test_segments_after_drift_follow_the_newest(self) -> None:
        ledger = begun()
        ledger.main.commit(Turn(2, ids(30), None, None, ids(7)))
        assert ledger.main.commit(Turn(3, ids(31), None, None, ids(7, 30, 40))) is None
        assert ledger.main.commit(Turn(4, ids(32), None, None, ids(1, 2, 3, 10, 11))) is not None
        assert [s.origin.parent_id for s in ledger.segments] == ["", "0", "1"]
        assert ledger.main.id == ledger.segments[-1].id == "2"
        assert [len(s) for s in ledger.segments] == [5, 4, 6]

    def test_tokens_that_no_answer_followed_count_as_seen(self) -> None:
        ledger = begun()
        ledger.main.commit(Turn(2, ids(), None, predicts(20)))
        drift = ledger.main.commit(Turn(3, ids(30), None, None, ids(1, 2, 3, 10, 11, 99)))
        assert drift == Drift(DriftKind.HISTORY_REWRITTEN, 5, 6, 6)
