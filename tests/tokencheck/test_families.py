"""Real tokenizers: the check finds their known properties."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rollout_server.edge.tokens.rendering_form import Arguments
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.tokencheck.boundary import Cause, Mask
from rollout_server.tokencheck.conversation import TOOLS, CheckConversation
from rollout_server.tokencheck.hard_conversations import hard_conversations
from rollout_server.tokencheck.model_output import Writing
from rollout_server.tokencheck.report import TemplateFault, TemplateReport, report_json
from rollout_server.tokencheck.simulate import Simulator
from rollout_server.tokencheck.template import Template
from rollout_server.tokencheck.template_traits import ArgumentsTrait, DateTrait, find_traits

from tests.support.tokenizers import real_tokenizer, tokenizer_of
from tests.tokencheck.conftest import checked

Verdicts = Callable[[str], TemplateReport]
FAMILIES = ("toy", "qwen2.5", "qwen3", "llama3", "deepseek-v3", "gpt-oss", "mistral-small-3.2", "phi-3.5")


def found(verdict: TemplateReport) -> set[Cause | TemplateFault]:
    return {finding.fault for finding in verdict.faults}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_verdict_is_whole(verdicts: Verdicts, name: str) -> None:
    verdict = verdicts(name)
    assert verdict.usable
    assert verdict.stable is not bool(verdict.faults)
    assert verdict.stops.final is not None
    # JSON cannot represent some numbers, so only the model's own spelling exists, which a template without calls lacks.
    assert {each.kind for each in hard_conversations(())} - {row.kind for row in verdict.rows} <= {"arguments, huge"}
    for row in verdict.rows:
        assert row.kept + sum(row.causes.values()) == row.boundaries == sum(row.masks.values())
    for tally in verdict.tallies:
        assert (tally.worst is None) is (tally.masks[Mask.RIGHT] == tally.boundaries)
    written = report_json(verdict)
    assert isinstance(written, dict)
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert written.keys() >= {"stable", "stops", "traits", "faults", "conditions", "advice", "tallies", "rows"}


def test_toy_is_stable_without_conditions(verdicts: Verdicts) -> None:
    verdict = verdicts("toy")
    assert (verdict.stable, verdict.conditions, verdict.form) == (True, (), Arguments.RECEIVED)
    assert {row.kind for row in verdict.rows if row.left_out or row.refused or row.uncut} == set()
    by_writing = {tally.writing: tally for tally in verdict.tallies if tally.form is Arguments.RECEIVED}
    assert by_writing[Writing.TEMPLATE].worst is None
    assert by_writing[Writing.SPELLING].worst is None  # the text is rendered as received
    assert by_writing[Writing.TOKENS].worst is not None
    parsed = next(t for t in verdict.tallies if (t.form, t.writing) == (Arguments.PARSED, Writing.SPELLING))
    assert parsed.worst is not None
    assert parsed.worst.cause is Cause.ARGUMENTS


def test_qwen_2_5_encodes_text_twice(verdicts: Verdicts) -> None:
    verdict = verdicts("qwen2.5")
    assert (verdict.stable, verdict.form) == (True, Arguments.PARSED)
    assert verdict.traits.arguments[Arguments.RECEIVED] is ArgumentsTrait.TWICE
    assert any("objects" in text and "encoded twice" in text for text in verdict.conditions)
    received = next(t for t in verdict.tallies if (t.form, t.writing) == (Arguments.RECEIVED, Writing.TEMPLATE))
    assert received.masks[Mask.TOKENS] > 0 < received.masks[Mask.LENGTH]


def test_qwen_3_drops_earlier_thinking(verdicts: Verdicts) -> None:
    verdict = verdicts("qwen3")
    assert found(verdict) == {Cause.THINKING}
    (finding,) = verdict.faults
    assert finding.example is not None
    assert "<think>" in finding.example.truth
    assert "<think>" not in finding.example.rendered
    assert any(tally.masks[Mask.NEGATIVE] for tally in verdict.tallies)
    assert set(verdict.switches_tried) == {"enable_thinking=true", "enable_thinking=false"}
    tools = next(row for row in verdict.rows if row.kind == "thinking, tools")
    assert tools.kept == tools.boundaries


def test_qwen_3_instruct_only_appends() -> None:
    template = real_tokenizer("qwen3/templates/qwen3_instruct_2507.jinja").read_text(encoding="utf-8")
    verdict = checked(real_tokenizer("qwen3"), template)
    assert (verdict.stable, found(verdict)) == (True, set())
    assert any("reasoning_content" in text for text in verdict.cautions)


def test_gpt_oss_ends_answers_in_three_ways(verdicts: Verdicts) -> None:
    verdict = verdicts("gpt-oss")
    stops = [stop.text for stop in (verdict.stops.final, verdict.stops.calls, verdict.stops.eos) if stop is not None]
    assert stops == ["<|end|>", "<|call|>", "<|return|>"]
    assert found(verdict) == {Cause.SEPARATOR, Cause.THINKING}
    assert verdict.traits.dated is DateTrait.DAY
    assert any("eos_token is <|return|>" in text for text in verdict.cautions)


def test_llama_3_trims_and_takes_one_call(verdicts: Verdicts) -> None:
    verdict = verdicts("llama3")
    assert found(verdict) == {Cause.SPACE, TemplateFault.LEFT_OUT}
    refused = {row.kind: row.refused for row in verdict.rows if row.refused}
    assert refused == {"parallel calls": ("This model only supports single tool-calls at once!",)}
    assert verdict.traits.empty_tools_differ


def test_mistral_moves_its_tools(verdicts: Verdicts) -> None:
    assert Cause.TOOLS in found(verdicts("mistral-small-3.2"))


def test_phi_3_5_knows_no_tools(verdicts: Verdicts) -> None:
    """It strips white space after its special tokens, which must not look like a fault."""
    verdict = verdicts("phi-3.5")
    assert found(verdict) == {TemplateFault.LEFT_OUT}
    assert set(verdict.traits.arguments.values()) == {ArgumentsTrait.LEFT_OUT}
    template = next(t for t in verdict.tallies if t.writing is Writing.TEMPLATE)
    assert template.masks[Mask.RIGHT] == template.boundaries > 0


@pytest.mark.parametrize("name", ["toy", "qwen2.5"])
def test_counts_are_those_of_plain_rendering(name: str) -> None:
    """The same counts, computed with the library alone."""
    tokenizer = tokenizer_of(TOY_TOKENIZER if name == "toy" else real_tokenizer(name))
    call: dict[str, Any] = {"id": "a1b2c3d4e", "type": "function"}
    call["function"] = {"name": "add", "arguments": '{"a":5,"b":3}'}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "add", "content": "It is 8.<|im_end|>"},
    ]

    def length(count: int) -> int:
        options: dict[str, Any] = {"tools": list(TOOLS), "add_generation_prompt": True, "return_dict": False}
        return len(tokenizer.apply_chat_template(messages[:count], **options))

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    answer = '<tool_call>\n{"name": "add", "arguments": {"a":5,"b":3}}\n</tool_call><|im_end|>'
    added = (
        "\n<|im_start|>user\n<tool_response>\nIt is 8.<|im_end|>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    with ThreadPoolExecutor(1) as executor:
        template = Template(LoadedTokenizer(name, tokenizer, executor), tokenizer.added_tokens_decoder)
    conversation = CheckConversation("mine", tuple(messages))
    simulator = Simulator(template, find_traits(template, tokenizer).natural)
    (played,) = simulator.simulate(conversation, [Arguments.RECEIVED], [Writing.SPELLING])
    (boundary,) = played.boundaries
    assert boundary.added == tokens(added)
    assert boundary.counted == length(3) - length(1) - tokens(answer)
    assert (boundary.divergence is None) is (name == "toy")
