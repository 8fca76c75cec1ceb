"""Datasets that agents provide with a method `dataset`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from rollout_server import Agent, Image
from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.dataset import DatasetOptions, read_dataset

from tests.authoring.dataset.test_formats import GOLDEN, json_lines

ROWS = [{"prompt": f"question {n}", "answer": n} for n in range(4)]


class Provider(Agent):
    """The base of the agents here; its own rows come from a list."""

    name = "provider"
    rows: object = ROWS

    def dataset(self, split: str) -> Any:
        return self.rows


class Yielding(Provider):
    def dataset(self, split: str) -> Iterator[Mapping[str, Any]]:
        for number in range(10**12):
            yield {"prompt": f"{split} {number}"}


class Awaited(Provider):
    async def dataset(self, split: str) -> Iterable[Mapping[str, Any]]:
        await asyncio.sleep(0)
        return [{"prompt": split}]


class AsynchronouslyYielding(Provider):
    async def dataset(self, split: str) -> AsyncIterator[Mapping[str, Any]]:
        for number in range(10**12):
            await asyncio.sleep(0)
            yield {"prompt": f"{split} {number}"}


def prompts(agent: Agent, **options: Any) -> list[str]:
    return [row.prompt for row in read_dataset(agent, DatasetOptions(**options)).rows]


def provider(rows: object) -> Provider:
    agent = Provider()
    agent.rows = rows
    return agent


def test_rows_are_returned_yielded_and_awaited() -> None:
    dataset = read_dataset(Provider())
    assert [row.metadata for row in dataset.rows] == [{"answer": n, "ground_truth": n} for n in range(4)]
    assert dataset.description() == (
        "dataset of agent provider [test]: 4 rows; prompt from 'prompt', ground_truth from 'answer'"
    )
    assert prompts(Yielding(), limit=2) == ["test 0", "test 1"]
    assert prompts(Awaited(), split="train") == ["train"]
    assert prompts(AsynchronouslyYielding(), split="dev", offset=1, limit=2) == ["dev 1", "dev 2"]
    assert prompts(provider(tuple(ROWS)), shuffle=3, limit=2) == prompts(Provider(), shuffle=3, limit=2)


def test_a_path_is_read(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "d.jsonl", [{"prompt": "a"}])
    assert prompts(provider(path)) == prompts(provider(str(path)), split="train") == ["a"]
    assert prompts(provider(GOLDEN / "conversations"), limit=1) == ["What is 0 plus 2?"]
    assert prompts(provider(GOLDEN / "conversations"), split="train", limit=1) == ["What is 0 plus 1?"]
    with pytest.raises(FileNotFoundError):
        prompts(provider(tmp_path / "absent.jsonl"))


def test_values_of_python_become_json() -> None:
    fields = {
        "prompt": [{"role": "user", "content": [{"type": "image", "image": Image(b"x")}]}],
        "ground_truth": np.float32(0.5),
        "ids": np.arange(3),
        "price": Decimal("1.50"),
        "key": UUID(int=1),
        "pair": (1, float("nan")),
        "nested": {1: {"x": b"\x01"}},
    }
    [row] = read_dataset(provider([fields])).rows
    assert row.messages[0]["content"][0]["image_url"]["url"] == "data:image/png;base64,eA=="
    assert row.metadata == {
        "ground_truth": 0.5,
        "ids": [0, 1, 2],
        "price": "1.50",
        "key": "00000000-0000-0000-0000-000000000001",
        "pair": [1, None],
        "nested": {"1": {"x": "01"}},
    }


def cyclic() -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": "x"}
    row["self"] = row
    return row


WRONG: dict[str, tuple[object, str]] = {
    "none": (
        None,
        r"dataset\(\) of agent provider must return rows \(dictionaries\) or the path of a dataset, not NoneType",
    ),
    "one_row": (ROWS[0], "must return rows .* not dict"),
    "bytes": (b"d.jsonl", "must return rows .* not bytes"),
    "number": (5, "must return rows .* not int"),
    "no_rows": ([], r"of agent provider \[test\]: contains no row"),
    "texts": (["x"], r"dataset\(\) of agent provider: row 1: must be a dictionary, not str"),
    "second": ([*ROWS, None], r"dataset\(\) of agent provider: row 5: must be a dictionary, not NoneType"),
    "no_prompt": ([{"text": "x"}], r"row 1: there is no prompt"),
    "object": ([{"prompt": "x", "made": object()}], r"row 1: the column made cannot be sent as JSON: object is not"),
    "cyclic": ([cyclic()], r"row 1: the column self cannot be sent as JSON"),
    "cyclic_prompt": ([{"prompt": [{"role": "user", "content": "x", "row": cyclic()}]}], "the column prompt cannot be"),
    "surrogate": ([{"prompt": "\ud800"}], r"row 1: the column prompt cannot be sent as JSON"),
}


@pytest.mark.parametrize(("rows", "said"), WRONG.values(), ids=WRONG.keys())
def test_wrong_rows_are_refused(rows: object, said: str) -> None:
    with pytest.raises(AuthorError, match=said):
        read_dataset(provider(rows))


class Failing(Provider):
    def dataset(self, split: str) -> Any:
        raise LookupError(f"no {split} here")


class FailingLater(Provider):
    def dataset(self, split: str) -> Iterator[Mapping[str, Any]]:
        yield {"prompt": "x"}
        raise LookupError(f"no {split} here")


class FailingAsynchronously(Provider):
    async def dataset(self, split: str) -> AsyncIterator[Mapping[str, Any]]:
        yield {"prompt": "x"}
        raise LookupError(f"no {split} here")


@pytest.mark.parametrize("kind", [Failing, FailingLater, FailingAsynchronously])
def test_exceptions_name_the_authors_line(kind: type[Agent]) -> None:
    with pytest.raises(AuthorError, match=r"test_provided\.py:\d+: LookupError: no test here"):
        read_dataset(kind())


def test_an_agent_without_a_dataset_is_refused() -> None:
    class Plain(Agent):
        name = "plain"

    with pytest.raises(AuthorError, match="DATASET is missing, and agent plain provides none; name a file"):
        read_dataset(Plain())


def test_the_method_is_checked_when_the_class_is_defined() -> None:
    with pytest.raises(TypeError, match=r"agent class Wrong: dataset is called with \(self, split\)"):

        class Wrong(Agent):
            name = "wrong"

            def dataset(self) -> Any:  # type: ignore[override]
                return []

    with pytest.raises(TypeError, match="agent class NoMethod: dataset must be a method"):

        class NoMethod(Agent):
            name = "no-method"
            dataset = ROWS  # type: ignore[assignment]


def test_an_agent_without_rows_is_named() -> None:
    class Empty(Agent):
        name = "empty"

        def dataset(self, split: str) -> list[dict[str, object]]:
            return []

    with pytest.raises(AuthorError, match=r"dataset of agent empty \[test\]: contains no row"):
        read_dataset(Empty())
