"""Who may hear what is wrong with a request: a stranger hears about the key first."""

from typing import Final

import grpc
from osmosis.rollout.v1.rollout_service_pb2 import ListAgentsRequest
from starlette.requests import Request

from rollout_gateway.calls import Rollouts, call_metadata

_STRANGER: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


async def demand_key(rollouts: Rollouts, request: Request) -> None:
    """Has the server look at the request's key, for a request that is wrong already and so will never reach it.

    Raises grpc.aio.AioRpcError with UNAUTHENTICATED or PERMISSION_DENIED. Any other failure passes: what is wrong with the
    request says more than a server that cannot be reached.
    """
    try:
        await rollouts.stub.ListAgents(
            ListAgentsRequest(), metadata=call_metadata(request), timeout=rollouts.settings.call_seconds
        )
    except grpc.aio.AioRpcError as error:
        if error.code() in _STRANGER:
            raise
