"""Completions of the asynchronous HTTP API: append-only without masks, one key per turn, retries and replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from rollout_server.testing.checks.verdict import RefusalReason
from rollout_server.testing.script import Extensions, Fault, FaultKind, Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from .conftest import KeyedCaller

Make = Callable[..., Any]
ADD = tool_call("call_1", "add", {"a": 5, "b": 3})
LOST = Fault(kind=FaultKind.LOST)


def plain(**options: Any) -> StrictTrainer:
    return StrictTrainer(dialect="plain", **options)  # the enum's value is accepted like its member


def last_refusal(trainer: StrictTrainer) -> tuple[RefusalReason, str]:
    verdict = trainer.verdict("r")
    assert verdict is not None
    return verdict.refusals[-1].reason, verdict.refusals[-1].text


def check_refused(trainer: StrictTrainer, response: httpx.Response, reason: RefusalReason, text: str) -> None:
    assert response.status_code == 422
    assert last_refusal(trainer) == (reason, response.json()["detail"])
    assert text in response.json()["detail"]


async def test_a_rollout_without_masks_gives_the_sample_that_the_ids_say(keyed: Make) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        verdict = trainer.verdict("r")
    assert verdict is not None
    assert verdict.accepted
    assert not verdict.concluded
    first, *_, last = asking.answers
    assert list(verdict.sample.prompt_ids) == first["prompt_token_ids"]
    assert list(verdict.sample.prompt_ids + verdict.sample.response_ids) == last["prompt_token_ids"] + last["token_ids"]
    generated = [t for t, m in zip(verdict.sample.response_ids, verdict.sample.response_mask, strict=True) if m]
    assert generated == [token for answer in asking.answers for token in answer["token_ids"]]
    assert verdict.siblings == verdict.replays == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: [m[0], {**m[1], "content": "Else."}, *m[2:]], "messages[1] is not what was sent before"),
        (
            lambda m: [*m[:2], {**m[2], "content": "Rewritten."}, m[3]],
            "messages[2] is not the completion of the last turn",
        ),
        (lambda m: m[:2], "messages[2] is missing"),
        (lambda m: [*m[:2], {**m[2], "refusal": None}, m[3]], "messages[2] is not the completion of the last turn"),
        (lambda m: [m[0], {**m[1], "name": None}, *m[2:]], "messages[1] is not what was sent before"),
    ],
)
async def test_the_history_is_append_only_and_verbatim(keyed: Make, change: Any, text: str) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.turn()
        check_refused(trainer, await asking.post(messages=change(asking.messages)), RefusalReason.HISTORY, text)
        await asking.play()
        assert len(trainer.verdict("r").turns) == 3


async def test_a_null_that_was_sent_comes_back(keyed: Make) -> None:
    script = Script((ScriptedReply(tool_calls=(ADD,), extra={"refusal": None}), ScriptedReply(content="8")))
    async with plain(scripts={"r": script}) as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.turn()
        dropped = [{k: v for k, v in message.items() if v is not None} for message in asking.messages]
        check_refused(trainer, await asking.post(messages=dropped), RefusalReason.HISTORY, "messages[2] is not")
        await asking.play()


async def test_messages_are_objects_of_any_kind(keyed: Make) -> None:
    async with plain() as trainer:
        check_refused(trainer, await keyed(trainer, messages=[]).post(), RefusalReason.TEMPLATE, "cannot be rendered")
        odd = [{"role": "narrator", "content": "Once.", "vendor": {"x": [1.0, None]}}]
        assert (await keyed(trainer, rollout_id="odd", messages=odd).post()).status_code == 200
        text = await keyed(trainer, rollout_id="text", messages=["hi"]).post()
    assert text.status_code == 422
    assert "messages[0] has to be an object" in text.json()["detail"]


@pytest.mark.parametrize(
    ("change", "reason", "text"),
    [
        ({"response_mask": [0, 0]}, RefusalReason.MASK, "response_mask is set"),
        ({"response_mask": None}, RefusalReason.BODY, "response_mask is null"),
        ({"stop": None, "seed": None}, RefusalReason.BODY, "seed, stop is null"),
        ({"stop": "###"}, RefusalReason.BODY, "stop has to be a list of strings"),
        ({"temperature": "hot"}, RefusalReason.BODY, "temperature has to be a number"),
        ({"top_p": True}, RefusalReason.BODY, "top_p has to be a number"),
        ({"max_tokens": 1.5}, RefusalReason.BODY, "max_tokens has to be a whole number"),
        ({"logprobs": 1}, RefusalReason.BODY, "logprobs has to be true or false"),
    ],
)
async def test_bodies_of_another_dialect_are_refused(
    keyed: Make, change: dict[str, Any], reason: RefusalReason, text: str
) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        check_refused(trainer, await asking.post(**change), reason, text)
        assert (await asking.post(top_k=40, stop=["###"])).status_code == 200


async def test_each_turn_has_a_key_of_its_own(keyed: Make) -> None:
    async with plain() as trainer:
        asking: KeyedCaller = keyed(trainer)
        check_refused(trainer, await asking.post(key=""), RefusalReason.KEY, "Idempotency-Key is missing")
        await asking.turn()
        check_refused(trainer, await asking.post(key="r/0/1"), RefusalReason.KEY, "that of turn 1, but the messages")
        await asking.turn()
        check_refused(trainer, await asking.post(key="r/0/1"), RefusalReason.KEY, "that of turn 1: each turn must have")
        other: KeyedCaller = keyed(trainer, rollout_id="other")
        response = await other.post(key="r/0/2")
        assert response.status_code == 422
        assert "is that of a turn of rollout 'r'" in response.json()["detail"]


async def test_attempts_of_a_turn_share_its_key(keyed: Make) -> None:
    script = Script((Fault.error(500, "busy"), Fault.error(503, "busy"), ScriptedReply(content="8")))
    async with plain(scripts={"r": script}) as trainer:
        asking: KeyedCaller = keyed(trainer)
        assert (await asking.post()).status_code == 500
        check_refused(trainer, await asking.post(key="x"), RefusalReason.KEY, "under another Idempotency-Key")
        assert (await asking.post()).status_code == 503
        await asking.turn()
        verdict = trainer.verdict("r")
    assert verdict.faults == ("turn 1: status 500", "turn 1: status 503")
    assert verdict.siblings == 0


@pytest.mark.parametrize("lost_turn", [1, 2])
async def test_a_turn_asked_for_again_is_generated_again_and_counted(keyed: Make, lost_turn: int) -> None:
    asks = ScriptedReply(content="Adding.", tool_calls=(ADD,))
    lines = [asks, ScriptedReply(content="8")]
    lost = ScriptedReply(content="Or so.", tool_calls=(ADD,)) if lost_turn == 1 else ScriptedReply(content="Nine?")
    script = Script((*lines[: lost_turn - 1], LOST, lost, *lines[lost_turn - 1 :]))
    async with plain(scripts={"r": script}) as trainer:
        asking: KeyedCaller = keyed(trainer)
        for _ in range(lost_turn - 1):
            await asking.turn()
        with pytest.raises(httpx.RemoteProtocolError):
            await asking.post()
        assert len(trainer.verdict("r").turns) == lost_turn
        await asking.play()
        verdict = trainer.verdict("r")
    assert verdict.accepted
    assert (verdict.siblings, verdict.replays, verdict.faults) == (1, 0, (f"turn {lost_turn}: lost",))
    assert [turn.number for turn in verdict.turns] == [1, 2]
    last = asking.answers[-1]
    assert list(verdict.sample.prompt_ids + verdict.sample.response_ids) == last["prompt_token_ids"] + last["token_ids"]
    assert [turn.drift for turn in verdict.turns] == [None, None]


async def test_a_trainer_that_replays_keys_generates_nothing_anew(keyed: Make) -> None:
    script = Script((LOST,), then_model=True)
    async with plain(scripts={"r": script}, replays_keys=True) as trainer:
        asking: KeyedCaller = keyed(trainer)
        with pytest.raises(httpx.RemoteProtocolError):
            await asking.post()
        response = await asking.post()
        again = await asking.post()
        assert response.headers["idempotency-key"] == "r/0/1"
        assert {**response.json(), "created": 0} == {**again.json(), "created": 0}
        asking.take(response)
        await asking.play()
        verdict = trainer.verdict("r")
    assert verdict.accepted
    assert (len(verdict.turns), verdict.siblings, verdict.replays) == (3, 0, 2)


async def test_a_key_is_not_echoed_by_a_trainer_that_does_not_replay(keyed: Make) -> None:
    async with plain() as trainer:
        assert "idempotency-key" not in (await keyed(trainer).post()).headers


@pytest.mark.parametrize(
    ("extensions", "present"),
    [
        (Extensions(usage=True), [{"token_ids", "logprobs", "prompt_token_ids", "usage"}] * 3),
        (Extensions(omit=frozenset({"prompt_token_ids"})), [{"token_ids", "logprobs"}] * 3),
        (
            Extensions(omit=frozenset({"token_ids", "logprobs", "prompt_token_ids"}), usage=True, turns=frozenset({2})),
            [{"token_ids", "logprobs", "prompt_token_ids"}, {"usage"}, {"token_ids", "logprobs", "prompt_token_ids"}],
        ),
    ],
)
async def test_extensions_are_left_out_of_all_turns_or_of_some(
    keyed: Make, extensions: Extensions, present: list[set[str]]
) -> None:
    async with plain(script=Script(then_model=True, extensions=extensions)) as trainer:
        asking: KeyedCaller = keyed(trainer)
        await asking.play()
        turns = trainer.verdict("r").turns
    names = {"token_ids", "logprobs", "prompt_token_ids", "usage"}
    assert [names & set(answer) for answer in asking.answers] == present
    for answer, turn in zip(asking.answers, turns, strict=True):
        if "usage" in answer:
            counts = (turn.prompt_tokens, turn.answer_tokens, turn.prompt_tokens + turn.answer_tokens)
            assert tuple(answer["usage"].values()) == counts


async def test_a_trainer_of_either_dialect_reads_it_off_the_first_call(caller: Make, keyed: Make) -> None:
    async with StrictTrainer(dialect="either") as trainer:
        masked, plainly = caller(trainer, rollout_id="masked"), keyed(trainer)
        await masked.turn()
        await plainly.turn()
        missing = await masked.client.post(
            "/v1/chat/completions", json={"rollout_id": "masked", "messages": masked.messages}
        )
        assert missing.status_code == 422
        assert "response_mask is missing" in missing.json()["detail"]
        check_refused(trainer, await plainly.post(response_mask=[0] * 18), RefusalReason.MASK, "response_mask is set")
        await masked.play()
        await plainly.play()
        assert [len(verdict.turns) for verdict in trainer.verdicts()] == [3, 3]


async def test_an_id_that_is_over_in_one_dialect_may_begin_in_the_other(caller: Make, keyed: Make) -> None:
    async with StrictTrainer(dialect="either") as trainer:
        for asking in (caller(trainer), keyed(trainer)):
            await asking.play()
            verdict = trainer.verdict("r")
            assert (verdict.accepted, len(verdict.turns)) == (True, 3)
        await asking.deliver()
        assert trainer.verdict("r").concluded
        await caller(trainer).play()
        assert trainer.verdict("r").accepted
        assert len(trainer.verdict("r").earlier) == 2


async def test_a_trainer_of_the_synchronous_dialect_receives_no_outcomes(keyed: Make) -> None:
    async with StrictTrainer() as trainer:
        assert (await keyed(trainer).deliver()).status_code == 404
        assert trainer.deliveries("r") == ()
