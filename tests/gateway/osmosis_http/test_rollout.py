"""`POST /rollout` over real sockets: HTTP in front, a gRPC server on a Unix socket behind."""

import asyncio
import json
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import event_pb2, message_pb2, outcome_pb2

from tests.support.example_bodies import EXAMPLE
from tests.support.gateways import Gateway
from tests.support.scripted_server import UID, Refusal, stopped
from tests.support.transcripts import client_exchange, without_nulls

Code = grpc.StatusCode


async def hang_up_after_asking(gateway: Gateway) -> None:
    """Request a rollout, wait until it runs, and close the connection."""
    _, writer = await asyncio.open_connection(gateway.host, gateway.port)
    content = json.dumps(EXAMPLE).encode()
    head = f"POST /rollout HTTP/1.1\r\nhost: gateway\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await gateway.server.started.wait()
    writer.close()
    await writer.wait_closed()


async def test_a_rollout_is_run_answered_and_acknowledged(gateway: Gateway) -> None:
    message = '{"role" : "assistant","content":"Hi.", "n":18446744073709551617}'
    gateway.server.outcome = stopped(message)
    response = await gateway.post()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-rollout-uid"] == UID
    assert message in response.text
    found = response.json()
    assert (found["rollout_id"], found["status"], found["finish_reason"]) == ("test-rollout-001", "COMPLETED", "stop")
    assert gateway.server.acknowledged == [UID]
    assert len(gateway.server.requests) == 1
    assert gateway.server.watches == []


async def test_messages_reach_the_server_as_they_were_sent(gateway: Gateway) -> None:
    message = '{ "content":"\\u00e9é", "role" :"user","n":18446744073709551617,"n":1.50 }'
    content = json.dumps({**EXAMPLE, "messages": "HERE"}).replace('"HERE"', f"[ {message} ,\n{message}]")
    response = await gateway.client.post("/rollout", content=content.encode())
    assert response.status_code == 200
    assert [each.json for each in gateway.server.requests[0].start.spec.messages] == [message, message]


async def test_a_rollout_that_failed_is_200(gateway: Gateway) -> None:
    failure = outcome_pb2.Failure(category=outcome_pb2.FAILURE_CATEGORY_TIMEOUT, message="timeout after 600 s")
    gateway.server.outcome = outcome_pb2.Outcome(failure=failure)
    response = await gateway.post()
    assert response.status_code == 200
    assert response.json()["error_message"] == "timeout after 600 s"
    assert gateway.server.acknowledged == [UID]


async def test_who_asks_and_the_request_id_travel_on(gateway: Gateway) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"authorization": "Bearer key", "x-request-id": "mine-1", "traceparent": traceparent}
    response = await gateway.post(headers=headers)
    assert response.headers["x-request-id"] == "mine-1"
    for rpc in ("RunRollout", "AcknowledgeOutcome"):
        assert headers.items() <= gateway.server.metadata[rpc].items()


@pytest.mark.parametrize("received", [None, "", "with space", "x" * 129])
async def test_a_request_id_is_made_where_none_can_be_kept(gateway: Gateway, received: str | None) -> None:
    response = await gateway.post(headers={} if received is None else {"x-request-id": received})
    made = response.headers["x-request-id"]
    assert made not in ("", received)
    assert gateway.server.metadata["RunRollout"]["x-request-id"] == made
    assert "authorization" not in gateway.server.metadata["RunRollout"]


async def test_a_key_that_is_not_ascii_is_sent_on_as_one_that_fits_nothing(gateway: Gateway) -> None:
    headers = {b"authorization": "Bearer schlüssel".encode()}
    assert (await gateway.post(headers=headers)).status_code == 200
    assert gateway.server.metadata["RunRollout"]["authorization"] == ""


async def test_a_client_that_hangs_up_detaches_and_nothing_is_acknowledged(gateway: Gateway) -> None:
    gateway.server.go.clear()
    await hang_up_after_asking(gateway)
    await gateway.server.detached.wait()
    assert gateway.server.acknowledged == []
    gateway.server.go.set()
    assert (await gateway.post()).status_code == 200
    assert gateway.server.acknowledged == [UID]
    grace = gateway.server.requests[0].start.spec.cancel_after_detach
    assert (grace.seconds, grace.nanos) == (1, 500_000_000)


async def test_a_request_that_waits_does_not_hold_up_others(gateway: Gateway) -> None:
    gateway.server.go.clear()
    waiting = asyncio.create_task(gateway.post())
    await gateway.server.started.wait()
    assert (await gateway.client.get("/health")).status_code == 200
    assert not waiting.done()
    gateway.server.go.set()
    assert (await waiting).status_code == 200


async def test_an_outcome_is_answered_though_it_could_not_be_acknowledged(gateway: Gateway) -> None:
    gateway.server.refusals["AcknowledgeOutcome"] = Refusal(Code.UNAVAILABLE)
    assert (await gateway.post()).status_code == 200


async def test_the_trace_is_that_of_the_transcript(gateway: Gateway) -> None:
    exchange = client_exchange("debug_trace")
    entries = exchange["response"]["extra_fields"]["trace"]
    gateway.server.events = [event_pb2.RolloutEvent(accepted=event_pb2.Accepted(messages=2))]
    for entry in entries:
        gateway.server.events.extend(turn_events(entry))
    response = await gateway.post(exchange["request"])
    found = response.json()["extra_fields"]["trace"]
    assert without_nulls(found) == without_nulls(entries)
    assert found[0]["llm_request"]["response_mask_len"] is None
    assert [(each.uid, each.detail) for each in gateway.server.watches] == [(UID, event_pb2.EVENT_DETAIL_MESSAGES)]


def turn_events(entry: dict[str, Any]) -> list[event_pb2.RolloutEvent]:
    """The events of a turn; its tools return in reverse order."""
    answered = event_pb2.Answered(
        message=message_pb2.Message(json=json.dumps(entry["assistant_message"])),
        prompt_tokens=entry["llm_request"]["prompt_length"],
        mask_length=entry["llm_request"]["response_mask_len"],
        generated_tokens=entry["llm_response_token_count"],
    )
    events = [event_pb2.RolloutEvent(turn=entry["turn"], segment_id="0", answered=answered)]
    for index, result in reversed(list(enumerate(entry["tool_results"]))):
        returned = event_pb2.ToolReturned(index=index, message=message_pb2.Message(json=json.dumps(result)))
        events.append(event_pb2.RolloutEvent(turn=entry["turn"], segment_id="0", tool_returned=returned))
    return events


async def test_results_of_tools_stand_in_the_order_of_the_calls(gateway: Gateway) -> None:
    results = [{"role": "tool", "content": str(number), "tool_call_id": f"c{number}"} for number in range(3)]
    entry = {
        "turn": 1,
        "llm_request": {"prompt_length": 5, "response_mask_len": None},
        "assistant_message": {"role": "assistant", "tool_calls": [{"id": "c0", "vendor": 2**64 + 1}]},
        "tool_results": results,
        "llm_response_token_count": 7,
    }
    gateway.server.events = turn_events(entry)
    gateway.server.outcome = outcome_pb2.Outcome(failure=outcome_pb2.Failure(message="kept on errors too"))
    response = await gateway.post({**EXAMPLE, "metadata": {"debug_trace": True}})
    found = response.json()
    assert found["status"] == "ERROR"
    assert found["extra_fields"]["trace"][0]["tool_results"] == results
    assert found["extra_fields"]["trace"][0]["tool_calls"] == [{"id": "c0", "vendor": 2**64 + 1}]


async def test_a_trace_that_is_gone_does_not_cost_the_outcome(gateway: Gateway) -> None:
    gateway.server.refusals["WatchRollout"] = Refusal(Code.OUT_OF_RANGE)
    response = await gateway.post({**EXAMPLE, "metadata": {"debug_trace": True}})
    assert (response.status_code, response.json()["extra_fields"]) == (200, {})


@pytest.mark.parametrize("text", ["", '{"role":"assistant","tool_calls":{}}', '{"role":"assistant","tool_calls":null}'])
async def test_an_answer_without_calls_to_show_is_traced_all_the_same(gateway: Gateway, text: str) -> None:
    answered = event_pb2.Answered(message=message_pb2.Message(json=text))
    gateway.server.events = [event_pb2.RolloutEvent(turn=1, answered=answered)]
    response = await gateway.post({**EXAMPLE, "metadata": {"debug_trace": True}})
    (entry,) = response.json()["extra_fields"]["trace"]
    assert (entry["turn"], entry["tool_calls"]) == (1, [])
    assert entry["assistant_message"] == (json.loads(text) if text else None)
