"""The shares of the workers in the limits of the service."""

from __future__ import annotations

from rollout_server.edge.tools.pool import default_processes
from rollout_server.settings import load
from rollout_server.workers.plan import WorkerPlan


def test_limits_over_all_rollouts_are_divided() -> None:
    plan = WorkerPlan(1, 8, "sockets", 1, 2, 3, "memory", "secret")
    own = plan.settings(load(toolset_calls=64, models_concurrency=60, tool_threads=3, max_queued_per_caller=None))
    assert (own.toolset_calls, own.models_concurrency, own.tool_threads, own.max_queued_per_caller) == (8, 8, 1, None)


def test_the_processors_are_divided_if_no_number_of_tool_processes_is_set() -> None:
    count = default_processes()
    plan = WorkerPlan(0, count, "sockets", 1, 2, 3, "memory", "secret")
    assert plan.settings(load(tool_processes=0)).tool_processes == 1
    assert plan.settings(load(tool_processes=count * 3)).tool_processes == 3
