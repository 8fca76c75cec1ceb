"""Each scenario, run against a real trainer by a correct caller."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_server.testing.script import FaultKind, ScriptedReply
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.tokenizer.build import build
from rollout_server.testing.trainer import StrictTrainer

from tests.support.trainer_scenarios import CALLBACK_KEY, SCENARIOS

from .conftest import TOOLS

HEALTHY = sorted(
    name
    for name, scenario in SCENARIOS.items()
    if not scenario.other_tokenizer
    and len(scenario.script.lines) < 10
    and all(isinstance(line, ScriptedReply) and not line.omit and not line.surplus for line in scenario.script.lines)
)
FAULTY = {
    name: line
    for name, scenario in SCENARIOS.items()
    for line in scenario.script.lines[-2:]
    if not isinstance(line, ScriptedReply)
}
ENDLESS = ("max_turns", "max_tokens_total")
BYTES_ONLY = 256


@pytest.fixture(scope="session")
def other_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bytes")
    build(directory, trained_tokens=BYTES_ONLY)
    return directory


def trainer_for(name: str, directory: Path = TOY_TOKENIZER) -> StrictTrainer:
    scenario = SCENARIOS[name]
    return StrictTrainer(
        directory,
        scripts={"r": scenario.script},
        tools=TOOLS,
        render_tools=scenario.render_tools,
        api_key=scenario.api_key,
    )


@pytest.mark.parametrize("name", [name for name in HEALTHY if "wrong" not in name or name == "wrong_arguments"])
async def test_healthy_scenarios_are_played_to_their_end(name: str, caller) -> None:
    scenario = SCENARIOS[name]
    async with trainer_for(name) as trainer:
        asking = caller(trainer, tools=TOOLS if scenario.render_tools else None)
        asking.client.headers["authorization"] = f"Bearer {CALLBACK_KEY}"
        await asking.play()
        if name == "same_id_again":
            asking = caller(trainer, tools=TOOLS)
            await asking.play()
        verdict = trainer.verdict("r")
    said = [line.message for line in scenario.script.lines if isinstance(line, ScriptedReply)]
    assert [answer["choices"][0]["message"] for answer in asking.answers] == said[-len(asking.answers) :]
    assert sum(len(each.turns) for each in (*verdict.earlier, verdict)) == len(said)
    assert verdict.accepted
    assert all(turn.drift is None for turn in verdict.turns)


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_model_that_never_stops_says_as_much_as_a_rollout_may_take(name: str, caller) -> None:
    async with trainer_for(name) as trainer:
        asking = caller(trainer, tools=TOOLS)
        await asking.play(turns=5)
        assert len(trainer.verdict("r").turns) == 5
    ids = [call["id"] for message in asking.messages for call in message.get("tool_calls") or []]
    assert len(set(ids)) == 5
    assert len(SCENARIOS[name].script.lines) == 100


@pytest.mark.parametrize("name", sorted(FAULTY))
async def test_faulty_scenarios_fail_where_they_say(name: str, caller) -> None:
    async with trainer_for(name) as trainer:
        asking = caller(trainer, tools=TOOLS)
        asking.client.timeout = 0.5
        for _ in range(
            next(i for i, line in enumerate(SCENARIOS[name].script.lines) if not isinstance(line, ScriptedReply))
        ):
            await asking.turn()
        fault = FAULTY[name]
        if fault.kind in (FaultKind.RESET, FaultKind.SILENCE, FaultKind.TRUNCATED):
            with pytest.raises(httpx.TransportError):
                await asking.post()
        else:
            assert (await asking.post()).status_code == fault.status
        verdict = trainer.verdict("r")
    assert len(verdict.faults) == 1
    assert verdict.refusals == ()


async def test_a_wrong_key_gets_nowhere(caller) -> None:
    async with trainer_for("callback_api_key_wrong") as trainer:
        assert (await caller(trainer, tools=TOOLS).post()).status_code == 401


@pytest.mark.parametrize("name", ["mask_nothing_new", "mask_token_ids_surplus"])
async def test_surplus_ids_shorten_the_mask(name: str, caller) -> None:
    async with trainer_for(name) as trainer:
        asking = caller(trainer, tools=TOOLS)
        await asking.turn()
        mask = asking.mask()
        await asking.play()
        verdict = trainer.verdict("r")
    assert verdict.accepted
    assert verdict.turns[1].new_tokens == len(mask or [])
    # Surplus tokens that equal the next ones are not drift.
    assert (verdict.turns[1].drift is None) == (name == "mask_nothing_new") == (mask is None)


@pytest.mark.parametrize("name", ["trainer_missing_token_ids", "trainer_missing_token_ids_second_turn"])
async def test_token_ids_are_missing_where_the_scenario_says(name: str, caller) -> None:
    async with trainer_for(name) as trainer:
        asking = caller(trainer, tools=TOOLS)
        for _ in SCENARIOS[name].script.lines[:-1]:
            await asking.turn()
        answer = (await asking.post()).json()
    assert "token_ids" not in answer
    assert answer["logprobs"]


async def test_another_tokenizer_refuses_the_mask_of_this_one(caller, other_tokenizer: Path) -> None:
    async with trainer_for("trainer_422_other_tokenizer", other_tokenizer) as trainer:
        asking: Any = caller(trainer, tools=TOOLS)
        first = await asking.turn()
        response = await asking.post()
    assert len(first["prompt_token_ids"]) > asking._last
    assert response.status_code == 422
    assert f"response_mask has length {len(asking.mask())}" in response.json()["detail"]


async def test_another_tokenizer_can_count_more_than_there_is(caller, other_tokenizer: Path) -> None:
    async with trainer_for("trainer_other_tokenizer_negative", other_tokenizer) as trainer:
        asking: Any = caller(trainer, tools=TOOLS)
        first = await asking.turn()
    assert asking.rendered() - first["prompt_token_ids"].__len__() < 0
    # A server with this tokenizer counts a negative number of new tokens.
    asking.messages, known = asking.messages[:2], asking.messages
    before = asking.rendered()
    asking.messages = known
    assert asking.rendered() - before - len(first["token_ids"]) < 0
