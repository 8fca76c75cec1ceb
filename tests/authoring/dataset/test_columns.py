"""Which columns are taken: rows as verifiers, TRL and verl have them, and `--column`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.dataset import DatasetOptions, column_names, read_dataset

from tests.authoring.dataset.test_formats import json_lines, parquet
from tests.support.datasets import read_rows

QUESTION = [{"role": "user", "content": "What is 1 plus 1?"}]
SYSTEM = {"role": "system", "content": "Be brief."}
VERL = {
    "data_source": "gsm8k",
    "prompt": QUESTION,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 3},
}
SHAPES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], str]] = {
    "verifiers_question": (
        {"question": "What is 1 plus 1?", "answer": "2", "info": '{"level": 1}', "task": "sum"},
        QUESTION,
        {"answer": "2", "info": {"level": 1}, "task": "sum", "ground_truth": "2"},
        "prompt from 'question', ground_truth from 'answer'",
    ),
    "verifiers_prompt": (
        {"prompt": [SYSTEM, *QUESTION], "question": "?", "answer": "2", "info": {"level": 1}},
        [SYSTEM, *QUESTION],
        {"question": "?", "answer": "2", "info": {"level": 1}, "ground_truth": "2"},
        "prompt from 'prompt', ground_truth from 'answer'",
    ),
    "trl": (
        {"prompt": "What is 1 plus 1?", "completion": " 2"},
        QUESTION,
        {"completion": " 2"},
        "prompt from 'prompt', no ground truth",
    ),
    "trl_conversations": (
        {"prompt": QUESTION, "completion": [{"role": "assistant", "content": "2"}], "ground_truth": 2},
        QUESTION,
        {"completion": [{"role": "assistant", "content": "2"}], "ground_truth": 2},
        "prompt from 'prompt', ground_truth from 'ground_truth'",
    ),
    "verl": (
        VERL,
        QUESTION,
        {**{key: value for key, value in VERL.items() if key != "prompt"}, "ground_truth": "2"},
        "prompt from 'prompt', ground_truth from 'reward_model.ground_truth'",
    ),
    "messages": (
        {"messages": QUESTION, "system_prompt": "Be brief."},
        [SYSTEM, *QUESTION],
        {},
        "prompt from 'messages', system_prompt from 'system_prompt', no ground truth",
    ),
    "its_own": (
        {"user_prompt": "What is 1 plus 1?", "prompt": "template", "image": "python:3.11"},
        QUESTION,
        {"prompt": "template", "image": "python:3.11"},
        "prompt from 'user_prompt', no ground truth",
    ),
    "json_is_text": (
        {"prompt": '[{"role": "user"}]'},
        [{"role": "user", "content": '[{"role": "user"}]'}],
        {},
        "prompt from 'prompt' (as text; if it is a list of messages as JSON, use --column messages=prompt), no ground truth",
    ),
}


@pytest.mark.parametrize("write", [json_lines, parquet], ids=["d.jsonl", "d.parquet"])
@pytest.mark.parametrize(("fields", "messages", "metadata", "described"), SHAPES.values(), ids=SHAPES.keys())
def test_columns_are_found(
    tmp_path: Path, write: Any, fields: dict[str, Any], messages: object, metadata: object, described: str
) -> None:
    name = "d.jsonl" if write is json_lines else "d.parquet"
    dataset = read_dataset(write(tmp_path / name, [fields, fields]))
    assert [row.messages for row in dataset.rows] == [messages, messages]
    assert dataset.rows[0].metadata == metadata
    assert dataset.description().endswith(f"{name}: 2 rows; {described}")


def options(*pairs: str, **others: Any) -> DatasetOptions:
    return DatasetOptions(column_names(pairs), **others)


def test_columns_are_mapped(tmp_path: Path) -> None:
    row = {"a.b": "What is 1 plus 1?", "meta": {"solution": [2], "style": {"system": "Be brief."}}, "ground_truth": 9}
    path = json_lines(tmp_path / "d.jsonl", [row])
    mapped = options("prompt=a.b", "system_prompt=meta.style.system", "ground_truth=ground_truth")
    [found] = read_dataset(path, mapped).rows
    assert found.messages == [SYSTEM, *QUESTION]
    assert found.metadata == {"meta": row["meta"], "ground_truth": 9}
    [found] = read_dataset(path, options("user_prompt=a.b", "ground_truth=")).rows
    assert found.metadata == {"meta": row["meta"], "ground_truth": 9}
    with pytest.raises(AuthorError, match=r"d\.jsonl:1: the ground truth is in meta\.solution, and there is a column"):
        read_dataset(path, options("prompt=a.b", "ground_truth=meta.solution"))


def test_json_texts_are_messages_if_they_are_mapped_as_messages(tmp_path: Path) -> None:
    texts = ['[{"role": "user", "content": "What is 1 plus 1?"}]', "[", '{"role": "user"}', "[" * 9999]
    path = json_lines(tmp_path / "d.jsonl", [{"chat": texts[0], "answer": 1}])
    [row] = read_dataset(path, options("messages=chat")).rows
    assert row.messages == QUESTION
    for text in texts[1:]:
        path = json_lines(tmp_path / "wrong.jsonl", [{"chat": text}])
        with pytest.raises(AuthorError, match=r"wrong\.jsonl:1: chat "):
            read_dataset(path, options("messages=chat"))


def test_texts_of_the_column_messages_are_parsed_if_the_first_one_is_a_list_of_messages(tmp_path: Path) -> None:
    chat, others = '[{"role": "user", "content": "What is 1 plus 1?"}]', ["[1, 2] is a list?", "[]", "[" * 9999]
    path = json_lines(tmp_path / "d.jsonl", [{"messages": chat}])
    assert [row.messages for row in read_dataset(path, options()).rows] == [QUESTION]
    [row] = read_dataset(path, options("prompt=messages")).rows
    assert row.messages == [{"role": "user", "content": chat}]
    for other in others:
        path = json_lines(tmp_path / "texts.jsonl", [{"messages": other}, {"messages": chat}])
        assert read_dataset(path, options()).rows[1].messages == [{"role": "user", "content": chat}]


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (["user_prompt"], "must be COLUMN=NAME"),
        (["question=q"], "COLUMN one of prompt, user_prompt, messages, images, system_prompt, ground_truth"),
        (["prompt=a", "messages=b"], "the prompt is mapped twice"),
        (["ground_truth=a", "ground_truth=b"], "the ground_truth is mapped twice"),
        (["prompt="], "every row needs a prompt"),
    ],
)
def test_wrong_pairs_are_refused(pairs: list[str], said: str) -> None:
    with pytest.raises(AuthorError, match=said):
        column_names(pairs)


@pytest.mark.parametrize(
    ("rows", "pairs", "said"),
    [
        (
            [{"text": "?"}],
            [],
            r":1: there is no prompt: no column user_prompt, prompt, .* \(columns: text\); use --column",
        ),
        ([{"prompt": "?"}], ["images=pictures"], r":1: --column images=pictures: the row has no such column"),
        ([{"prompt": "?"}], ["ground_truth=prompt.x"], r":1: --column ground_truth=prompt\.x: the row has no such"),
        ([{"prompt": "?"}, {"question": "?"}], [], r":3: the column prompt is missing \(columns: question\)"),
        (
            [{"prompt": "?", "answer": 1}, {"prompt": "?"}],
            [],
            r":3: the column answer is missing .* as null for no value",
        ),
        ([{"prompt": "?", "system_prompt": 5}], [], r":1: system_prompt must be a text, not int"),
        ([{"prompt": [SYSTEM, *QUESTION], "system_prompt": "x"}], [], r":1: prompt begins with a system message, and"),
    ],
)
def test_rows_without_the_columns_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], pairs: list[str], said: str
) -> None:
    with pytest.raises(AuthorError, match=r"d\.jsonl" + said):
        read_dataset(json_lines(tmp_path / "d.jsonl", rows), options(*pairs))


def test_a_system_prompt_replaces_that_of_the_rows(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "developer", "content": "Be long."}, *QUESTION]}, {"prompt": QUESTION}]
    path = json_lines(tmp_path / "d.jsonl", rows)
    found = read_dataset(path, DatasetOptions(system_prompt="Be brief."))
    assert [row.messages for row in found.rows] == [[SYSTEM, *QUESTION]] * 2
    assert found.description().endswith("prompt from 'prompt', no ground truth, system_prompt from --system-prompt")
    found = read_dataset(path, DatasetOptions(system_prompt=""))
    assert [row.messages for row in found.rows] == [QUESTION] * 2
    assert found.description().endswith("prompt from 'prompt', no ground truth, no system prompt")
    only = json_lines(tmp_path / "only.jsonl", [{"prompt": [SYSTEM]}])
    with pytest.raises(AuthorError, match=r"only\.jsonl:1: prompt has only a system message"):
        read_dataset(only, DatasetOptions(system_prompt=""))


def test_every_change_of_content_changes_the_fingerprint(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "answer": "1"},
        {"prompt": "b", "answer": "1"},
        {"prompt": "a", "answer": "2"},
        {"prompt": "a", "answer": "1", "n": 1},
    ]
    prints = {read_rows(json_lines(tmp_path / "d.jsonl", [row]))[0].fingerprint for row in rows}
    assert len(prints) == len(rows)
    reordered = {"answer": "1", "prompt": "a"}
    assert read_rows(json_lines(tmp_path / "d.jsonl", [reordered]))[0].fingerprint in prints
