"""The laws of the ledger: random turns, compared with plain lists."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from rollout_server.core.ledger import (
    DriftKind,
    Ledger,
    Span,
    Turn,
)

from tests.support.machine_records import draw_turn
from tests.support.naive_ledger import NaiveLedger, assert_laws, assert_line


class RandomTurns(RuleBasedStateMachine):
    """Any turns, some without tokens. After each, the ledger equals the plain lists and has lost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.naive, self.turns = Ledger(), NaiveLedger(), 0

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.turns += 1
        held = self.naive.main.ids() if self.naive.segments else None
        turn = draw_turn(data, self.turns, held)
        before = [(s.ids(), s.spans, s.verified) for s in self.ledger.segments]
        after_gap = self.ledger.main.gap
        if after_gap and turn.reported is None:
            self._is_refused(turn)
            return
        drift = self.ledger.main.commit(turn)
        expected = self.naive.main.commit(turn)
        told = None if drift is None else (drift.kind.value, drift.index, drift.expected, drift.reported)
        assert told == expected
        self._assert_laws()
        self._only_added_to(before)
        opened = len(self.ledger.segments) - len(before)
        extends = drift is None or drift.kind in (DriftKind.ENVIRONMENT, DriftKind.PROMPT)
        assert opened == (1 if not before or after_gap or not extends else 0)

    @rule()
    def skip(self) -> None:
        self.turns += 1
        self.ledger.main.gap = True
        self.naive.main.skip()
        self._assert_laws()

    def _is_refused(self, turn: Turn) -> None:
        with pytest.raises(ValueError, match="after a gap"):
            self.ledger.main.commit(turn)
        self._assert_laws()

    def _assert_laws(self) -> None:
        assert_laws(self.ledger, self.naive)
        assert_line(self.ledger.main, self.naive.main)

    def _only_added_to(self, before: list[tuple[array[int], tuple[Span, ...], bool]]) -> None:
        for (held, spans, verified), segment in zip(before, self.ledger.segments, strict=False):
            assert segment.ids(0, len(held)) == held
            assert segment.spans[: len(spans)] == spans
            assert verified or not segment.verified
        for (held, spans, _), segment in zip(before[:-1], self.ledger.segments, strict=False):
            assert (segment.ids(), segment.spans) == (held, spans), "only the newest segment grows"


TestRandomTurns = RandomTurns.TestCase
TestRandomTurns.settings = settings(stateful_step_count=12)
