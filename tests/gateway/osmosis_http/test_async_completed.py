"""The body of the asynchronous HTTP API's final callback."""

import json
import subprocess
import sys
from typing import Any

import pytest
from osmosis.rollout.v1 import message_pb2, outcome_pb2
from osmosis.rollout.v1.rollout_service_pb2 import Rollout
from osmosis.rollout.v1.spec_pb2 import RolloutSpec
from rollout_gateway.osmosis_http.outcome import completed_body

from tests.support.scripted_server import json_messages, stopped
from tests.support.transcripts import exchanges, scenarios, without_nulls


def told(outcome: outcome_pb2.Outcome, rollout_id: str = "r") -> dict[str, Any]:
    return dict(json.loads(completed_body(Rollout(spec=RolloutSpec(rollout_id=rollout_id), outcome=outcome))))


def outcome_of(body: dict[str, Any]) -> outcome_pb2.Outcome:
    """The outcome in a recorded callback."""
    outcome = outcome_pb2.Outcome(messages=json_messages(json.dumps(each) for each in body["final_messages"]))
    if body["status"] == "COMPLETED":
        outcome.stop.reason = body["finish_reason"]
    else:
        outcome.failure.message = body["error_message"] or "an empty one says nothing"
    if body.get("reward") is not None:
        outcome.reward = body["reward"]
    metrics = body["metrics"]
    outcome.metrics.turns, outcome.metrics.tool_calls = metrics["num_llm_calls"], metrics["num_tool_calls"]
    outcome.metrics.prompt_tokens = metrics["prompt_tokens"]
    outcome.metrics.generated_tokens = metrics["response_tokens"]
    return outcome


def test_recorded_callbacks_come_out_as_recorded() -> None:
    recorded = [each for scenario in scenarios("", "init") for each in exchanges(scenario, "init")]
    bodies = [each["request"] for each in recorded if each["path"] == "/v1/rollout/completed"]
    assert len(bodies) > 60
    for body in bodies:
        found = without_nulls(told(outcome_of(body), body["rollout_id"]))
        expected = without_nulls(body)
        if body["status"] == "ERROR":
            assert found.pop("error_message")
            assert found["extra_fields"].pop("error_category") == "internal_error"
            expected.pop("error_message", None)
        assert found == expected


def test_what_there_is_not_is_absent() -> None:
    body = told(stopped('{"role":"assistant"}'))
    assert body.keys() == {"rollout_id", "status", "final_messages", "finish_reason", "metrics", "extra_fields"}
    assert (body["status"], body["finish_reason"], body["extra_fields"]) == ("COMPLETED", "stop", {})


def test_messages_are_verbatim_and_the_reward_stands_beside_them() -> None:
    message = '{"role" : "assistant","content":"Hi.", "n":18446744073709551617,"n":1.50}'
    outcome = stopped(message)
    outcome.stop.reason, outcome.stop.truncated, outcome.reward = "max_turns", True, 0.0
    outcome.scores["style"] = 0.5
    outcome.extra_json = '{"reward": "the agent\'s own", "tries": 18446744073709551617}'
    outcome.warnings.add(code="resampled", message="asked twice", turn=1)
    text = completed_body(Rollout(spec=RolloutSpec(rollout_id="r"), outcome=outcome)).decode()
    assert message in text
    body = json.loads(text)
    assert (body["finish_reason"], body["reward"]) == ("max_turns", 0.0)
    assert body["extra_fields"] == {
        "reward": "the agent's own",
        "tries": 18446744073709551617,
        "scores": {"style": 0.5},
        "truncated": True,
        "warnings": [{"code": "resampled", "message": "asked twice", "turn": 1}],
    }


def test_a_finish_reason_that_says_length_is_enough() -> None:
    outcome = stopped('{"role":"assistant"}')
    outcome.stop.reason, outcome.stop.truncated = "length", True
    assert told(outcome)["extra_fields"] == {}


def test_a_failure_tells_what_was_counted_and_no_messages() -> None:
    failure = outcome_pb2.Failure(
        category=outcome_pb2.FAILURE_CATEGORY_TRAINER_SERVER, message="turn 2: HTTP 503", http_status=503, turn=2
    )
    outcome = outcome_pb2.Outcome(failure=failure, messages=json_messages(['{"role":"user"}']))
    outcome.metrics.turns, outcome.metrics.total_ms, outcome.metrics.max_context_tokens = 1, 12.5, 80
    body = told(outcome)
    assert (body["status"], body["finish_reason"], body["final_messages"]) == ("ERROR", "error", [])
    assert body["error_message"] == "turn 2: HTTP 503"
    metrics = body["metrics"]
    assert (metrics["num_llm_calls"], metrics["total_latency_ms"], metrics["max_context_tokens"]) == (1, 12.5, 80)
    assert body["extra_fields"] == {"error_category": "trainer_server_error", "http_status": 503}


@pytest.mark.parametrize(
    ("outcome", "category"),
    [
        (outcome_pb2.Outcome(cancellation=outcome_pb2.Cancellation(reason="no longer needed")), "cancelled"),
        (outcome_pb2.Outcome(), "internal_error"),
    ],
)
def test_every_other_end_is_an_error_with_a_message(outcome: outcome_pb2.Outcome, category: str) -> None:
    body = told(outcome)
    assert (body["status"], body["finish_reason"], body["extra_fields"]) == (
        "ERROR",
        "error",
        {"error_category": category},
    )
    assert body["error_message"]


def test_typed_messages_are_written_out() -> None:
    chat = message_pb2.ChatMessage(role="assistant", parts=[message_pb2.ContentPart(text="Hi.")])
    outcome = stopped()
    outcome.messages.add(chat=chat)
    assert told(outcome)["final_messages"] == [{"role": "assistant", "content": "Hi."}]


def test_extras_nested_too_deeply_do_not_cost_the_outcome() -> None:
    outcome = stopped('{"role":"user"}')
    outcome.extra_json = '{"a":' * 50_000 + "1" + "}" * 50_000
    assert told(outcome)["extra_fields"] == {}


def test_writing_outcomes_needs_no_web_framework() -> None:
    heavy = ("fastapi", "starlette", "pydantic", "uvicorn", "grpc")
    program = f"import sys, rollout_gateway.osmosis_http.outcome; print(*sorted({set(heavy)!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout.split()) == (0, []), run.stderr
