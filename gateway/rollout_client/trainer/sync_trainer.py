"""`SyncTrainer`: a `Trainer` for training loops without asyncio.

The event loop runs in a thread of its own. The user's functions do not: they are called in the thread that iterates over
`rollouts`, while it waits for a group. There they find that thread's state, such as torch's `no_grad` and its CUDA device.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Literal, Required, Self, TypeAlias, TypedDict, TypeVar, Unpack, cast

from rollout_client._async.client import AsyncClient
from rollout_client.trainer.batches import GenerateBatch
from rollout_client.trainer.completion import Parse
from rollout_client.trainer.generation import Decode, Generate, Generated, SamplingParams, Turn
from rollout_client.trainer.prompts import Render
from rollout_client.trainer.results import Group, PromptLike, iter_prompts
from rollout_client.trainer.server import Serving
from rollout_client.trainer.trainer import ModelFields, RolloutFields, Trainer

_T = TypeVar("_T")
_GENERATES: Final = ("generate", "generate_batch")
_FUNCTIONS: Final = (*_GENERATES, "decode", "parse", "render")

SyncGenerate: TypeAlias = Callable[[Turn], Generated] | Callable[[Sequence[int], SamplingParams], Generated] | Generate
"""Function `generate(turn)` or `generate(prompt_ids, sampling)`, plain or a coroutine function."""
SyncGenerateBatch: TypeAlias = Callable[[Sequence[Turn]], Sequence[Generated | Exception]] | GenerateBatch
"""Function `generate_batch(turns)`, plain or a coroutine function."""


class SyncModelFields(TypedDict, total=False):
    """Keyword arguments of `SyncTrainer` that describe the model: those of `ModelFields`, with plain functions."""

    generate: SyncGenerate
    generate_batch: SyncGenerateBatch
    decode: Required[Decode]
    parse: Parse
    end_ids: Collection[int]
    render: Render
    generating: int
    batch_seconds: float
    remembered: int


class SyncTrainer:
    """Runs rollouts on a server with a local model. A context manager, entered once.

        with SyncTrainer("localhost:50051", generate=generate, decode=decode, parse=parsers.hermes) as trainer:
            for group in trainer.rollouts(["What is 5 plus 3?"], n=8, tokenizer="Qwen/Qwen3-8B"): ...

    `generate` or `generate_batch`, `decode`, `parse`, `render` and the iterator of prompts are called one at a time, in the thread
    that iterates over `rollouts`, while it waits for a group. While the body of the loop runs, nothing is generated, and the
    server's time limits go on: collect the groups of a step in a list before a long training step. Coroutine functions run on the
    event loop instead.

    Args:
        server: address of the server, or an AsyncClient that nothing else uses. The SyncTrainer closes it, because its event loop
            ends with the SyncTrainer.
        serving, on_mismatch: as for `Trainer`.
        **model: as for `Trainer`, but the functions may be plain functions.

    Raises TypeError and ValueError that name the argument.
    """

    def __init__(
        self,
        server: str | AsyncClient,
        *,
        serving: Serving | None = None,
        on_mismatch: Literal["raise", "flag"] = "raise",
        **model: Unpack[SyncModelFields],
    ) -> None:
        self._calls = _CallerThread()
        functions = {
            name: self._calls.wrap(self._labelled(given) if name in _GENERATES else given)
            for name, given in model.items()
            if name in _FUNCTIONS
        }
        fields = cast(ModelFields, {**model, **functions})
        self._trainer = Trainer(server, serving=serving, on_mismatch=on_mismatch, **fields)
        self._server = server
        self._loop: LoopThread | None = None

    def __enter__(self) -> Self:
        """Connect or listen. Raises RolloutError if the server is unreachable, OSError if the address cannot be bound."""
        if self._loop is not None:
            raise RuntimeError("a SyncTrainer can be entered only once; create another one")
        self._loop = LoopThread("SyncTrainer")
        try:
            self._loop.run(self._connect())
        except BaseException:
            self._loop.close()
            raise
        atexit.register(self._close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel all running rollouts and their generations, disconnect, and end the event loop."""
        atexit.unregister(self._close)
        self._close()

    def rollouts(
        self,
        prompts: Iterable[PromptLike],
        *,
        n: int = 4,
        at_once: int = 64,
        in_order: bool = False,
        **fields: Unpack[RolloutFields],
    ) -> Generator[Group, None, None]:
        """Yield one group of `n` finished rollouts per prompt. See `Trainer.rollouts` for the arguments and errors.

        Leaving the loop cancels the remaining rollouts: at once if nothing else refers to the iterator, otherwise when it is
        closed or the SyncTrainer is left. Only one thread may wait for a group at a time.
        """
        loop, given = self._open_loop(), prompts
        if not isinstance(prompts, list | tuple):  # else nothing of the user's is called, and all groups start at once
            waiting = iter_prompts(prompts)
            take = self._calls.wrap(lambda: next(waiting, None))
            given = cast(Iterator[PromptLike], iter(take, None))  # of awaitables: `Trainer` awaits each
        groups = _Groups(self._trainer.rollouts(given, n=n, at_once=at_once, in_order=in_order, **fields))
        try:
            while (group := self._calls.serve_until(loop.submit(groups.next()))) is not None:
                yield group
        finally:
            if loop.running:
                loop.finish(groups.close())

    def announce(self, *, version: str = "", step: int | None = None) -> None:
        """Announce the policy that generates from now on. See `Trainer.announce`."""
        self._open_loop().run(self._trainer.announce(version=version, step=step))

    def pause(self) -> None:
        """Pause sampling. See `Trainer.pause`; a call that already waits for the thread that iterates still comes."""
        self._open_loop().run(self._trainer.pause())

    def resume(self, *, version: str = "", step: int | None = None) -> None:
        """Let sampling go on after `pause`. See `Trainer.resume`."""
        self._open_loop().run(self._trainer.resume(version=version, step=step))

    def __repr__(self) -> str:
        return f"<SyncTrainer of {self._server}>"

    def _labelled(self, function: Any) -> Any:
        """Return a plain `generate` that names the policy announced when it is called, which may be long after it was requested."""
        if not callable(function) or _is_coroutine_function(function):
            return function

        @functools.wraps(function, updated=())
        def call(*arguments: Any) -> Any:
            policy = self._trainer._announced.policy
            return policy.label(function(*map(policy.stamp, arguments)))

        return call

    def _open_loop(self) -> LoopThread:
        if self._loop is None or not self._loop.running:
            raise RuntimeError("the trainer is not connected; use it within `with`")
        return self._loop

    def _close(self) -> None:
        loop = self._open_loop()
        try:
            loop.run(self._disconnect())
        finally:
            loop.close()

    async def _connect(self) -> None:
        try:
            await self._trainer.__aenter__()
        except BaseException:
            await self._close_client()
            raise

    async def _disconnect(self) -> None:
        await self._trainer.__aexit__(None, None, None)
        await self._close_client()

    async def _close_client(self) -> None:
        if isinstance(self._server, AsyncClient):
            await self._server.aclose()


class _Groups:
    """Groups of one `Trainer.rollouts`. `close` also ends a `next` that is under way."""

    def __init__(self, groups: AsyncGenerator[Group, None]) -> None:
        self._groups = groups
        self._next: asyncio.Task[Any] | None = None

    async def next(self) -> Group | None:
        """Return the next group; None after the last one."""
        self._next = asyncio.current_task()
        return await anext(self._groups, None)

    async def close(self) -> None:
        """Cancel the rollouts that are left."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._groups.aclose()


class LoopThread:
    """An event loop in a thread of its own, from its creation to `close`. A daemon: it never keeps the interpreter alive."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.running = True
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop and return its result. An exception in this thread, such as Ctrl-C, cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine. In the loop's own thread, where the garbage collector may close an iterator, only start it."""
        if threading.current_thread() is self._thread:
            self.submit(work)
        else:
            self.run(work)

    def close(self) -> None:
        """Cancel what runs on the loop, and end the thread."""
        self.running = False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


class _CallerThread:
    """Calls that the event loop's thread leaves to the thread that iterates. At most a few per turn in progress are queued."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._serving = threading.Lock()

    def wrap(self, function: Any) -> Any:
        """Return a coroutine function that calls `function` in the thread that iterates. Others are returned as they are."""
        if not callable(function) or _is_coroutine_function(function):
            return function

        @functools.wraps(function, updated=())
        async def call(*arguments: Any) -> Any:
            result: Future[Any] = Future()
            self._calls.put(lambda: _run(result, function, arguments))
            return await asyncio.wrap_future(result)

        return call

    def serve_until(self, result: Future[_T]) -> _T:
        """Run calls in this thread until there is a result, and return it. Raises its exception.

        Calls that are still queued then wait for the next time, or are cancelled with their turns.
        """
        if not self._serving.acquire(blocking=False):
            result.cancel()
            raise RuntimeError("another thread waits for a group of this trainer; iterate in one thread at a time")
        try:
            result.add_done_callback(lambda _: self._calls.put(None))
            while not result.done():
                call = self._calls.get()
                if call is not None:
                    call()
            return result.result()
        finally:
            self._serving.release()


def _run(result: Future[_T], function: Callable[..., _T], arguments: Sequence[object]) -> None:
    """Call a function unless its result is not needed any more.

    What is no `Exception`, such as Ctrl-C, is raised here and ends the iteration, which cancels the turn: it has not failed.
    """
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(function(*arguments))
    except StopIteration as error:  # asyncio accepts it neither as a result nor as an exception
        result.set_exception(RuntimeError(f"{function!r} raised StopIteration").with_traceback(error.__traceback__))
    except Exception as error:
        result.set_exception(error)


def _is_coroutine_function(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
