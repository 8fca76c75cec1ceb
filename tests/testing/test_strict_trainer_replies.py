"""How replies become tokens: correct ids, thinking, both forms of arguments, truncated completions, any Unicode."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server.testing.checks.judge import RequestJudge
from rollout_server.testing.checks.renderer import PlainRenderer
from rollout_server.testing.checks.turn import CompletionCall
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

STRING = tool_call("call_1", "add", '{"a":5,"b":3}')
OBJECT = tool_call("call_1", "add", {"b": 3, "a": 5, "größe": "漢字"})


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (ScriptedReply(content="Hello!"), "Hello!<|im_end|>"),
        (ScriptedReply(content=""), "<|im_end|>"),
        (ScriptedReply(content="  a\n\n b \n"), "  a\n\n b \n<|im_end|>"),
        (ScriptedReply(content=[{"type": "text", "text": "a"}, "b"]), "ab<|im_end|>"),
        (
            ScriptedReply(content="ответ ✅ \\u0041 <|im_end|> </tool_call>"),
            "ответ ✅ \\u0041 <|im_end|> </tool_call><|im_end|>",
        ),
        (ScriptedReply(content="8", reasoning="So\n8."), "<think>\nSo\n8.\n</think>\n\n8<|im_end|>"),
        (ScriptedReply(content="Half a sen", cut=True), "Half a sen"),
        (ScriptedReply(content="", cut=True), ""),
        (
            ScriptedReply(tool_calls=(STRING,)),
            '<tool_call>\n{"name": "add", "arguments": {"a":5,"b":3}}\n</tool_call><|im_end|>',
        ),
        (
            ScriptedReply(content="x", tool_calls=(OBJECT, STRING)),
            'x\n<tool_call>\n{"name": "add", "arguments": {"b": 3, "a": 5, "größe": "漢字"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"a":5,"b":3}}\n</tool_call><|im_end|>',
        ),
    ],
)
async def test_the_ids_are_those_of_what_was_said(caller, toy, reply, text) -> None:
    async with StrictTrainer(scripts={"r": Script((reply,))}) as trainer:
        answer = await caller(trainer).turn()
    choice = answer["choices"][0]
    assert choice["message"] == reply.message
    assert choice["finish_reason"] == ("length" if reply.cut else "stop")
    assert answer["token_ids"] == toy.encode(text, add_special_tokens=False)
    assert toy.decode(answer["token_ids"]) == text
    assert len(answer["logprobs"]) == len(answer["token_ids"])


async def test_logprobs_are_the_same_each_time_and_exact_in_float32(caller) -> None:
    runs = []
    for _ in range(2):
        async with StrictTrainer() as trainer:
            asking = caller(trainer)
            await asking.play()
            runs.append([value for answer in asking.answers for value in answer["logprobs"]])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 20
    assert all(value < 0 and struct.unpack("f", struct.pack("f", value))[0] == value for value in runs[0])


async def test_logprobs_are_left_out_where_none_were_asked_for(caller) -> None:
    async with StrictTrainer() as trainer:
        assert (await caller(trainer).turn(logprobs=False))["logprobs"] is None


@pytest.mark.parametrize("call", [STRING, OBJECT])
async def test_thinking_and_both_forms_of_arguments_go_through_a_rollout(caller, call) -> None:
    script = Script(
        (
            ScriptedReply(tool_calls=(call,), reasoning="Add first …", extra={"annotations": [], "vendor": 2**70}),
            ScriptedReply(content="8", reasoning="Eight."),
        )
    )
    async with StrictTrainer(scripts={"r": script}) as trainer:
        asking = caller(trainer)
        await asking.play()
        verdict = trainer.verdict("r")
    assert asking.messages[2]["vendor"] == 2**70
    assert verdict.accepted
    assert verdict.turns[1].drift is None


async def test_the_end_token_of_a_cut_answer_is_new_in_the_next_prompt(caller, toy) -> None:
    script = Script((ScriptedReply(content="Adding.", tool_calls=(STRING,), cut=True), ScriptedReply(content="8")))
    async with StrictTrainer(scripts={"r": script}) as trainer:
        asking = caller(trainer)
        await asking.play()
        verdict = trainer.verdict("r")
    first = asking.answers[0]
    assert toy.convert_tokens_to_ids("<|im_end|>") not in first["token_ids"]
    environment = verdict.sample.response_ids[len(first["token_ids"]) :][: verdict.turns[1].new_tokens]
    assert toy.decode(list(environment)).startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\n8\n")
    assert verdict.accepted


async def test_fields_can_be_left_out_and_replaced_after_counting(caller) -> None:
    script = Script(
        (
            ScriptedReply(
                content="a", omit=frozenset({"token_ids", "logprobs"}), override={"prompt_token_ids": [1], "x": None}
            ),
            ScriptedReply(content="b", finish_reason="content_filter"),
        )
    )
    async with StrictTrainer(scripts={"r": script}) as trainer:
        asking = caller(trainer)
        answer = (await asking.post()).json()
        assert "token_ids" not in answer
        assert "logprobs" not in answer
        assert answer["prompt_token_ids"] == [1]
        assert answer["x"] is None
        assert len(trainer.verdict("r").sample.response_ids) == 2
        assert (await asking.turn())["choices"][0]["finish_reason"] == "content_filter"


async def test_a_trainer_behind_a_front_counts_parsed_arguments(caller, toy) -> None:
    script = Script((ScriptedReply(tool_calls=(STRING,)), ScriptedReply(content="8")))
    async with StrictTrainer(scripts={"r": script}, parse_arguments=True) as trainer:
        asking = caller(trainer)
        first = await asking.turn()
        assert '{"a": 5, "b": 3}' in toy.decode(first["token_ids"])
        as_received = asking.mask()
        asking.messages[2] = {**asking.messages[2], "tool_calls": [tool_call("call_1", "add", {"a": 5, "b": 3})]}
        parsed = asking.rendered() - len(first["prompt_token_ids"]) - len(first["token_ids"])
        asking.messages[2] = {**asking.messages[2], "tool_calls": [STRING]}
        assert parsed != len(as_received)
        assert (await asking.post(response_mask=as_received)).status_code == 422
        assert (await asking.post(response_mask=[0] * parsed)).status_code == 200


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["<|im_end|>", "\n", "</tool_call>", "<think>", "<|im_start|>assistant\n", "e\u0301", "12.50"]
)
ARGUMENTS = st.dictionaries(TEXT, st.integers() | st.floats(allow_nan=False) | TEXT, max_size=3)
REPLIES = st.builds(
    lambda content, reasoning, arguments, cut: ScriptedReply(
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(tool_call(f"call_{i}", "add", given) for i, given in enumerate(arguments)),
        cut=cut,
    ),
    st.none() | TEXT,
    st.none() | TEXT,
    st.lists(ARGUMENTS | TEXT | ARGUMENTS.map(json.dumps), max_size=3),
    st.booleans(),
)


@pytest.fixture(scope="module")
def renderer() -> PlainRenderer:
    return PlainRenderer.load(TOY_TOKENIZER)


@settings(deadline=None)
@given(replies=st.lists(st.tuples(REPLIES, st.lists(TEXT, max_size=3)), min_size=1, max_size=4), question=TEXT)
def test_every_prompt_is_the_last_prompt_its_answer_and_the_environment(renderer, replies, question) -> None:
    judge = RequestJudge(renderer)
    messages: list[Any] = [{"role": "user", "content": question}]
    seen: list[int] = []
    mask: list[int] | None = None
    for reply, results in replies:
        prompt = judge.check(CompletionCall("r", list(messages), mask))
        assert prompt.ids[: len(seen)] == seen
        answer = judge.accept(prompt, reply)
        seen = prompt.ids + answer.token_ids
        messages.append(json.loads(json.dumps(answer.message)))
        messages.extend({"role": "tool", "content": result} for result in results or ["0"])
        mask = [0] * (len(renderer.prompt(messages, None)) - len(seen))
    sample = judge.verdict("r").sample
    assert list(sample.prompt_ids + sample.response_ids) == seen
    assert len(sample.response_ids) == len(sample.response_mask) == len(sample.logprobs)
    assert judge.verdict("r").accepted
