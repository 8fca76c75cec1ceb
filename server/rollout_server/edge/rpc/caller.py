"""Who calls: established by the outermost interceptor, read by the service."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TypeAlias

from osmosis.rollout.v1 import rollout_service_pb2, trainer_service_pb2

from rollout_server.core.error import Unauthenticated
from rollout_server.runtime.start_request import Caller

Admit: TypeAlias = "Callable[[str | None], Caller]"
"""The caller behind an authorization header. Raises `Unauthenticated`."""

_caller: ContextVar[Caller] = ContextVar("caller")
_SERVICE = rollout_service_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
_TRAINERS = trainer_service_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
_GUARDED = (f"/{_SERVICE}/", f"/{_TRAINERS}/")
_OPEN = f"/{_SERVICE}/GetServerInfo"


def admit(admit: Admit, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Establishes who calls for the rest of this call. Health checks and GetServerInfo are open to everybody.

    Raises `Unauthenticated`, also for two `authorization` entries: whoever checks keys on the way here may have read the other.
    """
    if not method.startswith(_GUARDED) or method == _OPEN:
        return
    headers = [value for name, value in metadata if name == "authorization"]
    if len(headers) > 1:
        text = f"the metadata has {len(headers)} `authorization` entries; send one"
        raise Unauthenticated(text, reason="KEY_AMBIGUOUS")
    header = headers[0] if headers else None
    _caller.set(admit(header if isinstance(header, str) else None))


def caller() -> Caller:
    """Who made the call under way. Raises LookupError in a call that is open to everybody."""
    return _caller.get()
