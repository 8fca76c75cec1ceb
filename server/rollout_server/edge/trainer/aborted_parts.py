"""Completions that are aborted while they are generated, such as by an update of the weights, and resumed from their tokens.

Each request of a turn returns a part. The parts are joined to one completion, whose runs say which policy sampled which tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from rollout_server.core.ledger import Logprobs, PolicyRun, Tokens, pack_logprobs, pack_tokens
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.segment import Plane
from rollout_server.core.spec import Sampling
from rollout_server.edge.trainer.response_limits import ANSWER_BYTES, ANSWER_VALUES
from rollout_server.runtime.errors import RolloutFailed

ABORTED: Final = "abort"
"""Finish reason of a completion that was interrupted. It is in the contract with trainers, and vLLM reports it too."""
CUT: Final = "length"
"""Finish reason of a completion whose parts have `max_tokens` tokens."""
MOST_PARTS: Final = 64
"""Maximum parts of one completion."""
_LONGEST_PAUSE: Final = 1.0
"""In seconds: the pause before the next request grows up to it while the parts have no tokens."""


@dataclass(frozen=True, slots=True)
class CompletionPart:
    """The tokens that one request of a turn returned.

    Args:
        token_ids: the sampled ids; may be empty.
        logprobs: one float per token; None if unknown.
        planes: further values per token.
        policy_version: the policy that sampled them, in the trainer's notation; empty if unknown.
        policy_step: its step; None if unknown.
    """

    token_ids: Tokens
    logprobs: Logprobs | None = None
    planes: tuple[Plane, ...] = ()
    policy_version: str = ""
    policy_step: int | None = None


@dataclass(frozen=True, slots=True)
class JoinedParts:
    """All parts of a completion as one. The fields are those of `Answered`; `planes_dropped`: the parts have different planes."""

    token_ids: Tokens
    logprobs: Logprobs | None
    planes: tuple[Plane, ...]
    policy_version: str
    policy_step: int | None
    runs: tuple[PolicyRun, ...]
    planes_dropped: bool


class AbortedParts:
    """The parts of one completion that were aborted so far.

    Args:
        turn: the turn, for errors.
        sampling: the sampling parameters of the whole completion.
        source: who generates it, and is at fault for too many parts.

    Attributes:
        count: the number of parts.
        held: the parts that have tokens.
        ids: the tokens of the parts.
    """

    def __init__(self, turn: int, sampling: Sampling, source: FailureClass) -> None:
        self.count = 0
        self.held: list[CompletionPart] = []
        self.ids: Tokens = pack_tokens()
        self._turn = turn
        self._sampling = sampling
        self._source = source
        self._without_tokens = 0

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters of the next part: `max_tokens` is what is left."""
        limit = self._sampling.max_tokens
        return self._sampling if limit is None else replace(self._sampling, max_tokens=limit - len(self.ids))

    @property
    def full(self) -> bool:
        """Whether the parts have `max_tokens` tokens, so that the completion ends."""
        limit = self._sampling.max_tokens
        return limit is not None and len(self.ids) >= limit

    def turn_key(self, key: str) -> str:
        """Return the key of the next request, given the key of the turn."""
        return f"{key}/{self.count}" if self.count else key

    def add(self, part: CompletionPart) -> None:
        """Add an aborted part. Raises `RolloutFailed` if there are too many parts or tokens."""
        self.count += 1
        self._without_tokens = 0 if part.token_ids else self._without_tokens + 1
        held = sum(len(plane.values) for each in (*self.held, part) for plane in each.planes)
        if part.token_ids:
            self.ids += part.token_ids
            self.held.append(part if held <= ANSWER_BYTES else replace(part, planes=()))
        if len(self.ids) > ANSWER_VALUES:
            raise self._failure(Category.VALIDATION, f"has more than {ANSWER_VALUES} tokens, the maximum")
        if self.count >= MOST_PARTS and not self.full:
            engine = self._source is FailureClass.ENGINE
            category = Category.ENGINE_SERVER if engine else Category.TRAINER_SERVER
            text = f"was aborted {self.count} times, the maximum; pause sampling while the weights are updated"
            raise self._failure(category, text)

    async def pause(self) -> None:
        """Wait before the next request, if nothing was generated since the last one."""
        if self._without_tokens:
            await asyncio.sleep(min(_LONGEST_PAUSE, 0.01 * 2.0 ** min(self._without_tokens, 8)))

    def join(self, last: CompletionPart) -> JoinedParts:
        """Return the completion of the parts and the last one. Logprobs and planes are kept if all parts with tokens have them."""
        parts = [part for part in (*self.held, last) if part.token_ids]
        ids, logprobs = pack_tokens(), pack_logprobs()
        for part in parts:
            ids += part.token_ids
            logprobs += part.logprobs or pack_logprobs()
        known = all(part.logprobs is not None for part in parts or [last])
        runs = tuple(_runs(parts))
        final = runs[-1] if runs else PolicyRun(0, last.policy_version, last.policy_step)
        alike = len({_form(part) for part in parts}) <= 1
        planes = _joined_planes(parts) if alike else ()
        shown = runs if len(runs) > 1 else ()
        return JoinedParts(
            ids, logprobs if known else None, planes, final.version, final.step, shown, planes_dropped=not alike
        )

    def _failure(self, category: Category, what: str) -> RolloutFailed:
        text = f"turn {self._turn}: the completion {what}"
        return RolloutFailed(Failure(category, text, self._turn, source=self._source))


def planes_warning(turn: int) -> tuple[str, str]:
    """Return the warning that the planes of a completion are not kept."""
    text = f"turn {turn}: the parts of the aborted completion have different planes, or too many bytes; its planes are dropped"
    return "planes_dropped", text


def _runs(parts: Sequence[CompletionPart]) -> Iterator[PolicyRun]:
    """Yield the policies in order. Adjacent parts of one policy are one run."""
    for (version, step), same in groupby(parts, lambda part: (part.policy_version, part.policy_step)):
        yield PolicyRun(sum(len(part.token_ids) for part in same), version, step)


def _form(part: CompletionPart) -> tuple[tuple[str, str, int], ...]:
    """Return name, dtype and bytes per token of the planes of a part that has tokens."""
    return tuple((plane.name, plane.dtype, len(plane.values) // len(part.token_ids)) for plane in part.planes)


def _joined_planes(parts: Sequence[CompletionPart]) -> tuple[Plane, ...]:
    """Return the planes of parts that all have the same ones."""
    return tuple(
        replace(same[0], values=b"".join(plane.values for plane in same))
        for same in zip(*(part.planes for part in parts), strict=True)
    )
