"""The caller of an rpc: set by the outermost interceptor, read by the services."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TypeAlias

from osmosis.rollout.v1 import rollout_service_pb2, trainer_service_pb2

from rollout_server.core.error import Unauthenticated
from rollout_server.runtime.start_request import Caller

Admit: TypeAlias = "Callable[[str | None], Caller]"
"""Returns the caller for an authorization header. Raises `Unauthenticated`."""

_caller: ContextVar[Caller] = ContextVar("caller")
_SERVICE = rollout_service_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
_TRAINERS = trainer_service_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
_GUARDED = (f"/{_SERVICE}/", f"/{_TRAINERS}/")
_OPEN = f"/{_SERVICE}/GetServerInfo"


def admit(admit: Admit, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Authenticate the current call and store its caller. Health checks and GetServerInfo need no key.

    Raises `Unauthenticated`, also for two `authorization` entries: a proxy that checked the key may have read the other one.
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
    """Return the caller of the current call. Raise LookupError in a call that needs no key."""
    return _caller.get()
