"""What an earlier process has accepted keeps the caller's trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout_server import Agent, Run
from rollout_server.edge.tracing.propagation import trace_of
from rollout_server.runtime.start_request import TraceContext
from rollout_server.testing.script import Script
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.tracing.span_trees import CALLER
from tests.edge.tracing.stage import METADATA, Exported, stage
from tests.edge.tracing.test_trees import SILENT, under_way


class Unrepeatable(Agent):
    """An agent whose `play` cannot be replayed."""

    name = "unrepeatable"
    replayable = False

    async def play(self, run: Run) -> None:
        """Complete once."""
        await run.sample()


async def test_a_rollout_that_waited_over_a_restart(exported: Exported, tmp_path: Path) -> None:
    """It never ran in the first process, which ended the other one when it stopped."""
    journal = {"journal": str(tmp_path / "journal"), "max_running": 1}
    async with StrictTrainer(script=SILENT) as trainer:
        async with stage(Unrepeatable(), trainer=trainer, **journal) as here:
            first, second = [await here.start(rollout_id=name) for name in ("first", "second")]
            await under_way(here)
        exported.exporter.clear()
        await trainer.put_script("second", Script(then_model=True))
        async with stage(Unrepeatable(), trainer=trainer, **journal) as later:
            assert (await later.wait(second)).HasField("stop")
            assert (await later.wait(first)).HasField("failure")
    links = {
        (span.attributes or {})["rollout.id"]: dict(link.attributes or {})["rollout.link"]
        for span in exported.named("invoke_agent")
        for link in span.links
    }
    assert links == {"second": "queued"}


async def test_what_tracing_systems_added_is_kept_over_a_restart(exported: Exported, tmp_path: Path) -> None:
    journal = {"journal": str(tmp_path / "journal"), "max_running": 1}
    metadata = (*METADATA, ("tracestate", "vendor=a"), ("tracestate", "other=b"))
    async with StrictTrainer(script=SILENT) as trainer:
        async with stage(Unrepeatable(), trainer=trainer, **journal) as here:
            await here.start(rollout_id="first")
            request = here.request(rollout_id="second")
            uid = (await here.stub.StartRollout(request, metadata=metadata)).rollout.uid
            await under_way(here)
        exported.exporter.clear()
        await trainer.put_script("second", Script(then_model=True))
        async with stage(Unrepeatable(), trainer=trainer, **journal) as later:
            assert (await later.wait(uid)).HasField("stop")
        seen = trainer.completions[-1].metadata
    assert (seen["traceparent"][3:35], seen["tracestate"]) == (CALLER[3:35], "vendor=a,other=b")
    (chat,) = exported.named("chat")
    assert chat.context.trace_state.to_header() == "vendor=a,other=b"


@pytest.mark.parametrize(
    ("metadata", "trace"),
    [
        ((("tracestate", "a=1"),), TraceContext()),
        ((("traceparent", "00-zz"), ("tracestate", "a=1")), TraceContext()),
        ((("traceparent", b"00"),), TraceContext()),
        ((("traceparent", CALLER), ("tracestate", ""), ("other", "x")), TraceContext(CALLER)),
        ((("traceparent", CALLER), ("tracestate", "a=1")), TraceContext(CALLER, "a=1")),
        ((("traceparent", CALLER), ("tracestate", "a=" + "1" * 5000)), TraceContext(CALLER)),
    ],
)
def test_the_trace_of_a_call(metadata: tuple[tuple[str, str | bytes], ...], trace: TraceContext) -> None:
    assert trace_of(metadata) == trace
