"""The laws of the ledger, case by case."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import given
from rollout_server.core.ledger import (
    Author,
    ConversationLedger,
    Drift,
    DriftKind,
    Ledger,
    MaskReason,
    Origin,
    Segment,
    SegmentKind,
    Span,
    Turn,
    pack_logprobs,
    pack_tokens,
)
from rollout_server.core.segment import Plane, PolicyRun, Sample, first_difference

from tests.support.machine_records import begun, ids, predicts, runs, shown_ledger, spans_of
from tests.support.naive_ledger import common


class TestOneSegment:
    def test_an_untouched_ledger_has_no_segment_and_will_open_segment_0(self) -> None:
        ledger = Ledger()
        assert (ledger.segments, ledger.main.segment, ledger.main.id) == ((), None, "0")

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
        segment.append_generated(ids(10), None, Span(Author.MODEL, None, 1, 0, 0))
        assert [s.reason for s in segment.spans] == [MaskReason.CLOSING, MaskReason.ENVIRONMENT, None]

    def test_what_follows_a_prompt_waits_for_the_model_too(self) -> None:
        segment = Segment("0", Origin(SegmentKind.MAIN))
        segment.append_masked(ids(1, 2), MaskReason.PROMPT, 1)
        segment.append_masked(ids(3), MaskReason.ENVIRONMENT, 2)
        assert [s.reason for s in segment.spans] == [MaskReason.PROMPT]

    def test_the_first_turn_opens_the_main_segment(self) -> None:
        ledger = begun()
        assert (len(ledger.segments), ledger.main.id) == (1, "0")
        segment = ledger.segments[0]
        assert ledger.main.segment is segment
        assert (segment.id, segment.origin) == ("0", Origin(SegmentKind.MAIN, "", 0))
        assert spans_of(ledger) == [("prompt", 1, 0, 3), ("model", 1, 3, 5)]

    def test_environment_then_answer_extend_it(self) -> None:
        ledger = begun()
        ledger.main.commit(Turn(2, ids(30), None, predicts(20, 21)))
        assert spans_of(ledger)[2:] == [("environment", 2, 5, 7), ("model", 2, 7, 8)]
        sample = ledger.segments[0].sample()
        assert sample.segment_id == "0"
        assert (sample.prompt_ids, sample.response_ids) == (ids(1, 2, 3), ids(10, 11, 20, 21, 30))
        assert sample.response_mask == bytes((1, 1, 0, 0, 1))

    @pytest.mark.parametrize("reported", [None, ids(1, 2, 3, 10, 11, 9, 20)])
    def test_the_closing_token_of_a_cut_answer_has_its_own_reason(self, reported: array[int] | None) -> None:
        ledger = begun()
        assert ledger.main.commit(Turn(2, ids(30), None, predicts(20, closing=[9]), reported)) is None
        assert spans_of(ledger)[2:] == [("closing", 2, 5, 6), ("environment", 2, 6, 7), ("model", 2, 7, 8)]

    def test_without_a_prediction_all_that_the_trainer_added_is_environment(self) -> None:
        ledger = begun()
        assert ledger.main.commit(Turn(2, ids(30), None, None, ids(1, 2, 3, 10, 11, 9, 20))) is None
        assert spans_of(ledger)[2:] == [("environment", 2, 5, 7), ("model", 2, 7, 8)]

    def test_nothing_new_makes_no_span(self) -> None:
        ledger = begun()
        ledger.main.commit(Turn(2, ids(30), None, predicts()))
        assert spans_of(ledger)[2:] == [("model", 2, 5, 6)]

    def test_what_no_answer_followed_is_not_in_the_trajectory_until_one_does(self) -> None:
        ledger = begun()
        ledger.main.commit(Turn(2, ids(), None, predicts(20)))
        segment = ledger.segments[0]
        assert spans_of(ledger) == [("prompt", 1, 0, 3), ("model", 1, 3, 5)]
        assert segment.sample().response_ids == ids(10, 11)
        assert (len(segment), segment.ids()) == (6, ids(1, 2, 3, 10, 11, 20))
        ledger.main.commit(Turn(3, ids(30), None, predicts(21)))
        assert spans_of(ledger)[2:] == [("environment", 2, 5, 6), ("environment", 3, 6, 7), ("model", 3, 7, 8)]

    @pytest.mark.parametrize("prompt", [ids(), ids(5)])
    def test_an_empty_first_answer_leaves_the_prompt_alone(self, prompt: array[int]) -> None:
        ledger = Ledger()
        ledger.main.commit(Turn(1, ids(), None, None, prompt))
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

    def test_a_completion_without_tokens_has_no_span_and_its_planes_are_empty(self) -> None:
        ledger = Ledger()
        ledger.main.commit(Turn(1, ids(), pack_logprobs(), predicts(1), planes=(Plane("a", "uint8", b""),)))
        assert [span.author for span in ledger.segments[0].spans] == [Author.OTHER]

    def test_each_policy_of_a_completion_has_a_span_with_its_part_of_the_planes(self) -> None:
        ledger, runs = Ledger(), (PolicyRun(1, "a", 1), PolicyRun(2, "b", 2))
        planes = (Plane("p", "uint8", b"xyz"), Plane("q", "uint16", b"aabbcc"))
        ledger.main.commit(Turn(1, ids(5, 6, 7), pack_logprobs([-1, -2, -3]), predicts(1), None, runs, planes))
        spans = ledger.segments[0].spans[1:]
        assert [(span.start, span.stop, span.policy_version, span.policy_step) for span in spans] == [
            (1, 2, "a", 1),
            (2, 4, "b", 2),
        ]
        assert [[plane.values for plane in span.planes] for span in spans] == [[b"x", b"aa"], [b"yz", b"bbcc"]]
        with pytest.raises(ValueError, match="runs of the policies"):
            ledger.main.commit(Turn(2, ids(5), None, predicts(1), None, runs))

    def test_a_span_knows_the_policy_that_wrote_it(self) -> None:
        ledger = Ledger()
        ledger.main.commit(Turn(1, ids(10), pack_logprobs([-1]), predicts(1), None, (PolicyRun(1, "step-7", 7),)))
        assert ledger.segments[0].spans == (
            Span(Author.OTHER, MaskReason.PROMPT, 1, 0, 1, "", False),
            Span(Author.MODEL, None, 1, 1, 2, "step-7", True, policy_step=7),
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
        ledger.main.commit(Turn(2, ids(30), None, None, ids(1, 2, 3, 10, 11, 20)))
        assert segment.verified is True
        ledger.main.commit(Turn(3, ids(31), None, predicts(21)))
        assert segment.verified is False
        ledger.main.commit(Turn(4, ids(), None, None, segment.ids()))
        assert segment.verified is False

    def test_a_segment_that_drift_opened_is_verified_by_itself(self) -> None:
        ledger = Ledger()
        ledger.main.commit(Turn(1, ids(10), None, predicts(1)))
        ledger.main.commit(Turn(2, ids(11), None, None, ids(5)))
        assert [s.verified for s in ledger.segments] == [False, True]


def test_a_turn_without_any_prompt_is_refused_and_leaves_no_trace() -> None:
    for ledger in (Ledger(), begun()):
        before = shown_ledger(ledger)
        with pytest.raises(ValueError, match="predicted or a reported prompt"):
            ledger.main.commit(Turn(2, ids(10)))
        assert shown_ledger(ledger) == before


@given(runs, runs, runs)
def test_first_difference_is_the_length_of_what_both_begin_with(same: list[int], a: list[int], b: list[int]) -> None:
    left, right = pack_tokens(same + a), pack_tokens(same + b)
    assert first_difference(left, right) == first_difference(right, left) == common(same + a, same + b)


def test_words_that_leave_the_process_stay() -> None:
    """Journals and clients rely on these strings."""
    words = {kind: [member.value for member in kind] for kind in (Author, MaskReason, SegmentKind, DriftKind)}
    assert words == {
        Author: ["model", "other"],
        MaskReason: ["prompt", "environment", "closing", "author", "stale"],
        SegmentKind: ["main", "drift", "compaction", "subagent", "branch", "gap"],
        DriftKind: ["history_rewritten", "retokenised", "environment", "truncated", "prompt"],
    }


def test_spans_of_a_long_rollout_lie_end_to_end() -> None:
    ledger = begun()
    for turn in range(2, 50):
        ledger.main.commit(Turn(turn, ids(turn), None, predicts(turn, closing=[9] if turn % 3 else [])))
    spans = ledger.segments[0].spans
    assert all(a.stop == b.start for a, b in pairwise(spans))
    assert spans[-1].stop == len(ledger.segments[0])


class TestWhatSamplersRead:
    """The prompt of a branch is masked as a whole, but a trainer's digest needs the author of each token where it was sampled."""

    @staticmethod
    def written(line: ConversationLedger) -> list[tuple[str, int, int, int]]:
        return [(s.reason.value if s.reason else s.author.value, s.turn, s.start, s.stop) for s in line.authorship()]

    HELD: ClassVar = [("prompt", 1, 0, 3), ("model", 1, 3, 5)]

    def test_nothing_is_held_at_first(self) -> None:
        line = Ledger().main
        assert (self.written(line), line.tokens, line.extends(ids(1))) == ([], 0, True)
        assert line.origin == Origin(SegmentKind.MAIN)

    def test_a_branch_shows_who_wrote_its_prompt(self) -> None:
        main = begun().main
        branch = main.branch()
        assert self.written(main) == self.written(branch) == self.HELD
        main.commit(Turn(2, ids(12), None, predicts(4)))
        branch.commit(Turn(3, ids(13), None, predicts(6, 7, closing=(5,))))
        shown = [*self.HELD, ("closing", 3, 5, 6), ("environment", 3, 6, 8), ("model", 3, 8, 9)]
        assert self.written(branch) == self.written(branch.branch()) == shown
        assert branch.segment is not None
        assert [span.stop for span in branch.segment.spans] == [8, 9], "the whole prefix is one prompt"
        again = branch.branch()
        again.commit(Turn(4, ids(14), None, None, branch.prefix() + ids(8)))
        assert self.written(again) == [*shown, ("environment", 4, 9, 10), ("model", 4, 10, 11)]

    def test_a_branch_whose_prompt_is_another_than_predicted_has_no_closing(self) -> None:
        branch = begun().main.branch()
        branch.commit(Turn(2, ids(12), None, predicts(6, closing=(5,)), branch.prefix() + ids(6)))
        assert self.written(branch) == [*self.HELD, ("environment", 2, 5, 6), ("model", 2, 6, 7)]

    def test_a_prompt_that_does_not_extend_what_is_held_is_nobodys_but_the_worlds(self) -> None:
        branch = begun().main.branch()
        assert not branch.extends(ids(1, 2, 3, 10))
        branch.commit(Turn(2, ids(12), None, None, ids(1, 2, 3, 10)))
        assert self.written(branch) == [("prompt", 2, 0, 4), ("model", 2, 4, 5)]
        assert branch.origin == Origin(SegmentKind.BRANCH, "0", 4)

    def test_nothing_extends_a_gap(self) -> None:
        main = begun().main
        main.gap = True
        assert not main.extends(main.prefix() + ids(4))
        main.commit(Turn(3, ids(12), None, None, main.prefix() + ids(4)))
        assert self.written(main) == [("prompt", 3, 0, 6), ("model", 3, 6, 7)]
        assert main.origin == Origin(SegmentKind.GAP, "0", 5)
        assert main.extends(main.prefix())


class TestLongOnes:
    """Values above 256, where equal ints are not the same object in CPython."""

    def test_answers_and_their_logprobs(self) -> None:
        ledger = Ledger()
        count = 600
        ledger.main.commit(Turn(1, ids(*range(count)), pack_logprobs([-1.0] * count), predicts(1)))
        assert ledger.segments[0].sample().logprobs == pack_logprobs([-1.0] * count)

    def test_drift(self) -> None:
        ledger = begun(prompt=tuple(range(300)), answer=tuple(range(300)))
        assert ledger.main.commit(Turn(2, ids(1), None, None, ids(*range(290)))) == Drift(
            DriftKind.TRUNCATED, 290, 600, 290
        )
        ledger = begun(prompt=tuple(range(300)), answer=tuple(range(300)))
        assert ledger.main.commit(Turn(2, ids(1), None, None, ids(*range(300), *range(280), 9))) == Drift(
            DriftKind.RETOKENISED, 580, 600, 581
        )
