"""The judge's renderer on real tokenizers: its tokens of a completion are those that the model would generate."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from rollout_server.testing.checks.renderer import PlainRenderer, UnrenderableError
from rollout_server.testing.script import ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from transformers import AutoTokenizer

from tests.support.golden import CONFORMANCE
from tests.support.tokenizers import real_tokenizer

FINAL = {
    "conformance": "Eight.<|im_end|>",
    "qwen2.5": "Eight.<|im_end|>",
    "qwen3": "<think>\n\n</think>\n\nEight.<|im_end|>",
    "llama3": "Eight.<|eot_id|>",
    "mistral-small-3.2": "Eight.</s>",
    "deepseek-v3": "Eight.<｜end▁of▁sentence｜>",
    "phi-3.5": "Eight.<|end|>",
    "gpt-oss": "<|channel|>final<|message|>Eight.<|return|>",
}
CALLED = {
    "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a":5}}\n</tool_call><|im_end|>',
    "llama3": '{"name": "add", "parameters": {"a": 5}}<|eot_id|>',
    "mistral-small-3.2": '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 5}</s>',
}
QUESTION = [{"role": "user", "content": "What is 5 and 3?"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Callable[[str], Any]]:
    """Load each tokenizer once; some take seconds."""
    from_directory = cache(AutoTokenizer.from_pretrained)

    def load(name: str) -> Any:
        return from_directory(CONFORMANCE if name == "conformance" else real_tokenizer(name))

    yield load
    from_directory.cache_clear()


def spoken(tokenizer: Any, reply: ScriptedReply, **options: bool) -> str:
    renderer = PlainRenderer(tokenizer, **options)
    tools = [TOOL] if reply.tool_calls else None
    prompt = renderer.prompt(QUESTION, tools)
    ids = renderer.completion_ids(QUESTION, tools, prompt, reply)
    return str(tokenizer.decode(ids))


@pytest.mark.parametrize("name", FINAL)
def test_a_final_answer_ends_with_the_models_own_end_token(loaded, name: str) -> None:
    assert spoken(loaded(name), ScriptedReply(content="Eight.")) == FINAL[name]


@pytest.mark.parametrize("name", FINAL)
def test_a_cut_answer_has_no_end_token(loaded, name: str) -> None:
    text = spoken(loaded(name), ScriptedReply(content="Eight.", cut=True))
    assert text.endswith("Eight.")
    assert FINAL[name].startswith(text)


@pytest.mark.parametrize("name", CALLED)
def test_arguments_are_rendered_as_received_or_parsed(loaded, name: str) -> None:
    as_text = ScriptedReply(tool_calls=(tool_call("abcdefghi", "add", '{"a":5}'),))
    as_object = ScriptedReply(tool_calls=(tool_call("abcdefghi", "add", {"a": 5}),))
    parsed = spoken(loaded(name), as_text, parse_arguments=True)
    assert parsed == spoken(loaded(name), as_object)
    assert parsed != spoken(loaded(name), as_text)
    assert spoken(loaded(name), as_text if name == "qwen3" else as_object).endswith(CALLED[name])


def test_surplus_text_is_encoded_and_surplus_ids_are_taken_as_they_are() -> None:
    renderer = PlainRenderer.load(TOY_TOKENIZER)
    prompt = renderer.prompt(QUESTION, None)
    plain = renderer.completion_ids(QUESTION, None, prompt, ScriptedReply(content="8"))
    text = renderer.completion_ids(QUESTION, None, prompt, ScriptedReply(content="8", surplus="\n<|im_start|>"))
    assert text == plain + renderer.encode("\n<|im_start|>")
    assert renderer.completion_ids(QUESTION, None, prompt, ScriptedReply(content="8", surplus=(5, 6))) == [*plain, 5, 6]


def test_what_a_template_raises_is_one_error() -> None:
    renderer = PlainRenderer.load(TOY_TOKENIZER)
    with pytest.raises(UnrenderableError, match="renders text only"):
        renderer.prompt([{"role": "user", "content": [{"type": "image"}]}], None)
