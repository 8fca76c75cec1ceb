"""The `Environment` base class: agents in which the world speaks after each completion."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rollout_server.agent.base import Agent, call_method, with_location
from rollout_server.agent.checks import check_method
from rollout_server.core.message import JSON
from rollout_server.runtime.run.messages import Reply
from rollout_server.runtime.run.reward import RewardValue
from rollout_server.runtime.run.run import Run

Spoken: TypeAlias = str | Mapping[str, JSON] | Sequence[Mapping[str, JSON]] | None
"""What the world says: the text of a user message, a message, a list of messages, or None."""


class Step(NamedTuple):
    """What `Environment.step` returns; a tuple `(messages, reward, done)` will do, too.

    Attributes:
        messages: what the world says: a text, a message, a list of messages, or None.
        reward: the reward of the completion, as for `Run.give_reward`; None for no reward.
        done: whether the episode is over.
    """

    messages: Spoken = None
    reward: float | None = None
    done: bool = False


StepValue: TypeAlias = Step | tuple[Spoken, float | None, bool]


class Environment(Agent):
    """Base class of agents in which the world speaks, such as a text game, a simulated user or a Gymnasium-like environment.

    `reset` begins the episode. Then the model and `step` take turns until `step` says that the episode is done, or until a limit
    of the rollout is met. The reward of the rollout is the sum of the rewards of its turns, plus that of the `rubric` if the class
    has one; override `reward` for another one.

    One object runs many rollouts concurrently. Keep the state of one world in `run.state`.

    If the environment has `tools`, the tool calls of a completion run first, and the model continues with their results. `step`
    gets the first completion without tool calls. Without tools, `step` gets every completion.

    Both methods may be `async def`, or plain `def`, which runs in a thread. An exception in them ends the rollout as a failure.
    As with any agent that overrides `play`, its rollouts are replayable only if the class sets `replayable = True`. The world must
    then get time, randomness and side effects from `run.now()`, `run.random()` and `run.once()`.
    """

    description = ""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        check_method(cls, "reset", ("run",))
        check_method(cls, "step", ("run", "reply"))

    if TYPE_CHECKING:
        # Return types that let a subclass write a plain `def`.

        def reset(self, run: Run) -> Spoken | Awaitable[Spoken]: ...
        @abstractmethod
        def step(self, run: Run, reply: Reply) -> StepValue | Awaitable[StepValue]: ...

    else:

        async def reset(self, run: Run) -> Spoken:
            """Begin the episode of one rollout and return what the world says first, after the messages of the request.

            Returns:
                The text of a user message, a message, a list of messages, or None for nothing more.
            """
            return None

        @abstractmethod
        async def step(self, run: Run, reply: Reply) -> StepValue:
            """Let the world react to a completion.

            Args:
                run: the rollout. Its latest completion is `reply`.
                reply: the completion, without tool calls if the environment has tools.

            Returns:
                A `Step` or a tuple `(messages, reward, done)`: what the world says, the reward of the completion or None, and
                whether the episode is over. The messages are appended in either case.
            """

        async def reward(self, run: Run) -> RewardValue:
            """Return the sum of the rewards of the rollout's turns and of the rubric's reward; None if there are none."""
            turns = sum(run.turn_rewards.values()) if run.turn_rewards else None
            if self.rubric is None:
                return turns
            scored = await self.rubric.score(run)
            return scored if turns is None else replace(scored, reward=turns + (scored.reward or 0.0))

    async def play(self, run: Run) -> None:
        """Run one episode: `reset`, then completions and `step` in turn until `step` says that it is done."""
        first = await call_method(self.reset, f"reset() of agent {self.name}", run)
        with with_location(self.reset):
            run = run.latest  # `reset` may have replaced the conversation by a compaction
            await run.append(*_as_messages(first, f"agent {self.name!r}: reset"))
        done = False
        while not done:
            reply = await run.sample()
            while run.tools and reply.tool_calls:
                await run.call(reply.tool_calls)
                reply = await run.sample()
            value = await call_method(self.step, f"step() of agent {self.name}", run, reply)
            with with_location(self.step):
                messages, reward, done = _as_step(value, f"agent {self.name!r}: step")
                if reward is not None:
                    run.give_reward(reward)
                run = run.latest  # `step` may have replaced the conversation by a compaction
                await run.append(*messages)


def _as_step(value: object, where: str) -> tuple[Sequence[Mapping[str, JSON]], Any, bool]:
    if not isinstance(value, tuple) or len(value) != len(Step._fields):
        raise TypeError(f"{where} returned {value!r:.100}; it must return a Step or a tuple (messages, reward, done)")
    messages, reward, done = value
    if done not in (True, False):  # NumPy's booleans are not `bool`
        raise TypeError(f"{where} returned done={done!r:.100}; it must be True or False")
    return _as_messages(messages, where), reward, bool(done)


def _as_messages(spoken: object, where: str) -> Sequence[Mapping[str, JSON]]:
    match spoken:
        case None:
            return ()
        case str():
            return ({"role": "user", "content": spoken},)
        case Mapping():
            return (spoken,)
        case Sequence() if all(isinstance(message, Mapping) for message in spoken):
            return spoken
    raise TypeError(f"{where} returned {spoken!r:.100}; it must be a text, a message, a list of messages, or None")
