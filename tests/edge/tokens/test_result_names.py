"""Templates that print the name of the tool in a tool result, and results without one, as the server's own tools write them."""

from typing import Any

import pytest
from rollout_server.core.ledger import pack_tokens
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.edge.tokens.conftest import TOOLS, Plain, answered, call, packed
from tests.edge.tokens.test_append import Counting
from tests.support.tokenizers import tokenizer_of

ASKED = {"role": "user", "content": "What is 5 + 3?"}
RESULT = "{%- if message.role == 'tool' -%}{{- '<|im_start|>tool\n' -}}RESULT{{- message.content ~ '<|im_end|>\n' -}}"
CHATML = (
    "{%- for message in messages -%}"
    + RESULT
    + "{%- else -%}{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content -}}"
    "{%- for call in message.tool_calls or [] -%}{{- call.function.name ~ '(' ~ call.function.arguments ~ ')' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
NEEDED = {
    "refused": "{%- if not message.name -%}{{- raise_exception('name?') -}}{%- endif -%}{{- message.name ~ '\n' -}}",
    "joined": "{{- message.name + '\n' -}}",
    "printed": "{{- '{\"name\": \"' ~ message.name ~ '\"}' -}}",
    "got": "{{- '[' ~ message.get('name') ~ ']' -}}",
    "as JSON": "{{- (message.name or none) | tojson -}}",
}
CONTENT = {
    "not printed": "",
    "if it is there": "{{- 'name=' ~ message.name ~ ' ' if message.name -}}",
    "or something else": "{{- message.name or message.tool_call_id -}}",
    "found by the template": "{%- set ns = namespace(name='') -%}{%- for m in messages -%}{%- for call in m.tool_calls or [] -%}"
    "{%- if call.id == message.tool_call_id -%}{%- set ns.name = call.function.name -%}{%- endif -%}{%- endfor -%}{%- endfor -%}"
    "{{- ns.name -}}",
}


def template(result: str) -> str:
    return CHATML.replace("RESULT", result)


def called(*names: str, number: int = 0) -> dict[str, Any]:
    calls = [call("{}", name, f"c{number:04}{index:04}") for index, name in enumerate(names)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(number: int = 0, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": "8", "tool_call_id": f"c{number:04}{index:04}", **more}


@pytest.mark.parametrize("style", NEEDED)
async def test_the_name_is_that_of_the_call(ours, style) -> None:
    """The prompt equals the library's rendering of the same messages with the names, in each turn of a long rollout."""
    text = template(NEEDED[style])
    loaded, naive = ours("toy", text), Plain(tokenizer_of(TOY_TOKENIZER, text))
    assert loaded.probed.needs_names
    assert loaded.probed.short_form
    renderer, stop = Renderer(loaded, TOOLS, {}), pack_tokens(naive.ids("<|im_end|>"))
    messages, named = [ASKED], [ASKED]
    ids = (await renderer.append(packed(*messages), None, 0)).predicted.environment
    for number in range(20):
        completion, asked = called("add", f"sub{number}", number=number), len(messages)
        results = [result(number, 1), result(number), result(number, 1, name="mine")]
        messages += [completion, *results]
        named += [completion, {**results[0], "name": f"sub{number}"}, {**results[1], "name": "add"}, results[2]]
        sampled = pack_tokens(naive.ids(f"add({{}})sub{number}({{}})")) + stop
        rendered = await renderer.append(packed(*messages), answered(completion, sampled), asked)
        ids = ids + sampled + rendered.predicted.closing + rendered.predicted.environment
        assert list(ids) == naive.prompt(named, TOOLS)


@pytest.mark.parametrize("style", CONTENT)
async def test_a_template_that_is_content_without_a_name_gets_none(ours, style) -> None:
    text = template(CONTENT[style])
    loaded, naive = ours("toy", text), Plain(tokenizer_of(TOY_TOKENIZER, text))
    assert not loaded.probed.needs_names
    messages = [ASKED, called("add"), result()]
    sampled = naive.ids("add({})<|im_end|>")
    rendered = await Renderer(loaded, TOOLS, {}).append(packed(*messages), answered(messages[1], sampled), 1)
    whole = naive.prompt([ASKED], TOOLS) + sampled + list(rendered.predicted.environment)
    assert whole == naive.prompt(messages, TOOLS)


@pytest.mark.parametrize("style", ["not printed", *NEEDED])
async def test_a_call_without_content_has_an_empty_one_if_the_template_needs_it(ours, style) -> None:
    """As APIs write calls: their content is null. Qwen3's template refuses that."""
    text = template((NEEDED | CONTENT)[style]).replace("~ message.content -}}{%- for", "+ message.content -}}{%- for")
    loaded, naive = ours("toy", text), Plain(tokenizer_of(TOY_TOKENIZER, text))
    assert loaded.probed.needs_content
    assert not ours("toy", template(NEEDED["joined"])).probed.needs_content
    renderer, sampled = Renderer(loaded, TOOLS, {}), naive.ids("add({})<|im_end|>")
    messages, accepted, ids = [ASKED], [ASKED], naive.prompt([ASKED], TOOLS)
    for number, content in enumerate(({"content": None}, {}, {"content": None})):
        asked, empty = len(messages), called("add", number=number)
        completion = {"role": "assistant", **content, "tool_calls": empty["tool_calls"]}
        messages += [completion, result(number)]
        accepted += [empty, result(number, name="add")]
        rendered = await renderer.append(packed(*messages), answered(completion, pack_tokens(sampled)), asked)
        ids += [*sampled, *rendered.predicted.environment]
        assert ids == naive.prompt(accepted, TOOLS)


async def test_trainers_that_get_messages_render_them_without_a_name(ours) -> None:
    loaded = ours("toy", template(NEEDED["printed"]))
    naive = Plain(tokenizer_of(TOY_TOKENIZER, template(NEEDED["printed"])))
    messages = [ASKED, called("add"), result()]
    assert list((await Renderer(loaded, TOOLS, {}).predict(packed(*messages), None, 0)).predicted.environment) == (
        naive.prompt(messages, TOOLS)
    )
    refuses = Renderer(ours("toy", template(NEEDED["refused"])), TOOLS, {})
    with pytest.raises(RolloutFailed, match=r"name\?"):
        await refuses.predict(packed(*messages), None, 0)


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param([ASKED, called("add"), result(number=1)], id="a result of no call"),
        pytest.param([ASKED, called("add"), called("sub", number=1), result()], id="of an earlier call"),
        pytest.param(
            [
                ASKED,
                {**called("add"), "tool_calls": [call("{}", name, "c00000000") for name in ("add", "sub")]},
                result(),
            ],
            id="of two calls with one id",
        ),
        pytest.param([ASKED, called("add"), {**result(), "tool_call_id": None}], id="without an id"),
        pytest.param([ASKED, {**called(), "tool_calls": [None, {"id": "c00000000"}]}, result()], id="of no function"),
    ],
)
async def test_a_name_is_never_guessed(ours, odd) -> None:
    renderer = Renderer(ours("toy", template(NEEDED["refused"])), TOOLS, {})
    with pytest.raises(RolloutFailed, match=r"name\?|refuses"):
        await renderer.append(packed(*odd), None, 0)


async def test_a_fork_after_an_earlier_turn_takes_its_own_names(ours) -> None:
    loaded, naive = (
        ours("toy", template(NEEDED["joined"])),
        Plain(tokenizer_of(TOY_TOKENIZER, template(NEEDED["joined"]))),
    )
    renderer, stop = Renderer(loaded, TOOLS, {}), naive.ids("<|im_end|>")
    first = [ASKED, called("add"), result()]
    await renderer.append(packed(ASKED), None, 0)
    await renderer.append(packed(*first), answered(first[1], stop), 1)
    other = [ASKED, called("sub"), result()]
    for fork in (renderer.fork(earlier=True), renderer.fork()):
        found = await fork.append(packed(*other), answered(other[1], stop), 1)
        assert list(found.predicted.environment) == naive.ids(
            "\n<|im_start|>tool\nsub\n8<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_a_long_history_costs_no_more_with_names(executor) -> None:
    counting = Counting("toy", tokenizer_of(TOY_TOKENIZER, template(NEEDED["joined"])), executor)
    counting.rendered = []
    renderer, stop = Renderer(counting, TOOLS, {}), counting.encode("<|im_end|>")
    messages, whole = packed(ASKED), []
    await renderer.append(messages, None, 0)
    for turn in range(1, 40):
        counting.rendered.clear()
        asked = len(messages)
        messages += packed(called("add", number=turn), result(turn))
        await renderer.append(messages, answered(called("add", number=turn), stop), asked)
        whole += [turn] if max(counting.rendered) > 4 else []
    assert [turn for turn in whole if turn > 2] == [18, 34]
