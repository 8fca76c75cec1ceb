"""Outcomes of random ledgers, in the server's format, and builders for small outcomes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from hypothesis import strategies as st
from osmosis.rollout.v1 import outcome_pb2, spec_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.ledger import (
    ConversationLedger,
    Ledger,
    Origin,
    Parting,
    Plane,
    Role,
    SegmentKind,
    pack_logprobs,
)
from rollout_server.core.message import Message
from rollout_server.core.outcome import (
    Category,
    Failure,
    Metrics,
    Outcome,
    RewardResult,
    RewardRule,
    Stop,
    TurnReward,
)
from rollout_server.core.spec import Dialect, Spec, StaleAction, Staleness, Target
from rollout_server.core.staleness import mask_stale
from rollout_server.edge.wire.outcome import outcome_to_proto

from tests.support.machine_records import draw_turn

LEAST = -1e30
SPEC = Spec("r/1", (), Target("http://trainer", Dialect.HTTP_PLAIN), group_id="g")
ROLES = (Role(), Role("critic"), Role("user", trainable=False))
ENDS = (Stop("stop"), Stop("max_tokens", truncated=True), Failure(Category.NETWORK, "the trainer is away", 2, None))


@st.composite
def rollouts(draw: st.DrawFn, *, split: bool = False) -> pb.Rollout:
    """Finished rollouts in view "full". `split`: stale tokens may split a segment into several samples.

    They contain any turns: drift of each kind, gaps, closing tokens, missing logprobs, forks in several roles, completions that
    the author masked out, stale tokens, rewards of turns and roles, and token planes. `extra_json` has the rewards of the roles.
    """
    ledger, data = Ledger(), draw(st.data())
    lines, turns = [ledger.main], draw(st.integers(0, 6))
    homes: dict[int, str] = {}
    for number in range(1, turns + 1):
        lines += draw(forks(ledger, draw(st.sampled_from(lines))))
        line = draw(st.sampled_from(lines))
        turn = draw_turn(data, number, list(line.prefix()) if line.tokens else None)
        if draw(st.integers(0, 5)) == 0 or (line.gap and turn.reported is None):
            line.gap = True
            continue
        if turn.logprobs is not None:  # the server accepts only finite logprobs
            turn = replace(turn, logprobs=pack_logprobs(max(value, LEAST) for value in turn.logprobs))
        if draw(st.integers(0, 3)) == 0:
            turn = replace(turn, planes=(Plane("routed_experts", "uint8", bytes(2 * len(turn.answer))),))
        line.commit(turn)
        homes[number] = line.id
    for masked in draw(st.sets(st.integers(1, 6), max_size=2)):
        for segment in ledger.segments:
            segment.mask_turn(masked)
    actions = [each for each in StaleAction if split or each is not StaleAction.SPLIT]
    staleness = draw(st.none() | st.builds(Staleness, st.integers(0, 4), st.sampled_from(actions)))
    newest = draw(st.none() | st.integers(0, 12))
    mask_stale(ledger.segments, staleness, newest)
    reward = draw(st.none() | st.floats(-10, 10))
    turn_rewards = draw(st.dictionaries(st.integers(1, max(turns, 1)), st.floats(-10, 10), max_size=4)) if turns else {}
    roles = draw(
        st.none() | st.dictionaries(st.sampled_from(("agent", "critic", "user", "absent")), st.floats(-10, 10))
    )
    scores = draw(st.dictionaries(st.text("äb", max_size=3), st.floats(0, 1), max_size=2))
    outcome = Outcome(
        draw(st.sampled_from(ENDS)),
        (Message.write({"role": "user", "content": "Go."}),),
        ledger.segments,
        Metrics(completion_ms=1500.0, tool_ms=250.0, turns=turns),
        RewardResult(reward, scores, json.dumps({"roles": roles}), roles),
        (),
        tuple(TurnReward(turn, value, homes.get(turn, "")) for turn, value in sorted(turn_rewards.items())),
        draw(st.sampled_from(RewardRule)),
        draw(st.sampled_from((None, CaptureReport(continued=2, parted=1)))),
        newest,
    )
    return pb.Rollout(
        uid="u1",
        spec=spec_pb2.RolloutSpec(rollout_id="r/1", group_id="g"),
        outcome=outcome_to_proto(
            outcome, replace(SPEC, staleness=staleness), messages=True, samples=True, segments=True
        ),
    )


@st.composite
def forks(draw: st.DrawFn, ledger: Ledger, forked: ConversationLedger) -> list[ConversationLedger]:
    """Nearly always no fork; otherwise one fork of any kind."""
    kinds = (SegmentKind.BRANCH, SegmentKind.SUBAGENT, SegmentKind.COMPACTION)
    parting = draw(st.sampled_from((None, Parting(1, "content", "8", "ü", "chat", "a1"))))
    kind = draw(st.sampled_from((None, None, None, *kinds, *((SegmentKind.DRIFT,) if parting is not None else ()))))
    if kind is None:
        return []
    role = forked.role if kind is SegmentKind.COMPACTION else draw(st.sampled_from(ROLES))
    if kind is SegmentKind.BRANCH:
        return [forked.branch(role, parting=parting)]
    return [ledger.open(Origin(kind, forked.id, parting=parting), role)]


def span(author: str, count: int, **fields: object) -> token_pb2.Span:
    """A span of this many tokens. `author` is "model", or the mask reason; "author" means masked out by the author."""
    model = author in ("model", "author")
    reason = None if author == "model" else token_pb2.MaskReason.Value(f"MASK_REASON_{author.upper()}")
    kind = token_pb2.AUTHOR_MODEL if model else token_pb2.AUTHOR_OTHER
    first = fields.pop("first", 10)
    assert isinstance(first, int)
    ids = range(first, first + count)
    return token_pb2.Span(author=kind, mask_reason=reason, token_ids=ids, **{"turn": 1, **fields})  # type: ignore[arg-type]


def placed(spans: Sequence[token_pb2.Span]) -> list[token_pb2.SampleSpan]:
    """The spans in a sample's format: positions instead of token ids."""
    stops = list(accumulate(len(each.token_ids) for each in spans))
    return [
        token_pb2.SampleSpan(
            author=each.author,
            mask_reason=each.mask_reason,
            turn=each.turn,
            start=start,
            stop=stop,
            policy_version=each.policy_version,
            policy_step=each.policy_step if each.HasField("policy_step") else None,
        )
        for each, start, stop in zip(spans, [0, *stops], stops, strict=False)
    ]


def outcome_of(*spans: token_pb2.Span, **sample: object) -> outcome_pb2.Outcome:
    """An outcome with one segment. `sample` overrides fields of its sample."""
    ids = [token for each in spans[1:] for token in each.token_ids]
    trains = [not each.mask_reason for each in spans[1:] for _ in each.token_ids]
    fields: dict[str, object] = {
        "segment_id": "0",
        "prompt_ids": spans[0].token_ids,
        "response_ids": ids,
        "response_mask": bytes(trains),
        "logprobs": token_pb2.Logprobs(values=[-0.5 * each for each in trains]),
    }
    origin = token_pb2.SegmentOrigin(kind=token_pb2.SEGMENT_KIND_MAIN)
    segment = token_pb2.Segment(id="0", origin=origin, spans=spans, verified=True)
    fields |= {"spans": placed(spans), "origin": origin, "verified": True}
    made = token_pb2.Sample(**(fields | sample))  # type: ignore[arg-type]
    return outcome_pb2.Outcome(stop=outcome_pb2.Stop(reason="stop"), segments=[segment], samples=[made])
