"""Environment tokens without the mask count.

They equal those with the count. Their cost does not depend on the history, if the template allows that.
"""

from typing import Any

import pytest
from rollout_server.core.ledger import Prediction, pack_tokens
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.runtime.errors import RolloutFailed

from tests.edge.tokens.conftest import TOOLS, answered, call, packed
from tests.support.tokenizers import FAMILIES

SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Be brief."}
ASKED = {"role": "user", "content": "What is 5 + 3?"}
SAID = {"role": "assistant", "content": "Eight."}
MORE = {"role": "user", "content": "And twice that?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [call('{"a": 5, "b": 3}')]}
HEARD = {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "add", "content": "8"}
CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
APPENDED = f"\n<|im_start|>user\n{MORE['content']}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", [[ASKED], [SYSTEM, ASKED], [DEVELOPER, ASKED], [ASKED, SYSTEM, SAID, ASKED]])
async def test_what_is_appended_is_the_truth(ours, plain, family, start) -> None:
    loaded, naive = ours(family), plain(family)
    messages = list(start)
    try:
        naive.prompt(start, TOOLS)
    except Exception as error:
        pytest.skip(f"the template refuses the conversation: {error}")
    rounds = [(SAID, MORE), (SAID, MORE)] if family == "phi-3.5" else [(CALLED, HEARD), (CALLED, HEARD), (SAID, MORE)]
    whole, short = Renderer(loaded, TOOLS, {}), Renderer(loaded, TOOLS, {})
    assert await short.append(packed(*messages), None, 0) == await whole.predict(packed(*messages), None, 0)
    for said, heard in rounds:
        asked = len(messages)
        messages += [said, heard]
        for ids, reason in (([loaded.probed.stop(calls=said is CALLED).id], "stop"), ([], "length"), (None, "stop")):
            turn = (packed(*messages), answered(said, ids, reason), asked)
            expected = await Renderer(loaded, TOOLS, {}).predict(*turn)
            assert expected.exact
            assert (await short.append(*turn)).predicted == expected.predicted


class Counting(LoadedTokenizer):
    """Record the number of messages per rendering."""

    rendered: list[int]

    def text(self, messages: Any, *arguments: Any, **options: Any) -> str:
        self.rendered.append(len(messages))
        return super().text(messages, *arguments, **options)


@pytest.mark.parametrize("start", [[ASKED], [SYSTEM, ASKED], [DEVELOPER, ASKED], [ASKED, SYSTEM]])
async def test_a_long_history_costs_no_more_than_a_short_one(plain, executor, start) -> None:
    """Only the first two turns after a completion and every sixteenth turn render the whole conversation."""
    counting = Counting("toy", plain("toy").tokenizer, executor)
    counting.rendered = []
    renderer = Renderer(counting, TOOLS, {})
    stop = plain("toy").ids("<|im_end|>")
    messages, whole = packed(*start), []
    await renderer.append(messages, None, 0)
    for turn in range(1, 40):
        counting.rendered.clear()
        asked = len(messages)
        messages += packed(CALLED, HEARD)
        rendered = await renderer.append(messages, answered(CALLED, stop), asked)
        assert not rendered.short_form_dropped
        if len(messages) in counting.rendered:
            whole.append(turn)
        else:
            assert max(counting.rendered) <= len(start) + 3
    assert [turn for turn in whole if turn > 2] == [18, 34]


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(
            "{%- if messages | length > 40 -%}{{- ' again' -}}{%- endif -%}", id="a count it cannot see at load"
        ),
        pytest.param("{%- if messages | length > 41 -%}{{- ' again' -}}{%- endif -%}", id="one that is met at first"),
        pytest.param(
            "{%- if '/brief' in (messages | map(attribute='content') | join) -%}{{- ' now' -}}{%- endif -%}",
            id="a switch",
        ),
    ],
)
async def test_a_short_form_that_differs_is_dropped_before_it_is_used(ours, plain, again) -> None:
    loaded, naive = (
        ours("toy", CHATML.replace("{{- '<|im_start|>assistant\n' -}}", "{{- '<|im_start|>assistant' -}}" + again)),
        plain("toy"),
    )
    assert loaded.probed.short_form
    renderer, dropped = Renderer(loaded, [], {}), []
    messages = packed(ASKED)
    await renderer.append(messages, None, 0)
    for turn in range(1, 30):
        asked = len(messages)
        more = {**MORE, "content": "Twice, /brief"} if turn == 10 else MORE
        messages += packed(SAID, more)
        last = answered(SAID, naive.ids("<|im_end|>"))
        rendered = await renderer.append(messages, last, asked)
        assert rendered.predicted == (await Renderer(loaded, [], {}).predict(messages, last, asked)).predicted
        dropped += [turn] if rendered.short_form_dropped else []
    assert len(dropped) == 1


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("first | length", id="its length"),
        pytest.param("first[:1]", id="its beginning"),
        pytest.param("'long' if first | length > 29 else 'short'", id="whether it is long"),
    ],
)
async def test_questions_that_resemble_each_other_prove_nothing(ours, plain, first) -> None:
    """The template shows something of the first question, which is at first equal to that of the last one."""
    shown = "{{- '<|im_start|>assistant' -}}{%- set first = messages[0].content -%}{{- " + first + " -}}"
    loaded = ours("toy", CHATML.replace("{{- '<|im_start|>assistant\n' -}}", shown))
    assert loaded.probed.short_form
    renderer, messages = Renderer(loaded, [], {}), packed({"role": "user", "content": "Hello"})
    await renderer.append(messages, None, 0)
    for content in ("Hello", "Hello", "Hello", "Another question, which is long", "More"):
        asked = len(messages)
        messages += packed(SAID, {"role": "user", "content": content})
        last = answered(SAID, plain("toy").ids("<|im_end|>"))
        found = await renderer.append(messages, last, asked)
        assert found.predicted == (await Renderer(loaded, [], {}).predict(messages, last, asked)).predicted


async def test_what_the_template_writes_again_is_named(ours, plain) -> None:
    """It writes results in front of the content of the completion that made the calls."""
    again = "{%- for message in messages -%}{%- set said = messages[loop.index0 - 1].content -%}" + (
        "{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' -}}"
        "{{- said ~ '<|im_end|>\n' if message.role == 'tool' and said -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    )
    loaded, naive = ours("toy", again), plain("toy")
    renderer, messages = Renderer(loaded, [], {}), packed(ASKED)
    for content in ("Let me look.", "", "8"):
        asked, said = len(messages), {**CALLED, "content": content}
        messages += packed(said, HEARD)
        turn = messages, answered(said, naive.ids("<|im_end|>")), asked
        for rendered in (await renderer.append(*turn), await Renderer(loaded, [], {}).predict(*turn)):
            assert rendered.repeated is bool(content)


async def test_what_the_template_leaves_out_is_named(ours, plain) -> None:
    silent = CHATML.replace("for message in messages", "for message in messages if message.role != 'system'")
    loaded, naive = ours("toy", silent), plain("toy")
    renderer = Renderer(loaded, [], {})
    await renderer.append(packed(ASKED), None, 0)
    turn = packed(ASKED, SAID, SYSTEM, MORE), answered(SAID, naive.ids("<|im_end|>")), 1
    for rendered in (await renderer.append(*turn), await Renderer(loaded, [], {}).predict(*turn)):
        assert list(rendered.unseen) == [2]
        assert rendered.predicted.environment == pack_tokens(naive.ids(APPENDED))


async def test_a_template_that_refuses_the_conversation_is_obeyed(ours, plain) -> None:
    """Two consecutive user messages, long ago, are refused, although the short form does not contain them."""
    strict = (
        "{%- for message in messages -%}"
        "{%- if message.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'user' -%}"
        "{{- raise_exception('Roles must alternate.') -}}{%- endif -%}{%- endfor -%}"
    )
    loaded, naive = ours("toy", strict + CHATML), plain("toy")
    turn = packed(ASKED, MORE, SAID, MORE), answered(SAID, naive.ids("<|im_end|>")), 2
    with pytest.raises(RolloutFailed, match="Roles must alternate"):
        await Renderer(loaded, [], {}).append(*turn)


@pytest.mark.parametrize("content", ["", None])
async def test_a_completion_that_the_template_does_not_close_is_named(ours, plain, content) -> None:
    """Seed-OSS's template writes nothing behind a completion without content."""
    template = CHATML.replace(
        "message.content ~ '<|im_end|>\n'", "(message.content ~ '<|im_end|>\n' if message.content else '')"
    )
    loaded, said = ours("toy", template), {**SAID, "content": content}
    turn = packed(ASKED, said, MORE), answered(said, plain("toy").ids("<|im_end|>")), 1
    with pytest.raises(
        RolloutFailed, match=r"closes completions with <\|im_end\|>, but not the last one, which has no"
    ):
        await Renderer(loaded, [], {}).append(*turn)


async def test_a_reminder_behind_the_answer_is_part_of_the_environment(ours, plain) -> None:
    """It ends with the same stop token that closes the completion."""
    reminder = "{{- '<|im_start|>system\nStay brief.<|im_end|>\n' if message.role == 'assistant' -}}{%- endfor -%}"
    loaded, naive = ours("toy", CHATML.replace("{%- endfor -%}", reminder)), plain("toy")
    turn = packed(ASKED, SAID, MORE), answered(SAID, naive.ids("<|im_end|>")), 1
    expected = pack_tokens(naive.ids("\n<|im_start|>system\nStay brief.<|im_end|>" + APPENDED))
    for rendered in (await Renderer(loaded, [], {}).append(*turn), await Renderer(loaded, [], {}).predict(*turn)):
        assert rendered.predicted == Prediction(pack_tokens(), expected)
        assert rendered.exact


async def test_a_message_that_the_usual_stop_does_not_announce(ours, plain) -> None:
    """GLM ends a completion with the first token of the next message, which need not be a user message."""
    template = (
        "{%- for message in messages -%}{{- '<|im_start|>' if message.role == 'user' "
        "else '<|endoftext|>' if message.role == 'system' "
        "else '<|im_end|>' -}}{{- message.content -}}{%- endfor -%}{{- '<|im_end|>' if add_generation_prompt -}}"
    )
    loaded, naive = ours("toy", template), plain("toy")
    assert loaded.probed.final is not None
    assert loaded.probed.final.text == "<|im_start|>"
    late, behind = {**SYSTEM, "content": "Be kind."}, "<|endoftext|>Be kind.<|im_end|>"
    for ids in ([5], naive.ids("<|im_start|>")):
        rendered = await Renderer(loaded, [], {}).append(packed(ASKED, SAID, late), answered(SAID, ids), 1)
        assert rendered.predicted == Prediction(pack_tokens(), pack_tokens(naive.ids(behind)))
    # A completion without ids is taken to have the token that ends it, if that token is known to end completions.
    heard = {"role": "tool", "tool_call_id": "c1", "content": "8"}
    for message, text in ((late, behind), (heard, "8<|im_end|>")):
        unknown = await Renderer(loaded, [], {}).append(packed(ASKED, SAID, message), answered(SAID, None), 1)
        assert unknown.predicted == Prediction(pack_tokens(), pack_tokens(naive.ids(text)))


async def test_nothing_replaces_the_token_that_names_the_role_of_the_next_message(ours, plain) -> None:
    """A completion of GLM may end with `<|endoftext|>` instead: the next message still begins with its own token."""
    template = (
        "{%- for message in messages -%}{{- {'user': '<|im_start|>', 'tool': '<|object_ref_start|>'}[message.role] "
        "if message.role in ('user', 'tool') else '<|box_start|>' -}}{{- message.content -}}{%- endfor -%}"
        "{{- '<|box_start|>' if add_generation_prompt -}}"
    )
    loaded, naive = ours("qwen2.5", template), plain("qwen2.5")
    assert loaded.probed.final is not None
    assert loaded.probed.final.opens_next
    opening, behind = (pack_tokens(naive.ids(text)) for text in ("<|im_start|>", f"{MORE['content']}<|box_start|>"))
    for end, closing in (("<|im_start|>", pack_tokens()), ("<|im_end|>", opening), ("<|endoftext|>", opening)):
        last = answered(SAID, naive.ids(f"8{end}"))
        rendered = await Renderer(loaded, [], {}).append(packed(ASKED, SAID, MORE), last, 1)
        assert rendered.predicted == Prediction(closing, behind), end


async def test_what_the_template_leaves_out_is_named_behind_a_short_history_too(ours, plain) -> None:
    silent = CHATML.replace("for message in messages", "for message in messages if message.role != 'system'")
    loaded, naive = ours("toy", silent), plain("toy")
    renderer, messages = Renderer(loaded, [], {}), packed(ASKED)
    for _ in range(4):
        asked = len(messages)
        messages += packed(SAID, SYSTEM, MORE)
        rendered = await renderer.append(messages, answered(SAID, naive.ids("<|im_end|>")), asked)
        assert list(rendered.unseen) == [asked + 1]


async def test_a_template_that_repeats_the_question_which_a_short_history_lacks(ours, plain) -> None:
    """The filler text in place of the user message appears in no prompt, and does not disable the short form."""
    again = (
        "{{- '<|im_start|>assistant\n' -}}{%- for message in messages if message.role == 'user' -%}"
        "{{- message.content if loop.first -}}{%- endfor -%}"
    )
    loaded, naive = ours("toy", CHATML.replace("{{- '<|im_start|>assistant\n' -}}", again)), plain("toy")
    assert loaded.probed.short_form
    turn = packed(SYSTEM, SAID, MORE), answered(SAID, naive.ids("<|im_end|>")), 1
    rendered = await Renderer(loaded, [], {}).append(*turn)
    assert rendered.predicted.environment == pack_tokens(naive.ids(APPENDED + MORE["content"]))
    assert not rendered.short_form_dropped


async def test_a_fork_proves_its_short_form_on_its_own(ours, plain) -> None:
    brief = "{%- if '/brief' in (messages | map(attribute='content') | join) -%}{{- ' now' -}}{%- endif -%}"
    loaded = ours("toy", CHATML.replace("{{- '<|im_start|>assistant\n' -}}", "{{- '<|im_start|>assistant' -}}" + brief))
    stop = plain("toy").ids("<|im_end|>")
    renderer, messages = Renderer(loaded, [], {}), packed(ASKED)
    for turn in range(5):
        asked = len(messages)
        messages += packed(SAID, {**MORE, "content": "Twice, /brief"} if turn == 2 else MORE)
        last, each = answered(SAID, stop), ([renderer] if turn < 4 else [renderer.fork(), renderer])
        found = [(await renderer.append(messages, last, asked)).short_form_dropped for renderer in each]
    assert found == [True, True]


async def test_a_line_that_the_model_and_the_template_may_both_end_is_reported(ours, plain) -> None:
    """No special token closes the completion, and its tokens are not those of the message: whose line break it is, is unknown."""
    bare = (
        "{%- for message in messages -%}{{- message.role ~ ': ' ~ message.content ~ '\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
    )
    loaded, naive = ours("toy", bare), plain("toy")
    assert loaded.probed.final is None
    for last, exact in (([5], True), (naive.ids("\n"), False)):
        rendered = await Renderer(loaded, [], {}).append(packed(ASKED, SAID, MORE), answered(SAID, last), 1)
        assert rendered.exact is exact
        assert rendered.predicted.environment == pack_tokens(naive.ids(f"\nuser: {MORE['content']}\nassistant: "))
