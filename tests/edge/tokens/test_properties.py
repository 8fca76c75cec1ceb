"""Any conversation, also a malicious one: the count equals a trainer's, and the truth is what an append-only template appends."""

import asyncio
import os
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from rollout_server.core.ledger import pack_tokens
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.runtime.errors import RolloutFailed

from tests.edge.tokens.conftest import TOOLS, Plain, answered, call, packed
from tests.support.tokenizers import FAMILIES

PIECES = (
    *(
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<|endoftext|>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    ),
    *("Zq0EnvironmentBegins", "{{ messages }}", "{%- raw -%}", "\\ud800", '{"a": 8.0}', "1e400", "-0", "nul\0l"),
    *("e\u0301", "\u00e9", "\u202e", "😀", "漢字", "\n", "\n\n", " ", "\r\n", "\t", "word", "Word."),
)
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=6).map("".join)
PARTS = st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), max_size=3)
ARGUMENTS = st.sampled_from(['{"a": 5, "b": 3}', '{"a":5,"b":8.0}', '{"a": "<|im_end|>"}', {"a": 5, "b": 3}, {}, ""])
REJECTS = (HealthCheck.filter_too_much,)
DATE = datetime(2026, 2, 3)
SWITCHES = st.sampled_from(({}, {"enable_thinking": False}))
FEW = os.environ.get("ROLLOUT_EXAMPLES") == "few"
SOME = settings(
    max_examples=5 if FEW else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)


def conversations(
    content: st.SearchStrategy[Any], thoughts: st.SearchStrategy[Any] | None = None
) -> st.SearchStrategy[list[list[dict[str, Any]]]]:
    """A prompt, then alternately a completion and the messages after it, which may be none."""
    system = st.lists(st.builds(lambda text: {"role": "system", "content": text}, content), max_size=1)
    user = st.builds(lambda text: {"role": "user", "content": text}, content)
    tool = st.builds(lambda text: {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": text}, content)
    calls = st.lists(ARGUMENTS.map(call), min_size=1, max_size=2)
    answer = st.builds(lambda text: {"role": "assistant", "content": text}, content)
    if thoughts is not None:
        thinking = st.builds(lambda said, thought: {**said, "reasoning_content": thought}, answer, thoughts)
        answer = st.one_of(answer, thinking)
    calling = st.builds(lambda text, made: {"role": "assistant", "content": text, "tool_calls": made}, content, calls)
    turn = st.tuples(calling, st.lists(tool, min_size=1, max_size=2)) | st.tuples(answer, st.lists(user, max_size=2))
    prompt = st.builds(lambda head, last: [*head, last], system, user)
    turns = st.lists(turn.map(lambda pair: [pair[0], *pair[1]]), min_size=1, max_size=3)
    return st.builds(lambda first, rest: [first, *rest], prompt, turns)


def environment(plain: Plain, messages: Sequence[Any], answers: int, tools: Any) -> list[int]:
    """What an append-only ChatML template appends to the first `answers` messages, the last of them a completion."""
    before = plain.tokenizer.apply_chat_template(list(messages[:answers]), tools=tools, tokenize=False)
    after = plain.tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=True)
    closed = before.removesuffix("\n")
    assert before != closed
    assert after.startswith(closed)
    return plain.ids("<|im_end|>" + after[len(closed) :])[1:]


async def play(renderer: Renderer, plain: Plain, turns: list[list[dict[str, Any]]], *, append_only: bool) -> None:
    """Render turn by turn as a rollout does. Completions are a few tokens whose values do not affect the renderings."""
    messages = list(turns[0])
    first = await renderer.predict(packed(*messages), None, 0)
    assert first.predicted.environment == pack_tokens(plain.prompt(messages, TOOLS))
    assert (len(first.predicted.closing), first.mask_length) == (0, None)
    for number, turn in enumerate(turns[1:]):
        asked, ids = len(messages), plain.ids("said")[: 1 + number % 2]
        before = len(plain.prompt(messages, TOOLS))
        messages += turn
        rendered = await renderer.predict(packed(*messages), answered(turn[0], ids), asked)
        assert rendered.mask_length == len(plain.prompt(messages, TOOLS)) - before - len(ids)
        assert rendered.exact
        if append_only:
            assert rendered.predicted.closing == pack_tokens(plain.ids("<|im_end|>"))
            assert rendered.predicted.environment == pack_tokens(environment(plain, messages, asked + 1, TOOLS))


@SOME
@given(turns=conversations(TEXT | st.none() | PARTS))
async def test_toy(ours, plain, turns) -> None:
    await play(Renderer(ours("toy"), TOOLS, {}), plain("toy"), turns, append_only=True)


@SOME
@given(turns=conversations(TEXT))
async def test_qwen_2_5(ours, plain, turns) -> None:
    await play(Renderer(ours("qwen2.5"), TOOLS, {}), plain("qwen2.5"), turns, append_only=True)


@SOME
@given(turns=conversations(TEXT))
async def test_qwen_3_instruct(ours, plain, turns) -> None:
    await play(Renderer(ours("qwen3-instruct"), TOOLS, {}), plain("qwen3-instruct"), turns, append_only=True)


@SOME
@given(turns=conversations(TEXT))
async def test_a_template_that_drops_thinking_is_counted_all_the_same(ours, plain, turns) -> None:
    await play(Renderer(ours("qwen3"), TOOLS, {}), plain("qwen3"), turns, append_only=False)


@pytest.mark.parametrize("family", FAMILIES)
@settings(SOME, max_examples=3 if FEW else 12)
@given(
    turns=conversations(TEXT, thoughts=TEXT),
    cut=st.booleans(),
    template_kwargs=st.sampled_from(({}, {"enable_thinking": False})),
)
async def test_every_way_to_render_gives_the_same(ours, plain, family, turns, cut, template_kwargs) -> None:
    """The short form and the full one, with and without cached earlier turns, agree; and the count is a trainer's own."""
    loaded, naive = ours(family), plain(family)
    full = copy(loaded)
    full.probed = replace(loaded.probed, short_form=False)
    short, whole = (Renderer(each, TOOLS, template_kwargs, date=DATE) for each in (loaded, full))
    stop = loaded.probed.final.id
    messages = list(turns[0])
    try:
        await short.predict(packed(*messages), None, 0)
        for number, turn in enumerate(turns[1:]):
            asked, ids = len(messages), [*naive.ids("said")[: 1 + number % 2], *([] if cut else [stop])]
            messages += turn
            said = (packed(*messages), answered(turn[0], ids, "length" if cut else "stop"), asked)
            rendered = await short.predict(*said)
            assert rendered == await whole.predict(*said)
            assert rendered == await Renderer(loaded, TOOLS, template_kwargs, date=DATE).predict(*said)
            assert not rendered.exact or len(rendered.predicted.closing) == cut
    except RolloutFailed:
        reject()  # templates refuse some of these conversations


@pytest.mark.parametrize("family", ["toy", "qwen2.5"])
async def test_many_at_once_are_as_one_after_the_other(ours, plain, family) -> None:
    loaded, naive = ours(family), plain(family)

    async def rollout(number: int) -> list[Any]:
        renderer = Renderer(loaded, TOOLS, {})
        prompt = [{"role": "user", "content": f"Number {number} " * (1 + number % 7)}]
        said = {"role": "assistant", "content": "", "tool_calls": [call(f'{{"a": {number}}}')]}
        heard = {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": f"<|im_end|>{number}" * (number % 5)}
        first = await renderer.predict(packed(*prompt), None, 0)
        second = await renderer.predict(packed(*prompt, said, heard), answered(said, naive.ids("said")), 1)
        return [first, second]

    together = await asyncio.gather(*(rollout(number) for number in range(100)))
    assert together == [await rollout(number) for number in range(100)]


async def test_many_at_once_of_one_renderer(ours, plain) -> None:
    """What a renderer caches in one call must not leak into another."""
    renderer, naive = Renderer(ours("toy"), TOOLS, {}), plain("toy")
    said, ids = {"role": "assistant", "content": "yes"}, naive.ids("yes<|im_end|>")
    prompts = [[{"role": "user", "content": "x " * length}] for length in range(50)]
    turns = [[*prompt, said, {"role": "user", "content": "y " * len(prompt[0]["content"])}] for prompt in prompts]
    rendered = await asyncio.gather(*(renderer.predict(packed(*turn), answered(said, ids), 1) for turn in turns))
    expected = [
        len(naive.prompt(t, TOOLS)) - len(naive.prompt(p, TOOLS)) - len(ids)
        for p, t in zip(prompts, turns, strict=True)
    ]
    assert [each.mask_length for each in rendered] == expected
