"""`generate_batch`: batches are as large as they can be, nothing waits for ever, and a turn that fails fails alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from rollout_client import AsyncClient, Retry
from rollout_client.trainer import (
    Generated,
    Group,
    SamplingParams,
    Serving,
    SyncTrainer,
    Trainer,
    TryAgainLater,
    Turn,
    parsers,
)
from rollout_server import Agent, Run, tool
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.local_stack.loop_thread import LoopThread

from tests.client.trainer.host import Host, hosting
from tests.client.trainer.test_stream import two_turns
from tests.support.captured_agents import model_call, user
from tests.support.severed_connection import Cut, SeveredLine
from tests.support.start_requests import settings
from tests.support.tcp_proxy import TcpProxy
from tests.support.toy_model import CALL, END, ToyModel, by_turns, decode, until

QUESTION = "Please calculate 5 plus 3."
SAYS = by_turns("Let me add.\n" + CALL, "It is 8.\n#### 8")
SOON = Retry(first=0.005, longest=0.02)
NEVER = 80_000.0
"""Seconds after which a batch starts without a reason. A test that waits for it hangs."""


@dataclass
class BatchModel:
    """Generate a batch and record its turns. `says` returns the text of a turn. Set `gate` to delay the batches."""

    says: Callable[[Turn, str], str] = lambda turn, prompt: SAYS(prompt)
    gate: asyncio.Event | None = None
    batches: list[Sequence[Turn]] = field(default_factory=list)
    running: int = 0

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    async def __call__(self, turns: Sequence[Turn]) -> Sequence[Any]:
        assert not self.running, "one batch at a time"
        self.batches.append(turns)
        self.running += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            return [await self.complete(turn) for turn in turns]
        finally:
            self.running -= 1

    async def complete(self, turn: Turn) -> Generated | Exception:
        return await ToyModel(lambda prompt: self.says(turn, prompt))(turn.ids, turn.sampling)


def trainer_of(server: Any, model: Any, **fields: Any) -> Trainer:
    given = {"generate_batch": model, "batch_seconds": NEVER, **fields}
    return Trainer(server, decode=decode, parse=parsers.hermes, end_ids={END}, **given)


@asynccontextmanager
async def joined(
    agent: Agent, model: Any, trainer: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[Trainer]:
    """A trainer on a stream to a server with the agent."""
    async with (
        Server([agent], settings(**changes)) as server,
        trainer_of(f"127.0.0.1:{server.grpc_port}", model, **(trainer or {})) as joined,
    ):
        yield joined


async def groups_of(trainer: Trainer, *prompts: str, n: int = 4, **fields: Any) -> list[Group]:
    return [each async for each in trainer.rollouts(prompts or [QUESTION], n=n, tokenizer="toy", **fields)]


def ends(groups: Sequence[Group]) -> set[tuple[str, str, bool]]:
    return {(each.end, each.error, each.checked) for group in groups for each in group.rollouts}


WELL = {("stop", "", True)}


async def test_all_rollouts_take_their_turns_together() -> None:
    model = BatchModel()
    async with joined(Calculator(), model) as trainer:
        groups = await groups_of(trainer, *[QUESTION] * 3, n=4)
    assert (model.sizes, ends(groups)) == ([12, 12], WELL)
    places = [(turn.group_id, turn.index, turn.turn) for turn in model.batches[0]]
    assert sorted(places) == sorted((group.id, index, 1) for group in groups for index in range(4))


async def test_a_queue_that_is_longer_than_the_slots() -> None:
    model = BatchModel()
    async with joined(Calculator(), model, max_running=3) as trainer:
        groups = await groups_of(trainer, n=8)
    assert (model.sizes, ends(groups)) == ([3, 3, 3, 3, 2, 2], WELL)


async def test_at_most_generating_turns() -> None:
    model = BatchModel()
    async with joined(Calculator(), model, {"generating": 3}) as trainer:
        groups = await groups_of(trainer, n=7)
    assert (max(model.sizes), sum(model.sizes), ends(groups)) == (3, 14, WELL)


def called(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'


class Workshop(Agent):
    """Rollout 0 of a group calls a tool that waits for a gate, the others one that does not. `second`: second turns begun."""

    name = "workshop"

    def __init__(self) -> None:
        self.gate = gate = asyncio.Event()
        self.second = 0

        @tool
        async def slow() -> str:
            """Waits for the gate."""
            await gate.wait()
            return "done"

        @tool
        async def quick() -> str:
            """Returns at once."""
            return "done"

        self.tools = (slow, quick)

    async def play(self, run: Run) -> None:
        await run.call((await run.sample()).tool_calls)
        self.second += 1
        await run.sample()

    @staticmethod
    def says(turn: Turn, prompt: str) -> str:
        return called("quick" if turn.index else "slow") if turn.turn == 1 else "Done."


async def test_a_batch_waits_for_a_tool() -> None:
    agent = Workshop()
    model = BatchModel(agent.says)
    async with joined(agent, model) as trainer:
        going = asyncio.create_task(groups_of(trainer, n=4))
        await until(lambda: agent.second == 3)
        await asyncio.sleep(0.05)  # no batch may start now
        assert model.sizes == [4]
        agent.gate.set()
        assert ends(await going) == WELL
    assert model.sizes == [4, 4]


class Parallel(Agent):
    """Two subagents at once: one takes a turn, the other one calls a slow tool between its turns."""

    name = "parallel"

    def __init__(self) -> None:
        self.workshop = Workshop()
        self.tools = self.workshop.tools

    async def play(self, run: Run) -> None:
        first, second = [await run.fork([{"role": "user", "content": text}]) for text in ("Call.", "Talk.")]
        await asyncio.gather(self.workshop.play(first), self._talk(second))
        await run.sample()

    async def _talk(self, run: Run) -> None:
        await run.sample()
        await run.append({"role": "user", "content": "Go on."})
        self.workshop.second += 1
        await run.sample()


async def test_a_batch_waits_for_a_tool_of_another_conversation() -> None:
    agent = Parallel()
    model = BatchModel(
        lambda turn, prompt: called("slow") if prompt.count("Call.") == 1 and turn.turn <= 2 else "Done."
    )
    async with joined(agent, model) as trainer:
        going = asyncio.create_task(groups_of(trainer, n=1))
        await until(lambda: agent.workshop.second == 1)
        await asyncio.sleep(0.05)  # no batch may start now
        assert model.sizes == [2]
        agent.workshop.gate.set()
        assert ends(await going) == WELL
    assert model.sizes == [2, 2, 1]


@tool
async def ask(run: Run) -> str:
    """Asks the model."""
    return await ask_model(run)


@tool
def ask_in_thread(run: Run) -> str:
    """Asks the model, in a thread."""
    return str(run.wait(ask_model(run)))


async def ask_model(run: Run) -> str:
    helper = await run.fork([{"role": "user", "content": "Help."}])
    return (await helper.sample()).content


class Delegating(Agent):
    """A tool that is a subagent, then two branches at once."""

    name = "delegating"
    tools = (ask, ask_in_thread)

    async def play(self, run: Run) -> None:
        await run.call((await run.sample()).tool_calls)
        await run.sample()
        await run.append({"role": "user", "content": "Go on."})
        branch = await run.fork()
        await asyncio.gather(run.sample(), branch.sample())


@pytest.mark.parametrize("name", ["ask", "ask_in_thread"])
async def test_a_tool_that_samples_does_not_keep_a_batch_back(name: str) -> None:
    model = BatchModel(lambda turn, prompt: called(name) if turn.turn == 1 else "Done.")
    async with joined(Delegating(), model) as trainer:
        assert ends(await groups_of(trainer, n=2)) == WELL
    assert model.sizes == [2, 2, 2, 4]


class Outside(Agent):
    """An agent that owns its loop: two calls at once, then another one."""

    name = "outside"

    async def play(self, run: Run) -> None:
        async with run.capture() as capture:
            await asyncio.gather(*(capture.call(model_call(user(text))) for text in ("One?", "Two?")))
            await capture.call(model_call(user("Three?")))


async def test_an_agent_that_owns_its_loop() -> None:
    model = BatchModel(lambda turn, prompt: "Yes.")
    async with joined(Outside(), model) as trainer:
        assert ends(await groups_of(trainer, n=3)) == WELL
    assert model.sizes == [6, 3]


class PlainLoop(Agent):
    """A plain function: each rollout needs a thread for its whole run."""

    name = "plain"

    def play(self, run: Run) -> None:
        for _ in range(2):
            run.wait(run.sample())
            run.wait(run.append({"role": "user", "content": "Go on."}))


async def test_rollouts_that_wait_for_a_thread() -> None:
    model = BatchModel(lambda turn, prompt: "Yes.")
    async with joined(PlainLoop(), model, tool_threads=2) as trainer:
        assert ends(await groups_of(trainer, n=4)) == WELL
    assert model.sizes == [2, 2, 2, 2]


class Ranking(Calculator):
    """Rollouts wait for the reward of their group."""

    async def reward_group(self, runs: Sequence[Run]) -> list[float]:
        return [float(index) for index, _ in enumerate(runs)]


async def test_rollouts_that_wait_for_their_group() -> None:
    model = BatchModel(lambda turn, prompt: SAYS(prompt) if turn.index else "It is 8.\n#### 8")
    async with joined(Ranking(), model, max_running=2) as trainer:
        (group,) = await groups_of(trainer, n=4)
    assert [each.reward for each in group.rollouts] == [0.0, 1.0, 2.0, 3.0]
    assert sum(model.sizes) == 7


class Uneven(Agent):
    """Rollouts end before, after and between turns: the one with index k takes k turns."""

    name = "uneven"

    async def play(self, run: Run) -> None:
        for _ in range(run.request.group_index or 0):
            await run.sample()
            await run.append({"role": "user", "content": "Go on."})

    async def reward(self, run: Run) -> float:
        await asyncio.sleep(0.01)
        return 1.0


async def test_rollouts_that_end_without_a_turn() -> None:
    model = BatchModel(lambda turn, prompt: "Yes.")
    async with joined(Uneven(), model) as trainer:
        (group,) = await groups_of(trainer, n=4)
    assert (model.sizes, {each.end for each in group.rollouts}) == ([3, 2, 1], {"stop"})


class Locking(Agent):
    """One rollout at a time: the others wait at a lock, which the server does not know."""

    name = "locking"

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    async def play(self, run: Run) -> None:
        async with self.lock:
            await run.sample()


async def test_a_lock_of_the_agent_delays_batches_but_does_not_stop_them() -> None:
    model = BatchModel(lambda turn, prompt: "Yes.")
    async with joined(Locking(), model, {"batch_seconds": 0.01}) as trainer:
        assert ends(await groups_of(trainer, n=3)) == WELL
    assert model.sizes == [1, 1, 1]


async def test_a_server_without_idle_items() -> None:
    host, model = Host(two_turns), BatchModel(lambda turn, prompt: "Yes.")
    async with hosting(host) as port, trainer_of(f"127.0.0.1:{port}", model, batch_seconds=0.05) as trainer:
        assert ends(await groups_of(trainer, n=3)) == WELL
    assert sum(model.sizes) == 6
    assert host.stream.hellos[0].idle


async def test_a_rollout_that_is_cancelled_during_its_batch_is_ignored() -> None:
    model = BatchModel(gate=asyncio.Event())
    async with (
        Server([Calculator()], settings()) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
        trainer_of(client, model) as trainer,
    ):
        going = asyncio.create_task(groups_of(trainer, n=3))
        await until(lambda: model.running)
        await client.cancel(model.batches[0][0].uid)
        await client.wait(model.batches[0][0].uid)
        assert model.gate is not None
        model.gate.set()
        (group,) = await going
    assert sorted(each.end for each in group.rollouts) == ["cancellation", "stop", "stop"]
    assert (model.sizes, [each.checked for each in group.rollouts]) == ([3, 2], [True] * 3)


class Late(Agent):
    """The rollout with index 1 begins once the gate is open."""

    name = "late"

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = 0

    async def play(self, run: Run) -> None:
        if run.request.group_index:
            await self.gate.wait()
        self.begun += 1
        await run.sample()
        await run.sample()


async def test_a_rollout_that_is_cancelled_while_it_waits_is_left_out() -> None:
    agent, model = Late(), BatchModel(lambda turn, prompt: "Yes.", asyncio.Event())
    async with (
        Server([agent], settings()) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
        trainer_of(client, model, batch_seconds=0.05) as trainer,
    ):
        going = asyncio.create_task(groups_of(trainer, n=2))
        await until(lambda: model.running)
        agent.gate.set()
        await until(lambda: agent.begun == 2)
        await until(lambda: len(trainer._batches._waiting) == 1)
        (late,) = [each.uid async for each in client.list() if each.uid != model.batches[0][0].uid]
        await client.cancel(late)
        await client.wait(late)
        await until(lambda: not trainer._batches._waiting)
        assert model.gate is not None
        model.gate.set()
        (group,) = await going
    assert sorted(each.end for each in group.rollouts) == ["cancellation", "stop"]
    assert model.sizes == [1, 1]
    assert late not in {turn.uid for batch in model.batches for turn in batch}


async def cut_at(server: Server, cut: Cut) -> bool:
    """Run a group over a connection that is cut there; return whether it was cut. A lost `idle` would hang."""
    model = BatchModel()
    async with (
        SeveredLine(server.grpc_port, cut) as line,
        AsyncClient(line.address, retry=SOON) as client,
        trainer_of(client, model) as trainer,
    ):
        assert ends(await groups_of(trainer, n=3)) == WELL
        assert model.sizes == [3, 3]
    return line.was_cut


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("to_server", [False, True])
async def test_a_cut_at_any_message_changes_no_batch(to_server: bool, passes: bool) -> None:
    async with Server([Calculator()], settings()) as server:
        cuts = [Cut(to_server, number, passes) for number in range(1, 31)]
        was_cut = await asyncio.gather(*(cut_at(server, cut) for cut in cuts))
    assert sum(was_cut) > 8


async def test_a_stream_that_comes_back_during_a_batch() -> None:
    model = BatchModel(gate=asyncio.Event())
    async with (
        Server([Calculator()], settings()) as server,
        TcpProxy(server.grpc_port) as line,
        AsyncClient(line.address, retry=SOON) as client,
        trainer_of(client, model) as trainer,
    ):
        going = asyncio.create_task(groups_of(trainer, n=4))
        await until(lambda: model.running)
        await line.down()
        assert model.gate is not None
        model.gate.set()
        await until(lambda: not model.running)
        await line.mend()
        assert ends(await going) == WELL
    assert model.sizes == [4, 4]


async def test_leaving_the_loop_during_a_batch() -> None:
    model = BatchModel(gate=asyncio.Event())
    async with joined(Calculator(), model) as trainer:
        async with aclosing(trainer.rollouts([QUESTION], tokenizer="toy")) as groups:
            first = asyncio.ensure_future(anext(groups))
            await until(lambda: model.running)
            first.cancel()
            await asyncio.wait([first])
        assert model.running == 1
    assert model.running == 0


async def failing(model: BatchModel, **fields: Any) -> Sequence[tuple[str, bool]]:
    """Whether each rollout of a group failed because of `generate_batch`, by index."""
    async with joined(Calculator(), model, **fields) as trainer:
        (group,) = await groups_of(trainer, n=4)
    return [(each.end, "generate" in each.error) for each in group.rollouts]


FAILED, STOPPED = ("failure", True), ("stop", False)


@dataclass
class Odd(BatchModel):
    """Return `odd` for the second turns of the rollout with index 1."""

    odd: Any = None

    async def complete(self, turn: Turn) -> Any:
        return self.odd if (turn.index, turn.turn) == (1, 2) else await super().complete(turn)


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (ValueError("no such token"), "no such token"),
        (StopIteration(), "StopIteration"),
        (7, "must return a Generated or an exception for each turn, not int"),
        (None, "for each turn, not NoneType"),
        (Generated([]), "Generated.ids is empty"),
    ],
)
async def test_a_turn_that_fails_fails_alone(odd: Any, text: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Odd(odd=odd)
    assert await failing(model) == [STOPPED, FAILED, STOPPED, STOPPED]
    assert model.sizes == [4, 4]
    assert text in caplog.text


@dataclass
class Short(BatchModel):
    """Return `wrong` for the first batch."""

    wrong: Any = None

    async def __call__(self, turns: Sequence[Turn]) -> Any:
        found = await super().__call__(turns)
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong(found)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda found: found[1:], "generate_batch returned 3 results for 4 turns"),
        (lambda found: [*found, found[0]], "generate_batch returned 5 results for 4 turns"),
        (iter, "must return a list with one result per turn, not list_iterator"),
        (lambda found: None, "must return a list with one result per turn, not NoneType"),
        (RuntimeError("out of memory"), "out of memory"),
    ],
)
async def test_a_batch_that_fails_fails_its_rollouts(wrong: Any, text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert await failing(Short(wrong=wrong)) == [FAILED] * 4
    assert text in caplog.text
    assert caplog.text.count("generate_batch failed; ") == 1


@dataclass
class Postponing(BatchModel):
    """Postpone the first turns of the rollout with index 2 once, or the first batch."""

    whole: bool = False
    postponed: int = 0

    async def __call__(self, turns: Sequence[Turn]) -> Any:
        found = await super().__call__(turns)
        if self.whole and not self.postponed:
            self.postponed += 1
            raise TryAgainLater(0.01)
        return found

    async def complete(self, turn: Turn) -> Any:
        if (turn.index, self.whole, self.postponed) == (2, False, 0):
            self.postponed += 1
            return TryAgainLater(0.01)
        return await super().complete(turn)


@pytest.mark.parametrize(("whole", "sizes"), [(False, [4, 4, 1]), (True, [4, 4, 4])])
async def test_postponed_turns_come_with_the_next_batch(whole: bool, sizes: list[int]) -> None:
    model = Postponing(whole=whole)
    assert await failing(model) == [STOPPED] * 4
    assert (model.sizes, model.postponed) == (sizes, 1)


async def generate(ids: Sequence[int], sampling: SamplingParams) -> Generated: ...


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"generate_batch": None}, TypeError, "generate must be given and callable, or generate_batch"),
        ({"generate": generate}, TypeError, "generate and generate_batch are both given"),
        ({"generate_batch": 7}, TypeError, "generate_batch must be callable"),
        ({"serving": Serving()}, TypeError, "generate_batch needs the stream to the server"),
        ({"batch_seconds": "10"}, TypeError, "batch_seconds must be a number, not str"),
        ({"batch_seconds": 0}, ValueError, "batch_seconds must be above 0"),
        ({"batch_seconds": float("nan")}, ValueError, "batch_seconds must be above 0"),
    ],
)
def test_wrong_arguments_are_named(fields: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        trainer_of("127.0.0.1:1", BatchModel(), **fields)


def test_a_plain_function_runs_in_the_thread_that_iterates() -> None:
    sizes, threads = [], set()

    def generate_batch(turns: Sequence[Turn]) -> Sequence[Generated]:
        sizes.append(len(turns))
        threads.add(threading.current_thread())
        return [asyncio.run(ToyModel(SAYS)(turn.ids, turn.sampling)) for turn in turns]

    with LoopThread() as loop:
        server = loop.enter(Server([Calculator()], settings()))
        try:
            fields: Any = {"generate_batch": generate_batch, "batch_seconds": NEVER, "parse": parsers.hermes}
            with SyncTrainer(f"127.0.0.1:{server.grpc_port}", decode=decode, end_ids={END}, **fields) as trainer:
                groups = list(trainer.rollouts([QUESTION] * 3, n=4, tokenizer="toy"))
        finally:
            loop.leave(server)
    assert (sizes, threads, ends(groups)) == ([12, 12], {threading.current_thread()}, WELL)
