"""Running one rollout through a client until it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_client import AsyncClient, RolloutError, RolloutEvent

from rollout_server.authoring.endpoint import Endpoint
from rollout_server.authoring.rollout_result import REFUSED, Result, result_of


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
