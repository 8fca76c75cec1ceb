"""Bodies of `POST /v1/rollout/init`, and the gRPC requests that they become."""

import json
from typing import Any

import pytest
from osmosis.rollout.v1 import spec_pb2
from osmosis.rollout.v1.rollout_service_pb2 import REQUEST_MEMORY_UNSPECIFIED, StartRolloutRequest
from rollout_gateway.json_body import InvalidBody, ParsedBody, read_body
from rollout_gateway.osmosis_http.body import InitBody, RolloutBody
from rollout_gateway.osmosis_http.conversion import init_fields, init_request
from rollout_gateway.status import body_location

from tests.support.example_bodies import EXAMPLE, INIT_EXAMPLE
from tests.support.transcripts import exchanges, scenarios

LIMIT = 1 << 20
REQUIRED = ("rollout_id", "server_url", "messages", "completion_params")


def body(**changes: Any) -> dict[str, Any]:
    return {**{key: INIT_EXAMPLE[key] for key in REQUIRED}, **changes}


def parse(value: Any, limit: int = LIMIT) -> ParsedBody[InitBody]:
    return read_body(value if isinstance(value, bytes) else json.dumps(value).encode(), InitBody, limit)


def asked(**changes: Any) -> StartRolloutRequest:
    return init_request(parse(body(**changes)))


def sampled(params: Any) -> spec_pb2.Sampling:
    """The sampling parameters sent to a trainer; `params` is an object or its JSON text."""
    text = params if isinstance(params, str) else json.dumps(params)
    content = json.dumps(body(completion_params="HERE")).replace('"HERE"', text)
    return init_request(parse(content.encode())).spec.sampling


def locations(value: Any, limit: int = LIMIT) -> list[tuple[Any, ...]]:
    with pytest.raises(InvalidBody) as caught:
        parse(value, limit)
    assert all(each["msg"] and each["type"] and "input" not in each for each in caught.value.violations)
    return [each["loc"] for each in caught.value.violations]


DEFAULTS = spec_pb2.Sampling(temperature=1, top_p=1, max_tokens=512, logprobs=True)


def test_a_body_becomes_the_call_of_the_contract() -> None:
    start = asked(server_url="http://trainer:8081/", api_key="callback-secret", metadata={"ground_truth": "16"})
    spec = start.spec
    assert (start.request_id, start.request_memory) == ("test-rollout-002", REQUEST_MEMORY_UNSPECIFIED)
    assert (start.credentials.completions_bearer, start.credentials.outcome_bearer) == ("callback-secret",) * 2
    assert "callback-secret" not in str(spec)
    assert spec.rollout_id == "test-rollout-002"
    assert [json.loads(message.json) for message in spec.messages] == INIT_EXAMPLE["messages"]
    trainer = spec_pb2.Target(url="http://trainer:8081", dialect=spec_pb2.DIALECT_HTTP_PLAIN)
    assert (spec.completions, spec.outcome) == (trainer, trainer)
    assert spec.sampling == spec_pb2.Sampling(temperature=0.7, top_p=0.9, max_tokens=512, logprobs=True)
    assert spec.limits == spec_pb2.Limits(turns=10, generated_tokens=8192)
    assert json.loads(spec.metadata_json) == {"ground_truth": "16"}
    unset = ("tools", "tokenizer", "cancel_after_detach")
    assert not any(spec.HasField(name) for name in unset)  # type: ignore[arg-type]
    assert (spec.agent, spec.on_drift) == ("", spec_pb2.DRIFT_POLICY_UNSPECIFIED)


def test_keys_do_not_show() -> None:
    parsed = parse(body(api_key="callback-secret"))
    assert parsed.body.api_key == "callback-secret"
    assert "callback-secret" not in repr(parsed)
    other = read_body(json.dumps({**EXAMPLE, "callback_api_key": "callback-secret"}).encode(), RolloutBody, LIMIT)
    assert other.body.callback_api_key == "callback-secret"
    assert "callback-secret" not in repr(other)


def test_null_counts_as_absent() -> None:
    optional = ("tool_server_url", "max_turns", "max_tokens_total", "metadata", "api_key", "idempotency_key")
    assert asked(**dict.fromkeys(optional)) == asked()
    assert asked(metadata={"agent": None, "on_drift": None, "budget_tokens": None}).spec.limits == asked().spec.limits


@pytest.mark.parametrize(
    ("key", "request_id", "place"),
    [
        ("mine", "mine", "idempotency_key"),
        ("", "test-rollout-002", "rollout_id"),
        (" \n", "test-rollout-002", "rollout_id"),
        ("x" * 256, "x" * 256, "idempotency_key"),
    ],
)
def test_the_idempotency_key_is_the_request_id_where_there_is_one(key: str, request_id: str, place: str) -> None:
    parsed = parse(body(idempotency_key=key))
    assert init_request(parsed).request_id == request_id
    assert body_location("request_id", init_fields(parsed.body)) == ("body", place)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"rollout_id": ""}, ("rollout_id",)),
        ({"rollout_id": "\u2003\n"}, ("rollout_id",)),
        ({"rollout_id": "x" * 257}, ("rollout_id",)),
        ({"rollout_id": None}, ("rollout_id",)),
        ({"rollout_id": 7}, ("rollout_id",)),
        ({"server_url": "ftp://t"}, ("server_url",)),
        ({"server_url": "http://"}, ("server_url",)),
        ({"server_url": "http://[::1"}, ("server_url",)),
        ({"messages": None}, ("messages",)),
        ({"messages": {}}, ("messages",)),
        ({"messages": ["hi"]}, ("messages", 0)),
        ({"messages": [{"role": "user"}, {"content": "hi"}]}, ("messages", 1, "role")),
        ({"messages": [{"role": None}]}, ("messages", 0, "role")),
        ({"messages": [{"role": " "}]}, ("messages", 0, "role")),
        ({"completion_params": None}, ("completion_params",)),
        ({"completion_params": []}, ("completion_params",)),
        ({"max_turns": "many"}, ("max_turns",)),
        ({"max_turns": 2.5}, ("max_turns",)),
        ({"max_tokens_total": []}, ("max_tokens_total",)),
        ({"tool_server_url": 3}, ("tool_server_url",)),
        ({"api_key": 3}, ("api_key",)),
        ({"idempotency_key": 3}, ("idempotency_key",)),
        ({"idempotency_key": "x" * 257}, ("idempotency_key",)),
        ({"metadata": []}, ("metadata",)),
        ({"metadata": {"agent": 3}}, ("metadata", "agent")),
        ({"metadata": {"on_drift": "repair"}}, ("metadata", "on_drift")),
        ({"metadata": {"timeout_seconds": 0}}, ("metadata", "timeout_seconds")),
        ({"metadata": {"max_assistant_turns": 0}}, ("metadata", "max_assistant_turns")),
    ],
)
def test_a_bad_value_is_named(changes: dict[str, Any], place: tuple[Any, ...]) -> None:
    assert locations(body(**changes)) == [("body", *place)]


@pytest.mark.parametrize("key", REQUIRED)
def test_what_is_missing_is_named(key: str) -> None:
    assert locations({name: value for name, value in body().items() if name != key}) == [("body", key)]


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_id": "a/b ünï 'c"},
        {"messages": []},
        {"messages": [{"role": "robot", "content": 3, "tool_calls": "none", "vendor": {"a": None}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": 1}}}]}]},
        {"completion_params": {}},
        {"metadata": {"chat_template_kwargs": [], "debug_trace": "maybe", "anything": [1]}},
        {"future_field": {"x": 1}, "tokenizer_name": 3},
    ],
)
def test_what_the_page_allows_is_allowed(changes: dict[str, Any]) -> None:
    parse(body(**changes))


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b'{"rollout_id": }', b'{"a": NaN}', b"[" * 100_000, b"\xff"])
def test_what_is_not_a_json_object_is_refused(content: bytes) -> None:
    assert {place[0] for place in locations(content)} == {"body"}


@pytest.mark.parametrize(
    ("given", "turns", "tokens"),
    [(0, 0, 0), (-1, 0, 0), (10**12, 2**32 - 1, 10**12), (10**30, 2**32 - 1, 2**64 - 1), ("7", 7, 7), (3.0, 3, 3)],
)
def test_limits_have_no_bounds_but_the_contracts(given: Any, turns: int, tokens: int) -> None:
    limits = asked(max_turns=given, max_tokens_total=given).spec.limits
    assert (limits.turns, limits.generated_tokens) == (turns, tokens)
    assert limits.HasField("turns")
    assert limits.HasField("generated_tokens")


def test_a_limit_of_more_digits_than_python_converts_is_clamped() -> None:
    content = json.dumps(body(max_turns="HERE", max_tokens_total="HERE")).replace('"HERE"', "9" * 5_000)
    limits = init_request(parse(content.encode())).spec.limits
    assert (limits.turns, limits.generated_tokens) == (2**32 - 1, 2**64 - 1)


def test_metadata_means_what_it_means_in_the_other_dialect() -> None:
    hints = {"max_assistant_turns": 3, "budget_tokens": 100, "max_user_turns": 10**30, "timeout_seconds": 1.5}
    spec = asked(metadata={**hints, "agent": "calculator", "on_drift": "fail"}).spec
    assert spec.limits.time.ToMilliseconds() == 1500
    spec.limits.ClearField("time")
    assert spec.limits == spec_pb2.Limits(turns=3, generated_tokens=100, tool_turns=2**32 - 1)
    assert (spec.agent, spec.on_drift) == ("calculator", spec_pb2.DRIFT_POLICY_FAIL)
    assert asked(max_turns=1, metadata=hints).spec.limits.turns == 1


def test_metadata_over_the_limit_is_refused_by_its_size_in_the_body() -> None:
    text = '{"k" :   "äöü", "n": 18446744073709551617}'
    content = json.dumps(body(metadata="HERE")).replace('"HERE"', text).encode()
    assert parse(content, len(text.encode())).text("metadata") == text
    assert locations(content, len(text.encode()) - 1) == [("body", "metadata")]


def test_a_grpc_tool_server_is_passed_on_and_any_other_ignored() -> None:
    expected = spec_pb2.Target(url="grpcs://tools:1", dialect=spec_pb2.DIALECT_GRPC)
    assert asked(tool_server_url="grpcs://tools:1").spec.tools == expected
    assert not asked(tool_server_url="http://tools:1").spec.HasField("tools")


@pytest.mark.parametrize("params", [{}, dict.fromkeys(("temperature", "top_p", "max_tokens", "stop", "logprobs"))])
def test_parameters_have_the_dialects_defaults(params: dict[str, Any]) -> None:
    assert sampled(params) == DEFAULTS


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({"temperature": 0, "top_p": 0, "max_tokens": 1, "logprobs": False}, None),
        ({"temperature": 2, "top_p": 1, "max_tokens": 2**31 - 1, "stop": ["a"] * 64}, None),
        ({"temperature": "0.7", "max_tokens": "16"}, {"temperature": 0.7, "max_tokens": 16}),
        ({"max_tokens": 16.0, "logprobs": "false"}, {"max_tokens": 16, "logprobs": False}),
        ({"stop": "END"}, {"stop": ["END"]}),
        ({"stop": []}, {}),
    ],
)
def test_what_the_contract_can_carry_goes_into_its_fields(
    params: dict[str, Any], fields: dict[str, Any] | None
) -> None:
    expected = spec_pb2.Sampling()
    expected.CopyFrom(DEFAULTS)
    for name, value in (params if fields is None else fields).items():
        if name == "stop":
            expected.stop.extend(value)
        else:
            setattr(expected, name, value)
    assert sampled(params) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", '"hot"'),
        ("temperature", "3.0"),
        ("temperature", "-1"),
        ("temperature", "1e400"),
        ("temperature", '"inf"'),
        ("temperature", "[ 1 ]"),
        ("top_p", "1.10"),
        ("top_p", "{}"),
        ("max_tokens", "0"),
        ("max_tokens", "-1"),
        ("max_tokens", "2147483648"),
        ("max_tokens", "18446744073709551617"),
        ("max_tokens", "512.5"),
        ("max_tokens", '"many"'),
        ("stop", "5"),
        ("stop", '["a", 1]'),
        ("stop", json.dumps(["a"] * 65)),
        ("logprobs", "5"),
        ("logprobs", '"perhaps"'),
        ("logprobs", "[]"),
    ],
)
def test_what_it_cannot_carry_goes_on_as_it_was_written(name: str, text: str) -> None:
    sampling = sampled(f'{{"{name}" : {text}}}')
    assert sampling.extra_json == f'{{"{name}":{text}}}'
    sampling.ClearField("extra_json")
    expected = spec_pb2.Sampling()
    expected.CopyFrom(DEFAULTS)
    expected.ClearField(name)  # type: ignore[arg-type]
    assert sampling == expected


def test_a_number_that_came_as_text_goes_on_as_a_number() -> None:
    assert sampled({"temperature": "3.0", "max_tokens": "-1"}).extra_json == '{"temperature":3.0,"max_tokens":-1}'


def test_other_parameters_go_on_as_they_were_written() -> None:
    text = (
        '{"model": "m", "seed" : 18446744073709551617, "top_k":40, "x": {"b" : 1.50, "a":[ ]}, "tools": [], "n": null}'
    )
    assert sampled(text).extra_json == (
        '{"model":"m","seed":18446744073709551617,"top_k":40,"x":{"b" : 1.50, "a":[ ]},"tools":[],"n":null}'
    )


def test_what_the_protocol_sets_itself_is_ignored() -> None:
    ignored = {"messages": [], "rollout_id": "x", "response_mask": [1], "stream": True, "stream_options": {}}
    assert sampled(ignored) == DEFAULTS
    assert sampled({**ignored, "seed": 7}).extra_json == '{"seed":7}'


def test_of_a_repeated_parameter_the_last_one_counts() -> None:
    assert sampled('{"temperature": "hot", "\\u0074emperature": 0.5}').temperature == 0.5
    assert sampled('{"seed": 1, "seed": 2}').extra_json == '{"seed":2}'


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("spec.completions.url", ("server_url",)),
        ("spec.outcome.url", ("server_url",)),
        ("spec.outcome", ("server_url",)),
        ("spec.sampling.temperature", ("completion_params", "temperature")),
        ("spec.sampling.extra_json", ("completion_params",)),
        ("spec.messages[2].json", ("messages", 2)),
        ("spec.agent", ("metadata", "agent")),
        ("spec.limits.time", ("metadata", "timeout_seconds")),
        ("spec.limits.turns", ("max_turns",)),
        ("spec.tools.url", ("tool_server_url",)),
        ("spec.metadata_json", ("metadata",)),
        ("credentials.completions_bearer", ("api_key",)),
        ("credentials.outcome_bearer", ("api_key",)),
        ("credentials", ("api_key",)),
        ("spec.rollout_id", ("rollout_id",)),
    ],
)
def test_fields_of_the_contract_are_told_in_the_bodys_words(path: str, place: tuple[Any, ...]) -> None:
    assert body_location(path, init_fields(parse(body()).body)) == ("body", *place)


def test_every_recorded_body_is_valid_that_was_taken() -> None:
    for scenario in scenarios("", "init"):
        for exchange in exchanges(scenario, "init"):
            if exchange["to"] == "server" and exchange["status"] == 202:
                parsed = parse(exchange["request"])
                assert [json.loads(text) for text in parsed.messages] == exchange["request"]["messages"]


@pytest.mark.parametrize("scenario", [*scenarios("invalid_body_", "init"), "metadata_too_large"])
def test_every_recorded_invalid_body_is_refused_at_the_recorded_place(scenario: str) -> None:
    (exchange,) = exchanges(scenario, "init")
    assert exchange["status"] == 422
    if isinstance(exchange["request"], str):
        assert locations(exchange["request"].encode())[0][0] == "body"
    elif scenario != "metadata_too_large":
        assert locations(exchange["request"]) == [tuple(each["loc"]) for each in exchange["response"]["detail"]]
    else:
        assert locations(exchange["request"]) == [("body", "metadata")]
