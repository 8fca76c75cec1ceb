"""The caller of an rpc: set by the outermost interceptor, read by the services."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from dataclasses import replace
from typing import TypeAlias

from osmosis.rollout.v1 import agent_service_pb2, rollout_service_pb2, tool_service_pb2, trainer_service_pb2

from rollout_server.core.error import Forbidden, Unauthenticated
from rollout_server.edge.tracing.propagation import trace_of
from rollout_server.runtime.start_request import Caller

Admit: TypeAlias = "Callable[[str | None], Caller]"
"""Returns the caller for an authorization header. Raises `Unauthenticated`."""

AdmitModel: TypeAlias = "Callable[[str], str | None]"
"""Returns the uid of the rollout to which an authorization header's model key belongs; None if it is no such key."""

_caller: ContextVar[Caller] = ContextVar("caller")
_key_uid: ContextVar[str] = ContextVar("key_uid")
SERVICE = rollout_service_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
TRAINERS = trainer_service_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
TOOLS = tool_service_pb2.DESCRIPTOR.services_by_name["ToolService"].full_name
AGENTS = agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
_GUARDED = (f"/{SERVICE}/", f"/{TRAINERS}/", f"/{TOOLS}/")
_OPEN = f"/{SERVICE}/GetServerInfo"
_OF_AGENTS = f"/{AGENTS}/"


def admit(admit: Admit, admit_model: AdmitModel, method: str, metadata: Collection[tuple[str, str | bytes]]) -> None:
    """Authenticate the current call and store its caller with its trace, or on AgentService the rollout of its key.

    Health checks and GetServerInfo need no key. Raises `Unauthenticated`, and `Forbidden` on AgentService. Also for two
    `authorization` entries: a proxy that checked the key may have read the other one.
    """
    if not method.startswith((*_GUARDED, _OF_AGENTS)) or method == _OPEN:
        return
    header = authorization(metadata)
    if method.startswith(_OF_AGENTS):
        uid = None if header is None else admit_model(header)
        if uid is None:
            raise wrong_model_key()
        _key_uid.set(uid)
        return
    if header is None and (count := sum(name == "authorization" for name, _ in metadata)) > 1:
        text = f"the metadata has {count} `authorization` entries; send one"
        raise Unauthenticated(text, reason="KEY_AMBIGUOUS")
    found = admit(header)
    trace = trace_of(metadata)
    _caller.set(replace(found, trace=trace) if trace.traceparent else found)


def authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the `authorization` entry of a call's metadata; None without one, and with several."""
    headers = [value for name, value in metadata if name == "authorization"]
    return headers[0] if len(headers) == 1 and isinstance(headers[0], str) else None


def wrong_model_key() -> Forbidden:
    """Return the error of a call without the key of its rollout. It is the same whether or not there is such a rollout."""
    text = "the call needs the key of this rollout's model endpoint, as the start of the rollout returned it"
    return Forbidden(text, reason="MODEL_KEY_INVALID")


def caller() -> Caller:
    """Return the caller of the current call. Raise LookupError in a call that needs no key."""
    return _caller.get()


def key_uid() -> str:
    """Return the uid of the rollout whose key the current call has. Raise LookupError outside AgentService."""
    return _key_uid.get()
