"""A small world around the runtime: a trainer that follows a script, agents of every temper, and what must be true of a log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollout_server.agent import Agent
from rollout_server.core.ledger import Prediction, pack_tokens
from rollout_server.core.limits import Limits
from rollout_server.core.machine import Machine, replay
from rollout_server.core.message import JSON, Message, ToolCall
from rollout_server.core.outcome import Category, Failure, Outcome
from rollout_server.core.record import Accepted, Answered, Ended
from rollout_server.core.spec import Dialect, Spec, Target
from rollout_server.core.spec_validation import Bounds
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import Clock, CompletionRequest, Credentials, Fork, Sampler, Tool
from rollout_server.runtime.registry.dependencies import (
    DeliveryRetryPolicy,
    NoObserver,
    NoReporter,
    Observer,
    RegistryDependencies,
    Reporter,
)
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Caller, Capacity, StartRequest

from tests.support.machine_records import shown_outcome

ME = Caller("me")
OTHER = Caller("other")
ADMIN = Caller("admin", admin=True)
USER = Message.write({"role": "user", "content": "5 + 3?"})
FOREVER = float("inf")
EPOCH = 1_700_000_000.0
SECRET = "postgres://user:hunter2@db"


@dataclass(frozen=True)
class Say:
    """One answer of the trainer, `seconds` after it was asked.

    `message` stands for a whole message where text and calls are not enough; `failure` and `error` for no answer at all.
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: int = 1
    finish_reason: str = "stop"
    seconds: float = 0.0
    message: str = ""
    reported: tuple[int, ...] | None = None
    failure: Failure | None = None
    error: Exception | None = None

    def answer(self, turn: int) -> Answered:
        """The answer, after a prompt that was predicted as one token."""
        return Answered(
            turn,
            Message.parse(self.message) if self.message else _assistant(self.text, self.calls),
            self.finish_reason,
            pack_tokens(range(10, 10 + self.tokens)),
            predicted=Prediction(pack_tokens(), pack_tokens([turn])),
            reported=None if self.reported is None else pack_tokens(self.reported),
            tool_calls=len(self.calls),
        )


class Script:
    """A sampler: answers its k-th question with the k-th answer, and goes on with the last one."""

    def __init__(self, *says: Say) -> None:
        self.says = says or (Say("done"),)
        self.asks: list[CompletionRequest] = []
        self.forks: list[Fork] = []

    async def sample(self, ask: CompletionRequest) -> Answered:
        self.asks.append(ask)
        say = self.says[min(len(self.asks), len(self.says)) - 1]
        await wait(say.seconds)
        if say.failure is not None:
            raise RolloutFailed(say.failure)
        if say.error is not None:
            raise say.error
        return say.answer(ask.asked.turn)

    def fork(self, fork: Fork) -> Script:
        """All conversations are answered from one script, in the order in which they ask."""
        self.forks.append(fork)
        return self


class RuntimeHarness:
    """A roster whose rollouts have scripts. The clocks are the loop's."""

    def __init__(
        self,
        *agents: Agent,
        capacity: Capacity = Capacity(),
        bounds: Bounds = Bounds(),
        reporter: Reporter | None = None,
        patience: DeliveryRetryPolicy = DeliveryRetryPolicy(),
        observer: Observer | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.scripts: dict[str, Script] = {}
        self.opened: list[str] = []
        self.rollouts: list[Rollout] = []
        self.roster = RolloutRegistry(
            agents or (Looping(),),
            self._open,
            self._new_uid,
            capacity=capacity,
            bounds=bounds,
            dependencies=RegistryDependencies(
                Clock(lambda: EPOCH + loop.time(), loop.time),
                observer or NoObserver(),
                reporter or NoReporter(),
                patience,
            ),
        )

    def start(self, *says: Say, spec: Spec | None = None, caller: str = "me", **spec_fields: object) -> Rollout:
        """A new rollout that answers this way."""
        number = len(self.rollouts) + 1
        spec = spec if spec is not None else a_spec(**{"rollout_id": f"r{number}", **spec_fields})
        self.scripts[spec.rollout_id] = Script(*says)
        rollout, found = self.wish(StartRequest(spec, caller))
        assert not found
        return rollout

    def wish(self, wish: StartRequest) -> tuple[Rollout, bool]:
        """What the roster answers to a wish."""
        rollout, found = self.roster.start(self.roster.admit(wish))
        if not found:
            self.rollouts.append(rollout)
        return rollout, found

    async def close(self) -> None:
        """Ends what is left. Every rollout there ever was has ended once then, and no place is taken."""
        await self.roster.drain(0)
        for rollout in self.rollouts:
            check_log(rollout)
        assert (self.roster.running, self.roster.queued, self.roster.finished) == (0, 0, len(self.rollouts))

    def script(self, rollout: Rollout) -> Script:
        """What answers the rollout."""
        return self.scripts[rollout.spec.rollout_id]

    def _open(self, uid: str, spec: Spec, tools: Sequence[Tool]) -> Sampler:
        self.opened.append(spec.rollout_id)
        return self.scripts.setdefault(spec.rollout_id, Script())

    def _new_uid(self) -> str:
        return f"u{len(self.rollouts) + 1}"


class Looping(Agent):
    """Plays the default loop."""

    name = "looping"


def a_spec(**fields: object) -> Spec:
    """A spec that is right, but for `fields`."""
    return replace(Spec("r", (USER,), Target("grpc://trainer:50051", Dialect.GRPC)), **fields)  # type: ignore[arg-type]


def a_wish(request_id: str = "", *, until_received: bool = False, key: str = "", **fields: object) -> StartRequest:
    """A wish of the caller "me"; `key` is the trainer's credential."""
    return StartRequest(a_spec(**fields), "me", request_id, until_received, Credentials(key))


def call(tool: str, call_id: str = "c", /, **arguments: JSON) -> ToolCall:
    """A call as models write it."""
    return ToolCall(call_id, tool, json.dumps(arguments))


async def wait(seconds: float) -> None:
    """Sleeps; for ever until it is cancelled, if need be."""
    if seconds == FOREVER:
        await asyncio.get_running_loop().create_future()
    await asyncio.sleep(seconds)


async def outcome_of(rollout: Rollout) -> Outcome:
    """The outcome of a rollout once it has ended, and its log is as logs must be."""
    async for _ in rollout.log.follow(0):
        pass
    return check_log(rollout)


def check_log(rollout: Rollout) -> Outcome:
    """What is true of the log of every rollout that has ended. Returns the outcome."""
    entries = rollout.log.entries
    records = [entry.record for entry in entries]
    assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))
    assert isinstance(records[0], Accepted)
    assert [record for record in records if isinstance(record, Ended)] == records[-1:]
    outcome, spec = rollout.outcome, rollout.spec
    again = replay(Machine(rollout.uid, spec.messages, spec.limits), records).outcome
    assert outcome is not None
    assert again is not None
    assert shown_outcome(again) == shown_outcome(outcome)
    return outcome


def assert_internal(outcome: Outcome) -> None:
    """The failure is said to be ours or the author's, and nothing of its text shows."""
    assert isinstance(outcome.end, Failure)
    assert outcome.end.category is Category.INTERNAL
    assert SECRET not in outcome.end.message
    assert "LookupError" not in outcome.end.message


def contents(outcome: Outcome, role: str) -> list[JSON]:
    """What was said in a role, in order."""
    return [message.fields()["content"] for message in outcome.messages if message.role == role]


def limits(**values: float) -> Mapping[str, Limits]:
    """The field of a spec."""
    return {"limits": Limits(**values)}  # type: ignore[arg-type]


def _assistant(text: str, calls: Sequence[ToolCall]) -> Message:
    fields: dict[str, JSON] = {"role": "assistant", "content": text}
    if calls:
        fields["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
        ]
    return Message.write(fields)
