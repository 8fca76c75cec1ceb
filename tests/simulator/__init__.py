"""A deterministic simulator of the runtime: seeded worlds with faults and crashes, and laws that must hold in all of them.

A seed determines a world: its callers, trainer, tools, receivers and disk, their faults, and the steps at which the server crashes.
`python -m tests.simulator --seeds 0-1999` runs worlds, `--seed 17` runs one and prints its trace.
"""
