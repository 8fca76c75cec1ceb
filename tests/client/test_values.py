"""Arguments become fields of the contract, or are refused by name before anything is sent."""

from __future__ import annotations

import json
import math
from collections import UserDict
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from google.protobuf.message import Message as AnyMessage
from osmosis.rollout.v1 import event_pb2, message_pb2, outcome_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import Credentials, Limits, Sampling, SelectionFields, StartFields, Target, Tokenizer, enums
from rollout_client.proto_fields import build, duration, duration_seconds, keywords
from rollout_client.requests import (
    Pages,
    explicit_selection,
    get_request,
    prompt_request,
    watch_request,
)
from rollout_client.spec import rollout_spec, start_request

HELLO = {"role": "user", "content": "Grüße 🌍"}
NEEDED: dict[str, Any] = {"messages": [HELLO], "completions": "http://trainer:8081"}


def spec_of(**fields: Any) -> spec_pb2.RolloutSpec:
    return start_request(None, NEEDED | fields).spec


@pytest.mark.parametrize(
    ("typed", "message", "aside"),
    [
        (Sampling, spec_pb2.Sampling, set()),
        (Limits, spec_pb2.Limits, set()),
        (Target, spec_pb2.Target, set()),
        (Tokenizer, spec_pb2.Tokenizer, set()),
        (Credentials, spec_pb2.Credentials, set()),
        (SelectionFields, pb.Selection, {"uid", "rollout_id", "state", "delivery_state", "caller", "failure_class"}),
    ],
)
def test_the_typed_keywords_are_the_fields_of_the_contract(
    typed: type, message: type[AnyMessage], aside: set[str]
) -> None:
    assert set(typed.__annotations__) - aside == keywords(message)


def test_the_keywords_of_a_start_are_those_of_the_spec_and_of_what_goes_beside_it() -> None:
    # Only the gateway sets these two: tools in the asynchronous API's format, and the fields of another protocol.
    beside = keywords(pb.StartRolloutRequest) - {"spec", "include_function_tools"}
    spec = keywords(spec_pb2.RolloutSpec) - {"source", "staleness"}
    assert set(get_type_hints(StartFields)) == spec | beside | {"max_lag", "on_stale"}


@pytest.mark.parametrize(
    ("literal", "enum"),
    [
        (enums.Dialect, spec_pb2.Dialect),
        (enums.TokenMode, spec_pb2.TokenMode),
        (enums.DriftPolicy, spec_pb2.DriftPolicy),
        (enums.InterruptPolicy, spec_pb2.InterruptPolicy),
        (enums.StaleAction, spec_pb2.StaleAction),
        (enums.FailureClass, outcome_pb2.FailureClass),
        (enums.State, pb.RolloutState),
        (enums.DeliveryState, pb.DeliveryState),
        (enums.View, pb.RolloutView),
        (enums.Detail, event_pb2.EventDetail),
    ],
)
def test_the_words_are_those_of_the_contract(literal: Any, enum: Any) -> None:
    words = enums.enum_names(enum.DESCRIPTOR)
    assert get_args(literal) == tuple(words.values())
    assert [enums.enum_values(enum.DESCRIPTOR)[word] for word in words.values()] == list(words)
    assert sorted([0, *words]) == sorted(enum.values())


def test_every_field_of_a_spec_arrives() -> None:
    spec = spec_of(
        rollout_id="r/1",
        group_id="g",
        agent="calculator",
        outcome=Target("http://trainer", dialect="http_plain", replays_turn_keys=True),
        tools={"url": "grpc://tools:1"},
        sampling={
            "temperature": 0,
            "top_p": 0.5,
            "max_tokens": 7,
            "stop": ["a"],
            "logprobs": True,
            "extra": {"k": 2**70},
        },
        limits={"turns": 3, "generated_tokens": 4, "time": 1.5, "calls_per_turn": 5, "tool_turns": 0, "bytes": 2**40},
        tokenizer=Tokenizer("Qwen/Qwen3-8B", revision="main", template_kwargs={"enable_thinking": False}),
        token_mode="messages",
        on_drift="fail",
        on_interrupt="resume",
        cancel_after_detach=timedelta(minutes=2),
        priority=-1,
        metadata={"b": [1, None], "a": "ü"},
        labels={"run": "7"},
        train_on={"engine"},
        max_lag=2,
        on_stale="split",
        models={"judge": Target("http://judge:1", model="m"), "user": {"url": "http://user:1", "dialect": "vllm"}},
    )
    assert spec == spec_pb2.RolloutSpec(
        rollout_id="r/1",
        group_id="g",
        agent="calculator",
        messages=[message_pb2.Message(json='{"role": "user", "content": "Grüße 🌍"}')],
        completions=spec_pb2.Target(url="http://trainer:8081"),
        outcome=spec_pb2.Target(url="http://trainer", dialect=spec_pb2.DIALECT_HTTP_PLAIN, replays_turn_keys=True),
        tools=spec_pb2.Target(url="grpc://tools:1"),
        sampling=spec_pb2.Sampling(
            temperature=0,
            top_p=0.5,
            max_tokens=7,
            stop=["a"],
            logprobs=True,
            extra_json='{"k": 1180591620717411303424}',
        ),
        limits=spec_pb2.Limits(
            turns=3,
            generated_tokens=4,
            time={"seconds": 1, "nanos": 500_000_000},  # type: ignore[arg-type]
            calls_per_turn=5,
            tool_turns=0,
            bytes=2**40,
        ),
        staleness=spec_pb2.Staleness(max_lag=2, action=spec_pb2.STALE_ACTION_SPLIT),
        tokenizer=spec_pb2.Tokenizer(
            name="Qwen/Qwen3-8B", revision="main", template_kwargs_json='{"enable_thinking": false}'
        ),
        token_mode=spec_pb2.TOKEN_MODE_MESSAGES,
        on_drift=spec_pb2.DRIFT_POLICY_FAIL,
        on_interrupt=spec_pb2.INTERRUPT_POLICY_RESUME,
        cancel_after_detach={"seconds": 120},  # type: ignore[arg-type]
        priority=-1,
        metadata_json='{"b": [1, null], "a": "ü"}',
        labels={"run": "7"},
        train_on=spec_pb2.TrainOn(classes=[outcome_pb2.FAILURE_CLASS_ENGINE]),
        models={
            "judge": spec_pb2.Target(url="http://judge:1", model="m"),
            "user": spec_pb2.Target(url="http://user:1", dialect=spec_pb2.DIALECT_VLLM),
        },
    )


def test_no_class_is_set_and_a_message_is_taken_as_it_is() -> None:
    assert rollout_spec({"train_on": []}).HasField("train_on")
    assert not rollout_spec({"train_on": None}).HasField("train_on")
    given = spec_pb2.TrainOn(classes=[outcome_pb2.FAILURE_CLASS_TOOL])
    assert rollout_spec({"train_on": given}).train_on == given == rollout_spec({"train_on": "tool"}).train_on


def test_zero_is_a_value_and_none_is_none() -> None:
    sampling = spec_of(sampling={"temperature": 0, "top_p": None}, agent=None, limits=None).sampling
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_p")
    assert not spec_of(limits=None).HasField("limits")


def test_messages_of_every_form() -> None:
    verbatim = '{"role":"user",  "content":"x", "n":1e400}'
    typed = message_pb2.ChatMessage(role="user", parts=[message_pb2.ContentPart(text="x")])
    spec = spec_of(
        messages=(each for each in (HELLO, verbatim, message_pb2.Message(json="{}"), typed, UserDict(HELLO)))
    )
    forms = [message.WhichOneof("form") for message in spec.messages]
    assert forms == ["json", "json", "json", "chat", "json"]
    assert json.loads(spec.messages[0].json) == HELLO
    assert spec.messages[1].json == verbatim
    assert spec.messages[4] == spec.messages[0]


def test_protos_are_taken_for_what_they_are() -> None:
    target, tokenizer = spec_pb2.Target(url="http://t"), spec_pb2.Tokenizer(name="toy")
    spec = spec_of(completions=target, tokenizer=tokenizer, sampling=spec_pb2.Sampling(temperature=1))
    assert (spec.completions, spec.tokenizer, spec.sampling.temperature) == (target, tokenizer, 1)


def test_one_text_is_a_list_of_one_where_texts_are_listed() -> None:
    assert list(spec_of(sampling={"stop": "</s>"}).sampling.stop) == ["</s>"]
    chosen = build(
        pb.Selection, {"state": "running", "uid": "u", "caller": "me", "delivery_states": ["pending", "expired"]}
    )
    assert chosen == pb.Selection(
        states=[pb.ROLLOUT_STATE_RUNNING],
        uids=["u"],
        callers=["me"],
        delivery_states=[pb.DELIVERY_STATE_PENDING, pb.DELIVERY_STATE_EXPIRED],
    )
    assert build(pb.Selection, {"states": "queued"}) == pb.Selection(states=[pb.ROLLOUT_STATE_QUEUED])
    cancelled = pb.Selection(failure_classes=[outcome_pb2.FAILURE_CLASS_CANCELLED])
    assert build(pb.Selection, {"failure_class": "cancelled"}) == cancelled


class Number(float):
    """Like the float subclasses of numerical libraries."""


def test_numbers_of_other_libraries() -> None:
    assert spec_of(sampling={"temperature": Number(0.5)}).sampling.temperature == 0.5
    assert spec_of(cancel_after_detach=0.0000000019).cancel_after_detach.nanos == 2


LOOP: dict[str, Any] = {"role": "user"}
LOOP["content"] = LOOP
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
HALF = "half \ud83d"


def test_metadata_may_have_the_values_of_a_row_of_a_data_frame() -> None:
    row = {"answer": np.int64(5), "scale": np.float32(0.5), "digits": np.arange(2), "deep": [{"true": np.bool_(True)}]}
    metadata = build(spec_pb2.RolloutSpec, {"metadata": row}).metadata_json
    assert json.loads(metadata) == {"answer": 5, "scale": 0.5, "digits": [0, 1], "deep": [{"true": True}]}


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"temprature": 1}, TypeError, "'temprature'"),
        ({"sampling": {"temprature": 1}}, TypeError, "'sampling.temprature'; did you mean 'temperature'"),
        ({"sampling": {"temperature": math.nan}}, ValueError, "sampling.temperature"),
        ({"sampling": {"temperature": 10**400}}, ValueError, "sampling.temperature"),
        ({"sampling": {"temperature": "hot"}}, TypeError, "sampling.temperature"),
        ({"sampling": {"temperature": True}}, TypeError, "sampling.temperature"),
        ({"sampling": {"temperature": Decimal(1)}}, TypeError, "sampling.temperature"),
        ({"sampling": {"max_tokens": 1.0}}, TypeError, "sampling.max_tokens"),
        ({"sampling": {"max_tokens": -1}}, ValueError, "sampling.max_tokens"),
        ({"sampling": {"max_tokens": 2**32}}, ValueError, "sampling.max_tokens"),
        ({"sampling": {"logprobs": 1}}, TypeError, "sampling.logprobs"),
        ({"sampling": {"stop": [1]}}, TypeError, r"sampling.stop\[0\]"),
        ({"sampling": {"stop": {"a": 1}}}, TypeError, "sampling.stop"),
        ({"sampling": {"extra": [1]}}, TypeError, "sampling.extra"),
        ({"sampling": {"extra": {"x": math.inf}}}, ValueError, "sampling.extra"),
        ({"sampling": [("temperature", 1)]}, TypeError, "sampling"),
        ({"sampling": {1: 2}}, TypeError, "sampling"),
        ({"limits": {"time": math.inf}}, ValueError, "limits.time"),
        ({"limits": {"time": 1e300}}, ValueError, "limits.time"),
        ({"limits": {"seconds": 1}}, TypeError, "limits.seconds"),
        ({"priority": 2**31}, ValueError, "priority"),
        ({"max_lag": 2}, TypeError, "max_lag and on_stale"),
        ({"on_stale": "keep"}, TypeError, "max_lag and on_stale"),
        ({"max_lag": -1, "on_stale": "keep"}, ValueError, "max_lag must be from 0"),
        ({"max_lag": 1, "on_stale": "drop"}, ValueError, "on_stale must be one of cancel, mask, split, keep"),
        ({"rollout_id": 7}, TypeError, "rollout_id"),
        ({"group_id": HALF}, ValueError, "group_id"),
        ({"messages": "hello"}, TypeError, "messages must be a list"),
        ({"messages": HELLO}, TypeError, "messages must be a list"),
        ({"messages": [b"{}"]}, TypeError, r"messages\[0\]"),
        ({"messages": [HELLO, {"role": "user", "content": math.nan}]}, ValueError, r"messages\[1\]"),
        ({"messages": [HELLO, {"role": {1}}]}, TypeError, r"messages\[1\]"),
        ({"messages": [LOOP]}, ValueError, r"messages\[0\]"),
        ({"messages": [{"content": DEEP}]}, ValueError, r"messages\[0\]"),
        ({"messages": [{"content": HALF}]}, ValueError, r"messages\[0\]"),
        ({"messages": None}, TypeError, "messages must be given"),
        ({"completions": None, "messages": None}, TypeError, "messages and completions must be given"),
        ({"completions": 8081}, TypeError, "completions"),
        ({"completions": Tokenizer("toy")}, TypeError, "completions.name"),
        (
            {"completions": {"url": "http://t", "dialect": "http"}},
            ValueError,
            "completions.dialect must be one of grpc",
        ),
        ({"completions": {"url": "http://t", "dialect": 2}}, TypeError, "completions.dialect"),
        ({"tokenizer": ["toy"]}, TypeError, "tokenizer must be a str, a mapping of its fields or a Tokenizer"),
        ({"on_drift": "unspecified"}, ValueError, "on_drift must be one of warn, fail"),
        ({"metadata": {"x": object()}}, TypeError, "metadata: a value of type object cannot be written as JSON"),
        ({"metadata": {"x": np.array([math.nan])}}, ValueError, "metadata: "),
        ({"metadata": [1]}, TypeError, "metadata"),
        ({"train_on": 7}, TypeError, "train_on must be a list"),
        ({"train_on": ["policy", "unspecified"]}, ValueError, r"train_on\[1\] must be one of policy"),
        ({"labels": {"a": 1}}, TypeError, r"labels\['a'\]"),
        ({"labels": {1: "a"}}, TypeError, "a key of labels"),
        ({"labels": ["a"]}, TypeError, "labels"),
        ({"cancel_after_detach": "10s"}, TypeError, "cancel_after_detach"),
        ({"request_id": ""}, ValueError, "request_id"),
        ({"request_id": 1}, TypeError, "request_id"),
        ({"request_memory": "forever"}, ValueError, "request_memory"),
        ({"credentials": "key"}, TypeError, "credentials"),
        ({"credentials": {"bearer": "key"}}, TypeError, "credentials.bearer"),
    ],
)
def test_a_wrong_value_is_named(fields: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        start_request(None, NEEDED | fields)


def test_credentials_go_beside_the_spec() -> None:
    sent = spec_pb2.Credentials(completions_bearer="a", tools_bearer="b")
    for given in (
        Credentials(completions_bearer="a", tools_bearer="b"),
        sent,
        {"completions_bearer": "a", "tools_bearer": "b"},
    ):
        assert start_request(None, NEEDED | {"credentials": given}).credentials == sent


def test_secrets_stand_in_no_error_and_no_repr() -> None:
    credentials = Credentials(completions_bearer="hush-1", outcome_bearer="hush-2", tools_bearer=HALF + "hush-3")
    assert "hush" not in repr(credentials)
    with pytest.raises(ValueError, match=r"credentials\.tools_bearer") as caught:
        start_request(None, NEEDED | {"credentials": credentials})
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(TypeError) as wrong:
        start_request(None, NEEDED | {"credentials": {"completions_bearer": ["hush-4"]}})
    assert "hush" not in str(wrong.value)


def test_a_ready_spec_is_sent_as_it_is_and_left_as_it_was() -> None:
    spec = rollout_spec(NEEDED)
    request = start_request(spec, {"request_id": "one"})
    assert (request.request_id, request.spec.rollout_id, spec.rollout_id) == ("one", "one", "")
    with pytest.raises(TypeError, match="'agent' is given beside"):
        start_request(spec, {"agent": "calculator"})
    with pytest.raises(TypeError, match="must be a RolloutSpec, not dict"):
        start_request(NEEDED, {})  # type: ignore[arg-type]


def test_a_prompt_needs_only_messages_and_sends_no_secret() -> None:
    beside = {"request_id": "one", "credentials": Credentials(completions_bearer="hush")}
    request = prompt_request(None, NEEDED | beside)
    assert request == pb.RenderPromptRequest(spec=start_request(None, NEEDED | {"request_id": "one"}).spec)
    assert prompt_request(None, {"messages": [HELLO], "agent": "a"}).spec.agent == "a"
    assert prompt_request(spec_pb2.RolloutSpec(agent="a"), {}).spec.agent == "a"
    with pytest.raises(TypeError, match="messages must be given"):
        prompt_request(None, {"completions": "http://trainer:8081"})


def test_an_id_is_made_up_where_none_is_given() -> None:
    first, second = (start_request(None, NEEDED) for _ in range(2))
    assert first.request_id != second.request_id
    assert first.spec.rollout_id == first.request_id
    named = start_request(None, NEEDED | {"rollout_id": "mine", "request_memory": "until_received"})
    assert named.spec.rollout_id == "mine" != named.request_id
    assert named.request_memory == pb.REQUEST_MEMORY_UNTIL_RECEIVED


def test_views_and_details_are_words() -> None:
    assert get_request("u", "full").view == pb.ROLLOUT_VIEW_FULL
    assert watch_request("u", 3, "outcome").detail == event_pb2.EVENT_DETAIL_OUTCOME
    with pytest.raises(ValueError, match="view must be one of basic, messages, samples, full"):
        get_request("u", "whole")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="uid must be a str"):
        get_request(None, "full")  # type: ignore[arg-type]


def test_nothing_selected_is_not_everything() -> None:
    assert explicit_selection(None, {"all": True}).all
    assert list(explicit_selection("u", {}).uids) == ["u"]
    with pytest.raises(ValueError, match="nothing is selected"):
        explicit_selection(None, {})
    with pytest.raises(ValueError, match="nothing is selected"):
        explicit_selection(None, {"uids": []})
    with pytest.raises(TypeError, match="unknown argument 'sate'"):
        Pages(1, "basic", {"sate": "running"})


@pytest.mark.parametrize(
    ("given", "seconds", "nanos"),
    [
        (2.3, 2, 300_000_000),
        (0.1 + 0.2, 0, 300_000_000),
        (-2.3, -2, -300_000_000),
        (1e-9, 0, 1),
        (100_000_000.3, 100_000_000, 300_000_000),
        (7, 7, 0),
        (Fraction(23, 10), 2, 300_000_000),
        (timedelta(days=100_000, microseconds=1), 8_640_000_000, 1000),
    ],
)
def test_seconds_are_exact_to_the_nanosecond(given: Any, seconds: int, nanos: int) -> None:
    made = duration(given, "time")
    assert (made.seconds, made.nanos) == (seconds, nanos)
    assert duration_seconds(made) == pytest.approx(given.total_seconds() if isinstance(given, timedelta) else given)


def test_two_point_three_seconds_come_back_as_they_were_sent() -> None:
    assert duration_seconds(spec_of(limits={"time": 2.3}).limits.time) == 2.3


def test_a_mapping_of_any_kind_makes_a_message() -> None:
    assert build(spec_pb2.Target, UserDict(url="http://t")).url == "http://t"
