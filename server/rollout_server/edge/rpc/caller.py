"""Who calls: established by the outermost interceptor, read by the service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TypeAlias

from osmosis.rollout.v1 import rollout_service_pb2, trainer_service_pb2

from rollout_server.runtime.wish import Caller

Admit: TypeAlias = "Callable[[str | None], Caller]"
"""The caller behind an authorization header. Raises `Unauthenticated`."""

_caller: ContextVar[Caller] = ContextVar("caller")
_SERVICE = rollout_service_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
_TRAINERS = trainer_service_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
_GUARDED = (f"/{_SERVICE}/", f"/{_TRAINERS}/")
_OPEN = f"/{_SERVICE}/GetServerInfo"


def admit(admit: Admit, method: str, metadata: Mapping[str, str | bytes]) -> None:
    """Establishes who calls for the rest of this call. Health checks and GetServerInfo are open to everybody."""
    if method.startswith(_GUARDED) and method != _OPEN:
        header = metadata.get("authorization")
        _caller.set(admit(header if isinstance(header, str) else None))


def caller() -> Caller:
    """Who made the call under way. Raises LookupError in a call that is open to everybody."""
    return _caller.get()
