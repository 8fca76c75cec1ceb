"""Builders for turns and records, and comparable views of a machine and an outcome."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import strategies as st
from rollout_server.core.ledger import (
    MAX_TOKEN_ID,
    Ledger,
    PolicyRun,
    Prediction,
    Segment,
    Tokens,
    Turn,
    pack_logprobs,
    pack_tokens,
)
from rollout_server.core.limits import Limits
from rollout_server.core.machine import IllegalRecord, Machine
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import Outcome
from rollout_server.core.record import Answered, Asked, Ended, Record, ToolReturned, ToolStarted

SYSTEM = Message.write({"role": "system", "content": "Be brief."})
USER = Message.write({"role": "user", "content": "5 + 3?"})
ANSWER = Message.write({"role": "assistant", "content": "8"})
RESULT = Message.write({"role": "tool", "content": "8", "tool_call_id": "a"})
CALL = ToolCall("a", "add", '{"a": 5, "b": 3}')

# A few different ids, so that sequences also agree by chance, and the ends of the range.
token_ids = st.sampled_from((0, 1, 2, 3, MAX_TOKEN_ID))
logprobs = st.floats(max_value=0.0, width=32, allow_nan=False)
runs = st.lists(token_ids, max_size=4)


def ids(*values: int) -> Tokens:
    return pack_tokens(values)


def predicts(*environment: int, closing: Iterable[int] = ()) -> Prediction:
    return Prediction(pack_tokens(closing), pack_tokens(environment))


def begun(*, prompt: tuple[int, ...] = (1, 2, 3), answer: tuple[int, ...] = (10, 11)) -> Ledger:
    """A ledger of one turn whose reported prompt equals the prediction."""
    ledger = Ledger()
    assert ledger.main.commit(Turn(1, ids(*answer), None, predicts(*prompt), ids(*prompt))) is None
    return ledger


def spans_of(ledger: Ledger, segment: int = -1) -> list[tuple[str, int, int, int]]:
    spans = ledger.segments[segment].spans
    return [(s.reason.value if s.reason else "model", s.turn, s.start, s.stop) for s in spans]


def answered(turn: int, *answer: int, **rest: object) -> Answered:
    """A completion with token ids, after a prompt predicted as one token unless `rest` changes it."""
    given: dict[str, object] = {"predicted": predicts(100 + turn), "finish_reason": "stop", **rest}
    return replace(Answered(turn, ANSWER, "", pack_tokens(answer)), **given)  # type: ignore[arg-type]


def returned(started: ToolStarted, message: Message = RESULT, *, failed: bool = False, ms: float = 0.0) -> ToolReturned:
    return ToolReturned(started.turn, started.index, started.call, message, failed, ms)


def fresh(limits: Limits = Limits(), *messages: Message) -> Machine:
    return Machine("u", messages or (SYSTEM, USER), limits)


def asks(machine: Machine) -> Asked:
    """Request a completion, which no limit may forbid here."""
    wish = machine.request_completion()
    assert isinstance(wish, Asked)
    machine.accept(wish)
    return wish


def takes_turn(machine: Machine, *answer: int, **rest: object) -> tuple[Record, ...]:
    return machine.accept(answered(asks(machine).turn, *answer, **rest))


def starts(machine: Machine, *calls: ToolCall) -> tuple[ToolStarted, ...]:
    """Start tool calls, which no limit may forbid here."""
    wish = machine.start_calls(calls)
    assert isinstance(wish, tuple)
    for started in wish:
        machine.accept(started)
    return wish


def ends(machine: Machine, record: Ended) -> Outcome:
    machine.accept(record)
    assert machine.outcome is not None
    return machine.outcome


def shown_segment(segment: Segment) -> tuple[object, ...]:
    held = (segment.verified, segment.spans, segment.ids(), segment.logprobs())
    return (segment.id, segment.origin, segment.role, *held)


def shown_ledger(ledger: Ledger) -> tuple[object, ...]:
    return (ledger.main.id, *(shown_segment(s) for s in ledger.segments))


def shown(machine: Machine) -> tuple[object, ...]:
    """The observable state of a machine, as values that do not change with it."""
    outcome = None if machine.outcome is None else shown_outcome(machine.outcome)
    told = (
        machine.request_completion(),
        machine.start_calls([CALL]),
        machine.natural_stop(),
        machine.main.last_completion,
    )
    state = (machine.state, machine.turn, tuple(machine.messages), machine.metrics, dict(machine.rewards))
    return (*state, shown_ledger(machine.ledger), *told, outcome)


def shown_outcome(outcome: Outcome) -> tuple[object, ...]:
    segments = tuple(shown_segment(s) for s in outcome.segments)
    rewards = (outcome.reward_result, outcome.turn_rewards, outcome.reward_rule)
    shown = (outcome.end, outcome.messages, outcome.metrics, outcome.warnings, *rewards, segments, outcome.capture)
    return (*shown, outcome.policy_step)


def assert_refused(machine: Machine, record: object) -> None:
    """Assert that a record is refused as illegal and changes no observable state."""
    before = shown(machine)
    with pytest.raises(IllegalRecord):
        machine.accept(record)  # type: ignore[arg-type]
    assert shown(machine) == before


def draw_turn(data: st.DataObject, number: int, held: list[int] | None) -> Turn:
    """A turn after the tokens `held` (None at the start), with a prediction, a report or both, which may differ in any way."""
    draw = data.draw
    answer = draw(runs)
    known = draw(st.none() | st.lists(logprobs, min_size=len(answer), max_size=len(answer)))
    closing = [] if held is None else draw(st.lists(token_ids, max_size=1))
    environment = draw(runs)
    shape = draw(st.sampled_from(("predicted", "both", "reported")))
    reported = None if shape == "predicted" else draw(reports(held or [], [*closing, *environment]))
    return Turn(
        number,
        pack_tokens(answer),
        None if known is None else pack_logprobs(known),
        None if shape == "reported" else predicts(*environment, closing=closing),
        None if reported is None else pack_tokens(reported),
        tuple(draw_policy_runs(data, len(answer))),
    )


def draw_policy_runs(data: st.DataObject, tokens: int) -> list[PolicyRun]:
    """The policies of a completion in order: nearly always one, otherwise up to three, each unlike the one before."""
    policies = st.tuples(st.sampled_from(("", "p1", "p2")), st.none() | st.integers(0, 9))
    cuts = sorted(data.draw(st.sampled_from(((), (), (tokens // 2,), (1, tokens - 1)))))
    drawn = [data.draw(policies) for _ in range(len(cuts) + 1)]
    owners = [drawn[sum(cut <= index for cut in cuts)] for index in range(tokens)]
    return [PolicyRun(len(list(run)), *policy) for policy, run in groupby(owners)]


def reports(held: list[int], added: list[int]) -> st.SearchStrategy[list[int]]:
    """Prompts that a trainer may report: expected, continued differently, truncated, or with a changed token."""
    changed = st.tuples(st.integers(0, max(len(held) - 1, 0)), token_ids).map(
        lambda at: [*held[: at[0]], at[1], *held[at[0] + 1 :], *added]
    )
    cut = st.integers(0, len(held)).map(lambda n: held[:n])
    longer = runs.map(lambda more: [*held, *more])
    return st.one_of(st.just([*held, *added]), longer, cut, changed, runs)
