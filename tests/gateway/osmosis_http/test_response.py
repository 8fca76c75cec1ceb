import json
from typing import Any

import pytest
from osmosis.rollout.v1 import message_pb2, outcome_pb2
from osmosis.rollout.v1.rollout_service_pb2 import ListToolsResponse
from rollout_gateway.message_json import message_json
from rollout_gateway.osmosis_http.outcome import rollout_response
from rollout_gateway.rest.proto_json import response_json

from tests.support.scripted_server import json_messages, stopped


def answer(outcome: outcome_pb2.Outcome, **more: Any) -> dict[str, Any]:
    return dict(json.loads(rollout_response("r", outcome, **more)))


def failure(category: int, **more: Any) -> outcome_pb2.Outcome:
    return outcome_pb2.Outcome(failure=outcome_pb2.Failure(category=category, message="went wrong", **more))  # type: ignore[arg-type]


def test_a_completed_rollout() -> None:
    outcome = stopped('{"role":"user","content":"a"}', '{"role":"assistant","n":18446744073709551617,"n":1.50}')
    outcome.stop.reason = "max_turns"
    outcome.metrics.CopyFrom(
        outcome_pb2.Metrics(
            total_ms=12.5,
            completion_ms=10,
            tool_ms=1.25,
            turns=2,
            tool_calls=3,
            prompt_tokens=100,
            generated_tokens=20,
            max_context_tokens=80,
            queued_ms=9,
        )
    )
    text = rollout_response("r/1", outcome).decode()
    assert '[{"role":"user","content":"a"},{"role":"assistant","n":18446744073709551617,"n":1.50}]' in text
    found = json.loads(text)
    assert found.pop("final_messages")
    assert found == {
        "rollout_id": "r/1",
        "status": "COMPLETED",
        "finish_reason": "max_turns",
        "error_message": None,
        "metrics": {
            "total_latency_ms": 12.5,
            "llm_latency_ms": 10.0,
            "tool_latency_ms": 1.25,
            "num_llm_calls": 2,
            "num_tool_calls": 3,
            "prompt_tokens": 100,
            "response_tokens": 20,
            "max_context_tokens": 80,
        },
        "extra_fields": {},
    }


def test_a_failed_rollout_keeps_its_metrics_and_no_messages() -> None:
    outcome = failure(outcome_pb2.FAILURE_CATEGORY_TRAINER_SERVER, http_status=503, turn=2)
    outcome.messages.extend(json_messages(['{"role":"user"}']))
    outcome.metrics.turns = 1
    found = answer(outcome)
    assert (found["status"], found["finish_reason"], found["final_messages"]) == ("ERROR", "error", [])
    assert found["error_message"] == "went wrong"
    assert found["metrics"]["num_llm_calls"] == 1
    assert found["extra_fields"] == {"error_category": "trainer_server_error", "http_status": 503}


WORDS = {
    "TOKENIZER": "tokenizer_error",
    "NETWORK": "network_error",
    "RATE_LIMITED": "rate_limited",
    "TRAINER_SERVER": "trainer_server_error",
    "TRAINER_CLIENT": "trainer_client_error",
    "TOOL": "tool_error",
    "VALIDATION": "validation_error",
    "INTERNAL": "internal_error",
    "TIMEOUT": "timeout",
    "INTERRUPTED": "interrupted",
    "TOKEN_DRIFT": "token_drift",
    "NOT_REPLAYABLE": "internal_error",
    "ENGINE_SERVER": "engine_server_error",
    "ENGINE_CLIENT": "engine_client_error",
    "UNSPECIFIED": "internal_error",
}


@pytest.mark.parametrize("name", outcome_pb2.FailureCategory.keys())
def test_every_category_has_its_word(name: str) -> None:
    outcome = failure(outcome_pb2.FailureCategory.Value(name))
    assert answer(outcome)["extra_fields"] == {"error_category": WORDS[name.removeprefix("FAILURE_CATEGORY_")]}


def test_a_category_of_the_future_and_a_missing_end_read_as_internal() -> None:
    assert answer(failure(99))["extra_fields"]["error_category"] == "internal_error"
    endless = answer(outcome_pb2.Outcome())
    assert (endless["status"], endless["extra_fields"]) == ("ERROR", {"error_category": "internal_error"})
    assert endless["error_message"]


@pytest.mark.parametrize("reason", ["detached", ""])
def test_a_cancelled_rollout_says_why(reason: str) -> None:
    found = answer(outcome_pb2.Outcome(cancellation=outcome_pb2.Cancellation(reason=reason)))
    assert (found["status"], found["extra_fields"]) == ("ERROR", {"error_category": "cancelled"})
    assert "cancelled" in found["error_message"]
    assert reason in found["error_message"]


def test_extra_fields_hold_what_there_is() -> None:
    outcome = stopped()
    outcome.reward = 0.0
    outcome.scores.update({"style": 0.5, "answer": 1.0})
    outcome.stop.truncated = True
    outcome.extra_json = '{"tries": 18446744073709551617, "reward": "mine", "note" : {"a" : 1}}'
    outcome.warnings.add(code="token_drift", message="parted", turn=2, index=0)
    outcome.warnings.add(code="unverified", message="no ids", turn=1)
    extra = answer(outcome, trace=[])["extra_fields"]
    assert extra == {
        "tries": 18446744073709551617,
        "note": {"a": 1},
        "reward": 0.0,
        "scores": {"answer": 1.0, "style": 0.5},
        "truncated": True,
        "warnings": [
            {"code": "token_drift", "message": "parted", "turn": 2, "index": 0},
            {"code": "unverified", "message": "no ids", "turn": 1},
        ],
        "trace": [],
    }


def test_an_extra_that_is_no_object_does_not_cost_the_outcome() -> None:
    outcome = stopped('{"role":"user"}')
    outcome.extra_json = "[1"
    assert answer(outcome)["extra_fields"] == {}


def chat(**fields: Any) -> Any:
    return json.loads(bytes(message_json(message_pb2.Message(chat=message_pb2.ChatMessage(**fields)))))


def text(value: str) -> message_pb2.ContentPart:
    return message_pb2.ContentPart(text=value)


def blob(media_type: str, **source: Any) -> message_pb2.ContentPart:
    return message_pb2.ContentPart(blob=message_pb2.Blob(media_type=media_type, **source))


def test_typed_messages_are_written_out() -> None:
    call = message_pb2.ToolCall(id="c", name="add", arguments_json='{"a": 1')
    assert chat(role="assistant", tool_calls=[call], reasoning="hm", name="") == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1'}}],
        "name": "",
    }
    tool = chat(role="tool", parts=[text("8")], tool_call_id="c", name="add")
    assert tool == {"role": "tool", "content": "8", "tool_call_id": "c", "name": "add"}


def test_typed_parts_are_written_out() -> None:
    parts = [
        text("a"),
        blob("image/png", inline=b"\x00\x01"),
        blob("image/png", uri="https://host/i.png"),
        blob("audio/wav", inline=b"\x02"),
        blob("application/pdf", uri="data:application/pdf;base64,AA=="),
        message_pb2.ContentPart(json='{"type":"video","n":18446744073709551617}'),
    ]
    assert chat(role="user", parts=parts)["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAE="}},
        {"type": "image_url", "image_url": {"url": "https://host/i.png"}},
        {"type": "input_audio", "input_audio": {"data": "Ag==", "format": "wav"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA=="}},
        {"type": "video", "n": 18446744073709551617},
    ]


def test_tools_carry_their_schema_verbatim_and_strict_only_where_it_is() -> None:
    schema = '{"type": "object", "properties": {"b": {"maximum": 18446744073709551617}, "a": {}}}'
    plain = message_pb2.Tool(name="add", description="Add", parameters_json_schema=schema)
    strict = message_pb2.Tool(name="now", strict=True)
    text = response_json(ListToolsResponse(tools=[plain, strict])).decode()
    assert f'"parameters":{schema}' in text
    first, second = json.loads(text)["tools"]
    assert first == {
        "type": "function",
        "function": {"name": "add", "description": "Add", "parameters": json.loads(schema)},
    }
    assert second["function"] == {
        "name": "now",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
        "strict": True,
    }
