"""CompletionService (completion_service.proto): unary calls to `Completions`."""

import asyncio
import hmac
from collections.abc import Mapping
from typing import Any, TypeAlias

import grpc
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import completion_service_pb2_grpc

from rollout_server.testing.grpc.completions import Completions, SilenceError
from rollout_server.testing.grpc.status import StatusError, abort, status_of_fault

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class CompletionService(completion_service_pb2_grpc.CompletionServiceServicer):
    """What stands between the wire and the judge: the key that is demanded, statuses, answers that get lost."""

    def __init__(self, completions: Completions, api_key: str | None) -> None:
        self._completions = completions
        self._api_key = api_key

    async def Complete(self, request: pb.CompleteRequest, context: _Context) -> pb.CompleteResponse:
        """Answers one turn, or the same turn again."""
        metadata = _metadata(context)
        self._completions.seen(request, metadata)
        try:
            self._authorize(metadata)
            answer = await self._completions.answer(request)
            await self._lose(request.turn_key)
            return answer
        except SilenceError:
            await asyncio.Event().wait()
            raise
        except StatusError as error:
            return await abort(context, error)

    async def ReadLedger(self, request: pb.ReadLedgerRequest, context: _Context) -> pb.ReadLedgerResponse:
        """Shows a segment as it is held here."""
        try:
            self._authorize(_metadata(context))
            return self._completions.ledger(request)
        except StatusError as error:
            return await abort(context, error)

    async def _lose(self, turn_key: str) -> None:
        """StatusError where the answer that was generated is not to arrive."""
        fault = self._completions.lost(turn_key)
        if fault:
            await asyncio.sleep(fault.delay)
            raise status_of_fault(fault)

    def _authorize(self, metadata: Mapping[str, str]) -> None:
        wanted = f"Bearer {self._api_key}".encode()
        if self._api_key is not None and not hmac.compare_digest(metadata.get("authorization", "").encode(), wanted):
            raise StatusError(grpc.StatusCode.UNAUTHENTICATED, "API_KEY", "Invalid or missing API key")


def _metadata(context: _Context) -> Mapping[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
