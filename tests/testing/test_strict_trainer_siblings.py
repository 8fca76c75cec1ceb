"""The strict trainer over gRPC without replayed keys: a retried turn is generated again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from osmosis.rollout.v1 import completion_service_pb2_grpc
from rollout_server.testing.script import Fault, FaultKind, Script, ScriptedReply
from rollout_server.testing.trainer import StrictTrainer

from .test_strict_trainer_completions import status_of
from .test_strict_trainer_tokens import ADD, asking
from .tokens import TokenCaller

__all__ = ["asking"]

Asking = Callable[..., TokenCaller]
SCRIPT = Script(
    (
        ScriptedReply(tool_calls=(ADD,)),
        ScriptedReply(content="Let me see.", tool_calls=(ADD,)),
        ScriptedReply(content="8"),
    )
)


def script_of(trainer: StrictTrainer) -> Any:
    verdict = trainer.verdict("r")
    assert verdict is not None
    return verdict


async def test_a_turn_asked_for_again_is_another_answer(asking: Asking) -> None:
    async with StrictTrainer(scripts={"r": SCRIPT}, replays_keys=False) as trainer:
        playing = asking(trainer)
        request = playing.request()
        first = await playing.stub.Complete(request)
        second = await playing.complete(request)
        assert "Let me see." in second.message.json
        assert "Let me see." not in first.message.json
        assert second.after != first.after
        last = await playing.complete()
        verdict = script_of(trainer)
    assert verdict.accepted
    assert (len(verdict.turns), verdict.siblings, verdict.replays) == (2, 1, 0)
    assert list(verdict.sample.response_ids)[-len(last.token_ids) :] == list(last.token_ids)
    held = [*verdict.sample.prompt_ids, *verdict.sample.response_ids]
    assert held == playing.ids


async def test_only_the_last_turn_can_be_asked_for_again(asking: Asking) -> None:
    async with StrictTrainer(scripts={"r": SCRIPT}, replays_keys=False) as trainer:
        playing = asking(trainer)
        request = playing.request()
        await playing.complete(request)
        await playing.complete()
        code, _, text, _ = await status_of(playing.stub.Complete(request))
        assert code is not grpc.StatusCode.OK
        assert text
        await playing.complete()
        assert len(script_of(trainer).turns) == 3


async def test_a_failed_second_attempt_leaves_a_third(asking: Asking) -> None:
    lines = (
        ScriptedReply(tool_calls=(ADD,)),
        Fault(kind=FaultKind.RESET),
        ScriptedReply(content="Three.", tool_calls=(ADD,)),
    )
    async with StrictTrainer(
        scripts={"r": Script((*lines, ScriptedReply(content="8")))}, replays_keys=False
    ) as trainer:
        playing = asking(trainer)
        request = playing.request()
        await playing.stub.Complete(request)
        code, reason, _, _ = await status_of(playing.stub.Complete(request))
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "RESET")
        third = await playing.complete(request)
        assert "Three." in third.message.json
        await playing.complete()
        verdict = script_of(trainer)
    assert (verdict.accepted, len(verdict.turns), verdict.siblings) == (True, 2, 1)


@pytest.mark.parametrize("replays", [None, True])
async def test_keys_are_replayed_unless_they_are_not_to_be(asking: Asking, replays: bool | None) -> None:
    async with StrictTrainer(scripts={"r": SCRIPT}, replays_keys=replays) as trainer:
        playing = asking(trainer)
        request = playing.request()
        first = await playing.stub.Complete(request)
        assert await playing.stub.Complete(request) == first
        assert script_of(trainer).siblings == 0


@pytest.fixture
async def messaging() -> AsyncIterator[Callable[[StrictTrainer], Any]]:
    """The stub of a trainer."""
    channels: list[grpc.aio.Channel] = []

    def make(trainer: StrictTrainer) -> Any:
        channels.append(grpc.aio.insecure_channel(trainer.grpc_target))
        return completion_service_pb2_grpc.CompletionServiceStub(channels[-1])

    yield make
    for channel in channels:
        await channel.close()


async def test_in_message_mode_too(asking: Asking, messaging: Callable[[StrictTrainer], Any]) -> None:
    async with StrictTrainer(scripts={"r": SCRIPT}, replays_keys=False) as trainer:
        stub, playing = messaging(trainer), asking(trainer)
        request = playing.request(new_tokens=None)
        first: Any = await stub.Complete(request)
        second: Any = await stub.Complete(request)
        assert isinstance(second, Message)
        assert list(second.prompt_ids.values) == list(first.prompt_ids.values)
        assert "Let me see." in second.message.json
        verdict = script_of(trainer)
    assert (len(verdict.turns), verdict.siblings, verdict.accepted) == (1, 1, True)
    assert list(verdict.sample.response_ids) == list(second.token_ids)
