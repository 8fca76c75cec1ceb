"""A rollout over real HTTP with the strict trainer, at a host name that is resolved and checked."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from itertools import count
from urllib.parse import urlsplit

from rollout_server.calculator import Calculator
from rollout_server.core.outcome import Outcome
from rollout_server.core.spec import Dialect, Spec, Target, TokenizerName
from rollout_server.edge.metrics.observer import MetricsObserver
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.edge.trainer.http_client import HttpClient, HttpSettings
from rollout_server.edge.trainer.http_masked_sampler import MaskedTrainers
from rollout_server.runtime.aio.loop_watchdog import LoopLag
from rollout_server.runtime.registry.dependencies import RegistryDependencies
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.start_request import StartRequest
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.metrics.counted import USER, Exposed, ledger_tokens, outcome_of, read
from tests.support.resolver import Table

NAME = "trainer.internal"
ROLLOUTS = 5


async def play() -> tuple[list[Outcome], Exposed, Table]:
    """Run some rollouts concurrently."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": t.name,
                "description": t.description,
                "parameters": json.loads(t.parameters_json_schema),
            },
        }
        for t in Calculator().tools
    ]
    async with AsyncExitStack() as stack:
        strict = await stack.enter_async_context(StrictTrainer(tools=tools))
        metrics, table = MetricsObserver(), Table({NAME: [[str(urlsplit(strict.url).hostname)]]})
        lookup = CheckedLookup(TargetRules.parse(NAME), table)
        client = HttpClient(HttpSettings(resolver=lookup))
        stack.push_async_callback(client.close)
        tokenizers = Tokenizers(LoaderSettings(directories={"toy": TOY_TOKENIZER}, local_files_only=True))
        stack.push_async_callback(tokenizers.close)
        lag = LoopLag(metrics.families.loop_lag.observe, 0.01)
        lag.start()
        stack.push_async_callback(lag.stop)
        trainers, numbers = MaskedTrainers(client, tokenizers), count(1)
        roster = RolloutRegistry(
            [Calculator()],
            lambda uid, spec, tools: trainers.open(spec, tools),
            lambda: f"u{next(numbers)}",
            dependencies=RegistryDependencies(observer=metrics),
        )
        metrics.watch_registry(roster)
        target = Target(f"http://{NAME}:{urlsplit(strict.url).port}", Dialect.HTTP_MASKED)
        outcomes = await asyncio.gather(
            *(
                outcome_of(
                    roster.start(
                        roster.admission.admit(
                            StartRequest(Spec(f"r{n}", (USER,), target, tokenizer=TokenizerName("toy")), "me")
                        )
                    )[0]
                )
                for n in range(ROLLOUTS)
            )
        )
        await roster.drain(0)
        return outcomes, read(metrics), table


def test_what_a_real_trainer_was_asked_is_what_is_counted() -> None:
    outcomes, exposed, table = asyncio.run(play())
    assert exposed.by("rollout_finished_total", "agent", "end", "reason") == {("calculator", "stop", "stop"): ROLLOUTS}
    turns = sum(outcome.metrics.turns for outcome in outcomes)
    assert exposed.value("rollout_turns_total", agent="calculator") == turns == 2 * ROLLOUTS
    assert exposed.value("rollout_completion_seconds_count", agent="calculator") == turns
    assert exposed.by("rollout_tool_seconds_count", "tool", "failed") == {("add", "false"): ROLLOUTS}
    assert exposed.by("rollout_tokens_total", "author", "reason") == ledger_tokens(outcomes)
    assert exposed.value("rollout_tokens_total", author="model", reason="generated") > 0
    assert exposed.value("rollout_loop_lag_seconds_count") > 0
    assert exposed.value("rollout_running") == exposed.value("rollout_queued") == 0
    assert set(table.asked) == {NAME}
