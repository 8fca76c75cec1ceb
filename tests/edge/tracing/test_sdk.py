"""`rollout serve` with the standard variables, and servers without an SDK."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import metrics, trace
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.edge.tracing.sdk import current_tracing, exporting
from rollout_server.testing.script import Script
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.tracing.span_trees import TRACE_ID
from tests.edge.tracing.stage import METADATA, stage
from tests.edge.tracing.test_trees import DONE
from tests.support.bodies import rpc
from tests.support.processes import ANY_PORTS, Serving, environment, serve
from tests.support.start_requests import start, target


@dataclass
class Collector:
    """A collector that speaks OTLP over gRPC."""

    port: int = 0
    spans: list[Any] = field(default_factory=list)
    services: set[str] = field(default_factory=set)
    metrics: set[str] = field(default_factory=set)

    async def take_traces(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self._describe(resource.resource)
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    async def take_metrics(self, request: Any, context: Any) -> Any:
        for resource in request.resource_metrics:
            self._describe(resource.resource)
            self.metrics |= {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def _describe(self, resource: Any) -> None:
        self.services |= {each.value.string_value for each in resource.attributes if each.key == "service.name"}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector, server = Collector(), grpc.aio.server()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        Export = staticmethod(collector.take_traces)  # type: ignore[assignment]

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        Export = staticmethod(collector.take_metrics)  # type: ignore[assignment]

    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)


async def roll(server: Serving) -> None:
    """Run one rollout in the caller's trace, and stop the server."""
    async with StrictTrainer(script=Script((DONE,))) as trainer, rpc(server.grpc_port) as stub:
        request = start(completions=target(f"grpc://{trainer.grpc_target}"))
        started = await stub.StartRollout(request, metadata=METADATA)
        waited = await stub.WaitRollout(pb.WaitRolloutRequest(uid=started.rollout.uid))
        assert waited.rollout.outcome.HasField("stop")
    server.send(signal.SIGTERM)
    assert await server.ended() == 0


PAGE = Path(__file__).parents[3] / "docs" / "tracing.md"


@pytest.mark.parametrize("name", ["", "rollouts"])
async def test_it_exports_to_a_collector(tmp_path: Path, name: str) -> None:
    """Everything is exported when the server stops. The variables are those of the page, with and without a name."""
    async with collecting() as collector:
        (line,) = re.findall("^export (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
        variables = dict(
            each.split("=", 1) for each in line.replace("localhost:4317", f"127.0.0.1:{collector.port}").split()
        )
        assert variables.pop("OTEL_SERVICE_NAME") == "rollouts"
        async with serve(
            cwd=tmp_path, ROLLOUT_HTTP="false", **variables, **({"OTEL_SERVICE_NAME": name} if name else {})
        ) as server:
            await roll(server)
        assert " WARNING " not in server.text
    assert [span.name for span in collector.spans] == ["chat", "invoke_agent calculator"]
    assert {int.from_bytes(span.trace_id, "big") for span in collector.spans} == {TRACE_ID}
    assert collector.services == {name or "rollout-server"}
    assert {"gen_ai.client.operation.duration", "gen_ai.client.token.usage", "rollout.running"} <= collector.metrics


async def test_a_collector_that_is_gone_delays_nothing_for_long(tmp_path: Path) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}
    async with serve(cwd=tmp_path, ROLLOUT_HTTP="false", **variables) as server:
        began = time.monotonic()
        await roll(server)
        assert time.monotonic() - began < 30


async def test_the_console(tmp_path: Path) -> None:
    """Also of a server whose metrics are not to be exported."""
    arguments = ("serve", *ANY_PORTS)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollout_server.cli",
        *arguments,
        cwd=tmp_path,
        env=environment(ROLLOUT_HTTP="false", OTEL_TRACES_EXPORTER="console", OTEL_METRICS_EXPORTER="none"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    server = Serving(process)
    await server.start()
    await roll(server)
    assert process.stdout is not None
    shown = (await process.stdout.read()).decode()
    names = [line.split('"')[3] for line in shown.splitlines() if line.startswith('    "name"')]
    assert names == ["chat", "invoke_agent calculator"]


BLOCKED = "import sys; sys.modules['opentelemetry'] = None; from rollout_server.cli import main; main()"


async def test_without_opentelemetry(tmp_path: Path) -> None:
    """The server runs, and says which extra is missing."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        BLOCKED,
        "serve",
        *ANY_PORTS,
        cwd=tmp_path,
        env=environment(ROLLOUT_HTTP="false", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9"),
        stderr=asyncio.subprocess.PIPE,
    )
    server = Serving(process)
    await server.start()
    await roll(server)
    text = "OTEL_EXPORTER_OTLP_ENDPOINT is set, but nothing is exported: OpenTelemetry is not installed; pip install"
    assert f"{text} 'rollout-server[otel]'" in server.text


@pytest.fixture
def fresh(no_sdk: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process without an SDK, in which variables can be set."""
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "warning"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"}, ""),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "traces are not exported: no exporter 'zipkin' is installed"),
        (
            {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            },
            "traces are not exported: no exporter 'otlp_proto_http' is installed",
        ),
    ],
)
def test_nothing_is_exported(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variables: dict[str, str], warning: str
) -> None:
    for name, value in variables.items():
        fresh.setenv(name, value)
    with caplog.at_level(logging.WARNING), exporting():
        assert current_tracing() is None
    assert warning in caplog.text
    assert bool(warning) == bool(caplog.text)


def test_an_sdk_that_is_there_is_used(fresh: pytest.MonkeyPatch) -> None:
    """Such as that of `opentelemetry-instrument`."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    fresh.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    traces, meters = TracerProvider(shutdown_on_exit=False), MeterProvider(shutdown_on_exit=False)
    trace.set_tracer_provider(traces)
    metrics.set_meter_provider(meters)
    with exporting():
        assert (trace.get_tracer_provider(), metrics.get_meter_provider()) == (traces, meters)
        assert current_tracing() is not None
    exporter = InMemorySpanExporter()
    traces.add_span_processor(SimpleSpanProcessor(exporter))
    with traces.get_tracer("after").start_as_current_span("after"):  # it is not shut down
        pass
    assert [span.name for span in exporter.get_finished_spans()] == ["after"]
    assert not meters._shutdown


@pytest.mark.parametrize("broken", ["on_start", "on_end", "sampler"])
async def test_an_sdk_that_raises_fails_no_rollout(no_sdk: None, caplog: pytest.LogCaptureFixture, broken: str) -> None:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

    class Broken(SpanProcessor, Sampler):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            assert broken != "on_start"

        def on_end(self, span: Any) -> None:
            assert broken != "on_end"

        def should_sample(self, *given: Any, **named: Any) -> Any:
            raise ValueError("no sample")

        def get_description(self) -> str:
            return "raises"

    provider = TracerProvider(sampler=Broken() if broken == "sampler" else ALWAYS_ON, shutdown_on_exit=False)
    provider.add_span_processor(Broken())
    trace.set_tracer_provider(provider)
    async with stage(script=Script((DONE,))) as here:
        assert (await here.run()).HasField("stop")
        headers = [dict(seen.metadata).get("traceparent", "") for seen in here.trainer.completions]
    assert f"{TRACE_ID:032x}" in headers[0]
    assert caplog.text.count("spans or metrics are incomplete") == 1


async def test_without_an_sdk_nothing_is_sent(no_sdk: None) -> None:
    async with stage(script=Script((DONE,))) as here:
        await here.run()
        assert ["traceparent" in seen.metadata for seen in here.trainer.completions] == [False]


def test_only_the_api_is_imported() -> None:
    """And in one room. The SDK is imported where it is set up, and by what is imported there."""
    root = Path(__file__).parents[3]
    for path in [*root.glob("server/**/*.py"), *root.glob("gateway/**/*.py")]:
        found = re.findall(
            r"^( *)(?:from|import) (opentelemetry[\w.]*)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        where = path.relative_to(root).parts[1:]
        assert not found or where[:3] == ("rollout_server", "edge", "tracing"), path
        late = where[-1] in {"child_spans.py", "histograms.py"}
        assert all(
            late or (where[-1] == "sdk.py" and indent) for indent, name in found if name.startswith("opentelemetry.sdk")
        ), path
