"""Plays one rollout over a client."""

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
    """What a rollout begins with; `agent` is a name, and `group_id` what rollouts of one prompt share."""

    rollout_id: str
    messages: Sequence[Mapping[str, Any]]
    agent: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    group_id: str = ""


def nothing(_event: RolloutEvent) -> None:
    """For callers that do not watch."""


async def play(
    client: AsyncClient, endpoint: Endpoint, ask: RolloutStart, seen: Callable[[RolloutEvent], None] = nothing
) -> Result:
    """Plays a rollout to its end. `seen` is told of each event. A rollout that the server does not take is a result, too."""
    failed: Counter[str] = Counter()
    fields = endpoint.start_fields()
    fields["rollout_id"], fields["agent"] = ask.rollout_id, ask.agent
    fields["messages"], fields["metadata"] = ask.messages, ask.metadata or None
    fields["group_id"], fields["cancel_after_detach"] = ask.group_id or None, 0
    stream = client.run(detail="messages", **fields)
    try:
        async with stream:
            async for event in stream:
                if event.HasField("tool_returned") and event.tool_returned.failed:
                    failed[event.tool_returned.name] += 1
                seen(event)
    except RolloutError as error:
        return Result(ask.rollout_id, REFUSED, (error.reason or error.code.name).lower(), str(error))
    assert stream.outcome is not None  # noqa: S101 - a stream ends with it, or raises
    return result_of(ask.rollout_id, stream.uid, stream.outcome, dict(failed))
