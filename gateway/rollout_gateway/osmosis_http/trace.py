"""`extra_fields.trace`: a description of every turn, built from the events of a finished rollout."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
from osmosis.rollout.v1.event_pb2 import EVENT_DETAIL_MESSAGES, Answered, RolloutEvent
from osmosis.rollout.v1.rollout_service_pb2 import WatchRolloutRequest

from rollout_gateway.calls import Calls
from rollout_gateway.json_body import parts_of
from rollout_gateway.message_json import message_json

_LOG = logging.getLogger(__name__)


async def read_trace(calls: Calls, uid: str) -> list[dict[str, Any]] | None:
    """Return the trace of a finished rollout; None if its events cannot be read, because the outcome matters more."""
    call = calls.rpc.WatchRollout(WatchRolloutRequest(uid=uid, detail=EVENT_DETAIL_MESSAGES))
    try:
        return await trace_of(item.event async for item in call)
    except grpc.aio.AioRpcError as error:
        _LOG.warning("rollout %s: the trace could not be read: %s", uid, error.code().name)
        return None
    finally:
        call.cancel()


async def trace_of(events: AsyncIterator[RolloutEvent]) -> list[dict[str, Any]]:
    """Return one entry for each completion, with the results of its tool calls in the order of the calls."""
    turns: dict[tuple[str, int], dict[str, Any]] = {}
    results: dict[tuple[str, int], list[tuple[int, msgspec.Raw]]] = {}
    async for event in events:
        key = (event.segment_id, event.turn)
        if event.HasField("answered"):
            turns[key] = _turn(event.turn, event.answered)
        elif event.HasField("tool_returned"):
            returned = event.tool_returned
            results.setdefault(key, []).append((returned.index, message_json(returned.message)))
    for key, turn in turns.items():
        in_order = sorted(results.get(key, ()), key=lambda result: result[0])
        turn["tool_results"] = [message for _, message in in_order]
    return list(turns.values())


def _turn(number: int, answered: Answered) -> dict[str, Any]:
    message = message_json(answered.message)
    return {
        "turn": number,
        "llm_request": {
            "prompt_length": answered.prompt_tokens,
            "response_mask_len": answered.mask_length if answered.HasField("mask_length") else None,
        },
        "assistant_message": message,
        "tool_calls": _tool_calls(message),
        "tool_results": [],
        "llm_response_token_count": answered.generated_tokens,
    }


def _tool_calls(message: msgspec.Raw) -> list[msgspec.Raw]:
    try:
        found = parts_of(message).get("tool_calls")
        return [] if found is None else msgspec.json.decode(found, type=list[msgspec.Raw] | None) or []
    except msgspec.DecodeError:
        # The trainer sent something other than a list; `assistant_message` of the same entry shows it.
        return []
