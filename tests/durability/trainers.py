"""The trainers of the crash tests. They run in the test's process, so they survive the server."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rollout_server.testing import TrainerDialect
from rollout_server.testing.script import ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from tests.durability.agents import Steps
from tests.durability.aims import Case, Generations
from tests.support.engine_model import EngineModel
from tests.support.engines import VllmEngine, serving

SENT_AGAIN = "which is final, but it was sent again"
TOOLS = [
    {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters_json_schema},
    }
    for tool in Steps.tools
]


@dataclass
class StepsModel:
    """The model of the strict trainers: it calls the tools of a case's steps. Deterministic and without state."""

    generations: Generations

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> ScriptedReply:
        """Return the completion of the turn that these messages request."""
        case = Case.of(str(messages[0]["content"]))
        turn = 1 + sum(message["role"] == "assistant" for message in messages)
        self.generations.begin(case.number, turn)
        calls = tuple(
            tool_call(f"call_{arguments['step']}", name, json.dumps(arguments)) for name, arguments in case.calls(turn)
        )
        return ScriptedReply(content=case.text(turn), tool_calls=calls)


@dataclass
class StepsEngineModel(EngineModel):
    """The same model behind an inference engine."""

    generations: Generations | None = None

    def next_text(self, prompt: Sequence[int]) -> str:
        """Return the text of the completion."""
        text = self.tokenizer.decode(list(prompt))
        case, turn = Case.of(text), text.count("<|im_start|>assistant")
        assert self.generations is not None
        self.generations.begin(case.number, turn)
        calls = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in case.calls(turn))
        return case.text(turn) + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)


@dataclass(frozen=True)
class TurnRequest:
    """A completion request that a trainer received."""

    rollout_id: str
    turn_key: str


@dataclass
class Trainers:
    """One trainer per protocol. `masked` and `plain` generate again when a turn is requested again, as does the engine."""

    generations: Generations
    masked: StrictTrainer
    plain: StrictTrainer
    replaying: StrictTrainer
    grpc: StrictTrainer
    engine: VllmEngine
    _read: Counter[str] = field(default_factory=Counter)

    def requests(self) -> list[TurnRequest]:
        """The requests of all strict trainers so far; an engine gets no keys."""
        over_http = [
            TurnRequest(request.body["rollout_id"], request.headers.get("idempotency-key", ""))
            for trainer in (self.masked, self.plain, self.replaying)
            for request in trainer.requests
        ]
        over_grpc = [TurnRequest(seen.request.rollout_id, seen.request.turn_key) for seen in self.grpc.completions]
        return over_http + over_grpc

    def keys_by_rollout(self) -> Mapping[str, Counter[str]]:
        """For each rollout id its turn keys, with the number of requests."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for request in self.requests():
            found[request.rollout_id][request.turn_key] += 1
        return found

    def refusals(self, rollout_ids: Iterable[str]) -> list[str]:
        """What the strict trainers refused of these rollouts.

        An outcome that is sent again after its acknowledgement is not counted: a crash may lose the acknowledgement.
        """
        return [
            f"{rollout_id}: {refusal.text}"
            for trainer in (self.masked, self.plain, self.replaying, self.grpc)
            for rollout_id in rollout_ids
            if (verdict := trainer.verdict(rollout_id))
            for refusal in verdict.refusals
            if SENT_AGAIN not in refusal.text
        ]


@asynccontextmanager
async def trainers(generations: Generations) -> AsyncIterator[Trainers]:
    """Serve all trainers."""
    async with AsyncExitStack() as stack:

        async def strict(dialect: TrainerDialect, **options: Any) -> StrictTrainer:
            trainer = StrictTrainer(
                dialect=dialect, model=StepsModel(generations), tools=TOOLS, requests_kept=100_000, **options
            )
            return await stack.enter_async_context(trainer)

        engine = VllmEngine(StepsEngineModel((), generations=generations))
        await stack.enter_async_context(serving(engine))
        yield Trainers(
            generations,
            masked=await strict(TrainerDialect.MASKED, grpc_port=None),
            plain=await strict(TrainerDialect.PLAIN, grpc_port=None),
            replaying=await strict(TrainerDialect.PLAIN, grpc_port=None, replays_keys=True),
            grpc=await strict(TrainerDialect.PLAIN, replays_keys=True),
            engine=engine,
        )
