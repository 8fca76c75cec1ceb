"""The spans of each way in which a rollout can go, on a real server with a strict trainer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import trace
from osmosis.rollout.v1 import group_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server import Agent, Program, RewardResult, Run, own_loop, tool
from rollout_server.calculator import Calculator, add
from rollout_server.edge.tracing import attributes, contents
from rollout_server.testing import TrainerDialect
from rollout_server.testing.http.mock_engine import MockEngine
from rollout_server.testing.script import Fault, FaultKind, Reception, Script, ScriptedReply
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.tracing.span_trees import CALLER, TRACE_ID, check
from tests.edge.tracing.stage import METADATA, Exported, Stage, stage
from tests.support.rewriting_trainer import rewriting
from tests.support.start_requests import seconds
from tests.support.toy_model import until

SILENT = Script((Fault(kind=FaultKind.SILENCE),), repeat_last=True)
BUSY = Fault.error(500, "postgres://user:hunter2@db")
DONE = ScriptedReply(content="Done.")


def calls(*named: tuple[str, str]) -> ScriptedReply:
    """A completion with tool calls: names and arguments."""
    made = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": given}}
        for at, (name, given) in enumerate(named)
    ]
    return ScriptedReply(tool_calls=tuple(made))


def over_http(here: Stage) -> dict[str, Any]:
    """A target of the asynchronous HTTP API for completions and outcome."""
    target = spec_pb2.Target(url=here.trainer.url, dialect=spec_pb2.DIALECT_HTTP_PLAIN)
    return {"completions": target, "outcome": target, "tokenizer": None}


PLAIN = {"dialect": TrainerDialect.PLAIN}


async def ended(exported: Exported, number: int, name: str = "invoke_agent") -> None:
    """Wait until so many spans with this name have ended."""
    await until(lambda: len(exported.named(name)) >= number)


async def under_way(here: Stage, number: int = 1) -> None:
    """Wait until the trainer has received so many requests."""
    await until(lambda: len(here.trainer.completions) >= number)


async def test_completed_with_tools(exported: Exported) -> None:
    async with stage() as here:
        outcome = await here.run(metadata_json='{"ground_truth": 16}')
        assert outcome.HasField("stop")
        sent = [each.metadata.get("traceparent", "") for each in here.trainer.completions]
    check("completed_with_tools", exported.spans)
    # The trainer's own span would be the child of each completion's.
    assert sent == [f"00-{CALLER[3:35]}-{span.context.span_id:016x}-01" for span in exported.named("chat")]


async def test_failed_tools(exported: Exported) -> None:
    """A tool's own error, and a tool that a model has made up: its name may be anything."""
    script = Script((calls(("divide", '{"a": 1, "b": 0}'), ("rm -rf\n/", "{}")), DONE))
    async with stage(script=script) as here:
        assert (await here.run()).HasField("stop")
    check("failed_tools", exported.spans)


async def test_a_trainer_that_fails_once(exported: Exported) -> None:
    async with stage(script=Script((BUSY, DONE)), trainer=PLAIN) as here:
        assert (await here.run(**over_http(here))).HasField("stop")
        await here.trainer.delivered("r")
        sent = [request.headers["traceparent"] for request in here.trainer.requests]
        await ended(exported, 1, "deliver_outcome")
    check("trainer_fails_once", exported.spans)
    (chat,) = exported.named("chat")
    assert sent == 2 * [f"00-{CALLER[3:35]}-{chat.context.span_id:016x}-01"]


async def test_a_trainer_that_fails(exported: Exported) -> None:
    async with stage(script=Script((BUSY,), repeat_last=True), trainer=PLAIN, retries=1) as here:
        outcome = await here.run(**over_http(here) | {"outcome": None})
        assert outcome.HasField("failure")
    check("trainer_fails", exported.spans)


async def test_drift(exported: Exported, tmp_path: Path) -> None:
    script = Script((replace(calls(("add", '{"a": 1, "b": 2}')), reasoning="One."), DONE))
    async with rewriting(tmp_path, script) as trainer, stage(trainer=trainer) as here:
        assert (await here.run(tokenizer=None)).HasField("stop")
    check("drift", exported.spans)


async def test_cancelled(exported: Exported) -> None:
    async with stage(script=SILENT) as here:
        uid = await here.start()
        await under_way(here)
        await here.stub.CancelRollouts(
            pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid]), reason="my secret reason")
        )
        assert (await here.wait(uid)).HasField("cancellation")
        await ended(exported, 1, "chat")
    check("cancelled", exported.spans)


async def test_while_it_runs_what_has_ended_is_exported(exported: Exported) -> None:
    script = Script((calls(("add", '{"a": 1, "b": 2}')), Fault(kind=FaultKind.SILENCE)), repeat_last=True)
    async with stage(script=script) as here:
        uid = await here.start()
        await ended(exported, 1, "execute_tool")
        assert [span.name for span in exported.spans] == ["chat", "execute_tool add"]
        assert exported.points["gen_ai.execute_tool.duration"][0].count == 1
        await here.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid])))
        await here.wait(uid)


@pytest.mark.parametrize(("module", "name"), [(attributes, "completed_attributes"), (contents, "output_messages")])
async def test_a_span_that_cannot_say_all_still_ends(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    def fail(*_: object) -> None:
        raise ValueError

    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    monkeypatch.setattr(module, name, fail)
    async with stage() as here:
        assert (await here.run()).HasField("stop")
    ended = exported.named("chat")
    assert ["gen_ai.usage.output_tokens" in (span.attributes or {}) for span in ended] == [module is contents] * 3
    assert exported.points["gen_ai.client.operation.duration"][0].count == 3


async def test_time_limit(exported: Exported) -> None:
    async with stage(script=SILENT) as here:
        outcome = await here.run(limits=spec_pb2.Limits(time=seconds(0.3)))
        assert outcome.HasField("failure")
        await ended(exported, 1, "chat")
    check("time_limit", exported.spans)


async def test_queue(exported: Exported) -> None:
    """The second rollout waits for the slot of the first, the third is cancelled while it waits."""
    async with stage(script=SILENT, max_running=1) as here:
        uids = [await here.start(rollout_id=name) for name in ("first", "second", "third")]
        await under_way(here)
        for at, uid in ((2, uids[2]), (0, uids[0]), (1, uids[1])):
            if at == 1:
                await under_way(here, 2)
            await here.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid])))
            await here.wait(uid)
        await ended(exported, 3)
        await ended(exported, 2, "chat")
    check("queue", exported.spans)


class Ranked(Calculator):
    """Rewards a group with the ranks of its members."""

    name = "ranked"

    async def play(self, run: Run) -> None:
        """Complete once."""
        await run.sample()

    async def reward_group(self, runs: Sequence[Run]) -> list[RewardResult]:
        """Return the ranks."""
        return [RewardResult(float(rank), {"rank": float(rank)}) for rank, _ in enumerate(runs)]


async def test_group(exported: Exported) -> None:
    async with stage(Ranked(), script=Script((DONE,), repeat_last=True)) as here:
        request = group_pb2.StartGroupRequest(spec=here.request(group_id="g").spec, count=2)
        group = (await here.stub.StartGroup(request, metadata=METADATA)).group
        for member in group.members:
            assert (await here.wait(member.uid)).HasField("stop")
    spans = sorted(exported.named("invoke_agent"), key=lambda span: str((span.attributes or {})["rollout.id"]))
    for number, span in enumerate(spans):  # they run at the same time, so each has a tree of its own
        check(
            f"group_{number}",
            [
                span,
                *(
                    each
                    for each in exported.named("chat")
                    if each.parent and each.parent.span_id == span.context.span_id
                ),
            ],
        )
    assert len(exported.spans) == 4


class JudgedTogether(Ranked):
    """Asks a judge about each rollout of a group, when the last one has ended."""

    name = "judged_together"

    async def reward_group(self, runs: Sequence[Run]) -> list[RewardResult]:
        """Return the judge's numbers."""
        asked = [await run.model("judge").sample([{"role": "user", "content": "How good?"}]) for run in runs]
        return [RewardResult(float(each.content)) for each in asked]


async def test_the_judge_of_a_group(exported: Exported) -> None:
    """Each call of the judge belongs to the rollout that it is about, whichever rollout ended last."""
    async with (
        MockEngine({"judge": SaysHalf()}) as engine,
        stage(JudgedTogether(), script=Script((DONE,), repeat_last=True), models=engine.entries) as here,
    ):
        request = group_pb2.StartGroupRequest(spec=here.request().spec, count=3)
        group = (await here.stub.StartGroup(request, metadata=METADATA)).group
        for member in group.members:
            assert (await here.wait(member.uid)).HasField("stop")
    rollouts = {span.context.span_id for span in exported.named("invoke_agent")}
    judged = {span.parent.span_id for span in exported.named("chat judge") if span.parent}
    assert (len(rollouts), judged) == (3, rollouts)


async def test_resumed_after_a_restart(exported: Exported, tmp_path: Path) -> None:
    """The first process leaves a span that says so. What it had done is replayed and has no spans again."""
    script = Script((calls(("add", '{"a": 1, "b": 2}')), Fault(kind=FaultKind.SILENCE), DONE))
    journal = {"journal": str(tmp_path / "journal")}
    async with StrictTrainer(script=script) as trainer:
        async with stage(trainer=trainer, **journal) as here:
            target = spec_pb2.Target(url=f"grpc://{trainer.grpc_target}", dialect=spec_pb2.DIALECT_GRPC)
            target.replays_turn_keys = True
            uid = await here.start(completions=target)
            await under_way(here, 2)
        check("suspended", exported.spans)
        exported.exporter.clear()
        async with stage(trainer=trainer, **journal) as later:
            assert (await later.wait(uid)).HasField("stop")
    check("resumed", exported.spans)


async def test_delivery_with_failures(exported: Exported) -> None:
    reception = Reception((Fault.error(503, "hunter2"), Fault(kind=FaultKind.CLOSED)))
    async with stage(script=Script((DONE,), reception=reception), trainer=PLAIN) as here:
        await here.run(**over_http(here))
        received = await here.trainer.delivered("r", 3)
        await ended(exported, 3, "deliver_outcome")
    check("delivery", exported.spans)
    assert len(received) == 3


class Judged(Agent):
    """Asks a judge in its reward."""

    name = "judged"

    async def reward(self, run: Run) -> float:
        """Return the judge's number."""
        return float(
            (await run.model("judge").sample([{"role": "user", "content": "How good?"}], max_tokens=3)).content
        )


class SaysHalf:
    """A judge."""

    def reply(self, messages: Sequence[Any]) -> ScriptedReply:
        """Return a number."""
        return ScriptedReply(content="0.5")


async def test_further_model(exported: Exported) -> None:
    async with (
        MockEngine({"judge": SaysHalf()}) as engine,
        stage(Judged(), script=Script((DONE,)), models=engine.entries) as here,
    ):
        assert (await here.run()).HasField("stop")
    check("further_model", exported.spans)


@tool
async def ask(question: str, run: Run) -> str:
    """Ask a subagent."""
    other = await run.fork([{"role": "user", "content": question}], kind="subagent")
    with trace.get_tracer("rollout_server").start_as_current_span("the tool's own"):
        return (await other.sample()).content


class Asking(Agent):
    """Its tool holds a conversation of its own."""

    name = "asking"
    tools = (ask,)


async def test_sub_conversation(exported: Exported) -> None:
    """What a tool does belongs to its span: its own spans, and the completions of its conversation."""
    script = Script((calls(("ask", '{"question": "5 + 3?"}')), DONE, DONE), then_model=True)
    async with stage(Asking(), script=script) as here:
        assert (await here.run()).HasField("stop")
    check("sub_conversation", exported.spans)


LOOP = """
import json, os, urllib.request
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "5 + 3?"}]}).encode()
for parent in ({}, {"traceparent": os.environ["TRACEPARENT"][:36] + "00000000000000aa-01"}):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers | parent)
    urllib.request.urlopen(request).close()
    body = body.replace(b"5 + 3?", b"6 + 4?")
print(os.environ["TRACEPARENT"])
"""


class Looping(Program):
    """A program that calls its model once without a trace of its own, and once as a client that has one."""

    name = "looping"

    def __init__(self) -> None:
        super().__init__([sys.executable, "-ISc", LOOP])
        self.written = ""

    def reward(self, run: Run) -> None:
        """Keep what the program has written."""
        self.written = run.state["program"].stdout


async def test_program(exported: Exported) -> None:
    agent = Looping()
    async with stage(agent, script=Script((DONE,), repeat_last=True), http=True) as here:
        assert (await here.run()).HasField("stop")
    (rollout,), chats = exported.named("invoke_agent"), exported.named("chat")
    assert agent.written.strip() == f"00-{CALLER[3:35]}-{rollout.context.span_id:016x}-01"
    assert [span.parent.span_id for span in chats if span.parent] == [rollout.context.span_id, 0xAA]
    assert {span.context.trace_id for span in chats} == {TRACE_ID}
    check("program", exported.spans)


async def test_a_tool_that_an_agent_calls_at_its_endpoint(exported: Exported) -> None:
    """The log has no record of the call."""

    @own_loop(tools=[add])
    async def caller(http: Any, access: Any) -> None:
        call = {"name": "add", "arguments": {"a": 1, "b": 2}}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        reply = await http.post(access.mcp_url, json=body)
        assert reply.json()["result"]["content"] == [{"type": "text", "text": "3"}], reply.text

    async with stage(caller, http=True) as here:
        assert (await here.run()).HasField("stop")
    (rollout,), (span,) = exported.named("invoke_agent"), exported.named("execute_tool")
    assert (span.name, span.context.trace_id) == ("execute_tool add", TRACE_ID)
    assert span.parent is not None
    assert span.parent.span_id == rollout.context.span_id
