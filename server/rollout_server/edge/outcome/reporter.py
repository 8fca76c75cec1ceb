"""The runtime's `Reporter`: serializes outcomes in the receiver's protocol and delivers them."""

from __future__ import annotations

from rollout_server.core.spec import Dialect, Target
from rollout_server.edge.outcome.grpc import GrpcCourier
from rollout_server.edge.outcome.http import HttpCourier
from rollout_server.edge.wire.rollout import WriteBody, delivery_bytes, finished_rollout
from rollout_server.runtime.outcome_delivery import PackedOutcome, Receipt
from rollout_server.runtime.rollout import Rollout


class OutcomeReporter:
    """Implements the runtime's `Reporter`. `write_body` returns the JSON of the final callback; the gateway defines its format."""

    def __init__(self, write_body: WriteBody, http: HttpCourier, grpc: GrpcCourier) -> None:
        self._write_body = write_body
        self._http = http
        self._grpc = grpc

    def pack(self, rollout: Rollout, target: Target, key: str) -> bytes:
        """Serialize the outcome in the receiver's format."""
        if target.dialect is Dialect.GRPC:
            return delivery_bytes(rollout, key)
        return self._write_body(finished_rollout(rollout))

    async def deliver(self, packed: PackedOutcome) -> Receipt:
        """Make one attempt to deliver it."""
        courier = self._grpc if packed.target.dialect is Dialect.GRPC else self._http
        return await courier.deliver(packed)
