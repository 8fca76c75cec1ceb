"""Runs rollouts over a client: one, or all of an evaluation, so many at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout_client import AsyncClient, RolloutError, RolloutEvent

from rollout_server.authoring.endpoint import Endpoint
from rollout_server.authoring.results_file import Job
from rollout_server.authoring.rollout_result import REFUSED, Result, result_of


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. With `most_failures`, after so many rollouts that went wrong no further one begins."""

    jobs: Sequence[Job]
    agent: str
    concurrency: int
    most_failures: int | None = None


async def evaluate(client: AsyncClient, endpoint: Endpoint, plan: Plan, on_result: Callable[[Result], None]) -> bool:
    """Runs all rollouts of a plan; `on_result` is called with each as it ends. False: it stopped because of failures."""
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
            result = await _run_job(client, endpoint, plan.agent, job)
            failures += not result.finished
            on_result(result)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(plan.concurrency, len(plan.jobs))):
            group.create_task(work())
    return plan.most_failures is None or failures < plan.most_failures


async def _run_job(client: AsyncClient, endpoint: Endpoint, agent: str, job: Job) -> Result:
    row = job.row
    start = RolloutStart(job.rollout_id, row.messages, agent, row.metadata, f"row-{row.number}")
    try:
        result = await run_rollout(client, endpoint, start)
    except (TypeError, ValueError) as error:  # what the client cannot send is the row's fault, and no other's
        result = Result(job.rollout_id, "refused", "invalid", str(error))
    return replace(result, row=row.number, repeat=job.repeat, fingerprint=row.fingerprint)


@dataclass(frozen=True, slots=True)
class RolloutStart:
    """What a rollout begins with; `agent` is a name, and `group_id` what rollouts of one prompt share."""

    rollout_id: str
    messages: Sequence[Mapping[str, Any]]
    agent: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    group_id: str = ""


def ignore_event(_event: RolloutEvent) -> None:
    """For callers that do not watch."""


async def run_rollout(
    client: AsyncClient,
    endpoint: Endpoint,
    start: RolloutStart,
    on_event: Callable[[RolloutEvent], None] = ignore_event,
) -> Result:
    """Runs a rollout to its end and calls `on_event` with each event. A rollout that the server refuses is a result, too."""
    failed: Counter[str] = Counter()
    fields = endpoint.start_fields()
    fields["rollout_id"], fields["agent"] = start.rollout_id, start.agent
    fields["messages"], fields["metadata"] = start.messages, start.metadata or None
    fields["group_id"], fields["cancel_after_detach"] = start.group_id or None, 0
    stream = client.run(detail="messages", **fields)
    try:
        async with stream:
            async for event in stream:
                if event.HasField("tool_returned") and event.tool_returned.failed:
                    failed[event.tool_returned.name] += 1
                on_event(event)
    except RolloutError as error:
        return Result(start.rollout_id, REFUSED, (error.reason or error.code.name).lower(), str(error))
    assert stream.outcome is not None  # noqa: S101 - a stream ends with it, or raises
    return result_of(start.rollout_id, stream.uid, stream.outcome, dict(failed))
