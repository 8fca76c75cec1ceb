"""The journal's encoding of accepted starts, groups and credentials, without loss."""

from __future__ import annotations

from dataclasses import fields, replace

from google.protobuf.message import DecodeError
from osmosis.journal.v1 import journal_pb2 as pb

from rollout_server.core.spec import Spec
from rollout_server.edge.journal.values import read_messages, write_messages
from rollout_server.edge.wire.request import credentials_from_proto, credentials_to_proto
from rollout_server.edge.wire.spec import fields_of, spec_from_proto, spec_to_proto
from rollout_server.runtime.journal import AcceptedStart, FormedGroup
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.start_request import StartRequest, TraceContext


def encode_start(start: AcceptedStart) -> bytes:
    """Return an accepted start as bytes, without the credentials of its request."""
    request = start.request
    proto = pb.AcceptedStart(
        uid=start.uid,
        caller=request.caller,
        request_id=request.request_id,
        until_received=request.until_received,
        fingerprint=start.fingerprint,
        agent_version=start.agent_version,
        created=start.created,
        traceparent=request.trace.traceparent,
        tracestate=request.trace.tracestate,
    )
    _write_spec(request.spec, proto)
    return proto.SerializeToString()


def decode_start(data: bytes) -> AcceptedStart:
    """Return the accepted start of `encode_start`, with empty credentials. Raises ValueError for other bytes."""
    try:
        proto = pb.AcceptedStart.FromString(data)
        if not proto.HasField("spec"):
            raise ValueError("it has no spec")
        spec = _read_spec(proto)
    except (DecodeError, KeyError, ValueError) as error:
        raise ValueError(f"these bytes are not an accepted start that this version can read: {error!r}") from error
    trace = TraceContext(proto.traceparent, proto.tracestate)
    request = StartRequest(spec, proto.caller, proto.request_id, proto.until_received, trace=trace)
    return AcceptedStart(proto.uid, request, proto.fingerprint, proto.agent_version, proto.created)


def _write_spec(spec: Spec, proto: pb.AcceptedStart) -> None:
    # A Duration holds whole nanoseconds, and a limit of an agent or of the settings may be any float.
    rounded = replace(spec, limits=replace(spec.limits, seconds=None), cancel_after_detach=None)
    proto.spec.CopyFrom(spec_to_proto(rounded, with_messages=False))
    if spec.limits.seconds is not None:
        proto.limit_seconds = spec.limits.seconds
    if spec.cancel_after_detach is not None:
        proto.cancel_after_detach_seconds = spec.cancel_after_detach
    write_messages(spec.messages, proto.messages)
    proto.typed = spec.typed
    proto.label_names.extend(spec.labels)
    proto.model_names.extend(spec.models)


def _read_spec(proto: pb.AcceptedStart) -> Spec:
    spec = spec_from_proto(proto.spec, read_messages(proto.messages), proto.typed)
    seconds = proto.limit_seconds if proto.HasField("limit_seconds") else None
    detached = proto.cancel_after_detach_seconds if proto.HasField("cancel_after_detach_seconds") else None
    return replace(
        spec,
        limits=replace(spec.limits, seconds=seconds),
        cancel_after_detach=detached,
        labels={name: spec.labels[name] for name in proto.label_names},
        models={name: spec.models[name] for name in proto.model_names},
    )


def encode_group(group: FormedGroup) -> bytes:
    """Return a group as bytes."""
    return pb.FormedGroup(**fields_of(group)).SerializeToString()


def decode_group(data: bytes) -> FormedGroup:
    """Return the group of `encode_group`. Raises ValueError for other bytes."""
    try:
        proto = pb.FormedGroup.FromString(data)
    except DecodeError as error:
        raise ValueError(f"these bytes are not a group that this version can read: {error!r}") from error
    equal = {field.name: getattr(proto, field.name) for field in fields(FormedGroup)}
    return FormedGroup(**{**equal, "members": tuple(proto.members)})


def encode_credentials(credentials: Credentials) -> bytes:
    """Return credentials as bytes, in clear: the caller encrypts them."""
    return pb.StoredCredentials(credentials=credentials_to_proto(credentials)).SerializeToString()


def decode_credentials(data: bytes) -> Credentials:
    """Return the credentials of `encode_credentials`. Raises ValueError for other bytes, with a text that shows none of them."""
    try:
        return credentials_from_proto(pb.StoredCredentials.FromString(data).credentials)
    except DecodeError:
        raise ValueError("these bytes are not credentials; they may have been decrypted with another key") from None
