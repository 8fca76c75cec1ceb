"""What is exported besides the trees: metrics, contents if they are asked for, and never a secret."""

from __future__ import annotations

import json

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1 import spec_pb2
from rollout_server import Agent, tool
from rollout_server.testing.script import Fault, Script

from tests.edge.tracing.stage import METADATA, Exported, stage
from tests.edge.tracing.test_trees import DONE, PLAIN, calls, over_http
from tests.support import tool_service
from tests.support.start_requests import json_message
from tests.support.toolset_stand import Caught, texts_of

QUESTION = "What is the PIN of my card?"
ANSWER = "It is 4711."
RULES = {"role": "system", "content": "Be quiet."}
BEARER = "key-of-the-trainer"


def written(spans: list[ReadableSpan]) -> str:
    """Everything that is exported of spans, as text."""
    return "\n".join(span.to_json() for span in spans)


async def roll(exported: Exported, script: Script) -> list[ReadableSpan]:
    async with stage(script=script, trainer={"api_key": BEARER}) as here:
        messages = [json_message(json.dumps(RULES)), json_message(json.dumps({"role": "user", "content": QUESTION}))]
        request = here.request(messages=messages, metadata_json='{"ground_truth": "hunter2"}', labels={"a": "hunter3"})
        request.credentials.completions_bearer = BEARER
        started = await here.stub.StartRollout(request, metadata=METADATA)
        await here.wait(started.rollout.uid)
    return list(exported.spans)


SCRIPT = Script((calls(("add", '{"a": 271828, "b": 2}'), ("divide", '{"a": 1, "b": 0}')), DONE))


async def test_no_contents(exported: Exported) -> None:
    found = written(await roll(exported, SCRIPT))
    for secret in (QUESTION, "Be quiet", "Done.", "271828", "271830", "Division by zero", BEARER, "hunter2", "hunter3"):
        assert secret not in found


async def test_no_texts_of_those_that_fail(exported: Exported) -> None:
    """Not in a status, and not in an event."""
    fault = Fault.error(500, "hunter2")
    async with stage(script=Script((fault,), repeat_last=True), trainer=PLAIN, retries=1) as here:
        assert (await here.run(**over_http(here) | {"outcome": None})).HasField("failure")
    assert "hunter2" not in written(list(exported.spans))
    assert [span.status.description for span in exported.spans] == [None, None]


@pytest.mark.parametrize("value", ["true", "SPAN_ONLY"])
async def test_contents_by_request(exported: Exported, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", value)
    spans = await roll(exported, SCRIPT)
    first, add, divide, _, _ = [
        dict(span.attributes or {}) for span in sorted(spans, key=lambda span: span.end_time or 0)
    ]
    system, user = json.loads(str(first["gen_ai.input.messages"]))
    assert system == {"role": "system", "parts": [{"type": "text", "content": "Be quiet."}]}
    assert user == {"role": "user", "parts": [{"type": "text", "content": QUESTION}]}
    (reply,) = json.loads(str(first["gen_ai.output.messages"]))
    assert (reply["role"], reply["finish_reason"]) == ("assistant", "stop")
    assert reply["parts"][-1] == {
        "type": "tool_call",
        "id": "call_1",
        "name": "divide",
        "arguments": '{"a": 1, "b": 0}',
    }
    assert (add["gen_ai.tool.call.arguments"], add["gen_ai.tool.call.result"]) == ('{"a": 271828, "b": 2}', "271830")
    assert divide["gen_ai.tool.call.result"] == "Error: Division by zero"
    assert BEARER not in written(spans)


async def test_what_no_exporter_could_write(exported: Exported) -> None:
    """Long words are cut, and numbers fit. An exporter would drop all spans of a batch because of one."""
    call = {"id": "c" * 1000, "type": "function", "function": {"name": "n" * 1000, "arguments": "{}"}}
    first = {"message": {"role": "assistant", "content": "", "tool_calls": [call]}, "finish_reason": "f" * 256}
    usage = {"prompt_tokens": 10**30, "completion_tokens": 10**30}
    line = Fault.raw(json.dumps({"choices": [first], "usage": usage}))
    async with stage(script=Script((line,)), trainer=PLAIN, retries=0) as here:
        await here.run(**over_http(here) | {"outcome": None})
    assert len(encode_spans(exported.spans).resource_spans[0].scope_spans[0].spans) == 4
    assert all(len(str(value)) < 140 for span in exported.spans for value in (span.attributes or {}).values())


async def test_metrics(exported: Exported) -> None:
    await _check_metrics(exported)


async def test_metrics_of_rollouts_without_spans(exported_without_spans: Exported) -> None:
    await _check_metrics(exported_without_spans)
    assert not exported_without_spans.spans


async def _check_metrics(exported: Exported) -> None:
    """Run a rollout with two failed tools and one with an unreachable trainer, and check all metrics."""
    script = Script((calls(("divide", '{"a": 1, "b": 0}'), ("made up", "{}")), DONE))
    async with stage(script=script, retries=0) as here:
        await here.run()
        nobody = spec_pb2.Target(url="grpc://127.0.0.1:9", dialect=spec_pb2.DIALECT_GRPC)
        await here.run(rollout_id="other", completions=nobody)
        found = exported.points
        port = int(here.trainer.grpc_target.rpartition(":")[2])
    chat = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "trainer", "server.address": "127.0.0.1"}
    done, failed = chat | {"server.port": port}, chat | {"server.port": 9, "error.type": "network"}
    assert [(point.count, dict(point.attributes)) for point in found["gen_ai.client.operation.duration"]] == [
        (2, done),
        (1, failed),
    ]
    assert [
        (point.count, point.sum, point.attributes["gen_ai.token.type"]) for point in found["gen_ai.client.token.usage"]
    ] == [(2, 923, "input"), (2, 50, "output")]
    tools = [(point.count, dict(point.attributes)) for point in found["gen_ai.execute_tool.duration"]]
    assert sorted(tools, key=str) == [
        (1, {"gen_ai.tool.name": name, "error.type": "tool_error"}) for name in ("_OTHER", "divide")
    ]
    agent = {"gen_ai.agent.name": "calculator"}
    assert [(point.value, dict(point.attributes)) for point in found["rollout.finished"]] == [
        (1, agent | {"rollout.end": "stop", "rollout.end.reason": "stop"}),
        (1, agent | {"rollout.end": "failure", "rollout.end.reason": "network", "rollout.failure.class": "trainer"}),
    ]
    assert [point.count for point in found["rollout.duration"]] == [1, 1]
    assert [found[name][0].value for name in ("rollout.running", "rollout.queued")] == [0, 0]


async def test_metrics_do_not_name_the_tools_of_requests(exported: Exported) -> None:
    """There may be any number of them, and each name would be a time series."""
    script = Script((calls(("own", '{"number": 1}'), ("add", '{"amount": 1}')), DONE))
    async with (
        tool_service.serving(tool_service.CounterService()) as url,
        stage(Caught("plain"), script=script) as here,
    ):
        tools = spec_pb2.Target(url=url, dialect=spec_pb2.DIALECT_GRPC)
        outcome = await here.run(agent="plain", tools=tools)
        assert texts_of(outcome) == ["1", "1"]
        found = exported.points["gen_ai.execute_tool.duration"]
    assert sorted(point.attributes["gen_ai.tool.name"] for point in found) == ["_OTHER", "own"]


@tool
def look_up(word: str) -> str:
    """Look a word up, and describe the span of the call."""
    trace.get_current_span().set_attributes({"error.type": f"no {word}", "gen_ai.tool.name": word, "word": word})
    return word


class Finder(Agent):
    """Looks words up."""

    name = "finder"
    tools = (look_up,)


async def test_what_a_tool_sets_on_its_span_is_in_no_metric(exported: Exported) -> None:
    script = Script((calls(("look_up", '{"word": "one"}'), ("look_up", '{"word": "two"}')), DONE))
    async with stage(Finder(), script=script) as here:
        await here.run(agent="finder")
        [point] = exported.points["gen_ai.execute_tool.duration"]
    assert (point.count, dict(point.attributes)) == (2, {"gen_ai.tool.name": "look_up"})
    assert [span.attributes["word"] for span in exported.named("execute_tool") if span.attributes] == ["one", "two"]


async def test_a_caller_without_a_trace(exported: Exported) -> None:
    """Each rollout has a trace of its own, and one with a malformed header, too."""
    async with stage(script=Script((DONE,), repeat_last=True)) as here:
        for number, header in enumerate((None, "00-zz-1-01", "00-" + "0" * 32 + "-b7ad6b7169203331-01")):
            request = here.request(rollout_id=f"r{number}")
            started = await here.stub.StartRollout(
                request, metadata=() if header is None else (("traceparent", header),)
            )
            await here.wait(started.rollout.uid)
    rollouts = exported.named("invoke_agent")
    assert [span.parent for span in rollouts] == [None] * 3
    assert len({span.context.trace_id for span in exported.spans}) == 3


async def test_a_trace_that_is_not_sampled(exported: Exported) -> None:
    """The trainer decides: nothing is exported, and what is called is told so."""
    async with stage(script=Script((DONE,))) as here:
        metadata = (("traceparent", METADATA[0][1][:-2] + "00"),)
        started = await here.stub.StartRollout(here.request(), metadata=metadata)
        await here.wait(started.rollout.uid)
        (seen,) = here.trainer.completions
    assert (seen.metadata["traceparent"][-3:], list(exported.spans)) == ("-00", [])


async def test_run_rollout_and_a_repeated_start(exported: Exported) -> None:
    """A start that finds its rollout, in another trace, changes nothing."""
    async with stage(script=Script((DONE,))) as here:
        call = here.stub.RunRollout(pb.RunRolloutRequest(start=here.request("once")), metadata=METADATA)
        async for _ in call:
            pass
        again = await here.stub.StartRollout(
            here.request("once"), metadata=(("traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"),)
        )
        assert again.attached
    assert len({span.context.trace_id for span in exported.spans}) == 1
    assert len(exported.named("invoke_agent")) == 1
