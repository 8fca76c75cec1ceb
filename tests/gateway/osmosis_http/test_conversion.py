import json
from typing import Any

import pytest
from osmosis.rollout.v1 import spec_pb2
from osmosis.rollout.v1.event_pb2 import EVENT_DETAIL_OUTCOME
from osmosis.rollout.v1.rollout_service_pb2 import REQUEST_MEMORY_UNTIL_RECEIVED, RunRolloutRequest
from rollout_gateway.json_body import read_body
from rollout_gateway.osmosis_http.body import Hints, RolloutBody
from rollout_gateway.osmosis_http.conversion import limits, run_request
from rollout_gateway.settings import GatewaySettings

from tests.support.example_bodies import EXAMPLE


def asked(settings: GatewaySettings | None = None, **changes: Any) -> RunRolloutRequest:
    content = json.dumps({**EXAMPLE, **changes}).encode()
    return run_request(read_body(content, RolloutBody, 1 << 20), settings or GatewaySettings())


def spec(settings: GatewaySettings | None = None, **changes: Any) -> spec_pb2.RolloutSpec:
    return asked(settings, **changes).start.spec


def test_a_body_becomes_the_request_of_the_contract() -> None:
    request = asked(callback_api_key="callback-secret", tokenizer_revision="main", server_url="http://trainer:8081/")
    start = request.start
    assert (request.detail, request.after_sequence) == (EVENT_DETAIL_OUTCOME, 0)
    assert (start.request_id, start.request_memory) == ("test-rollout-001", REQUEST_MEMORY_UNTIL_RECEIVED)
    assert start.credentials.completions_bearer == "callback-secret"
    assert "callback-secret" not in str(start.spec)
    assert start.spec.rollout_id == "test-rollout-001"
    assert [json.loads(message.json) for message in start.spec.messages] == EXAMPLE["messages"]
    assert start.spec.completions == spec_pb2.Target(url="http://trainer:8081", dialect=spec_pb2.DIALECT_HTTP_MASKED)
    assert start.spec.sampling == spec_pb2.Sampling(temperature=0.7, top_p=0.9, max_tokens=512, logprobs=True)
    assert start.spec.limits == spec_pb2.Limits(turns=10, generated_tokens=8192)
    assert start.spec.tokenizer == spec_pb2.Tokenizer(name="Qwen/Qwen3-8B", revision="main")
    assert start.spec.cancel_after_detach.ToTimedelta().total_seconds() == 10
    unset = ("tools", "outcome")
    assert not any(start.spec.HasField(name) for name in unset)  # type: ignore[arg-type]
    assert (start.spec.agent, start.spec.metadata_json, start.spec.on_drift) == ("", "", 0)


def test_defaults_of_sampling_are_sent_as_values() -> None:
    sampling = spec(sampling_params={"stop": ["a", "b"]}).sampling
    assert sampling == spec_pb2.Sampling(temperature=1, top_p=1, max_tokens=512, stop=["a", "b"], logprobs=True)
    assert all(sampling.HasField(name) for name in ("temperature", "top_p", "max_tokens", "logprobs"))


def test_hints_lower_limits_and_never_raise_them() -> None:
    lower = spec(metadata={"max_assistant_turns": 3, "budget_tokens": 100, "max_user_turns": 2}).limits
    assert lower == spec_pb2.Limits(turns=3, generated_tokens=100, tool_turns=2)
    higher = spec(metadata={"max_assistant_turns": 10**30, "budget_tokens": 10**30, "max_user_turns": 10**30}).limits
    assert higher == spec_pb2.Limits(turns=10, generated_tokens=8192, tool_turns=2**32 - 1)


def test_the_time_limit_is_the_requests_else_the_servers() -> None:
    assert spec(metadata={"timeout_seconds": 1.5}).limits.time.ToMilliseconds() == 1500
    assert not spec(metadata={}).limits.HasField("time")


@pytest.mark.parametrize(("seconds", "nanos"), [(0.0, 0), (0.25, 250_000_000)])
def test_a_grace_time_below_a_second_arrives(seconds: float, nanos: int) -> None:
    found = spec(GatewaySettings(detach_grace_seconds=seconds))
    assert found.HasField("cancel_after_detach")
    assert (found.cancel_after_detach.seconds, found.cancel_after_detach.nanos) == (0, nanos)


def test_metadata_names_agent_template_switches_and_drift_policy() -> None:
    metadata = {"agent": "calculator", "chat_template_kwargs": {"enable_thinking": False}, "on_drift": "fail"}
    found = spec(metadata=metadata)
    assert (found.agent, found.on_drift) == ("calculator", spec_pb2.DRIFT_POLICY_FAIL)
    assert found.tokenizer.template_kwargs_json == '{"enable_thinking": false}'
    assert json.loads(found.metadata_json) == metadata
    assert spec(metadata={"on_drift": "warn"}).on_drift == spec_pb2.DRIFT_POLICY_WARN


@pytest.mark.parametrize("url", [None, "", "http://tools:1", "tools"])
def test_tool_servers_that_speak_no_grpc_are_ignored(url: str | None) -> None:
    assert not spec(tool_server_url=url).HasField("tools")


def test_a_grpc_tool_server_is_passed_on() -> None:
    expected = spec_pb2.Target(url="grpcs://tools:1", dialect=spec_pb2.DIALECT_GRPC)
    assert spec(tool_server_url="grpcs://tools:1").tools == expected


@pytest.mark.parametrize(("seconds", "nanos"), [(2.3, 2_300_000_000), (0.1, 100_000_000), (1e-9, 1), (1e8, 10**17)])
def test_seconds_are_rounded_to_nanoseconds(seconds: float, nanos: int) -> None:
    bounds = limits(1, 1, Hints(timeout_seconds=seconds))
    assert bounds.time.ToNanoseconds() == nanos
