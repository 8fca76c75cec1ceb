"""The same fifty turns with the strict trainer as a client: over a stream its scripts give the same verdicts.

`test_fifty_turns_in_tokens` covers the trainer library over a stream.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from osmosis.rollout.v1 import message_pb2, spec_pb2
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest
from rollout_client import samples

from tests.exact.families import EVERYTHING, Family
from tests.exact.test_fifty_turns_in_tokens import PLAYED, world
from tests.support.talking_agent import equal


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "family", PLAYED if EVERYTHING else PLAYED[:1]
)  # judging takes seconds, and the HTTP test does the same
async def test_token_mode_over_a_stream(family: Family, tmp_path: Path) -> None:
    async with world(family, tmp_path) as at:
        if not at.conversation.exchanges or not at.rendered:
            pytest.skip("the template refuses every exchange, or writes nothing of what tools answer")
        await at.trainer.put_script("streamed", at.conversation.script)
        spec = spec_pb2.RolloutSpec(
            rollout_id="streamed",
            messages=[message_pb2.Message(json=json.dumps(message)) for message in at.conversation.asked],
            token_mode=spec_pb2.TOKEN_MODE_TOKENS,
            tokenizer=spec_pb2.Tokenizer(name="model"),
            limits=spec_pb2.Limits(turns=100),
            metadata_json=json.dumps(at.conversation.metadata),
        )
        async with at.trainer.connected(at.address) as stream:
            (uid,) = await stream.start(StartRolloutRequest(spec=spec))
            outcome = (await stream.outcome(uid)).outcome
        verdict = at.trainer.verdict("streamed")
        assert verdict is not None
        assert (outcome.failure.message, verdict.refusals, stream.faults) == ("", (), ())
        assert len(verdict.turns) == len(at.conversation.exchanges)
        (sample,) = samples(outcome)
        assert equal(sample, verdict.sample)
