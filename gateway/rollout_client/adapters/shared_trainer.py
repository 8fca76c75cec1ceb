"""`SharedTrainer`: one connection for frameworks that run each rollout by a call of its own, on their own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import uuid
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Final, TypeAlias, cast

from rollout_client.spec import Sampling
from rollout_client.trainer.generation import Generated, Turn
from rollout_client.trainer.results import Finished, Prompt
from rollout_client.trainer.trainer import Trainer

_RUN_KEY: Final = "shared_trainer_run"
"""Key in the extra sampling parameters of a rollout. Its value says to which call of `run` a turn belongs."""

GenerateTurn: TypeAlias = Callable[[Turn], Awaitable[Generated]]
Connect: TypeAlias = Callable[[GenerateTurn], AbstractAsyncContextManager[Trainer]]
"""Function `connect(generate)` that returns a context manager of `Trainer(..., generate=generate)`."""


class SharedTrainer:
    """A trainer for rollouts that each bring their own `generate`. Created by `shared_trainer`.

    A task holds the trainer open until it is cancelled, as `asyncio.run` does before it closes the event loop.

    Args:
        connect: opens the trainer.
        at_once: maximum number of rollouts that run at the same time; further ones wait.
        on_closed: called once, when the trainer is closed or could not be opened.
    """

    def __init__(self, connect: Connect, at_once: int, on_closed: Callable[[], object]) -> None:
        self._runs: dict[str, GenerateTurn] = {}
        self._slots = asyncio.Semaphore(at_once)
        self._trainer: asyncio.Future[Trainer] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(connect, on_closed))

    async def run(
        self, prompt: Prompt, generate: GenerateTurn, /, *, sampling: Mapping[str, Any], **fields: Any
    ) -> Finished:
        """Run one rollout. If this call is cancelled, so is the rollout.

        Args:
            prompt: the prompt.
            generate: generates the turns of this rollout.
            sampling: sampling parameters of the rollout.
            **fields: further fields, as for `Trainer.rollouts`.

        Raises what `connect` and `Trainer.rollouts` raise.
        """
        # Shielded: a call that is cancelled must not take the connection of the others with it.
        trainer = await asyncio.shield(self._trainer)
        run_id = uuid.uuid4().hex
        extra = {**(sampling.get("extra") or {}), _RUN_KEY: run_id}
        marked = cast(Sampling, {**sampling, "extra": extra})
        groups = trainer.rollouts([prompt], n=1, at_once=1, sampling=marked, **fields)
        self._runs[run_id] = generate
        try:
            async with self._slots, contextlib.aclosing(groups):
                (finished,) = (await anext(groups)).rollouts
        finally:
            del self._runs[run_id]
        return finished

    async def _hold(self, connect: Connect, on_closed: Callable[[], object]) -> None:
        try:
            async with connect(self._generate) as trainer:
                self._trainer.set_result(trainer)
                await asyncio.Event().wait()
        except Exception as error:
            if self._trainer.done():
                raise
            self._trainer.set_exception(error)
        finally:
            on_closed()

    async def _generate(self, turn: Turn) -> Generated:
        """Generate a turn with the function of its rollout, which does not see the key."""
        extra = json.loads(turn.sampling.extra_json)
        generate = self._runs[extra.pop(_RUN_KEY)]
        sampling = replace(turn.sampling, extra_json=json.dumps(extra) if extra else "")
        return await generate(replace(turn, sampling=sampling))


_SHARED: Final[dict[tuple[asyncio.AbstractEventLoop, Hashable], SharedTrainer]] = {}


def shared_trainer(key: Hashable, connect: Connect, at_once: int) -> SharedTrainer:
    """Return the trainer of this event loop that has this key. If there is none, it is opened.

    `SharedTrainer.run` raises the error of a trainer that could not be opened. The next call of this function opens another one.

    Args:
        key: everything that the connection depends on, such as the address of the server.
        connect: opens the trainer.
        at_once: maximum number of rollouts that run at the same time; further ones wait.
    """
    found = asyncio.get_running_loop(), key
    if found not in _SHARED:
        _SHARED[found] = SharedTrainer(connect, at_once, functools.partial(_SHARED.pop, found))
    return _SHARED[found]
