"""What an earlier process has accepted keeps the caller's trace."""

from __future__ import annotations

from pathlib import Path

from rollout_server import Agent, Run
from rollout_server.testing.script import Script
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.tracing.stage import Exported, stage
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
