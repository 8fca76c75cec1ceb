"""The state of a group, as frozen values: which rollouts ended and how, what is started anew, and the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rollout_server.core.error import Violation
from rollout_server.core.outcome import Cancellation, End, Failure, FailureClass, Stop, may_train
from rollout_server.core.spec import Spec
from rollout_server.core.spec_validation import ID_LENGTH

EARLY_STOP = "the group has enough usable rollouts"
"""Reason of the cancellations of an early stop."""
LARGEST_GROUP = 1024
"""Maximum number of rollouts of a group, and of its refills."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What was requested of a group.

    Args:
        count: number of rollouts.
        min_usable: once this many rollouts are usable, the others are cancelled; 0: never.
        refill: how many rollouts may be started anew.
        train_on: the failure classes of rollouts that are usable, as in `Spec`.
    """

    count: int
    min_usable: int = 0
    refill: int = 0
    train_on: frozenset[FailureClass] | None = None

    def is_usable(self, end: End) -> bool:
        """Return whether a rollout that ended like this is usable for training. A failure that is not may be started anew."""
        return may_train(end, self.train_on)

    def violations(self, spec: Spec, largest: int) -> Iterator[Violation]:
        """Yield what is wrong with the plan for a spec. `largest` is the number of rollouts that fit into the server."""
        largest = min(largest, LARGEST_GROUP)
        if not 1 <= self.count <= largest:
            yield Violation("count", f"is {self.count}; this server takes groups of 1 to {largest:,} rollouts")
        if self.min_usable > self.count:
            yield Violation(
                "min_usable", f"is {self.min_usable}, more than `count`, so the group would never have enough"
            )
        if self.refill > LARGEST_GROUP:
            yield Violation("refill", f"is {self.refill}, at most {LARGEST_GROUP:,} are allowed")
        if spec.group_index is not None:
            yield Violation("spec.group_index", "must be unset; the server numbers the rollouts of a group")
        if len(member_id(spec.rollout_id, self.count - 1, self.refill)) > ID_LENGTH:
            text = (
                f"has {len(spec.rollout_id)} characters; with a suffix for each rollout at most {ID_LENGTH} are allowed"
            )
            yield Violation("spec.rollout_id", text)


def member_id(rollout_id: str, index: int, refills: int) -> str:
    """Return the rollout id of a member. `refills` counts the refills of the group up to this one; 0: it is not a refill."""
    return f"{rollout_id}/{index}/r{refills}" if refills else f"{rollout_id}/{index}"


@dataclass(frozen=True, slots=True)
class GroupResult:
    """How a group ended. `asked` is the sum of `completed`, `failed` and `cancelled`; replaced rollouts are in none of them.

    `early_stop`: rollouts were cancelled because enough of them were usable. It depends on the ends only, as all values do: a
    server that has restarted gets the same result from the ends that are stored.
    """

    asked: int
    usable: int
    refilled: int
    completed: int
    failed: int
    cancelled: int
    early_stop: bool


@dataclass(frozen=True, slots=True)
class GroupState:
    """How far a group is.

    Args:
        ends: the end of the current rollout of each index; None: it has not ended. An end may still change until the group has its
            reward.
        running: number of `ends` that are None. It and `usable` are counted along, so that a step takes no time for each rollout.
        usable: number of `ends` that are usable.
        refilled: number of rollouts that were started anew.
        early_stop: enough rollouts were usable before all had ended, so the others are to be cancelled.
    """

    plan: GroupPlan
    ends: tuple[End | None, ...]
    running: int
    usable: int = 0
    refilled: int = 0
    early_stop: bool = False

    @classmethod
    def of(cls, plan: GroupPlan) -> GroupState:
        """Return the state of a group that begins."""
        return cls(plan, (None,) * plan.count, plan.count)

    @property
    def is_complete(self) -> bool:
        """Whether all rollouts have ended."""
        return not self.running

    def after(self, index: int, end: End, *, may_refill: bool) -> GroupState:
        """Return the state after the rollout of an index ended, or its end changed.

        If `refilled` has increased, the caller starts the rollout of this index anew. If `early_stop` has become true, it cancels
        the rollouts that have not ended.
        """
        plan, former = self.plan, self.ends[index]
        failed = isinstance(end, Failure) and not plan.is_usable(end)
        refills = may_refill and failed and not self.early_stop and self.refilled < plan.refill
        now = None if refills else end
        running = self.running - (former is None) + (now is None)
        usable = (
            self.usable - (former is not None and plan.is_usable(former)) + (now is not None and plan.is_usable(now))
        )
        enough = 0 < plan.min_usable <= usable
        return replace(
            self,
            ends=(*self.ends[:index], now, *self.ends[index + 1 :]),
            running=running,
            usable=usable,
            refilled=self.refilled + refills,
            early_stop=self.early_stop or (enough and running > 0),
        )

    def result(self) -> GroupResult:
        """Return the result of a complete group."""
        completed, failed, cancelled = (
            sum(isinstance(end, kind) for end in self.ends) for kind in (Stop, Failure, Cancellation)
        )
        stopped = Cancellation(EARLY_STOP) in self.ends
        return GroupResult(self.plan.count, self.usable, self.refilled, completed, failed, cancelled, stopped)
