"""The rules for masks and histories, with a real server."""

from typing import Any

import pytest
from rollout_server.testing.checks.verdict import RefusalReason
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

ADD = tool_call("call_1", "add", '{"a": 5, "b": 3}')
AFTER_EIGHT = "\n<|im_start|>user\n<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


async def refused(trainer: StrictTrainer, asked: Any, text: str, reason: RefusalReason) -> None:
    """Assert that the request was refused with `text`, and that the rollout's state is unchanged."""
    assert asked.status_code == 422
    assert text in asked.json()["detail"]
    verdict = trainer.verdict("r")
    assert verdict is not None
    assert verdict.refusals[-1].reason is reason
    assert verdict.refusals[-1].text == asked.json()["detail"]
    assert not verdict.accepted


async def test_right_masks_are_accepted_turn_by_turn(caller, toy) -> None:
    async with StrictTrainer() as trainer:
        asking = caller(trainer)
        await asking.play()
        verdict = trainer.verdict("r")
    assert [answer["choices"][0]["message"]["content"] for answer in asking.answers] == [
        "I'll calculate that for you.",
        "Continuing the calculation.",
        "5 plus 3 equals 8. Multiplying 8 by 2 gives 16.",
    ]
    assert verdict.accepted
    assert [turn.number for turn in verdict.turns] == [1, 2, 3]
    assert [turn.drift for turn in verdict.turns] == [None, None, None]
    assert [turn.prompt_tokens for turn in verdict.turns] == [len(a["prompt_token_ids"]) for a in asking.answers]
    seen = toy.decode(list(verdict.sample.prompt_ids + verdict.sample.response_ids))
    shown = toy.apply_chat_template(asking.messages, tokenize=False)
    assert seen + "\n" == shown


async def test_the_sample_keeps_its_laws(caller) -> None:
    async with StrictTrainer() as trainer:
        asking = caller(trainer)
        await asking.play()
        sample = trainer.verdict("r").sample
    assert list(sample.prompt_ids) == asking.answers[0]["prompt_token_ids"]
    assert len(sample.response_ids) == len(sample.response_mask) == len(sample.logprobs)
    assert all(
        (logprob < 0) == (mask == 1) for logprob, mask in zip(sample.logprobs, sample.response_mask, strict=True)
    )
    generated = [token for token, mask in zip(sample.response_ids, sample.response_mask, strict=True) if mask]
    assert generated == [token for answer in asking.answers for token in answer["token_ids"]]
    last = asking.answers[-1]
    assert list(sample.prompt_ids + sample.response_ids) == last["prompt_token_ids"] + last["token_ids"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda mask: None, "response_mask is missing, {n} tokens are new since the last completion"),
        (lambda mask: [], "response_mask has length 0, {n} tokens are new since the last completion"),
        (lambda mask: mask[1:], "response_mask has length {short}, {n} tokens are new since the last completion"),
        (lambda mask: [*mask, 0], "response_mask has length {long}, {n} tokens are new since the last completion"),
        (lambda mask: [*mask[:3], 1, *mask[4:]], "response_mask[3] is 1, but the model generated none of the {n}"),
        (lambda mask: [False, *mask[1:]], "response_mask[0] is False"),
        (lambda mask: [*mask[1:], 0.0], "is 0.0"),
        (lambda mask: "000", "response_mask is not a list, {n} tokens are new"),
    ],
)
async def test_wrong_masks_are_refused_and_change_nothing(caller, change, text) -> None:
    async with StrictTrainer() as trainer:
        asking = caller(trainer)
        await asking.turn()
        mask = asking.mask()
        named = text.format(n=len(mask), short=len(mask) - 1, long=len(mask) + 1)
        before = trainer.verdict("r")
        await refused(trainer, await asking.post(response_mask=change(mask)), named, RefusalReason.MASK)
        assert trainer.verdict("r").sample == before.sample
        await asking.play()
        assert len(trainer.verdict("r").turns) == 3
        assert [refusal.turn for refusal in trainer.verdict("r").refusals] == [2]


async def test_the_first_turn_has_no_mask(caller) -> None:
    async with StrictTrainer() as trainer:
        asking = caller(trainer)
        response = await asking.post(response_mask=[0, 0])
        await refused(trainer, response, "response_mask has length 2, but on the first turn", RefusalReason.MASK)
        assert (await asking.post(response_mask=[])).status_code == 200


@pytest.mark.parametrize(("mask", "status"), [(None, 200), ([], 200), ([0], 422)])
async def test_with_nothing_new_null_and_empty_are_right(caller, mask, status) -> None:
    script = Script(
        (ScriptedReply(content="Adding.", tool_calls=(ADD,), surplus=AFTER_EIGHT), ScriptedReply(content="8"))
    )
    async with StrictTrainer(scripts={"r": script}) as trainer:
        asking = caller(trainer)
        await asking.turn()
        assert asking.mask() is None
        response = await asking.post(response_mask=mask)
        verdict = trainer.verdict("r")
    assert response.status_code == status
    assert verdict.accepted == (status == 200)
    if status == 422:
        assert response.json()["detail"] == "response_mask has length 1, 0 tokens are new since the last completion"
    else:
        assert verdict.turns[1].new_tokens == 0


async def test_a_history_that_shrank_is_refused_and_says_so(caller) -> None:
    script = Script(
        (ScriptedReply(content="Adding.", tool_calls=(ADD,), surplus=(0,) * 60), ScriptedReply(content="8"))
    )
    async with StrictTrainer(scripts={"r": script}) as trainer:
        asking = caller(trainer)
        await asking.turn()
        expected = asking.rendered() - asking._last - len(asking.answers[0]["token_ids"])
        assert expected < 0
        response = await asking.post(response_mask=None)
        await refused(trainer, response, f"{-expected} fewer than the", RefusalReason.SHRUNK)


async def test_surplus_ids_are_counted_and_seen_as_drift(caller) -> None:
    script = Script(
        (ScriptedReply(content="Adding.", tool_calls=(ADD,), surplus=(0, 1, 2)), ScriptedReply(content="8"))
    )
    async with StrictTrainer(scripts={"r": script}) as trainer:
        asking = caller(trainer)
        await asking.play()
        verdict = trainer.verdict("r")
    first, second = asking.answers
    assert verdict.accepted
    assert verdict.turns[1].new_tokens == len(second["prompt_token_ids"]) - len(first["prompt_token_ids"]) - len(
        first["token_ids"]
    )
    assert verdict.turns[1].drift == len(first["prompt_token_ids"]) + len(first["token_ids"]) - 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: [m[0], {**m[1], "content": "Something else."}, *m[2:]], "messages[1] is not what was sent before"),
        (lambda m: [m[0], *m[2:]], "messages[1] is not what was sent before"),
        (
            lambda m: [*m[:2], {**m[2], "content": "Rewritten."}, m[3]],
            "messages[2] is not the completion of the last turn",
        ),
        (lambda m: [*m[:2], m[3]], "messages[2] is not the completion of the last turn"),
        (
            lambda m: m[:2],
            "messages[2] is missing, it has to be the completion of the last turn: the request has 2 messages",
        ),
        (lambda m: [*m[:2], {**m[2], "name": "x"}, m[3]], "messages[2] is not the completion"),
        (lambda m: [m[0], {**m[1], "content": None}, *m[2:]], "messages[1] is not what was sent before"),
    ],
)
async def test_a_rewritten_history_is_refused_with_its_index(caller, change, text) -> None:
    async with StrictTrainer() as trainer:
        asking = caller(trainer)
        await asking.turn()
        response = await asking.post(messages=change(asking.messages))
        await refused(trainer, response, text, RefusalReason.HISTORY)
        await asking.play()
        assert len(trainer.verdict("r").turns) == 3


@pytest.mark.parametrize("value", ['{"b": 3, "a": 5}', {"b": 3, "a": 5}, {"a": 5, "b": 3.0}])
async def test_arguments_come_back_as_they_were_given(caller, value) -> None:
    script = Script(
        (ScriptedReply(tool_calls=(tool_call("call_1", "add", {"a": 5, "b": 3}),)), ScriptedReply(content="8"))
    )
    async with StrictTrainer(scripts={"r": script}) as trainer:
        asking = caller(trainer)
        await asking.turn()
        answer = {**asking.messages[2], "tool_calls": [tool_call("call_1", "add", value)]}
        response = await asking.post(messages=[*asking.messages[:2], answer, asking.messages[3]])
        await refused(trainer, response, "messages[2] is not the completion", RefusalReason.HISTORY)


async def test_null_is_absent_and_the_order_of_keys_says_nothing(caller) -> None:
    async with StrictTrainer() as trainer:
        asking = caller(trainer)
        await asking.turn()
        shown = [dict(reversed([*message.items(), ("name", None)])) for message in asking.messages]
        assert (await asking.post(messages=shown)).status_code == 200


async def test_an_id_starts_anew_after_its_end_only(caller) -> None:
    script = Script(
        (
            ScriptedReply(content="Adding.", tool_calls=(ADD,)),
            ScriptedReply(content="8"),
            ScriptedReply(content="Hello again!"),
        )
    )
    async with StrictTrainer(scripts={"r": script}) as trainer:
        first = caller(trainer)
        await first.turn()
        again = await caller(trainer).post()
        await refused(trainer, again, "messages[2] is missing", RefusalReason.HISTORY)
        await first.turn()
        second = caller(trainer)
        await second.play()
        verdict = trainer.verdict("r")
    assert second.answers[0]["choices"][0]["message"]["content"] == "Hello again!"
    assert verdict.accepted
    assert len(verdict.turns) == 1
    assert [len(earlier.turns) for earlier in verdict.earlier] == [2]
    assert [earlier.accepted for earlier in verdict.earlier] == [False]


async def test_a_conversation_goes_on_after_a_final_answer(caller) -> None:
    async with StrictTrainer() as trainer:
        asking = caller(trainer)
        await asking.play()
        asking.messages.append({"role": "user", "content": "Subtract 6 from 10."})
        rewritten = [asking.messages[0], *asking.messages[2:]]
        await refused(trainer, await asking.post(messages=rewritten), "messages[1] is not", RefusalReason.HISTORY)
        await refused(
            trainer,
            await asking.post(messages=rewritten, response_mask=None),
            "messages[1] is not what was sent before",
            RefusalReason.HISTORY,
        )
        await asking.play()
        verdict = trainer.verdict("r")
    assert asking.messages[-1]["content"] == "10 minus 6 equals 4."
    assert len(verdict.turns) == 5
    assert verdict.earlier == ()


async def test_the_trainer_can_end_a_rollout_itself(caller) -> None:
    async with StrictTrainer() as trainer:
        await caller(trainer).turn()
        trainer.start_anew("r")
        await caller(trainer).play()
        assert trainer.verdict("r").accepted


async def test_what_the_template_cannot_render_is_refused(caller) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}
    async with StrictTrainer() as trainer:
        asking = caller(trainer, messages=[{"role": "user", "content": [image]}])
        await refused(trainer, await asking.post(), "renders text only", RefusalReason.TEMPLATE)
        asking = caller(trainer, messages=[{"role": "user", "content": "\ud83d"}])
        body = b'{"rollout_id": "r", "messages": [{"role": "user", "content": "\\ud83d"}]}'
        response = await asking.client.post("/v1/chat/completions", content=body)
        await refused(trainer, response, "cannot be rendered", RefusalReason.TEMPLATE)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"messages": [{"role": "user"}]}', "rollout_id"),
        ('{"rollout_id": " ", "messages": [{"role": "user"}]}', "rollout_id"),
        ('{"rollout_id": "r"}', "messages has to be"),
        ('{"rollout_id": "r", "messages": []}', "messages has to be"),
        ('{"rollout_id": "r", "messages": [{"role": "user"}, "x"]}', "messages[1]"),
        ('{"rollout_id": "r", "messages": [{"content": "x"}]}', "messages[0]"),
    ],
)
async def test_bodies_that_are_no_calls(client, body, text) -> None:
    async with StrictTrainer() as trainer:
        response = await client(trainer).post("/v1/chat/completions", content=body)
        assert response.status_code == 422
        assert text in response.json()["detail"]
        assert len(trainer.requests) == 1
        assert trainer.verdicts() == ()
