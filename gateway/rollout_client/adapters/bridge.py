"""`RolloutBridge`: groups of rollouts for code that runs in many threads, such as the workers of asynchronous trainers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Final, Unpack, cast

from rollout_client._async.client import AsyncClient
from rollout_client.spec import Credentials, StartFields, Target
from rollout_client.trainer.results import Finished, Prompt, verify_rollout
from rollout_client.trainer.sync_trainer import LoopThread
from rollout_client.trainer.trainer import RolloutFields, Trainer

_DETACHED_SECONDS: Final = 60.0
"""When this process is gone for so long, the server cancels the rollouts for which an engine generates."""
_CANCEL_SECONDS: Final = 5.0


class BridgeFields(RolloutFields, total=False):
    """Fields of rollouts: those of `Trainer.rollouts`, and for an `AsyncClient` the engine and its bearer token."""

    completions: str | Target
    credentials: Credentials


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """A group that was started.

    Args:
        rollouts: one future per rollout, in the order of the indices. It raises what `Trainer.rollouts` raises, and
            `concurrent.futures.CancelledError` after `cancel`.
        work: the future of the whole group.
    """

    rollouts: Sequence[Future[Finished]]
    work: Future[None]

    def cancel(self) -> None:
        """Cancel the rollouts that still run."""
        self.work.cancel()


class RolloutBridge:
    """Runs groups of rollouts on an event loop in a thread of its own. `start` and `close` may be called from any thread.

        bridge = RolloutBridge(lambda: Trainer("localhost:50051", generate=generate, decode=decode))
        group = bridge.start(Prompt([{"role": "user", "content": "Hi."}]), 4, tokenizer="Qwen/Qwen3-8B")
        finished = [each.result() for each in group.rollouts]

    Args:
        connect: called once, on the event loop. Returns a `Trainer` that is not entered, so that its functions generate, or an
            `AsyncClient`, so that the engine of the field `completions` does. The bridge closes it.
    """

    def __init__(self, connect: Callable[[], Trainer | AsyncClient]) -> None:
        self._connect = connect
        self._opened: asyncio.Task[Trainer | AsyncClient] | None = None
        self._groups: set[asyncio.Task[None]] = set()
        self._closed = False
        self._closing = threading.Lock()
        self._loop = LoopThread("RolloutBridge")

    def start(self, prompt: Prompt, n: int, **fields: Unpack[BridgeFields]) -> RunningGroup:
        """Start the `n` rollouts of a prompt and return at once. All errors are raised by the futures of the group."""
        with self._closing:
            if self._closed:
                raise RuntimeError("the bridge is closed; create another one")
            rollouts: list[Future[Finished]] = [Future() for _ in range(n)]
            work = self._loop.submit(self._settle(rollouts, prompt, fields))
        # Also if it is cancelled before it begins. A future that has a result cannot be cancelled.
        work.add_done_callback(lambda _: [each.cancel() for each in rollouts])
        return RunningGroup(rollouts, work)

    def close(self) -> None:
        """Cancel the rollouts that still run, disconnect, and end the thread. May be called again."""
        with self._closing:
            if not self._closed:
                self._closed = True
                try:
                    self._loop.run(self._disconnect())
                finally:
                    self._loop.close()

    async def _disconnect(self) -> None:
        for task in self._groups:
            task.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)
        if self._opened is None:
            return
        (source,) = await asyncio.gather(self._opened, return_exceptions=True)
        if isinstance(source, Trainer):
            await source.__aexit__(None, None, None)
        elif isinstance(source, AsyncClient):
            await source.aclose()

    async def _settle(self, rollouts: Sequence[Future[Finished]], prompt: Prompt, fields: BridgeFields) -> None:
        """Run a group and set its futures."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)
        try:
            # Shielded: a group that is cancelled must not take the connection of the others with it.
            source = await asyncio.shield(self._open())
            if isinstance(source, Trainer):
                await _run_on_trainer(source, rollouts, prompt, fields)
            else:
                await _run_on_engine(source, rollouts, prompt, fields)
        except Exception as error:
            for each in rollouts:
                with contextlib.suppress(InvalidStateError):
                    each.set_exception(error)

    def _open(self) -> asyncio.Task[Trainer | AsyncClient]:
        if self._opened is None:
            self._opened = asyncio.create_task(self._enter())
        return self._opened

    async def _enter(self) -> Trainer | AsyncClient:
        source = self._connect()
        if not isinstance(source, Trainer | AsyncClient):
            raise TypeError(f"connect must return a Trainer or an AsyncClient, not {type(source).__name__}")
        return await source.__aenter__() if isinstance(source, Trainer) else source


async def _run_on_trainer(
    trainer: Trainer, rollouts: Sequence[Future[Finished]], prompt: Prompt, fields: BridgeFields
) -> None:
    n = len(rollouts)
    async with contextlib.aclosing(trainer.rollouts([prompt], n=n, at_once=n, **cast(RolloutFields, fields))) as groups:
        async for group in groups:
            for future, finished in zip(rollouts, group.rollouts, strict=True):
                future.set_result(finished)


async def _run_on_engine(
    client: AsyncClient, rollouts: Sequence[Future[Finished]], prompt: Prompt, fields: BridgeFields
) -> None:
    """Run a group whose completions an engine generates. A future is set as soon as its rollout has finished."""
    spec: dict[str, Any] = {"cancel_after_detach": _DETACHED_SECONDS, **fields, "messages": prompt.messages}
    spec["group_id"] = prompt.group_id or None
    if prompt.metadata is not None:
        spec["metadata"] = {**(fields.get("metadata") or {}), **prompt.metadata}
    started = await client.start_group(len(rollouts), **cast(StartFields, spec))
    uids = [each.uid for each in started.group.members]
    try:
        async with client.watch_group(started.group_id, view="samples") as outcomes:
            async for each in outcomes:
                rollouts[each.index].set_result(verify_rollout(each.rollout, None))
        await asyncio.gather(*(client.acknowledge(uid) for uid in uids))
    except BaseException:
        with contextlib.suppress(Exception):
            await client.cancel(group_id=started.group_id, reason="cancelled by its trainer", timeout=_CANCEL_SECONDS)
        raise
