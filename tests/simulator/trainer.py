"""A trainer that outlives the server, generates tokens with unique ids, and watches what it is asked for."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rollout_server.core.ledger import PolicyRun, Prediction, pack_logprobs, pack_tokens
from rollout_server.core.message import JSON, Message
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.record import RESAMPLED, Answered, Asked
from rollout_server.core.spec import ENGINES, Spec
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import CompletionRequest, Fork, Tool

from tests.simulator.faults import Fault

if TYPE_CHECKING:
    from tests.simulator.world import Life, World

FIRST_SAMPLED = 1000
"""Ids below are those of prompts. Each id from here on is sampled once in a world."""
_ATTEMPTS = 3
_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sampled token comes from."""

    uid: str
    turn: int


class FakeTrainer:
    """The trainer of a world.

    Attributes:
        sampled: the origin of every sampled id.
        step: the step of its policy.
        opened: how many processes have opened a sampler for a rollout.
    """

    def __init__(self, world: World) -> None:
        self.sampled: dict[int, Origin] = {}
        self.step = 1
        self._world = world
        self._calls = 0
        self._completions: dict[str, Answered] = {}
        self._requested: dict[str, int] = {}
        self.opened: Counter[str] = Counter()

    def opener(self, life: Life) -> Any:
        """Return the function with which a server opens a sampler for a rollout."""

        def open_sampler(uid: str, spec: Spec, tools: Sequence[Tool]) -> FakeSampler:
            self._count_resumption(uid)
            return FakeSampler(self, life, uid, spec, [tool.name for tool in tools])

        return open_sampler

    def _count_resumption(self, uid: str) -> None:
        stored, faults = self._world.disk.rollouts.get(uid), self._world.faults
        self.opened[uid] += 1
        if self.opened[uid] == 1 or stored is None:
            return
        faults.count(Fault.RESUMED)
        if self.opened[uid] > 2:
            faults.count(Fault.RESUMED_AGAIN)
        if stored.asked - stored.answered:
            faults.count(Fault.RESUMED_TURN)
        if stored.calls:
            faults.count(Fault.RESUMED_CALL)

    def receive(self, life: Life, uid: str, spec: Spec, request: CompletionRequest) -> None:
        """Check that this turn may be requested now."""
        world, asked = self._world, request.asked
        require, key, stored = world.laws.require, asked.turn_key, world.disk.rollouts.get(uid)
        world.note(f"request {key}")
        require(
            stored is not None and asked.turn in stored.asked, f"{key} was requested before its record was committed"
        )
        if stored is not None:
            require(asked.turn not in stored.answered, f"{key} was requested again although its completion is stored")
            require(not stored.ended, f"{key} was requested after the end of its rollout")
        earlier = self._requested.setdefault(key, life.number)
        target = spec.completions
        # An engine knows no rollouts, so it may generate a turn again that nobody has seen.
        may_repeat = earlier == life.number or target.replays_turn_keys or target.dialect in ENGINES
        require(may_repeat, f"{key} was requested by another process, and its trainer does not replay keys")

    def generate(self, uid: str, spec: Spec, request: CompletionRequest, tools: Sequence[str]) -> Answered:
        """Return a completion: the same one for the same key if the trainer replays keys."""
        key, faults = request.asked.turn_key, self._world.faults
        before = self._completions.get(key)
        if before is not None and spec.completions.replays_turn_keys:
            faults.count(Fault.TRAINER_REPLAYED)
            return before
        if before is not None:
            faults.count(Fault.TRAINER_RESAMPLED)
        if faults.happens(Fault.TRAINER_NEW_POLICY):
            self.step += 1
        self._completions[key] = completion = self._generate(uid, request, tools)
        return completion

    def _generate(self, uid: str, request: CompletionRequest, tools: Sequence[str]) -> Answered:
        faults, draw, turn = self._world.faults, self._world.draw, request.asked.turn
        first = FIRST_SAMPLED + len(self.sampled)
        ids = range(first, first + draw.randint(1, 4))
        self.sampled |= dict.fromkeys(ids, Origin(uid, turn))
        environment = pack_tokens([1 + (turn + index) % 90 for index in range(draw.randint(1, 3))])
        prompt = request.ledger.prefix() + environment
        garbage = faults.happens(Fault.TRAINER_GARBAGE, 0.3)
        calls = [] if garbage else self._tool_calls(tools)
        completion = Answered(
            turn,
            Message.write({"role": "assistant", "content": 7, "tool_calls": 7} if garbage else _message(turn, calls)),
            draw.choice(("stop", "length")),
            pack_tokens(ids),
            pack_logprobs(-0.5 for _ in ids),
            Prediction(pack_tokens(), environment),
            prompt if draw.random() < 0.7 else None,
            tool_calls=len(calls),
            policy_step=self.step if draw.random() < 0.9 else None,
        )
        if len(ids) > 1 and completion.policy_step and faults.happens(Fault.TRAINER_TWO_POLICIES):
            runs = (PolicyRun(1, "", max(0, self.step - 1)), PolicyRun(len(ids) - 1, "", self.step))
            completion = replace(completion, runs=runs)
        return self._lie(uid, completion)

    def _lie(self, uid: str, completion: Answered) -> Answered:
        faults, ids = self._world.faults, completion.token_ids
        if ids is not None and faults.happens(Fault.TRAINER_WRONG_LENGTH, 0.3):
            self._world.excused.add(uid)
            return replace(completion, logprobs=pack_logprobs(-0.5 for _ in range(len(ids) + 1)))
        if faults.happens(Fault.TRAINER_NO_IDS, 0.5):
            return replace(completion, token_ids=None, logprobs=None, runs=(), usage=(3, 3))
        if completion.reported is not None and faults.happens(Fault.TRAINER_DRIFT, 0.5):
            return replace(completion, reported=pack_tokens([99]) + completion.reported)
        return completion

    def _tool_calls(self, tools: Sequence[str]) -> list[dict[str, JSON]]:
        draw = self._world.draw
        if not tools or draw.random() < 0.25:
            return []
        calls: list[dict[str, JSON]] = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            self._calls += 1
            name = "nothing" if self._world.faults.happens(Fault.TOOL_UNKNOWN) else draw.choice((*tools, "look"))
            key = f"call {self._calls}"
            function: dict[str, JSON] = {"name": name, "arguments": json.dumps({"key": key})}
            calls.append({"id": key, "type": "function", "function": function})
        return calls


class FakeSampler:
    """The connection of one process to the trainer, for one conversation. It repeats a request under the same turn key."""

    def __init__(self, trainer: FakeTrainer, life: Life, uid: str, spec: Spec, tools: Sequence[str]) -> None:
        self._trainer = trainer
        self._life = life
        self._uid = uid
        self._spec = spec
        self._tools = tools
        self._last = 0

    def resume(self, asked: Asked, answered: Answered) -> None:
        """Take over a turn that an earlier process has completed."""
        self._check_last(answered.turn, asked.turn == answered.turn)
        self._last = answered.turn

    def _check_last(self, turn: int, fits: bool) -> None:
        self._life.world.laws.require(
            fits, f"{self._uid}: the sampler had turn {self._last} last, and now gets turn {turn}"
        )

    async def sample(self, request: CompletionRequest) -> Answered:
        """Return a completion. Raise `RolloutFailed`."""
        draw, faults, life = self._life.world.draw, self._life.world.faults, self._life
        source, last = self._spec.completions.failure_class, request.last
        self._check_last(request.asked.turn, not self._last or (last is not None and last.turn == self._last))
        for attempt in range(_ATTEMPTS):
            await request.gate.wait()
            self._trainer.receive(life, self._uid, self._spec, request)
            if faults.happens(Fault.TRAINER_UNREACHABLE, 0.3):
                break
            if not faults.happens(Fault.TRAINER_REQUEST_LOST):
                await self._delay()
                completion = self._trainer.generate(self._uid, self._spec, request, self._tools)
                life.world.note(f"generated {request.asked.turn_key} {completion.message.text} {completion.token_ids}")
                await asyncio.sleep(draw.uniform(0, 0.2))
                if not faults.happens(Fault.TRAINER_RESPONSE_LOST):
                    self._last = request.asked.turn
                    return replace(completion, attempts=attempt + 1)
                if not self._spec.completions.replays_turn_keys:
                    request.note(RESAMPLED, "the response of the trainer was lost")
            await asyncio.sleep(draw.uniform(0.1, 2))
        raise RolloutFailed(
            Failure(Category.NETWORK, "the trainer cannot be reached", request.asked.turn, source=source)
        )

    async def _delay(self) -> None:
        draw, faults = self._life.world.draw, self._life.world.faults
        if faults.happens(Fault.TRAINER_HANGS, 0.2):
            await asyncio.get_running_loop().create_future()
        if faults.happens(Fault.TRAINER_BUG, 0.2):
            self._life.world.excused.add(self._uid)
            raise LookupError("a bug of the sampler")
        if faults.happens(Fault.TRAINER_TIMES_OUT, 0.2):
            await asyncio.sleep(_SECONDS)
            source = FailureClass.TRAINER
            raise RolloutFailed(Failure(Category.TIMEOUT, "the trainer did not respond", source=source))
        await asyncio.sleep(draw.uniform(1, 15) if faults.happens(Fault.TRAINER_SLOW) else draw.uniform(0, 0.5))

    def fork(self, fork: Fork) -> FakeSampler:
        """Return a sampler for another conversation."""
        tools = self._tools if fork.tools is None else [tool.name for tool in fork.tools]
        return FakeSampler(self._trainer, self._life, self._uid, self._spec, tools)


def _message(turn: int, calls: list[dict[str, JSON]]) -> dict[str, JSON]:
    message: dict[str, JSON] = {"role": "assistant", "content": f"turn {turn}"}
    return message | {"tool_calls": calls} if calls else message
