"""Files and directories of datasets, and their splits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.dataset.row import SourceRow
from rollout_server.authoring.dataset.tables import arrow_rows, parquet_rows
from rollout_server.authoring.dataset.text_files import csv_rows, json_lines_rows, json_rows
from rollout_server.core.message import MalformedMessage, parse_object

_READERS: Final[Mapping[str, Callable[[Path], Iterator[tuple[int, Mapping[str, Any]]]]]] = {
    ".jsonl": json_lines_rows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
}
FORMS: Final = tuple(_READERS)
MAX_FILES: Final = 10_000
_MAX_STATE_BYTES: Final = 16 * 1024 * 1024
# The files that `save_to_disk` of Hugging Face `datasets` writes.
_SPLITS_FILE: Final = "dataset_dict.json"
_STATE_FILE: Final = "state.json"
_INFO_FILE: Final = "dataset_info.json"
_NO_SPLITS: Final = (_SPLITS_FILE, _STATE_FILE, _INFO_FILE, "dataset_infos.json")
_SHARD: Final = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


def source_rows(path: Path, split: str = "") -> Iterator[SourceRow]:
    """Yield the rows of a file, or of a split of a directory, as they are read.

    Args:
        path: a file with one of the endings `FORMS`, a directory of Hugging Face `datasets`, or a directory with a file per split.
        split: name of the split; empty if there are no splits or there is only one.

    Raises:
        AuthorError: the path is not a dataset, it does not have the split, or a row is invalid.
        OSError: a file cannot be read.
    """
    for file in dataset_files(path, split):
        for number, (line, fields) in enumerate(_READERS[file.suffix.lower()](file), start=1):
            yield SourceRow(str(file), line, number, fields)


def dataset_files(path: Path, split: str = "") -> list[Path]:
    """Return the files of a dataset in their order. Raises `AuthorError` or OSError as `source_rows` does."""
    path.stat()  # raises OSError for a path that does not exist, and for a loop of symbolic links
    if path.is_dir():
        return _directory_files(path, split)
    if not path.is_file():
        raise AuthorError("is neither a file nor a directory", str(path))
    if path.suffix.lower() not in FORMS:
        raise AuthorError(f"the name of a dataset must end in {', '.join(FORMS)}, or be that of a directory", str(path))
    if split:
        raise AuthorError(f"--split {split}: one file has no splits; remove it, or name a directory", str(path))
    return [path]


def _directory_files(path: Path, split: str) -> list[Path]:
    if (path / _SPLITS_FILE).is_file():
        state = path / _SPLITS_FILE
        names = _state(state).get("splits")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise AuthorError("has no list of splits; save the dataset again", str(state))
        return _saved_files(path / _plain_name(_choose(path, names, split), state))
    if (path / _STATE_FILE).is_file() and (path / _INFO_FILE).is_file():
        own = _state(path / _STATE_FILE).get("_split")
        if split and split != own:
            text = f"is the split {own}" if own else "is one dataset without splits"
            raise AuthorError(f"--split {split}: the directory {text}; remove the flag", str(path))
        return _saved_files(path)
    splits = _split_files(path)
    if not splits:
        forms = ", ".join(f"SPLIT{form}" for form in FORMS)
        text = (
            f"contains no dataset: no {_SPLITS_FILE} or {_STATE_FILE} of Hugging Face `datasets`, and no file {forms}"
        )
        raise AuthorError(text, str(path))
    return splits[_choose(path, list(splits), split)]


def _choose(path: Path, names: Sequence[str], split: str) -> str:
    if split in names:
        return split
    if not split and len(names) == 1:
        return names[0]
    text = f"--split {split}: there is no such split" if split else "has several splits, so --split NAME is needed"
    raise AuthorError(f"{text}; the splits are {', '.join(names) or 'none'}", str(path))


def _saved_files(path: Path) -> list[Path]:
    """Return the files of a directory that `Dataset.save_to_disk` wrote."""
    state = path / _STATE_FILE
    listed = _state(state).get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed) or len(listed) > MAX_FILES:
        raise AuthorError("has no list of data files; save the dataset again", str(state))
    files = [path / _plain_name(each.get("filename"), state) for each in listed]
    if wrong := [file for file in files if file.suffix != ".arrow" or not file.is_file()]:
        raise AuthorError(
            f"names {wrong[0].name}, which is not an Arrow file beside it; save the dataset again", str(state)
        )
    return files


def _plain_name(name: object, state: Path) -> str:
    """Return a name that stays within its directory."""
    if not isinstance(name, str) or not name or Path(name).name != name or name == "..":
        raise AuthorError(f"{name!r} is not the name of a file or directory; save the dataset again", str(state))
    return name


def _state(path: Path) -> Mapping[str, Any]:
    with path.open("rb") as file:
        content = file.read(_MAX_STATE_BYTES + 1)
    try:
        if len(content) > _MAX_STATE_BYTES:
            raise MalformedMessage(f"more than {_MAX_STATE_BYTES:,} bytes")
        return parse_object(content.decode())
    except (ValueError, RecursionError) as error:
        raise AuthorError(f"is not a state of Hugging Face `datasets`: {error}", str(path)) from None


def _split_files(path: Path) -> dict[str, list[Path]]:
    """Return the files of each split of a directory: `SPLIT.jsonl`, or shards such as `SPLIT-00000-of-00002.parquet`."""
    splits: dict[str, list[Path]] = {}
    for number, file in enumerate(sorted(path.iterdir())):
        if number >= MAX_FILES:
            raise AuthorError(f"contains more than {MAX_FILES:,} files; name a file", str(path))
        if file.suffix.lower() in FORMS and file.name not in _NO_SPLITS and file.is_file() and file.name[0] != ".":
            shard = _SHARD.fullmatch(file.stem)
            splits.setdefault(shard["split"] if shard else file.stem, []).append(file)
    for name, files in splits.items():
        shards = [_SHARD.fullmatch(file.stem) for file in files]
        counts = {int(shard["count"]) if shard else 1 for shard in shards}
        if counts != {len(files)} or len({file.suffix for file in files}) > 1:
            found = ", ".join(file.name for file in files[:3])
            text = f"the split {name} must be one file or all of its shards; it has {len(files)} files ({found})"
            raise AuthorError(text, str(path))
    return splits
