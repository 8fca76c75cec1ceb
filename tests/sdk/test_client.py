"""`OsmosisLLMClient` outside of rollouts, with real and faulty trainers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from rollout_server.sdk import (
    CompletionsResult,
    LLMClientProtocol,
    OsmosisLLMClient,
    OsmosisServerError,
    OsmosisTimeoutError,
    OsmosisTransportError,
    OsmosisValidationError,
    RolloutClientSettings,
)
from rollout_server.testing import TrainerDialect
from rollout_server.testing.script import Fault, FaultKind, Script, ScriptedReply
from rollout_server.testing.trainer import StrictTrainer

from tests.sdk.loops import user

QUICK = RolloutClientSettings(retry_base_delay=0.1)


@pytest.fixture
async def trainer() -> AsyncIterator[StrictTrainer]:
    async with StrictTrainer(dialect=TrainerDialect.PLAIN, api_key="key", replays_keys=True) as trainer:
        yield trainer


def failing(status: int) -> Fault:
    return Fault(kind=FaultKind.STATUS, status=status)


async def ask(trainer: StrictTrainer, lines: Sequence[Any] = (), **options: Any) -> CompletionsResult:
    if lines:
        await trainer.put_script("r", Script(tuple(lines)))
    options = {"api_key": "key", "settings": QUICK} | options
    async with OsmosisLLMClient(f"{trainer.url}/", "r", **options) as client:
        return await client.chat_completions([user("Hello")], temperature=0.5, stop="END", unknown="ignored")


async def test_it_asks_and_tells_the_end(trainer: StrictTrainer) -> None:
    async with OsmosisLLMClient(trainer.url, "r", "key") as client:
        assert isinstance(client, LLMClientProtocol)
        messages = [user("Hello")]
        result = await client.chat_completions(messages)
        assert result.content
        assert not result.has_tool_calls
        assert len(result.token_ids) == len(result.logprobs) > 0
        used = client.get_metrics()
        assert (used.num_llm_calls, used.response_tokens) == (1, len(result.token_ids))
        await client.complete_rollout("COMPLETED", [*messages, result.message], reward=1.0)
    verdict = trainer.verdict("r")
    assert verdict is not None
    assert verdict.refusals == ()
    assert (await trainer.completed("r"))["reward"] == 1.0
    assert "key" not in repr(vars(client)["server_url"])


async def test_a_failing_trainer_is_asked_again_under_the_same_key(trainer: StrictTrainer) -> None:
    result = await ask(trainer, [failing(503), failing(500), ScriptedReply(content="Hello.")])
    assert result.content == "Hello."
    assert len({seen.headers["idempotency-key"] for seen in trainer.requests}) == 1
    assert len(trainer.requests) == 3
    assert trainer.requests[0].body["stop"] == ["END"]
    assert "unknown" not in trainer.requests[0].body


async def test_retries_end(trainer: StrictTrainer) -> None:
    with pytest.raises(OsmosisServerError) as failed:
        await ask(trainer, [failing(500)] * 9, max_retries=1)
    assert failed.value.status_code == 500
    assert len(trainer.requests) == 2


async def test_a_refusal_is_not_repeated(trainer: StrictTrainer) -> None:
    with pytest.raises(OsmosisValidationError) as failed:
        await ask(trainer, api_key="another")
    assert failed.value.status_code == 401
    assert len(trainer.requests) == 1


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (Fault(kind=FaultKind.EMPTY_CHOICES), OsmosisValidationError),
        (Fault(kind=FaultKind.STATUS, status=200, body="<html>"), OsmosisValidationError),
        (Fault(kind=FaultKind.CLOSED), OsmosisTransportError),
    ],
)
async def test_broken_answers_have_names(trainer: StrictTrainer, line: Fault, error: type[Exception]) -> None:
    with pytest.raises(error):
        await ask(trainer, [line], max_retries=0)


async def test_a_silent_trainer_is_a_timeout(trainer: StrictTrainer) -> None:
    with pytest.raises(OsmosisTimeoutError):
        await ask(trainer, [Fault(kind=FaultKind.SILENCE)], max_retries=0, timeout_seconds=0.2)


async def test_nobody_at_the_address_is_a_transport_error() -> None:
    async with OsmosisLLMClient("http://127.0.0.1:1", "r", max_retries=0) as client:
        with pytest.raises(OsmosisTransportError):
            await client.chat_completions([user("Hello")])


async def test_what_is_not_json_is_not_sent(trainer: StrictTrainer) -> None:
    async with OsmosisLLMClient(trainer.url, "r", settings=QUICK) as client:
        with pytest.raises(OsmosisValidationError) as failed:
            await client.chat_completions([{"role": "user", "content": object()}])
    assert failed.value.status_code == 400
    assert trainer.requests == ()
