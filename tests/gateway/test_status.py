import json
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest
from rollout_gateway.osmosis_http.conversion import FIELDS
from rollout_gateway.status import HTTP_STATUS, body_location, problem

from tests.support.scripted_server import Refusal

Code = grpc.StatusCode


def failed(refusal: Refusal) -> grpc.aio.AioRpcError:
    trailing = (("grpc-status-details-bin", refusal.packed()),) if refusal.rich else ()
    return grpc.aio.AioRpcError(refusal.code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=refusal.text)


def violations(*named: tuple[str, str]) -> BadRequest:
    return BadRequest(
        field_violations=[BadRequest.FieldViolation(field=path, description=text) for path, text in named]
    )


def test_every_code_has_a_status() -> None:
    assert set(HTTP_STATUS) == set(Code)


@pytest.mark.parametrize(
    "code", [Code.ALREADY_EXISTS, Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED]
)
@pytest.mark.parametrize("rich", [True, False])
def test_the_servers_own_words_reach_the_client(code: Code, rich: bool) -> None:
    found = problem(failed(Refusal(code, "the id is known with another payload", rich=rich)))
    assert (found.status, found.detail) == (HTTP_STATUS[code], "the id is known with another payload")


@pytest.mark.parametrize("code", [Code.INTERNAL, Code.UNKNOWN, Code.DATA_LOSS])
@pytest.mark.parametrize("rich", [True, False])
def test_insides_are_never_shown(code: Code, rich: bool) -> None:
    found = problem(failed(Refusal(code, "KeyError: 'secret'", rich=rich)), FIELDS)
    assert (found.status, found.detail) == (500, "Internal server error")


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.CANCELLED, Code.DEADLINE_EXCEEDED])
def test_words_of_the_transport_are_replaced_and_those_of_the_server_kept(code: Code) -> None:
    bare = problem(failed(Refusal(code, "connections to all backends failing: unix:/run/x", rich=False)))
    assert "unix" not in str(bare.detail)
    rich = problem(failed(Refusal(code, "the server drains")))
    assert (rich.status, rich.detail) == (HTTP_STATUS[code], "the server drains")


def test_an_oversized_message_is_not_told_to_come_back_later() -> None:
    text = "SERVER: Received message larger than max (67108999 vs. 67108864)"
    assert problem(failed(Refusal(Code.RESOURCE_EXHAUSTED, text, rich=False))).status == 413


@pytest.mark.parametrize(("delay", "header"), [(Duration(seconds=3), "3"), (Duration(nanos=1), "1"), (Duration(), "1")])
def test_retry_after_is_rounded_up_to_seconds(delay: Duration, header: str) -> None:
    refusal = Refusal(Code.RESOURCE_EXHAUSTED, details=(RetryInfo(retry_delay=delay),))
    assert problem(failed(refusal)).headers == {"retry-after": header}


@pytest.mark.parametrize("rich", [True, False])
def test_a_call_that_was_broken_off_is_not_taken_for_a_client_that_left(rich: bool) -> None:
    found = problem(failed(Refusal(Code.CANCELLED, "CANCELLED", rich=rich)))
    assert (found.status, found.headers) == (503, {"retry-after": "1"})


def test_a_missing_key_asks_for_a_bearer_token() -> None:
    assert problem(failed(Refusal(Code.UNAUTHENTICATED))).headers == {"www-authenticate": "Bearer"}


def test_named_fields_become_422_in_the_shape_of_fastapi() -> None:
    named = violations(("start.spec.completions.url", "not allowed"), ("spec.messages[2].json", ""))
    response = problem(failed(Refusal(Code.INVALID_ARGUMENT, details=(named,))), FIELDS).response()
    assert response.status_code == 422
    assert json.loads(bytes(response.body)) == {
        "detail": [
            {"type": "value_error", "loc": ["body", "server_url"], "msg": "not allowed"},
            {"type": "value_error", "loc": ["body", "messages", 2], "msg": "Invalid value"},
        ]
    }


@pytest.mark.parametrize("details", [(), (BadRequest(),)])
def test_an_invalid_argument_without_fields_is_400(details: tuple[Any, ...]) -> None:
    assert problem(failed(Refusal(Code.INVALID_ARGUMENT, details=details)), FIELDS).status == 400


def test_details_that_cannot_be_read_are_as_none() -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    error = grpc.aio.AioRpcError(Code.ALREADY_EXISTS, grpc.aio.Metadata(), trailing, details="known")
    assert problem(error, FIELDS).detail == "known"


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("request_id", ("rollout_id",)),
        ("start.request_id", ("rollout_id",)),
        ("spec.rollout_id", ("rollout_id",)),
        ("start.spec.messages", ("messages",)),
        ("start.spec.messages[0]", ("messages", 0)),
        ("messages[11].json.role", ("messages", 11, "role")),
        ("start.spec.completions", ("server_url",)),
        ("start.spec.tools.url", ("tool_server_url",)),
        ("spec.sampling.stop[3]", ("sampling_params", "stop", 3)),
        ("spec.limits.turns", ("max_turns",)),
        ("spec.limits.time", ("metadata", "timeout_seconds")),
        ("spec.tokenizer.name", ("tokenizer_name",)),
        ("spec.tokenizer.template_kwargs_json", ("metadata", "chat_template_kwargs")),
        ("spec.metadata_json", ("metadata",)),
        ("start.credentials.completions_bearer", ("callback_api_key",)),
        ("spec.priority", ("priority",)),
        ("", ()),
    ],
)
def test_field_paths_become_places_in_the_body(path: str, place: tuple[str | int, ...]) -> None:
    assert body_location(path, FIELDS) == ("body", *place)


def test_every_translated_path_exists_in_the_contract() -> None:
    start = StartRolloutRequest.DESCRIPTOR
    for path in FIELDS:
        descriptor: Descriptor | None = (
            start if path[0] in start.fields_by_name else start.fields_by_name["spec"].message_type
        )
        for part in path:
            assert descriptor is not None
            descriptor = descriptor.fields_by_name[part].message_type
