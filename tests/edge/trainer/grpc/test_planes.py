"""Token planes of a trainer are carried into the ledger and the events, or refused by name if they break the contract."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import outcome_pb2, token_pb2
from rollout_client import AsyncClient

from tests.edge.trainer.grpc.test_token_mode import answer, client, roll, toy
from tests.support.grpc_trainer import GrpcTrainer, serving

__all__ = ["answer", "client", "toy"]


def plane(name: str, dtype: str, values: bytes) -> token_pb2.TokenPlane:
    return token_pb2.TokenPlane(name=name, dtype=dtype, values=values)


async def test_planes_and_further_fields_are_kept(client: AsyncClient, answer: list[int]) -> None:
    planes = [plane("routing", "uint8", bytes(2 * len(answer))), plane("entropy", "float32", bytes(4 * len(answer)))]
    extra = '{"cache": {"hit": 18446744073709551616}, "a":  1}'

    def beside(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        response.planes.extend(planes)
        response.extra_json = extra

    async with serving(GrpcTrainer(answer, lies={2: beside})) as trainer:
        outcome = await roll(client, trainer)
        uid = trainer.requests[0].uid
    assert (outcome.failure.message, outcome.stop.reason) == ("", "stop")
    (segment,) = outcome.segments
    spans = {span.turn: span for span in segment.spans if span.author == token_pb2.AUTHOR_MODEL}
    assert [list(span.planes) for _, span in sorted(spans.items())] == [[], planes, [], []]
    assert not any(span.planes for span in segment.spans if span.author == token_pb2.AUTHOR_OTHER)
    told = [event async for event in client.watch(uid, detail="messages") if event.WhichOneof("event") == "answered"]
    assert [event.answered.extra_json for event in told] == ["", extra, "", ""]
    told = [event async for event in client.watch(uid, detail="basic") if event.WhichOneof("event") == "answered"]
    assert [event.answered.extra_json for event in told] == [""] * 4


WRONG: list[tuple[str, Callable[[int], Any]]] = [
    ("planes[0].values: 3 bytes are not a whole number", lambda n: {"planes": [plane("a", "uint8", bytes(3))]}),
    ("planes[0].values: 0 bytes", lambda n: {"planes": [plane("a", "uint8", b"")]}),
    ("are not a whole number of 4-byte elements", lambda n: {"planes": [plane("a", "float32", bytes(2 * n))]}),
    ("planes[0].dtype", lambda n: {"planes": [plane("a", "object", bytes(n))]}),
    ("planes[0].dtype", lambda n: {"planes": [plane("a", "int4", bytes(n))]}),
    ("planes[0].name", lambda n: {"planes": [plane("", "uint8", bytes(n))]}),
    ("planes[1].name", lambda n: {"planes": [plane("a", "uint8", bytes(n))] * 2}),
    ("planes: has 17 entries", lambda n: {"planes": [plane(str(i), "uint8", bytes(n)) for i in range(17)]}),
    ("extra_json: a JSON object is needed", lambda n: {"extra_json": "[]"}),
    ("extra_json: has 65537 characters", lambda n: {"extra_json": json.dumps({"a": "x" * 65_528})}),
]


@pytest.mark.parametrize(("text", "fields"), WRONG)
async def test_what_breaks_the_contract_is_named(
    client: AsyncClient, answer: list[int], text: str, fields: Callable[[int], Any]
) -> None:
    def lie(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        response.MergeFrom(pb.CompleteResponse(**fields(len(answer))))

    async with serving(GrpcTrainer(answer, lies={2: lie})) as trainer:
        outcome = await roll(client, trainer)
    assert (outcome.failure.category, outcome.failure.turn) == (outcome_pb2.FAILURE_CATEGORY_VALIDATION, 2)
    assert text in outcome.failure.message


def test_small_floats_have_a_size(answer: list[int]) -> None:
    """Types of NumPy's extensions."""
    from rollout_server.edge.wire.token_planes import planes_from_proto

    for dtype, size in (("bool", 1), ("bfloat16", 2), ("float8_e4m3fn", 1), ("complex64", 8), ("int64", 8)):
        assert planes_from_proto([plane("a", dtype, bytes(3 * size))], 3)[0].dtype == dtype
        if size > 1:
            with pytest.raises(ValueError, match=f"{size}-byte elements"):
                planes_from_proto([plane("a", dtype, bytes(3))], 3)
