"""The result of one rollout of a row, with large values cut, as the results file stores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from rollout_server.authoring.dataset import DatasetRow
from rollout_server.authoring.rollout_result import Result

LONGEST_TEXT: Final = 65_536
"""Characters of one text in a result; the rest is cut."""
MOST_CHARACTERS: Final = 1_048_576
"""Characters of all texts of one field in a result."""
# A number, or an item without text, also takes space.
_ITEM: Final = 16

OWN_FAILURES: Final = frozenset({"policy", "deadline"})
"""Failure classes that count as not passed. The other ones say nothing about the model."""


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout to run: a row, and the number of its repetition from 1."""

    row: DatasetRow
    repeat: int

    @property
    def rollout_id(self) -> str:
        """The rollout id, such as `row-3-1`."""
        return f"row-{self.row.number}-{self.repeat}"


def jobs_of(rows: Sequence[DatasetRow], repeats: int) -> list[Job]:
    """Return all rollouts to run, the first repetition of every row before the second, so early results cover all rows."""
    return [Job(row, repeat) for repeat in range(1, repeats + 1) for row in rows]


@dataclass(frozen=True, slots=True)
class RowResult(Result):
    """The result of one rollout of a row.

    Args:
        row: row of the dataset from 1.
        repeat: repetition of the row, from 1.
        fingerprint: hash of the row's content.
        prompt: the messages that the rollout began with.
        ground_truth: the row's ground truth; None if it has none.
        metadata: the row's other columns.
        samples: number of training samples in the samples file.
    """

    row: int = 0
    repeat: int = 1
    fingerprint: str = ""
    prompt: list[Any] = field(default_factory=list)
    ground_truth: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    samples: int = 0

    @property
    def counts(self) -> bool:
        """Whether the rollout belongs in the pass rate: it has a reward, or it failed because of the model."""
        return self.reward is not None if self.finished else self.failure_class in OWN_FAILURES


def row_result(result: Result, job: Job) -> RowResult:
    """Return a rollout's result with what is known of its row. Long texts are cut to `LONGEST_TEXT` characters."""
    own = {each.name: getattr(result, each.name) for each in fields(Result)}
    own["messages"] = bounded(result.messages)
    metadata = dict(job.row.metadata)
    ground_truth = bounded(metadata.pop("ground_truth", None))
    return RowResult(
        **own,
        row=job.row.number,
        repeat=job.repeat,
        fingerprint=job.row.fingerprint,
        prompt=bounded(job.row.messages),
        ground_truth=ground_truth,
        metadata=bounded(metadata),
    )


def bounded(value: Any) -> Any:
    """Return a JSON value with at most about `MOST_CHARACTERS` characters of text.

    A text of more than `LONGEST_TEXT` characters is cut. Items beyond the budget are left out. Both are marked in the value.
    """
    return _cut(value, [MOST_CHARACTERS])


def _cut(value: Any, budget: list[int]) -> Any:
    """Cut a value to the budget, a list with one number from which the value's size is taken."""
    if isinstance(value, str):
        most = max(0, min(LONGEST_TEXT, budget[0]))
        budget[0] -= min(len(value), most) + _ITEM
        return value if len(value) <= most else f"{value[:most]}… ({len(value) - most} more characters)"
    budget[0] -= _ITEM
    if isinstance(value, Mapping):
        cut: dict[str, Any] = {}
        for key, each in value.items():
            if budget[0] <= 0:
                cut["…"] = f"{len(value) - len(cut)} more"
                break
            cut[_cut(key, budget)] = _cut(each, budget)
        return cut
    if isinstance(value, Sequence):
        items: list[Any] = []
        for each in value:
            if budget[0] <= 0:
                items.append(f"… {len(value) - len(items)} more")
                break
            items.append(_cut(each, budget))
        return items
    return value
