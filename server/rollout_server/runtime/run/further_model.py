"""A further model of one rollout: finds its endpoint, calls it within the limits, and records the call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Unpack

from rollout_server.core.conversation import Conversation
from rollout_server.core.message import JSON
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.record import Answered, Asked, ModelCalled
from rollout_server.core.spec import Sampling, Target
from rollout_server.runtime.errors import AgentMistake, ModelFailed, RolloutEnded, RolloutFailed
from rollout_server.runtime.models import ModelEndpoint, ModelReply, ModelUsage
from rollout_server.runtime.ports import CompletionRequest, Credentials, Fork, Sampler, Tool
from rollout_server.runtime.run.arguments import SamplingOptions, check_room, turn_sampling
from rollout_server.runtime.run.context import RunContext, calling_tool, issued
from rollout_server.runtime.run.messages import checked_messages

_ENGINES = (Category.ENGINE_SERVER, Category.ENGINE_CLIENT)
_PASSING = (Category.NETWORK, Category.TIMEOUT, Category.RATE_LIMITED)


class RolloutModel:
    """The `ModelClient` of one rollout and one name, and the source of completions for conversations of that model."""

    def __init__(self, context: RunContext, conversation: Conversation, name: str) -> None:
        """Raise `AgentMistake` if neither the request nor the server has a model of this name."""
        self._context = context
        self._conversation = conversation
        self._name = name
        self._endpoint = _endpoint(context, name)
        self.usage = context.model_usage.setdefault(name, ModelUsage())

    async def sample(self, messages: Sequence[Mapping[str, JSON]], **sampling: Unpack[SamplingOptions]) -> ModelReply:
        """See `ModelClient.sample`."""
        context, target = self._context, self._endpoint.target
        options = turn_sampling(Sampling(), sampling, target.dialect)
        request = self._request(messages, options)
        _check_unfinished(context)
        digest = "" if calling_tool.get() else _digest(self._name, request)
        number, replayed = await context.claim_call(digest, self._conversation)
        if replayed is not None and isinstance(replayed.record, ModelCalled):
            self.count(replayed.record.usage)
            return ModelReply.of(replayed.record)
        self.check_limits()
        self.usage.calls += 1
        clock, turn = context.rollout.clock, context.machine.turn
        began = clock.monotonic()
        try:
            with context.waiting():
                await context.rollout.stored()  # what led to this call
                with context.tracer.completion(context.rollout, request, target, self._name) as report:
                    completion = await context.models.complete(target, request)
                    called = ModelCalled(
                        self._name,
                        completion.message,
                        completion.finish_reason,
                        completion.usage,
                        completion.attempts,
                        1000 * (clock.monotonic() - began),
                        self._conversation.id,
                        number,
                        digest,
                    )
                    report((called,))
        except RolloutFailed as failed:
            raise ModelFailed(_failure(self._name, failed.failure, turn)) from failed
        self.usage.generated_tokens += completion.usage[1] if completion.usage is not None else 0
        _check_unfinished(context)
        if context.machine.outcome is None:
            # In a coroutine, so always on the event loop; also once the end is decided.
            context.rollout.record(issued(called))
        return ModelReply.of(called)

    def _request(self, messages: Sequence[Mapping[str, JSON]], sampling: Sampling) -> CompletionRequest:
        given = checked_messages(messages)
        if not given:
            raise AgentMistake(f"model {self._name!r}: sample needs at least one message")
        rollout, conversation = self._context.rollout, self._conversation
        key = f"{rollout.uid}/model/{self._name}/{self.usage.calls + 1}"
        asked = Asked(self._context.machine.turn, conversation.id, key, len(given), sampling)
        return CompletionRequest(
            asked,
            given,
            None,
            0,
            conversation.line,
            rollout.deadline if rollout.ending.decided is None else None,
            Credentials(completions=self._endpoint.bearer),
            sampling=sampling,
        )

    @property
    def target(self) -> Target:
        """Where the model is served."""
        return self._endpoint.target

    @property
    def bearer(self) -> str:
        """The key of its endpoint at this time; "" for none. A request's key may be replaced while the rollout runs."""
        return _endpoint(self._context, self._name).bearer

    def open(self, tools: Sequence[Tool]) -> Sampler:
        """Return a sampler for a conversation that the model continues."""
        return _ModelSampler(self, self._context.models.open(self.target, self._context.rollout.spec, tools))

    def failed(self, failure: Failure, turn: int) -> Failure:
        """Return the failure of a rollout that ends because the model's endpoint failed in a turn."""
        return _failure(self._name, failure, turn)

    def count(self, usage: tuple[int, int] | None) -> None:
        """Count a call that is not made, because its result was recorded before a restart."""
        self.usage.calls += 1
        self.usage.generated_tokens += usage[1] if usage is not None else 0

    def check_limits(self) -> None:
        """Raise `AgentMistake` if the rollout is too large, or has used up its calls or tokens of the model."""
        limits, usage = self._context.models.limits, self.usage
        check_room(self._context.machine, self._conversation, f"model {self._name!r}")
        for used, most, what, setting in (
            (usage.calls, limits.calls, "calls", "ROLLOUT_MODELS_CALLS"),
            (usage.generated_tokens, limits.generated_tokens, "generated tokens", "ROLLOUT_MODELS_TOKENS"),
        ):
            if used >= most:
                text = f"model {self._name!r}: the rollout has used {used:,} {what}, at most {most:,} are allowed ({setting})"
                raise AgentMistake(text)


class _ModelSampler:
    """The sampler of a conversation of a further model: with its key only, counted, and with failures of an engine."""

    def __init__(self, model: RolloutModel, sampler: Sampler) -> None:
        self._model = model
        self._sampler = sampler

    async def sample(self, request: CompletionRequest) -> Answered:
        """Request a completion. Raise `RolloutFailed`, always of the class ENGINE."""
        usage = self._model.usage
        usage.calls += 1
        own = replace(request, credentials=Credentials(completions=self._model.bearer))
        try:
            answered = await self._sampler.sample(own)
        except RolloutFailed as failed:
            raise RolloutFailed(self._model.failed(failed.failure, request.asked.turn)) from failed
        usage.generated_tokens += _generated(answered)
        return answered

    def resume(self, asked: Asked, answered: Answered) -> None:
        """See `Sampler.resume`."""
        self._model.count((0, _generated(answered)))
        self._sampler.resume(asked, answered)

    def fork(self, fork: Fork) -> Sampler:
        """Return the sampler of a forked conversation, which has the same model."""
        return _ModelSampler(self._model, self._sampler.fork(fork))


def _digest(name: str, request: CompletionRequest) -> str:
    texts = [name, repr(request.sampling), *(message.text for message in request.messages)]
    return sha256(json.dumps(texts).encode()).hexdigest()


def _generated(answered: Answered) -> int:
    return len(answered.token_ids or ()) if answered.usage is None else answered.usage[1]


def _endpoint(context: RunContext, name: str) -> ModelEndpoint:
    """Return the request's endpoint, with the request's key, or else the server's with the server's key."""
    rollout, own = context.rollout, context.models.endpoints
    target = rollout.spec.models.get(name)
    if target is not None:
        return ModelEndpoint(target, rollout.credentials.models.get(name, ""))
    if name not in own:
        names = sorted({*own, *rollout.spec.models})
        there = f"there are {', '.join(names)}" if names else "this rollout has none"
        advice = "name it in `models` of the request, or in the server's ROLLOUT_MODELS (with --script: in its MODELS)"
        raise AgentMistake(f"model: there is no model {name!r:.100}; {there}; {advice}")
    return own[name]


def _failure(name: str, failure: Failure, turn: int) -> Failure:
    """Return the failure of a rollout that ends with it: that of an engine, whatever went wrong, and never the trainer's."""
    category = failure.category
    if category not in _ENGINES:
        category = Category.ENGINE_SERVER if category in _PASSING else Category.ENGINE_CLIENT
    text = failure.message.removeprefix(f"turn {turn}: ").replace("the engine", "its endpoint", 1)
    return Failure(category, f"model {name!r}, in turn {turn}: {text}", turn, failure.http_status, FailureClass.ENGINE)


def _check_unfinished(context: RunContext) -> None:
    """Raise `RolloutEnded` once the rollout has its outcome.

    Until then rewards may call models: that of the rollout, and that of its group, for which a decided end waits. A rollout that is
    cancelled while the reward of its group is computed does not fail the others: until that reward is known, its models work.
    """
    if context.machine.outcome is not None and not context.rollout.is_read:
        raise RolloutEnded(context.ending.end)
