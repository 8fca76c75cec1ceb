"""Inputs of an agent other than its trainer and tools. They are recorded, so a replay gets the same values (D3)."""

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
from rollout_server.core.record import Observed, Record
from rollout_server.runtime.aio.source_location import written_at
from rollout_server.runtime.errors import AgentMistake
from rollout_server.runtime.run.context import RunContext

T = TypeVar("T", bound=JSON)

MOST_CHARACTERS = 1024 * 1024
"""Maximum length of one result as JSON, in characters."""


def now(context: RunContext, conversation: Conversation) -> datetime:
    """Return the time of the rollout's clock and record it."""
    time = datetime.fromtimestamp(context.rollout.clock.wall(), UTC)
    recorded = context.record(Observed("now", json.dumps(time.isoformat()), conversation.id))[-1]
    return datetime.fromisoformat(json.loads(_value(recorded)))


def random(context: RunContext, conversation: Conversation) -> Random:
    """Return a random generator with a new seed and record the seed."""
    seed = secrets.randbits(53)  # 53 bits: also JSON readers that use floats read the integer exactly
    recorded = context.record(Observed("random", str(seed), conversation.id))[-1]
    return Random(int(_value(recorded)))  # noqa: S311 - for agents, not for secrets


def _value(recorded: Record) -> str:
    return recorded.value_json if isinstance(recorded, Observed) else ""


async def once(context: RunContext, conversation: Conversation, function: Callable[[], T | Awaitable[T]]) -> T:
    """Call a function, record its result, and return it as parsed from JSON.

    Raises what the function raises, and `AgentMistake` for a result that cannot be serialized as JSON.
    """
    number, replayed = await context.claim_call("once", conversation)
    if replayed is not None:
        return cast("T", parse_json(_value(replayed.record)))
    if not number:  # a call by a tool
        text = await _result_of(context, function)
        context.record(Observed("once", text, conversation.id))
    else:
        after = len(context.rollout.log.entries)
        with context.effect(conversation) as concurrent:
            text = await _result_of(context, function)
            context.record(Observed("once", text, conversation.id, number, after, concurrent()))
    await context.rollout.stored()
    return cast("T", parse_json(text))


async def _result_of(context: RunContext, function: Callable[[], JSON | Awaitable[JSON]]) -> str:
    """Call a function and return its result as JSON. What led to the call is stored before: a replay then comes to it again."""
    await context.rollout.stored()
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
        parse_json(text)
    except (TypeError, ValueError, RecursionError, MalformedMessage) as error:
        where = written_at(function)
        raise AgentMistake(f"once: the function's result cannot be serialized as JSON: {error}{where}") from error
    if len(text) > MOST_CHARACTERS:
        reason = f"once: the result has {len(text)} characters as JSON, at most {MOST_CHARACTERS} are allowed"
        raise AgentMistake(f"{reason}{written_at(function)}")
    return text
