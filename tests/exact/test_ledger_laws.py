"""Renderer and ledger together: random conversations with every tokenizer and template.

After each turn they are compared with plain lists. There are three kinds of trainers. A silent one reports no prompts, so
the ledger holds the server's rendering. One that keeps its tokens appends new ones to them. One that renders everything
again reports the result, which may be drift.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_server.core.ledger import Ledger, MaskReason, Prediction, Tokens, Turn, pack_logprobs, pack_tokens
from rollout_server.edge.tokens.renderer import Rendered, Renderer
from rollout_server.edge.tokens.rendering_form import Arguments
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.testing.checks.renderer import PlainRenderer, UnrenderableError

from tests.edge.tokens.conftest import TOOLS, answered, packed
from tests.edge.tokens.test_properties import PARTS, TEXT, conversations
from tests.exact.families import EVERYTHING, Family, families
from tests.exact.naive import records
from tests.support.naive_ledger import NaiveLedger, assert_laws

TRAINERS = ("silent", "keeps", "renders")
CONTENTS = (TEXT, TEXT | st.none(), TEXT | PARTS)
SOME = settings(
    max_examples=200 if EVERYTHING else 10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass(frozen=True, slots=True)
class Both:
    """One tokenizer, as the server loads it and as a plain trainer does."""

    loaded: LoadedTokenizer
    plain: PlainRenderer


@pytest.fixture(scope="module")
def both() -> Iterator[Callable[[Family], Both]]:
    """Load each family once."""
    known: dict[Family, Both] = {}
    with ThreadPoolExecutor(1) as executor:

        def of(family: Family) -> Both:
            if family not in known:
                tokenizer = family.tokenizer()
                loaded = LoadedTokenizer(family.name, tokenizer, executor)
                objects = loaded.probed.preferred is Arguments.PARSED
                known[family] = Both(loaded, PlainRenderer(tokenizer, parse_arguments=objects))
            return known[family]

        yield of


@pytest.mark.parametrize("family", families())
@SOME
@given(data=st.data())
def test_laws_at_every_turn(both: Callable[[Family], Both], family: Family, data: st.DataObject) -> None:
    turns = data.draw(conversations(data.draw(st.sampled_from(CONTENTS)), thoughts=TEXT))
    rollout = Rollout(both(family), data.draw(st.sampled_from(TRAINERS)))
    asyncio.run(rollout.play(turns, data))


class Rollout:
    """One rollout with one kind of trainer: the renderer, the ledger, and plain lists as the oracle."""

    def __init__(self, both: Both, trainer: str) -> None:
        self._both = both
        self._trainer = trainer
        self._renderer = Renderer(both.loaded, TOOLS, {})
        self._ledger, self._naive = Ledger(), NaiveLedger()
        self._turns: list[tuple[list[int], list[int], list[float]]] = []

    async def play(self, turns: Sequence[Sequence[dict[str, Any]]], data: st.DataObject) -> None:
        """Run turn by turn, until the template refuses the next message."""
        messages = list[dict[str, Any]]()
        last, asked = None, 0
        for number, turn in enumerate(turns, 1):
            messages += turn
            rendered = await self._rendered(messages, last, asked)
            if rendered is None:
                return
            self._assert_count(messages, rendered)
            reported = self._reported(messages, rendered.predicted)
            predicted = rendered.predicted
            if reported is not None:
                predicted = await self._renderer.learn(predicted, reported)
            ids, cut = self._answer(data)
            self._commit(Turn(number, pack_tokens(ids), self._logprobs(ids, data), predicted, reported))
            self._assert_kept(number, rendered)
            following = turns[number][0] if number < len(turns) else {"role": "assistant", "content": ""}
            last, asked = answered(following, ids, "length" if cut else "stop"), len(messages)

    async def _rendered(self, messages: Sequence[Any], last: Any, asked: int) -> Rendered | None:
        """The rendering; None if the template refuses, in which case plain rendering must refuse too."""
        try:
            self._both.plain.prompt(messages, TOOLS)
        except UnrenderableError:
            with pytest.raises(RolloutFailed):
                await self._renderer.predict(packed(*messages), last, asked)
            return None
        return await self._renderer.predict(packed(*messages), last, asked)

    def _reported(self, messages: Sequence[Any], predicted: Prediction) -> Tokens | None:
        if self._trainer == "silent":
            return None
        if self._trainer == "renders":
            return pack_tokens(self._both.plain.prompt(messages, TOOLS))
        return pack_tokens(self._held()) + predicted.closing + predicted.environment

    def _answer(self, data: st.DataObject) -> tuple[list[int], bool]:
        """A completion: a few arbitrary tokens, with or without an end token."""
        words = self._both.plain.encode(data.draw(st.sampled_from(("Eight.", "", "Yes 😀"))))
        cut = data.draw(st.booleans())
        stops = self._both.loaded.probed.stops
        return [*words, *([] if cut or not stops else [data.draw(st.sampled_from(stops)).id])], cut

    def _logprobs(self, ids: Sequence[int], data: st.DataObject) -> Any:
        return pack_logprobs(-1 / (2 + place) for place in range(len(ids))) if data.draw(st.booleans()) else None

    def _commit(self, turn: Turn) -> None:
        """Commit the turn to the ledger and to the lists; both must find the same drift and agree in everything."""
        assert turn.predicted is not None
        environment = list(turn.predicted.closing + turn.predicted.environment)
        prompt = list(turn.reported) if turn.reported is not None else self._held() + environment
        drift = self._ledger.main.commit(turn)
        told = None if drift is None else (drift.kind.value, drift.index, drift.expected, drift.reported)
        assert told == self._naive.main.commit(turn)
        assert_laws(self._ledger, self._naive)
        self._turns.append((prompt, list(turn.answer), [0.0] * len(turn.answer)))
        samples = [segment.sample() for segment in self._ledger.segments]
        shown = [(list(s.prompt_ids), list(s.response_ids), list(s.response_mask)) for s in samples]
        assert shown == [(record.prompt, record.response, record.mask) for record in records(self._turns)]

    def _held(self) -> list[int]:
        """The last prompt and its completion."""
        return [*self._turns[-1][0], *self._turns[-1][1]] if self._turns else []

    def _assert_count(self, messages: Sequence[Any], rendered: Rendered) -> None:
        """Assert that the count equals that of a trainer that renders everything."""
        if self._trainer == "renders" and self._turns:
            length = len(self._both.plain.prompt(messages, TOOLS)) - len(self._held())
            assert rendered.mask_length == length

    def _assert_kept(self, number: int, rendered: Rendered) -> None:
        """Assert that without re-rendering there is no drift: one segment, with a closing token after a truncated completion."""
        if self._trainer == "renders":
            return
        (segment,) = self._ledger.segments
        closing = [span for span in segment.spans if span.turn == number and span.reason is MaskReason.CLOSING]
        if self._turns[-1][1]:  # otherwise the span is not settled yet
            assert sum(span.stop - span.start for span in closing) == len(rendered.predicted.closing)
