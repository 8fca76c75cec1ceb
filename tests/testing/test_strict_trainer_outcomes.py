"""Delivery of outcomes to the strict trainer: format, consistency, responses, and retries until it is settled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from rollout_server.testing.checks.verdict import RefusalReason, Verdict
from rollout_server.testing.model.script_json import script_from_json
from rollout_server.testing.script import Extensions, Fault, FaultKind, Reception, Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from .conftest import KeyedCaller

Make = Callable[..., Any]
CLOSED = Fault(kind=FaultKind.CLOSED)


def plain(**options: Any) -> StrictTrainer:
    return StrictTrainer(dialect="plain", **options)


def received(*faults: Fault, repeat_last: bool = False) -> dict[str, Any]:
    return {"script": Script(then_model=True, reception=Reception(faults, repeat_last))}


def check_refused(trainer: StrictTrainer, response: httpx.Response, text: str) -> None:
    assert response.status_code == 422
    refusal = trainer.verdict("r").refusals[-1]
    assert (refusal.turn, refusal.reason, refusal.text) == (0, RefusalReason.OUTCOME, response.json()["detail"])
    assert text in refusal.text
    assert not trainer.verdict("r").concluded


async def test_a_right_outcome_is_acknowledged_and_told(keyed: Make) -> None:
    told: list[Verdict] = []
    async with plain(settled=told.append) as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        waiting = asyncio.create_task(trainer.completed("r"))
        response = await asking.deliver()
        assert response.json() == {"status": "ok"}
        assert await waiting == asking.outcome()
        (delivery,) = await trainer.delivered("r")
        verdict = trainer.verdict("r")
        assert told == [verdict]
        assert trainer.outcome("r") == verdict.outcome
    assert verdict.concluded
    assert (verdict.outcome.deliveries, verdict.outcome.answered, verdict.outcome.key) == (1, 200, "outcome")
    assert (delivery.met, delivery.key, json.loads(delivery.raw)) == ("200", "outcome", delivery.body)


async def test_an_error_without_a_turn_is_an_outcome_too(keyed: Make) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        assert (await asking.deliver(asking.failure())).status_code == 200
        assert trainer.verdict("r").concluded
        assert not trainer.verdict("r").accepted


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"status": "DONE"}, "status has to be one of"),
        ({"status": None}, "status is missing"),
        ({"final_messages": ["hi"]}, "final_messages has to be a list of objects"),
        ({"final_messages": None}, "final_messages is missing"),
        ({"finish_reason": ""}, "finish_reason has to be"),
        ({"error_message": "oh"}, "error_message came with status COMPLETED"),
        ({"status": "ERROR"}, "error_message has to describe"),
        ({"status": "ERROR", "error_message": " "}, "error_message has to describe"),
        ({"status": "ERROR", "error_message": "oh"}, "finish_reason of an ERROR"),
        ({"reward": "1.0"}, "reward has to be a number"),
        ({"reward": True}, "reward has to be a number"),
        ({"metrics": {}}, "metrics has to be"),
        ({"extra_fields": []}, "extra_fields has to be"),
        ({"warnings": []}, "unknown fields ['warnings']"),
    ],
)
async def test_what_is_no_outcome_is_refused(keyed: Make, change: dict[str, Any], text: str) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        check_refused(trainer, await asking.deliver(asking.outcome(**change)), text)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("num_llm_calls", 2, "num_llm_calls is 2, this trainer answered 3 turns"),
        ("prompt_tokens", 1, "prompt_tokens is 1, this trainer reported"),
        ("response_tokens", 0, "response_tokens is 0"),
        ("max_context_tokens", 0, "max_context_tokens is 0"),
        ("num_tool_calls", -1, "metrics has to be"),
        ("num_tool_calls", True, "metrics has to be"),
        ("tool_latency_ms", -0.5, "metrics has to be"),
        ("tool_latency_ms", None, "metrics has to be"),
    ],
)
async def test_the_metrics_are_what_the_trainer_counted(keyed: Make, name: str, value: Any, text: str) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        metrics = asking.outcome()["metrics"] | {name: value}
        check_refused(trainer, await asking.deliver(asking.outcome(metrics=metrics)), text)


async def test_counts_are_those_of_usage_where_there_are_no_ids_and_free_where_there_is_neither(keyed: Make) -> None:
    silent = frozenset({"token_ids", "prompt_token_ids", "logprobs"})
    scripts = {
        "usage": Script(then_model=True, extensions=Extensions(omit=silent, usage=True)),
        "nothing": Script(then_model=True, extensions=Extensions(omit=silent)),
    }
    async with plain(scripts=scripts) as trainer:
        usage, nothing = keyed(trainer, rollout_id="usage"), keyed(trainer, rollout_id="nothing")
        await usage.play()
        await nothing.play()
        wrong = usage.outcome()["metrics"] | {"response_tokens": 0}
        assert (await nothing.deliver(key="o1")).status_code == 200
        assert (await usage.deliver(usage.outcome(metrics=wrong), key="o2")).status_code == 422
        assert usage.outcome()["metrics"]["response_tokens"] > 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m[:-1], "final_messages[6] is missing"),
        (lambda m: [*m[:1], *m[2:]], "final_messages[1] is not the message that this trainer received or sent"),
        (lambda m: [*m[:-1], {**m[-1], "x": None}], "final_messages[6] is not"),
        (lambda m: [], "final_messages[0] is missing"),
    ],
)
async def test_final_messages_begin_with_what_the_trainer_saw(keyed: Make, change: Any, text: str) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        check_refused(trainer, await asking.deliver(asking.outcome(final_messages=change(asking.messages))), text)


async def test_final_messages_may_go_on(keyed: Make) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        more = [*asking.messages, {"role": "user", "content": "Thanks."}]
        assert (await asking.deliver(asking.outcome(final_messages=more))).status_code == 200


async def test_a_failure_may_lack_the_turn_whose_answer_did_not_arrive(keyed: Make) -> None:
    lines = (
        ScriptedReply(content="Adding.", tool_calls=(tool_call("c", "add", {"a": 1, "b": 1}),)),
        Fault(kind=FaultKind.LOST),
    )
    async with plain(scripts={"r": Script((*lines, ScriptedReply(content="2")))}) as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.turn()
        with pytest.raises(httpx.RemoteProtocolError):
            await asking.post()
        seen = [*asking.messages]
        body = asking.failure(final_messages=seen)
        assert (await asking.deliver(body)).status_code == 200
        assert trainer.verdict("r").concluded
        assert body["metrics"]["num_llm_calls"] == 1 == len(trainer.verdict("r").turns) - 1


async def test_a_failure_cannot_make_turns_up_or_rewrite_them(keyed: Make) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        check_refused(trainer, await asking.deliver(asking.failure(final_messages=asking.messages[1:])), "[0] is not")
    async with plain() as trainer:
        asking = keyed(trainer)
        more = asking.failure()["metrics"] | {"num_llm_calls": 1}
        check_refused(trainer, await asking.deliver(asking.failure(metrics=more)), "num_llm_calls is 1")


@pytest.mark.parametrize(("key", "text"), [("", "Idempotency-Key is missing"), ("r/0/2", "that of a turn")])
async def test_an_outcome_has_a_key_of_its_own(keyed: Make, key: str, text: str) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        check_refused(trainer, await asking.deliver(key=key), text)


@pytest.mark.parametrize("lines", [1, 2, 3])
async def test_statuses_come_as_often_as_the_script_says(keyed: Make, lines: int) -> None:
    async with plain(**received(*[Fault.error(500, "busy")] * lines)) as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        assert [(await asking.deliver()).status_code for _ in range(lines + 1)] == [500] * lines + [200]
        verdict = trainer.verdict("r")
    assert verdict.concluded
    assert verdict.outcome.deliveries == lines + 1


@pytest.mark.parametrize("status", [200, 201, 204, 299])
async def test_any_2xx_settles(keyed: Make, status: int) -> None:
    async with plain(**received(Fault(kind=FaultKind.STATUS, status=status))) as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        assert (await asking.deliver()).status_code == status
        assert trainer.verdict("r").concluded
        check_refused(trainer, await asking.deliver(), f"status {status}, which is final, but it was sent again")


@pytest.mark.parametrize(
    ("status", "final"), [(400, True), (404, True), (409, True), (408, False), (425, False), (429, False)]
)
async def test_which_4xx_are_final(keyed: Make, status: int, final: bool) -> None:
    told: list[Verdict] = []
    async with plain(**received(Fault.error(status, "no"), repeat_last=True), settled=told.append) as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        assert [(await asking.deliver()).status_code for _ in range(2)] == [status, 422 if final else status]
        assert bool(trainer.verdict("r").refusals) == final == (len(told) == 1)
        assert trainer.outcome("r").answered == (status if final else None)
        assert not trainer.verdict("r").concluded


@pytest.mark.parametrize("kind", [FaultKind.CLOSED, FaultKind.RESET, FaultKind.LOST, FaultKind.TRUNCATED])
async def test_an_acknowledgement_that_got_lost_settles_nothing(keyed: Make, kind: FaultKind) -> None:
    async with plain(**received(Fault(kind=kind, body='{"sta'))) as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        with pytest.raises(httpx.TransportError):
            await asking.deliver()
        assert trainer.outcome("r").answered is None
        assert (await asking.deliver()).status_code == 200
        assert trainer.verdict("r").concluded
        assert [delivery.met for delivery in trainer.deliveries("r")] == [kind, "200"]


async def test_silence_and_answers_that_come_too_late_settle_nothing(keyed: Make) -> None:
    late = Fault(kind=FaultKind.STATUS, status=200, delay=60)
    async with plain(**received(Fault(kind=FaultKind.SILENCE), late)) as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        asking.client.timeout = httpx.Timeout(0.3)
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                await asking.deliver()
        asking.client.timeout = httpx.Timeout(60)
        assert trainer.outcome("r").answered is None
        assert (await asking.deliver()).status_code == 200
        assert trainer.verdict("r").concluded


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"body": {"finish_reason": "length"}}, "the body differs from the one delivered before"),
        ({"key": "another"}, "the Idempotency-Key is 'another', but was 'outcome' before"),
    ],
)
async def test_a_rollout_has_one_outcome(keyed: Make, second: dict[str, Any], text: str) -> None:
    async with plain(**received(Fault.error(503, "busy"))) as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        await asking.deliver()
        body = asking.outcome(**second.get("body", {}))
        check_refused(trainer, await asking.deliver(body, key=second.get("key", "outcome")), text)


async def test_no_completion_is_asked_for_after_the_outcome(keyed: Make) -> None:
    async with plain(**received(Fault.error(503, "busy"))) as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.turn()
        await asking.deliver()
        response = await asking.post()
        assert response.status_code == 422
        assert trainer.verdict("r").refusals[-1].reason is RefusalReason.OVER


@pytest.mark.parametrize("reuses_ids", [False, True])
async def test_an_id_begins_anew_only_where_that_is_allowed(keyed: Make, reuses_ids: bool) -> None:
    async with plain(reuses_ids=reuses_ids) as trainer:
        first: KeyedCaller = keyed(trainer)
        await first.play()
        await first.deliver()
        assert (await first.post()).status_code == 422
        again = await keyed(trainer).post(key="anew/0/1")
        assert again.status_code == (200 if reuses_ids else 422)
        verdict = trainer.verdict("r")
    assert [len(earlier.turns) for earlier in verdict.earlier] == ([3] if reuses_ids else [])


async def test_the_key_is_demanded_of_outcomes_too(keyed: Make) -> None:
    async with plain(api_key="secret") as trainer:
        asking: KeyedCaller = keyed(trainer)
        bearer = {"authorization": "Bearer secret"}
        asking.take(await asking.post(headers=bearer))
        assert (await asking.deliver()).status_code == 401
        assert trainer.outcome("r") is None
        assert (await asking.deliver(authorization="Bearer secret")).status_code == 200
        assert [delivery.met for delivery in trainer.deliveries("r")] == ["401", "200"]
        assert trainer.verdict("r").concluded


async def test_a_key_that_is_not_ascii_may_come_in_utf_8(keyed: Make) -> None:
    async with plain(api_key="schlüssel") as trainer:
        asking: KeyedCaller = keyed(trainer)
        asking.take(await asking.post(headers={"authorization": "Bearer schlüssel".encode()}))
        assert (await asking.post(headers={"authorization": b"Bearer schl?ssel"})).status_code == 401


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"rollout_id": " "}'])
async def test_bodies_that_name_no_rollout(keyed: Make, content: str) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        response = await asking.client.post("/v1/rollout/completed", content=content)
        assert response.status_code == 422
        assert trainer.verdicts() == ()


async def test_while_it_is_down_nobody_listens_and_afterwards_everything_goes_on(keyed: Make) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.turn()
        url = trainer.url
        async with trainer.down():
            with pytest.raises(httpx.ConnectError):
                await asking.post()
        assert trainer.url == url
        await asking.play()
        assert (await asking.deliver()).status_code == 200
        assert trainer.verdict("r").concluded


async def test_another_program_says_how_an_outcome_is_met(keyed: Make) -> None:
    script = {
        "then_model": True,
        "extensions": {"omit": ["logprobs"], "usage": True, "turns": [1]},
        "reception": {
            "faults": [{"kind": "closed"}, {"kind": "status", "status": 429, "headers": {"retry-after": "1"}}]
        },
    }
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.turn()
        put = await asking.client.put("/script", params={"rollout_id": "r"}, json=script)
        assert put.json() == {"rollout_id": "r", "lines": 0}
        asking = keyed(trainer, rollout_id="r", messages=[{"role": "user", "content": "Add 2 and 3."}])
        asking.take(await asking.post(key="anew/0/1"))
        asking.take(await asking.post(key="anew/0/2"))
        assert [("usage" in answer, "logprobs" in answer) for answer in asking.answers] == [
            (True, False),
            (False, True),
        ]
        with pytest.raises(httpx.RemoteProtocolError):
            await asking.deliver()
        assert (await asking.deliver()).headers["retry-after"] == "1"
        assert (await asking.deliver()).status_code == 200
        shown = (await asking.client.get("/verdict", params={"rollout_id": "r"})).json()
        (summary,) = (await asking.client.get("/verdicts")).json()["verdicts"]
    assert shown["concluded"] is True
    assert shown["outcome"]["body"] == asking.outcome()
    assert summary["outcome"]["deliveries"] == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"then_model": 1}, "then_model has to be true or false"),
        ({"then_model": True, "repeat_last": True}, "exclude each other"),
        ({"then_model": True, "reception": []}, 'reception has to be an object with a list "faults"'),
        ({"then_model": True, "reception": {"fault": []}}, "unknown keys in reception: ['fault']"),
        ({"then_model": True, "reception": {"faults": [{"kind": "null_message"}]}}, "does not apply to the delivery"),
        ({"then_model": True, "reception": {"faults": [5]}}, "reception.faults[0] is not an object"),
        ({"then_model": True, "reception": {"repeat_last": True}}, "needs at least one fault"),
        ({"then_model": True, "extensions": {"omit": ["choices"]}}, "extensions: omit names ['choices']"),
        ({"then_model": True, "extensions": {"when": 1}}, "unknown keys in extensions: ['when']"),
    ],
)
def test_what_is_no_treatment_of_a_rollout(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("[", r"\[")):
        script_from_json(value)
