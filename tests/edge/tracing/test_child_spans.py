"""Spans that are not the SDK's own look as if they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SynchronousMultiSpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from rollout_server.edge.tracing import sdk
from rollout_server.edge.tracing.child_spans import ChildTracer, child_tracer
from rollout_server.edge.tracing.tracing import Tracing
from rollout_server.testing.script import Script

from tests.edge.tracing.span_trees import CALLER
from tests.edge.tracing.stage import stage
from tests.edge.tracing.test_trees import DONE, calls

SCOPE = ("library", "1.0", "https://schema")
ELSEWHERE = trace.SpanContext(7, 8, is_remote=True)


class Odd:
    def __str__(self) -> str:
        return "odd"


plain = st.one_of(st.text(max_size=5), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False))
values = st.one_of(
    plain, st.lists(plain, max_size=3), st.tuples(st.text()), st.none(), st.builds(Odd), st.just({"a": 1})
)
attributes = st.dictionaries(st.one_of(st.text(max_size=2), st.sampled_from([f"k{n}" for n in range(200)])), values)
statuses = st.sampled_from([StatusCode.ERROR, StatusCode.OK, StatusCode.UNSET, Status(StatusCode.ERROR, "why")])
operations = st.one_of(
    st.tuples(st.just("set_attributes"), attributes),
    st.tuples(st.just("set_attribute"), st.text(max_size=2), values),
    st.tuples(st.just("add_event"), st.text(max_size=3), st.none() | attributes, st.integers(1, 99)),
    st.tuples(st.just("add_link"), st.just(ELSEWHERE), attributes),
    st.tuples(st.just("update_name"), st.text(max_size=3)),
    st.tuples(st.just("set_status"), statuses),
    st.tuples(st.just("record_exception"), st.builds(ValueError, st.text(max_size=3)), st.none(), st.just(5)),
    st.tuples(st.just("end"), st.integers(100, 200)),
)


def provided(
    sampler: Sampler = ALWAYS_ON,
) -> tuple[TracerProvider, SynchronousMultiSpanProcessor, InMemorySpanExporter]:
    processor, exporter = SynchronousMultiSpanProcessor(), InMemorySpanExporter()
    provider = TracerProvider(sampler, shutdown_on_exit=False, active_span_processor=processor)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, processor, exporter


def own_tracer(provider: TracerProvider, processor: SynchronousMultiSpanProcessor) -> ChildTracer:
    tracer = child_tracer(provider, processor, SCOPE)
    assert tracer is not None
    return tracer


def equals(*spans: ReadableSpan) -> bool:
    """Whether spans are exported alike, except for their ids and the time of their start."""
    first, second = (json.loads(span.to_json()) for span in spans)
    for found in (first, second):
        del found["context"]["span_id"], found["start_time"]
    return bool(first == second)


@given(attributes, st.lists(operations, max_size=8))
def test_they_equal_those_of_the_sdk(first: dict[str, Any], done: list[tuple[Any, ...]]) -> None:
    provider, processor, exporter = provided()
    above, begun = provider.get_tracer(*SCOPE).start_span("above"), {"first": "x"}
    theirs = provider.get_tracer(*SCOPE).start_span("chat", trace.set_span_in_context(above), SpanKind.CLIENT, begun)
    ours = own_tracer(provider, processor).start(above, lambda: ("chat", SpanKind.CLIENT, dict(begun)))
    for span in (theirs, ours):
        span.set_attributes(first)
        for name, *arguments in done:
            getattr(span, name)(*arguments)
        span.end(300)
        assert not span.is_recording()
    assert equals(*exporter.get_finished_spans())


@given(
    st.lists(st.sampled_from(["update_name", "set_attribute", "name", "attributes", "get_span_context"]), max_size=4)
)
def test_it_is_described_when_it_is_first_read_and_only_then(done: list[str]) -> None:
    provider, processor, exporter = provided()
    described = list[str]()

    def describe() -> tuple[str, SpanKind, dict[str, Any]]:
        described.append("once")
        return "chat", SpanKind.CLIENT, {"first": 1}

    span = own_tracer(provider, processor).start(
        provider.get_tracer(*SCOPE).start_span("above"),
        describe,
    )
    for name in done:
        value = getattr(span, name)
        if callable(value):
            value(*{"update_name": ("new",), "set_attribute": ("second", 2)}.get(name, ()))
    assert len(described) == (not {"get_span_context"}.issuperset(done))
    span.end()
    (shown,) = exporter.get_finished_spans()
    assert shown.name == ("new" if "update_name" in done else "chat")
    assert shown.attributes == {"first": 1, **({"second": 2} if "set_attribute" in done else {})}
    assert described == ["once"]


class Picky(Sampler):
    """A sampler that decides about each span."""

    def should_sample(self, *given: Any, **named: Any) -> SamplingResult:
        return ALWAYS_ON.should_sample(*given, **named)

    def get_description(self) -> str:
        return "picky"


def limit(patch: pytest.MonkeyPatch) -> Sampler:
    patch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "2")
    return ALWAYS_ON


def read_the_scope_elsewhere(patch: pytest.MonkeyPatch) -> Sampler:
    """An SDK that has another name for a field of all spans."""
    patch.setattr(ReadableSpan, "instrumentation_scope", property(lambda self: self._scope))
    return ALWAYS_ON


def keep_the_end_elsewhere(patch: pytest.MonkeyPatch) -> Sampler:
    """An SDK that has another name for a field."""
    patch.setattr(ReadableSpan, "end_time", property(lambda self: self.__dict__.get("ended")))
    return ALWAYS_ON


@pytest.mark.parametrize("differ", [limit, read_the_scope_elsewhere, keep_the_end_elsewhere, lambda patch: Picky()])
def test_where_they_could_differ_there_are_none(
    monkeypatch: pytest.MonkeyPatch, differ: Callable[[pytest.MonkeyPatch], Sampler]
) -> None:
    provider, processor, _ = provided(differ(monkeypatch))
    assert child_tracer(provider, processor, SCOPE) is None


@pytest.mark.parametrize("sampled", [True, False])
async def test_a_rollout_that_is_not_sampled_has_one_span_that_is_not_recorded(
    no_sdk: None, monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    provider, processor, exporter = provided(ParentBased(ALWAYS_ON))
    started = list[str]()

    def count(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def counted(*given: Any) -> Any:
            started.append(name)
            return method(*given)

        monkeypatch.setattr(owner, name, counted)

    sdk._PROCESSORS[provider] = processor
    trace.set_tracer_provider(provider)
    async with stage(script=Script((calls(("add", '{"a": 1, "b": 2}')), DONE))) as here:
        count(Tracing, "_begin")
        count(ChildTracer, "start")
        metadata = (("traceparent", CALLER[:-2] + f"{sampled:02x}"),)
        await here.wait((await here.stub.StartRollout(here.request(), metadata=metadata)).rollout.uid)
        sent = {each.metadata["traceparent"] for each in here.trainer.completions}
    assert {header[3:35] for header in sent} == {CALLER[3:35]}
    if sampled:
        assert started == ["_begin", "start", "start", "start"]
        assert (len(sent), len(exporter.get_finished_spans())) == (2, 4)
    else:
        assert started == ["_begin"]
        (header,) = sent
        assert (header[-3:], exporter.get_finished_spans()) == ("-00", ())
