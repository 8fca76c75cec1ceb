"""Requests -> core. What is wrong with a request is collected, field by field, and raised at once."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from google.protobuf.duration_pb2 import Duration
from osmosis.rollout.v1 import rollout_service_pb2, spec_pb2

from rollout_server.core.error import Forbidden, InvalidRequest, Violation
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message
from rollout_server.core.spec import Dialect, Sampling, Spec, Target, TokenizerName
from rollout_server.edge.wire import enums
from rollout_server.edge.wire.message import messages_from_proto
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.registry.index import Selection
from rollout_server.runtime.start_request import Caller, StartRequest


class _EnumType(Protocol):
    """The type of an enum of the contract."""

    def values(self) -> Sequence[int]:
        """Its values."""


_DIALECTS = {value: dialect for dialect, value in enums.DIALECTS.items()}
_DRIFT_POLICIES = {value: policy for policy, value in enums.DRIFT_POLICIES.items()}
_STATES = {value: state for state, value in enums.STATES.items()}
_DELIVERY_STATES = {value: state for state, value in enums.DELIVERY_STATES.items()}
MAX_SELECTED = 1000


def wish(
    request: rollout_service_pb2.StartRolloutRequest, caller: Caller, completes: Target | None = None
) -> StartRequest:
    """A request for a rollout. `completes` says who does where the request may not. Raises `InvalidRequest`."""
    if not request.HasField("spec"):
        raise InvalidRequest(
            Violation("spec", "is missing: it says what to run (rollout_id, messages, completions, ...)")
        )
    messages, typed, wrong = messages_from_proto(request.spec.messages, "spec.messages")
    if completes is None and not request.spec.HasField("completions"):
        wrong.append(Violation("spec.completions", "is needed: who completes?"))
    if completes is not None and request.spec.HasField("completions"):
        wrong.append(Violation("spec.completions", "must be unset on TrainerService.Train: its caller completes"))
    if len(request.request_id) > 256:
        wrong.append(Violation("request_id", "has at most 256 characters"))
    wrong += _unknown_words(request)
    if wrong:
        raise InvalidRequest(*wrong)
    credentials = request.credentials
    return StartRequest(
        spec=_spec(request.spec, messages, typed, completes or _target(request.spec.completions)),
        caller=caller.name,
        request_id=request.request_id,
        until_received=request.request_memory == rollout_service_pb2.REQUEST_MEMORY_UNTIL_RECEIVED,
        credentials=Credentials(credentials.completions_bearer, credentials.outcome_bearer, credentials.tools_bearer),
    )


def _unknown_words(request: rollout_service_pb2.StartRolloutRequest) -> list[Violation]:
    """Enum values of a later version of the contract: to take them for unset would run something else."""
    spec = request.spec
    words = [
        ("request_memory", request.request_memory, rollout_service_pb2.RequestMemory),
        ("spec.token_mode", spec.token_mode, spec_pb2.TokenMode),
        ("spec.on_drift", spec.on_drift, spec_pb2.DriftPolicy),
        ("spec.on_interrupt", spec.on_interrupt, spec_pb2.InterruptPolicy),
    ]
    targets = [(name, getattr(spec, name)) for name in ("completions", "outcome", "tools")]
    words += [(f"spec.{name}.dialect", target.dialect, spec_pb2.Dialect) for name, target in targets]
    here = "is spoken on TrainerService.Train only, where `completions` stays unset"
    wrong = [
        Violation(f"spec.{name}.dialect", here) for name, target in targets if target.dialect == spec_pb2.DIALECT_STREAM
    ]
    unknown = [(where, value) for where, value, kind in words if value not in kind.values()]
    return wrong + [Violation(where, f"{value} is not known here") for where, value in unknown]


def selection(proto: rollout_service_pb2.Selection, caller: Caller) -> Selection:
    """Which rollouts. Raises `InvalidRequest`, and `Forbidden` for those of other callers."""
    for name, values in (("uids", proto.uids), ("rollout_ids", proto.rollout_ids), ("callers", proto.callers)):
        if len(values) > MAX_SELECTED:
            raise InvalidRequest(Violation(f"selection.{name}", f"at most {MAX_SELECTED} are allowed"))
    for name, states, words in (
        ("states", proto.states, _STATES),
        ("delivery_states", proto.delivery_states, _DELIVERY_STATES),
    ):
        unknown = [state for state in states if state not in words]
        if unknown:
            raise InvalidRequest(Violation(f"selection.{name}", f"unknown: {unknown}"))
    if not all(caller.sees(name) for name in proto.callers):
        raise Forbidden("rollouts of other callers are seen with an admin key only")
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
    )


def is_empty(proto: rollout_service_pb2.Selection) -> bool:
    """No condition is set, and `all` neither."""
    lists = (proto.uids, proto.rollout_ids, proto.states, proto.labels, proto.delivery_states, proto.callers)
    return not (proto.group_id or proto.agent or proto.all or any(lists))


def known(value: int, kind: _EnumType, field: str) -> int:
    """A value of an enum. Raises `InvalidRequest` for one of a later version of the contract."""
    if value not in kind.values():
        raise InvalidRequest(Violation(field, f"{value} is not known here"))
    return value


def page_tokens(numbers: Iterable[int], proto: rollout_service_pb2.Selection) -> list[str]:
    """Tokens of the pages that begin below these numbers. They fit this selection only."""
    digest = _digest(proto)
    return [base64.urlsafe_b64encode(f"{number}.{digest}".encode()).decode() for number in numbers]


def page_start(token: str, proto: rollout_service_pb2.Selection) -> int | None:
    """The number before which the page begins; None for the first page. Raises `InvalidRequest`."""
    if not token:
        return None
    try:
        number, _, digest = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode().partition(".")
        start = int(number)
    except (ValueError, binascii.Error):
        raise InvalidRequest(Violation("page_token", "is not one of ours")) from None
    if digest != _digest(proto):
        raise InvalidRequest(Violation("page_token", "belongs to another selection"))
    return start


def seconds(duration: Duration) -> float:
    """A duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def _digest(proto: rollout_service_pb2.Selection) -> str:
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()[:16]


def _spec(proto: spec_pb2.RolloutSpec, messages: tuple[Message, ...], typed: bool, completions: Target) -> Spec:
    return Spec(
        rollout_id=proto.rollout_id,
        messages=messages,
        completions=completions,
        group_id=proto.group_id,
        agent=proto.agent,
        typed=typed,
        outcome=_target(proto.outcome, Dialect.HTTP_PLAIN) if proto.HasField("outcome") else None,
        tools=_target(proto.tools) if proto.HasField("tools") else None,
        sampling=_sampling(proto.sampling),
        limits=_limits(proto.limits),
        tokenizer=_tokenizer(proto.tokenizer) if proto.HasField("tokenizer") else None,
        on_drift=_DRIFT_POLICIES.get(proto.on_drift),
        on_interrupt=proto.on_interrupt,
        token_mode=proto.token_mode,
        cancel_after_detach=seconds(proto.cancel_after_detach) if proto.HasField("cancel_after_detach") else None,
        priority=proto.priority,
        metadata_json=proto.metadata_json,
        labels=dict(proto.labels),
        source_json=proto.source_json,
    )


def _target(proto: spec_pb2.Target, over_http: Dialect = Dialect.HTTP_MASKED) -> Target:
    """An endpoint; `over_http` is what an http URL means that names no dialect."""
    dialect = _DIALECTS.get(proto.dialect)
    if dialect is None:
        dialect = Dialect.GRPC if _scheme(proto.url).startswith("grpc") else over_http
    return Target(proto.url.rstrip("/"), dialect, proto.replays_turn_keys, proto.model)


def _scheme(url: str) -> str:
    try:
        return urlsplit(url).scheme
    except ValueError:
        return ""


def _sampling(proto: spec_pb2.Sampling) -> Sampling:
    return Sampling(
        temperature=proto.temperature if proto.HasField("temperature") else None,
        top_p=proto.top_p if proto.HasField("top_p") else None,
        max_tokens=proto.max_tokens if proto.HasField("max_tokens") else None,
        stop=tuple(proto.stop),
        logprobs=proto.logprobs if proto.HasField("logprobs") else None,
        extra_json=proto.extra_json,
    )


def _limits(proto: spec_pb2.Limits) -> Limits:
    return Limits(
        turns=proto.turns if proto.HasField("turns") else None,
        generated_tokens=proto.generated_tokens if proto.HasField("generated_tokens") else None,
        seconds=seconds(proto.time) if proto.HasField("time") else None,
        calls_per_turn=proto.calls_per_turn if proto.HasField("calls_per_turn") else None,
        tool_turns=proto.tool_turns if proto.HasField("tool_turns") else None,
        bytes=proto.bytes if proto.HasField("bytes") else None,
    )


def _tokenizer(proto: spec_pb2.Tokenizer) -> TokenizerName:
    return TokenizerName(proto.name, proto.revision, proto.template_kwargs_json)
