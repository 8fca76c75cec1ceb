"""Each example with many rollouts at once: undisturbed, with half of them cancelled, and in a server that is stopped."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import rollout_server.testing.trainer
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.event_pb2 import RolloutEvent
from rollout_client import AsyncClient, TrainingSample, messages, samples
from rollout_client.export import to_trl, to_verl
from rollout_server import Run
from rollout_server.authoring.dataset import DatasetRow
from rollout_server.authoring.endpoint import Endpoint
from rollout_server.authoring.model_stubs import ModelStub
from rollout_server.cli.local_server import serve_for_command
from rollout_server.testing.model.calculator import Model
from rollout_server.testing.script import ScriptedReply
from rollout_server.testing.trainer import StrictTrainer

from tests.cli.conftest import here
from tests.support.examples import EXAMPLES, FOLDERS, METHODS, Example, load_example, processes_in, watch_methods
from tests.support.processes import serve

__all__ = ["here"]

MANY = 24
COUNTED = Path(__file__).with_name("counted_example.py")
OnEvent = Callable[[str, RolloutEvent], None]


@pytest.fixture(params=FOLDERS)
def example(request: pytest.FixtureRequest, here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Example]:
    """An example in the working directory. Its temporary directories are in `scratch`, and must be gone after the test."""
    shutil.copytree(EXAMPLES / request.param, here, dirs_exist_ok=True)
    scratch = here / "tmp"  # short: a path of a Unix socket has at most 107 characters
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("TMPDIR", str(scratch))
    yield load_example(here)
    assert list(scratch.iterdir()) == []
    assert list(processes_in(here)) == []


@dataclass
class Hooks:
    """The calls of an agent's methods by rollout id, and the state that each rollout had in its `setup`."""

    calls: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    on_call: Callable[[str, Run], None] = lambda _name, _run: None

    def called(self, name: str, run: Run) -> None:
        self.calls[run.rollout_id][name] += 1
        if name == "setup":
            if run.state or any(run.state is other for other in self.states.values()):
                self.wrong.append(f"{run.rollout_id} began with the state of another rollout")
            self.states[run.rollout_id] = run.state
        elif run.state is not self.states.get(run.rollout_id, run.state):
            self.wrong.append(f"{run.rollout_id} had another state in {name}")
        self.on_call(name, run)

    def check(self, rollout_id: str, *called: str) -> None:
        """Assert that these methods were called and returned exactly once, and the others at most once."""
        assert not self.wrong
        calls = self.calls[rollout_id]
        once = {each for name in called for each in (name, f"{name} ended")}
        assert {name for name in calls if calls[name] == 1} >= once, (rollout_id, calls)
        assert set(calls.values()) <= {1}, (rollout_id, calls)


@dataclass(frozen=True)
class Stage:
    """A running server with an example's agent, its scripted model behind a strict trainer, and a client."""

    example: Example
    client: AsyncClient
    endpoint: Endpoint
    trainer: StrictTrainer
    hooks: Hooks

    async def play(self, rollout_id: str, row: DatasetRow, on_event: OnEvent = lambda _uid, _event: None) -> pb.Rollout:
        fields = self.endpoint.start_fields()
        fields["rollout_id"], fields["agent"] = rollout_id, self.example.agent.name
        fields["messages"], fields["metadata"] = row.messages, row.metadata
        async with self.client.run(**fields) as stream:
            async for event in stream:
                on_event(stream.uid, event)
        return await self.client.get(stream.uid, view="samples")

    async def play_alone(self) -> Sequence[Expected]:
        """Play each row twice, without other rollouts."""
        found = []
        for row in self.example.rows:
            once, again = [await self.play(f"alone-{row.number}-{number}", row) for number in (1, 2)]
            assert result_of(once) == result_of(again)
            assert once.outcome.HasField("stop"), once.outcome.failure
            found.append(Expected(result_of(once), course_of(once) if course_of(once) == course_of(again) else None))
        return found

    def jobs(self, name: str, count: int = MANY) -> Iterator[tuple[str, int]]:
        """Yield rollout ids, each with the index of its row."""
        return ((f"{name}-{number}", number % len(self.example.rows)) for number in range(count))


@dataclass(frozen=True)
class Expected:
    """How the rollout of a row ends. `course` is None if two rollouts of the row differ, because the agent draws numbers."""

    result: object
    course: object

    def check(self, rollout: pb.Rollout) -> None:
        assert result_of(rollout) == self.result
        assert self.course in (None, course_of(rollout))


def result_of(rollout: pb.Rollout) -> object:
    outcome = rollout.outcome
    rewards = [sample.reward for sample in samples(outcome)]
    return outcome.stop.reason, outcome.HasField("reward"), outcome.reward, dict(outcome.scores), rewards


def course_of(rollout: pb.Rollout) -> object:
    """The messages, and the tokens of all samples with their masks."""
    tokens = [(each.prompt_ids, each.response_ids, each.response_mask) for each in samples(rollout.outcome)]
    return messages(rollout.outcome), tokens


@asynccontextmanager
async def staged(example: Example, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Serve an example as its command does, and check that its trainer refused nothing."""
    trainers: list[StrictTrainer] = []

    class Kept(StrictTrainer):
        async def __aenter__(self) -> Kept:
            trainers.append(self)
            return await super().__aenter__()

    monkeypatch.setattr(rollout_server.testing.trainer, "StrictTrainer", Kept)
    hooks = Hooks()
    watch_methods(example.agent, hooks.called)
    async with serve_for_command([example.agent], example.flags, MANY) as server:
        target = server.endpoint.url.removeprefix("grpc://")
        [trainer] = [each for each in trainers if each.grpc_target == target]
        yield Stage(example, server.client, server.endpoint, trainer, hooks)
    assert [refusal for judged in trainer.verdicts() for refusal in judged.refusals] == []


def check_exports(stage: Stage, rollout_id: str, rollout: pb.Rollout) -> None:
    """Assert that the exported samples have the trainer's tokens and masks, and the reward."""
    found = samples(rollout.outcome)
    assert found
    for sample in found:
        verl, trl = to_verl(sample), to_trl([sample])
        judged = stage.trainer.verdict(f"{rollout_id}/{sample.segment_id}") or stage.trainer.verdict(rollout_id)
        assert judged is not None
        assert verl["response_ids"] == trl["completion_ids"][0] == list(judged.sample.response_ids)
        assert verl["response_mask"] == trl["env_mask"][0] == trainer_mask(sample, judged.sample.response_mask)
        assert verl["reward_score"] == trl["rollout_reward"][0] == sample.reward
        if getattr(stage.example.agent, "reward_rule", "copy") == "copy" and getattr(sample, "trainable", True):
            assert (sample.reward, rollout.outcome.HasField("reward")) == (rollout.outcome.reward, True)
    assert any(sample.reward is not None for sample in found)


def trainer_mask(sample: TrainingSample, mask: Sequence[int]) -> list[int]:
    """The trainer's mask, without what the agent's author masked out."""
    expected, prompt = list(mask), len(sample.prompt_ids)
    assert sample.spans is not None
    for span in sample.spans:
        if span.reason == "author":
            expected[span.start - prompt : span.stop - prompt] = [0] * (span.stop - span.start)
    return expected


async def test_many_at_once(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rollout ends as a rollout of its row alone does, and its samples are the trainer's."""
    async with staged(example, monkeypatch) as stage:
        expected = await stage.play_alone()
        jobs = dict(stage.jobs("together"))
        played = await asyncio.gather(*(stage.play(each, example.rows[row]) for each, row in jobs.items()))
        for (rollout_id, row), rollout in zip(jobs.items(), played, strict=True):
            expected[row].check(rollout)
            stage.hooks.check(rollout_id, *METHODS)
            check_exports(stage, rollout_id, rollout)
    assert len(stage.hooks.calls) == MANY + 2 * len(example.rows)


async def test_half_are_cancelled(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a random event, or while one of the agent's methods runs. The others end as if they were alone."""
    draw = random.Random(f"{example.agent.name}")
    async with staged(example, monkeypatch) as stage, asyncio.TaskGroup() as cancelling:
        expected = await stage.play_alone()
        jobs = dict(stage.jobs("together", MANY // 2))
        events = (await stage.play("counted", example.rows[0])).last_sequence
        moments = {
            each: draw.choice([*METHODS, *range(1, events)]) for each in draw.sample(sorted(jobs), len(jobs) // 2)
        }
        loop = asyncio.get_running_loop()

        def cancel(uid: str) -> None:
            cancelling.create_task(stage.client.cancel(uid))

        def on_call(name: str, run: Run) -> None:  # in the event loop, or in a thread
            if moments.get(run.rollout_id) == name:
                loop.call_soon_threadsafe(cancel, run.uid)

        def on_event(rollout_id: str, uid: str, event: RolloutEvent) -> None:
            if moments.get(rollout_id) == event.sequence:
                cancel(uid)

        stage.hooks.on_call = on_call
        plays = (stage.play(each, example.rows[row], partial(on_event, each)) for each, row in jobs.items())
        played = await asyncio.gather(*plays)
    for (rollout_id, row), rollout in zip(jobs.items(), played, strict=True):
        assert not [warning for warning in rollout.outcome.warnings if warning.code == "cleanup_failed"]
        if rollout.outcome.HasField("cancellation"):
            assert rollout_id in moments
            stage.hooks.check(rollout_id, *(["cleanup"] if "setup" in stage.hooks.calls[rollout_id] else []))
        else:
            expected[row].check(rollout)
            stage.hooks.check(rollout_id, *METHODS)
    ends = Counter(rollout.outcome.WhichOneof("end") for rollout in played)
    assert ends["cancellation"] > 0, ends


class GatedModel:
    """A model in a trainer's one thread. It waits for the gate, gives a number of replies, and waits for the end."""

    def __init__(self, model: Model, replies: int) -> None:
        self._model, self._left = model, replies
        self.gate, self.replied, self.end = Event(), Event(), Event()

    def reply(self, messages: Sequence[Any]) -> ScriptedReply:
        self.gate.wait()
        if not self._left:
            self.replied.set()
            self.end.wait()
        else:
            self._left -= 1
        return self._model.reply(messages)


@asynccontextmanager
async def further_models(stub: ModelStub) -> AsyncIterator[dict[str, str]]:
    """The settings of a server whose agent calls further models by name: those of the example's script, if it has some."""
    models = getattr(stub, "further", {})
    if not models:
        yield {}
        return
    from rollout_server.testing.http.mock_engine import MockEngine

    async with MockEngine(models) as engine:
        yield {"ROLLOUT_MODELS": ",".join(engine.entries)}


async def test_a_server_is_stopped_midway(example: Example, here: Path) -> None:
    """SIGTERM interrupts all rollouts, which have been set up, while some run tools. Each is cleaned up."""
    stub, calls = example.flags.model_stub(), here / "calls"
    assert stub is not None
    model = GatedModel(stub.model, random.Random(example.agent.name).randrange(MANY // 4, MANY))
    settings = {"ROLLOUT_DRAIN_SECONDS": "0", "ROLLOUT_MAX_RUNNING": str(MANY), "EXAMPLE_CALLS": str(calls)}
    async with (
        StrictTrainer(model=model, script=stub.script) as trainer,
        further_models(stub) as models,
        serve(str(COUNTED), cwd=here, **settings, **models) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        endpoint = Endpoint(f"grpc://{trainer.grpc_target}", "grpc", tokenizer="toy", limits=example.flags.limits)
        stage = Stage(example, client, endpoint, trainer, Hooks())
        jobs = dict(stage.jobs("together"))
        plays = [asyncio.create_task(stage.play(each, example.rows[row])) for each, row in jobs.items()]
        try:
            while calls.read_text().count(" setup ended\n") < MANY:
                assert not any(play.done() for play in plays)
                await asyncio.sleep(0.02)
            model.gate.set()
            await asyncio.to_thread(model.replied.wait)
            server.send(signal.SIGTERM)
            assert await server.ended() == 0
        finally:
            for event in (model.gate, model.replied, model.end):
                event.set()
            for task in plays:
                task.cancel()
            await asyncio.gather(*plays, return_exceptions=True)
    assert "Traceback" not in server.text
    lines = Counter(calls.read_text().splitlines())
    assert set(lines.values()) == {1}
    once = {f"{each} {name}" for each in jobs for name in ("setup", "setup ended", "cleanup", "cleanup ended")}
    assert once <= lines.keys()
    assert not {f"{each} reward" for each in jobs} <= lines.keys()
