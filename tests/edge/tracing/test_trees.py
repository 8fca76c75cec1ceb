"""The spans of each way in which a rollout can go, on a real server with a strict trainer over gRPC."""

from __future__ import annotations

from rollout_server.testing.script import Script, ScriptedReply

from tests.edge.tracing.span_trees import CALLER, check
from tests.edge.tracing.stage import Exported, stage


async def test_completed_with_tools(exported: Exported) -> None:
    async with stage() as here:
        outcome = await here.run(metadata_json='{"ground_truth": 16}', sampling=None)
        assert outcome.HasField("stop")
        sent = [each.metadata.get("traceparent", "") for each in here.trainer.completions]
    check("completed_with_tools", exported.spans)
    chats = exported.named("chat")
    assert sent == [f"00-{CALLER[3:35]}-{span.context.span_id:016x}-01" for span in chats]
