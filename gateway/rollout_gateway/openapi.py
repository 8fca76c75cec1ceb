"""Response schemas, for the OpenAPI description only. Responses are built from protos and not validated against them.

Objects of the REST API are described from the proto descriptors, as `proto_json` writes them. Other texts and schemas are in
`openapi.json`.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from osmosis.rollout.v1 import group_pb2, outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from pydantic import BaseModel
from rollout_client.enums import enum_names

from rollout_gateway.rest.proto_json import FieldForm, forms

Schema = dict[str, Any]
Responses = dict[int | str, Schema]
TEXT: Final[Schema] = {"type": "string"}
INTEGER: Final[Schema] = {"type": "integer"}
_NUMBER: Final[Schema] = {"type": "number"}
_OBJECT: Final[Schema] = {"type": "object", "additionalProperties": True}

# `schemas` without a proto message, `descriptions` of proto messages and their fields, meanings of `errors` by status,
# examples of `bodies`, request `headers`, and the streams of events.
_WRITTEN: Final = json.loads(resources.files("rollout_gateway").joinpath("openapi.json").read_text())
EVENT_STREAM: Final[Schema] = _WRITTEN["event_stream"]
GROUP_STREAM: Final[Schema] = _WRITTEN["group_stream"]
_ROOTS: Final = (
    *(pb.StartRolloutResponse, pb.ListRolloutsResponse, pb.CancelRolloutsResponse, pb.ListAgentsResponse),
    *(pb.ModelAccess, group_pb2.StartGroupResponse, pb.GroupOutcome, pb.DecodeTokensResponse, pb.GetServerInfoResponse),
)
_ENDS: Final = (outcome_pb2.Stop, outcome_pb2.Failure, outcome_pb2.Cancellation)


def ref(name: str) -> Schema:
    """Return a reference to a schema of the application."""
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(*found: str) -> Schema:
    """Return the schema of an enum of strings."""
    return {"type": "string", "enum": list(found)}


def _listed(item: Schema) -> Schema:
    return {"type": "array", "items": item}


_LEAVES: Final[Mapping[str, Schema]] = {
    "Timestamp": {"type": "string", "format": "date-time"},
    "Duration": _NUMBER,
    "Message": _OBJECT,
    "Tool": ref("FunctionTool"),
    "Logprobs": _listed(_NUMBER),
}
_SCALARS: Final[Mapping[int, Schema]] = {
    FieldDescriptor.CPPTYPE_STRING: TEXT,
    FieldDescriptor.CPPTYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.CPPTYPE_DOUBLE: _NUMBER,
    FieldDescriptor.CPPTYPE_FLOAT: _NUMBER,
}


@cache
def schemas() -> Mapping[str, Schema]:
    """Return the schemas of all responses by name."""
    found = dict(_WRITTEN["schemas"])
    waiting: list[Any] = [root.DESCRIPTOR for root in _ROOTS]
    while waiting:
        message = waiting.pop()
        if message.name not in _LEAVES and message_schema(message) not in found:
            found[message_schema(message)] = _message(message)
            waiting += [
                form.field.message_type for form in forms(message) if form.field.message_type and not _is_map(form)
            ]
    return found


def message_schema(message: Any) -> str:
    """Return the schema name of a message, given its descriptor."""
    return f"{message.name}Model"


def _message(message: Any) -> Schema:
    known = forms(message)
    properties = {form.key: _field(message, form) for form in known}
    required = [form.key for form in known if not form.optional and not form.view]
    if message.name == "Outcome":
        ends = {form.key: _field(end.DESCRIPTOR, form) for end in _ENDS for form in forms(end.DESCRIPTOR)}
        properties = {"end": one_of("stop", "failure", "cancellation")} | ends | properties
        required.insert(0, "end")
    description = _WRITTEN["descriptions"].get(message.name, "")
    return {"type": "object", "description": description, "properties": properties, "required": required}


def _field(message: Any, form: FieldForm) -> Schema:
    one = _value(form)
    schema = _listed(one) if form.field.is_repeated and not _is_map(form) else one
    if form.nullable or form.name == "extra_json":
        schema = {"anyOf": [schema, {"type": "null"}]}
    description = _WRITTEN["descriptions"].get(f"{message.name}.{form.name}")
    return {**schema, "description": description} if description else schema


def _value(form: FieldForm) -> Schema:
    field = form.field
    if _is_map(form):
        item = field.message_type.fields_by_name["value"]
        value = ref(message_schema(item.message_type)) if item.message_type else _SCALARS[item.cpp_type]
        return {"type": "object", "additionalProperties": value}
    if field.message_type:
        return _LEAVES.get(field.message_type.name) or ref(message_schema(field.message_type))
    if field.enum_type:
        return one_of(*enum_names(field.enum_type).values())
    if form.name == "response_mask":
        return _listed({"type": "integer", "enum": [0, 1]})
    return _OBJECT if form.name.endswith("_json") else _SCALARS.get(field.cpp_type, INTEGER)


def _is_map(form: FieldForm) -> bool:
    return bool(form.field.message_type and form.field.message_type.GetOptions().map_entry)


_RETRY_AFTER: Final = {"Retry-After": {"description": "Time to wait, in whole seconds.", "schema": INTEGER}}
_HEADERS: Final[Mapping[int, Schema]] = {
    401: {"WWW-Authenticate": {"description": "Always `Bearer`.", "schema": TEXT}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}
# The connection detects these before it knows the route, so they always have FastAPI's shape.
_BEFORE_ANY_ROUTE: Final = (414, 431)


def json_response(schema: str, description: str = "Successful Response") -> Schema:
    """Return an entry of a route's `responses`. The application adds the schema: FastAPI would compile a model per route."""
    return {"description": description, "content": {"application/json": {"schema": ref(schema)}}}


def errors(*more: int) -> Responses:
    """Return the errors of every REST route, and the statuses `more` of one route."""
    anywhere = (400, 401, 403, 408, 413, 422, 429, 500, 503, 504)
    return dialect_errors(*sorted({*anywhere, *more}), schema="PlainError") | dialect_errors(*_BEFORE_ANY_ROUTE)


def dialect_errors(*statuses: int, schema: str = "ErrorResponse") -> Responses:
    """Return error responses in FastAPI's shape, or with another `schema`."""
    responses = {status: json_response(schema, _WRITTEN["errors"][str(status)]) for status in statuses}
    return {
        status: response | ({"headers": _HEADERS[status]} if status in _HEADERS else {})
        for status, response in responses.items()
    }


def raw_body(model: type[BaseModel], *, required: bool = True) -> Schema:
    """Return the `openapi_extra` of a route whose handler reads the raw body. FastAPI cannot find the model there."""
    content = {"application/json": {"schema": ref(model.__name__), **_WRITTEN["bodies"][model.__name__]}}
    return {"requestBody": {"required": required, "content": content}}


def header(name: str) -> Schema:
    """Return the `openapi_extra` of a route whose handler reads an optional header."""
    return {"parameters": [{"name": name, "in": "header", "required": False, **_WRITTEN["headers"][name]}]}
