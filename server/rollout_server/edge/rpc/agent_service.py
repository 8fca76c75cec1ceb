"""AgentService: the model endpoint of each rollout, for agents that own their loop.

The interceptor has checked the key of a call before its request is read. Here the key's rollout is looked up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypeAlias

import grpc
from osmosis.rollout.v1 import agent_service_pb2 as pb
from osmosis.rollout.v1 import agent_service_pb2_grpc

from rollout_server.core.capture.call import ModelCall
from rollout_server.core.capture.decision import Open, Refuse
from rollout_server.core.capture.rendering import LaterSystem
from rollout_server.core.capture.rules import CaptureOptions
from rollout_server.core.capture.tree import CallTree
from rollout_server.core.error import (
    Busy,
    CallRefused,
    Draining,
    NotFound,
    NotPossible,
    RolloutError,
    RolloutOver,
)
from rollout_server.core.message import Message
from rollout_server.core.outcome import Cancellation, Failure, Stop
from rollout_server.edge.api_keys import bare_key
from rollout_server.edge.model_keys import ModelKeys, named_uid
from rollout_server.edge.offload import offload_request
from rollout_server.edge.rpc.caller import key_uid, wrong_model_key
from rollout_server.edge.rpc.prompts import PromptRenderer
from rollout_server.edge.tokens.cache import Tokenizers, later_system
from rollout_server.edge.tracing.propagation import attach, trace_of
from rollout_server.edge.wire import enums
from rollout_server.edge.wire import model_call as wire
from rollout_server.runtime.capture.continuation import finish
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.ending import RolloutEnding
from rollout_server.runtime.start_request import Caller

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_HOLDER: Final = Caller("", admin=True)
"""A key names its rollout, whoever holds it."""


class AgentService(agent_service_pb2_grpc.AgentServiceServicer):
    """Serves the model endpoints of a registry's rollouts. `count_call` is called with the result of each model call."""

    def __init__(
        self,
        registry: RolloutRegistry,
        keys: ModelKeys,
        tokenizers: Tokenizers,
        count_call: Callable[[str], None],
    ) -> None:
        self._registry = registry
        self._count_call = count_call
        self._keys = keys
        self._tokenizers = tokenizers
        self._prompts = PromptRenderer(tokenizers)

    def key_uid(self, authorization: str) -> str | None:
        """Return the uid of the rollout to which the key of this header belongs; None if it is no key of a rollout."""
        key = bare_key(authorization)
        return self._keys.uid_of(key) or self._uid_of_earlier(key)

    def _uid_of_earlier(self, key: str) -> str | None:
        """Return the uid of the rollout for which an earlier process has handed out this key."""
        uid = named_uid(key)
        try:
            return uid if self._registry.get(uid, _HOLDER).capture.accepts(key) else None
        except NotFound:
            return None

    async def CallModel(self, request: pb.CallModelRequest, context: _Context) -> AsyncIterator[pb.CallModelResponse]:
        """Complete one call. If its caller leaves, the completion is kept for the same call."""
        rollout = self._rollout(request.uid)
        result = "disconnected"
        attach(trace_of(context.invocation_metadata() or ()))
        try:
            call = await offload_request(lambda: wire.model_call(request), request.ByteSize())
            begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            completing = asyncio.create_task(rollout.capture.call(call, begun.set_result))
            try:
                await asyncio.wait((begun, completing), return_when=asyncio.FIRST_COMPLETED)
                if begun.done():
                    yield pb.CallModelResponse(begun=pb.CompletionBegun(completion_id=begun.result()))
                completed = await completing
            finally:
                completing.cancel()
            result = "replayed" if completed.replayed else "completed"
        except RolloutOver:
            result = "over"
            raise _over(rollout) from None
        except RolloutError as error:
            result = "busy" if isinstance(error, Busy) else "refused"
            raise
        except Exception:
            result = "failed"
            raise
        finally:
            self._count_call(result)
        yield pb.CallModelResponse(completion=wire.completion_to_proto(completed))

    async def ConfirmCompletion(
        self, request: pb.ConfirmCompletionRequest, context: _Context
    ) -> pb.ConfirmCompletionResponse:
        """Record that a completion reached the agent."""
        rollout = self._rollout(request.uid)
        with _over_or_suspended(rollout):
            await rollout.capture.confirm(request.completion_id)
        return pb.ConfirmCompletionResponse()

    async def FinishRollout(self, request: pb.FinishRolloutRequest, context: _Context) -> pb.FinishRolloutResponse:
        """End the work of an agent that runs elsewhere."""
        rollout = self._rollout(request.uid)
        if not rollout.agent.external:
            text = f"the server itself runs the agent {rollout.agent.name!r}, which ends its rollouts"
            raise NotPossible(text, reason="NOT_EXTERNAL")
        work = await offload_request(lambda: wire.finished_work(request), request.ByteSize())
        with _over_or_suspended(rollout):
            return pb.FinishRolloutResponse(repeated=await finish(rollout, work))

    async def CountTokens(self, request: pb.CountTokensRequest, context: _Context) -> pb.CountTokensResponse:
        """Count the tokens of a prompt."""
        rollout = self._rollout(request.uid)
        if rollout.outcome is not None:
            raise RolloutOver()
        if rollout.spec.tokenizer is None:
            raise NotPossible("the rollout names no tokenizer, so no tokens can be counted", reason="NO_TOKENIZER")
        tokens = await self._prompts.run_bounded(self._count(rollout, request), request.ByteSize())
        return pb.CountTokensResponse(tokens=tokens)

    async def GetModelAccess(self, request: pb.GetModelAccessRequest, context: _Context) -> pb.GetModelAccessResponse:
        """Return the model's name and the rollout's state, also of a rollout that has ended."""
        rollout = self._rollout(request.uid)
        return pb.GetModelAccessResponse(model=rollout.capture.options.model, state=enums.STATES[rollout.state])

    async def ListRolloutTools(
        self, request: pb.ListRolloutToolsRequest, context: _Context
    ) -> pb.ListRolloutToolsResponse:
        """Return the tools of a rollout."""
        rollout = self._rollout(request.uid)
        with _over_or_suspended(rollout):
            return wire.tools_to_proto(await rollout.capture.tools())

    async def CallRolloutTool(
        self, request: pb.CallRolloutToolRequest, context: _Context
    ) -> pb.CallRolloutToolResponse:
        """Run a tool of a rollout. If the caller leaves, the call is cancelled, unless it has a repeat key."""
        rollout = self._rollout(request.uid)
        attach(trace_of(context.invocation_metadata() or ()))
        call = await offload_request(lambda: wire.tool_call(request), request.ByteSize())
        with _over_or_suspended(rollout):
            tools = await rollout.capture.tools()
            result = await tools.call(call)
        return wire.tool_result_to_proto(result)

    def _rollout(self, uid: str) -> Rollout:
        """Return the rollout of the call's key. Raises `Forbidden` for another `uid`, `RolloutOver` if it was dropped."""
        if uid != key_uid():
            raise wrong_model_key()
        try:
            return self._registry.get(uid, _HOLDER)
        except NotFound:  # the key is genuine, so there was such a rollout
            raise RolloutOver() from None

    async def _count(self, rollout: Rollout, request: pb.CountTokensRequest) -> int:
        """Return the number of tokens of a prompt."""
        try:
            role = await later_system(self._tokenizers, rollout.spec)
        except RolloutFailed as error:
            raise NotPossible(str(error), reason="NO_TOKENIZER") from None
        call, messages = await offload_request(
            lambda: _first_prompt(request.prompt, rollout.capture.options, role), request.ByteSize()
        )
        return len(await self._prompts.token_ids(rollout.spec.tokenizer, call.tools, messages))


@contextmanager
def _over_or_suspended(rollout: Rollout) -> Iterator[None]:
    try:
        yield
    except RolloutOver:
        raise _over(rollout) from None


def _over(rollout: Rollout) -> RolloutOver | Draining:
    """Return the error of a call to a rollout that takes no calls. The next process continues one that is suspended."""
    if rollout.is_suspended:
        return Draining("the server is stopping, and the rollout continues with its next start: retry", retry_after=1.0)
    return RolloutOver(_word_of(rollout.ending))


def _word_of(ending: RolloutEnding) -> str:
    """Return a word for the end of a rollout, which its agent may see; empty if it is not known yet."""
    known = [future.result() for future in (ending.requested, ending.reached) if future.done()]
    match ending.decided or next(iter(known), None):
        case Stop() as stop:
            return stop.reason
        case Failure() as failure:
            return f"failed: {failure.category.value}"
        case Cancellation():
            return "cancelled"
        case _:
            return ""


def _first_prompt(
    prompt: pb.ModelPrompt, options: CaptureOptions, role: LaterSystem
) -> tuple[ModelCall, Sequence[Message]]:
    """Return the call of a prompt, and the messages that the model would see if it were the rollout's first one."""
    call = wire.counted_call(prompt)
    decision = CallTree(replace(options, auxiliary_reply=""), role).decide(call, now=0.0)
    if isinstance(decision, Refuse):
        raise CallRefused(decision.reason, decision.field, decision.text)
    return call, [Message.write(message) for message in decision.messages] if isinstance(decision, Open) else []
