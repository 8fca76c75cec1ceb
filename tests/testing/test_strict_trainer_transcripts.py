"""The judge with the recorded references: equal ids and verdicts, call for call."""

import json
from typing import Any

import httpx
import pytest
from rollout_server.testing.script import Fault, FaultKind, Line, Script, ScriptedReply
from rollout_server.testing.trainer import StrictTrainer

from tests.support.golden import CONFORMANCE
from tests.support.trainer_scenarios import SCENARIOS

from .recordings import recorded, to_trainer, tools

IDS = ("token_ids", "logprobs", "prompt_token_ids")
RECORDED = recorded()
# The recorded trainer used another vocabulary, or returned ids that no text renders to.
OTHER_VOCABULARY = {"trainer_422_other_tokenizer", "trainer_other_tokenizer_negative"}
# Faults of the recorded server, which a strict trainer refuses: it drops unknown keys of the completion.
REFUSED = {"tool_call_extra_keys": "messages[2] is not the completion of the last turn"}


def line_of(exchange: dict[str, Any]) -> Line:
    """The scripted line for a recorded completion."""
    answer, status = exchange["response"], exchange["status"]
    if status is None:
        if answer is not None:
            return Fault.truncated(answer if isinstance(answer, str) else json.dumps(answer))
        return Fault(kind=FaultKind.RESET if "reset" in exchange["outcome"] else FaultKind.SILENCE)
    if isinstance(answer, str):
        return Fault.raw(answer, (exchange.get("response_headers") or {}).get("content-type", "application/json"))
    if status != 200:
        return Fault.error(status, answer["detail"], exchange.get("response_headers"))
    if not answer["choices"]:
        return Fault(kind=FaultKind.EMPTY_CHOICES)
    return reply_of(answer) or Fault(kind=FaultKind.NULL_MESSAGE)


def reply_of(answer: dict[str, Any]) -> ScriptedReply | None:
    choice = answer["choices"][0]
    if choice["message"] is None:
        return None
    message = {key: value for key, value in choice["message"].items() if key != "role"}
    return ScriptedReply(
        content=message.pop("content", None),
        tool_calls=tuple(message.pop("tool_calls", None) or ()),
        reasoning=message.pop("reasoning_content", None),
        extra=message,
        finish_reason=choice["finish_reason"],
        omit=frozenset(name for name in IDS if name not in answer),
    )


def with_surplus(line: Line, exchange: dict[str, Any], truthful: int) -> Line:
    """The line with the recorded ids that exceed the rendering of the text."""
    if not isinstance(line, ScriptedReply):
        return line
    surplus = tuple(exchange["response"].get("token_ids") or ())[truthful:]
    return ScriptedReply(**{name: getattr(line, name) for name in line.__slots__} | {"surplus": surplus})


async def ask(client: httpx.AsyncClient, exchange: dict[str, Any]) -> httpx.Response | None:
    try:
        return await client.post("/v1/chat/completions", json=exchange["request"], timeout=5)
    except httpx.TransportError:
        return None


@pytest.mark.parametrize("name", sorted(set(RECORDED) - OTHER_VOCABULARY))
async def test_recorded_calls_are_answered_with_the_recorded_ids(name: str, client) -> None:
    exchanges = to_trainer(RECORDED[name])
    exchanges = [exchange for exchange in exchanges if "gave up" not in (exchange.get("outcome") or "")]
    truthful = {"mask_negative": 30, "mask_nothing_new": 30, "mask_token_ids_surplus": 30}.get(name, 10_000)
    lines = tuple(with_surplus(line_of(exchange), exchange, truthful) for exchange in exchanges)
    scripts = {exchange["request"]["rollout_id"]: Script(lines) for exchange in exchanges}
    told = {"tools": tools(), "render_tools": name != "trainer_renders_without_tools"}
    async with StrictTrainer(CONFORMANCE, scripts=scripts, **told) as trainer:
        for exchange in exchanges:
            response = await ask(client(trainer), exchange)
            if name in REFUSED and exchange["request"].get("response_mask"):
                assert response is not None
                assert REFUSED[name] in response.json()["detail"]
                continue
            assert (response.status_code if response else None) == exchange["status"]
            if isinstance(exchange["response"], dict) and response:
                compare(response.json(), exchange["response"])
        refusals = [refusal for verdict in trainer.verdicts() for refusal in verdict.refusals]
    assert bool(refusals) == (name in REFUSED)


def compare(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Assert that two completions are equal except for the time and the values of logprobs."""
    if not (wanted.get("choices") and wanted["choices"][0]["message"]):
        assert got.get("choices") == wanted.get("choices")
        assert got.get("prompt_token_ids") == wanted.get("prompt_token_ids")
        return
    assert {**got, "created": 0, "logprobs": 0} == {**wanted, "created": 0, "logprobs": 0}
    assert len(got["logprobs"]) == len(wanted["logprobs"])


def test_every_recorded_situation_has_a_scenario() -> None:
    assert set(RECORDED) == set(SCENARIOS)


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_scenarios_have_the_structure_of_the_recordings(name: str) -> None:
    if name in OTHER_VOCABULARY:
        assert SCENARIOS[name].other_tokenizer
        return
    wanted = [structure(line_of(exchange)) for exchange in to_trainer(RECORDED[name])]
    lines = SCENARIOS[name].script.lines
    if SCENARIOS[name].api_key and "wrong" in name:
        return
    assert [structure(line) for line in lines][: len(wanted)] == wanted


def structure(line: Line) -> Any:
    """The parts that the server can distinguish: kinds, statuses, names and arguments of calls, omitted fields."""
    if isinstance(line, Fault):
        return line.kind, line.status, line.headers.get("retry-after"), line.headers.get("content-type")
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in line.tool_calls]
    return calls, line.finish, line.omit, set(line.message), line.extra
