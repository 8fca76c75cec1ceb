"""The floor of the gRPC APIs: a unary rpc of grpc.aio that calls the trainer's CompletionService in a loop.

It sends the messages that are new since the trainer's checkpoint, parses the completion, computes the tool results, and repeats. It
accounts for no tokens and has no limits, records and error handling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
import msgspec
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2, outcome_pb2
from osmosis.rollout.v1.completion_service_pb2_grpc import CompletionServiceStub
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest

from bench.programs.drive import FLOOR_METHOD

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]


class FloorHandler(grpc.GenericRpcHandler):
    """Serves the rpc of the floor, with one channel per trainer."""

    def __init__(self) -> None:
        self._stubs: dict[str, Any] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of the rpc."""
        if handler_call_details.method != FLOOR_METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(
            self._run, StartRolloutRequest.FromString, outcome_pb2.Outcome.SerializeToString
        )

    async def _run(self, start: StartRolloutRequest, _: grpc.aio.ServicerContext[Any, Any]) -> outcome_pb2.Outcome:
        spec = start.spec
        complete = self._stub(spec.completions.url).Complete
        messages = list(spec.messages)
        request = pb.CompleteRequest(
            uid=spec.rollout_id, rollout_id=spec.rollout_id, segment_id="0", sampling=spec.sampling
        )
        new = messages
        while new:
            request.turn += 1
            request.turn_key = f"{spec.rollout_id}/0/{request.turn}"
            del request.new_messages[:]
            request.new_messages.extend(new)
            response = await complete(request)
            calls = msgspec.json.decode(response.message.json).get("tool_calls") or ()
            new = [_result(call) for call in calls]
            messages = [*messages, response.message, *new]
            request.base.CopyFrom(response.after)
        metrics = outcome_pb2.Metrics(turns=request.turn)
        return outcome_pb2.Outcome(messages=messages, stop=outcome_pb2.Stop(reason="stop"), metrics=metrics)

    def _stub(self, url: str) -> Any:
        if url not in self._stubs:
            channel = grpc.aio.insecure_channel(url.removeprefix("grpc://"), _OPTIONS)
            self._stubs[url] = CompletionServiceStub(channel)
        return self._stubs[url]


def _result(call: Mapping[str, Any]) -> message_pb2.Message:
    arguments = msgspec.json.decode(call["function"]["arguments"])
    result = {"role": "tool", "content": str(arguments["a"] + arguments["b"]), "tool_call_id": call["id"]}
    return message_pb2.Message(json=msgspec.json.encode(result).decode())
