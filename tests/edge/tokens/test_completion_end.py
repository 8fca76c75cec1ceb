"""Completions that end with more than the stop token: nothing that the template writes behind them is written twice."""

from typing import Any

import pytest
from rollout_server.core.ledger import Prediction, pack_tokens
from rollout_server.edge.tokens.renderer import Rendered, Renderer
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.edge.tokens.conftest import answered, call, packed
from tests.edge.tokens.test_append import ASKED, CHATML, MORE, SAID
from tests.support.tokenizers import tokenizer_of

NEXT = f"\n<|im_start|>user\n{MORE['content']}"
TWICE = CHATML.replace("<|im_end|>\n", "<|im_end|><|endoftext|>\n")
AGAIN = CHATML.replace("<|im_end|>\n", "<|im_end|>\n<|im_end|>\n")
SPACED = CHATML.replace("<|im_end|>\n", "\n\n<|im_end|>\n")
ANSWER = CHATML.replace("<|im_end|>\n", "</answer><|im_end|>\n")
TWO_TOKENS = CHATML.replace("<|im_end|>\n", "<|endoftext|><|im_end|>\n")
THOUGHT = CHATML.replace(
    "~ message.content",
    "~ ('<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' if message.reasoning_content else '') ~ message.content",
)
DROPPED = THOUGHT.replace("if message.reasoning_content", "if message.reasoning_content and loop.last")
OPENED = "<|im_start|>assistant\n<think>\n"
LINES = (  # the token that begins the next message ends the completion, on a line of its own
    "{%- for message in messages -%}{{- '<|im_start|>' if message.role == 'user' else '<|endoftext|>' -}}"
    "{{- message.role ~ ': ' ~ message.content ~ '\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|endoftext|>assistant: ' -}}{%- endif -%}"
)
PLAIN = (
    "{%- for message in messages -%}{{- message.role ~ ': ' ~ message.content ~ '\n\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
)


async def rendered(loaded: Any, ids: Any, said: Any = SAID, finish_reason: str = "stop") -> Rendered:
    """The result in token mode, which equals that with the count."""
    turn = packed(ASKED, said, MORE), answered(said, ids, finish_reason), 1
    found, counted = await Renderer(loaded, [], {}).append(*turn), await Renderer(loaded, [], {}).predict(*turn)
    assert (found.predicted, found.exact) == (counted.predicted, counted.exact)
    return found


@pytest.mark.parametrize(
    ("template", "end"),
    [
        pytest.param(CHATML, "<|im_end|>", id="the stop token"),
        pytest.param(CHATML, "<|im_end|>\n", id="the stop token and what follows it"),
        pytest.param(CHATML, "<|im_end|>\n<|im_start|>", id="the beginning of the next message"),
        pytest.param(TWICE, "<|im_end|>", id="the first of two tokens"),
        pytest.param(TWICE, "<|im_end|><|endoftext|>", id="two tokens"),
        pytest.param(TWICE, "<|im_end|><|endoftext|>\n", id="two tokens and a line break"),
        pytest.param(AGAIN, "<|im_end|>", id="one of two equal tokens"),
        pytest.param(AGAIN, "<|im_end|>\n<|im_end|>", id="two equal tokens"),
        pytest.param(AGAIN, "<|im_end|>\n<|im_end|>\n", id="two equal tokens and a line break"),
    ],
)
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
async def test_what_a_completion_has_is_not_written_twice(ours, plain, template, end, finish_reason) -> None:
    loaded, naive = ours("toy", template), plain("toy")
    found = await rendered(loaded, naive.ids(f"Eight.{end}"), finish_reason=finish_reason)
    whole = loaded.text([ASKED, SAID, MORE], Renderer(loaded, [], {})._frame)
    behind = whole.partition(SAID["content"])[2]
    assert found.exact
    assert not found.predicted.closing
    assert naive.ids(f"Eight.{end}") + list(found.predicted.environment) == naive.ids(f"Eight.{behind}")


async def test_the_second_of_two_tokens_alone_is_not_written_twice(ours, plain) -> None:
    """An engine that stops at either of them."""
    found = await rendered(ours("toy", TWICE), plain("toy").ids("Eight.<|endoftext|>"))
    assert not found.predicted.closing
    assert plain("toy").tokenizer.decode(list(found.predicted.environment)).startswith(NEXT)


async def test_a_turn_that_the_model_made_up_is_not_taken_for_the_next_message(ours, plain) -> None:
    """It happens to be the same: the user still says it."""
    made_up = f"<|im_end|>{NEXT}<|im_end|>"
    said = {**SAID, "content": f"Eight.{made_up.removesuffix('<|im_end|>')}"}
    found = await rendered(ours("toy", CHATML), plain("toy").ids(f"Eight.{made_up}"), said)
    behind = pack_tokens(plain("toy").ids(f"{NEXT}<|im_end|>\n<|im_start|>assistant\n"))
    assert found.predicted == Prediction(pack_tokens(), behind)


async def test_a_stop_token_in_the_message_is_not_the_first_of_two_equal_ones(ours, plain) -> None:
    naive, said = plain("toy"), {**SAID, "content": "Eight.<|im_end|>\n"}
    found = await rendered(ours("toy", AGAIN), naive.ids("Eight.<|im_end|>\n<|im_end|>"), said)
    behind = naive.ids(f"\n<|im_end|>{NEXT}<|im_end|>\n<|im_end|>\n<|im_start|>assistant\n")
    assert found.predicted == Prediction(pack_tokens(), pack_tokens(behind))


@pytest.mark.parametrize("more", ["\n", "\n\n", "<|im_start|>"])
async def test_a_stop_token_in_the_message_is_not_its_end(ours, plain, more) -> None:
    """The completion was cut behind it. The template writes the message and then its own stop token."""
    naive, said = plain("toy"), {**SAID, "content": f"Eight.<|im_end|>{more}"}
    found = await rendered(ours("toy", CHATML), naive.ids(said["content"]), said, "length")
    assert found.exact
    behind = naive.ids(f"{NEXT}<|im_end|>\n<|im_start|>assistant\n")
    assert found.predicted == Prediction(pack_tokens(naive.ids("<|im_end|>")), pack_tokens(behind))


@pytest.mark.parametrize(
    "more", ["Nine.", "\n<|im_start|>user", f"{NEXT}", f"{NEXT} Or is it something else, and if so, what?"]
)
async def test_a_cut_completion_that_goes_on_behind_its_stop_token_is_reported(ours, plain, more) -> None:
    """The message ends at the stop token, so the prompt has text that the rendering does not have."""
    naive = plain("toy")
    found = await rendered(ours("toy", CHATML), naive.ids(f"Eight.<|im_end|>{more}"), finish_reason="length")
    assert not found.exact
    behind = pack_tokens(naive.ids(f"{NEXT}<|im_end|>\n<|im_start|>assistant\n"))
    assert found.predicted == Prediction(pack_tokens(naive.ids("<|im_end|>")), behind)


async def test_a_stop_token_that_the_template_writes_between_content_and_calls_is_no_end(ours, plain) -> None:
    """Only if there is content. The model spells the call in its own way, and was cut behind it."""
    calls = "{%- for call in message.tool_calls or [] -%}{{- call.function.arguments -}}{%- endfor -%}"
    head = "{{- '<|im_end|>\n<|im_start|>call\n' if message.tool_calls and message.content -}}"
    loaded, naive = (
        ours("toy", CHATML.replace(" ~ '<|im_end|>\n' -}}", " -}}" + head + calls + "{{- '<|im_end|>\n' -}}")),
        plain("toy"),
    )
    said = {"role": "assistant", "content": "Look.", "tool_calls": [call('{"a":  "What is it that I see?"}')]}
    turn = packed(ASKED, said, {"role": "tool", "content": "5", "tool_call_id": "a1b2c3d4e"})
    ids = naive.ids('Look.<|im_end|>\n<|im_start|>call\n{"a":"What is it that I see?"}')
    assert (await Renderer(loaded, [], {}).append(turn, answered(said, ids, "length"), 1)).exact


async def test_more_white_space_than_the_template_writes_is_reported(ours, plain) -> None:
    """It may be closed or may go on, so it is closed, but the turn is not called exact."""
    loaded, naive = ours("toy", CHATML), plain("toy")
    found = await rendered(loaded, naive.ids("Eight.<|im_end|>\n\n"))
    assert not found.exact
    behind = naive.ids(f"{NEXT}<|im_end|>\n<|im_start|>assistant\n")
    assert found.predicted == Prediction(pack_tokens(naive.ids("<|im_end|>")), pack_tokens(behind))


async def test_white_space_in_other_tokens_than_those_of_the_template_is_recognized(ours, plain) -> None:
    loaded, naive = ours("toy", CHATML.replace("<|im_end|>\n", "<|im_end|>\n\n")), plain("toy")
    found = await rendered(loaded, naive.ids("Eight.<|im_end|>") + naive.ids("\n"))
    assert found.exact
    text = naive.tokenizer.decode(list(found.predicted.environment))
    assert text == f"{NEXT}<|im_end|>\n\n<|im_start|>assistant\n"


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n\nuser:"])
async def test_a_text_that_stopped_the_completion_is_not_written_twice(ours, plain, end) -> None:
    """vLLM removes a stop text from the message, but returns its tokens."""
    loaded, naive = ours("toy", PLAIN), plain("toy")
    assert loaded.probed.final is None
    found = await rendered(loaded, naive.ids(f"Eight.{end}"))
    assert found.exact
    assert naive.tokenizer.decode(list(found.predicted.environment)) == (
        f"\n\nuser: {MORE['content']}\n\nassistant: ".removeprefix(end)
    )


async def test_a_text_that_is_part_of_the_message_stays(ours, plain) -> None:
    loaded, said = ours("toy", PLAIN), {**SAID, "content": "Eight.\n\n"}
    found = await rendered(loaded, plain("toy").ids("Eight.\n\n"), said)
    assert found.exact
    assert found.predicted.environment == pack_tokens(plain("toy").ids(f"\n\nuser: {MORE['content']}\n\nassistant: "))


@pytest.mark.parametrize("ids", ["Nine.\n\n", "Eight. \n", "\n"])
async def test_a_line_that_may_be_the_templates_is_reported(ours, plain, ids) -> None:
    """The tokens are not those of the message, so nothing says whose the line break is."""
    found = await rendered(ours("toy", PLAIN), plain("toy").ids(ids))
    assert not found.exact


async def test_a_special_token_that_ends_nothing_behind_the_stop_is_reported(executor, plain) -> None:
    """The model's configuration names its end tokens, and this one is none of them."""
    naive = plain("toy")
    loaded = LoadedTokenizer("toy", tokenizer_of(TOY_TOKENIZER, CHATML), executor, naive.ids("<|im_end|>"))
    found = await rendered(loaded, naive.ids("Eight.<|im_end|><|im_start|>"))
    assert not found.exact
    assert (await rendered(loaded, naive.ids("Eight.<|im_start|>"))).exact


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ("Eight.", "\n\n<|im_end|>"),
        ("Eight.\n", "\n<|im_end|>"),
        ("Eight.\n\n", "<|im_end|>"),
        ("Eight. ", "\n\n<|im_end|>"),
        ("Eight.\n\n\n", "<|im_end|>"),
        ("Nine.", "<|im_end|>"),
        ("", "Eight.\n\n<|im_end|>"),
    ],
)
async def test_white_space_before_the_stop_token_closes_a_completion_that_was_cut(
    ours, plain, written, missing
) -> None:
    """As far as the model has not written it, and only if its tokens end like the message."""
    naive = plain("toy")
    found = await rendered(ours("toy", SPACED), naive.ids(written), finish_reason="length")
    assert found.exact
    behind = naive.ids(f"{NEXT}\n\n<|im_end|>\n<|im_start|>assistant\n")
    assert found.predicted == Prediction(pack_tokens(naive.ids(missing)), pack_tokens(behind))


async def test_white_space_that_a_message_ends_with_is_not_the_templates(ours, plain) -> None:
    """The template writes all of its own behind the message, so the prompt has both."""
    naive, said = plain("toy"), {**SAID, "content": "Eight.\n"}
    found = await rendered(ours("toy", SPACED), naive.ids("Eight.\n"), said, "length")
    assert list(found.predicted.closing) == naive.ids("\n\n<|im_end|>")


@pytest.mark.parametrize("written", ["Eight.", "Eight.\n"])
async def test_a_completion_that_was_not_cut_gets_no_white_space(ours, plain, written) -> None:
    """The model has ended it, and the engine has removed the stop token."""
    naive = plain("toy")
    found = await rendered(ours("toy", SPACED), naive.ids(written))
    assert list(found.predicted.closing) == naive.ids("<|im_end|>")


@pytest.mark.parametrize(
    ("written", "finish_reason", "closing"),
    [
        ("Eight.", "length", "\n<|im_start|>"),
        ("Eight.\n", "length", "<|im_start|>"),
        ("Eight.\n<|im_start|>", "stop", ""),
        ("Eight.<|im_end|>", "stop", "\n<|im_start|>"),
        ("Eight.\n<|im_end|>", "stop", "<|im_start|>"),
    ],
)
async def test_white_space_before_a_token_that_begins_the_next_message(
    ours, plain, written, finish_reason, closing
) -> None:
    """Another end token says that the completion ends, but neither which message is next nor what is between the two."""
    loaded, naive = ours("toy", LINES), plain("toy")
    assert loaded.probed.final.opens_next
    found = await rendered(loaded, naive.ids(written), finish_reason=finish_reason)
    assert found.exact
    assert list(found.predicted.closing) == naive.ids(closing)


@pytest.mark.parametrize(
    ("template", "written", "missing"),
    [
        pytest.param(ANSWER, "Eight.", "</answer><|im_end|>", id="a text"),
        pytest.param(ANSWER, "Eight.</ans", "wer><|im_end|>", id="the rest of a text"),
        pytest.param(ANSWER, "Eight.</answer>", "<|im_end|>", id="nothing of a text"),
        pytest.param(ANSWER, "<think>So.</think>Eight.", "</answer><|im_end|>", id="behind reasoning that is dropped"),
        pytest.param(ANSWER, "<think>So.</think>Eight.</ans", "wer><|im_end|>", id="the rest, behind reasoning"),
        pytest.param(ANSWER, "Eight. \n", "</answer><|im_end|>", id="behind other white space"),
        pytest.param(TWO_TOKENS, "Eight.", "<|endoftext|><|im_end|>", id="a token"),
        pytest.param(SPACED.replace("<|im_end|>", "</a>\n<|im_end|>"), "Eight.\n", "\n</a>\n<|im_end|>", id="lines"),
    ],
)
async def test_text_before_the_stop_token_closes_a_completion_that_was_cut(
    ours, plain, template, written, missing
) -> None:
    """The next prompt is what the template renders, and what the model has written is not written twice."""
    naive, loaded = plain("toy"), ours("toy", template)
    found = await rendered(loaded, naive.ids(written), finish_reason="length")
    assert found.exact
    assert list(found.predicted.closing) == naive.ids(missing)
    whole = loaded.text([ASKED, SAID, MORE], Renderer(loaded, [], {})._frame)
    behind = whole.partition(SAID["content"])[2]
    shown = naive.tokenizer.decode([*found.predicted.closing, *found.predicted.environment])
    assert behind.endswith(shown)


@pytest.mark.parametrize("content", ["It is eight", "It is eight."])
async def test_text_behind_a_cut_completion_gets_no_space_from_its_tokenizer(ours, content) -> None:
    """Phi's puts one in front of the first word of a text, and has a token that spans the full stop and the tag."""
    template = ANSWER.replace("<|im_start|>", "<|user|>").replace("<|im_end|>", "<|end|>")
    loaded, said = ours("phi-3.5", template), {**SAID, "content": content}
    asked = loaded.encode(loaded.text([ASKED], Renderer(loaded, [], {})._frame))
    ids = loaded.encode(loaded.text([ASKED], Renderer(loaded, [], {})._frame) + content)[len(asked) :]
    found = await rendered(loaded, ids, said, "length")
    assert found.exact
    line = loaded.encode("\n")
    assert found.predicted.closing == loaded.encode("\n</answer><|end|>")[len(line) :]
    assert loaded.encode("</answer><|end|>") != found.predicted.closing


async def test_a_text_that_a_message_ends_with_is_not_the_templates(ours, plain) -> None:
    """The model has written the template's text, but it is in the message, so the template writes all of its own behind it."""
    naive, said = plain("toy"), {**SAID, "content": "Eight.</answer></answer>"}
    for written in ("", "<think>So.</think>"):
        found = await rendered(ours("toy", ANSWER), naive.ids(written + said["content"]), said, "length")
        assert found.exact
        assert list(found.predicted.closing) == naive.ids("</answer><|im_end|>")


@pytest.mark.parametrize("written", ["Eight.", "Eight.</ans"])
async def test_a_completion_that_was_not_cut_gets_no_text(ours, plain, written) -> None:
    found = await rendered(ours("toy", ANSWER), plain("toy").ids(written))
    assert found.exact
    assert list(found.predicted.closing) == plain("toy").ids("<|im_end|>")


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
async def test_a_completion_with_another_end_token_gets_no_text(executor, plain, end) -> None:
    """Even if it was cut right behind it."""
    naive = plain("toy")
    loaded = LoadedTokenizer("toy", tokenizer_of(TOY_TOKENIZER, ANSWER), executor, naive.ids("<|endoftext|>"))
    found = await rendered(loaded, naive.ids(f"Eight.{end}"), finish_reason="length")
    assert found.exact
    assert not found.predicted.closing


@pytest.mark.parametrize("written", ["Nine.", "t", "assistant", "<think>So."])
async def test_a_cut_completion_that_is_not_what_the_template_shows_is_reported(ours, plain, written) -> None:
    """Its tokens do not end like the message, so what they lack is unknown."""
    found = await rendered(ours("toy", ANSWER), plain("toy").ids(written), finish_reason="length")
    assert not found.exact
    assert list(found.predicted.closing) == plain("toy").ids("<|im_end|>")


@pytest.mark.parametrize(
    ("template", "written", "missing"),
    [
        (THOUGHT, "<think>\nSo.", "\n</think>\n\n<|im_end|>"),
        (THOUGHT, "<think>So.", "\n</think>\n\n<|im_end|>"),
        (THOUGHT, "<think>\nSo.\n</think>", "\n\n<|im_end|>"),
        (DROPPED, "<think>\nSo.", "<|im_end|>"),
        (DROPPED, "<think>\nSo.\n</think>", "<|im_end|>"),
        (DROPPED, "assistant", "<|im_end|>"),
        (THOUGHT.replace(OPENED.removesuffix("<think>\n"), OPENED), "So", ".\n</think>\n\n<|im_end|>"),
        (THOUGHT.replace(OPENED.removesuffix("<think>\n"), OPENED), "So.\n", "</think>\n\n<|im_end|>"),
        (DROPPED.replace(OPENED.removesuffix("<think>\n"), OPENED), "So.", "<|im_end|>"),
    ],
)
async def test_reasoning_that_was_cut_is_closed_if_the_template_keeps_it(
    ours, plain, template, written, missing
) -> None:
    """If the template drops the reasoning, it does not write its end either."""
    said = {"role": "assistant", "content": "", "reasoning_content": "So."}
    found = await rendered(ours("toy", template), plain("toy").ids(written), said, "length")
    assert found.exact
    assert list(found.predicted.closing) == plain("toy").ids(missing)


async def test_an_empty_completion_gets_all_that_the_template_writes_for_it(ours, plain) -> None:
    """Also without a prompt in front of it that the rendering has: then it gets what stands behind the empty content."""
    said = {**SAID, "content": ""}
    found = await rendered(ours("toy", ANSWER), [], said, "length")
    assert found.exact
    assert list(found.predicted.closing) == plain("toy").ids("</answer><|im_end|>")


CALLS = (
    "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content -}}"
    "{%- for call in message.tool_calls or [] -%}{{- '<tool_call>\n' ~ call.function.arguments ~ '\n</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


@pytest.mark.parametrize(
    ("written", "missing", "exact"),
    [
        ('<tool_call>\n{"a": 5}', "\n</tool_call><|im_end|>", True),
        ('<tool_call>\n{"a": 5}\n</tool_call>', "<|im_end|>", True),
        ('<tool_call>\n{"a":5}', "<|im_end|>", False),
        ('<tool_call>\n{"a":  5}\n</tool_call>', "<|im_end|>", True),
    ],
)
async def test_tool_calls_that_were_cut_are_closed_if_the_template_spells_them_like_the_model(
    ours, plain, written, missing, exact
) -> None:
    """Otherwise what they lack is unknown, unless they end like the rendering."""
    said = {"role": "assistant", "content": "", "tool_calls": [call('{"a": 5}')]}
    result = {"role": "tool", "content": "5", "tool_call_id": "a1b2c3d4e"}
    loaded, naive = ours("toy", CALLS), plain("toy")
    turn = packed(ASKED, said, result), answered(said, naive.ids(written), "length"), 1
    for found in (await Renderer(loaded, [], {}).append(*turn), await Renderer(loaded, [], {}).predict(*turn)):
        assert (list(found.predicted.closing), found.exact) == (naive.ids(missing), exact)


async def test_what_a_cut_completion_lacks_is_taken_from_the_whole_conversation(ours, plain) -> None:
    """The template numbers the answers. No comparison of earlier turns shows that, because their completions lacked nothing."""
    loaded, naive = ours("toy", ANSWER.replace("'</answer>", "'</answer ' ~ loop.index ~ '>")), plain("toy")
    messages, renderer = [ASKED], Renderer(loaded, [], {})
    for index in range(2, 20, 2):
        messages += [SAID, MORE]
        reason, ids = ("length", naive.ids("Eight.")) if index == 18 else ("stop", naive.ids("Eight.<|im_end|>"))
        found = await renderer.append(packed(*messages), answered(SAID, ids, reason), index - 1)
    assert list(found.predicted.closing) == naive.ids("</answer 18><|im_end|>")


@pytest.mark.parametrize(
    ("content", "written", "behind"),
    [
        ("", "", " \n\nuser: And twice that?\n\nassistant:"),
        ("Eight.", "", " Eight.\n\nuser: And twice that?\n\nassistant:"),
        ("Eight.", " Eight.", "\n\nuser: And twice that?\n\nassistant:"),
        ("Eight.\n", " Eight.", "\n\n\nuser: And twice that?\n\nassistant:"),
        ("Eight.\n", " Eight.\n", "\n\nuser: And twice that?\n\nassistant:"),
    ],
)
async def test_a_cut_completion_without_a_stop_token_gets_the_rest_of_the_rendering(
    ours, plain, content, written, behind
) -> None:
    """Also the space that the template writes in front of its content and the prompt has not."""
    loaded, naive = ours("toy", PLAIN.replace("'assistant: '", "'assistant:'")), plain("toy")
    found = await rendered(loaded, naive.ids(written), {**SAID, "content": content}, "length")
    assert found.exact
    assert not found.predicted.closing
    assert naive.tokenizer.decode(list(found.predicted.environment)) == behind


async def test_an_end_token_that_follows_later_is_reported(ours, plain) -> None:
    """No special token closes completions, but a header has the one with which this completion ends."""
    template = PLAIN.replace("message.role ~ ': '", "message.role ~ '<|im_end|>'").replace(
        "assistant: ", "assistant<|im_end|>"
    )
    loaded, naive = ours("toy", template), plain("toy")
    assert loaded.probed.final is None
    assert not (await rendered(loaded, naive.ids("Eight.<|im_end|>"))).exact
    assert (await rendered(loaded, naive.ids("Eight.\n\nuser<|im_end|>"))).exact
    assert (await rendered(loaded, naive.ids("Eight."))).exact


async def test_a_template_that_leaves_its_last_message_open_closes_the_others_with_text(ours, plain) -> None:
    """The text in front of the stop token is the same whoever speaks next, so it is no header."""
    end = "{{- '</answer><|im_end|>\n' if not loop.last or message.role == 'user' -}}"
    loaded, naive = ours("toy", CHATML.replace(" ~ '<|im_end|>\n' -}}", " -}}" + end)), plain("toy")
    assert loaded.probed.final is not None
    assert loaded.probed.final.text == "<|im_end|>"
    for written, closing in (("Eight.</answer><|im_end|>", ""), ("Eight.", "</answer><|im_end|>")):
        found = await rendered(loaded, naive.ids(written), finish_reason="length")
        assert (list(found.predicted.closing), found.exact) == (naive.ids(closing), True)


@pytest.mark.parametrize(
    ("end", "behind", "exact"),
    [("", "\n\n", True), ("\n", "\n", True), ("\n\n", "", True), (" ", "\n\n", False), ("\n\n\n", "\n\n", False)],
)
async def test_white_space_behind_another_token_is_not_taken_for_an_open_completion(
    ours, plain, end, behind, exact
) -> None:
    """The template closes completions of this conversation with another token than the probed one."""
    other = f"message.role == 'assistant' and messages[0].content == '{ASKED['content']}'"
    closed = f"{{{{- '<|endoftext|>\n\n' if {other} else '<|im_end|>\n' -}}}}"
    loaded = ours("toy", CHATML.replace(" ~ '<|im_end|>\n' -}}", " -}}" + closed))
    naive = plain("toy")
    assert loaded.probed.final is not None
    assert loaded.probed.final.text == "<|im_end|>"
    found = await rendered(loaded, naive.ids(f"Eight.<|endoftext|>{end}"))
    shown = naive.tokenizer.decode(list(found.predicted.environment))
    assert (found.exact, list(found.predicted.closing)) == (exact, [])
    assert shown == f"{behind}{NEXT.strip()}<|im_end|>\n<|im_start|>assistant\n"
