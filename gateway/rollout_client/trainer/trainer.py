"""`Trainer`: runs groups of rollouts on a server with a local model, and verifies their samples."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Required, Self, TypedDict, TypeVar, Unpack

from osmosis.rollout.v1.rollout_service_pb2 import Rollout

from rollout_client._async.client import AsyncClient
from rollout_client.errors import RolloutError
from rollout_client.spec import CommonFields
from rollout_client.trainer.batches import Batches, GenerateBatch
from rollout_client.trainer.completion import Parse, plain
from rollout_client.trainer.generation import (
    Decode,
    Generate,
    check_coroutine,
    check_signature,
    resolved,
    takes_turn,
    token_ids,
)
from rollout_client.trainer.policy import AnnouncedPolicy
from rollout_client.trainer.prompts import Render
from rollout_client.trainer.results import (
    FailureLog,
    Finished,
    Group,
    Prompt,
    PromptLike,
    RecordMismatch,
    iter_prompts,
    to_prompt,
    verify_rollout,
)
from rollout_client.trainer.rollout_records import Outcomes, Records
from rollout_client.trainer.server import Listener, Serving
from rollout_client.trainer.stream.session import TrainerSide
from rollout_client.trainer.stream.transport import StreamTransport
from rollout_client.trainer.transport import CallbackTransport, Transport, group_rollout_ids
from rollout_client.trainer.turns import Model, Turns

_FAREWELL_SECONDS: Final = 1.0
"""Time to wait for the outcome of a rollout that the trainer cancelled."""
_MOST_BATCH_SECONDS: Final = 86_400
_PER_ROLLOUT: Final = ("messages", "completions", "outcome", "group_id", "rollout_id", "request_id", "credentials")
"""Fields of the request that `Trainer` sets for each rollout."""
_T = TypeVar("_T")


class ModelFields(TypedDict, total=False):
    """Keyword arguments of `Trainer` that describe the model.

    Keys:
        generate: coroutine function `generate(turn)` or `generate(prompt_ids, sampling)` that returns a `Generated`. May raise
            `TryAgainLater`. A function with exactly one required positional parameter gets a `Turn`.
        generate_batch: instead of `generate`: coroutine function `generate_batch(turns)` that returns a list with one `Generated`
            per turn, in the same order, or an exception in its place: `TryAgainLater`, or one that fails only this rollout. One
            batch of at most `generating` turns runs at a time. It starts when no further turn can come before one is completed:
            all rollouts wait for their turns or for a free slot. Not with `serving`.
        batch_seconds: a batch also starts when no turn has come for this time, in seconds. Default 10. The server does not know
            what an agent does without it: if a rollout waits for another one at a lock, the batch of the other one must not wait.
        decode: function `decode(ids)` that returns the text of token ids, special tokens included.
        parse: function `parse(text)` that returns a `ParsedCompletion`. Default: all text is content.
        end_ids: stop token ids. A trailing one is removed before `decode`.
        render: function `render(messages, tools)` that returns prompt ids. With it the server may send messages instead of ids.
        generating: maximum number of turns generated at the same time. Default 256.
        remembered: maximum number of unfinished rollouts whose tokens are kept for verification. Default 1024.
    """

    generate: Generate
    generate_batch: GenerateBatch
    decode: Required[Decode]
    parse: Parse
    end_ids: Collection[int]
    render: Render
    generating: int
    batch_seconds: float
    remembered: int


class RolloutFields(CommonFields, total=False):
    """Keyword arguments of `Trainer.rollouts` for all rollouts: fields of RolloutSpec, as in `SpecFields`."""

    metadata: Mapping[str, Any] | None


class Trainer:
    """Runs rollouts on a server with a local model. An async context manager, bound to one event loop and entered once.

        async with Trainer("localhost:50051", generate=generate, decode=decode, parse=parsers.hermes) as trainer:
            async for group in trainer.rollouts(["What is 5 plus 3?"], n=8, tokenizer="Qwen/Qwen3-8B"): ...

    Trainer and server exchange token ids. Both keep a ledger and compare every token and its author: by digest in each turn, and
    element by element in the finished samples.

    Args:
        server: address of the server, or an AsyncClient (for API key, TLS and retries), which the Trainer does not close.
        serving: listen for calls of the server. None: use one stream to the server, and open no port.
        on_mismatch: if a sample differs from the generated tokens: "raise" `RecordMismatch`, or "flag": yield the rollout with
            its `mismatch` and without samples.
        **model: functions of the model and limits; see `ModelFields`.

    Raises TypeError and ValueError that name the argument.
    """

    def __init__(
        self,
        server: str | AsyncClient,
        *,
        serving: Serving | None = None,
        on_mismatch: Literal["raise", "flag"] = "raise",
        **model: Unpack[ModelFields],
    ) -> None:
        if on_mismatch not in ("raise", "flag"):
            raise ValueError('on_mismatch must be "raise" or "flag"')
        self._generating = _positive_int(model.get("generating", 256), "generating")
        self._remembered = _positive_int(model.get("remembered", 1024), "remembered")
        self._records = Records(self._remembered)
        self._outcomes = Outcomes()
        self._announced = AnnouncedPolicy()
        self._batches = _batches_from(model, self._generating, serving, self._announced)
        self._turns = Turns(
            _model_from(model, self._batches), self._records, self._outcomes, self._generating, self._announced
        )
        self._renders = model.get("render") is not None
        self._raises = on_mismatch == "raise"
        self._failures = FailureLog()
        self._server = server
        self._serving = serving
        self._transport: Transport | None = None
        self._groups: set[asyncio.Task[Group]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Connect or listen. Raises RolloutError if the server is unreachable, OSError if the address cannot be bound."""
        if self._transport is not None:
            raise RuntimeError("a Trainer can be entered only once; create another one")
        self._transport = self._make_transport()
        try:
            await self._transport.open()
        except BaseException:
            await self._transport.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel all running rollouts and their generations, and disconnect."""
        await _cancel_all(self._groups)
        await asyncio.gather(*self._ending, return_exceptions=True)
        try:
            await self._open_transport().close()
        finally:
            if self._batches is not None:
                await self._batches.close()

    async def rollouts(
        self,
        prompts: Iterable[PromptLike],
        *,
        n: int = 4,
        at_once: int = 64,
        in_order: bool = False,
        **fields: Unpack[RolloutFields],
    ) -> AsyncGenerator[Group, None]:
        """Yield one group of `n` finished rollouts per prompt, in the order in which the groups finish.

        A rollout that fails stays in its group, with the samples that may be trained on; the others are in `untrainable`.

        Leaving the loop cancels the remaining rollouts. After a `break` this happens when the generator is closed, so wrap it in
        `contextlib.aclosing`, or leave the Trainer.

        Args:
            prompts: prompts; may be infinite. A prompt is taken when its group can start.
            n: rollouts per prompt (group size).
            at_once: maximum number of rollouts that run at the same time, rounded down to whole groups, but at least one group.
            in_order: yield the groups in the order of the prompts. A group that finishes early waits for the groups before it, and
                counts as running until then.
            **fields: fields of the spec for all rollouts; `tokenizer` is required without `render`. A prompt's `metadata` is
                merged over the common `metadata`.

        Raises:
            RolloutError: the server is unreachable for longer than `retry` allows, refuses a rollout, or lost one.
            RecordMismatch: a sample differs from the generated tokens, with `on_mismatch="raise"`.
            TypeError, ValueError: an argument cannot be sent.
        """
        _positive_int(n, "n")
        room = max(1, _positive_int(at_once, "at_once") // n)
        if room * n > self._remembered:
            raise ValueError(
                f"{room * n} rollouts at once exceed remembered={self._remembered}; raise Trainer(remembered=...)"
            )
        _check_fields(fields)
        waiting, started = iter_prompts(prompts), list[asyncio.Task[Group]]()
        try:
            while True:
                while len(started) < room and (given := await resolved(next(waiting, None))) is not None:
                    started.append(self._start_task(self._group(to_prompt(given), n, fields)))
                if not started:
                    return
                done, _ = await asyncio.wait(started[:1] if in_order else started, return_when=asyncio.FIRST_COMPLETED)
                for each in [task for task in started if task in done]:
                    started.remove(each)
                    yield each.result()
        finally:
            await _cancel_all(started)

    async def announce(self, *, version: str = "", step: int | None = None) -> None:
        """Announce the policy that generates from now on. Returns when the server has processed it, or the stream to it has ended.

        A new stream begins with what was announced. A `Generated` without version and step gets those that held when its
        `generate` began. The server cancels the rollouts that are too old for the new step: see `on_stale`.

        Args:
            version: version of the policy, at most 256 characters; empty: not changed.
            step: step of the policy; it must not decrease. None: not changed.

        Raises:
            RolloutError: with `serving`, the server cannot be reached or refuses the announcement; in this trainer it holds all the
                same, and the next announcement contains it. On the stream, a refusal is only logged.
            TypeError, ValueError: an argument is wrong; nothing has changed.
        """
        await self._change_policy(version, step, paused=self._announced.paused)

    async def pause(self) -> None:
        """Pause sampling, for example to load new weights. No `generate` is called until `resume`.

        Calls in progress go on. Turns that have not begun go back to the server, which requests them after the pause. Raises
        RolloutError as `announce` does; if the server does not know of the pause, it repeats refused turns for a limited time only.
        """
        await self._change_policy("", None, paused=True)

    async def resume(self, *, version: str = "", step: int | None = None) -> None:
        """Let sampling go on after `pause`, with a policy as for `announce`. Raises as `announce` does."""
        await self._change_policy(version, step, paused=False)

    async def _change_policy(self, version: str, step: int | None, *, paused: bool) -> None:
        transport = self._open_transport()
        self._announced.change(version, step, paused=paused)
        if paused and self._batches is not None:
            self._batches.postpone()
        await transport.announce()

    def __repr__(self) -> str:
        return f"<Trainer of {self._server}>"

    def _start_task(self, group: Coroutine[Any, Any, Group]) -> asyncio.Task[Group]:
        task = asyncio.create_task(group)
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)
        return task

    async def _group(self, prompt: Prompt, n: int, fields: RolloutFields) -> Group:
        group_id = prompt.group_id or uuid.uuid4().hex
        spec: dict[str, Any] = {"token_mode": None if self._renders else "tokens", **fields}
        spec |= {"messages": prompt.messages, "group_id": group_id}
        if prompt.metadata is not None:
            common = fields.get("metadata") or {}
            spec["metadata"] = {**common, **prompt.metadata}
        transport, name = self._open_transport(), uuid.uuid4().hex
        outcomes = {
            rollout_id: self._outcomes.expect(rollout_id, group_id, index)
            for index, rollout_id in enumerate(group_rollout_ids(name, n))
        }
        uids: Mapping[str, str] = {}
        try:
            uids = await transport.start(spec, name, n)
            return Group(group_id, prompt, await self._finish_group(transport, uids, outcomes))
        except BaseException as error:
            # If the start was refused, nothing runs and no outcome will arrive. A cancelled start may still succeed.
            runs = bool(uids) or isinstance(error, asyncio.CancelledError)
            left = [each for each in outcomes if self._outcomes.awaits(each)]
            await asyncio.gather(
                *(
                    self._cancel_rollout(transport, each, uids.get(each), outcomes[each] if runs else None)
                    for each in left
                )
            )
            raise

    async def _finish_group(
        self, transport: Transport, uids: Mapping[str, str], outcomes: Mapping[str, asyncio.Future[Rollout]]
    ) -> Sequence[Finished]:
        rollouts = [
            asyncio.create_task(self._rollout(transport, each, uids[each], outcomes[each])) for each in outcomes
        ]
        try:
            return await asyncio.gather(*rollouts)
        finally:
            await _cancel_all(rollouts)

    async def _rollout(
        self, transport: Transport, rollout_id: str, uid: str, outcome: asyncio.Future[Rollout]
    ) -> Finished:
        rollout = await transport.wait_finished(uid, outcome)
        self._outcomes.close(rollout_id)
        record = self._records.forget(rollout.uid)
        # Another one if a server without a journal was restarted: it has started the rollout anew.
        self._records.forget(uid)
        finished = verify_rollout(rollout, record)
        self._failures.add(finished)
        if finished.mismatch is not None and self._raises:
            raise RecordMismatch(finished)
        return finished

    async def _cancel_rollout(
        self, transport: Transport, rollout_id: str, uid: str | None, outcome: asyncio.Future[Rollout] | None
    ) -> None:
        """Cancel a rollout on the server and drop its record. The cancellation completes even if this task is cancelled."""

        async def end() -> None:
            with contextlib.suppress(RolloutError, RuntimeError):
                await transport.cancel(rollout_id)
            if outcome is not None:
                # Stay connected until the rollout has ended, or it would request its last turn from a closed trainer.
                done, _ = await asyncio.wait((outcome,), timeout=_FAREWELL_SECONDS)
                for each in (uid or "", *(each.result().uid for each in done if each.exception() is None)):
                    self._records.forget(each)
            self._outcomes.close(rollout_id)

        task = asyncio.create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        await asyncio.shield(task)

    def _open_transport(self) -> Transport:
        if self._transport is None:
            raise RuntimeError("the trainer is not connected; use it within `async with`")
        return self._transport

    def _make_transport(self) -> Transport:
        server, serving = self._server, self._serving
        client = AsyncClient(server) if isinstance(server, str) else server
        own = client is not server
        if serving is None:
            return StreamTransport(
                client,
                TrainerSide(
                    self._turns, self._records, self._outcomes, self._generating, self._announced, self._batches
                ),
                own=own,
            )
        listener = Listener(serving, self._turns, self._records, self._outcomes)
        return CallbackTransport(client, listener, self._announced, serving.look, own=own)


def _batches_from(
    fields: ModelFields, most: int, serving: Serving | None, announced: AnnouncedPolicy
) -> Batches | None:
    generate_batch, seconds = fields.get("generate_batch"), fields.get("batch_seconds", 10.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"batch_seconds must be a number, not {type(seconds).__name__}")
    if not 0 < seconds <= _MOST_BATCH_SECONDS:
        raise ValueError(f"batch_seconds must be above 0 and at most {_MOST_BATCH_SECONDS}")
    if generate_batch is None:
        return None
    if fields.get("generate") is not None:
        raise TypeError("generate and generate_batch are both given; give one of them")
    if not callable(generate_batch):
        raise TypeError("generate_batch must be callable")
    check_coroutine(generate_batch, "generate_batch")
    check_signature(generate_batch, 1, "generate_batch(turns)")
    if serving is not None:
        raise TypeError("generate_batch needs the stream to the server: leave out serving, or give generate")
    return Batches(generate_batch, most, seconds, announced)


def _model_from(fields: ModelFields, batches: Batches | None) -> Model:
    unknown = set(fields) - set(ModelFields.__annotations__)
    if unknown:
        raise TypeError(f"unknown argument {sorted(unknown)[0]!r}; use one of {', '.join(ModelFields.__annotations__)}")
    generate = fields.get("generate") if batches is None else batches.generate
    if not callable(generate):
        raise TypeError("generate must be given and callable, or generate_batch")
    check_coroutine(generate, "generate")
    check_signature(generate, 1 if takes_turn(generate) else 2, "generate(turn) or generate(prompt_ids, sampling)")
    decode, parse, render = fields.get("decode"), fields.get("parse", plain), fields.get("render")
    if not callable(decode):
        raise TypeError("decode must be given and callable")
    if not callable(parse):
        raise TypeError(
            f"parse must be a function such as rollout_client.trainer.parsers.hermes, not {type(parse).__name__}"
        )
    if render is not None:
        if not callable(render):
            raise TypeError("render must be callable")
        check_signature(render, 2, "render(messages, tools)")
    check_signature(decode, 1, "decode(ids)")
    check_signature(parse, 1, "parse(text)")
    return Model(generate, decode, parse, render, _end_ids(fields.get("end_ids", ())))


def _end_ids(given: Collection[int]) -> frozenset[int]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"end_ids must be a collection of token ids such as {{7}}, not {type(given).__name__}")
    return frozenset(token_ids(given, "end_ids"))


def _check_fields(fields: Mapping[str, Any]) -> None:
    taken = [name for name in _PER_ROLLOUT if name in fields]
    if taken:
        raise TypeError(f"{taken[0]!r} cannot be set for all rollouts; the trainer sets it, or it belongs in a Prompt")
    if isinstance(fields.get("metadata"), str):
        raise TypeError("metadata must be a mapping here, because the metadata of a prompt is merged into it")


def _positive_int(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more")
    return value


async def _cancel_all(tasks: Collection[asyncio.Task[_T]]) -> None:
    """Cancel tasks and wait until they have ended. Their exceptions are dropped: the first one is already being raised."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
