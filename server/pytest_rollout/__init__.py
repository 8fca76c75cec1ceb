"""A pytest plugin for testing agents. It is installed with the package and needs no registration.

    def test_adds(serving, scripted_model):
        stack = serving(Calculator())
        rollout = stack.play("What is 5 plus 3?", scripted_model.calls("add", a=5, b=3).says("It is 8."))
        assert rollout.tool_results == ["8"]

The plugin imports the server only when a fixture is used, so tests of a trainer run without the server's dependencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rollout_server import Agent
    from rollout_server.local_stack import LocalStack, LoopThread, ScriptedModel
    from rollout_server.testing.http.mock_engine import MockEngine
    from rollout_server.testing.model.calculator import Model
    from rollout_server.testing.trainer import StrictTrainer


@pytest.fixture(scope="session")
def rollout_loop() -> Iterator[LoopThread]:
    """The thread that runs the servers and trainers of the other fixtures."""
    from rollout_server.local_stack import LoopThread

    with LoopThread() as loop:
        yield loop


@pytest.fixture
def scripted_model() -> ScriptedModel:
    """A model whose completions the test defines."""
    from rollout_server.local_stack import ScriptedModel

    return ScriptedModel()


@pytest.fixture
def strict_trainer(rollout_loop: LoopThread) -> Iterator[StrictTrainer]:
    """A trainer that verifies every token and refuses wrong requests. It listens at `.url` and `.grpc_target`."""
    from rollout_server.testing.trainer import StrictTrainer

    trainer = StrictTrainer()
    rollout_loop.enter(trainer)
    try:
        yield trainer
    finally:
        rollout_loop.leave(trainer)


@pytest.fixture
def mock_engine(rollout_loop: LoopThread) -> Iterator[Callable[..., MockEngine]]:
    """A function that serves scripted models until the test ends: `mock_engine(judge=Critic())` returns their `MockEngine`.

    For agents that call `run.model("judge")`: `serving(agent, models=mock_engine(judge=Critic()).entries)`.
    """
    from rollout_server.testing.http.mock_engine import MockEngine

    engines: list[MockEngine] = []

    def serve(**models: Model) -> MockEngine:
        engine = rollout_loop.enter(MockEngine(models))
        engines.append(engine)
        return engine

    yield serve
    for engine in engines:
        rollout_loop.leave(engine)


@pytest.fixture
def serving(rollout_loop: LoopThread, strict_trainer: StrictTrainer) -> Iterator[Callable[..., LocalStack]]:
    """A function that serves agents until the test ends: `serving(agent, *more, **settings)` returns their `LocalStack`."""
    from rollout_server.local_stack import LocalStack

    with ExitStack() as stack:

        def serve(*agents: Agent, **settings: object) -> LocalStack:
            return stack.enter_context(LocalStack(rollout_loop, *agents, trainer=strict_trainer, **settings))

        yield serve
