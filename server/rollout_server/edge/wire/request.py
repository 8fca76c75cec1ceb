"""Conversion of request protos to core values. All violations of a request are collected and raised in one `InvalidRequest`."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import Protocol

from osmosis.rollout.v1 import group_pb2, outcome_pb2, rollout_service_pb2, spec_pb2

from rollout_server.core.error import Forbidden, InvalidRequest, Violation
from rollout_server.core.spec import Dialect, Target
from rollout_server.edge.targets.host_port import LONGEST_URL
from rollout_server.edge.wire import enums
from rollout_server.edge.wire.message import messages_from_proto
from rollout_server.edge.wire.spec import spec_from_proto
from rollout_server.runtime.groups.state import GroupPlan
from rollout_server.runtime.policy import PolicyUpdate
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.start_request import Caller, StartRequest


class _EnumType(Hashable, Protocol):
    """The type of a proto enum."""

    def values(self) -> Sequence[int]:
        """Return the numbers of all its values."""


_STATES = {value: state for state, value in enums.STATES.items()}
_DELIVERY_STATES = {value: state for state, value in enums.DELIVERY_STATES.items()}
MAX_SELECTED = 1000
ON_STREAM = Target("", Dialect.STREAM)
"""The target of a rollout whose trainer is on a stream."""
MOST_TEXT = 256
"""Characters of a text to search for."""
MOST_REASON = 1000
"""Characters of the reason of a cancellation."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_MOST_CLASSES = len(enums.FAILURE_CLASSES)


def start_request(
    request: rollout_service_pb2.StartRolloutRequest, caller: Caller, completes: Target | None = None
) -> StartRequest:
    """Return the core value of a start request. Raises `InvalidRequest`.

    `completes` is the target that generates completions if the request must not name one (TrainerService.Train).
    """
    if not request.HasField("spec"):
        raise InvalidRequest(
            Violation("spec", "is missing; it describes the rollout (rollout_id, messages, completions, ...)")
        )
    messages, typed, wrong = messages_from_proto(request.spec.messages, "spec.messages")
    if completes is None and not request.spec.HasField("completions"):
        wrong.append(Violation("spec.completions", "is missing; name the endpoint that generates completions"))
    if completes is not None and request.spec.HasField("completions"):
        text = "must be unset on TrainerService.Train, where the trainer on the stream generates completions"
        wrong.append(Violation("spec.completions", text))
    wrong += _unknown_enum_values(request)
    if wrong:
        raise InvalidRequest(*wrong)
    return StartRequest(
        spec=spec_from_proto(request.spec, messages, typed, completes),
        caller=caller.name,
        request_id=request.request_id,
        until_received=request.request_memory == rollout_service_pb2.REQUEST_MEMORY_UNTIL_RECEIVED,
        credentials=credentials_from_proto(request.credentials),
        trace=caller.trace,
    )


def credentials_to_proto(credentials: Credentials) -> spec_pb2.Credentials:
    """Return the proto of credentials. It must be encrypted wherever it is stored."""
    return spec_pb2.Credentials(
        completions_bearer=credentials.completions,
        outcome_bearer=credentials.outcome,
        tools_bearer=credentials.tools,
        model_bearers=credentials.models,
    )


def credentials_from_proto(proto: spec_pb2.Credentials) -> Credentials:
    """Return the core value of credentials."""
    return Credentials(proto.completions_bearer, proto.outcome_bearer, proto.tools_bearer, dict(proto.model_bearers))


def prompt_request(request: rollout_service_pb2.RenderPromptRequest, caller: Caller) -> StartRequest:
    """Return the request that would start the rollout of a prompt, with the fields that do not affect it filled in.

    Raises `InvalidRequest`.
    """
    start = rollout_service_pb2.StartRolloutRequest()
    if request.HasField("spec"):
        start.spec.CopyFrom(request.spec)
        start.spec.rollout_id = request.spec.rollout_id or "prompt"
    return start_request(start, caller, None if start.spec.HasField("completions") else ON_STREAM)


def group_request(request: group_pb2.StartGroupRequest, caller: Caller) -> tuple[StartRequest, GroupPlan]:
    """Return the core values of a request for a group: the request of its rollouts, and the plan. Raises `InvalidRequest`."""
    start = rollout_service_pb2.StartRolloutRequest(request_id=request.request_id, credentials=request.credentials)
    if request.HasField("spec"):
        start.spec.CopyFrom(request.spec)
    if _CONTROL.search(start.spec.group_id) or start.spec.group_id.endswith("/events"):
        text = 'must not contain line breaks and other control characters, or end in "/events": the HTTP API has it in its paths'
        raise InvalidRequest(Violation("spec.group_id", text))
    started = start_request(start, caller)
    return started, GroupPlan(request.count, request.min_usable, request.refill, started.spec.train_on)


def _unknown_enum_values(request: rollout_service_pb2.StartRolloutRequest) -> list[Violation]:
    """Return a violation for each unknown enum value.

    proto3 keeps the values of a newer contract. If the server treated them as unset, it would run a different rollout.
    """
    spec = request.spec
    fields = [
        ("request_memory", request.request_memory, rollout_service_pb2.RequestMemory),
        ("spec.token_mode", spec.token_mode, spec_pb2.TokenMode),
        ("spec.on_drift", spec.on_drift, spec_pb2.DriftPolicy),
        ("spec.on_interrupt", spec.on_interrupt, spec_pb2.InterruptPolicy),
        ("spec.staleness.action", spec.staleness.action, spec_pb2.StaleAction),
    ]
    targets = [(name, getattr(spec, name)) for name in ("completions", "outcome", "tools")]
    targets += [(f"models[{name}]", target) for name, target in spec.models.items()]
    fields += [(f"spec.{name}.dialect", target.dialect, spec_pb2.Dialect) for name, target in targets]
    text = "must not be STREAM; on TrainerService.Train leave `completions` unset"
    wrong = [
        Violation(f"spec.{name}.dialect", text) for name, target in targets if target.dialect == spec_pb2.DIALECT_STREAM
    ]
    fields += [
        (f"spec.train_on.classes[{index}]", value, outcome_pb2.FailureClass)
        for index, value in enumerate(spec.train_on.classes[:_MOST_CLASSES])
    ]
    wrong += _train_on_violations(spec.train_on)
    unknown = [(where, value) for where, value, kind in fields if value not in _numbers(kind)]
    return wrong + [Violation(where, f"{value} is unknown to this server") for where, value in unknown]


@cache  # protobuf builds the list anew for each call
def _numbers(kind: _EnumType) -> frozenset[int]:
    return frozenset(kind.values())


def _train_on_violations(train_on: spec_pb2.TrainOn) -> list[Violation]:
    where, classes = "spec.train_on.classes", train_on.classes
    if len(classes) > _MOST_CLASSES:
        return [Violation(where, f"has {len(classes)} entries, at most {_MOST_CLASSES} are allowed")]
    if outcome_pb2.FAILURE_CLASS_UNSPECIFIED in classes:
        return [Violation(where, "must not contain UNSPECIFIED; name the failure classes whose samples train")]
    return []


def policy_update(proto: spec_pb2.PolicyUpdate) -> PolicyUpdate:
    """Return the core value of an announcement."""
    return PolicyUpdate(proto.version, proto.step if proto.HasField("step") else None, proto.paused)


def announced_url(request: rollout_service_pb2.SetPolicyRequest) -> str:
    """Return the completion URL that an announcement is for, as specs have it; empty: all. Raises `InvalidRequest`."""
    if not request.HasField("policy"):
        raise InvalidRequest(Violation("policy", "is missing; it holds version, step and paused"))
    if len(request.completions_url) > LONGEST_URL:
        raise InvalidRequest(Violation("completions_url", f"must have at most {LONGEST_URL} characters"))
    return request.completions_url.rstrip("/")


def selection(proto: rollout_service_pb2.Selection, caller: Caller, *, searches: bool = False) -> Selection:
    """Return the core value of a selection. `searches`: it may contain a text to search for.

    Raises `InvalidRequest`, and `Forbidden` if it names other callers without an admin key.
    """
    if proto.text and not searches:
        raise InvalidRequest(
            Violation("selection.text", "is only for lists; list the rollouts and select them by uids")
        )
    if len(proto.text) > MOST_TEXT:
        raise InvalidRequest(Violation("selection.text", f"must have at most {MOST_TEXT} characters"))
    for name, values in (("uids", proto.uids), ("rollout_ids", proto.rollout_ids), ("callers", proto.callers)):
        if len(values) > MAX_SELECTED:
            raise InvalidRequest(Violation(f"selection.{name}", f"at most {MAX_SELECTED} are allowed"))
    for name, states, words in (
        ("states", proto.states, _STATES),
        ("delivery_states", proto.delivery_states, _DELIVERY_STATES),
        ("failure_classes", proto.failure_classes, enums.FAILURE_CLASSES_BY_NUMBER),
    ):
        unknown = [state for state in states if state not in words]
        if unknown:
            raise InvalidRequest(Violation(f"selection.{name}", f"unknown: {unknown[:5]}"))
    if not all(caller.sees(name) for name in proto.callers):
        raise Forbidden("rollouts of other callers require an admin key")
    return Selection(
        caller=caller,
        uids=tuple(proto.uids),
        rollout_ids=tuple(proto.rollout_ids),
        group_id=proto.group_id,
        agent=proto.agent,
        states=tuple(_STATES[state] for state in proto.states),
        labels=dict(proto.labels),
        delivery_states=tuple(_DELIVERY_STATES[state] for state in proto.delivery_states),
        callers=tuple(proto.callers),
        failure_classes=tuple(enums.FAILURE_CLASSES_BY_NUMBER[each] for each in proto.failure_classes),
        text=proto.text,
    )


def cancel_request(request: rollout_service_pb2.CancelRolloutsRequest, caller: Caller) -> tuple[Selection, str]:
    """Return which rollouts to cancel, and the reason. Raises as `selection` does."""
    if is_empty(request.selection):
        raise InvalidRequest(Violation("selection", "is empty; set `all` to cancel all of your rollouts"))
    if len(request.reason) > MOST_REASON:
        raise InvalidRequest(Violation("reason", f"must have at most {MOST_REASON} characters"))
    return selection(request.selection, caller), request.reason or "cancelled"


def is_empty(proto: rollout_service_pb2.Selection) -> bool:
    """Return whether a selection sets neither a condition nor `all`."""
    lists = (proto.uids, proto.rollout_ids, proto.states, proto.labels, proto.delivery_states, proto.callers)
    return not (proto.group_id or proto.agent or proto.all or any(lists) or proto.failure_classes or proto.text)


def valid_enum_value(value: int, kind: _EnumType, field: str) -> int:
    """Return a value of an enum. Raises `InvalidRequest` for an unknown one, which a newer version of the contract may define."""
    if value not in _numbers(kind):
        raise InvalidRequest(Violation(field, f"{value} is unknown to this server"))
    return value


def page_tokens(numbers: Iterable[int], proto: rollout_service_pb2.Selection) -> list[str]:
    """Return one token per page. A page begins below a rollout's number, and its token is valid only for this selection.

    Rollouts are numbered in the order of acceptance, so new ones do not shift the pages.
    """
    digest = _digest(proto)
    return [base64.urlsafe_b64encode(f"{number}.{digest}".encode()).decode() for number in numbers]


def page_start(token: str, proto: rollout_service_pb2.Selection) -> int | None:
    """Return the rollout number below which the page begins; None for the first page. Raises `InvalidRequest`."""
    if not token:
        return None
    try:
        number, _, digest = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode().partition(".")
        start = int(number)
    except (ValueError, binascii.Error):
        raise InvalidRequest(Violation("page_token", "is malformed; send one from a response")) from None
    if digest != _digest(proto):
        raise InvalidRequest(Violation("page_token", "belongs to another selection; start at the first page"))
    return start


def _digest(proto: rollout_service_pb2.Selection) -> str:
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()[:16]
