"""Templates with one fault each: the verdict names it and shows its position."""

from typing import Any

import pytest
from rollout_server.edge.tokens.rendering_form import Arguments
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.tokencheck.boundary import Cause, Mask
from rollout_server.tokencheck.report import TemplateFault, TemplateReport
from rollout_server.tokencheck.template_traits import ArgumentsTrait, DateTrait

from tests.tokencheck.conftest import TOY_TEMPLATE, checked, spoilt

ANSWER = "{{- '<|im_start|>assistant\\n' -}}\n        {%- if thought -%}"
AFTER_ANSWER = "{%- endfor -%}\n        {{- '<|im_end|>\\n' -}}"
LOOP = "{%- for message in messages -%}"
PROMPT = "{%- if add_generation_prompt -%}\n    {{- '<|im_start|>assistant\\n' -}}"


def planted(*changes: tuple[str, str], **template_kwargs: Any) -> TemplateReport:
    return checked(TOY_TOKENIZER, spoilt(*changes), **template_kwargs)


def found(verdict: TemplateReport) -> set[Cause | TemplateFault]:
    return {finding.fault for finding in verdict.faults}


def test_history_that_is_dropped_is_refused_with_an_example() -> None:
    verdict = planted((LOOP, "{%- for message in messages[-1:] -%}"))
    assert (verdict.usable, verdict.stable) == (False, False)
    assert "drops earlier messages" in verdict.refusal


def test_history_that_is_dropped_after_a_while() -> None:
    verdict = planted((LOOP, "{%- for message in messages[-3:] -%}"))
    assert verdict.usable
    assert not verdict.stable
    assert Cause.HISTORY in found(verdict)


def test_a_count_of_messages() -> None:
    verdict = planted((LOOP, "{{- 'Messages: ' ~ messages | length ~ '\\n' -}}" + LOOP))
    assert found(verdict) == {Cause.HISTORY}
    (finding,) = verdict.faults
    assert finding.boundaries == sum(row.boundaries for row in verdict.rows if "huge" not in row.kind)
    assert finding.example is not None
    assert "Messages: " in finding.example.truth
    assert finding.example.truth != finding.example.rendered
    assert any("ROLLOUT_TEMPLATES" in text for text in verdict.advice)
    assert any("ROLLOUT_ON_DRIFT=fail" in text for text in verdict.advice)


def test_no_stop_token() -> None:
    verdict = planted((AFTER_ANSWER, "{%- endfor -%}{{- '\\n' -}}"))
    assert not verdict.stable
    assert verdict.stops.eos is not None
    assert found(verdict) == {TemplateFault.NO_STOP}


def test_no_special_token_at_all() -> None:
    verdict = checked(TOY_TOKENIZER, "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
                      "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")  # fmt: skip
    assert verdict.stops.final is None
    assert TemplateFault.NO_STOP in found(verdict)
    assert not verdict.stable


@pytest.mark.parametrize(
    ("format", "dated", "stable"), [("%d %B %Y", DateTrait.DAY, True), ("%H:%M:%S", DateTrait.TIME, False)]
)
def test_the_date(format: str, dated: DateTrait, stable: bool) -> None:
    verdict = planted((LOOP, "{{- 'Now: ' ~ strftime_now('" + format + "') -}}" + LOOP))
    assert (verdict.traits.dated, verdict.stable) == (dated, stable)
    assert (TemplateFault.TIME in found(verdict)) is not stable
    assert any("one date" in text for text in verdict.conditions) is stable


def test_content_that_is_trimmed() -> None:
    verdict = planted(("{{- content -}}", "{{- content | trim -}}"))
    assert found(verdict) == {Cause.SPACE}
    (finding,) = verdict.faults
    assert finding.example is not None
    assert finding.example.kind == "white space"


def test_tools_that_are_refused() -> None:
    verdict = planted((LOOP, "{%- if tools or messages | selectattr('role', 'equalto', 'tool') | list -%}"
                       "{{- raise_exception('No tools here, please.') -}}{%- endif -%}" + LOOP))  # fmt: skip
    assert verdict.stable
    assert any("the agent calls no tools" in text for text in verdict.conditions)
    refused = {row.kind: row.refused for row in verdict.rows if row.refused}
    assert refused["one call"] == ("No tools here, please.",)
    assert "no tools given" not in {kind for kind, row in refused.items() if len(row) > 1}
    assert set(verdict.traits.arguments.values()) == {ArgumentsTrait.REFUSED}


def test_arguments_that_are_encoded_twice() -> None:
    verdict = planted(("{{- function.arguments -}}", "{{- function.arguments | tojson -}}"))
    assert verdict.traits.arguments == {
        Arguments.RECEIVED: ArgumentsTrait.TWICE,
        Arguments.PARSED: ArgumentsTrait.VERBATIM,
    }
    assert (verdict.stable, verdict.form) == (True, Arguments.PARSED)
    assert any("objects" in text for text in verdict.conditions)
    assert any("parse arguments" in text for text in verdict.advice)


def test_arguments_that_must_be_objects() -> None:
    verdict = planted(("{{- function.arguments -}}", "{{- raise_exception('An object, please.') -}}"))
    assert verdict.traits.arguments[Arguments.RECEIVED] is ArgumentsTrait.REFUSED
    assert (verdict.stable, verdict.form) == (True, Arguments.PARSED)
    assert {tally.form for tally in verdict.tallies} == {Arguments.PARSED}


def test_thinking_that_is_dropped_unless_asked_for() -> None:
    dropped = ("{%- if thought -%}", "{%- if thought and (keep or loop.last) -%}")
    verdict = planted(dropped)
    assert found(verdict) == {Cause.THINKING}
    assert "keep=true" in verdict.advice[0]
    assert verdict.switches_tried["keep=true"] == 0 < verdict.switches_tried["keep=false"]
    assert any(tally.masks[Mask.LENGTH] + tally.masks[Mask.NEGATIVE] for tally in verdict.tallies)
    assert planted(dropped, keep=True).stable


def test_texts_of_special_tokens_are_no_switches() -> None:
    verdict = planted((LOOP, "{{- boi_token if brief else '' -}}" + LOOP))
    assert verdict.traits.switches == ("brief",)


def test_a_generation_prompt_that_is_not_kept() -> None:
    verdict = planted((PROMPT, PROMPT + "{{- '<think>\\n\\n</think>\\n\\n' -}}"))
    assert found(verdict) == {Cause.PROMPT}
    assert verdict.generation_prompt is not None
    assert "<think>" in verdict.generation_prompt.truth


def test_a_stop_that_is_replaced() -> None:
    verdict = planted((AFTER_ANSWER, "{%- endfor -%}{{- '<|endoftext|>' if loop.last else '<|im_end|>\\n' -}}"))
    assert found(verdict) == {Cause.SEPARATOR}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{%- if add_generation_prompt -%}", "{%- if true -%}"),  # a generation prompt is always written
        (AFTER_ANSWER, "{%- endfor -%}{{- '<|im_end|>\\n' if add_generation_prompt or not loop.last -}}"),
    ],
)
def test_what_a_template_does_without_a_generation_prompt_is_no_fault(before: str, after: str) -> None:
    verdict = planted((before, after))
    assert (verdict.stable, found(verdict)) == (True, set())


def test_arguments_in_both_forms_unstable_are_judged_as_models_write_them() -> None:
    verdict = planted(
        ("{{- function.arguments -}}", "{{- function.arguments | tojson -}}"),
        ("{{- call(tool_call.function or tool_call) -}}", "{{- call(tool_call.function) ~ ('' if ended else tool_call.id) -}}"),
        (LOOP, LOOP + "{%- set ended = loop.last -%}"),
    )  # fmt: skip
    assert verdict.form is Arguments.PARSED
    assert Cause.TWICE not in found(verdict)
    assert not verdict.stable


def test_tools_that_move() -> None:
    moved = "{%- if tools and loop.last -%}{{- '<tools>' ~ tools | tojson ~ '</tools>' -}}{%- endif -%}"
    verdict = planted(("{%- if tools or has_system -%}", "{%- if has_system -%}"), (LOOP, LOOP + moved))
    assert Cause.TOOLS in found(verdict)
    assert Cause.HISTORY not in found(verdict)


def test_tools_that_are_an_empty_list() -> None:
    verdict = planted((LOOP, "{%- if tools is not none and not tools -%}{{- 'No tools.' -}}{%- endif -%}" + LOOP))
    assert verdict.stable
    assert verdict.traits.empty_tools_differ
    assert any("empty list" in text for text in verdict.conditions)


def test_an_answer_that_the_next_message_ends() -> None:
    """As in GLM: no token closes a completion; the first token of the next message does."""
    others = [
        ("'<|im_start|>' ~ message.role", "'<|endoftext|>' ~ message.role"),
        ("<|im_start|>user", "<|endoftext|>user"),
    ]
    verdict = planted((AFTER_ANSWER, "{%- endfor -%}"), *others)
    assert verdict.stops.final is not None
    assert verdict.stops.final.text == "<|endoftext|>"
    assert found(verdict) == set()
    assert any("eos_token" in text for text in verdict.cautions)
    assert any("the first token of the next message" in text for text in verdict.cautions)


def test_tool_results_that_are_left_out() -> None:
    verdict = planted(("'\\n<tool_response>\\n' ~ text(message.content) ~ '\\n</tool_response>'", "''"))
    assert [f.text for f in verdict.faults if f.fault is TemplateFault.LEFT_OUT and "tool results" in f.text]


def test_a_template_that_is_none() -> None:
    verdict = checked(TOY_TOKENIZER, TOY_TEMPLATE + "\n{% if %}")
    assert not verdict.usable
    assert "refuses" in verdict.refusal
    assert f"(line {TOY_TEMPLATE.count(chr(10)) + 2} of the template)" in verdict.refusal
    assert found(verdict) == set()


def test_results_need_the_name_of_the_tool() -> None:
    """The conversations have the names that the server adds in token mode, and the report says who must add them elsewhere."""
    response = "'\\n<tool_response>\\n' ~"
    for name in ("message.name", "(raise_exception('name?') if not message.name else message.name)"):
        verdict = planted((response, f"{response} {name} ~"))
        assert verdict.stable
        assert not [text for text in verdict.cautions if "refuses" in text]
        assert any("name of the tool" in text for text in verdict.cautions)
    assert not any("name of the tool" in text for text in planted().cautions)
