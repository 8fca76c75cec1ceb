"""`ctx.llm` in a rollout: completions go through the run, so the ledger records every token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_server.core.outcome import Category, Failure, Stop
from rollout_server.core.spec import Dialect
from rollout_server.runtime.errors import RolloutEnded
from rollout_server.runtime.run.arguments import SamplingOptions
from rollout_server.runtime.run.messages import Reply
from rollout_server.runtime.run.run import Run
from rollout_server.sdk.client import CompletionsResult
from rollout_server.sdk.conversations import Conversations, LoopConversation
from rollout_server.sdk.core.exceptions import (
    OsmosisRolloutError,
    OsmosisServerError,
    OsmosisTimeoutError,
    OsmosisTransportError,
    OsmosisValidationError,
)
from rollout_server.sdk.core.schemas import MessageDict, RolloutMetrics, RolloutRequest, copy_message
from rollout_server.sdk.history_diff import SerializedMessages
from rollout_server.sdk.request_view import SAMPLING_PARAMETERS, own_sampling
from rollout_server.sdk.run_access import usage_of

_TIMEOUT_TEXTS = ("no response within", "no answer came within")


class RunClient:
    """LLM client of one rollout. Several calls may be pending at the same time."""

    def __init__(self, run: Run, request: RolloutRequest) -> None:
        self._run = run
        self._params = request.completion_params
        self._conversations = Conversations(run, [copy_message(message) for message in request.messages])
        self._has_failed = False
        # With the synchronous HTTP API the trainer has counted the turn for its masks, so abandoning a turn ends the rollout.
        self._one_conversation = run.request.spec.completions.dialect is Dialect.HTTP_MASKED

    async def chat_completions(self, messages: list[MessageDict], *args: Any, **kwargs: Any) -> CompletionsResult:
        """Return the model's completion of the whole conversation.

        A list that continues an earlier one and its completion extends that segment. Any other list opens a new segment. So does a
        list that arrives while its conversation waits for a completion.

        Args:
            messages: the whole conversation.
            args: sampling parameters of this call, in the order temperature, top_p, max_tokens, stop, logprobs.
            kwargs: the same by name. Parameters that are not given are the request's.

        Raises `OsmosisValidationError` for invalid messages or parameters, and an `OsmosisRolloutError` if the trainer fails. After
        a trainer failure the rollout has ended.
        """
        parameters = {**dict(zip(SAMPLING_PARAMETERS, args, strict=False)), **kwargs}
        own = own_sampling(self._run.request, self._params, parameters)
        messages = _check_messages(messages)
        try:
            conversation = await self._conversations.take(messages)
            sampling = self._sample(conversation, messages, own)
            if conversation is self._conversations.main and not self._one_conversation:
                # The outcome needs the main conversation, so its completion continues even if the loop cancels this call.
                return await asyncio.shield(sampling)
            return await sampling
        except RolloutEnded as over:
            # Only once. A loop that catches the error and calls again gets `RolloutEnded`, a BaseException, which ends it.
            if not isinstance(over.end, Failure) or self._has_failed:
                raise
            self._has_failed = True
            raise sdk_error(over.end) from over

    def get_metrics(self) -> RolloutMetrics:
        """Return the usage of the rollout so far."""
        used = self._run.used
        return RolloutMetrics(
            llm_latency_ms=used.completion_ms,
            num_llm_calls=used.turns,
            prompt_tokens=used.prompt_tokens,
            response_tokens=used.generated_tokens,
            max_context_tokens=used.max_context_tokens,
        )

    def tool_call_took(self, milliseconds: float) -> None:
        """Add the latency of a tool that the loop ran. Its result arrives with a later list."""
        self._conversations.tool_call_took(milliseconds)

    async def conclude(self, messages: Sequence[MessageDict]) -> bool:
        """Make the loop's final list the main conversation. Return False if the list continues no known conversation."""
        return await self._conversations.conclude(_check_messages(messages))

    async def finish(self, reason: str) -> None:
        """End the rollout with the loop's finish reason."""
        main = self._conversations.main
        if main.is_taken:
            main.run.close(Stop(reason))
        else:
            await main.run.finish(reason)

    async def _sample(
        self, conversation: LoopConversation, messages: SerializedMessages, own: SamplingOptions
    ) -> CompletionsResult:
        try:
            reply = await conversation.run.sample(**own)
            conversation.append_completion(messages, reply)
            return _result(reply, usage_of(conversation.run, reply))
        except asyncio.CancelledError:
            # The turn has no completion, so nothing can be appended. The main one stays open, because the outcome needs it.
            conversation.is_closed = conversation is not self._conversations.main
            raise
        finally:
            conversation.is_taken = False


def _result(reply: Reply, usage: dict[str, int]) -> CompletionsResult:
    return CompletionsResult(
        message=copy_message(reply.message),
        token_ids=list(reply.token_ids or ()),
        logprobs=list(reply.logprobs or ()),
        usage=usage,
        finish_reason=reply.finish_reason or "stop",
    )


def sdk_error(failure: Failure) -> OsmosisRolloutError:
    """Return the exception that the earlier SDK raises for this failure."""
    text, status = failure.message, failure.http_status or 0
    match failure.category:
        case Category.TIMEOUT:
            return OsmosisTimeoutError(text)
        case Category.NETWORK:
            # A timed-out completion has the category NETWORK too. Only the text of edge/trainer/http_client tells them apart.
            is_timeout = any(words in text for words in _TIMEOUT_TEXTS)
            return OsmosisTimeoutError(text) if is_timeout else OsmosisTransportError(text)
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


def _check_messages(messages: object) -> SerializedMessages:
    """Return copies, because the loop may change its list later. Raises `OsmosisValidationError` naming the message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise OsmosisValidationError(f"messages must be a list of dicts, not {type(messages).__name__}", 400)
    found = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise OsmosisValidationError(f"{where} is {type(message).__name__}; it must be a dict", 400)
        role = message.get("role")
        if not isinstance(role, str) or not role.strip():
            raise OsmosisValidationError(f"{where} has no role", 400)
        try:
            found.append(copy_message(message))
        except (TypeError, ValueError, RecursionError) as error:
            raise OsmosisValidationError(f"{where} is not JSON: {error}", 400) from None
    return SerializedMessages(found)
