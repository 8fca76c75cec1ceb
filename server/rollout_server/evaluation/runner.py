"""Running the rollouts of an evaluation through a client, with limited concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rollout_client import AsyncClient, RolloutError, TrainingSample, samples

from rollout_server.authoring.endpoint import Endpoint
from rollout_server.authoring.rollout_result import REFUSED, Result
from rollout_server.authoring.single_rollout import RolloutStart, run_rollout
from rollout_server.evaluation.row_result import Job, RowResult, row_result


@dataclass(frozen=True, slots=True)
class Plan:
    """The rollouts of an evaluation, for the agent of that name, with `concurrency` rollouts at the same time.

    After `most_failures` failed rollouts no further one starts; None: no limit. With `samples` the training samples of each
    rollout are fetched.
    """

    jobs: Sequence[Job]
    agent: str
    concurrency: int
    most_failures: int | None = None
    samples: bool = False


OnResult = Callable[[RowResult, Sequence[TrainingSample]], None]


async def run_plan(client: AsyncClient, endpoint: Endpoint, plan: Plan, on_result: OnResult) -> bool:
    """Run all rollouts of a plan, and call `on_result` with each result and its samples as its rollout ends.

    Return False if `most_failures` stopped the evaluation, so that rollouts are left. An exception of `on_result` stops it and is
    raised.
    """
    failures, stopped = 0, False

    def left() -> Iterator[Job]:
        nonlocal stopped
        for job in plan.jobs:
            stopped = plan.most_failures is not None and failures >= plan.most_failures
            if stopped:
                return
            yield job

    jobs = left()  # one iterator for all workers: each takes the next job when it is free

    async def work() -> None:
        nonlocal failures
        for job in jobs:
            result = row_result(await _run_job(client, endpoint, plan.agent, job), job)
            found: Sequence[TrainingSample] = ()
            if plan.samples and result.uid:
                result, found = await _with_samples(client, result)
            failures += not result.finished
            on_result(result, found)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(plan.concurrency, len(plan.jobs))):
                group.create_task(work())
    except ExceptionGroup as errors:  # such as a full disk; the first is what the user has to mend
        raise errors.exceptions[0] from None
    return not stopped


async def _run_job(client: AsyncClient, endpoint: Endpoint, agent: str, job: Job) -> Result:
    row = job.row
    start = RolloutStart(job.rollout_id, row.messages, agent, row.metadata, f"row-{row.number}")
    try:
        return await run_rollout(client, endpoint, start)
    except (TypeError, ValueError) as error:  # the client cannot send this row; the other rows continue
        return Result(job.rollout_id, REFUSED, "invalid", str(error))


async def _with_samples(client: AsyncClient, result: RowResult) -> tuple[RowResult, Sequence[TrainingSample]]:
    """Fetch the samples of a rollout. Samples that cannot be fetched or are inconsistent are a warning of the result."""
    try:
        found = samples(await client.get(result.uid, view="samples"))
    except (RolloutError, ValueError) as error:
        return replace(result, warnings=[*result.warnings, f"samples: {error}"]), ()
    return replace(result, samples=len(found)), found
