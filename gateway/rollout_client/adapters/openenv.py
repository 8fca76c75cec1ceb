"""OpenEnv 0.10: a `TrainingTrace` of any rollout, and sessions for the asynchronous GRPO trainer of TRL 1.16.

`trl.experimental.async_grpo.HarnessRolloutWorker` runs the sessions, in a process of its own, and trains on their traces.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from multiprocessing.util import Finalize
from typing import Any, Final, Unpack, cast

from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, TrainingTrace, VerifyResult

from rollout_client._async.client import AsyncClient
from rollout_client.adapters.bridge import BridgeFields, RolloutBridge, RunningGroup
from rollout_client.adapters.dataset_rows import dataset_message
from rollout_client.adapters.openenv_trace import training_trace
from rollout_client.errors import RolloutError, RolloutFailed
from rollout_client.spec import Sampling
from rollout_client.trainer.results import Finished, Prompt, RecordMismatch, to_prompt
from rollout_client.trainer.trainer import Trainer

__all__ = ["RolloutSession", "RolloutSessionFactory", "training_trace"]

_INCOMPLETE_GROUPS: Final = 256
"""Maximum number of groups of which sessions were created for some rollouts, but not for all."""
_RECENT_SEEDS: Final = 4096
_LOST: Final = frozenset({"STREAM_EXPIRED", "GROUP_NOT_FOUND"})
"""Reasons of errors after which further rollouts can be run."""


class RolloutSession(ResourceSession):  # type: ignore[misc]  # without OpenEnv, its classes have no types
    """One rollout on the server, as a session whose agent owns its loop: `wait_for_completion`, `fetch_training_trace`, `verify`.

    Created by `RolloutSessionFactory.create`. Tools run on the server, so `list_tools` is empty and `call_tool` raises.
    """

    def __init__(self, prompt: Prompt, rollout: Future[Finished], group: _SessionGroup | None) -> None:
        self._prompt = prompt
        self._rollout = rollout
        self._group = group

    def initial_messages(self) -> list[dict[str, Any]]:
        """Return the messages of the prompt that are dictionaries."""
        return [dict(each) for each in self._prompt.messages if isinstance(each, Mapping)]

    def list_tools(self) -> list[Tool]:
        """Return an empty list, because the agent calls its tools on the server."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Refuse the call. Raises RuntimeError, which says where the tool runs."""
        raise RuntimeError(
            f"tool {name!r} runs on the rollout server; leave out harness_adapter, the agent owns its loop"
        )

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Wait until the rollout has finished. Return 0 if it completed, 1 if it failed and may be trained on.

        If it could not be run at all, for example because the server refused it, this returns 1 and `fetch_training_trace` raises:
        TRL's worker takes every exception of this method for one rollout that cannot be scored, and would ask for the next one
        without end.

        Raises:
            TimeoutError: the time limit of the rollout expired, so that it may be trained on but has no reward; or `timeout_s`
                expired, and it continues.
            RolloutFailed: it failed or was cancelled, and must not be trained on, or this session was closed.
            RolloutError: the rollout was lost because the server was restarted or forgot the trainer's stream, and the trainer
                could not continue it on another one.
            RecordMismatch: the trainer refused its samples, with `on_mismatch="flag"`.
        """
        try:
            finished = self._rollout.result(timeout_s)
        except CancelledError:
            raise RolloutFailed(
                "the session or its factory was closed before the rollout had finished", "cancelled"
            ) from None
        except Exception as error:
            if not self._rollout.done() or (isinstance(error, RolloutError) and error.reason in _LOST):
                raise
            return 1
        if finished.mismatch is not None:
            raise RecordMismatch(finished)
        if finished.end != "stop" and not finished.own:
            finished.raise_for_failure()
        if finished.failure_class == "deadline":
            raise TimeoutError(finished.error)
        return 0 if finished.end == "stop" else 1

    def fetch_training_trace(self) -> TrainingTrace:
        """Return the trace of the finished rollout.

        Raises:
            ValueError: the rollout could not be run at all, or it cannot be trained on as OpenEnv requires (`training_trace`).
                TRL's worker then stops, and with it the training.
            RuntimeError: it has not finished.
        """
        if not self._rollout.done():
            raise RuntimeError("the rollout has not finished; call wait_for_completion first")
        error = None if self._rollout.cancelled() else self._rollout.exception()
        if error is not None:
            raise ValueError(f"no rollout can be run: {type(error).__name__}: {error}") from error
        return training_trace(self._rollout.result())

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
        """Return the reward that the agent gave on the server; None: none, as for every rollout that failed.

        `metrics` are its scores, `artifacts` say which rollout it was and how it ended. The arguments are not used.
        """
        if not self._rollout.done():
            raise RuntimeError("the rollout has not finished; call wait_for_completion first")
        finished = self._rollout.result()
        outcome = finished.rollout.outcome
        ended = {"rollout_uid": finished.uid, "group_id": finished.group_id, "end": finished.end}
        return VerifyResult(
            env_reward=finished.reward,
            done=True,
            metrics=dict(outcome.scores),
            artifacts={**ended, "failure_class": finished.failure_class, "error": finished.error},
        )

    def close(self) -> None:
        """End the session. If its rollout still runs and no other session of its group is open, the group is cancelled."""
        if self._group is not None:
            self._group.close(self, finished=self._rollout.done())


class _SessionGroup:
    """The sessions of a group: which rollout the next one gets, and which are open."""

    def __init__(self, task: object, prompt: Prompt, running: RunningGroup) -> None:
        self.task = task
        self.created = 0
        self._prompt = prompt
        self._running = running
        self._open: set[RolloutSession] = set()
        self._lock = threading.Lock()

    def create(self) -> RolloutSession:
        with self._lock:
            session = RolloutSession(self._prompt, self._running.rollouts[self.created], self)
            self.created += 1
            self._open.add(session)
        return session

    def close(self, session: RolloutSession, *, finished: bool) -> None:
        with self._lock:
            self._open.discard(session)
            if not finished and not self._open:
                self._running.cancel()


class RolloutSessionFactory(ResourceSessionFactory[RolloutSession]):  # type: ignore[misc]
    """Sessions of rollouts on a server, for TRL's asynchronous GRPO trainer.

        worker = HarnessRolloutWorker(
            harness_session_factory=functools.partial(
                RolloutSessionFactory, "localhost:50051", num_generations=8, max_tokens=512, agent="calculator",
                tokenizer="Qwen/Qwen3-8B", token_mode="tokens",
                completions=Target("http://localhost:8000", "vllm", model="Qwen/Qwen3-8B"),
            ),
            num_generations=8, ...,
        )

    The sessions with equal `seed` are a group: TRL passes its group id. The first one starts all rollouts of the group.

    Args:
        connect: address of the server, or a function without arguments that returns an `AsyncClient` (for API key and TLS): the
            engine `completions` generates. Or a function that returns a `Trainer`, not entered: its `generate` does. TRL pickles it
            for the process of its worker, so it must be a function of a module, or a partial of one.
        num_generations: rollouts per group, as in the configuration of TRL. 1: sessions are not grouped.
        max_tokens: maximum number of tokens of one completion; TRL does not pass its own. None: the engine's.
        **fields: fields of all rollouts, as for `Trainer.rollouts`; without a `Trainer` also `completions` and `credentials`. TRL's
            worker sets `sampling`, from its configuration.

    Raises TypeError and ValueError that name the argument.
    """

    def __init__(
        self,
        connect: str | Callable[[], Trainer | AsyncClient],
        *,
        num_generations: int,
        max_tokens: int | None = None,
        **fields: Unpack[BridgeFields],
    ) -> None:
        if isinstance(num_generations, bool) or not isinstance(num_generations, int) or num_generations < 1:
            raise ValueError("num_generations must be an int, 1 or more")
        if not isinstance(connect, str) and not callable(connect):
            raise TypeError("connect must be an address or a function that returns a Trainer or an AsyncClient")
        self._n = num_generations
        self._fields: BridgeFields = {**fields, "sampling": _sampling(fields.get("sampling") or {}, max_tokens)}
        self._bridge = RolloutBridge(functools.partial(AsyncClient, connect) if isinstance(connect, str) else connect)
        self._groups: dict[int, _SessionGroup] = {}
        self._recent: dict[int, None] = {}
        self._lock = threading.Lock()
        # Not atexit: a process of multiprocessing, such as TRL's worker, does not call its functions.
        self._close = Finalize(None, self._bridge.close, exitpriority=0)

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> RolloutSession:
        """Start a rollout, or take the next one of the group `seed`.

        Nothing is raised here, because TRL's worker would go on without this rollout: `fetch_training_trace` raises.

        Args:
            task: the prompt: a text, a list of messages, a `Prompt`, or {"messages": ..., "metadata": ...}. TRL passes the column
                "prompt" of its dataset, and no other one.
            seed: the group. None: the rollout has no group.
            episode_id: not used.
        """
        try:
            return self._create(task, seed)
        except (TypeError, ValueError, RuntimeError) as error:
            failed: Future[Finished] = Future()
            failed.set_exception(error)
            return RolloutSession(Prompt([]), failed, None)

    def close(self) -> None:
        """Cancel all rollouts that run, and disconnect. Also done at the end of the process."""
        self._close()

    def _create(self, task: Any, seed: int | None) -> RolloutSession:
        if seed is None or self._n == 1:
            return self._start(task, 1).create()
        with self._lock:
            group = self._groups.get(seed)
            if group is None:
                group = self._groups[seed] = self._start_group(task, seed)
            elif group.task != task:
                raise ValueError(
                    f"group {seed} has two different prompts; a consumer without groups needs num_generations=1"
                )
            session = group.create()
            if group.created == self._n:
                del self._groups[seed]
                self._recent[seed] = None
                if len(self._recent) > _RECENT_SEEDS:
                    del self._recent[next(iter(self._recent))]
        return session

    def _start_group(self, task: Any, seed: int) -> _SessionGroup:
        if seed in self._recent:
            raise ValueError(
                f"group {seed} has more than num_generations={self._n} rollouts; "
                "give RolloutSessionFactory and HarnessRolloutWorker the same num_generations"
            )
        if len(self._groups) == _INCOMPLETE_GROUPS:
            raise ValueError(
                f"{_INCOMPLETE_GROUPS} groups have fewer than num_generations={self._n} sessions; "
                "give RolloutSessionFactory and HarnessRolloutWorker the same num_generations"
            )
        return self._start(task, self._n)

    def _start(self, task: Any, n: int) -> _SessionGroup:
        prompt = _prompt(task)
        return _SessionGroup(task, prompt, self._bridge.start(prompt, n, **self._fields))


def _prompt(task: Any) -> Prompt:
    if not isinstance(task, Mapping):
        return to_prompt(_messages(task))
    unknown = set(task) - {"messages", "metadata"}
    if unknown or "messages" not in task:
        raise TypeError(
            f'a task must have the keys "messages" and "metadata", not {", ".join(map(repr, sorted(task)))}'
        )
    return Prompt(_messages(task["messages"]), metadata=task.get("metadata"))


def _messages(given: Any) -> Any:
    """Return the messages of a list; another value unchanged."""
    if not isinstance(given, list | tuple):
        return given
    return [dataset_message(each) if isinstance(each, Mapping) else each for each in given]


def _sampling(given: object, max_tokens: int | None) -> Sampling:
    """Return `sampling` of a rollout for OpenEnv's parameters, which are all in one mapping. OpenEnv needs logprobs."""
    if not isinstance(given, Mapping):
        raise TypeError(f"sampling must be a mapping, not {type(given).__name__}")
    named = {key: value for key, value in given.items() if key in Sampling.__annotations__}
    extra = {key: value for key, value in given.items() if key not in named}
    return cast(Sampling, {"extra": extra or None, **named, "max_tokens": max_tokens, "logprobs": True})
