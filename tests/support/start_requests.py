"""Valid requests, and the parts that tests change."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.duration_pb2 import Duration
from osmosis.rollout.v1 import message_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.settings import Settings
from rollout_server.testing.tokenizer import TOY_TOKENIZER

NOWHERE = "http://127.0.0.1:9"
HELLO = '{"role":"user","content":"Please calculate 5 plus 3, then multiply by 2."}'


def settings(**changes: Any) -> Settings:
    """Settings of a gRPC-only server on a free port."""
    fields: dict[str, Any] = {
        "host": "127.0.0.1",
        "http": False,
        "grpc_port": 0,
        "http_port": 0,
        "tokenizers": {"toy": TOY_TOKENIZER},
    }
    return Settings(_env_file=None, **(fields | changes))


def json_message(text: str = HELLO) -> message_pb2.Message:
    """A message in the JSON form."""
    return message_pb2.Message(json=text)


def chat(role: str = "user", *parts: Any, **fields: Any) -> message_pb2.Message:
    """A message in the typed form; string parts become text parts."""
    made = [message_pb2.ContentPart(text=part) if isinstance(part, str) else part for part in parts]
    return message_pb2.Message(chat=message_pb2.ChatMessage(role=role, parts=made, **fields))


def spec(**changes: Any) -> spec_pb2.RolloutSpec:
    """A valid spec. A change to None leaves the field unset."""
    fields: dict[str, Any] = {
        "rollout_id": "r",
        "messages": [json_message()],
        "completions": spec_pb2.Target(url=NOWHERE),
        "tokenizer": spec_pb2.Tokenizer(name="toy"),
    }
    fields |= changes
    return spec_pb2.RolloutSpec(**{name: value for name, value in fields.items() if value is not None})


def start(request_id: str = "", **changes: Any) -> pb.StartRolloutRequest:
    """A start request; changes apply to the spec."""
    return pb.StartRolloutRequest(request_id=request_id, spec=spec(**changes))


def target(url: str = NOWHERE, **fields: Any) -> spec_pb2.Target:
    """A target."""
    return spec_pb2.Target(url=url, **fields)


def metadata(**fields: Any) -> str:
    """Metadata as JSON text."""
    return json.dumps(fields)


def seconds(value: float) -> Duration:
    """A Duration message."""
    whole = int(value // 1)
    return Duration(seconds=whole, nanos=round((value - whole) * 1e9))
