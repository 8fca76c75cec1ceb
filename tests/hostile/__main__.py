"""`python -m tests.hostile`: run each attack against a fresh server, print a table, then send fuzzed inputs."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.hostile.attacks import Attack, all_attacks
from tests.hostile.fuzz import fuzz
from tests.hostile.target import Pulse, target

AIM_MS = 250
"""Goal for `/healthz`: the longest response time in milliseconds, during any attack."""


async def attacked(attack: Attack, limit: float) -> tuple[str, ...]:
    """Run an attack and return its row of the table."""
    async with target(**attack.settings) as victim:
        before, began = victim.memory(), time.monotonic()
        async with Pulse(victim.serving.http_port) as pulse:
            try:
                async with asyncio.timeout(limit):
                    said = await attack.run(victim)
            except (Exception, TimeoutError) as error:
                said = f"FAILED: {type(error).__name__}: {str(error)[:200]}"
            seconds = time.monotonic() - began
        faults = victim.faults()
        figures = (
            f"{seconds:.1f}",
            f"{pulse.worst * 1000:.0f}",
            *(f"{m >> 20}" for m in (before, victim.memory("VmHWM"))),
        )
    return attack.name, said + (f" [{len(faults)} FAULTS: {faults[0][:120]}]" if faults else ""), *figures


def main(
    only: Annotated[str, typer.Option(help="Run only attacks whose names contain this text.")] = "",
    inputs: Annotated[int, typer.Option(help="Number of fuzzed inputs.")] = 100_000,
    seed: Annotated[int | None, typer.Option(help="Seed of the fuzzed inputs; random by default.")] = None,
    limit: Annotated[float, typer.Option(help="Timeout of an attack in seconds.")] = 300.0,
) -> None:
    """Attack a fresh server with each attack in turn, and then another one with fuzzed inputs."""
    console = Console(width=200)
    table = Table("attack", "response", "s", f"/healthz ms (aim {AIM_MS})", "MiB before", "MiB at most")
    for attack in (each for each in all_attacks() if only in each.name):
        row = asyncio.run(attacked(attack, limit))
        console.print(" | ".join(row), markup=False, highlight=False)
        table.add_row(*map(escape, row))
    console.print(table)
    if inputs:
        chosen = random.SystemRandom().randrange(2**32) if seed is None else seed
        console.print(f"{inputs} fuzzed inputs, seed {chosen}")
        console.print(str(asyncio.run(fuzz(inputs, chosen))), markup=False)


if __name__ == "__main__":
    typer.run(main)
