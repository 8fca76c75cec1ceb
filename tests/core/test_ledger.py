"""The laws of the ledger, case by case."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from rollout_server.core.ledger import (
    Author,
    Drift,
    DriftKind,
    Ledger,
    MaskReason,
    Origin,
    Sample,
    Segment,
    SegmentKind,
    Span,
    Turn,
    first_difference,
    pack_logprobs,
    pack_tokens,
)

from .naive import common
from .rollouts import begun, ids, predicts, runs, shown_ledger, shown_segment


def spans_of(ledger: Ledger, segment: int = -1) -> list[tuple[str, int, int, int]]:
    spans = ledger.segments[segment].spans
    return [(s.reason.value if s.reason else "model", s.turn, s.start, s.stop) for s in spans]


class TestOneSegment:
    def test_an_untouched_ledger_has_no_segment_and_will_open_segment_0(self) -> None:
        ledger = Ledger()
        assert (ledger.segments, ledger.current, ledger.current_id) == ((), None, "0")

    def test_an_untouched_segment_is_an_empty_sample(self) -> None:
        segment = Segment("7", Origin(SegmentKind.BRANCH, "0", 3))
        assert (len(segment), segment.spans, segment.verified) == (0, (), True)
        assert segment.sample() == Sample("7", ids(), ids(), b"", pack_logprobs())

    def test_without_a_prompt_nothing_is_handed_out_until_the_model_has_written(self) -> None:
        segment = Segment("0", Origin(SegmentKind.MAIN))
        segment.append_masked(ids(1, 2), MaskReason.CLOSING, 1)
        segment.append_masked(ids(3), MaskReason.ENVIRONMENT, 1)
        assert (len(segment), segment.spans) == (3, ())
        assert segment.sample() == Sample("0", ids(), ids(), b"", pack_logprobs())
        segment.append_generated(Turn(1, ids(10)))
        assert [s.reason for s in segment.spans] == [MaskReason.CLOSING, MaskReason.ENVIRONMENT, None]

    def test_the_first_turn_opens_the_main_segment(self) -> None:
        ledger = begun()
        assert (len(ledger.segments), ledger.current_id) == (1, "0")
        segment = ledger.segments[0]
        assert ledger.current is segment
        assert (segment.id, segment.origin) == ("0", Origin(SegmentKind.MAIN, "", 0))
        assert spans_of(ledger) == [("prompt", 1, 0, 3), ("model", 1, 3, 5)]

    def test_environment_then_answer_extend_it(self) -> None:
        ledger = begun()
        ledger.commit(Turn(2, ids(30), None, predicts(20, 21)))
        assert spans_of(ledger)[2:] == [("environment", 2, 5, 7), ("model", 2, 7, 8)]
        sample = ledger.segments[0].sample()
        assert sample.segment_id == "0"
        assert (sample.prompt_ids, sample.response_ids) == (ids(1, 2, 3), ids(10, 11, 20, 21, 30))
        assert sample.response_mask == bytes((1, 1, 0, 0, 1))

    @pytest.mark.parametrize("reported", [None, ids(1, 2, 3, 10, 11, 9, 20)])
    def test_the_closing_token_of_a_cut_answer_has_its_own_reason(self, reported: array[int] | None) -> None:
        ledger = begun()
        assert ledger.commit(Turn(2, ids(30), None, predicts(20, closing=[9]), reported)) is None
        assert spans_of(ledger)[2:] == [("closing", 2, 5, 6), ("environment", 2, 6, 7), ("model", 2, 7, 8)]

    def test_without_a_prediction_all_that_the_trainer_added_is_environment(self) -> None:
        ledger = begun()
        assert ledger.commit(Turn(2, ids(30), None, None, ids(1, 2, 3, 10, 11, 9, 20))) is None
        assert spans_of(ledger)[2:] == [("environment", 2, 5, 7), ("model", 2, 7, 8)]

    def test_nothing_new_makes_no_span(self) -> None:
        ledger = begun()
        ledger.commit(Turn(2, ids(30), None, predicts()))
        assert spans_of(ledger)[2:] == [("model", 2, 5, 6)]

    def test_what_no_answer_followed_is_not_in_the_trajectory_until_one_does(self) -> None:
        ledger = begun()
        ledger.commit(Turn(2, ids(), None, predicts(20)))
        segment = ledger.segments[0]
        assert spans_of(ledger) == [("prompt", 1, 0, 3), ("model", 1, 3, 5)]
        assert segment.sample().response_ids == ids(10, 11)
        assert (len(segment), segment.ids()) == (6, ids(1, 2, 3, 10, 11, 20))
        ledger.commit(Turn(3, ids(30), None, predicts(21)))
        assert spans_of(ledger)[2:] == [("environment", 2, 5, 6), ("environment", 3, 6, 7), ("model", 3, 7, 8)]

    @pytest.mark.parametrize("prompt", [ids(), ids(5)])
    def test_an_empty_first_answer_leaves_the_prompt_alone(self, prompt: array[int]) -> None:
        ledger = Ledger()
        ledger.commit(Turn(1, ids(), None, None, prompt))
        assert spans_of(ledger) == [("prompt", 1, 0, len(prompt))]
        sample = ledger.segments[0].sample()
        assert (sample.prompt_ids, sample.response_ids, sample.response_mask) == (prompt, ids(), b"")
        assert sample.logprobs == pack_logprobs()

    def test_copies_are_cut_as_asked(self) -> None:
        segment = begun().segments[0]
        assert (segment.ids(1, 4), segment.ids(3)) == (ids(2, 3, 10), ids(10, 11))
        assert (segment.logprobs(1, 4), segment.logprobs(4)) == (pack_logprobs([0, 0, 0]), pack_logprobs([0]))

    def test_every_token_has_an_author(self) -> None:
        segment = begun().segments[0]
        assert [segment.author_at(i) for i in range(5)] == [Author.OTHER] * 3 + [Author.MODEL] * 2

    def test_a_span_knows_the_policy_that_wrote_it(self) -> None:
        ledger = Ledger()
        ledger.commit(Turn(1, ids(10), pack_logprobs([-1]), predicts(1), None, "step-7"))
        assert ledger.segments[0].spans == (
            Span(Author.OTHER, MaskReason.PROMPT, 1, 0, 1, "", False),
            Span(Author.MODEL, None, 1, 1, 2, "step-7", True),
        )

    @pytest.mark.parametrize(
        ("author", "reason", "trains"),
        [(Author.MODEL, None, True)]
        + [(Author.MODEL, reason, False) for reason in MaskReason]
        + [(Author.OTHER, reason, False) for reason in (None, *MaskReason)],
    )
    def test_only_the_models_tokens_train_and_not_where_a_reason_masks_them(
        self, author: Author, reason: MaskReason | None, trains: bool
    ) -> None:
        assert Span(author, reason, 1, 0, 1).trains is trains


class TestVerified:
    def test_a_segment_is_verified_while_every_prompt_was_reported(self) -> None:
        ledger = begun()
        segment = ledger.segments[0]
        assert segment.verified is True
        ledger.commit(Turn(2, ids(30), None, None, ids(1, 2, 3, 10, 11, 20)))
        assert segment.verified is True
        ledger.commit(Turn(3, ids(31), None, predicts(21)))
        assert segment.verified is False
        ledger.commit(Turn(4, ids(), None, None, segment.ids()))
        assert segment.verified is False

    def test_a_segment_that_drift_opened_is_verified_by_itself(self) -> None:
        ledger = Ledger()
        ledger.commit(Turn(1, ids(10), None, predicts(1)))
        ledger.commit(Turn(2, ids(11), None, None, ids(5)))
        assert [s.verified for s in ledger.segments] == [False, True]


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
        assert ledger.commit(Turn(2, ids(30), None, predicts(20, closing=[8]), ids(*reported))) == drift
        assert drift.opens_segment
        assert ledger.current_id == "1"
        segment = ledger.segments[1]
        assert segment is ledger.current
        assert (segment.id, segment.origin) == ("1", Origin(SegmentKind.DRIFT, "0", drift.index))
        assert segment.sample().prompt_ids == ids(*reported), "exactly what the model saw"
        assert (segment.sample().response_ids, segment.sample().response_mask) == (ids(30), b"\x01")
        assert spans_of(ledger)[0] == ("prompt", 2, 0, len(reported))
        assert shown_segment(ledger.segments[0]) == first, "what was recorded stays as it is"

    def test_without_a_prediction_the_ledger_alone_was_expected(self) -> None:
        drift = begun().commit(Turn(2, ids(30), None, None, ids(1, 9)))
        assert drift == Drift(DriftKind.HISTORY_REWRITTEN, 1, 5, 2)

    @pytest.mark.parametrize(
        ("added", "index"),
        [((21,), 5), ((8, 21), 6), ((8, 20, 22), 7), ((8,), 6), ((), 5), ((9, 20), 5), ((20, 8), 5)],
    )
    def test_other_environment_than_predicted_goes_on_with_the_trainers(
        self, added: tuple[int, ...], index: int
    ) -> None:
        ledger = begun()
        drift = ledger.commit(Turn(2, ids(30), None, predicts(20, closing=[8]), ids(1, 2, 3, 10, 11, *added)))
        assert drift == Drift(DriftKind.ENVIRONMENT, index, 7, 5 + len(added))
        assert not drift.opens_segment
        assert len(ledger.segments) == 1
        environment = [("environment", 2, 5, 5 + len(added))] if added else []
        assert spans_of(ledger)[2:] == [*environment, ("model", 2, 5 + len(added), 6 + len(added))]

    def test_another_first_prompt_than_predicted_is_the_trainers(self) -> None:
        ledger = Ledger()
        drift = ledger.commit(Turn(1, ids(30), None, predicts(1, 2, 3), ids(1, 9)))
        assert drift == Drift(DriftKind.PROMPT, 1, 3, 2)
        assert not drift.opens_segment
        assert ledger.segments[0].origin == Origin(SegmentKind.MAIN)
        assert ledger.segments[0].sample().prompt_ids == ids(1, 9)

    def test_segments_after_drift_follow_the_newest(self) -> None:
        ledger = begun()
        ledger.commit(Turn(2, ids(30), None, None, ids(7)))
        assert ledger.commit(Turn(3, ids(31), None, None, ids(7, 30, 40))) is None
        assert ledger.commit(Turn(4, ids(32), None, None, ids(1, 2, 3, 10, 11))) is not None
        assert [s.origin.parent_id for s in ledger.segments] == ["", "0", "1"]
        assert [len(s) for s in ledger.segments] == [5, 4, 6]

    def test_tokens_that_no_answer_followed_count_as_seen(self) -> None:
        ledger = begun()
        ledger.commit(Turn(2, ids(), None, predicts(20)))
        drift = ledger.commit(Turn(3, ids(30), None, None, ids(1, 2, 3, 10, 11, 99)))
        assert drift == Drift(DriftKind.HISTORY_REWRITTEN, 5, 6, 6)


def test_a_turn_without_any_prompt_is_refused_and_leaves_no_trace() -> None:
    for ledger in (Ledger(), begun()):
        before = shown_ledger(ledger)
        with pytest.raises(ValueError, match="predicted or a reported prompt"):
            ledger.commit(Turn(2, ids(10)))
        assert shown_ledger(ledger) == before


@given(runs, runs, runs)
def test_first_difference_is_the_length_of_what_both_begin_with(same: list[int], a: list[int], b: list[int]) -> None:
    left, right = pack_tokens(same + a), pack_tokens(same + b)
    assert first_difference(left, right) == first_difference(right, left) == common(same + a, same + b)


def test_words_that_leave_the_process_stay() -> None:
    """Journals and clients know these words."""
    words = {kind: [member.value for member in kind] for kind in (Author, MaskReason, SegmentKind, DriftKind)}
    assert words == {
        Author: ["model", "other"],
        MaskReason: ["prompt", "environment", "closing", "author"],
        SegmentKind: ["main", "drift", "compaction", "subagent", "branch"],
        DriftKind: ["history_rewritten", "retokenised", "environment", "truncated", "prompt"],
    }


def test_spans_of_a_long_rollout_lie_end_to_end() -> None:
    ledger = begun()
    for turn in range(2, 50):
        ledger.commit(Turn(turn, ids(turn), None, predicts(turn, closing=[9] if turn % 3 else [])))
    spans = ledger.segments[0].spans
    assert all(a.stop == b.start for a, b in pairwise(spans))
    assert spans[-1].stop == len(ledger.segments[0])


class TestLongOnes:
    """Beyond 256, where equal numbers are no longer the same object."""

    def test_answers_and_their_logprobs(self) -> None:
        ledger = Ledger()
        count = 600
        ledger.commit(Turn(1, ids(*range(count)), pack_logprobs([-1.0] * count), predicts(1)))
        assert ledger.segments[0].sample().logprobs == pack_logprobs([-1.0] * count)

    def test_drift(self) -> None:
        ledger = begun(prompt=tuple(range(300)), answer=tuple(range(300)))
        assert ledger.commit(Turn(2, ids(1), None, None, ids(*range(290)))) == Drift(DriftKind.TRUNCATED, 290, 600, 290)
        ledger = begun(prompt=tuple(range(300)), answer=tuple(range(300)))
        assert ledger.commit(Turn(2, ids(1), None, None, ids(*range(300), *range(280), 9))) == Drift(
            DriftKind.RETOKENISED, 580, 600, 581
        )
