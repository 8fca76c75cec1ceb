"""What a gRPC trainer holds of each segment: messages, tokens with their authors, a checkpoint after each turn."""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rollout_server.testing.call import Answer
from rollout_server.testing.renderer import Message

_MODEL_BIT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Mark:
    """A checkpoint: how many messages and tokens, and the SHA-256 that token.proto (Checkpoint) describes."""

    messages: int
    tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one author in one turn (from 1); `logprobs` for the model's only. `opens`: the sample's first prompt."""

    turn: int
    by_model: bool
    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    opens: bool = False


class SegmentLedger:
    """One segment. Each turn adds two runs, what is new in the prompt and the answer, and one mark.

    `rollout_key` names the rollout to the judge; `typed` says that the segment began with typed messages, `drifted` that
    a prompt did not extend it, so that a new sample began with that prompt.
    """

    def __init__(self, rollout_key: str, *, typed: bool) -> None:
        self.rollout_key = rollout_key
        self.typed = typed
        self.messages: list[Message] = []
        self.marks: list[Mark] = []
        self.drifted = False
        self._runs: list[Run] = []
        self._ids: list[int] = []
        self._digest = hashlib.sha256()

    def add(self, turn: int, messages: Sequence[Message], answer: Answer) -> Mark:
        """Takes a turn in. A prompt that does not extend the ledger replaces what it held."""
        if answer.prompt_ids[: len(self._ids)] != self._ids:
            self._clear()
        new = answer.prompt_ids[len(self._ids) :]
        self._append(Run(turn, by_model=False, token_ids=new, opens=not self._runs))
        self._append(Run(turn, by_model=True, token_ids=answer.token_ids, logprobs=answer.logprobs))
        self.messages = [*messages, answer.message]
        self.marks.append(Mark(len(self.messages), len(self._ids), self._digest.digest()))
        return self.marks[-1]

    def has(self, digest: bytes) -> bool:
        """Whether the ledger stood at this digest after one of its turns."""
        return any(mark.digest == digest for mark in self.marks)

    def branch(self, digest: bytes, rollout_key: str) -> "SegmentLedger":
        """A ledger of its own with what this one held at `digest`."""
        turns = next(index for index, mark in enumerate(self.marks, start=1) if mark.digest == digest)
        branch = SegmentLedger(rollout_key, typed=self.typed)
        for run in self._runs[: 2 * turns]:
            branch._append(run)
        branch.marks = self.marks[:turns]
        branch.messages = self.messages[: branch.marks[-1].messages]
        return branch

    def runs(self, offset: int) -> Iterator[Run]:
        """The runs from the token at `offset` on, none of them empty."""
        start = 0
        for run in self._runs:
            skipped = max(0, offset - start)
            start += len(run.token_ids)
            if skipped < len(run.token_ids):
                yield Run(run.turn, run.by_model, run.token_ids[skipped:], run.logprobs[skipped:], run.opens)

    def _append(self, run: Run) -> None:
        bit = _MODEL_BIT if run.by_model else 0
        words = [token_id | bit for token_id in run.token_ids]
        self._digest.update(struct.pack(f"<{len(words)}I", *words))
        self._runs.append(run)
        self._ids += run.token_ids

    def _clear(self) -> None:
        self.drifted = bool(self._runs)
        self._runs, self._ids, self.marks = [], [], []
        self._digest = hashlib.sha256()
