"""The renderer's rules one by one."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from math import inf
from typing import Any

import pytest
from rollout_server.core.ledger import Prediction, pack_tokens
from rollout_server.core.outcome import Category
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.edge.tokens.rendering_form import Arguments, RenderingForm, Tools
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.runtime.errors import RolloutFailed
from transformers import AutoTokenizer, ByT5Tokenizer

from tests.edge.tokens.conftest import TOOLS, answered, call, packed
from tests.support.tokenizers import FAMILIES

ASKED = {"role": "user", "content": "What is 5 + 3?"}
SAID = {"role": "assistant", "content": "Eight."}
CALLED = {"role": "assistant", "content": "", "tool_calls": [call('{"a": 5, "b": 3}')]}
HEARD = {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "add", "content": "8"}
MORE = {"role": "user", "content": "And twice that?"}
CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\n' ~ BODY ~ '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
TEXTS = CHATML.replace("BODY", "message.content")


async def second_turn(renderer: Renderer, said: Any, ids: list[int], *new: Any, finish_reason: str = "stop") -> Any:
    """Render the first turn, then return the rendering of a second turn."""
    await renderer.predict(packed(ASKED), None, 0)
    return await renderer.predict(packed(ASKED, said, *new), answered(said, ids, finish_reason), 1)


async def failure(renderer: Renderer, *messages: Any) -> Any:
    with pytest.raises(RolloutFailed) as caught:
        await renderer.predict(packed(*messages), None, 0)
    return caught.value.failure


@pytest.mark.parametrize(
    ("ending", "finish_reason", "closing"),
    [
        ("<|im_end|>", "stop", ""),
        ("<|im_end|>", "length", ""),
        ("<|endoftext|>", "stop", ""),
        ("<|endoftext|>", "length", "<|im_end|>"),
        ("", "length", "<|im_end|>"),
        ("", "stop", "<|im_end|>"),
    ],
)
async def test_an_answer_is_closed_once(ours, plain, ending, finish_reason, closing) -> None:
    toy = plain("toy")
    renderer = Renderer(ours("toy"), TOOLS, {})
    rendered = await second_turn(renderer, SAID, toy.ids("Eight." + ending), MORE, finish_reason=finish_reason)
    assert rendered.predicted.closing == pack_tokens(toy.ids(closing))
    assert rendered.predicted.environment == pack_tokens(
        toy.ids(f"\n<|im_start|>user\n{MORE['content']}<|im_end|>\n<|im_start|>assistant\n")
    )


async def test_an_answer_of_no_tokens_is_closed_and_one_of_unknown_tokens_is_left(ours, plain) -> None:
    toy = plain("toy")
    rendered = await second_turn(Renderer(ours("toy"), TOOLS, {}), SAID, [], MORE)
    assert rendered.predicted.closing == pack_tokens(toy.ids("<|im_end|>"))
    unknown = answered(SAID, None)
    rendered = await Renderer(ours("toy"), TOOLS, {}).predict(packed(ASKED, SAID, MORE), unknown, 1)
    assert (rendered.predicted.closing, rendered.mask_length) == (pack_tokens(), None)
    assert rendered.exact


@pytest.mark.parametrize("said", [SAID, CALLED, {**SAID, "content": "<|im_end|> and <|im_end|>"}])
async def test_nothing_new_is_the_generation_prompt(ours, plain, said) -> None:
    toy = plain("toy")
    rendered = await second_turn(Renderer(ours("toy"), TOOLS, {}), said, toy.answer([ASKED, said], TOOLS))
    generation_prompt = pack_tokens(toy.ids("\n<|im_start|>assistant\n"))
    assert rendered.predicted == Prediction(pack_tokens(), generation_prompt)
    assert (rendered.mask_length, rendered.exact) == (len(generation_prompt), True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("new", [(MORE,), (HEARD,), (HEARD, MORE), ()])
async def test_every_family_is_cut_exactly(ours, plain, family, new) -> None:
    """The text after the stop is the end of the whole prompt, because encoding is compositional at added tokens."""
    said = CALLED if HEARD in new else SAID
    loaded, naive = ours(family), plain(family)
    if family == "phi-3.5" and HEARD in new:
        pytest.skip("this model's template knows no tools")
    try:
        whole = naive.prompt([ASKED, said, *new], TOOLS)
    except Exception as error:
        pytest.skip(f"the template refuses the conversation: {error}")
    rendered = await second_turn(Renderer(loaded, TOOLS, {}), said, [loaded.probed.final.id], *new)
    environment = rendered.predicted.environment
    assert rendered.exact
    assert pack_tokens(whole)[len(whole) - len(environment) :] == environment
    stop = loaded.probed.calls if said is CALLED else loaded.probed.final
    assert whole[len(whole) - len(environment) - 1] == stop.id


async def test_a_template_that_looks_at_how_content_begins_gets_the_mark_elsewhere(ours, plain) -> None:
    """Qwen3 detects tool results in user messages by the surrounding `<tool_response>`."""
    thought = {"role": "assistant", "content": "Eight.", "reasoning_content": "Five and three."}
    hears = {"role": "user", "content": "<tool_response>\n<|im_start|>8\n</tool_response>"}
    rendered = await second_turn(Renderer(ours("qwen3"), TOOLS, {}), thought, plain("qwen3").ids("<|im_end|>"), hears)
    expected = f"\n<|im_start|>user\n{hears['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.exact
    assert rendered.predicted.environment == pack_tokens(plain("qwen3").ids(expected))


async def test_without_a_place_to_cut_the_end_of_the_encoding_stands_in_and_says_so(ours, plain) -> None:
    """A template that prints the length of all content changes before every mark."""
    template = "{{- messages | map(attribute='content') | join | length -}}" + TEXTS
    loaded = ours("toy", template)
    toy = plain("toy")
    prompts = ["14" + f"<|im_start|>user\n{ASKED['content']}<|im_end|>\n<|im_start|>assistant\n"]
    prompts.append(
        "35"
        + prompts[0][2:]
        + f"Eight.<|im_end|>\n<|im_start|>user\n{MORE['content']}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = toy.ids("Eight.<|im_end|>")
    rendered = await second_turn(Renderer(loaded, [], {}), SAID, ids, MORE)
    assert not rendered.exact
    assert rendered.mask_length == len(toy.ids(prompts[1])) - len(toy.ids(prompts[0])) - len(ids)
    assert rendered.predicted.environment == pack_tokens(toy.ids(prompts[1])[-rendered.mask_length :])
    unknown = await Renderer(loaded, [], {}).predict(packed(ASKED, SAID, MORE), answered(SAID, None), 1)
    assert (unknown.predicted, unknown.mask_length, unknown.exact) == (
        Prediction(pack_tokens(), pack_tokens()),
        None,
        False,
    )


async def test_a_count_below_nothing_is_told_as_it_is(ours, plain) -> None:
    thought = {"role": "assistant", "content": "Eight.", "reasoning_content": "Five and three. " * 50}
    ids = plain("qwen3").ids("<think>\n" + thought["reasoning_content"] + "\n</think>\n\nEight.<|im_end|>")
    rendered = await second_turn(Renderer(ours("qwen3"), [], {}), thought, ids, MORE)
    assert rendered.mask_length < 0
    assert rendered.exact
    assert len(rendered.predicted.environment) > 0


async def test_a_count_below_nothing_without_a_place_to_cut(ours, plain) -> None:
    """A template that prints only the last message, preceded by the message count: the prompt gets shorter."""
    template = "{{- messages | map(attribute='content') | join | length }}{{ messages[-1].content }}"
    loaded = ours("toy", template)
    assert loaded.probed.final is None
    rendered = await second_turn(Renderer(loaded, [], {}), SAID, plain("toy").ids("Eight. " * 20), MORE)
    assert not rendered.exact
    assert rendered.mask_length < 0
    assert rendered.predicted == Prediction(pack_tokens(), pack_tokens())


@pytest.mark.parametrize("family", ["toy", "llama3", "mistral-small-3.2"])
async def test_a_renderer_without_memory_renders_the_same(ours, plain, family) -> None:
    """After a restart, and if the same turn is rendered again."""
    ids = [ours(family).probed.calls.id]
    renderer = Renderer(ours(family), TOOLS, {})
    expected = await second_turn(renderer, CALLED, ids, HEARD)
    turn = (packed(ASKED, CALLED, HEARD), answered(CALLED, ids), 1)
    assert await renderer.predict(*turn) == expected
    assert await Renderer(ours(family), TOOLS, {}).predict(*turn) == expected


async def test_another_conversation_is_rendered_from_its_first_message(ours, plain) -> None:
    renderer = Renderer(ours("toy"), [], {})
    for messages in ([ASKED, SAID], [MORE, SAID], [MORE], [ASKED]):
        rendered = await renderer.predict(packed(*messages), None, 0)
        assert rendered.predicted.environment == pack_tokens(plain("toy").prompt(messages))


@pytest.mark.parametrize("family", ["toy", "qwen2.5", "llama3"])
async def test_a_trainer_that_renders_without_the_tools_is_followed(ours, plain, family) -> None:
    naive, stop = plain(family), ours(family).probed.calls.id
    renderer = Renderer(ours(family), TOOLS, {})
    predicted = (await renderer.predict(packed(ASKED), None, 0)).predicted
    reported = pack_tokens(naive.prompt([ASKED]))
    assert predicted.environment == pack_tokens(naive.prompt([ASKED], TOOLS)) != reported
    assert await renderer.learn(predicted, reported) == Prediction(pack_tokens(), reported)
    assert renderer.form == RenderingForm(tools=Tools.NONE)
    turn = [ASKED, CALLED, HEARD]
    rendered = await renderer.predict(packed(*turn), answered(CALLED, [stop]), 1)
    assert rendered.mask_length == len(naive.prompt(turn)) - len(reported) - 1


async def test_no_tools_said_as_an_empty_list_is_learnt_too(ours, plain) -> None:
    """Llama's template writes more for an empty list than for no list."""
    naive = plain("llama3")
    reported = pack_tokens(naive.prompt([ASKED], []))
    renderer = Renderer(ours("llama3"), [], {})
    predicted = (await renderer.predict(packed(ASKED), None, 0)).predicted
    assert predicted.environment == pack_tokens(naive.prompt([ASKED], None))
    assert (await renderer.learn(predicted, reported)).environment == reported


async def test_a_prompt_that_nothing_explains_teaches_nothing(ours, plain) -> None:
    renderer = Renderer(ours("toy"), TOOLS, {})
    predicted = (await renderer.predict(packed(ASKED), None, 0)).predicted
    assert await renderer.learn(predicted, predicted.environment[:-1]) is predicted
    again = await renderer.predict(packed(ASKED), None, 0)
    assert again.predicted.environment == pack_tokens(plain("toy").prompt([ASKED], TOOLS))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}],
            "messages[1].content[1] is not text (image_url)",
        ),
        ([{"type": "input_audio"}], "messages[1].content[0] is not text (input_audio)"),
        ([{"text": "a"}], "messages[1].content[0] is not text (untyped)"),
        ([{"type": "x" * 50}], f"messages[1].content[0] is not text ({'x' * 40})"),
        ([5], "messages[1].content[0] is not text (int)"),
    ],
)
async def test_what_is_not_text_cannot_be_counted(ours, content, named) -> None:
    failed = await failure(Renderer(ours("toy"), TOOLS, {}), ASKED, {"role": "user", "content": content})
    assert failed.category is Category.VALIDATION
    assert named in failed.message


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise_exception('Roles must\n alternate!')", "Roles must alternate!"),
        ("message.content + 5", 'can only concatenate str (not "int") to str'),
        ("message.nothing.at_all", "'dict object' has no attribute 'nothing'"),
        ("raise_exception('x' * 5000)", "xxx"),
        ("messages.append(message)", "unsafe"),
        ("message.update(content='changed')", "unsafe"),
    ],
)
async def test_what_a_template_says_no_with_is_told(ours, body, reason) -> None:
    failed = await failure(Renderer(ours("toy", CHATML.replace("BODY", f"({body})")), [], {}), ASKED)
    assert failed.category is Category.TOKENIZER
    assert failed.message.startswith("the chat template of tokenizer 'toy' refuses the conversation: ")
    assert reason in failed.message
    assert len(failed.message) == 300 if reason == "xxx" else len(failed.message) < 300
    assert "\n" not in failed.message
    assert "/" not in failed.message


async def test_content_of_another_kind_is_the_templates_to_refuse(ours) -> None:
    failed = await failure(Renderer(ours("toy"), [], {}), {"role": "user", "content": 5})
    assert failed.category is Category.TOKENIZER


async def test_half_a_surrogate_pair_has_no_tokens(ours) -> None:
    failed = await failure(
        Renderer(ours("toy"), [], {}),
        {"role": "user", "content": "a"},
        json.loads('{"role": "user", "content": "\\ud800"}'),
    )
    assert (failed.category, "surrogate" in failed.message) == (Category.VALIDATION, True)


async def test_template_arguments_reach_the_template_and_only_that(ours, plain) -> None:
    renderer = Renderer(ours("qwen3"), [], {"enable_thinking": False})
    rendered = await renderer.predict(packed(ASKED), None, 0)
    assert rendered.predicted.environment == pack_tokens(plain("qwen3").prompt([ASKED], None, enable_thinking=False))
    for name in ("tokenize", "chat_template", "truncation", "messages", "self"):
        with pytest.raises(RolloutFailed, match=name):
            Renderer(ours("qwen3"), [], {name: True})


async def test_a_switch_may_change_what_closes_an_answer(ours, plain) -> None:
    template = CHATML.replace(
        "BODY ~ '<|im_end|>", "message.content ~ ('<|endoftext|>' if plain else '<|im_end|>') ~ '"
    )
    loaded, toy = ours("toy", template), plain("toy")
    more = f"\n<|im_start|>user\n{MORE['content']}STOP\n<|im_start|>assistant\n"
    for switches, stop in (({}, "<|im_end|>"), ({"plain": True}, "<|endoftext|>"), ({"plain": False}, "<|im_end|>")):
        rendered = await second_turn(Renderer(loaded, [], switches), SAID, toy.ids("Eight." + stop), MORE)
        assert rendered.exact
        assert rendered.predicted == Prediction(pack_tokens(), pack_tokens(toy.ids(more.replace("STOP", stop))))
    cut = await second_turn(Renderer(loaded, [], {"plain": True}), SAID, toy.ids("Eig"), MORE, finish_reason="length")
    assert cut.predicted.closing == pack_tokens(toy.ids("ht.<|endoftext|>"))
    for stop in ("<|im_end|>", "<|endoftext|>"):  # the tokenizer's own and the template's
        renderer = Renderer(loaded, [], {"plain": True})
        ended = await second_turn(renderer, SAID, toy.ids("Eight." + stop), MORE, finish_reason="length")
        assert ended.predicted.closing == pack_tokens()


def test_so_many_switches_are_remembered_and_no_more(ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.edge.tokens.tokenizer._SWITCHES", 8)
    loaded = ours("toy", "{{ messages | map(attribute='content') | join('<|im_end|>') }}")
    assert loaded.switched({}) is loaded
    assert loaded.switched({"b": 1, "a": 2}) is loaded.switched({"a": 2, "b": 1})
    known = [loaded.switched({"number": number}) for number in range(8)]
    assert len(set(map(id, known))) == 8
    assert all(loaded.switched({"number": number}) is each for number, each in enumerate(known))
    new = loaded.switched({"number": 8})
    assert loaded.switched({"number": 8}) is new
    assert loaded.switched({"number": 1}) is known[1]
    assert loaded.switched({"number": 0}) is not known[0]  # the least recently used one was dropped


async def test_calls_take_the_template_that_is_there_for_tools(ours) -> None:
    objects = (
        "(message.content ~ (message.tool_calls[0].function.arguments | items | list if message.tool_calls else ''))"
    )
    named = {"default": TEXTS, "tool_use": CHATML.replace("BODY", objects)}
    assert ours("toy", named).probed.preferred is Arguments.PARSED
    needs = ours("toy", "{{- tools[0] | tojson -}}" + TEXTS)
    assert needs.probed.refusal == ""
    assert (await second_turn(Renderer(needs, TOOLS, {}), SAID, [], MORE)).exact
    assert "refuses the conversation" in (await failure(Renderer(needs, [], {}), ASKED)).message


async def test_an_answer_that_is_left_open_has_no_sure_place(ours) -> None:
    """Completions of one word are not closed: the stop before this one belongs to the user message."""
    loaded = ours("toy", TEXTS.replace("~ '<|im_end|>", "~ ('' if message.content == 'Eight.' else '<|im_end|>') ~ '"))
    rendered = await second_turn(Renderer(loaded, [], {}), SAID, [7], MORE)
    assert not rendered.exact


async def test_an_answer_that_the_next_message_continues_has_no_sure_place(ours) -> None:
    """Of two completions in a row only the second one is closed, so the stop before the user message is not the first one's."""
    continued = "not loop.last and messages[loop.index].role == 'assistant'"
    closed = f"(' [/INST]' if message.role == 'user' else '' if {continued} else '<|im_end|>')"
    loaded = ours("toy", TEXTS.replace("~ '<|im_end|>", f"~ {closed} ~ '"))
    assert loaded.probed.short_form
    rendered = await second_turn(Renderer(loaded, [], {}), SAID, [7], {**SAID, "content": "Or nine."}, MORE)
    assert not rendered.exact


@pytest.mark.parametrize("family", ["mistral-small-3.2", "toy", "qwen3", "llama3"])
async def test_what_is_said_twice_in_the_same_words(ours, plain, family) -> None:
    """Mistral's template writes the tools before every message that equals the last user message."""
    naive, stop = plain(family), ours(family).probed.final.id
    messages = [ASKED, SAID, ASKED]
    rendered = await second_turn(Renderer(ours(family), TOOLS, {}), SAID, [stop], ASKED)
    whole = naive.prompt(messages, TOOLS)
    environment = list(rendered.predicted.environment)
    assert rendered.exact
    assert whole[len(whole) - len(environment) - 1 :] == [stop, *environment]


async def test_arguments_become_objects_only_for_a_template_that_takes_nothing_else(ours, plain) -> None:
    lists = (
        "(message.content ~ (message.tool_calls[0].function.arguments | items | list if message.tool_calls else ''))"
    )
    loaded = ours("toy", CHATML.replace("BODY", lists))
    assert loaded.probed.preferred is Arguments.PARSED
    assert ours("toy").probed.preferred is Arguments.RECEIVED
    rendered = await second_turn(Renderer(loaded, [], {}), CALLED, [], HEARD)
    text = "".join(plain("toy").tokenizer.decode(list(rendered.predicted.environment)))
    assert text == "\n<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n"
    shown = f"<|im_start|>assistant\n{[('a', 5), ('b', 3)]}<|im_end|>"
    assert rendered.mask_length == len(plain("toy").ids(shown.split("assistant\n")[1] + text))
    broken = {**CALLED, "tool_calls": [call("{not json")]}
    failed = await failure(Renderer(loaded, [], {}), ASKED, broken, HEARD)
    assert failed.category is Category.TOKENIZER


async def test_a_rollout_keeps_one_date(ours, plain) -> None:
    formats = "%Y-%m-%d|%d %b %Y|%A, %B %-d|%H:%M:%S|%j %y %a|100%%|%I %p|%%Y"
    template = "\n{%- set today = strftime_now('" + formats + "') -%}\n{{- today -}}" + TEXTS
    loaded = ours("toy", template)
    date = datetime(2026, 2, 3, 4, 5, 6)
    for content in ("a", "b"):
        text = f"{date.strftime(formats)}<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        messages = packed({"role": "user", "content": content})
        rendered = await Renderer(loaded, [], {}, date=date).predict(messages, None, 0)
        assert rendered.predicted.environment == pack_tokens(plain("toy").ids(text))


@pytest.mark.parametrize("start", ["", "\n", " \n", "text "])
async def test_dating_a_template_changes_nothing_else(ours, plain, start) -> None:
    template = (
        start
        + "{%- macro shout(text) -%}{{- text -}}{%- endmacro -%}\n"
        + TEXTS
        + "{{ shout(strftime_now('today')) }}\n"
    )
    rendered = await Renderer(ours("toy", template), [], {}).predict(packed(ASKED), None, 0)
    naive = plain("toy").prompt([ASKED], None, chat_template=template)
    assert rendered.predicted.environment == pack_tokens(naive)


@pytest.mark.parametrize("family", ["gpt-oss", "mistral-small-3.2"])
async def test_real_templates_with_a_date_are_dated_as_the_library_does(ours, plain, family) -> None:
    before = datetime.now().date()
    rendered = await Renderer(ours(family), TOOLS, {}).predict(packed(ASKED), None, 0)
    naive = plain(family).prompt([ASKED], TOOLS)
    if datetime.now().date() == before:
        assert rendered.predicted.environment == pack_tokens(naive)


class Watched:
    """A tokenizer that records the threads in which it works."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.threads: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    @property
    def backend_tokenizer(self) -> "Watched":
        watched = Watched(self._tokenizer.backend_tokenizer)
        watched.threads = self.threads
        return watched

    def encode_batch(self, *arguments: Any, **options: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        return self._tokenizer.encode_batch(*arguments, **options)

    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        return self._tokenizer.apply_chat_template(*arguments, **options)

    def encode(self, *arguments: Any, **options: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        return self._tokenizer.encode(*arguments, **options)


async def test_the_event_loop_neither_renders_nor_encodes(plain) -> None:
    """A turn renders the conversation twice, and encodes its new part."""
    watched = Watched(plain("toy").tokenizer)
    with ThreadPoolExecutor(1, thread_name_prefix="renders") as executor:
        loaded = LoadedTokenizer("toy", watched, executor)
        renderer = Renderer(loaded, TOOLS, {})
        for messages, last, asked, works in (
            ([ASKED], None, 0, 2),
            ([ASKED, CALLED, HEARD], answered(CALLED, [5]), 1, 3),
            ([ASKED, CALLED, HEARD, SAID, MORE], answered(SAID, [5]), 3, 3),
        ):
            watched.threads.clear()
            await renderer.predict(packed(*messages), last, asked)
            assert watched.threads == ["renders_0"] * works
        watched.threads.clear()
        await renderer.learn(Prediction(pack_tokens(), pack_tokens()), pack_tokens([1]))
        assert set(watched.threads) == {"renders_0"}
        watched.threads.clear()
        await renderer.learn(Prediction(pack_tokens(), pack_tokens()), pack_tokens([1]))
        assert watched.threads == []  # a prompt with calls has shown everything that can be learned


async def test_short_turns_of_a_trusted_template_render_on_the_event_loop(plain) -> None:
    watched, here = Watched(plain("toy").tokenizer), threading.current_thread().name
    with ThreadPoolExecutor(1, thread_name_prefix="renders") as executor:
        loaded = LoadedTokenizer("toy", watched, executor, is_trusted=True)
        renderer = Renderer(loaded, TOOLS, {})
        for messages, last, asked, seconds, where in (
            ([ASKED], None, 0, inf, "renders_0"),  # how long the template takes is not known yet
            ([ASKED, CALLED, HEARD], answered(CALLED, [5]), 1, 0.0, here),
            ([ASKED, CALLED, HEARD, SAID, MORE], answered(SAID, [5]), 3, 1.0, "renders_0"),
            ([ASKED, SAID, dict(MORE, content="word " * 500)], answered(SAID, [5]), 1, 0.0, "renders_0"),
            ([ASKED, *[SAID, MORE] * 32], answered(SAID, [5]), 63, 0.0, "renders_0"),
            # A turn may render the whole history, however little is new.
            ([dict(ASKED, content="word " * 100_000), SAID, MORE], answered(SAID, [5]), 1, 0.0, "renders_0"),
        ):
            watched.threads.clear()
            renderer._seconds = seconds
            await renderer.predict(packed(*messages), last, asked)
            assert set(watched.threads) == {where}


@pytest.mark.parametrize("family", ["toy", "qwen2.5", "qwen3", "llama3", "gpt-oss"])
async def test_a_turn_renders_the_conversation_once_and_a_short_one_once(ours, family, monkeypatch) -> None:
    loaded, sizes = ours(family), list[int]()
    text = loaded.text

    def noted(messages: Any, *arguments: Any, **options: Any) -> str:
        sizes.append(len(messages))
        return text(messages, *arguments, **options)

    monkeypatch.setattr(loaded, "text", noted)
    renderer, conversation = Renderer(loaded, TOOLS, {}), [ASKED]
    await renderer.predict(packed(*conversation), None, 0)
    for said, heard in ((CALLED, HEARD), (SAID, MORE), (SAID, dict(MORE, content=" Once more? \n"))):
        sizes.clear()
        before = len(conversation)
        conversation += [said, heard]
        rendered = await renderer.predict(packed(*conversation), answered(said, [5]), before)
        assert rendered.exact
        assert sizes == [len(conversation), 3]


async def test_a_first_prompt_is_encoded_once(ours, monkeypatch) -> None:
    loaded, grown = ours("qwen2.5"), []
    behind = loaded._growing._behind
    monkeypatch.setattr(loaded._growing, "_behind", lambda *given: grown.append(given) or behind(*given))
    first, second = [await Renderer(loaded, TOOLS, {}).predict(packed(MORE, ASKED), None, 0) for _ in range(2)]
    assert (first, len(grown)) == (second, 1)


async def test_what_was_saved_with_a_tokenizer_does_not_cut(ours, plain, executor, tmp_path) -> None:
    plain("toy").tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    saved = json.loads(path.read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    saved["padding"] = {
        "strategy": {"Fixed": 9000},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    path.write_text(json.dumps(saved))
    loaded = LoadedTokenizer("cut", AutoTokenizer.from_pretrained(tmp_path), executor)
    rendered = await Renderer(loaded, TOOLS, {}).predict(packed(ASKED), None, 0)
    assert rendered.predicted.environment == pack_tokens(plain("toy").prompt([ASKED], TOOLS))


async def test_a_tokenizer_written_in_python_is_used_by_one_thread_at_a_time(executor) -> None:
    stop = "<extra_id_0>"
    tokenizer = ByT5Tokenizer(chat_template=TEXTS.replace("<|im_end|>", stop))
    assert not tokenizer.is_fast
    loaded = LoadedTokenizer("bytes", tokenizer, executor)
    said = {"role": "assistant", "content": f"Eight.{stop}?"}
    together = await asyncio.gather(*(second_turn(Renderer(loaded, [], {}), said, [7], MORE) for _ in range(20)))
    environment = f"\n<|im_start|>user\n{MORE['content']}{stop}\n<|im_start|>assistant\n"
    expected = Prediction(
        *(pack_tokens(tokenizer.encode(text, add_special_tokens=False)) for text in (stop, environment))
    )
    for rendered in together:
        assert rendered.predicted == expected
        assert rendered.exact


async def test_a_tokenizer_written_in_python_is_never_used_twice_at_once(executor) -> None:
    class Slow(ByT5Tokenizer):
        users, most = 0, 0

        def encode(self, text: Any, **options: Any) -> Any:
            self.users += 1
            self.most = max(self.most, self.users)
            time.sleep(0.002)
            self.users -= 1
            return super().encode(text, **options)

    tokenizer = Slow(chat_template=TEXTS.replace("<|im_end|>", "<extra_id_0>"))
    loaded = LoadedTokenizer("bytes", tokenizer, executor)
    await asyncio.gather(*(Renderer(loaded, [], {}).predict(packed(ASKED), None, 0) for _ in range(20)))
    assert tokenizer.most == 1
