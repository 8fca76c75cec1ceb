"""`ctx.llm` in a rollout: every answer goes through the run, and so into the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_server.core.message import ToolCall
from rollout_server.core.outcome import Category, Failure
from rollout_server.runtime.run import Reply, RolloutOver, Run
from rollout_server.sdk.access import append_results
from rollout_server.sdk.asked import own_sampling
from rollout_server.sdk.client import CompletionsResult
from rollout_server.sdk.core.exceptions import (
    OsmosisRolloutError,
    OsmosisServerError,
    OsmosisTimeoutError,
    OsmosisTransportError,
    OsmosisValidationError,
)
from rollout_server.sdk.core.schemas import MessageDict, RolloutMetrics, RolloutRequest, copied
from rollout_server.sdk.following import Following


class RunClient:
    """Completes for one rollout of an agent loop. One call at a time, as the trainer's history grows one turn at a time."""

    def __init__(self, run: Run, request: RolloutRequest) -> None:
        self.run = run
        self._params = request.completion_params
        self._following = Following([copied(message) for message in request.messages])
        self._calls: Sequence[ToolCall] = ()
        self._tool_ms = 0.0
        self._has_failed = False

    async def chat_completions(self, messages: list[MessageDict], **kwargs: Any) -> CompletionsResult:
        """The model's answer to the whole conversation.

        A list that is the last one with the answer and more appended is followed; any other opens a segment. Sampling parameters
        hold for this call; those that are not given are the request's. Raises `OsmosisValidationError` for a list or a parameter
        that cannot be sent, and an `OsmosisRolloutError` when the trainer fails; then the rollout is over.
        """
        own = own_sampling(self.run.request, self._params, kwargs)
        given = _checked(messages)
        try:
            await self._follow(given)
            before = self.run.used
            reply = await self.run.sample(**own)
        except RolloutOver as over:
            # Once: a loop that swallows it and asks again has to end.
            if not isinstance(over.end, Failure) or self._has_failed:
                raise
            self._has_failed = True
            raise failed(over.end) from over
        after = self.run.used
        self._following.answered(given, reply.message)
        self._calls = reply.tool_calls
        prompt, generated = after.prompt_tokens - before.prompt_tokens, after.generated_tokens - before.generated_tokens
        return _result(reply, {"prompt_tokens": prompt, "completion_tokens": generated})

    def get_metrics(self) -> RolloutMetrics:
        """What the rollout has used so far."""
        used = self.run.used
        return RolloutMetrics(
            llm_latency_ms=used.completion_ms,
            num_llm_calls=used.turns,
            prompt_tokens=used.prompt_tokens,
            response_tokens=used.generated_tokens,
            max_context_tokens=used.max_context_tokens,
        )

    def tool_call_took(self, milliseconds: float) -> None:
        """The loop ran a tool; its result is still to come."""
        self._tool_ms += max(0.0, milliseconds)

    async def conclude(self, messages: Sequence[MessageDict]) -> bool:
        """Takes over what the last list says beyond the conversation so far; False where it is another conversation."""
        given = _checked(messages)
        following = self._following.new_messages(given)
        if following is None:
            return False
        await self._append(following)
        return True

    async def _follow(self, given: Sequence[MessageDict]) -> None:
        following = self._following.new_messages(given)
        if following is None:
            self._calls, self._tool_ms = (), 0.0
            self.run = await self.run.fork(given, kind="compaction")
        else:
            await self._append(following)

    async def _append(self, messages: Sequence[Mapping[str, Any]]) -> None:
        # The calls of a turn count as returned together, when their messages come: so their time is the sum of what was recorded.
        left = await append_results(self.run, self._calls, messages, self._tool_ms)
        self._calls, self._tool_ms = (), 0.0
        await self.run.append(*left)


def _result(reply: Reply, usage: dict[str, int]) -> CompletionsResult:
    return CompletionsResult(
        message=copied(reply.message),
        token_ids=list(reply.token_ids or ()),
        logprobs=list(reply.logprobs or ()),
        usage={**usage, "total_tokens": sum(usage.values())},
        finish_reason=reply.finish_reason,
    )


def failed(failure: Failure) -> OsmosisRolloutError:
    """What the earlier SDK raises for a trainer that failed."""
    text, status = failure.message, failure.http_status or 0
    match failure.category:
        case Category.TIMEOUT:
            return OsmosisTimeoutError(text)
        case Category.NETWORK:
            return OsmosisTimeoutError(text) if "no answer came within" in text else OsmosisTransportError(text)
        case Category.TRAINER_SERVER | Category.ENGINE_SERVER:
            return OsmosisServerError(text, status or 500)
        case (
            Category.TRAINER_CLIENT
            | Category.ENGINE_CLIENT
            | Category.RATE_LIMITED
            | Category.VALIDATION
            | Category.TOKEN_DRIFT
        ):
            return OsmosisValidationError(text, status or 422)
        case _:
            return OsmosisRolloutError(text)


def _checked(messages: object) -> list[MessageDict]:
    """Copies, so that nothing of the author's changes under our hands. Raises `OsmosisValidationError` naming the message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise OsmosisValidationError(f"messages must be a list of dicts, not {type(messages).__name__}", 400)
    found = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise OsmosisValidationError(f"{where} is {type(message).__name__}, a dict is needed", 400)
        role = message.get("role")
        if not isinstance(role, str) or not role.strip():
            raise OsmosisValidationError(f"{where} has no role", 400)
        try:
            found.append(copied(message))
        except (TypeError, ValueError, RecursionError) as error:
            raise OsmosisValidationError(f"{where} is not JSON: {error}", 400) from None
    if not found:
        raise OsmosisValidationError("messages is empty: there is nothing to answer", 400)
    return found
