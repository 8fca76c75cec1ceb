"""A valid response, changes to it, and invariants of parsing it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from rollout_server.core.ledger import MAX_TOKEN_ID
from rollout_server.core.limits import Limits
from rollout_server.core.message import tool_calls
from rollout_server.core.outcome import Category
from rollout_server.edge.trainer.chat_completion import ChatCompletion, parse_chat_completion
from rollout_server.runtime.errors import RolloutFailed

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5, "b": 3}'}}
MESSAGE = {"role": "assistant", "content": "Adding.", "tool_calls": [CALL]}
GOOD: Mapping[str, Any] = {
    "id": "r1",
    "object": "chat.completion",
    "created": 1,
    "model": "default",
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
    "token_ids": [1, 2, 3],
    "logprobs": [-0.5, -0.25, 0.0],
    "prompt_token_ids": [7, 8],
    "usage": {"prompt_tokens": 2, "completion_tokens": 3},
}
MARK = "@@"


def with_text(path: tuple[Any, ...], text: str) -> bytes:
    """The valid response with a raw text in place of a value."""
    body = copy.deepcopy(dict(GOOD))
    holder: Any = body
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = MARK
    return json.dumps(body).replace(f'"{MARK}"', text).encode("utf-8", "surrogatepass")


def check(body: bytes) -> ChatCompletion | str:
    """Parse a response; check the invariants of the result or of the failure."""
    try:
        read = parse_chat_completion(body, 7, ids_needed=True, most_calls=Limits().calls_read)
    except RolloutFailed as failed:
        failure = failed.failure
        assert (failure.category, failure.turn, failure.http_status) == (Category.VALIDATION, 7, None)
        assert failure.message.startswith("turn 7: the trainer's answer is malformed: ")
        assert len(failure.message) < 500
        return failure.message
    obeys(read, body)
    return read


def obeys(read: ChatCompletion, body: bytes) -> None:
    """Assert the invariants of a parsed response."""
    assert read.message.text.encode() in body
    assert read.message.role.strip()
    assert len(tool_calls(read.message.fields())) == read.tool_calls
    assert isinstance(read.finish_reason, str)
    for ids in (read.token_ids, read.reported):
        assert ids is None or (ids.typecode == "I" and all(0 <= each <= MAX_TOKEN_ID for each in ids))
    if read.logprobs is not None:
        assert (read.logprobs.typecode, len(read.logprobs)) == ("f", len(read.token_ids))
