"""How a renderer learns a trainer's way of rendering and counting: from reported prompts, and from a refused mask."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from rollout_server.core.ledger import pack_tokens
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.edge.tokens.rendering_form import Arguments, CountingMethod, RenderingForm, Tools, parsed

from tests.edge.tokens.conftest import TOOLS, Plain, answered, call, packed

ASKED = {"role": "user", "content": "What is 5 + 3?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [call('{"a": 5, "b": 3}')]}
HEARD = {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "add", "content": "8"}
AGAIN = {"role": "assistant", "content": "", "tool_calls": [call('{"a":8,"b":2}')]}
HEARD_AGAIN = {**HEARD, "content": "16"}


def objects(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with parsed arguments."""
    return [
        {**m, "tool_calls": [call(json.loads(c["function"]["arguments"])) for c in m["tool_calls"]]}
        if "tool_calls" in m
        else m
        for m in messages
    ]


def growth(naive: Plain, prompts: Sequence[Sequence[Mapping[str, Any]]], ids: Sequence[int], tools: Any) -> int:
    before, after = (len(naive.prompt(prompt, tools)) for prompt in prompts)
    return after - before - len(ids)


def test_others_are_all_others_the_nearest_first() -> None:
    form = RenderingForm()
    others = list(form.others())
    assert len(others) == len({form, *others}) - 1 == 11
    assert all((other.tools, other.arguments, other.measure).count(None) == 0 for other in others)
    changed = [
        sum((o.tools is not form.tools, o.arguments is not form.arguments, o.measure is not form.measure))
        for o in others
    ]
    assert changed == sorted(changed)


def test_calls_of_another_shape_stay_as_they_are() -> None:
    calls: list[Any] = [{"id": "x"}, {"id": "x", "function": "add"}, "no call", None, call('{"a": 5}'), call(None)]
    (message,) = packed({"role": "assistant", "content": "", "tool_calls": calls})
    fields: Any = parsed(message, 0, Arguments.PARSED)
    assert fields["tool_calls"] == [*calls[:4], call({"a": 5}), calls[5]]


def test_the_form_with_other_arguments_differs_in_nothing_else() -> None:
    for form in (RenderingForm(), *RenderingForm().others()):
        other = form.with_other_arguments()
        assert (other.tools, other.measure) == (form.tools, form.measure)
        assert {other.arguments, form.arguments} == set(Arguments)
        assert other.with_other_arguments() == form


@pytest.mark.parametrize("family", ["qwen2.5", "llama3", "mistral-small-3.2"])
@pytest.mark.parametrize("known", [True, False])
async def test_parsed_arguments_are_learnt_from_the_first_prompt_with_calls(ours, plain, family, known) -> None:
    """Also if no known form explained the earlier prompt."""
    naive, ids = plain(family), [ours(family).probed.calls.id]
    renderer = Renderer(ours(family), TOOLS, {})
    first, second = [ASKED], [ASKED, CALLED, HEARD]
    predicted = (await renderer.predict(packed(*first), None, 0)).predicted
    await renderer.learn(predicted, pack_tokens(naive.prompt(first, TOOLS) if known else [1, 2, 3]))
    rendered = await renderer.predict(packed(*second), answered(CALLED, ids), 1)
    reported = pack_tokens(naive.prompt(objects(second), TOOLS))
    assert await renderer.learn(rendered.predicted, reported) == rendered.predicted
    assert renderer.form == RenderingForm(arguments=Arguments.PARSED)
    third = [*second, AGAIN, HEARD_AGAIN]
    rendered = await renderer.predict(packed(*third), answered(AGAIN, ids), 3)
    assert rendered.mask_length == growth(naive, [objects(second), objects(third)], ids, TOOLS)
    assert rendered.mask_length != growth(naive, [second, third], ids, TOOLS)


@pytest.mark.parametrize("family", ["qwen2.5", "llama3", "mistral-small-3.2", "gpt-oss", "toy"])
async def test_counts_are_those_of_the_other_forms(ours, plain, family) -> None:
    naive, ids = plain(family), [ours(family).probed.calls.id]
    renderer = Renderer(ours(family), TOOLS, {})
    first, second = [ASKED], [ASKED, CALLED, HEARD]
    await renderer.predict(packed(*first), None, 0)
    turn = (packed(*second), answered(CALLED, ids), 1)
    rendered = await renderer.predict(*turn)
    counts = await renderer.counts(*turn)
    assert rendered.mask_length not in counts.values()
    known = {rendered.mask_length, *counts.values()}
    for tools in (TOOLS, None):
        for form in ([first, second], [first, objects(second)]):
            length = growth(naive, form, ids, tools)
            assert length in known or length < 0
    truth = len(rendered.predicted.closing) + len(rendered.predicted.environment)
    assert truth in known
    assert await renderer.predict(*turn) == rendered  # trying other forms changes nothing
    for form, length in counts.items():
        other = Renderer(ours(family), TOOLS, {}, form=form)
        assert (await other.predict(*turn)).mask_length == length


@pytest.mark.parametrize("measure", CountingMethod)
async def test_two_things_are_learnt_at_once_and_what_is_counted_stays(ours, plain, measure) -> None:
    toy, messages = plain("toy"), [ASKED, AGAIN, HEARD]
    for tools, reported in (
        (Tools.NONE, toy.prompt(objects(messages))),
        (Tools.TOLD, toy.prompt(objects(messages), TOOLS)),
    ):
        renderer = Renderer(ours("toy"), TOOLS, {}, form=RenderingForm(measure=measure))
        rendered = await renderer.predict(packed(*messages), answered(AGAIN, [5]), 1)
        await renderer.learn(rendered.predicted, pack_tokens(reported))
        assert renderer.form == RenderingForm(tools, Arguments.PARSED, measure)
    renderer = Renderer(ours("toy"), TOOLS, {}, form=RenderingForm(measure=measure))
    predicted = (await renderer.predict(packed(ASKED), None, 0)).predicted
    await renderer.learn(predicted, pack_tokens(toy.prompt([ASKED])))
    assert renderer.form == RenderingForm(tools=Tools.NONE, measure=measure)


async def test_calls_in_the_first_message_are_parsed_too(ours, plain) -> None:
    renderer = Renderer(ours("toy"), TOOLS, {})
    predicted = (await renderer.predict(packed(AGAIN, HEARD), None, 0)).predicted
    reported = pack_tokens(plain("toy").prompt(objects([AGAIN, HEARD]), TOOLS))
    assert (await renderer.learn(predicted, reported)).environment == reported != predicted.environment
    assert renderer.form == RenderingForm(arguments=Arguments.PARSED)


async def test_counts_that_no_mask_could_have_are_left_out(ours) -> None:
    renderer, messages = Renderer(ours("toy"), TOOLS, {}), packed(ASKED, AGAIN, HEARD)
    form = RenderingForm(arguments=Arguments.PARSED)
    length = (await renderer.counts(messages, answered(AGAIN, [5]), 1))[form]
    none_left = await renderer.counts(messages, answered(AGAIN, [5] * (1 + length)), 1)
    assert none_left[form] == 0
    below = await renderer.counts(messages, answered(AGAIN, [5] * (2 + length)), 1)
    assert form not in below
    assert all(count >= 0 for count in below.values())


async def test_a_trainer_that_keeps_tokens_counts_what_it_appends(ours, plain) -> None:
    """With a template that drops earlier thinking, the rendering shrinks while the appended tokens do not."""
    thought = {"role": "assistant", "content": "Eight.", "reasoning_content": "Five and three. " * 50}
    more = {"role": "user", "content": "And twice that?"}
    ids = plain("qwen3").ids("<think>\n" + thought["reasoning_content"] + "\n</think>\n\nEight.<|im_end|>")
    renderer = Renderer(ours("qwen3"), [], {}, form=RenderingForm(measure=CountingMethod.APPENDED))
    rendered = await renderer.predict(packed(ASKED, thought, more), answered(thought, ids), 1)
    assert rendered.mask_length == len(rendered.predicted.environment) > 0
    assert CountingMethod.APPENDED in {
        form.measure
        for form in await Renderer(ours("qwen3"), [], {}).counts(
            packed(ASKED, thought, more), answered(thought, ids), 1
        )
    }


async def test_an_adopted_form_is_kept(ours, plain) -> None:
    renderer = Renderer(ours("toy"), TOOLS, {})
    renderer.adopt(RenderingForm(tools=Tools.NONE))
    predicted = (await renderer.predict(packed(ASKED), None, 0)).predicted
    assert predicted.environment == pack_tokens(plain("toy").prompt([ASKED]))
    await renderer.learn(predicted, pack_tokens(plain("toy").prompt([ASKED], TOOLS)))
    assert renderer.form == RenderingForm(tools=Tools.NONE)


@pytest.mark.parametrize("form", [RenderingForm(tools=Tools.NONE), RenderingForm(arguments=Arguments.PARSED)])
async def test_what_was_rendered_in_another_form_is_forgotten(ours, form) -> None:
    """A form may be learned at any turn; the next one counts as if it had always been known."""
    turn = (packed(ASKED, CALLED, HEARD, AGAIN, HEARD_AGAIN), answered(AGAIN, [5]), 3)
    renderer = Renderer(ours("qwen2.5"), TOOLS, {})
    await renderer.predict(packed(ASKED, CALLED, HEARD), answered(CALLED, [5]), 1)
    renderer.adopt(form)
    assert await renderer.predict(*turn) == await Renderer(ours("qwen2.5"), TOOLS, {}, form=form).predict(*turn)


async def test_forms_that_the_template_refuses_are_passed_over(ours, plain) -> None:
    """A template that refuses an empty list of tools. The trainer renders parsed arguments, which are tried after that list."""
    refusing = "{%- if tools is not none and not tools -%}{{- raise_exception('No tools.') -}}{%- endif -%}"
    called = "(message.tool_calls[0].function.arguments if message.tool_calls else message.content)"
    each = "{%- for message in messages -%}{{- '<|im_start|>' ~ CALLED ~ '<|im_end|>' -}}{%- endfor -%}"
    template = (
        refusing
        + each.replace("CALLED", called)
        + "{%- if add_generation_prompt -%}{{- '<|im_start|>' -}}{%- endif -%}"
    )
    loaded, toy = ours("toy", template), plain("toy")
    renderer, turn = Renderer(loaded, TOOLS, {}), (packed(ASKED, CALLED, HEARD), answered(CALLED, [5]), 1)
    counts = await renderer.counts(*turn)
    assert Arguments.PARSED in {form.arguments for form in counts}
    assert Tools.EMPTY not in {form.tools for form in counts}
    rendered = await renderer.predict(*turn)
    reported = pack_tokens(toy.prompt(objects([ASKED, CALLED, HEARD]), TOOLS, chat_template=template))
    assert reported != pack_tokens(toy.prompt([ASKED, CALLED, HEARD], TOOLS, chat_template=template))
    assert await renderer.learn(rendered.predicted, reported) == rendered.predicted
    assert renderer.form == RenderingForm(arguments=Arguments.PARSED)
