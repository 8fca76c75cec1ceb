"""A server with the SDK of OpenTelemetry, its trainer and its caller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from osmosis.rollout.v1 import outcome_pb2, rollout_service_pb2_grpc, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.agent import Agent
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.testing.script import Script
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.tracing.span_trees import CALLER
from tests.support.start_requests import settings, start

METADATA = (("traceparent", CALLER),)


class LastMetrics(MetricExporter):
    """Keeps what was exported last."""

    data: MetricsData | None = None

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **given: Any) -> MetricExportResult:
        """Keep it."""
        self.data = metrics_data
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Nothing waits."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **given: Any) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Exported:
    """What the SDK exports."""

    exporter: InMemorySpanExporter
    meters: MeterProvider
    metrics: LastMetrics

    @property
    def points(self) -> Mapping[str, list[Any]]:
        """The data points of this server by the name of their metric."""
        self.meters.force_flush()
        data = self.metrics.data
        assert data is not None
        metrics = [
            metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            if scope.scope.name == "rollout_server"
            for metric in scope.metrics
        ]
        return {metric.name: list(metric.data.data_points) for metric in metrics}

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """The spans of this server that have ended. FastAPI traces the requests of the gateway by itself."""
        ended = self.exporter.get_finished_spans()
        return [
            span for span in ended if span.instrumentation_scope and span.instrumentation_scope.name == "rollout_server"
        ]

    def named(self, name: str) -> Sequence[ReadableSpan]:
        """The spans whose names begin with this."""
        return [span for span in self.spans if span.name.startswith(name)]


@dataclass(frozen=True)
class Stage:
    """A server and a strict trainer."""

    server: Server
    trainer: StrictTrainer
    stub: rollout_service_pb2_grpc.RolloutServiceAsyncStub

    def request(self, request_id: str = "", **spec: Any) -> pb.StartRolloutRequest:
        """A request for a rollout whose trainer is called over gRPC."""
        target = spec_pb2.Target(url=f"grpc://{self.trainer.grpc_target}", dialect=spec_pb2.DIALECT_GRPC)
        return start(request_id, **{"completions": target, **spec})

    async def start(self, **spec: Any) -> str:
        """Start a rollout in the caller's trace."""
        started = await self.stub.StartRollout(self.request(**spec), metadata=METADATA)
        return started.rollout.uid

    async def wait(self, uid: str) -> outcome_pb2.Outcome:
        """Wait for an outcome."""
        response = await self.stub.WaitRollout(pb.WaitRolloutRequest(uid=uid, view=pb.ROLLOUT_VIEW_FULL), timeout=60)
        assert response.rollout.HasField("outcome")
        return response.rollout.outcome

    async def run(self, **spec: Any) -> outcome_pb2.Outcome:
        """Run a rollout in the caller's trace."""
        return await self.wait(await self.start(**spec))


@asynccontextmanager
async def stage(
    *agents: Agent, script: Script | None = None, trainer: StrictTrainer | dict[str, Any] | None = None, **chosen: Any
) -> AsyncIterator[Stage]:
    """Start a server with these agents, by default the calculator, and a trainer unless there is one."""
    async with AsyncExitStack() as stack:
        options = {"retry_base_seconds": 0.01, "tokenizers_offline": True, "drain_seconds": 0, **chosen}
        server = await stack.enter_async_context(Server(agents or (Calculator(),), settings(**options)))
        strict = trainer
        if not isinstance(strict, StrictTrainer):
            given = {"script": script} if script is not None else {}
            strict = await stack.enter_async_context(StrictTrainer(**given, **(strict or {})))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}"))
        yield Stage(server, strict, rollout_service_pb2_grpc.RolloutServiceStub(channel))
