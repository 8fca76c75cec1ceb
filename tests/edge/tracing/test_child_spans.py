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
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from rollout_server.edge.tracing import sdk
from rollout_server.edge.tracing.child_spans import ChildSpan, ChildTracer, child_tracer
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


def shown(span: ReadableSpan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(span.to_json())
    del found["context"]["span_id"]
    return found


@given(attributes, st.lists(operations, max_size=8))
def test_they_equal_those_of_the_sdk(first: dict[str, Any], done: list[tuple[Any, ...]]) -> None:
    provider, processor, exporter = provided()
    above = trace.set_span_in_context(provider.get_tracer(*SCOPE).start_span("above"))
    for tracer in (provider.get_tracer(*SCOPE), own_tracer(provider, processor)):
        span = tracer.start_span("chat", above, SpanKind.CLIENT, first, start_time=3)
        for name, *arguments in done:
            getattr(span, name)(*arguments)
        span.end(300)
        assert not span.is_recording()
    assert isinstance(span, ChildSpan)
    theirs, ours = map(shown, exporter.get_finished_spans())
    assert ours == theirs


def test_others_are_of_the_sdk() -> None:
    """Without a parent, below a span of another process, and with links."""
    provider, processor, exporter = provided()
    tracer = own_tracer(provider, processor)
    remote = trace.set_span_in_context(trace.NonRecordingSpan(ELSEWHERE))
    linked = trace.set_span_in_context(tracer.start_span("above"))
    spans = (
        tracer.start_span("root"),
        tracer.start_span("below", remote),
        tracer.start_span("l", linked, links=[Link(ELSEWHERE)]),
    )
    for span in spans:
        assert not isinstance(span, ChildSpan)
        span.end()
    with tracer.start_as_current_span("current"):
        assert trace.get_current_span().is_recording()
    assert [span.name for span in exporter.get_finished_spans()] == ["root", "below", "l", "current"]


def test_below_what_is_not_sampled_is_no_new_span() -> None:
    provider, processor, exporter = provided(ALWAYS_OFF)
    tracer = own_tracer(provider, processor)
    above = tracer.start_span("above")
    span = tracer.start_span("below", trace.set_span_in_context(above))
    span.end()
    assert (span is above, above.get_span_context().trace_flags.sampled, exporter.get_finished_spans()) == (
        True,
        False,
        (),
    )


def test_the_sampler_decides_below_a_span_of_another_process() -> None:
    provider, processor, exporter = provided()
    remote = trace.set_span_in_context(trace.NonRecordingSpan(ELSEWHERE))
    own_tracer(provider, processor).start_span("below", remote).end()
    assert [span.name for span in exporter.get_finished_spans()] == ["below"]


class Picky(Sampler):
    """A sampler that decides about each span."""

    def should_sample(self, *given: Any, **named: Any) -> SamplingResult:
        return ALWAYS_ON.should_sample(*given, **named)

    def get_description(self) -> str:
        return "picky"


def limit(patch: pytest.MonkeyPatch) -> Sampler:
    patch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "2")
    return ALWAYS_ON


def take_no_scope(patch: pytest.MonkeyPatch) -> Sampler:
    """An SDK whose spans are made of other parts."""
    patch.setattr(ReadableSpan, "__init__", lambda self, name, context, parent: None)
    return ALWAYS_ON


def keep_the_end_elsewhere(patch: pytest.MonkeyPatch) -> Sampler:
    """An SDK that has another name for a field."""
    patch.setattr(ReadableSpan, "end_time", property(lambda self: self.__dict__.get("ended")))
    return ALWAYS_ON


@pytest.mark.parametrize("differ", [limit, take_no_scope, keep_the_end_elsewhere, lambda patch: Picky()])
def test_where_they_could_differ_there_are_none(
    monkeypatch: pytest.MonkeyPatch, differ: Callable[[pytest.MonkeyPatch], Sampler]
) -> None:
    provider, processor, _ = provided(differ(monkeypatch))
    assert child_tracer(provider, processor, SCOPE) is None


@pytest.mark.parametrize("sampled", [True, False])
async def test_a_rollout_that_is_not_sampled_has_one_span_that_is_not_recorded(
    no_sdk: None, monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    started, start = list[str](), Tracing.start
    monkeypatch.setattr(
        Tracing, "start", lambda self, parent, name, *a: started.append(name) or start(self, parent, name, *a)
    )
    provider, processor, exporter = provided(ParentBased(ALWAYS_ON))
    sdk._PROCESSORS[provider] = processor
    trace.set_tracer_provider(provider)
    async with stage(script=Script((calls(("add", '{"a": 1, "b": 2}')), DONE))) as here:
        metadata = (("traceparent", CALLER[:-2] + f"{sampled:02x}"),)
        await here.wait((await here.stub.StartRollout(here.request(), metadata=metadata)).rollout.uid)
        sent = {each.metadata["traceparent"] for each in here.trainer.completions}
    assert {header[3:35] for header in sent} == {CALLER[3:35]}
    if sampled:
        assert sorted(started) == ["chat", "chat", "execute_tool add", "invoke_agent calculator"]
        assert (len(sent), len(exporter.get_finished_spans())) == (2, 4)
    else:
        assert started == ["invoke_agent calculator"]
        (header,) = sent
        assert (header[-3:], exporter.get_finished_spans()) == ("-00", ())
