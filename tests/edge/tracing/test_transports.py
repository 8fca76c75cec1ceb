"""The trace over every way in which a rollout is started, and to everything that is called for it."""

from __future__ import annotations

import grpc
import httpx
import pytest
from osmosis.rollout.v1 import spec_pb2
from rollout_client.trainer import Generated, Prompt, Trainer, Turn
from rollout_client.trainer.server import Serving
from rollout_server.testing.script import Script
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.tracing.span_trees import CALLER, SPAN_ID, TRACE_ID
from tests.edge.tracing.stage import METADATA, Exported, stage
from tests.edge.tracing.test_trees import DONE
from tests.support.bodies import body
from tests.support.engine_model import EngineModel
from tests.support.engines import VllmEngine, serving
from tests.support.outcome_receiver import Answer, grpc_receiver


def traceparents(exported: Exported, name: str) -> list[str]:
    """What the receivers of these spans' requests get."""
    return [f"00-{CALLER[3:35]}-{span.context.span_id:016x}-01" for span in exported.named(name)]


async def test_over_http(exported: Exported) -> None:
    """`POST /rollout`: the gateway passes the caller's trace on, and the trainer gets that of the completion."""
    async with (
        stage(http=True) as here,
        StrictTrainer(tools_from=f"http://127.0.0.1:{here.server.http_port}") as trainer,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{here.server.http_port}", timeout=60, trust_env=False) as http,
    ):
        headers = {
            "traceparent": CALLER,
            "tracestate": "vendor=a",
            "authorization": "Bearer hunter2",
            "x-api-key": "hunter3",
        }
        response = await http.post("/rollout", json=body("r", trainer.url), headers=headers)
        assert response.json()["status"] == "COMPLETED"
        sent = [request.headers["traceparent"] for request in trainer.requests]
        assert {request.headers["tracestate"] for request in trainer.requests} == {"vendor=a"}
    (rollout,) = exported.named("invoke_agent")
    assert rollout.parent
    assert (rollout.parent.trace_id, rollout.parent.span_id) == (TRACE_ID, SPAN_ID)
    assert sent == traceparents(exported, "chat")
    assert len(sent) == 3
    requests = [span for span in exported.exporter.get_finished_spans() if span not in exported.spans]
    assert [span.name for span in requests][-1:] == ["POST /rollout"]  # FastAPI's own
    assert "hunter" not in "".join(span.to_json() for span in requests)


async def test_on_a_stream(exported: Exported) -> None:
    """All rollouts of a stream belong to the trace of the call that opened it."""
    async with stage(script=Script((DONE,), repeat_last=True)) as here:
        server = f"127.0.0.1:{here.server.grpc_port}"
        stream = here.trainer.connected(server)
        stream._metadata = METADATA
        async with stream:
            (uid,) = await stream.start(here.request(completions=None))
            outcome = await stream.outcome(uid)
    (rollout,), (chat,) = exported.named("invoke_agent"), exported.named("chat")
    assert outcome.outcome.HasField("stop")
    assert (rollout.parent is not None, chat.parent is not None) == (True, True)
    assert [span.parent and span.parent.span_id for span in (rollout, chat)] == [SPAN_ID, rollout.context.span_id]
    assert "server.address" not in (chat.attributes or {})


@pytest.mark.parametrize("listens", [False, True], ids=["stream", "listening"])
async def test_the_trainer_library_gets_the_trace_of_each_turn(exported: Exported, listens: bool) -> None:
    seen = []

    async def generate(turn: Turn) -> Generated:
        seen.append(turn.traceparent)
        return Generated([5], [-0.5], "stop")

    async with stage() as here:
        server = f"127.0.0.1:{here.server.grpc_port}"
        serving = Serving() if listens else None
        async with Trainer(server, serving=serving, generate=generate, decode=lambda ids: "Done.") as trainer:
            async for group in trainer.rollouts([Prompt([{"role": "user", "content": "Hi."}])], n=2, tokenizer="toy"):
                assert [each.rollout.outcome.WhichOneof("end") for each in group.rollouts] == ["stop", "stop"]
    spans = [span.context for span in exported.named("chat")]
    assert sorted(seen) == sorted(
        f"00-{each.trace_id:032x}-{each.span_id:016x}-{each.trace_flags:02x}" for each in spans
    )
    assert len(seen) == 2


async def test_an_engine(exported: Exported) -> None:
    engine = VllmEngine(EngineModel(["Done."]))
    async with serving(engine), stage() as here:
        target = spec_pb2.Target(url=f"{engine.url}/v1", dialect=spec_pb2.DIALECT_VLLM, model=engine.model_name)
        assert (await here.run(completions=target)).HasField("stop")
    (chat,) = exported.named("chat toy-model")
    assert [headers["traceparent"] for headers in engine.headers] == traceparents(exported, "chat")
    assert (chat.attributes or {})["gen_ai.provider.name"] == "vllm"


async def test_a_receiver_over_grpc(exported: Exported) -> None:
    busy = Answer(grpc.StatusCode.UNAVAILABLE, "hunter2")
    async with grpc_receiver(busy, Answer()) as receiver, stage(script=Script((DONE,))) as here:
        target = spec_pb2.Target(url=receiver.url, dialect=spec_pb2.DIALECT_GRPC)
        await here.run(outcome=target)
        seen = await receiver.has(2)
        await here.server.drain()
    assert [each.metadata["traceparent"] for each in seen] == traceparents(exported, "deliver_outcome")
    assert [span.status.is_ok or span.status.is_unset for span in exported.named("deliver_outcome")] == [False, True]
