"""Running rollouts through a client: a single one, or a whole evaluation with limited concurrency."""

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
    """The rollouts of an evaluation, for the agent of that name, with `concurrency` rollouts at the same time.

    After `most_failures` failed rollouts no further one starts; None: no limit.
    """

    jobs: Sequence[Job]
    agent: str
    concurrency: int
    most_failures: int | None = None


async def evaluate(client: AsyncClient, endpoint: Endpoint, plan: Plan, on_result: Callable[[Result], None]) -> bool:
    """Run all rollouts of a plan, and call `on_result` with each result as its rollout ends.

    Return False if the evaluation stopped early because of `most_failures`.
    """
    failures = 0

    def left() -> Iterator[Job]:
        for job in plan.jobs:
            if plan.most_failures is not None and failures >= plan.most_failures:
                return
            yield job

    jobs = left()  # one iterator for all workers: each takes the next job when it is free

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
    except (TypeError, ValueError) as error:  # the client cannot send this row; the other rows continue
        result = Result(job.rollout_id, "refused", "invalid", str(error))
    return replace(result, row=row.number, repeat=job.repeat, fingerprint=row.fingerprint)


@dataclass(frozen=True, slots=True)
class RolloutStart:
    """The start of a rollout. `agent` is a name; rollouts of one prompt have the same `group_id`."""

    rollout_id: str
    messages: Sequence[Mapping[str, Any]]
    agent: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    group_id: str = ""


def ignore_event(_event: RolloutEvent) -> None:
    """Ignore the event; for callers that do not watch."""


async def run_rollout(
    client: AsyncClient,
    endpoint: Endpoint,
    start: RolloutStart,
    on_event: Callable[[RolloutEvent], None] = ignore_event,
) -> Result:
    """Run one rollout until it ends, and call `on_event` with each event.

    A rollout that the server refuses also gives a result, with the end `REFUSED`.
    """
    failed: Counter[str] = Counter()
    fields = endpoint.start_fields()
    fields["rollout_id"], fields["agent"] = start.rollout_id, start.agent
    fields["messages"], fields["metadata"] = start.messages, start.metadata or None
    # 0: when this process stops watching, for example on Ctrl-C, the server cancels the rollout at once.
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
    assert stream.outcome is not None  # noqa: S101 - the stream ends with the outcome or raises
    return result_of(start.rollout_id, stream.uid, stream.outcome, dict(failed))
