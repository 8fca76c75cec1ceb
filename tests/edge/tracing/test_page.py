"""The page about tracing: its snippets run, and it names what is exported."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from osmosis.rollout.v1 import spec_pb2
from rollout_server.edge.tracing import conventions
from rollout_server.testing.script import Script

from tests.edge.tracing.stage import Exported, stage
from tests.edge.tracing.test_trees import DONE, calls, ended
from tests.support.outcome_receiver import grpc_receiver

PAGE = (Path(__file__).parents[3] / "docs" / "tracing.md").read_text(encoding="utf-8")
NAMES = ("gen_ai.", "rollout.", "error.", "server.")


def blocks(language: str) -> list[str]:
    """The code blocks of the page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_it_names_what_is_exported() -> None:
    exported = {value for value in vars(conventions).values() if isinstance(value, str) and value.startswith(NAMES)}
    text = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    named = {name for name in re.findall(r"`([^`]+)`", text) if name.startswith(NAMES) and "*" not in name}
    assert named == exported
    assert f"`{conventions.SCHEMA_URL.removeprefix('https://opentelemetry.io/schemas/')}`" in PAGE
    assert conventions.CAPTURE_CONTENT in PAGE


async def test_the_tree(exported: Exported) -> None:
    async with grpc_receiver() as receiver, stage() as here:
        await here.run(outcome=spec_pb2.Target(url=receiver.url, dialect=spec_pb2.DIALECT_GRPC))
        await ended(exported, 1, "deliver_outcome")
    spans = sorted(exported.spans, key=lambda span: span.start_time or 0)
    (root,) = [span for span in spans if span.name.startswith("invoke_agent")]
    assert all(span.parent and span.parent.span_id == root.context.span_id for span in spans if span is not root)
    lines = [f"{'  ' if span is root else '    '}{span.name} {span.kind.name}" for span in spans]
    assert blocks("text") == ["\n".join(["the caller's span", *lines]) + "\n"]


async def test_the_trainers_snippet(exported: Exported) -> None:
    client, _ = blocks("python")
    async with stage() as here:
        for written, real in (
            ("localhost:50051", f"127.0.0.1:{here.server.grpc_port}"),
            ("localhost:9001", here.trainer.grpc_target),
            ("Qwen/Qwen3-8B", "toy"),
        ):
            assert written in client
            client = client.replace(written, real)
        await asyncio.to_thread(exec, client, {})
    (step,) = [span for span in exported.exporter.get_finished_spans() if span.name == "step"]
    (rollout,) = exported.named("invoke_agent")
    assert parent_id(rollout) == step.context.span_id


async def test_the_tools_snippet(exported: Exported) -> None:
    _, agent = blocks("python")
    defined: dict[str, Any] = {}
    exec(agent, defined)
    async with stage(defined["Weather"](), script=Script((calls(("look_up", '{"city": "Rome"}')), DONE))) as here:
        assert (await here.run()).HasField("stop")
    (query,) = [span for span in exported.exporter.get_finished_spans() if span.name == "query"]
    (called,) = exported.named("execute_tool look_up")
    assert parent_id(query) == called.context.span_id


def parent_id(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None
