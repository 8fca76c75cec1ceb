"""Flags for the dataset of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

if TYPE_CHECKING:
    from rollout_server.agent import Agent
    from rollout_server.authoring.dataset import DatasetOptions, DatasetRow

_MAX_PROMPT_BYTES = 1024 * 1024
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class DatasetFlags:
    """The dataset, and which rows of it to use."""

    help_panel: ClassVar[str] = "Dataset"

    dataset: Annotated[
        Path | None,
        typer.Argument(
            metavar="DATASET",
            help="FILE.jsonl, .json, .csv, .parquet or .arrow, or a directory of splits. Default: the agent's own dataset.",
            show_default=False,
        ),
    ] = None
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=NAME",
            help="Name of prompt, messages, images, system_prompt or ground_truth in the dataset, repeatable;"
            " a dotted NAME is a path into objects, an empty one means none. Default: found by name.",
        ),
    ] = None
    split: Annotated[str, typer.Option(metavar="NAME", help="Split of a directory, or of the agent's dataset.")] = ""
    system_prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT|@FILE", help="System prompt of every row, instead of its own. Empty: none."),
    ] = None
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", min=0, max=_MAX_SEED, help="Shuffle the rows with this seed.")
    ] = None
    offset: Annotated[int, typer.Option(min=0, help="Skip the first N rows, after --shuffle.")] = 0
    limit: Annotated[int | None, typer.Option(min=1, help="Use only N rows, after --shuffle and --offset.")] = None

    def options(self) -> DatasetOptions:
        """Return the options of the dataset. Raises `AuthorError` for wrong flags, OSError for a file that cannot be read."""
        from rollout_server.authoring.dataset import DatasetOptions, column_names

        names = column_names(self.column or [])
        system_prompt = _text(self.system_prompt)
        return DatasetOptions(names, self.split, system_prompt, self.shuffle, self.offset, self.limit)

    def stem(self, agent: str) -> str:
        """Return the beginning of the names of the evaluation's files: that of the dataset or else the agent, and the split."""
        name = self.dataset.resolve().stem if self.dataset else agent
        return "-".join(part.replace("/", "_") for part in (name, self.split) if part)


def load_rows(flags: DatasetFlags, agent: Agent) -> Sequence[DatasetRow]:
    """Read the dataset of the flags, or that of the agent, and print in one line what was taken from where.

    Raises:
        AuthorError: with file and line or row, if a flag, the dataset or a row is invalid.
        OSError: if a file cannot be read.
    """
    from rich.console import Console

    from rollout_server.authoring.dataset import read_dataset
    from rollout_server.inspection.escape import visible

    dataset = read_dataset(flags.dataset or agent, flags.options())
    Console(highlight=False).print(visible(dataset.description()), markup=False, soft_wrap=True)
    return dataset.rows


def _text(value: str | None) -> str | None:
    """Return the text of a flag, or of the file that it names with @."""
    if value is None or not value.startswith("@"):
        return value
    from rollout_server.authoring.author_traceback import AuthorError

    with Path(value[1:]).open("rb") as file:
        content = file.read(_MAX_PROMPT_BYTES + 1)
    if len(content) > _MAX_PROMPT_BYTES:
        raise AuthorError(f"--system-prompt: the file has more than {_MAX_PROMPT_BYTES:,} bytes", value[1:])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise AuthorError(f"--system-prompt: the file is not UTF-8: {error.reason}", value[1:]) from None
