"""Conversion of REST requests to protos, and the map from proto fields back to places in the request."""

import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Final, TypeVar

from osmosis.rollout.v1 import outcome_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.agent_service_pb2 import FinishRolloutRequest
from osmosis.rollout.v1.group_pb2 import StartGroupRequest
from pydantic import BaseModel, ConfigDict, Field
from rollout_client.enums import DeliveryState, FailureClass, State, View, enum_values

from rollout_gateway.json_body import InvalidBody, ParsedBody
from rollout_gateway.rest import body
from rollout_gateway.rest.proto_json import message_fields
from rollout_gateway.status import Fields

IDEMPOTENCY_KEY: Final = "Idempotency-Key"
_ENDPOINTS: Final = ("completions", "outcome", "tools")
# Query parameter of each condition of a selection.
_QUERY: Final = {
    "uids": "uid",
    "rollout_ids": "rollout_id",
    "group_id": "group_id",
    "agent": "agent",
    "states": "state",
    "labels": "label",
    "callers": "caller",
    "delivery_states": "delivery",
    "failure_classes": "failure_class",
    "text": "text",
}
# Conditions that only lists have.
_LIST_ONLY: Final = ("delivery_states", "failure_classes", "text")

#: Place in the body for each proto field. A field is left out if its name and those of its parts are the same in both.
BODY_FIELDS: Final[Fields] = {
    ("messages",): ("messages",),
    ("sampling", "extra_json"): ("sampling", "extra"),
    ("limits", "time"): ("limits", "seconds"),
    ("tokenizer", "template_kwargs_json"): ("tokenizer", "template_kwargs"),
    ("cancel_after_detach",): ("cancel_after_detach_seconds",),
    ("metadata_json",): ("metadata",),
    ("selection",): ("all",),
    **{("credentials", f"{name}_bearer"): (name, "bearer") for name in _ENDPOINTS},
    ("credentials", "model_bearers"): ("models",),
    **{("selection", name): (name,) for name in _QUERY if name not in _LIST_ONLY},
}
#: Place in the query for each proto field.
QUERY_FIELDS: Final[Fields] = {
    ("timeout",): ("wait",),
    ("after_sequence",): ("after",),
    **{("selection", name): (key,) for name, key in _QUERY.items()},
}
# Fewer than in a body, because the length of a URL is limited.
_MAX_SELECTED: Final = 100
# A fleet's token has a part per server. It must leave room in the request line, see `ConnectionLimits.url_bytes`.
_MAX_TOKEN: Final = 12_288
_Start = TypeVar("_Start", bound=body.StartRollout)


class ListQuery(BaseModel):
    """Which rollouts to list, and in how much detail. A rollout must match every given condition."""

    model_config = ConfigDict(extra="forbid")

    state: list[State] = Field([], max_length=8, description="One of these states.")
    delivery: list[DeliveryState] = Field([], max_length=8, description="A delivery in one of these states.")
    failure_class: list[FailureClass] = Field([], max_length=8, description="Failed in one of these classes.")
    text: body.Name = Field(
        "", description="Ids, labels, the end's message or the conversation contain it, ignoring case."
    )
    agent: body.Name = Field("", description="The agent's name.")
    group_id: body.Name = Field("", description="The group.")
    rollout_id: list[body.Name] = Field([], max_length=_MAX_SELECTED, description="One of these rollout ids.")
    uid: list[body.Uid] = Field([], max_length=_MAX_SELECTED, description="One of these uids.")
    label: list[Annotated[str, Field(max_length=520)]] = Field(
        [], max_length=64, description="KEY=VALUE; all of these labels."
    )
    caller: list[body.Name] = Field(
        [], max_length=_MAX_SELECTED, description="API key names; an admin key may name others."
    )
    page_size: int = Field(100, ge=1, le=1000)
    page_token: str = Field("", max_length=_MAX_TOKEN, description="`next_page_token` of the previous page.")
    view: View = "basic"


def wrong(kind: str, place: str, message: str) -> InvalidBody:
    """Return the error for one fault outside the body: `kind` is header, query or path, `place` the name in it."""
    return InvalidBody([{"type": "value_error", "loc": (kind, place), "msg": message}])


def start_request(parsed: ParsedBody[_Start], idempotency_key: str | None) -> pb.StartRolloutRequest:
    """Convert a valid body. Raises InvalidBody if body and header have different request ids, or the header's is too long."""
    start = parsed.body
    request_id = start.request_id or idempotency_key or ""
    if idempotency_key and idempotency_key != request_id:
        raise wrong("header", IDEMPOTENCY_KEY, "differs from request_id; send one of them, or the same value in both")
    if len(request_id) > 256:
        raise wrong("header", IDEMPOTENCY_KEY, "must have at most 256 characters")
    spec = message_fields(vars(start), spec_pb2.RolloutSpec.DESCRIPTOR, parsed.parts)
    spec["rollout_id"] = start.rollout_id or request_id or uuid.uuid4().hex
    endpoints = {name: getattr(start, name) for name in _ENDPOINTS}
    bearers = {f"{name}_bearer": endpoint.bearer for name, endpoint in endpoints.items() if endpoint is not None}
    models = {name: endpoint.bearer for name, endpoint in (start.models or {}).items() if endpoint.bearer}
    credentials = spec_pb2.Credentials(**bearers, model_bearers=models)
    return pb.StartRolloutRequest(request_id=request_id, spec=spec_pb2.RolloutSpec(**spec), credentials=credentials)


def group_request(parsed: ParsedBody[body.StartGroup], idempotency_key: str | None) -> StartGroupRequest:
    """Convert a valid body. Raises InvalidBody as `start_request` does."""
    start, plan = start_request(parsed, idempotency_key), parsed.body
    beside: dict[str, Any] = {"request_id": start.request_id, "spec": start.spec, "credentials": start.credentials}
    return StartGroupRequest(**beside, count=plan.count, min_usable=plan.min_usable or 0, refill=plan.refill or 0)


def cancel_request(cancel: body.CancelRollouts) -> pb.CancelRolloutsRequest:
    """Convert a valid body."""
    selection = pb.Selection(**message_fields(vars(cancel), pb.Selection.DESCRIPTOR))
    return pb.CancelRolloutsRequest(selection=selection, reason=cancel.reason or "")


def finish_request(uid: str, parsed: ParsedBody[body.FinishRollout]) -> FinishRolloutRequest:
    """Convert a valid body."""
    finish, failure = parsed.body, None
    if finish.failure is not None:
        failure = outcome_pb2.Failure(message=finish.failure.message)
        if finish.failure.failure_class is not None:
            failure.failure_class = enum_values(outcome_pb2.FailureClass.DESCRIPTOR)[finish.failure.failure_class]
    return FinishRolloutRequest(
        uid=uid, reward=finish.reward, scores=finish.scores or {}, extra_json=parsed.text("extra"), failure=failure
    )


def list_request(query: ListQuery) -> pb.ListRolloutsRequest:
    """Convert a valid query. Raises InvalidBody for malformed labels."""
    values = {name: getattr(query, key) for name, key in _QUERY.items()} | {"labels": labels(query.label)}
    return pb.ListRolloutsRequest(
        selection=pb.Selection(**message_fields(values, pb.Selection.DESCRIPTOR)),
        page_size=query.page_size,
        page_token=query.page_token,
        view=enum_values(pb.RolloutView.DESCRIPTOR)[query.view],
    )


def labels(pairs: Iterable[str]) -> dict[str, str]:
    """Parse `KEY=VALUE` texts. Raises InvalidBody for other texts, and for one key with two values."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise wrong("query", "label", "must be KEY=VALUE")
        if found.setdefault(key, value) != value:
            raise wrong("query", "label", "must have one value per key; no rollout matches two values")
    return found
