"""Fifty rollouts at once over gRPC, with tools on the loop, in threads and in processes: no state crosses rollouts."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from rollout_server import Agent, Run, ToolContext, tool
from rollout_server.local_stack import FinishedRollout, LocalStack, LoopThread, ScriptedModel

from tests.edge.tools import offered

ROLLOUTS = 50
ON_LOOP, IN_THREADS = asyncio.Barrier(ROLLOUTS), threading.Barrier(ROLLOUTS)


@tool
async def put(fruit: str, run: Run) -> str:
    """Waits until all rollouts have put something."""
    run.state["basket"] = [fruit]
    await ON_LOOP.wait()
    return str(run.state["basket"])


@tool
def put_more(fruit: str, context: ToolContext) -> str:
    """Waits in a thread until all rollouts have put more."""
    context.state["basket"].append(fruit)
    IN_THREADS.wait(60)
    return str(context.state["basket"])


class Basket(Agent):
    name = "basket"
    tools = (put, put_more, offered.basket)

    async def reward(self, run: Run) -> float:
        return float(run.state == {"basket": [run.metadata["own"]] * 2})


class OtherBasket(Basket):
    name = "other"


def test_fifty_rollouts_at_once_over_grpc() -> None:
    def play(number: int) -> FinishedRollout:
        own = f"fruit {number}"
        model = ScriptedModel().calls("put", fruit=own).calls("put_more", fruit=own).calls("basket").says("Done.")
        return stack.play("?", model, agent=("basket", "other")[number % 2], metadata={"own": own})

    with (
        LoopThread() as loop,
        LocalStack(loop, Basket(), OtherBasket(), http=False) as stack,
        ThreadPoolExecutor(ROLLOUTS) as pool,
    ):
        finished = list(pool.map(play, range(ROLLOUTS)))
    for number, rollout in enumerate(finished):
        once, twice = str([f"fruit {number}"]), str([f"fruit {number}"] * 2)
        assert rollout.tool_results == [once, twice, twice]
        assert (rollout.reward, rollout.failure) == (1.0, None)
