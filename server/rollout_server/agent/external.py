"""The `ExternalAgent` base class: agents that run elsewhere."""

from __future__ import annotations

from typing import Literal, Unpack, cast

from rollout_server.agent.own_loop import RESULT, AgentOptions, OwnLoopAgent
from rollout_server.core.outcome import RewardResult
from rollout_server.core.spec_validation import MAX_SECONDS
from rollout_server.runtime.agent_protocol import CONTINUE, END
from rollout_server.runtime.capture.endpoint import FinishedWork
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.run.run import Run


class ExternalOptions(AgentOptions, total=False):
    """Options of `ExternalAgent`."""

    idle_seconds: float


class ExternalAgent(OwnLoopAgent):
    """Base class of agents that run elsewhere: the server gives access to the model, and waits until the agent has finished.

    The response to the start of a rollout has the base URL and the key for the agent's clients. The agent says with
    `POST /r/UID/finish` or `FinishRollout` that it has finished, with a reward, scores or a failure. Without a reward, the
    class's `reward` or rubric computes it.

    Attributes:
        idle_seconds: a rollout whose agent neither calls its model or a tool nor finishes for so long ends as a failure of the
            class ENVIRONMENT. The rollout's limits apply, too: once a limit other than `seconds` is met, calls are refused, and the
            agent has `idle_seconds` to finish.
        on_restart: what becomes of an unfinished rollout after a restart of the server. "continue": the agent goes on with the
            same base URL and key. "end": the rollout ends as interrupted. A class that overrides `setup` or `play`, which may
            start the agent, has "end" unless it sets "continue"; then both are called again. `cleanup` is called by the process
            that ends the rollout. A rollout whose agent has finished gets its reward after a restart in any case.
    """

    description = ""
    external = True
    idle_seconds: float = 600.0
    on_restart: Literal["end", "again", "continue"] = "continue"
    _restarts = (END, CONTINUE)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "on_restart" not in vars(cls) and not vars(cls).keys().isdisjoint(("setup", "play")):
            cls.on_restart = "end"

    def __init__(self, **options: Unpack[ExternalOptions]) -> None:
        self._set(options)

    async def play(self, run: Run) -> None:
        """Open the model endpoint and wait until the agent has finished."""
        async with run.capture(self.capture) as capture:
            _accept(run, await capture.finished(self.idle_seconds))

    async def judge(self, run: object) -> RewardResult:
        """Return the agent's own reward, or else the class's; the runtime's entry point.

        A limit may have ended the agent's calls before it finished. Its harness may still grade it, so that is waited for.
        """
        own = cast("Run", run)
        if RESULT not in own.state:
            work = await own.late_work(self.idle_seconds)
            if work is not None:
                _accept(own, work)
        return await super().judge(run)

    def check_attributes(self) -> None:
        """Check what the metaclass does not know."""
        super().check_attributes()
        seconds = self.idle_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_SECONDS:
            text = f"idle_seconds is {seconds!r:.100}; it must be a number above 0, at most {MAX_SECONDS:,}"
            raise ValueError(f"agent {self.name!r}: {text}")


def _accept(run: Run, work: FinishedWork) -> None:
    """Take over the result of the agent's work. Raise `RolloutFailed` if the agent failed."""
    if work.failure is not None:
        raise RolloutFailed(work.failure)
    run.state[RESULT] = work.reward
