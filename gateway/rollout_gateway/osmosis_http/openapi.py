"""What the two HTTP dialects answer, for the OpenAPI description only: answers are spliced together, never validated."""

from typing import Final

from rollout_gateway.osmosis_http.outcome import METRICS
from rollout_gateway.rest.openapi import (
    FLAG,
    INTEGER,
    NUMBER,
    OBJECT,
    TEXT,
    Schema,
    describe,
    listed,
    nullable,
    obj,
    one_of,
    ref,
)

_SERVICE: Final = one_of("rollout-server")
_WARNING: Final = obj(
    "Something that did not end the rollout but that its user should know.",
    {"code": TEXT, "message": TEXT, "turn": INTEGER},
    {"index": INTEGER},
)
_VIOLATION: Final = obj(
    "One fault of a body: where, and what.",
    {"type": TEXT, "loc": listed({"type": ["string", "integer"]}), "msg": TEXT},
)

#: The schemas of the dialects' answers, by name.
SCHEMAS: Final[dict[str, Schema]] = {
    "RolloutResponse": obj(
        "How a rollout ended. One that failed is answered like this too, with status ERROR.",
        {
            "rollout_id": TEXT,
            "status": one_of("COMPLETED", "ERROR"),
            "final_messages": describe(listed(ref("ChatMessage")), "The whole conversation; empty on ERROR."),
            "finish_reason": describe(TEXT, "stop, max_turns, max_tokens, error or an agent's own word."),
            "error_message": nullable(TEXT),
            "metrics": obj(
                "What a rollout used; on errors, what was counted until then.", dict.fromkeys(METRICS, NUMBER)
            ),
            "extra_fields": ref("ExtraFields"),
        },
    ),
    "ExtraFields": obj(
        "Only the keys that have something to say, and what the agent adds.",
        {},
        {
            "reward": NUMBER,
            "scores": {"type": "object", "additionalProperties": NUMBER},
            "truncated": FLAG,
            "error_category": TEXT,
            "http_status": describe(INTEGER, "The trainer's HTTP status, where one came back."),
            "warnings": listed(_WARNING),
            "trace": listed(OBJECT),
        },
    ),
    "ToolsResponse": obj(
        "The tools of an agent, in the order in which the model is describe.", {"tools": listed(ref("FunctionTool"))}
    ),
    "InitResponse": obj(
        "A rollout was accepted; `rollout_id` is the first one's where the same idempotency key came before.",
        {
            "rollout_id": TEXT,
            "tools": describe(
                listed(ref("FunctionTool")),
                "In the plain shape that clients of this dialect validate: `parameters` has `properties` and `required`, and each "
                "property one `type` and at most an `enum` of texts. `strict` is always there.",
            ),
        },
    ),
    "HealthResponse": obj(
        "The server is up. `active_rollouts` run or wait for a place, `completed_rollouts` have ended since it started.",
        {
            "status": one_of("healthy"),
            "service": _SERVICE,
            "agent_loop": describe(TEXT, "The agent that runs where a request names none."),
            "active_rollouts": INTEGER,
            "completed_rollouts": INTEGER,
        },
    ),
    "UnhealthyResponse": obj(
        "The server cannot be reached, does not answer as it should (then `detail` says more), or takes no new rollouts.",
        {"status": one_of("unhealthy", "draining"), "service": _SERVICE},
        {"detail": TEXT},
    ),
    "ErrorResponse": obj("Nothing was started, or nothing can be said about it.", {"detail": TEXT}),
    "InvalidBodyResponse": obj(
        "The body does not validate; nobody was called.",
        {"detail": listed(_VIOLATION)},
    ),
}
