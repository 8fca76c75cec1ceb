"""What an agent takes from the world beside its trainer and tools. It is recorded, so that a replay is told the same (D3)."""

from __future__ import annotations

import inspect
import json
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from random import Random
from typing import TypeVar, cast

from rollout_server.core.conversation import Conversation
from rollout_server.core.message import JSON, MalformedMessage, parse_json
from rollout_server.core.record import Observed
from rollout_server.runtime.aio.source_location import written_at
from rollout_server.runtime.errors import AgentMistake
from rollout_server.runtime.run.context import RunContext

T = TypeVar("T", bound=JSON)

MOST_CHARACTERS = 1024 * 1024
"""Of the JSON of one result."""


def now(context: RunContext, conversation: Conversation) -> datetime:
    """The time by the rollout's clock."""
    time = datetime.fromtimestamp(context.rollout.clock.wall(), UTC)
    context.record(Observed("now", json.dumps(time.isoformat()), conversation.id))
    return time


def random(context: RunContext, conversation: Conversation) -> Random:
    """A generator with a seed of its own."""
    seed = secrets.randbits(53)  # an integer that every reader of JSON keeps
    context.record(Observed("random", str(seed), conversation.id))
    return Random(seed)  # noqa: S311 - for agents, not for secrets


async def once(context: RunContext, conversation: Conversation, function: Callable[[], T | Awaitable[T]]) -> T:
    """The result of a function as its JSON reads. Raises what it raises, and `AgentMistake` for a result that is no JSON."""
    if inspect.iscoroutinefunction(function):
        result = await function()
    else:
        result = await context.run_in_thread(
            f"once of agent {context.rollout.agent.name}{written_at(function)}", function
        )
        if inspect.isawaitable(result):
            result = await result
    try:
        text = json.dumps(result, ensure_ascii=False, allow_nan=False)
        value = parse_json(text)
    except (TypeError, ValueError, RecursionError, MalformedMessage) as error:
        where = written_at(function)
        raise AgentMistake(f"once: the function must return what JSON can hold: {error}{where}") from error
    if len(text) > MOST_CHARACTERS:
        reason = f"once: the result has {len(text)} characters as JSON, at most {MOST_CHARACTERS} are kept"
        raise AgentMistake(f"{reason}{written_at(function)}")
    context.record(Observed("once", text, conversation.id))
    return cast("T", value)
