"""Bodies of `POST /rollout` for tests."""

import json
from typing import Any

import pytest
from rollout_gateway.json_body import InvalidBody, ParsedBody, read_body
from rollout_gateway.osmosis_http.body import RolloutBody

from tests.support.example_bodies import EXAMPLE

LIMIT = 1 << 20


def body(**changes: Any) -> dict[str, Any]:
    return {**EXAMPLE, **changes}


def parse(value: Any, limit: int = LIMIT) -> ParsedBody[RolloutBody]:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return read_body(content, RolloutBody, limit)


def locations(value: Any, limit: int = LIMIT) -> list[tuple[Any, ...]]:
    with pytest.raises(InvalidBody) as caught:
        parse(value, limit)
    assert all(each["msg"] and each["type"] for each in caught.value.violations)
    return [each["loc"] for each in caught.value.violations]


def spliced(messages: str, rest: str = "") -> bytes:
    """A body with the given raw text as its messages."""
    return (
        '{"rollout_id": "r", "server_url": "http://t", "tokenizer_name": "m", "sampling_params": {}, '
        f'"messages" : {messages}{rest}}}'
    ).encode()
