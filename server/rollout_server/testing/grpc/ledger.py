"""What a gRPC trainer holds of each segment: messages, tokens with their authors, a checkpoint after each turn."""

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
    """A checkpoint: how many messages and tokens, and the SHA-256 that token.proto (Checkpoint) describes."""

    messages: int
    tokens: int
    digest: bytes


class Reason(StrEnum):
    """Why tokens do not train, as token.proto (MaskReason) has it."""

    PROMPT = "prompt"
    ENVIRONMENT = "environment"
    CLOSING = "closing"
    AUTHOR = "author"


@dataclass(frozen=True, slots=True)
class LedgerRun:
    """Tokens of one author in one turn (from 1); `logprobs` and `policy_version` for the model's only."""

    turn: int
    by_model: bool
    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    reason: Reason | None = None
    policy_version: str = ""

    @property
    def tagged_ids(self) -> list[int]:
        """What goes into the digest for each token."""
        bit = _MODEL_BIT if self.by_model else 0
        return [token_id | bit for token_id in self.token_ids]

    def part(self, start: int, stop: int | None = None) -> "LedgerRun":
        """The run without the tokens outside of [start, stop)."""
        return replace(self, token_ids=self.token_ids[start:stop], logprobs=self.logprobs[start:stop])


class HeldSegment:
    """One segment: runs in order, and a mark after each answer.

    `rollout_key` names the rollout to the judge; `typed` says that the segment began with typed messages, `in_tokens` that
    it began in token mode, `drifted` that a prompt did not extend it, so that a new sample began with that prompt, `begun`
    that a turn of it was answered, `before` what it was before the last answer, `undone` the turn whose
    answer was taken back. With `forgotten` the trainer plays one that lost the segment: no base is known, while
    the judge still knows what a whole history has to be.
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
        """All tokens."""
        return [tagged & ~_MODEL_BIT for tagged in self._tagged_ids]

    @property
    def tagged_ids(self) -> Sequence[int]:
        """All tokens with their authors, as the digest sees them."""
        return self._tagged_ids

    @property
    def last_turn(self) -> int:
        """The turn that was answered last; 0 before the first one."""
        return self._runs[-1].turn if self._runs else 0

    def copy(self) -> "HeldSegment":
        """Another ledger that holds the same."""
        other = copy.copy(self)
        other.messages, other.marks = self.messages[:], self.marks[:]
        other._runs, other._tagged_ids, other._digest = self._runs[:], self._tagged_ids[:], self._digest.copy()
        other.before = None
        return other

    def add(self, turn: int, messages: Sequence[Message], completion: ScriptedCompletion, policy_version: str) -> Mark:
        """Takes a turn of message mode in. A prompt that does not extend the ledger replaces what it held."""
        ids = self.ids
        if completion.prompt_ids[: len(ids)] != ids:
            self._clear()
        new = completion.prompt_ids[len(self._tagged_ids) :]
        self.append(LedgerRun(turn, False, new, reason=Reason.ENVIRONMENT if self._runs else Reason.PROMPT))
        return self.append_completion(turn, messages, completion, policy_version)

    def append_completion(
        self, turn: int, messages: Sequence[Message], completion: ScriptedCompletion, policy_version: str
    ) -> Mark:
        """Takes in the answer to what the ledger ends with."""
        self.append(LedgerRun(turn, True, completion.token_ids, completion.logprobs, policy_version=policy_version))
        self.messages = [*messages, completion.message]
        self.last_was_cut = completion.finish_reason == "length"
        self.begun, self.forgotten = True, False
        return self.mark(len(self.messages))

    def append(self, run: LedgerRun) -> None:
        """Adds tokens."""
        self._digest.update(_pack(run))
        self._runs.append(run)
        self._tagged_ids += run.tagged_ids

    def mark(self, messages: int) -> Mark:
        """Sets a checkpoint after the last token: `messages` of them are known now."""
        self.marks.append(self.checkpoint_after((), messages))
        return self.marks[-1]

    def checkpoint_after(self, runs: Sequence[LedgerRun], messages: int) -> Mark:
        """The checkpoint behind further runs, which are not taken in."""
        digest = self._digest.copy()
        for run in runs:
            digest.update(_pack(run))
        return Mark(messages, len(self._tagged_ids) + sum(len(run.token_ids) for run in runs), digest.digest())

    def has(self, digest: bytes) -> bool:
        """Whether the ledger stood at this digest after one of its turns."""
        return any(mark.digest == digest for mark in self.marks)

    def branch(self, digest: bytes, rollout_key: str) -> "HeldSegment":
        """A ledger of its own with what this one held at `digest`."""
        turns = next(index for index, mark in enumerate(self.marks, start=1) if mark.digest == digest)
        branch = HeldSegment(rollout_key, typed=self.typed, in_tokens=self.in_tokens)
        branch.marks = self.marks[:turns]
        for run in self.runs(0, branch.marks[-1].tokens):
            branch.append(run)
        branch.messages = self.messages[: branch.marks[-1].messages]
        branch.last_was_cut = self.last_was_cut and turns == len(self.marks)
        return branch

    def runs(self, offset: int, stop: int | None = None) -> Iterator[LedgerRun]:
        """The runs from the token at `offset` on and before `stop`, none of them empty."""
        yield from runs_within(self._runs, offset, stop)

    def _clear(self) -> None:
        self.drifted = bool(self._runs)
        self._runs, self._tagged_ids, self.marks = [], [], []
        self._digest = hashlib.sha256()


def runs_within(runs: Sequence[LedgerRun], offset: int, stop: int | None = None) -> Iterator[LedgerRun]:
    """What lies in [offset, stop), counted in tokens; no empty runs."""
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
