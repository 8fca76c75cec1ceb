"""The samples file of an evaluation: token ids, masks and logprobs, as JSON lines or Parquet.

Samples are appended as JSON lines as soon as their rollout has ended, and before its result. A Parquet file is readable only
once its last bytes are written. For `FILE.parquet` the lines are therefore in `FILE.parquet.jsonl` until the evaluation ends.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Final, TypeVar

from rollout_client import TrainingSample
from rollout_client.export import read_jsonl, read_parquet, to_dict, write_jsonl, write_parquet

from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.evaluation.results_file import append
from rollout_server.evaluation.row_result import RowResult

FORMS: Final = (".jsonl", ".parquet")
_Key = TypeVar("_Key")


class SamplesFile:
    """The training samples of all results that have any.

    Args:
        path: a file that ends in .jsonl or .parquet.

    Raises:
        AuthorError: another name, or Parquet without the extra.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in FORMS:
            raise AuthorError(f"--samples: the name of the file must end in {' or '.join(FORMS)}", str(path))
        if path.suffix == ".parquet" and find_spec("pyarrow") is None:
            raise AuthorError('--samples: Parquet needs pip install "rollout-server[parquet]"', str(path))
        self.path = path
        self.lines_path = path if path.suffix == ".jsonl" else path.with_name(f"{path.name}.jsonl")
        self._file: IO[bytes] | None = None

    def exists(self) -> bool:
        """Whether there are samples of an earlier run."""
        return self.path.exists() or self.lines_path.exists()

    def resume(self, results: Mapping[_Key, RowResult], other_uids: Set[str] = frozenset()) -> dict[_Key, RowResult]:
        """Remove all samples but those of the results, and return the results whose samples are all present.

        Args:
            results: results that this run keeps.
            other_uids: uids of rollouts that are not part of this run; their samples stay.

        Raises:
            AuthorError: the file does not contain samples.
        """
        rest = self.lines_path.with_name(f"{self.lines_path.name}.part")
        if not self.lines_path.exists() and self.path.exists():
            try:
                write_jsonl(read_parquet(self.path), rest)
            except ValueError as error:
                raise AuthorError(f"{error}; --overwrite starts again") from None
            os.replace(rest, self.lines_path)
        found = Counter(uid for uid, _ in self._lines()) if self.lines_path.exists() else Counter()
        complete = {key: result for key, result in results.items() if found[result.uid] == result.samples}
        uids = {result.uid for result in complete.values()} | other_uids
        if self.lines_path.exists():
            with rest.open("wb") as file:
                file.writelines(line for uid, line in self._lines() if uid in uids)
            os.replace(rest, self.lines_path)
        return complete

    @contextmanager
    def open(self, *, anew: bool) -> Iterator[None]:
        """Open the file for writing samples inside the `with` block. `anew` removes earlier samples, else new ones are appended."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if anew:
            self.path.unlink(missing_ok=True)
        with self.lines_path.open("wb" if anew else "ab") as file:
            self._file = file
            try:
                yield
            finally:
                self._file = None

    def finish(self) -> None:
        """Turn the lines into the Parquet file, if that is wanted. After an interruption in between, `resume` continues."""
        if self.path != self.lines_path:
            rest = self.path.with_name(f"{self.path.name}.part")
            write_parquet(read_jsonl(self.lines_path), rest)
            os.replace(rest, self.path)
            self.lines_path.unlink()

    def write(self, samples: Sequence[TrainingSample]) -> None:
        """Write the samples of one rollout."""
        assert self._file is not None  # noqa: S101 - within `open`
        lines = [json.dumps(to_dict(sample), allow_nan=False, separators=(",", ":")) for sample in samples]
        append(self._file, "".join(f"{line}\n" for line in lines).encode(), self.lines_path)

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        """Iterate over the complete lines with the uids of their rollouts."""
        with self.lines_path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return  # the trace of an interruption
                try:
                    uid = json.loads(line)["uid"]
                except (ValueError, KeyError, TypeError):
                    text = "this is not a sample; --overwrite starts again"
                    raise AuthorError(text, str(self.lines_path), number) from None
                yield str(uid), line
