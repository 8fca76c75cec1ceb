"""ToolService over tools of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from osmosis.rollout.v1 import tool_service_pb2, tool_service_pb2_grpc

from rollout_server.core.error import InvalidRequest, Violation
from rollout_server.edge.wire.toolset import call_from_proto, error_to_proto, result_to_proto, tools_to_proto
from rollout_server.tool_server.calls import ServedCall, ServedTools, metadata_of

if TYPE_CHECKING:
    import grpc


class ServedToolService(tool_service_pb2_grpc.ToolServiceServicer):
    """The servicer. It raises the errors of the core, which the interceptor converts."""

    def __init__(self, served: ServedTools) -> None:
        self._served = served
        self._description = tools_to_proto(served.tools)

    async def DescribeTools(
        self,
        request: tool_service_pb2.DescribeToolsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> tool_service_pb2.DescribeToolsResponse:
        """Return the tools, which are the same for all rollouts."""
        metadata_of(request.metadata_json)
        return self._description

    async def CallTool(
        self,
        request: tool_service_pb2.CallToolRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> tool_service_pb2.CallToolResponse:
        """Run one call, at most once per key."""
        if not request.call_key:
            raise InvalidRequest(Violation("call_key", "must not be empty: it tells a repeated call from a new one"))
        call = ServedCall(
            call_from_proto(request.call),
            uid=request.uid,
            metadata_json=request.metadata_json,
            key=request.call_key,
        )
        result = await self._served.call(call)
        if result.failed:
            return error_to_proto(str(result.content), may_have_run=result.may_have_run)
        return result_to_proto(result.content)
