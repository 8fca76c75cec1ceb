"""The toy tokenizer equals its build script's output, and has the properties that tests rely on."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.tokenizer.build import SPECIAL, TAGS, build
from transformers import AutoTokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def toy() -> Any:
    return AutoTokenizer.from_pretrained(TOY_TOKENIZER)


def shown(toy: Any, *messages: dict[str, Any], **options: Any) -> str:
    text: str = toy.apply_chat_template(list(messages), tokenize=False, **options)
    return text


def test_the_committed_files_are_what_the_script_builds(tmp_path) -> None:
    build(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (TOY_TOKENIZER / name).read_bytes(), name


def test_a_second_vocabulary_knows_bytes_only(tmp_path) -> None:
    build(tmp_path, trained_tokens=256)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"] == []
    with pytest.raises(ValueError, match="256"):
        build(tmp_path, trained_tokens=255)


def test_size_and_control_tokens(toy) -> None:
    assert 700 <= len(toy) <= 1000
    assert (toy.eos_token, toy.pad_token, toy.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    added = {token.content: token.special for token in toy.added_tokens_decoder.values()}
    assert added == dict.fromkeys(SPECIAL, True) | dict.fromkeys(TAGS, False)
    assert all(len(toy.encode(token)) == 1 for token in added)


@settings(deadline=None)
@given(text=TEXT)
def test_every_text_survives(toy, text) -> None:
    assert toy.decode(toy.encode(text, add_special_tokens=False)) == text


@settings(deadline=None)
@given(before=TEXT, after=TEXT, seam=st.sampled_from(["\n", *SPECIAL, *TAGS]))
def test_encoding_is_compositional_at_line_breaks_and_control_tokens(toy, before, after, seam) -> None:
    def ids(text: str) -> list[int]:
        return list(toy.encode(text, add_special_tokens=False))

    assert ids(before + seam + after) == ids(before + seam) + ids(after) == ids(before) + ids(seam) + ids(after)


def test_digits_stand_alone(toy) -> None:
    assert toy.convert_ids_to_tokens(toy.encode("2048")) == ["2", "0", "4", "8"]


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, ""), ("", ""), (" a\n", " a\n"), ([{"type": "text", "text": "a"}, "b", {"text": ""}], "ab"), ([], "")],
)
def test_content_in_all_its_forms(toy, content, text) -> None:
    for role in ("user", "assistant", "system", "function"):
        expected = f"<|im_start|>{role}\n{text}<|im_end|>\n"
        assert shown(toy, {"role": role, "content": content}) == expected
    assert shown(toy, {"role": "user"}) == "<|im_start|>user\n<|im_end|>\n"


def test_content_without_text_is_an_error(toy) -> None:
    with pytest.raises(Exception, match="renders text only"):
        shown(toy, {"role": "user", "content": [{"type": "image_url"}]})


def test_thinking_is_kept_for_every_assistant_message(toy) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "first"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "second"},
        {"role": "user", "content": "e"},
    ]
    text = shown(toy, *messages)
    assert "<|im_start|>assistant\n<think>\nfirst\n</think>\n\nb<|im_end|>\n" in text
    assert "<think>\nsecond\n</think>\n\nd" in text
    assert "<think>" not in shown(toy, {"role": "assistant", "content": "b", "reasoning_content": ""})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"a":5}', '{"a":5}'), ("not json", "not json"), ({"b": 1, "a": "ü"}, '{"b": 1, "a": "ü"}'), (None, "{}")],
)
def test_arguments_in_both_forms(toy, arguments, text) -> None:
    function = {"name": "add"} | ({} if arguments is None else {"arguments": arguments})
    message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    call = f'<tool_call>\n{{"name": "add", "arguments": {text}}}\n</tool_call>'
    assert shown(toy, message) == f"<|im_start|>assistant\n{call}<|im_end|>\n"
    two = {"role": "assistant", "content": "x", "tool_calls": message["tool_calls"] * 2}
    assert shown(toy, two) == f"<|im_start|>assistant\nx\n{call}\n{call}<|im_end|>\n"


def test_tool_messages_that_follow_each_other_are_one_group(toy) -> None:
    results = [{"role": "tool", "content": "8"}, {"role": "tool", "content": None}]
    assert shown(toy, {"role": "assistant"}, *results, add_generation_prompt=True) == (
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\n<tool_response>\n8\n</tool_response>\n"
        "<tool_response>\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_stand_in_the_system_message(toy) -> None:
    tool = {"type": "function", "function": {"name": "größe"}}
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}
    head = (
        "You may call these functions, each given as a JSON schema:\n"
        '{"type": "function", "function": {"name": "größe"}}\n'
        'A call is one JSON object with "name" and "arguments" between <tool_call> and </tool_call>.<|im_end|>\n'
    )
    tail = "<|im_start|>user\na<|im_end|>\n"
    assert shown(toy, system, user, tools=[tool]) == f"<|im_start|>system\nBe brief.\n\n{head}{tail}"
    assert shown(toy, user, tools=[tool]) == f"<|im_start|>system\n{head}{tail}"
    assert shown(toy, user) == tail
    assert shown(toy, user, system) == tail + "<|im_start|>system\nBe brief.<|im_end|>\n"


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
            optional={"content": st.none() | TEXT, "reasoning_content": TEXT},
        ),
        min_size=2,
        max_size=6,
    )
)
def test_the_template_only_appends(toy, messages) -> None:
    for end in range(1, len(messages)):
        if messages[end]["role"] == messages[end - 1]["role"] == "tool":
            continue  # a group of tool messages is closed by the next message
        assert shown(toy, *messages[: end + 1]).startswith(shown(toy, *messages[:end]))
