"""Ids and logprobs: equal lengths, exact bits, no shared arrays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core.ledger import (
    MAX_TOKEN_ID,
    Ledger,
    Turn,
    pack_logprobs,
    pack_tokens,
)

from tests.support.machine_records import begun, ids, predicts, shown_ledger, shown_segment


class TestLogprobs:
    def test_they_stand_beside_the_models_tokens_and_0_beside_the_others(self) -> None:
        ledger = Ledger()
        ledger.main.commit(Turn(1, ids(10, 11), pack_logprobs([-0.5, -1.5]), predicts(1, 2)))
        ledger.main.commit(Turn(2, ids(12), pack_logprobs([-2.5]), predicts(3)))
        segment = ledger.segments[0]
        assert segment.logprobs() == pack_logprobs([0, 0, -0.5, -1.5, 0, -2.5])
        assert segment.sample().logprobs == pack_logprobs([-0.5, -1.5, 0, -2.5])

    @pytest.mark.parametrize("missing", [1, 2])
    def test_one_answer_without_them_leaves_the_sample_without(self, missing: int) -> None:
        ledger = Ledger()
        for turn in (1, 2):
            ledger.main.commit(Turn(turn, ids(10), None if turn == missing else pack_logprobs([-1]), predicts(1)))
        assert ledger.segments[0].sample().logprobs is None
        assert [s.logprobs_known for s in ledger.segments[0].spans if s.trains] == [missing == 2, missing == 1]

    @given(st.lists(st.floats(width=32, allow_nan=False), max_size=4))
    def test_they_keep_every_bit_of_32(self, values: list[float]) -> None:
        ledger = Ledger()
        packed = pack_logprobs(values)
        ledger.main.commit(Turn(1, pack_tokens(range(len(values))), packed, predicts(1)))
        kept = ledger.segments[0].sample().logprobs
        assert kept is not None
        assert kept.tobytes() == packed.tobytes()
        assert kept.tolist() == values

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_another_number_than_of_tokens_is_refused_and_leaves_no_trace(self, count: int) -> None:
        for ledger in (Ledger(), begun()):
            before = shown_ledger(ledger)
            with pytest.raises(ValueError, match="numbers of logprobs and of tokens differ"):
                ledger.main.commit(Turn(2, ids(10, 11), pack_logprobs([-1] * count), predicts(1)))
            assert shown_ledger(ledger) == before


class TestIds:
    def test_the_ends_of_the_range_survive(self) -> None:
        ledger = begun(prompt=(0, MAX_TOKEN_ID), answer=(MAX_TOKEN_ID, MAX_TOKEN_ID - 1, 0))
        assert ledger.segments[0].ids().tolist() == [0, MAX_TOKEN_ID, MAX_TOKEN_ID, MAX_TOKEN_ID - 1, 0]
        assert MAX_TOKEN_ID == 2**31 - 1

    def test_arrays_are_of_unsigned_32_bit_integers_and_32_bit_floats(self) -> None:
        assert (pack_tokens().typecode, pack_tokens([1, 2]).tolist()) == ("I", [1, 2])
        assert (pack_logprobs().typecode, pack_logprobs([-0.5]).tolist()) == ("f", [-0.5])

    @pytest.mark.parametrize("bad", [-1, 2**32])
    def test_ids_outside_32_bits_overflow(self, bad: int) -> None:
        with pytest.raises(OverflowError):
            pack_tokens([bad])

    def test_what_goes_in_and_what_comes_out_is_not_shared(self) -> None:
        answer, prompt = ids(10), ids(1)
        values = pack_logprobs([-1])
        ledger = Ledger()
        ledger.main.commit(Turn(1, answer, values, None, prompt))
        segment = ledger.segments[0]
        before = shown_segment(segment)
        sample = segment.sample()
        assert sample.logprobs is not None
        for taken in (answer, prompt, values, segment.ids(), segment.logprobs(), sample.response_ids, sample.logprobs):
            taken[0] = 0
        assert shown_segment(segment) == before
