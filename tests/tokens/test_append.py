"""The truth without the count: the same as with it, at a cost that does not grow with the history where the template allows."""

import copy
from typing import Any

import pytest
from rollout_server.core.ledger import Prediction, pack_tokens
from rollout_server.edge.tokens.loaded import LoadedTokenizer
from rollout_server.edge.tokens.render import Renderer
from rollout_server.runtime.port import Failed

from tests.tokens.conftest import FAMILIES, TOOLS, answered, call, packed

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
    assert await short.append(packed(*messages), None, 0) == (await whole.predict(packed(*messages), None, 0)).predicted
    for said, heard in rounds:
        asked = len(messages)
        messages += [said, heard]
        for ids, reason in (([loaded.probed.stop(calls=said is CALLED).id], "stop"), ([], "length"), (None, "stop")):
            turn = (packed(*messages), answered(said, ids, reason), asked)
            expected = await Renderer(loaded, TOOLS, {}).predict(*turn)
            assert expected.exact
            assert await short.append(*turn) == expected.predicted


class Counting:
    """Notes how many messages are rendered at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = copy.copy(tokenizer)
        self.rendered: list[int] = []
        rendered, render = self.rendered, tokenizer.apply_chat_template

        def counted(conversation: Any, **options: Any) -> Any:
            rendered.append(len(conversation))
            return render(conversation, **options)

        self.tokenizer.apply_chat_template = counted


@pytest.mark.parametrize(
    ("start", "rendered"), [([ASKED], 3), ([SYSTEM, ASKED], 4), ([DEVELOPER, ASKED], 4), ([ASKED, SYSTEM], 3)]
)
async def test_a_long_history_costs_no_more_than_a_short_one(plain, executor, start, rendered) -> None:
    counting = Counting(plain("toy").tokenizer)
    renderer = Renderer(LoadedTokenizer("toy", counting.tokenizer, executor), TOOLS, {})
    stop = plain("toy").ids("<|im_end|>")
    for rounds in (0, 1, 20):
        counting.rendered.clear()
        history = [*start, *[SAID, MORE] * rounds]
        await renderer.append(packed(*history, CALLED, HEARD), answered(CALLED, stop), len(history))
        assert counting.rendered == [rendered] * 2


async def test_a_template_that_refuses_the_short_form_is_rendered_in_full(ours, plain) -> None:
    refusing = "{%- if messages[-1].content == 'And twice that?' and messages[0].content == '?' -%}"
    template = refusing + "{{- raise_exception('A question mark.') -}}{%- endif -%}" + CHATML
    loaded, stop = ours("toy", template), plain("toy").ids("<|im_end|>")
    assert loaded.probed.mirrors
    appended = await Renderer(loaded, [], {}).append(packed(ASKED, SAID, MORE), answered(SAID, stop), 1)
    assert appended == Prediction(pack_tokens(), pack_tokens(plain("toy").ids(APPENDED)))


async def test_without_a_place_to_cut_nothing_is_appended(ours) -> None:
    loaded = ours("toy", "{{- messages | map(attribute='content') | join | length -}}" + CHATML)
    renderer = Renderer(loaded, [], {})
    assert await renderer.append(packed(ASKED, SAID, MORE), answered(SAID, [5]), 1) is None
    assert await renderer.append(packed(ASKED), None, 0) is not None


async def test_an_answer_with_calls_may_be_closed_by_another_token(ours, plain) -> None:
    said = "(message.content ~ (message.tool_calls[0].function.arguments ~ '<|endoftext|>' if message.tool_calls else END))"
    template = CHATML.replace("message.content ~ '<|im_end|>\n'", said.replace("END", "'<|im_end|>'") + " ~ '\n'")
    loaded, toy = ours("toy", template), plain("toy")
    assert loaded.probed.mirrors
    assert (loaded.probed.final.text, loaded.probed.calls.text) == ("<|im_end|>", "<|endoftext|>")
    heard = "\n<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n"
    for said, new, stop, text in ((CALLED, HEARD, "<|endoftext|>", heard), (SAID, MORE, "<|im_end|>", APPENDED)):
        renderer, turn = Renderer(loaded, [], {}), (packed(ASKED, said, new), answered(said, []), 1)
        expected = Prediction(pack_tokens(toy.ids(stop)), pack_tokens(toy.ids(text)))
        assert await renderer.append(*turn) == (await renderer.predict(*turn)).predicted == expected


async def test_what_is_not_text_is_named_by_its_place(ours) -> None:
    image = [{"type": "image_url"}]
    for place in (0, 3, 4):
        messages = [SYSTEM, ASKED, SAID, MORE, MORE]
        messages[place] = {**messages[place], "content": image}
        with pytest.raises(Failed, match=rf"messages\[{place}\]\.content\[0\] is not text"):
            await Renderer(ours("toy"), [], {}).append(packed(*messages), answered(SAID, [5]), 2)
