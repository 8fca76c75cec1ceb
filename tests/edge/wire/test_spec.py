"""Targets of a spec: the protocol that a URL has in its field, and that the proto keeps it."""

from __future__ import annotations

import pytest
from osmosis.rollout.v1 import spec_pb2
from rollout_server.core.message import Message
from rollout_server.core.spec import Dialect, Spec, Target
from rollout_server.edge.wire.spec import spec_from_proto, spec_to_proto

USER = Message.parse('{"role": "user", "content": "5 + 3?"}')


def read(proto: spec_pb2.RolloutSpec) -> Spec:
    """The core value of a proto."""
    return spec_from_proto(proto, (USER,), typed=False)


@pytest.mark.parametrize(
    ("url", "dialect"),
    [
        ("grpc://tools:1", Dialect.GRPC),
        ("grpcs://tools:1/", Dialect.GRPC),
        ("http://tools", Dialect.MCP),
        ("HTTPS://tools/mcp/", Dialect.MCP),
    ],
)
def test_tools_are_of_a_tool_service_or_an_mcp_server(url: str, dialect: Dialect) -> None:
    assert read(spec_pb2.RolloutSpec(tools=spec_pb2.Target(url=url))).tools == Target(url.rstrip("/"), dialect)


@pytest.mark.parametrize("dialect", Dialect)
def test_a_stored_dialect_is_read_as_it_was(dialect: Dialect) -> None:
    kept = Spec("r", (USER,), Target("http://trainer", dialect), tools=Target("http://tools", dialect))
    stored = spec_pb2.RolloutSpec.FromString(spec_to_proto(kept, with_messages=False).SerializeToString())
    assert read(stored) == kept


def test_a_spec_that_was_stored_without_tools_has_none() -> None:
    assert read(spec_pb2.RolloutSpec(completions=spec_pb2.Target(url="http://trainer"))).tools is None
