"""The end of a rollout, from the moment it is requested or reached until it is recorded."""

from __future__ import annotations

import asyncio

from rollout_server.core.outcome import Category, End, Failure, RewardResult, Stop


class RolloutEnding:
    """Whether a rollout is ending, and how: the single source of that state.

    Two kinds of events end a running rollout; of each kind the first one counts. An end is *requested* by a cancel, the time
    limit or a drain. An end is *reached* by the run itself: a limit, a failed trainer, `finish`, or a `play` that returned. The
    driver waits for both. A failure that was reached is final. A stop that was reached is final unless an end is requested
    before the reward is computed. The final end is *decided*: from then on the agent can change nothing of the rollout. The
    agent's `cleanup` runs, and then the end is recorded as `Ended`, which gives the machine its outcome. In a group with a reward
    of its own, the recording waits for that reward; until then the decided end is *provisional*, and a requested end replaces it.

    Attributes:
        requested: the end that was requested.
        reached: the end that the run reached. After it the run can issue no more commands.
        decided: the end of the outcome; None until it is decided.
        provisional: whether an end can be requested after the decision, until the outcome is recorded.
        reward: the reward so far: that of a stop once it is decided. Of a reached failure only further results (`extra_json`).
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.requested: asyncio.Future[End] = loop.create_future()
        self.reached: asyncio.Future[End] = loop.create_future()
        self.decided: End | None = None
        self.provisional = False
        self.reward = RewardResult()

    @property
    def is_requested(self) -> bool:
        """Whether an end was requested or decided."""
        return self.requested.done() or self.decided is not None

    @property
    def is_interrupted(self) -> bool:
        """Whether an end was requested because the server stops, or stopped."""
        end = self.requested.result() if self.requested.done() else None
        return isinstance(end, Failure) and end.category is Category.INTERRUPTED

    @property
    def is_reached(self) -> bool:
        """Whether the run reached an end, or an end was decided."""
        return self.reached.done() or self.decided is not None

    @property
    def end(self) -> End:
        """The end as the run sees it; a plain stop if there is none yet."""
        if self.decided is not None:
            return self.decided
        return self.reached.result() if self.reached.done() else Stop("stop")

    @property
    def is_final(self) -> bool:
        """Whether the end of the outcome is decided and cannot be replaced any more."""
        return self.decided is not None and not self.provisional

    def request(self, end: End) -> bool:
        """Request this end. Return False if an end was requested before, or is final: then this has no effect."""
        if self.requested.done() or self.is_final:
            return False
        self.requested.set_result(end)
        return True

    def reach(self, end: End, reward: RewardResult | None = None) -> None:
        """Set the end that the run reached. Only the first call has an effect."""
        if not self.reached.done():
            self.reached.set_result(end)
            self.reward = reward or self.reward

    def decide(self, end: End, reward: RewardResult) -> None:
        """Set the end and the reward of the outcome. Called once, by the driver."""
        self.decided, self.reward = end, reward
