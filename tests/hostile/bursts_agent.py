"""An agent for bursts: it costs next to nothing, and stays for a while so that all of them run at once."""

import asyncio
import time

from rollout_server import Agent, Run


class Brief(Agent):
    """Waits for a second; with `metadata.hold` it holds the event loop for as many seconds, as no agent should."""

    name = "brief"

    async def play(self, run: Run) -> None:
        """Asks nobody."""
        hold = run.metadata.get("hold")
        if isinstance(hold, int | float):
            time.sleep(hold)  # noqa: ASYNC251 - that is the fault
        else:
            await asyncio.sleep(1)
