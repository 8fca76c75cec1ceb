"""A runtime with scripted samplers, agents with various behaviours, and the invariants of every log."""

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
from rollout_server.core.record import Accepted, Answered, Asked, Ended
from rollout_server.core.spec import Dialect, Spec, Target
from rollout_server.core.spec_validation import Bounds
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.journal import Journal, MemoryJournal
from rollout_server.runtime.models import FurtherModels, NoFurtherModels
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
from rollout_server.runtime.tools.resources import ToolResources

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
    """One completion of the trainer, `seconds` after its request.

    `message` is a whole message, for cases that text and calls cannot express. `failure` and `error` replace the
    completion. `step` is the policy step of its tokens.
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
    step: int | None = None

    def answer(self, turn: int) -> Answered:
        """The completion, after a prompt predicted as one token."""
        return Answered(
            turn,
            Message.parse(self.message) if self.message else _assistant(self.text, self.calls),
            self.finish_reason,
            pack_tokens(range(10, 10 + self.tokens)),
            predicted=Prediction(pack_tokens(), pack_tokens([turn])),
            reported=None if self.reported is None else pack_tokens(self.reported),
            tool_calls=len(self.calls),
            policy_step=self.step,
        )


class Script:
    """A sampler that returns its k-th completion for the k-th request; the last one repeats."""

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

    def resume(self, asked: Asked, answered: Answered) -> None:
        """See `Sampler.resume`."""

    def fork(self, fork: Fork) -> Script:
        """All conversations share one script, in the order of their requests."""
        self.forks.append(fork)
        return self


class RuntimeHarness:
    """A registry whose rollouts have scripted samplers. It uses the loop's clock."""

    def __init__(
        self,
        *agents: Agent,
        capacity: Capacity = Capacity(),
        bounds: Bounds = Bounds(),
        reporter: Reporter | None = None,
        patience: DeliveryRetryPolicy = DeliveryRetryPolicy(),
        observer: Observer | None = None,
        tools: ToolResources | None = None,
        models: FurtherModels | None = None,
        journal: Journal | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.scripts: dict[str, Script] = {}
        self.new_script: type[Script] = Script
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
                tools,
                models or NoFurtherModels(),
                journal=journal or MemoryJournal(),
            ),
        )

    def start(self, *says: Say, spec: Spec | None = None, caller: str = "me", **spec_fields: object) -> Rollout:
        """Start a new rollout with these completions."""
        number = len(self.rollouts) + 1
        spec = spec if spec is not None else a_spec(**{"rollout_id": f"r{number}", **spec_fields})
        self.scripts[spec.rollout_id] = self.new_script(*says)
        rollout, found = self.wish(StartRequest(spec, caller))
        assert not found
        return rollout

    def wish(self, wish: StartRequest) -> tuple[Rollout, bool]:
        """Admit and start a request; return the rollout and whether it existed already."""
        rollout, found = self.roster.start(self.roster.admission.admit(wish))
        if not found:
            self.rollouts.append(rollout)
        return rollout, found

    async def load(self) -> None:
        """Take over the rollouts of earlier processes, without groups."""
        await self.roster.load(lambda groups, rollouts: None)

    async def restore(self) -> None:
        """Take over the rollouts of earlier processes, and continue them."""
        await self.load()
        self.roster.resume()

    async def close(self) -> None:
        """End all rollouts. Checks that each rollout ended exactly once and that all slots are free."""
        await self.roster.drain(0)
        for rollout in self.rollouts:
            check_log(rollout)
        assert (self.roster.running, self.roster.queued, self.roster.totals.finished) == (0, 0, len(self.rollouts))

    def script(self, rollout: Rollout) -> Script:
        """The script of a rollout."""
        return self.scripts[rollout.spec.rollout_id]

    def _open(self, uid: str, spec: Spec, tools: Sequence[Tool]) -> Sampler:
        self.opened.append(spec.rollout_id)
        return self.scripts.setdefault(spec.rollout_id, Script())

    def _new_uid(self) -> str:
        return f"u{len(self.rollouts) + 1}"


class Looping(Agent):
    """An agent with the default loop."""

    name = "looping"


def a_spec(**fields: object) -> Spec:
    """A valid spec with changed `fields`."""
    return replace(Spec("r", (USER,), Target("grpc://trainer:50051", Dialect.GRPC)), **fields)  # type: ignore[arg-type]


def a_wish(request_id: str = "", *, until_received: bool = False, key: str = "", **fields: object) -> StartRequest:
    """A start request of the caller "me"; `key` is the trainer's credential."""
    return StartRequest(a_spec(**fields), "me", request_id, until_received, Credentials(key))


def call(tool: str, call_id: str = "c", /, **arguments: JSON) -> ToolCall:
    """A tool call in the format of models."""
    return ToolCall(call_id, tool, json.dumps(arguments))


async def wait(seconds: float) -> None:
    """Sleep; with FOREVER, until the task is cancelled."""
    if seconds == FOREVER:
        await asyncio.get_running_loop().create_future()
    await asyncio.sleep(seconds)


async def outcome_of(rollout: Rollout) -> Outcome:
    """Wait for the end of a rollout, check its log and return the outcome."""
    async for _ in rollout.log.follow(0):
        pass
    return check_log(rollout)


def check_log(rollout: Rollout) -> Outcome:
    """Check the invariants of an ended rollout's log, and return the outcome."""
    entries = rollout.log.entries
    records = [entry.record for entry in entries]
    assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))
    assert isinstance(records[0], Accepted)
    assert [record for record in records if isinstance(record, Ended)] == records[-1:]
    outcome, spec = rollout.outcome, rollout.spec
    again = replay(Machine(rollout.uid, spec.messages, spec.limits, spec.staleness), records).outcome
    assert outcome is not None
    assert again is not None
    assert shown_outcome(again) == shown_outcome(outcome)
    return outcome


def assert_internal(outcome: Outcome) -> None:
    """Assert that the failure is internal and reveals no text of the exception."""
    assert isinstance(outcome.end, Failure)
    assert outcome.end.category is Category.INTERNAL
    assert SECRET not in outcome.end.message
    assert "LookupError" not in outcome.end.message


def contents(outcome: Outcome, role: str) -> list[JSON]:
    """Contents of all messages with a role, in order."""
    return [message.fields()["content"] for message in outcome.messages if message.role == role]


def limits(**values: float) -> Mapping[str, Limits]:
    """Limits, as the field of a spec."""
    return {"limits": Limits(**values)}  # type: ignore[arg-type]


def _assistant(text: str, calls: Sequence[ToolCall]) -> Message:
    fields: dict[str, JSON] = {"role": "assistant", "content": text}
    if calls:
        fields["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
        ]
    return Message.write(fields)
