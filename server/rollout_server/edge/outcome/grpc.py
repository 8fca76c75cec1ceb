"""Delivery of outcomes over gRPC: `OutcomeService.DeliverOutcome` of the receiver."""

from __future__ import annotations

import grpc

from rollout_server.edge.grpc_channels import Channels, call_metadata
from rollout_server.edge.targets.rules import TargetRefused
from rollout_server.edge.trainer.http_errors import redact
from rollout_server.runtime.outcome_delivery import (
    DeliveryAcknowledged,
    DeliveryRefused,
    DeliveryUnsettled,
    PackedOutcome,
    Receipt,
)

_METHOD = "/osmosis.rollout.v1.OutcomeService/DeliverOutcome"
_TRIED_AGAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)


class GrpcCourier:
    """Delivers outcomes over gRPC. `timeout` is in seconds, for one attempt."""

    def __init__(self, channels: Channels, timeout: float) -> None:
        self._channels = channels
        self._timeout = timeout

    async def deliver(self, packed: PackedOutcome) -> Receipt:
        """Make one call. outcome_service.proto defines which status codes are retried."""
        metadata = call_metadata(packed.credential)
        try:
            async with self._channels.use(packed.target.url) as channel:
                # Without serializers: the body is serialized already, and the response is empty.
                call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_METHOD)
                await call(packed.body, metadata=metadata, timeout=self._timeout)
        except TargetRefused as error:
            return DeliveryRefused(str(error))
        except OSError as error:
            return DeliveryUnsettled(str(error))
        except grpc.aio.AioRpcError as error:
            message = redact((error.details() or "").encode(), (packed.credential,) if packed.credential else ())
            text = f"the receiver answered {error.code().name}: {message}"
            return DeliveryUnsettled(text) if error.code() in _TRIED_AGAIN else DeliveryRefused(text)
        return DeliveryAcknowledged()
