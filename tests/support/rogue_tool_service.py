"""ToolServices that list anything, and return anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from osmosis.rollout.v1 import message_pb2
from osmosis.rollout.v1 import tool_service_pb2 as pb

from tests.support.grpc_trainer import Fault, abort
from tests.support.tool_service import CounterService

SCHEMA = '{"type": "object"}'


@dataclass
class Listing(CounterService):
    """Lists these tools."""

    listed: list[message_pb2.Tool] = field(default_factory=list)

    async def DescribeTools(self, request: pb.DescribeToolsRequest, context: Any) -> pb.DescribeToolsResponse:
        return pb.DescribeToolsResponse(tools=self.listed)


@dataclass
class Calling(CounterService):
    """Does this in each call."""

    fault: Fault | pb.CallToolResponse = field(default_factory=pb.CallToolResponse)

    async def CallTool(self, request: pb.CallToolRequest, context: Any) -> pb.CallToolResponse:
        if isinstance(self.fault, Fault):
            await abort(context, self.fault)
        return self.fault


def described(name: str, schema: str = SCHEMA) -> message_pb2.Tool:
    """A tool."""
    return message_pb2.Tool(name=name, description="?", parameters_json_schema=schema)


def listing(*tools: message_pb2.Tool) -> Listing:
    """A service that lists these tools."""
    return Listing(listed=list(tools))


def output(*parts: message_pb2.ContentPart) -> pb.CallToolResponse:
    """A result of these parts."""
    return pb.CallToolResponse(output=pb.ToolOutput(parts=parts))
