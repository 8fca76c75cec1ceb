"""Rollouts of the journal's benchmark: a runtime whose sampler returns prepared completions.

There is no trainer, tokenizer or network. What differs between two runs of the same workload is the journal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from rollout_server import Agent, Run, tool
from rollout_server.core.ledger import Prediction, pack_logprobs, pack_tokens
from rollout_server.core.message import Message
from rollout_server.core.outcome import Stop
from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import Dialect, Spec, Target
from rollout_server.runtime.journal import Journal
from rollout_server.runtime.ports import CompletionRequest, Fork, Tool
from rollout_server.runtime.registry.dependencies import RegistryDependencies
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Capacity, StartRequest

PROMPT_TOKENS = 100
"""Prompt tokens that each turn adds."""
COMPLETION_TOKENS = 50
LONG_PROMPT = 32_000
_TEXT = "The order was shipped on Tuesday and arrives within four days. "
_SYSTEM = Message.write({"role": "system", "content": "You answer questions about orders. " * 5})
_USER = Message.write({"role": "user", "content": "Where is my order, and when does it arrive? " * 5})


class WrongEnd(Exception):
    """A rollout of the workload did not end as scripted."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Rollouts of one kind.

    Args:
        at_once: rollouts that run at the same time.
        rollouts: rollouts per round.
        turns: completions of one rollout. Each but the last has one tool call.
        first_prompt: prompt tokens of the first turn.
        repeatable: whether the tool may run again after a crash. If not, the start of each call waits for a commit.
    """

    at_once: int
    rollouts: int
    turns: int = 10
    first_prompt: int = 10 * PROMPT_TOKENS
    repeatable: bool = True

    def __str__(self) -> str:
        notes = [str(self.at_once)]
        if self.first_prompt >= LONG_PROMPT:
            notes.append(f"with a first prompt of {self.first_prompt:,} tokens")
        if not self.repeatable:
            notes.append("with a tool that is not `idempotent`")
        return ", ".join(notes)


@tool(idempotent=True)
async def look_up(order: str) -> str:
    """Return the state of an order."""
    return _TEXT * 6


@tool
async def ship(order: str) -> str:
    """Ship an order again."""
    return _TEXT * 6


@dataclass
class Turns(Agent):
    """Requests completions and runs their tool calls, and measures what the server adds to the time of each completion.

    Args:
        seconds: seconds from each call of `sample` to its return, without those of the sampler.
        generation: seconds that the sampler took for the newest completion, by uid.
    """

    seconds: list[float] = field(default_factory=list)
    generation: dict[str, float] = field(default_factory=dict)
    name = "turns"
    tools = (look_up, ship)
    replayable = True

    async def play(self, run: Run) -> None:
        while True:
            began = time.perf_counter()
            reply = await run.sample()
            self.seconds.append(time.perf_counter() - began - self.generation.pop(run.uid, 0.0))
            if not reply.tool_calls:
                return
            await run.call(reply.tool_calls)


class PreparedSampler:
    """Returns prepared completions. `wait` is called with the turn before each of them."""

    def __init__(self, completions: Sequence[Answered], wait: Callable[[int], Awaitable[None]]) -> None:
        self._completions = completions
        self._wait = wait

    async def sample(self, request: CompletionRequest) -> Answered:
        """Return the completion of the turn. Its prompt continues the conversation so far."""
        await self._wait(request.asked.turn)
        return replace(self._completions[request.asked.turn - 1], shared=request.ledger.tokens)

    def resume(self, asked: Asked, answered: Answered) -> None:
        """Do nothing: the sampler has no state."""

    def fork(self, fork: Fork) -> PreparedSampler:
        """Return the same sampler."""
        return self


class Site:
    """A registry with the agent `Turns` and a journal.

    Args:
        generation_seconds: how long the sampler takes for a completion on average; between half and three halves of it at random.
        finished: finished rollouts that the registry keeps. It deletes older ones, also from the journal.
    """

    def __init__(
        self, workload: Workload, journal: Journal, *, generation_seconds: float = 0.0, finished: int = 100_000
    ) -> None:
        self.agent = Turns()
        self._generation_seconds = generation_seconds
        self._random = Random(1)
        self.workload = workload
        self._completions = _completions(workload)
        self._started = 0
        self._blocked_turns: dict[str, int] = {}
        self.blocked = asyncio.Semaphore(0)
        """Counts the rollouts that wait for a completion that never arrives."""
        capacity = Capacity(running=workload.at_once, queued=100_000, finished=finished)
        dependencies = RegistryDependencies(journal=journal)
        self.registry = RolloutRegistry([self.agent], self._open, capacity=capacity, dependencies=dependencies)

    async def start(self, blocked_turn: int = 0) -> Rollout:
        """Start a rollout and wait until it is stored. The completion of `blocked_turn` never arrives."""
        self._started += 1
        target = Target("grpc://trainer:50051", Dialect.GRPC, replays_turn_keys=True)
        spec = Spec(f"r{self._started}", (_SYSTEM, _USER), target, metadata_json='{"order":"A-1"}')
        self._blocked_turns[spec.rollout_id] = blocked_turn
        rollout, _ = self.registry.start(self.registry.admit(StartRequest(spec, "bench")))
        await self.registry.accept([rollout])
        return rollout

    async def run(self, rollouts: int) -> None:
        """Run rollouts to their outcomes, as many at once as the workload says. Raises `WrongEnd`."""
        waiting = iter(range(rollouts))

        async def run_some() -> None:
            for _ in waiting:
                rollout = await self.start()
                await rollout.log.final_entry()
                check_end(rollout)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.workload.at_once, rollouts)):
                group.create_task(run_some())

    def _open(self, uid: str, spec: Spec, tools: Sequence[Tool]) -> PreparedSampler:
        return PreparedSampler(
            self._completions, partial(self._generate, uid, self._blocked_turns.pop(spec.rollout_id, 0))
        )

    async def _generate(self, uid: str, blocked_turn: int, turn: int) -> None:
        if turn == blocked_turn:
            self.blocked.release()
            await asyncio.Event().wait()
        if self._generation_seconds:
            began = time.perf_counter()
            await asyncio.sleep(self._generation_seconds * self._random.uniform(0.5, 1.5))
            self.agent.generation[uid] = time.perf_counter() - began


def check_end(rollout: Rollout) -> None:
    """Raise `WrongEnd` if a finished rollout did not end as scripted."""
    outcome = rollout.outcome
    if outcome is None or not isinstance(outcome.end, Stop):
        raise WrongEnd(f"rollout {rollout.uid} ended with {outcome and outcome.end}")


def _completions(workload: Workload) -> Sequence[Answered]:
    lengths = [workload.first_prompt] + [PROMPT_TOKENS] * (workload.turns - 1)
    return [_completion(turn, length, workload) for turn, length in enumerate(lengths, start=1)]


def _completion(turn: int, prompt_tokens: int, workload: Workload) -> Answered:
    has_call = turn < workload.turns
    fields = {"role": "assistant", "content": _TEXT * 2}
    if has_call:
        function = {"name": "look_up" if workload.repeatable else "ship", "arguments": '{"order": "A-1"}'}
        fields |= {"tool_calls": [{"id": f"call-{turn}", "type": "function", "function": function}]}  # type: ignore[dict-item]
    added = pack_tokens(range(1000, 1000 + prompt_tokens))
    return Answered(
        turn,
        Message.write(fields),
        "tool_calls" if has_call else "stop",
        pack_tokens(range(COMPLETION_TOKENS)),
        pack_logprobs([-0.1 * at for at in range(COMPLETION_TOKENS)]),
        Prediction(pack_tokens(), added),
        reported=added,
        elapsed_ms=1.0,
        policy_version="step-7",
        tool_calls=int(has_call),
        policy_step=7,
    )
