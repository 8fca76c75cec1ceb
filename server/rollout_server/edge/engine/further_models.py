"""Calls of further models, such as a judge, and samplers of conversations whose completions come from one.

Single calls are chat completions of any engine, without token ids. The sampler of a conversation asks for ids, which become a
sample. The engine renders it: the request's tokenizer is that of another model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final
from weakref import WeakValueDictionary

from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import ENGINES, Dialect, Spec, Target
from rollout_server.core.spec_validation import MODEL_NAME, model_violations
from rollout_server.edge.engine.completion_client import Chat
from rollout_server.edge.engine.errors import EndpointNames
from rollout_server.edge.engine.samplers import Engines
from rollout_server.runtime.models import ModelCompletion, ModelEndpoint, ModelLimits
from rollout_server.runtime.ports import CompletionRequest, Fork, Sampler, Tool

_WHERE: Final = "in `models` of the request or ROLLOUT_MODELS"
NAMES: Final = EndpointNames(
    f"its URL {_WHERE}", f"its model name {_WHERE}", "in `credentials.model_bearers` or ROLLOUT_MODELS_KEYS"
)
"""The names of a further model's fields in error messages."""


def read_endpoints(entries: Sequence[str], keys: Sequence[str]) -> Mapping[str, ModelEndpoint]:
    """Parse `NAME=URL|MODEL[|ENGINE]` entries, and `NAME=KEY` entries for their keys.

    Raises ValueError. Its text names a wrong entry, but never quotes a key.
    """
    targets: dict[str, Target] = {}
    for name, target in map(_read_entry, entries):
        if name in targets:
            raise ValueError(f"{name!r} is there twice; give each model one entry")
        targets[name] = target
    bearers: dict[str, str] = {}
    for number, entry in enumerate(keys, start=1):
        name, _, key = (part.strip() for part in entry.partition("="))
        if name not in targets:
            raise ValueError(f"key {number} is not NAME=KEY with a NAME of ROLLOUT_MODELS")
        if name in bearers:
            raise ValueError(f"key {number} is the second one of {name}; give each model one key")
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
        engines: HTTP client, retry policy and tokenizers.
        endpoints: the server's own models.
        limits: limits of each rollout.
        concurrency: maximum concurrent calls of one model at one URL, over all rollouts; further calls wait.
    """

    def __init__(
        self, engines: Engines, endpoints: Mapping[str, ModelEndpoint], limits: ModelLimits, concurrency: int
    ) -> None:
        self.endpoints = endpoints
        self.limits = limits
        self._engines = replace(engines, access=replace(engines.access, names=NAMES))
        self._concurrency = concurrency
        # Requests name endpoints, so there may be any number: a semaphore lives as long as a call or a conversation uses it.
        self._slots: WeakValueDictionary[tuple[str, str], asyncio.Semaphore] = WeakValueDictionary()

    async def complete(self, target: Target, request: CompletionRequest) -> ModelCompletion:
        """See `FurtherModels.complete`. Engines are called as OPENAI: their own forms add token ids that nobody reads."""
        spec = Spec("", (), replace(target, dialect=Dialect.OPENAI))
        async with self._slots_of(target):
            completion, attempts = await Chat(self._engines.access, spec, ()).complete(request.messages, request)
        return ModelCompletion(completion.message, completion.finish_reason, completion.usage, attempts)

    def open(self, target: Target, spec: Spec, tools: Sequence[Tool]) -> Sampler:
        """See `FurtherModels.open`."""
        sampler = self._engines.open(replace(spec, completions=target, tokenizer=None), tools, tokens=False)
        return _LimitedSampler(sampler, self._slots_of(target))

    def _slots_of(self, target: Target) -> asyncio.Semaphore:
        return self._slots.setdefault((target.url, target.model), asyncio.Semaphore(self._concurrency))


class _LimitedSampler:
    """A sampler that shares the slots of its endpoint with all rollouts."""

    def __init__(self, sampler: Sampler, slots: asyncio.Semaphore) -> None:
        self._sampler = sampler
        self._slots = slots

    async def sample(self, request: CompletionRequest) -> Answered:
        """Wait for a slot and request a completion. Raises `RolloutFailed`."""
        async with self._slots:
            return await self._sampler.sample(request)

    def resume(self, asked: Asked, answered: Answered) -> None:
        """See `Sampler.resume`."""
        self._sampler.resume(asked, answered)

    def fork(self, fork: Fork) -> Sampler:
        """Return the sampler of a forked conversation."""
        return _LimitedSampler(self._sampler.fork(fork), self._slots)
