"""The REST API's JSON format of the contract: enum words, positions of fields, and verbatim texts."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given
from hypothesis import strategies as st
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1 import spec_pb2
from rollout_client import enums
from rollout_gateway.json_body import read_body
from rollout_gateway.rest import body
from rollout_gateway.rest.errors import field_path
from rollout_gateway.rest.event_routes import one_line
from rollout_gateway.rest.proto_json import message_to_json
from rollout_gateway.rest.request import BODY_FIELDS, QUERY_FIELDS, ListQuery, cancel_request, start_request

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
IDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXTS, JSON, max_size=4)
EXACT_SECONDS = st.integers(1, 10**6).map(lambda thousandths: thousandths / 1000)


def some(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


ENDPOINTS = st.fixed_dictionaries(
    {"url": TEXTS},
    optional={"dialect": st.sampled_from(get_args(enums.Dialect)), "replays_turn_keys": st.just(True), "bearer": IDS},
)
COUNTS = st.integers(1, 2**32 - 1)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(OBJECTS, max_size=3), "completions": ENDPOINTS},
    optional={
        "rollout_id": IDS,
        "request_id": IDS,
        "group_id": IDS,
        "agent": IDS,
        "outcome": ENDPOINTS,
        "tools": ENDPOINTS,
        "sampling": some(
            temperature=st.floats(0, 2),
            top_p=st.floats(0, 1),
            max_tokens=st.integers(1, 2**31 - 1),
            stop=st.lists(TEXTS, min_size=1, max_size=3),
            logprobs=st.booleans(),
            extra=OBJECTS,
        ),
        "limits": some(
            turns=st.integers(0, 2**32 - 1),
            generated_tokens=st.integers(0, 2**53),
            seconds=EXACT_SECONDS,
            calls_per_turn=COUNTS,
            tool_turns=st.integers(0, 2**32 - 1),
            bytes=st.integers(1, 2**53),
        ),
        "tokenizer": st.fixed_dictionaries({"name": IDS}, optional={"revision": IDS, "template_kwargs": OBJECTS}),
        "token_mode": st.sampled_from(get_args(enums.TokenMode)),
        "on_drift": st.sampled_from(get_args(enums.DriftPolicy)),
        "on_interrupt": st.sampled_from(get_args(enums.InterruptPolicy)),
        "cancel_after_detach_seconds": st.just(0) | EXACT_SECONDS,
        "priority": st.integers(1, 2**31 - 1) | st.integers(-(2**31), -1),
        "metadata": OBJECTS,
        "labels": st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=3),
        "staleness": st.fixed_dictionaries(
            {"max_lag": st.integers(0, 2**53)}, optional={"action": st.sampled_from(get_args(enums.StaleAction))}
        ),
        "train_on": st.lists(st.sampled_from(get_args(enums.FailureClass)), max_size=8),
    },
)


def asked(value: Any) -> pb.StartRolloutRequest:
    return start_request(read_body(json.dumps(value).encode(), body.StartRollout), None)


@given(BODIES)
def test_what_was_asked_for_is_what_is_shown_and_could_be_asked_for_again(value: dict[str, Any]) -> None:
    spec = asked({"rollout_id": "r", **value}).spec
    shown = msgspec.json.encode(message_to_json(spec))
    expected = {"rollout_id": "r", **value}
    expected.pop("request_id", None)
    for endpoint in ("completions", "outcome", "tools"):
        expected.get(endpoint, {}).pop("bearer", None)
    assert json.loads(shown) == expected
    assert asked(json.loads(shown)).spec == spec


@given(BODIES)
def test_credentials_travel_beside_the_spec(value: dict[str, Any]) -> None:
    value["completions"]["bearer"] = "hush-the-secret"
    request = asked(value)
    assert request.credentials.completions_bearer == "hush-the-secret"
    assert b"hush-the-secret" not in request.spec.SerializeToString()
    assert "hush-the-secret" not in repr(read_body(json.dumps(value).encode(), body.StartRollout))


@given(OBJECTS, st.booleans())
def test_a_text_on_one_line_is_the_same_json(value: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1).replace("\n", "\r\n")
    line = one_line(text)
    assert line.isascii()
    assert line.splitlines() == [line]
    assert json.loads(line) == value


def test_every_field_of_a_spec_can_be_asked_for_and_is_shown() -> None:
    """This covers fields added to the contract later. `source_json` is excluded: it duplicates other fields in another format."""
    renamed = {path[0]: place[0] for path, place in BODY_FIELDS.items() if len(path) == 1}
    names = {renamed.get(field.name, field.name) for field in spec_pb2.RolloutSpec.DESCRIPTOR.fields}
    names.remove("source_json")
    assert names == body.StartRollout.model_fields.keys() - {"request_id"}


def test_every_condition_of_a_selection_can_be_asked_for() -> None:
    conditions = {field.name for field in pb.Selection.DESCRIPTOR.fields}
    assert {path[1] for path in QUERY_FIELDS if path[0] == "selection"} == conditions - {"all"}
    in_bodies = {path[1] for path in BODY_FIELDS if path[0] == "selection" and len(path) == 2}
    assert in_bodies == conditions - {"all", "delivery_states", "failure_classes", "text"}
    assert in_bodies <= body.CancelRollouts.model_fields.keys()
    queried = {place[0] for path, place in QUERY_FIELDS.items() if path[0] == "selection"}
    assert queried <= ListQuery.model_fields.keys()


@pytest.mark.parametrize("fields", [BODY_FIELDS, QUERY_FIELDS])
def test_every_translated_path_exists_in_the_contract(fields: Any) -> None:
    requests = (pb.StartRolloutRequest, pb.ListRolloutsRequest, pb.WaitRolloutRequest, pb.WatchRolloutRequest)
    roots = [spec_pb2.RolloutSpec.DESCRIPTOR, *(request.DESCRIPTOR for request in requests)]
    assert all(any(exists(root, path) for root in roots) for path in fields)
    assert not any(exists(root, ("selection", "nothing")) for root in roots)


def exists(descriptor: Descriptor | None, path: tuple[str, ...]) -> bool:
    for part in path:
        if descriptor is None or part not in descriptor.fields_by_name:
            return False
        descriptor = descriptor.fields_by_name[part].message_type
    return True


@pytest.mark.parametrize(
    ("loc", "path"),
    [
        (("body", "messages", 0, "role"), "messages[0].role"),
        (("body",), "body"),
        (("query", "uid", 3), "uid[3]"),
        (("header", "Last-Event-ID"), "Last-Event-ID"),
        (("body", 17), "[17]"),
    ],
)
def test_places_as_paths(loc: tuple[str | int, ...], path: str) -> None:
    assert field_path(loc) == path


def test_an_empty_cancellation_selects_nothing() -> None:
    empty = cancel_request(read_body(b"{}", body.CancelRollouts).body)
    assert empty == pb.CancelRolloutsRequest(selection=pb.Selection())
