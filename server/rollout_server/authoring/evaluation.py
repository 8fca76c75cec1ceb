"""Plays the rollouts of an evaluation, so many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rollout_client import AsyncClient

from rollout_server.authoring.endpoint import Endpoint
from rollout_server.authoring.playing import RolloutStart, play
from rollout_server.authoring.results_file import Job
from rollout_server.authoring.rollout_result import Result


@dataclass(frozen=True, slots=True)
class Plan:
    """What to play. With `most_failures`, after so many rollouts that went wrong no further one begins."""

    jobs: Sequence[Job]
    agent: str
    concurrency: int
    most_failures: int | None = None


async def evaluate(client: AsyncClient, endpoint: Endpoint, plan: Plan, take: Callable[[Result], None]) -> bool:
    """Plays all rollouts of a plan; `take` is told of each as it ends. False: it was given up for its failures."""
    failures = 0

    def left() -> Iterator[Job]:
        for job in plan.jobs:
            if plan.most_failures is not None and failures >= plan.most_failures:
                return
            yield job

    jobs = left()

    async def work() -> None:
        nonlocal failures
        for job in jobs:
            result = await _played(client, endpoint, plan.agent, job)
            failures += not result.finished
            take(result)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(plan.concurrency, len(plan.jobs))):
            group.create_task(work())
    return plan.most_failures is None or failures < plan.most_failures


async def _played(client: AsyncClient, endpoint: Endpoint, agent: str, job: Job) -> Result:
    row = job.row
    ask = RolloutStart(job.rollout_id, row.messages, agent, row.metadata, f"row-{row.number}")
    try:
        result = await play(client, endpoint, ask)
    except (TypeError, ValueError) as error:  # what the client cannot send is the row's fault, and no other's
        result = Result(job.rollout_id, "refused", "invalid", str(error))
    return replace(result, row=row.number, repeat=job.repeat, fingerprint=row.fingerprint)
