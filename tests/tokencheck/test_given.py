"""Conversations from a file, and errors for unreadable ones."""

from pathlib import Path

import pytest
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.tokencheck.conversation import TOOLS, CheckConversation, read_conversations

from tests.tokencheck.conftest import checked

ASKED = '{"role": "user", "content": "Hi\u2028there"}'
SAID = '{"role": "assistant", "content": "Hello."}'


def test_lines_are_objects_or_lists(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [f"[{ASKED}, {SAID}, {ASKED}]", "", f'{{"messages": [{ASKED}, {SAID}, {ASKED}], "tools": []}}']
    path.write_text("\n".join(lines), encoding="utf-8")
    one, other = read_conversations(path)
    assert (one.kind, one.tools) == ("yours, line 1", TOOLS)
    assert (other.kind, other.tools, len(other.messages)) == ("yours, line 3", (), 3)
    verdict = checked(TOY_TOKENIZER, more=[one, other])
    assert [row.kept for row in verdict.rows if row.kind.startswith("yours")] == [1, 1]


def test_what_cannot_be_rendered_is_refused_not_failed(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    picture = '{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}'
    path.write_text(f'[{picture}, {SAID}, {ASKED}]\n[{ASKED}, {SAID}, {{"role": "user", "content": "\\ud800"}}]')
    rows = [row for row in checked(TOY_TOKENIZER, more=read_conversations(path)).rows if row.kind.startswith("yours")]
    assert [row.boundaries for row in rows] == [0, 0]
    assert "not text (image_url)" in rows[0].refused[0]
    assert "surrogate" in rows[1].refused[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no conversation"),
        ("{", "line 1"),
        ("\n[]", "line 2: a list of messages is needed"),
        ('["Hi"]', r"messages\[0\] is not an object"),
        ('[{"content": "Hi"}]', r'messages\[0\]: "role" is missing'),
        (f'{{"messages": [{ASKED}], "tools": 5}}', "tools is not a list"),
        (f"[{ASKED}, {SAID}]", "no message follows an answer"),
    ],
)
def test_the_line_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=reason):
        read_conversations(path)


ODD = (
    [{"role": "assistant", "content": "I begin."}, {"role": "user", "content": "Do."}],
    [{"role": "user"}, {"role": "assistant", "content": None}, {"role": "assistant", "content": 5}, {"role": "critic"}],
    [{"role": "user", "content": []}, {"role": "assistant", "tool_calls": [{}, None, 5]}, {"role": "tool"}],
    [
        {"role": "user", "content": {}},
        {"role": "assistant", "tool_calls": "all", "reasoning_content": 7},
        {"role": "user", "content": "<think>"},
    ],
    [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"function": {"name": 1, "arguments": "{"}}]},
        {"role": "tool", "content": "<|im_end|>"},
    ],
)


def test_nothing_that_a_file_can_say_breaks_the_check() -> None:
    """Each one is compared, or refused with a reason."""
    verdict = checked(
        TOY_TOKENIZER, more=[CheckConversation(f"odd {number}", tuple(odd)) for number, odd in enumerate(ODD)]
    )
    rows = [row for row in verdict.rows if row.kind.startswith("odd")]
    assert len(rows) == len(ODD)
    assert all(row.boundaries or row.refused or row.uncut or row.left_out for row in rows)
