"""What the gateway answers, for the OpenAPI description only: answers are written from the contract, never validated.

The plain API's objects are described from the contract's messages, as `proto_json` writes them; `obj` describes others.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from osmosis.rollout.v1 import outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from pydantic import BaseModel

from rollout_gateway.rest import enums
from rollout_gateway.rest.proto_json import FieldForm, forms

Schema = dict[str, Any]
Responses = dict[int | str, Schema]
TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
OBJECT: Final[Schema] = {"type": "object", "additionalProperties": True}
NULL: Final[Schema] = {"type": "null"}


def ref(name: str) -> Schema:
    """A reference to a schema that the application describes."""
    return {"$ref": f"#/components/schemas/{name}"}


def listed(item: Schema) -> Schema:
    """The schema of a list of such items."""
    return {"type": "array", "items": item}


def nullable(schema: Schema, description: str = "") -> Schema:
    """A value or null."""
    return {"anyOf": [schema, NULL]} | ({"description": description} if description else {})


def describe(schema: Schema, description: str) -> Schema:
    """A value and what it is."""
    return {**schema, "description": description}


def one_of(*found: str) -> Schema:
    """One of these texts."""
    return {"type": "string", "enum": list(found)}


def obj(description: str, properties: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these properties, and maybe with the optional ones."""
    found = {**properties, **(optional or {})}
    return {"type": "object", "description": description, "properties": found, "required": list(properties)}


_DESCRIPTIONS: Final[Mapping[str, str]] = {
    "Target": "An endpoint that the server calls.",
    "RolloutSpec": "The body that started it and what the server filled in. What is unset is absent.",
    "RolloutSpec.messages": "From view messages on.",
    "Metrics": "What a rollout has used so far. Times are in milliseconds.",
    "Delivery": "How far the delivery of the outcome is.",
    "Warning": "Something that did not end the rollout but that its user should know.",
    "SegmentOrigin": "Where a segment comes from.",
    "SegmentOrigin.parent_id": "The segment it follows; empty for the first.",
    "SegmentOrigin.parent_tokens": "How many tokens at its start it shares with that one.",
    "SampleSpan": "Whose tokens stand where in a sample, counted from the start of its prompt.",
    "SampleSpan.mask_reason": "Why they do not train.",
    "Sample": "A segment as trainers use it. Mask and logprobs are as long as the response.",
    "Sample.response_mask": "1 exactly where the model wrote a token that trains.",
    "Sample.logprobs": "0.0 where masked; null: at least one answer came without them.",
    "Sample.spans": "They cover prompt and response without gaps.",
    "Sample.verified": "The trainer reported every prompt of it.",
    "Outcome": "How a rollout ended, and what there was until then. Beside `end` stand the fields of that end.",
    "Outcome.messages": "The whole conversation; from view messages on.",
    "Outcome.samples": "One for each segment; from view samples on.",
    "Outcome.segments": "The ledger; in view full.",
    "Stop.truncated": "Of stop: the last answer was cut by length.",
    "Failure.message": "Of failure: what was wrong, where, and what to do.",
    "Failure.http_status": "Of failure: the trainer's, where one came back.",
    "Cancellation.reason": "Of stop and cancellation.",
    "Rollout": "A rollout as it is now.",
    "Rollout.caller": "The name of the API key it was started with.",
    "Rollout.last_sequence": "Of its last event.",
    "Rollout.outcome": "null until it has finished.",
    "StartRolloutResponse": "A rollout was accepted (201) or found (200).",
    "StartRolloutResponse.attached": "It had been accepted before.",
    "StartRolloutResponse.tools": "What its model is to be told.",
    "ListRolloutsResponse": "Rollouts, newest first.",
    "ListRolloutsResponse.next_page_token": "Empty: this was the last page.",
    "CancelRolloutsResponse": "Those that were asked to end.",
    "Agent": "An agent of this server.",
    "Agent.default": "It runs where a request names no agent.",
    "ListAgentsResponse": "The agents, by name.",
}
_ROOTS: Final = (pb.StartRolloutResponse, pb.ListRolloutsResponse, pb.CancelRolloutsResponse, pb.ListAgentsResponse)
_ENDS: Final = (outcome_pb2.Stop, outcome_pb2.Failure, outcome_pb2.Cancellation)
_LEAVES: Final[Mapping[str, Schema]] = {
    "Timestamp": {"type": "string", "format": "date-time"},
    "Duration": NUMBER,
    "Message": OBJECT,
    "Tool": ref("FunctionTool"),
    "Logprobs": listed(NUMBER),
}
_SCALARS: Final[Mapping[int, Schema]] = {
    FieldDescriptor.CPPTYPE_STRING: TEXT,
    FieldDescriptor.CPPTYPE_BOOL: FLAG,
    FieldDescriptor.CPPTYPE_DOUBLE: NUMBER,
    FieldDescriptor.CPPTYPE_FLOAT: NUMBER,
}
_FIELD: Final = obj(
    "One fault of a request: where, and what.",
    {"field": describe(TEXT, "As in the body, query or path: `messages[0].role`."), "message": TEXT},
)
_ERROR: Final = obj(
    "What was wrong, and what to do.",
    {
        "code": describe(TEXT, "A stable word, such as ROLLOUT_NOT_FOUND."),
        "message": TEXT,
        "request_id": describe(TEXT, "Under which the logs have it."),
        "fields": listed(_FIELD),
    },
    {"retry_after": describe(NUMBER, "In seconds; absent where waiting does not help.")},
)
_FUNCTION: Final = obj(
    "A function that the model may call; `parameters` is a JSON Schema.",
    {"name": TEXT, "description": TEXT, "parameters": OBJECT},
    {"strict": FLAG},
)


@cache
def schemas() -> Mapping[str, Schema]:
    """The schemas of the plain API's answers, by name."""
    found = {
        "PlainError": obj("Every error of this API.", {"error": _ERROR}),
        "FunctionTool": obj("A tool in OpenAI's form.", {"type": one_of("function"), "function": _FUNCTION}),
        "Alive": obj("This process answers.", {"status": one_of("ok")}),
        "Ready": obj("Rollouts can be started.", {"status": one_of("ready"), "running": INTEGER, "queued": INTEGER}),
        "Unready": obj("No rollout can be started now.", {"status": one_of("draining", "unavailable")}),
    }
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
    """The name of the schema of a message, by its descriptor."""
    return f"{message.name}Model"


def _message(message: Any) -> Schema:
    known = forms(message)
    properties = {form.key: _field(message, form) for form in known}
    required = [form.key for form in known if not form.optional and not form.view]
    if message.name == "Outcome":
        ends = {form.key: _field(end.DESCRIPTOR, form) for end in _ENDS for form in forms(end.DESCRIPTOR)}
        properties = {"end": one_of("stop", "failure", "cancellation")} | ends | properties
        required.insert(0, "end")
    description = _DESCRIPTIONS.get(message.name, "")
    return {"type": "object", "description": description, "properties": properties, "required": required}


def _field(message: Any, form: FieldForm) -> Schema:
    one = _value(form)
    schema = listed(one) if form.field.is_repeated and not _is_map(form) else one
    description = _DESCRIPTIONS.get(f"{message.name}.{form.name}", "")
    if form.nullable or form.name == "extra_json":
        return nullable(schema, description)
    return describe(schema, description) if description else schema


def _value(form: FieldForm) -> Schema:
    field = form.field
    if _is_map(form):
        return {"type": "object", "additionalProperties": _SCALARS[field.message_type.fields_by_name["value"].cpp_type]}
    if field.message_type:
        return _LEAVES.get(field.message_type.name) or ref(message_schema(field.message_type))
    if field.enum_type:
        return one_of(*enums.names(field.enum_type).values())
    if form.name == "response_mask":
        return listed({"type": "integer", "enum": [0, 1]})
    return OBJECT if form.name.endswith("_json") else _SCALARS.get(field.cpp_type, INTEGER)


def _is_map(form: FieldForm) -> bool:
    return bool(form.field.message_type and form.field.message_type.GetOptions().map_entry)


_ERRORS: Final[Mapping[int, str]] = {
    400: "This cannot be done as things are, or a header is wrong; `code` says why.",
    401: "An API key is needed, as `Authorization: Bearer KEY`.",
    403: "The key does not allow this.",
    404: "There is no such rollout or agent, or it is somebody else's.",
    408: "The body did not arrive in time.",
    409: "The request id is known with another payload.",
    413: "The body, or the answer, is too large.",
    414: "The URL is too long; ask for less at once.",
    422: "Fields are wrong; each is named.",
    429: "Too many rollouts wait; try again after Retry-After.",
    431: "The header is too large.",
    500: "A fault of ours; the log has it under the request id.",
    503: "The rollout server is away or stops; try again after Retry-After.",
    504: "The rollout server did not answer in time; try again.",
}
_RETRY_AFTER: Final = {"Retry-After": {"description": "In whole seconds.", "schema": INTEGER}}
_HEADERS: Final[Mapping[int, Schema]] = {
    401: {"WWW-Authenticate": {"description": "Bearer.", "schema": TEXT}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}
# Found by the connection, which reads no path: in the shape that all of HTTP's own errors have here.
_BEFORE_ANY_ROUTE: Final = (414, 431)


def json_response(schema: str, description: str = "Successful Response") -> Schema:
    """An entry of a route's `responses`. The application describes the schema: FastAPI would compile a model for every route."""
    return {"description": description, "content": {"application/json": {"schema": ref(schema)}}}


def errors(*more: int) -> Responses:
    """The errors that any route of the plain API may answer with, and those of one route."""
    anywhere = (400, 401, 403, 408, 413, 422, 429, 500, 503, 504)
    return dialect_errors(*sorted({*anywhere, *more}), schema="PlainError") | dialect_errors(*_BEFORE_ANY_ROUTE)


def dialect_errors(*statuses: int, schema: str = "ErrorResponse") -> Responses:
    """Errors of a route of the dialects."""
    return {
        status: json_response(schema, _ERRORS[status]) | ({"headers": _HEADERS[status]} if status in _HEADERS else {})
        for status in statuses
    }


def raw_body(model: type[BaseModel], examples: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """A route's `openapi_extra`, whose handler reads the raw body: FastAPI has to be told of the model.

    `examples` has `example` or `examples`, as OpenAPI has them. The model is one that the application describes.
    """
    content = {"application/json": {"schema": ref(model.__name__), **examples}}
    return {"requestBody": {"required": required, "content": content}}
