"""The grpc.aio server that a strict trainer's CompletionService listens on."""

from typing import Final

import grpc
from osmosis.rollout.v1 import completion_service_pb2_grpc

from rollout_server.testing.grpc.service import CompletionService

_LARGEST_MESSAGE: Final = 64 * 1024 * 1024
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not shared
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE),
    # gRPC drops calls silently when more than 1,000 wait to be picked up.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def target(host: str, port: int) -> str:
    """An address as URLs and gRPC targets have it: IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class CompletionServer:
    """Serves a CompletionService, from `open` to `close`."""

    def __init__(self, service: CompletionService) -> None:
        self._server = grpc.aio.server(options=_OPTIONS)
        completion_service_pb2_grpc.add_CompletionServiceServicer_to_server(service, self._server)

    async def open(self, host: str, port: int) -> int:
        """Listens (port 0: any free one) and returns the port. OSError if the address cannot be had."""
        try:
            bound = self._server.add_insecure_port(target(host, port))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {target(host, port)}: {error}") from error
        await self._server.start()
        return bound

    async def close(self) -> None:
        """Stops at once; calls that are held back are cancelled."""
        await self._server.stop(None)
