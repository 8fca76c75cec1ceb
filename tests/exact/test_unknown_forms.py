"""Trainers whose way of rendering is unknown when their first mask is due."""

from __future__ import annotations

import json
from pathlib import Path

from rollout_server.testing.checks.verdict import RefusalReason
from rollout_server.testing.script import ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.exact.conversations import Conversation, Exchange
from tests.exact.families import Family
from tests.exact.test_fifty_turns import play, world

COMPACT = json.dumps({"r": 0, "values": list(range(100))}, separators=(",", ":"))


def conversation(arguments: str) -> Conversation:
    calls = [tool_call(f"call0000{number}", "look", arguments) for number in range(3)]
    exchanges = [Exchange(ScriptedReply(content=None, tool_calls=(call,))) for call in calls]
    return Conversation([{"role": "user", "content": "Look."}], [*exchanges, Exchange(ScriptedReply(content="Seen."))])


async def test_only_the_other_form_of_arguments_gives_a_mask(tmp_path: Path) -> None:
    """Counted with the arguments as received, no tokens are left for a mask.

    Rendered as objects, with added spaces, the calls are longer and the count is positive.
    """
    async with world(Family(TOY_TOKENIZER), tmp_path) as at:
        for number in range(2):
            rollout_id = f"compact {number}"
            assert await play(at, rollout_id, conversation(COMPACT), parse=True) == 4
            verdict = at.trainers[True].verdict(rollout_id)
            assert verdict is not None
            assert verdict.accepted


async def test_another_form_is_tried_once(tmp_path: Path) -> None:
    """What one refused mask teaches applies to later rollouts."""
    spaced = '{"r":0,"text":"abc","more":[1,2]}'
    async with world(Family(TOY_TOKENIZER), tmp_path) as at:
        refused = []
        for number in range(2):
            assert await play(at, f"some {number}", conversation(spaced), parse=True) == 4
            verdict = at.trainers[True].verdict(f"some {number}")
            assert verdict is not None
            refused.append([refusal.reason for refusal in verdict.refusals])
    assert refused == [[RefusalReason.MASK], []]
