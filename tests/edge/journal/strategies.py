"""Random records and accepted starts, with every field of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hypothesis import strategies as st
from rollout_server.core import record as records
from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.ledger import (
    Drift,
    DriftKind,
    Origin,
    Parting,
    PolicyRun,
    Prediction,
    Role,
    SegmentKind,
    pack_logprobs,
    pack_tokens,
)
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import (
    Cancellation,
    Category,
    Failure,
    FailureClass,
    RewardResult,
    RewardRule,
    Stop,
    Warned,
)
from rollout_server.core.segment import MAX_STEP, Plane
from rollout_server.core.spec import (
    Dialect,
    DriftPolicy,
    InterruptPolicy,
    Sampling,
    Spec,
    StaleAction,
    Staleness,
    Target,
    TokenizerName,
)
from rollout_server.runtime.journal import AcceptedStart
from rollout_server.runtime.log import Entry
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.start_request import StartRequest, TraceContext


def each_field(kind: type[Any], /, **strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of a dataclass. A field without a strategy is an error, so that a new one is not forgotten."""
    assert strategies.keys() == {field.name for field in fields(kind)}, kind
    return st.builds(kind, **strategies)


# Any code points, lone surrogates included; and what protobuf's strings can hold.
any_texts = st.text(st.characters(), max_size=12) | st.sampled_from(("", "\ud800", "ü€😀", "\ud83d\ude00", "\x00"))
texts = st.text(max_size=12)
small = st.integers(0, 2**32 - 1)
counts = st.integers(0, 2**64 - 1)
steps = st.none() | st.integers(0, MAX_STEP)
numbers = st.floats(allow_nan=False)
named_numbers = st.none() | st.dictionaries(any_texts, numbers, max_size=3)
usages = st.none() | st.tuples(counts, counts)
excerpts = st.just(("", "")) | st.tuples(any_texts, any_texts)
tokens = st.lists(small, max_size=6).map(pack_tokens)
logprobs = st.lists(st.floats(width=32, allow_nan=False), max_size=6).map(pack_logprobs)
messages = each_field(Message, text=any_texts, role=st.sampled_from(("user", "assistant", "tool")) | any_texts)
many_messages = st.lists(messages, max_size=3).map(tuple)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**400), 10**400) | numbers | any_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_texts, inner, max_size=3),
    max_leaves=6,
)
calls = each_field(
    ToolCall, id=any_texts, name=any_texts, arguments=any_texts | st.dictionaries(any_texts, json_values, max_size=3)
)
partings = each_field(Parting, message=small, field=texts, expected=texts, found=texts, api=texts, client_agent=texts)
origins = each_field(
    Origin, kind=st.sampled_from(SegmentKind), parent_id=texts, parent_tokens=counts, parting=st.none() | partings
)
roles = each_field(Role, name=any_texts, trainable=st.booleans(), model=any_texts)
samplings = each_field(
    Sampling,
    temperature=st.none() | numbers,
    top_p=st.none() | numbers,
    max_tokens=st.none() | small,
    stop=st.lists(texts, max_size=3).map(tuple),
    logprobs=st.none() | st.booleans(),
    extra_json=texts,
)
warnings = each_field(Warned, code=any_texts, message=any_texts, turn=small, index=st.none() | counts)
failures = each_field(
    Failure,
    category=st.sampled_from(Category),
    message=any_texts,
    turn=small,
    http_status=st.none() | st.integers(0, 999),
    source=st.none() | st.sampled_from(FailureClass),
)
ends = (
    each_field(Stop, reason=any_texts, truncated=st.booleans()) | failures | each_field(Cancellation, reason=any_texts)
)
results = each_field(
    RewardResult,
    reward=st.none() | numbers,
    scores=named_numbers,
    extra_json=any_texts,
    roles=named_numbers,
)

RECORDS: Mapping[type, st.SearchStrategy[Any]] = {
    records.Accepted: each_field(records.Accepted, messages=counts, agent=texts, agent_version=texts),
    records.Asked: each_field(
        records.Asked,
        turn=small,
        segment_id=texts,
        turn_key=texts,
        messages=counts,
        sampling=st.none() | samplings,
        by_tool=texts,
    ),
    records.Answered: each_field(
        records.Answered,
        turn=small,
        message=messages,
        finish_reason=any_texts,
        token_ids=st.none() | tokens,
        logprobs=st.none() | logprobs,
        predicted=st.none() | each_field(Prediction, closing=tokens, environment=tokens),
        reported=st.none() | tokens,
        shared=counts,
        mask_length=st.none() | counts,
        attempts=counts,
        elapsed_ms=numbers,
        usage=usages,
        policy_version=any_texts,
        notes=st.lists(st.tuples(any_texts, any_texts), max_size=3).map(tuple),
        tool_calls=counts,
        around=excerpts,
        planes=st.lists(
            each_field(Plane, name=any_texts, dtype=any_texts, values=st.binary(max_size=8)), max_size=2
        ).map(tuple),
        extra_json=any_texts,
        policy_step=steps,
        runs=st.lists(each_field(PolicyRun, tokens=counts, version=any_texts, step=steps), max_size=3).map(tuple),
        rendered_by=texts,
    ),
    records.Appended: each_field(records.Appended, messages=many_messages, segment_id=texts, by_tool=texts),
    records.ToolStarted: each_field(
        records.ToolStarted,
        turn=small,
        index=small,
        call=calls,
        segment_id=texts,
        by_tool=texts,
        repeatable=st.booleans(),
    ),
    records.ToolReturned: each_field(
        records.ToolReturned,
        turn=small,
        index=small,
        call=calls,
        message=messages,
        failed=st.booleans(),
        elapsed_ms=numbers,
        segment_id=texts,
        cancelled=st.booleans(),
        used_state=st.booleans(),
    ),
    records.Forked: each_field(
        records.Forked,
        segment_id=texts,
        of=texts,
        origin=origins,
        count=counts,
        messages=many_messages,
        tools=st.lists(any_texts, max_size=3).map(tuple),
        role=roles,
        after_turn=small,
        by_tool=texts,
    ),
    records.GivenUp: each_field(records.GivenUp, turn=small, segment_id=texts, by_tool=texts),
    records.CaptureSettled: each_field(
        records.CaptureSettled,
        segment_id=texts,
        report=each_field(CaptureReport, **{field.name: small for field in fields(CaptureReport)}),
    ),
    records.Observed: each_field(
        records.Observed,
        what=st.sampled_from(("now", "random", "once")),
        value_json=any_texts,
        segment_id=texts,
        number=small,
        after=counts,
        concurrent=st.booleans(),
        by_tool=texts,
    ),
    records.ModelCalled: each_field(
        records.ModelCalled,
        model=any_texts,
        message=messages,
        finish_reason=any_texts,
        usage=usages,
        attempts=counts,
        elapsed_ms=numbers,
        segment_id=texts,
        number=small,
        digest=texts,
        by_tool=texts,
    ),
    records.Masked: each_field(records.Masked, turn=small, reason=any_texts, by_tool=texts),
    records.Rewarded: each_field(records.Rewarded, turn=small, value=numbers, by_tool=texts),
    records.SegmentOpened: each_field(
        records.SegmentOpened, turn=small, segment_id=texts, origin=origins, prompt_tokens=counts
    ),
    records.DriftFound: each_field(
        records.DriftFound,
        turn=small,
        segment_id=texts,
        drift=each_field(Drift, kind=st.sampled_from(DriftKind), index=counts, expected=counts, reported=counts),
        around=excerpts,
    ),
    records.Note: each_field(records.Note, turn=small, code=any_texts, text=any_texts),
    records.Resumed: each_field(records.Resumed, times=small),
    records.Ended: each_field(
        records.Ended,
        end=ends,
        reward_result=results,
        total_ms=numbers,
        queued_ms=numbers,
        warnings=st.lists(warnings, max_size=2).map(tuple),
        reward_rule=st.sampled_from(RewardRule),
        policy_step=steps,
    ),
}


def entries(record: st.SearchStrategy[Any]) -> st.SearchStrategy[Entry]:
    """Entries with these records."""
    return each_field(Entry, sequence=counts, time=numbers, record=record, turn=small, segment_id=texts)


targets = each_field(
    Target,
    url=texts.map(lambda url: url.rstrip("/")),
    dialect=st.sampled_from(Dialect),
    replays_turn_keys=st.booleans(),
    model=texts,
)
specs = each_field(
    Spec,
    rollout_id=texts,
    messages=many_messages,
    completions=targets,
    group_id=texts,
    agent=texts,
    typed=st.booleans(),
    outcome=st.none() | targets,
    tools=st.none() | targets,
    sampling=samplings,
    limits=each_field(
        Limits,
        turns=st.none() | small,
        generated_tokens=st.none() | counts,
        seconds=st.none() | numbers,
        calls_per_turn=st.none() | small,
        tool_turns=st.none() | small,
        bytes=st.none() | counts,
    ),
    tokenizer=st.none() | each_field(TokenizerName, name=texts, revision=texts, template_kwargs_json=texts),
    on_drift=st.none() | st.sampled_from(DriftPolicy),
    on_interrupt=st.sampled_from(InterruptPolicy),
    token_mode=st.integers(0, 3),
    cancel_after_detach=st.none() | numbers,
    priority=st.integers(-(2**31), 2**31 - 1),
    metadata_json=texts,
    labels=st.dictionaries(texts, texts, max_size=4),
    source_json=texts,
    train_on=st.none() | st.frozensets(st.sampled_from(FailureClass)),
    group_index=st.none() | small,
    models=st.dictionaries(texts, targets, max_size=4),
    staleness=st.none() | each_field(Staleness, max_lag=counts, action=st.sampled_from(StaleAction)),
)
credentials = each_field(
    Credentials,
    completions=texts,
    outcome=texts,
    tools=texts,
    models=st.dictionaries(texts, texts, max_size=3),
)
starts = each_field(
    AcceptedStart,
    uid=texts,
    request=each_field(
        StartRequest,
        spec=specs,
        caller=texts,
        request_id=texts,
        until_received=st.booleans(),
        credentials=credentials,
        trace=st.builds(TraceContext, texts, texts),
    ),
    fingerprint=texts,
    agent_version=texts,
    created=numbers,
)
