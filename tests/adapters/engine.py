"""vLLM's API with the script as the model: `python -m tests.adapters.engine`, in the environment of the product.

It prints its URL and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from tests.adapters.scenarios import Script, logprobs_of
from tests.support.engine_model import EngineModel, Generated
from tests.support.engines import VllmEngine, serving


class ScriptedModel(EngineModel):
    """Generates what the script does."""

    def generate(self, prompt: Sequence[int], most: int | None = None) -> Generated:
        """Generate a completion of a prompt."""
        ids, finish = Script().complete(prompt, most)
        return Generated(list(prompt), ids, logprobs_of(ids, len(prompt)), finish)


async def main() -> None:
    """Serve until the end of standard input."""
    engine = VllmEngine(ScriptedModel(()))
    async with serving(engine):
        print(engine.url, flush=True)  # noqa: T201 - the tests read it
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(main())
