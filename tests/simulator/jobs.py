"""What the callers of a world want: rollouts and groups, drawn by the seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from rollout_server.core.limits import Limits
from rollout_server.core.message import Message
from rollout_server.core.spec import Dialect, DriftPolicy, InterruptPolicy, Spec, StaleAction, Staleness, Target
from rollout_server.runtime.groups.state import GroupPlan
from rollout_server.runtime.start_request import StartRequest

AGENTS = (*("default loop",) * 3, *("forking",) * 4, "unruly", "unruly", "tidy", "tidy", "ranked")
_INTERRUPT_POLICIES = (*(InterruptPolicy.RESUME,) * 5, InterruptPolicy.UNSET, InterruptPolicy.FAIL)
_MESSAGE = Message.write({"role": "user", "content": "begin"})


@dataclass
class Job:
    """One request, with what its caller knows. It outlives the server.

    Args:
        request: the request.
        delay: seconds after the start of a process at which it is sent.
        plan: the plan of a group; None for one rollout.
        cancel_after: seconds after its acceptance at which it is cancelled; None: never.
        acknowledges: whether its outcome is acknowledged by a call.
        uids: the rollouts whose acceptance was reported.
        group_id: their group; empty: they have none.
    """

    request: StartRequest
    delay: float
    plan: GroupPlan | None = None
    cancel_after: float | None = None
    acknowledges: bool = False
    uids: list[str] = field(default_factory=list)
    group_id: str = ""


def draw_jobs(draw: Random) -> list[Job]:
    """Draw two to six jobs."""
    return [_job(draw, number) for number in range(draw.randint(2, 6))]


def _job(draw: Random, number: int) -> Job:
    agent = draw.choice(AGENTS)
    grouped = agent == "ranked" or draw.random() < 0.1
    until_received = draw.random() < 0.3
    request_id = f"request {number}" if draw.random() < 0.8 else ""
    request = StartRequest(_spec(draw, number, agent), draw.choice(("ann", "bob")), request_id, until_received)
    job = Job(request, draw.choice((0.0, 0.0, draw.uniform(0, 20))))
    if grouped:
        count = draw.randint(1, 3)
        job.plan = GroupPlan(count, draw.choice((0, 0, draw.randint(1, count))), draw.choice((0, 0, 1, 3)))
    job.acknowledges = draw.random() < 0.3
    return job


def _spec(draw: Random, number: int, agent: str) -> Spec:
    limits = Limits(
        turns=draw.randint(1, 12),
        generated_tokens=draw.choice((None, None, None, 20)),
        seconds=draw.choice((20.0, 60.0)),
        calls_per_turn=draw.choice((None, 2)),
        tool_turns=draw.choice((None, None, None, 2)),
        bytes=draw.choice((None, None, None, 2500)),
    )
    engine, replays = draw.random() < 0.3, draw.random() < 0.8
    trainer = Target("grpc://trainer:1", Dialect.GRPC, replays_turn_keys=replays)
    stale = Staleness(draw.randint(0, 2), draw.choice([*StaleAction])) if draw.random() < 0.3 else None
    return Spec(
        f"rollout {number}",
        (_MESSAGE,),
        Target("http://engine:1", Dialect.VLLM, model="m") if engine else trainer,
        agent=agent,
        outcome=Target("http://receiver:1", Dialect.HTTP_PLAIN) if draw.random() < 0.6 else None,
        limits=limits,
        on_drift=draw.choice((DriftPolicy.WARN, DriftPolicy.WARN, DriftPolicy.FAIL)),
        # Only what can be resumed at all may demand it.
        on_interrupt=InterruptPolicy.UNSET if agent in ("unruly", "ranked") else draw.choice(_INTERRUPT_POLICIES),
        cancel_after_detach=draw.choice((None, None, None, 15.0)),
        priority=draw.choice((0, 0, 5)),
        staleness=stale,
    )
