"""An agent for bursts: almost free, but slow enough that all rollouts of a burst run at once."""

import asyncio
import time

from rollout_server import Agent, Run


class Brief(Agent):
    """Wait for a second. With `metadata.hold`, block the event loop for that many seconds, which no agent should do."""

    name = "brief"

    async def play(self, run: Run) -> None:
        """Wait without a completion."""
        hold = run.metadata.get("hold")
        if isinstance(hold, int | float):
            time.sleep(hold)  # noqa: ASYNC251 - that is the fault
        else:
            await asyncio.sleep(1)
