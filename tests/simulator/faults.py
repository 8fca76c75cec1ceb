"""The kinds of faults, and how a seed draws them."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from random import Random


class Fault(Enum):
    """What can go wrong in a world, and what callers do that a server must survive. The value is its name in a trace."""

    TRAINER_SLOW = "trainer: slow"
    TRAINER_REQUEST_LOST = "trainer: a request is lost"
    TRAINER_RESPONSE_LOST = "trainer: a response is lost"
    TRAINER_UNREACHABLE = "trainer: unreachable"
    TRAINER_REPLAYED = "trainer: returns a completion again for the same turn key"
    TRAINER_RESAMPLED = "trainer: generates a turn again that it had generated"
    TRAINER_GARBAGE = "trainer: malformed message"
    TRAINER_WRONG_LENGTH = "trainer: fewer logprobs than ids"
    TRAINER_NO_IDS = "trainer: no ids"
    TRAINER_DRIFT = "trainer: another prompt than predicted"
    TRAINER_TIMES_OUT = "trainer: time-out"
    TRAINER_HANGS = "trainer: never responds"
    TRAINER_NEW_POLICY = "trainer: the policy moves on"
    TRAINER_TWO_POLICIES = "trainer: a completion of two policies"
    TRAINER_BUG = "trainer: an unexpected exception"
    TOOL_SLOW = "tool: slow"
    TOOL_FAILS = "tool: fails"
    TOOL_HANGS = "tool: never returns"
    TOOL_STUBBORN = "tool: ignores its cancellation"
    TOOL_UNKNOWN = "tool: the model calls one that does not exist"
    RECEIVER_DOWN = "receiver: down"
    RECEIVER_REFUSES = "receiver: refuses"
    RECEIVER_ACK_LOST = "receiver: the acknowledgement is lost"
    RECEIVER_HANGS = "receiver: hangs"
    RECEIVER_BUG = "receiver: an unexpected exception"
    DISK_SLOW = "disk: slow"
    DISK_FULL = "disk: full for a while"
    DISK_SPLIT = "disk: a commit has only a part of what was written"
    DISK_LOSES = "disk: a crash loses what was not committed"
    DISK_UNSEEN = "disk: committed, but the server crashed before it knew"
    CALLER_RACES = "caller: the same request twice at once"
    CALLER_REPEATS = "caller: the same request again"
    CALLER_CONFLICTS = "caller: the same request id for another payload"
    CALLER_CANCELS = "caller: cancels"
    CALLER_ACKNOWLEDGES = "caller: acknowledges"
    CALLER_RESENDS = "caller: has an outcome sent again"
    CALLER_DETACHES = "caller: detaches"
    CALLER_PAUSES = "caller: pauses its policy"
    AGENT_RAISES = "agent: raises"
    AGENT_SWALLOWS = "agent: swallows the end"
    AGENT_STUBBORN = "agent: ignores its cancellation"
    AGENT_LEAVES_TASKS = "agent: returns while its tasks run"
    AGENT_GIVES_UP = "agent: cancels its own completion"
    CLEANUP_FAILS = "agent: cleanup fails"
    GROUP_REWARD_FAILS = "agent: reward_group fails"
    DRAIN = "server: drain"
    RESUMED = "server: a rollout continues after a restart"
    RESUMED_TURN = "server: a rollout continues that waited for a completion"
    RESUMED_CALL = "server: a rollout continues that waited for a tool"
    RESUMED_AGAIN = "server: a rollout continues for the second time"
    CRASH = "server: crash"
    CRASH_IN_RESTORE = "server: crash while it restores"
    CRASH_IN_GROUP = "server: crash before the end of a group"
    CRASH_IN_DRAIN = "server: crash in a drain"


class Faults:
    """The faults of one world.

    A seed has about half of the kinds, each with a rate of its own: if every world had all of them, few rollouts would get far.

    Attributes:
        calm: no faults any more.
        hits: how often each kind happened.
    """

    def __init__(self, draw: Random) -> None:
        self.calm = False
        self.hits: Counter[Fault] = Counter()
        self._draw = draw
        self._rates = {fault: draw.choice((0.0, 0.0, 0.02, 0.06, 0.25)) for fault in Fault}

    def happens(self, fault: Fault, scale: float = 1.0) -> bool:
        """Draw whether a fault happens now, and count it."""
        if self.calm or self._draw.random() >= self._rates[fault] * scale:
            return False
        self.count(fault)
        return True

    def count(self, fault: Fault) -> None:
        """Count a fault that happened."""
        self.hits[fault] += 1
