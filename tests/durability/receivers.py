"""A receiver of outcomes over HTTP and gRPC. It runs in the test's process, so it survives the server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web
from osmosis.rollout.v1 import outcome_service_pb2 as pb

from tests.durability.aims import Gun, Moment


@dataclass(frozen=True)
class ReceivedDelivery:
    """One delivery: its key and bytes, and whether this receiver acknowledged it."""

    rollout_id: str
    key: str
    raw: bytes
    acknowledged: bool


@dataclass
class Receiver:
    """Records every delivery. The first deliveries of an outcome fail, as many as `failures` says, by rollout id.

    While `is_down` every delivery fails.
    """

    gun: Gun
    failures: dict[str, int] = field(default_factory=dict)
    is_down: bool = False
    deliveries: list[ReceivedDelivery] = field(default_factory=list)
    http_url: str = ""
    grpc_url: str = ""
    _seen: Counter[str] = field(default_factory=Counter)

    def receive(self, rollout_id: str, key: str, raw: bytes) -> bool:
        """Record a delivery and return whether it is acknowledged."""
        self._seen[rollout_id] += 1
        acknowledged = not self.is_down and self._seen[rollout_id] > self.failures.get(rollout_id, 0)
        self.deliveries.append(ReceivedDelivery(rollout_id, key, raw, acknowledged))
        if acknowledged:
            self.gun.report(Moment.DELIVERED, case_of(rollout_id))
            self.gun.report(Moment.ACKNOWLEDGED, case_of(rollout_id))  # its aim always has a delay
        return acknowledged

    async def over_http(self, request: web.Request) -> web.Response:
        """POST /v1/rollout/completed. Every other failure breaks the connection instead of returning 503."""
        raw = await request.read()
        rollout_id = json.loads(raw)["rollout_id"]
        if self.receive(rollout_id, request.headers.get("idempotency-key", ""), raw):
            return web.json_response({"status": "ok"})
        if self._seen[rollout_id] % 2 and request.transport is not None:
            request.transport.abort()
        return web.json_response({"detail": "busy"}, status=503)

    async def over_grpc(self, raw: bytes, context: Any) -> bytes:
        """Handle a call of DeliverOutcome, with the bytes as they were sent."""
        request = pb.DeliverOutcomeRequest.FromString(raw)
        if not self.receive(request.rollout.spec.rollout_id, request.delivery_key, raw):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
        return pb.DeliverOutcomeResponse().SerializeToString()


def case_of(rollout_id: str) -> int:
    """The number of the case of a rollout id."""
    return int(rollout_id.split("/")[1])


@asynccontextmanager
async def receiver(gun: Gun) -> AsyncIterator[Receiver]:
    """Serve a receiver."""
    receiving = Receiver(gun)
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/rollout/completed", receiving.over_http)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiving.http_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    # Without (de)serializers the handler receives the bytes as they were sent.
    method = grpc.unary_unary_rpc_method_handler(receiving.over_grpc)
    service = pb.DESCRIPTOR.services_by_name["OutcomeService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"DeliverOutcome": method}),))
    receiving.grpc_url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield receiving
    finally:
        await server.stop(0)
        await runner.cleanup()
