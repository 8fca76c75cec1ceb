"""Segments that are collected from events are those of the outcome, also with forks."""

from __future__ import annotations

import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import AsyncClient
from rollout_server.inspection.so_far import add_outcome_so_far
from rollout_server.testing.script import Script, ScriptedReply
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.trainer.grpc.test_forks import TURNS, as_mode, roll, serving_forks


@pytest.mark.parametrize("mode", ["tokens", "messages"])
@pytest.mark.parametrize("does", list(TURNS))
async def test_segments_of_forks_are_those_of_the_outcome(mode: str, does: str) -> None:
    script = Script(tuple(ScriptedReply(content=f"Answer {n}.") for n in range(TURNS[does])))
    async with StrictTrainer(script=script) as trainer, serving_forks() as address, AsyncClient(address) as client:
        outcome = await roll(client, f"grpc://{trainer.grpc_target}", does, **as_mode(mode))
        [uid] = [rollout.uid async for rollout in client.list()]
        events = [event async for event in client.watch(uid, detail="full")]
        before = pb.Rollout(uid=uid, last_sequence=events[-2].sequence)
        add_outcome_so_far(before, events)
        for segment in outcome.segments:
            segment.ClearField("reward")  # is known only at the end
        assert list(before.outcome.segments) == list(outcome.segments)
        half = pb.Rollout(uid=uid, last_sequence=len(events) // 2)
        add_outcome_so_far(half, events)
    whole = {segment.id: list(segment.spans) for segment in outcome.segments}
    assert half.outcome.segments
    for segment in half.outcome.segments:
        assert list(segment.spans) == whole[segment.id][: len(segment.spans)]
    assert len(half.outcome.segments) <= len(whole)
