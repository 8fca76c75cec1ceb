"""Calls of further models, such as a judge: chat completions of any engine, without token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final
from weakref import WeakValueDictionary

from rollout_server.core.spec import ENGINES, Dialect, Spec, Target
from rollout_server.core.spec_validation import MODEL_NAME, model_violations
from rollout_server.edge.engine.completion_client import Chat
from rollout_server.edge.engine.errors import EndpointNames
from rollout_server.edge.engine.transport import Access
from rollout_server.runtime.models import ModelCompletion, ModelEndpoint, ModelLimits
from rollout_server.runtime.ports import CompletionRequest

_WHERE: Final = "in `models` of the request or ROLLOUT_MODELS"
NAMES: Final = EndpointNames(
    f"its URL {_WHERE}", f"its model name {_WHERE}", "in `credentials.model_bearers` or ROLLOUT_MODELS_KEYS"
)
"""The names of a further model's fields in error messages."""


def read_endpoints(entries: Sequence[str], keys: Sequence[str]) -> Mapping[str, ModelEndpoint]:
    """Parse `NAME=URL|MODEL[|ENGINE]` entries, and `NAME=KEY` entries for their keys.

    Raises ValueError. Its text names a wrong entry, but never quotes a key.
    """
    targets = dict(map(_read_entry, entries))
    bearers: dict[str, str] = {}
    for number, entry in enumerate(keys, start=1):
        name, _, key = (part.strip() for part in entry.partition("="))
        if name not in targets:
            raise ValueError(f"key {number} is not NAME=KEY with a NAME of ROLLOUT_MODELS")
        if not key or not key.isascii() or not key.isprintable():
            raise ValueError(f"the key of {name} must be printable ASCII: it becomes an HTTP header")
        bearers[name] = key
    return {name: ModelEndpoint(target, bearers.get(name, "")) for name, target in targets.items()}


def _read_entry(entry: str) -> tuple[str, Target]:
    name, _, rest = (part.strip() for part in entry.partition("="))
    url, model, dialect = (
        (*(part.strip() for part in rest.split("|")), "openai")[:3] if rest.count("|") else ("", "", "")
    )
    engines = {engine.value: engine for engine in ENGINES}
    if not MODEL_NAME.fullmatch(name) or not url or not model or rest.count("|") > 2 or dialect not in engines:
        raise ValueError(f"{name!r:.100} is not NAME=URL|MODEL or NAME=URL|MODEL|ENGINE with openai, vllm or sglang")
    target = Target(url.rstrip("/"), engines[dialect], model=model)
    for wrong in model_violations(target, name):
        raise ValueError(f"{wrong.field} {wrong.description}")
    return name, target


class EngineModels:
    """The `FurtherModels` of a server.

    Args:
        access: HTTP client and retry policy.
        endpoints: the server's own models.
        limits: limits of each rollout.
        concurrency: maximum concurrent calls of one model at one URL, over all rollouts; further calls wait.
    """

    def __init__(
        self, access: Access, endpoints: Mapping[str, ModelEndpoint], limits: ModelLimits, concurrency: int
    ) -> None:
        self.endpoints = endpoints
        self.limits = limits
        self._access = replace(access, names=NAMES)
        self._concurrency = concurrency
        # Requests name endpoints, so there may be any number: a semaphore lives as long as a call uses it.
        self._slots: WeakValueDictionary[tuple[str, str], asyncio.Semaphore] = WeakValueDictionary()

    async def complete(self, target: Target, request: CompletionRequest) -> ModelCompletion:
        """See `FurtherModels.complete`. Engines are called as OPENAI: their own forms add token ids that nobody reads."""
        slots = self._slots.setdefault((target.url, target.model), asyncio.Semaphore(self._concurrency))
        spec = Spec("", (), replace(target, dialect=Dialect.OPENAI))
        async with slots:
            completion, attempts = await Chat(self._access, spec, ()).complete(request.messages, request)
        return ModelCompletion(completion.message, completion.finish_reason, completion.usage, attempts)
