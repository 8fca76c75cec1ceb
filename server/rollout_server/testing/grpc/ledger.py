"""The ledger of a gRPC trainer: per segment its messages, its tokens with their authors, and a checkpoint after each turn."""

import copy
import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from rollout_server.testing.checks.renderer import Message
from rollout_server.testing.checks.turn import ScriptedCompletion

_MODEL_BIT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Mark:
    """A checkpoint: number of messages, number of tokens, and the SHA-256 digest that token.proto (Checkpoint) defines."""

    messages: int
    tokens: int
    digest: bytes


class Reason(StrEnum):
    """Why tokens have mask 0, as token.proto (MaskReason) defines it."""

    PROMPT = "prompt"
    ENVIRONMENT = "environment"
    CLOSING = "closing"
    AUTHOR = "author"


@dataclass(frozen=True, slots=True)
class LedgerRun:
    """Consecutive tokens of one author in one turn (from 1). Only runs of the model have `logprobs` and `policy_version`."""

    turn: int
    by_model: bool
    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    reason: Reason | None = None
    policy_version: str = ""

    @property
    def tagged_ids(self) -> list[int]:
        """The token ids with the author bit, as the digest uses them."""
        bit = _MODEL_BIT if self.by_model else 0
        return [token_id | bit for token_id in self.token_ids]

    def part(self, start: int, stop: int | None = None) -> "LedgerRun":
        """Return the part of the run with the tokens in [start, stop)."""
        return replace(self, token_ids=self.token_ids[start:stop], logprobs=self.logprobs[start:stop])


class HeldSegment:
    """One segment: its runs in order, and a mark after each completion.

    Attributes:
        rollout_key: the key of its verdict in the judge.
        typed: the segment began with typed messages.
        in_tokens: the segment began in token mode.
        drifted: a prompt did not extend the segment, so a new sample began with that prompt.
        begun: at least one turn was answered.
        before: a copy from before the last completion; `undone`: the turn whose completion was taken back.
        forgotten: the trainer simulates that it lost the segment: it accepts no base. The judge still knows the correct history.
    """

    def __init__(self, rollout_key: str, *, typed: bool, in_tokens: bool) -> None:
        self.rollout_key = rollout_key
        self.typed = typed
        self.in_tokens = in_tokens
        self.messages: list[Message] = []
        self.marks: list[Mark] = []
        self.drifted = False
        self.forgotten = False
        self.begun = False
        self.before: HeldSegment | None = None
        self.undone = 0
        self.last_was_cut = False
        self._runs: list[LedgerRun] = []
        self._tagged_ids: list[int] = []
        self._digest = hashlib.sha256()

    @property
    def ids(self) -> list[int]:
        """All token ids."""
        return [tagged & ~_MODEL_BIT for tagged in self._tagged_ids]

    @property
    def tagged_ids(self) -> Sequence[int]:
        """All token ids with the author bit, as the digest uses them."""
        return self._tagged_ids

    @property
    def last_turn(self) -> int:
        """The last answered turn; 0 before the first one."""
        return self._runs[-1].turn if self._runs else 0

    def copy(self) -> "HeldSegment":
        """Return an independent copy, without `before`."""
        other = copy.copy(self)
        other.messages, other.marks = self.messages[:], self.marks[:]
        other._runs, other._tagged_ids, other._digest = self._runs[:], self._tagged_ids[:], self._digest.copy()
        other.before = None
        return other

    def add(self, turn: int, messages: Sequence[Message], completion: ScriptedCompletion, policy_version: str) -> Mark:
        """Append a turn in message mode. A prompt that does not extend the segment replaces its contents."""
        ids = self.ids
        if completion.prompt_ids[: len(ids)] != ids:
            self._clear()
        new = completion.prompt_ids[len(self._tagged_ids) :]
        self.append(LedgerRun(turn, False, new, reason=Reason.ENVIRONMENT if self._runs else Reason.PROMPT))
        return self.append_completion(turn, messages, completion, policy_version)

    def append_completion(
        self, turn: int, messages: Sequence[Message], completion: ScriptedCompletion, policy_version: str
    ) -> Mark:
        """Append a completion, set a mark after it and return the mark."""
        self.append(LedgerRun(turn, True, completion.token_ids, completion.logprobs, policy_version=policy_version))
        self.messages = [*messages, completion.message]
        self.last_was_cut = completion.finish_reason == "length"
        self.begun, self.forgotten = True, False
        return self.mark(len(self.messages))

    def append(self, run: LedgerRun) -> None:
        """Append tokens."""
        self._digest.update(_pack(run))
        self._runs.append(run)
        self._tagged_ids += run.tagged_ids

    def mark(self, messages: int) -> Mark:
        """Set a mark after the last token. `messages` is the number of messages so far."""
        self.marks.append(self.checkpoint_after((), messages))
        return self.marks[-1]

    def checkpoint_after(self, runs: Sequence[LedgerRun], messages: int) -> Mark:
        """Return the checkpoint after further runs, without appending them."""
        digest = self._digest.copy()
        for run in runs:
            digest.update(_pack(run))
        return Mark(messages, len(self._tagged_ids) + sum(len(run.token_ids) for run in runs), digest.digest())

    def has(self, digest: bytes) -> bool:
        """Return whether one of the segment's marks has this digest."""
        return any(mark.digest == digest for mark in self.marks)

    def branch(self, digest: bytes, rollout_key: str) -> "HeldSegment":
        """Return a new segment with the contents of this one up to the mark with `digest`."""
        turns = next(index for index, mark in enumerate(self.marks, start=1) if mark.digest == digest)
        branch = HeldSegment(rollout_key, typed=self.typed, in_tokens=self.in_tokens)
        branch.marks = self.marks[:turns]
        for run in self.runs(0, branch.marks[-1].tokens):
            branch.append(run)
        branch.messages = self.messages[: branch.marks[-1].messages]
        branch.last_was_cut = self.last_was_cut and turns == len(self.marks)
        return branch

    def runs(self, offset: int, stop: int | None = None) -> Iterator[LedgerRun]:
        """Yield the runs of the tokens in [offset, stop), without empty runs."""
        yield from runs_within(self._runs, offset, stop)

    def _clear(self) -> None:
        self.drifted = bool(self._runs)
        self._runs, self._tagged_ids, self.marks = [], [], []
        self._digest = hashlib.sha256()


def runs_within(runs: Sequence[LedgerRun], offset: int, stop: int | None = None) -> Iterator[LedgerRun]:
    """Yield the runs of the tokens in [offset, stop), without empty runs."""
    start = 0
    for run in runs:
        size = len(run.token_ids)
        first = min(max(offset - start, 0), size)
        last = size if stop is None else min(max(stop - start, 0), size)
        start += size
        if first < last:
            yield run.part(first, last)


def _pack(run: LedgerRun) -> bytes:
    tagged_ids = run.tagged_ids
    return struct.pack(f"<{len(tagged_ids)}I", *tagged_ids)
