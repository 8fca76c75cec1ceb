"""Requests of the plain API -> the contract's, and where the contract's fields are in them."""

import uuid
from collections.abc import Iterable
from typing import Final

from google.protobuf.duration_pb2 import Duration
from osmosis.rollout.v1 import message_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_gateway.osmosis_http.sync_body import InvalidBody
from rollout_gateway.rest import body, enums
from rollout_gateway.status import Fields

IDEMPOTENCY_KEY: Final = "Idempotency-Key"

#: Where the fields of requests come from in bodies. Fields of the same name, and without parts of other names, are left out.
BODY_FIELDS: Final[Fields] = {
    ("messages",): ("messages",),
    ("sampling", "extra_json"): ("sampling", "extra"),
    ("limits", "time"): ("limits", "seconds"),
    ("tokenizer", "template_kwargs_json"): ("tokenizer", "template_kwargs"),
    ("cancel_after_detach",): ("cancel_after_detach_seconds",),
    ("metadata_json",): ("metadata",),
    ("credentials", "completions_bearer"): ("completions", "bearer"),
    ("credentials", "outcome_bearer"): ("outcome", "bearer"),
    ("credentials", "tools_bearer"): ("tools", "bearer"),
    ("selection",): ("all",),
    ("selection", "uids"): ("uids",),
    ("selection", "rollout_ids"): ("rollout_ids",),
    ("selection", "group_id"): ("group_id",),
    ("selection", "agent"): ("agent",),
    ("selection", "states"): ("states",),
    ("selection", "labels"): ("labels",),
    ("selection", "callers"): ("callers",),
}
#: Where they come from in a query.
QUERY_FIELDS: Final[Fields] = {
    ("selection", "uids"): ("uid",),
    ("selection", "rollout_ids"): ("rollout_id",),
    ("selection", "group_id"): ("group_id",),
    ("selection", "agent"): ("agent",),
    ("selection", "states"): ("state",),
    ("selection", "labels"): ("label",),
    ("selection", "callers"): ("caller",),
    ("selection", "delivery_states"): ("delivery",),
    ("timeout",): ("wait",),
    ("after_sequence",): ("after",),
}


def duration(seconds: float) -> Duration:
    """Seconds as a duration, rounded to the nearest nanosecond."""
    whole, rest = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=rest)


def wrong(kind: str, place: str, message: str) -> InvalidBody:
    """One fault outside of the body: in a header, a query or a path."""
    return InvalidBody([{"type": "value_error", "loc": (kind, place), "msg": message}])


def start_request(asked: body.StartRollout, idempotency_key: str | None) -> pb.StartRolloutRequest:
    """The call that a valid body asks for. Raises InvalidBody where body and header name two request ids."""
    request_id = asked.request_id or idempotency_key or ""
    if idempotency_key and idempotency_key != request_id:
        raise wrong("header", IDEMPOTENCY_KEY, "differs from request_id; send one of them, or the same twice")
    if len(request_id) > 256:
        raise wrong("header", IDEMPOTENCY_KEY, "has at most 256 characters")
    return pb.StartRolloutRequest(
        request_id=request_id,
        spec=_spec(asked, asked.rollout_id or request_id or uuid.uuid4().hex),
        credentials=spec_pb2.Credentials(
            completions_bearer=_bearer(asked.completions),
            outcome_bearer=_bearer(asked.outcome),
            tools_bearer=_bearer(asked.tools),
        ),
    )


def _spec(asked: body.StartRollout, rollout_id: str) -> spec_pb2.RolloutSpec:
    detached = asked.cancel_after_detach_seconds
    return spec_pb2.RolloutSpec(
        rollout_id=rollout_id,
        group_id=asked.group_id or "",
        agent=asked.agent or "",
        messages=[message_pb2.Message(json=body.text(message)) for message in asked.messages],
        completions=_target(asked.completions),
        outcome=_target(asked.outcome),
        tools=_target(asked.tools),
        sampling=_sampling(asked.sampling),
        limits=_limits(asked.limits),
        tokenizer=_tokenizer(asked.tokenizer),
        token_mode=enums.value_of(enums.TOKEN_MODES, asked.token_mode),
        on_drift=enums.value_of(enums.DRIFT_POLICIES, asked.on_drift),
        on_interrupt=enums.value_of(enums.INTERRUPT_POLICIES, asked.on_interrupt),
        cancel_after_detach=None if detached is None else duration(detached),
        priority=asked.priority or 0,
        metadata_json=body.text(asked.metadata),
        labels=asked.labels,
    )


def _bearer(endpoint: body.EndpointBody | None) -> str:
    return "" if endpoint is None else endpoint.bearer or ""


def _target(endpoint: body.EndpointBody | None) -> spec_pb2.Target | None:
    if endpoint is None:
        return None
    return spec_pb2.Target(
        url=endpoint.url,
        dialect=enums.value_of(enums.DIALECTS, endpoint.dialect),
        replays_turn_keys=bool(endpoint.replays_turn_keys),
        model=endpoint.model or "",
    )


def _sampling(sampling: body.Sampling | None) -> spec_pb2.Sampling | None:
    if sampling is None:
        return None
    return spec_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
        logprobs=sampling.logprobs,
        extra_json=body.text(sampling.extra),
    )


def _limits(limits: body.Limits | None) -> spec_pb2.Limits | None:
    if limits is None:
        return None
    return spec_pb2.Limits(
        turns=limits.turns,
        generated_tokens=limits.generated_tokens,
        time=None if limits.seconds is None else duration(limits.seconds),
        calls_per_turn=limits.calls_per_turn,
        tool_turns=limits.tool_turns,
        bytes=limits.bytes,
    )


def _tokenizer(tokenizer: body.Tokenizer | None) -> spec_pb2.Tokenizer | None:
    if tokenizer is None:
        return None
    return spec_pb2.Tokenizer(
        name=tokenizer.name,
        revision=tokenizer.revision or "",
        template_kwargs_json=body.text(tokenizer.template_kwargs),
    )


def cancel_request(asked: body.CancelRollouts) -> pb.CancelRolloutsRequest:
    """The call that a valid body asks for."""
    selection = pb.Selection(
        uids=asked.uids,
        rollout_ids=asked.rollout_ids,
        group_id=asked.group_id or "",
        agent=asked.agent or "",
        states=enums.values_of(enums.STATES, asked.states or ()),
        labels=asked.labels,
        all=bool(asked.all),
        callers=asked.callers,
    )
    return pb.CancelRolloutsRequest(selection=selection, reason=asked.reason or "")


def labels(pairs: Iterable[str]) -> dict[str, str]:
    """The labels of `KEY=VALUE` texts. Raises InvalidBody."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise wrong("query", "label", "must be KEY=VALUE")
        if found.setdefault(key, value) != value:
            raise wrong("query", "label", "names one key with two values, which no rollout has")
    return found
