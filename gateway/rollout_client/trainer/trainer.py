"""The trainer's side of a rollout server: the model is asked for turns, finished samples come back."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Required, Self, TypedDict, TypeVar, Unpack

from osmosis.rollout.v1 import spec_pb2
from osmosis.rollout.v1.rollout_service_pb2 import Rollout

from rollout_client._async.client import AsyncClient
from rollout_client.errors import RolloutError
from rollout_client.spec import Limits, Sampling, Target, Tokenizer
from rollout_client.trainer.completion import Parse, plain
from rollout_client.trainer.generation import Decode, Generate
from rollout_client.trainer.prompts import Render
from rollout_client.trainer.results import (
    Finished,
    Group,
    Prompt,
    PromptLike,
    RecordMismatch,
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
"""How long the outcome of a rollout that was let go of is waited for."""
_PER_ROLLOUT: Final = ("messages", "completions", "outcome", "group_id", "rollout_id", "request_id", "credentials")
"""Fields of the spec that differ from rollout to rollout."""
_T = TypeVar("_T")


class ModelFields(TypedDict, total=False):
    """The model, and how much of it there is.

    `end_ids` are the ids that end an answer: one at the end is left out of what `decode` is given. `render` makes prompt ids of
    messages and tools; with it the server may send messages instead of ids. At most `generating` turns are generated at the
    same time, and the last `remembered` rollouts are kept until they end.
    """

    generate: Required[Generate]
    decode: Required[Decode]
    parse: Parse
    end_ids: Collection[int]
    render: Render
    generating: int
    remembered: int


class RolloutFields(TypedDict, total=False):
    """What the rollouts of all prompts have in common: fields of RolloutSpec by their names."""

    agent: str | None
    tools: str | Target | spec_pb2.Target | None
    sampling: Sampling | spec_pb2.Sampling | None
    limits: Limits | spec_pb2.Limits | None
    tokenizer: str | Tokenizer | spec_pb2.Tokenizer | None
    token_mode: Literal["messages", "tokens"] | None
    on_drift: Literal["warn", "fail"] | None
    on_interrupt: Literal["resume", "fail"] | None
    priority: int | None
    labels: Mapping[str, str] | None
    metadata: Mapping[str, Any] | None


class Trainer:
    """Runs rollouts on a server with a model of one's own.

    `async with Trainer("localhost:50051", generate=..., decode=..., parse=...) as trainer`, in one event loop. The server sends
    token ids and is sent token ids; every token is compared on both sides, in each turn and again in the finished sample.

    Args:
        server: its address, or an AsyncClient, for keys and TLS, that stays yours to close.
        serving: where the server calls back. None: everything goes over one stream to the server, and nothing listens here.
        on_mismatch: what to do when a sample is not what was generated: "raise" `RecordMismatch`, or "flag" the rollout, which then
            has no samples.
        model: how to generate, and what ids and texts mean; see `ModelFields`.
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
        self._turns = Turns(_model_from(model), self._records, self._generating)
        self._renders = model.get("render") is not None
        self._raises = on_mismatch == "raise"
        self._server = server
        self._serving = serving
        self._transport: Transport | None = None
        self._groups: set[asyncio.Task[Group]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Connects, or listens. Raises RolloutError where the server cannot be reached, OSError if an address cannot be had."""
        if self._transport is not None:
            raise RuntimeError("a Trainer can be entered once; make another one")
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
        """Cancels what still runs, here and on the server."""
        await _cancel_all(self._groups)
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._open_transport().close()

    async def rollouts(
        self, prompts: Iterable[PromptLike], *, n: int = 4, at_once: int = 64, **fields: Unpack[RolloutFields]
    ) -> AsyncGenerator[Group, None]:
        """Iterates over groups of `n` finished rollouts, one for each prompt, as they finish.

        About `at_once` rollouts run at the same time; prompts are taken as there is room, so they may be without end. What is
        common to all rollouts is given by keyword: `tokenizer` at least. A prompt's metadata is added to the common one.

        Raises RolloutError where the server cannot be reached for too long, lost a rollout or refuses one, TypeError and
        ValueError for arguments that cannot be sent, and `RecordMismatch`. Leaving the loop, also by an error, cancels what still
        runs; after a `break` use `contextlib.aclosing`, or leave the Trainer.
        """
        _positive_int(n, "n")
        room = max(1, _positive_int(at_once, "at_once") // n)
        if room * n > self._remembered:
            raise ValueError(
                f"{room * n} rollouts at once are more than are remembered; give Trainer(remembered=...) more"
            )
        _check_fields(fields)
        waiting, running = iter(prompts), set[asyncio.Task[Group]]()
        ready: deque[asyncio.Task[Group]] = deque()
        try:
            while True:
                while len(running) < room and (given := next(waiting, None)) is not None:
                    running.add(self._start_task(self._group(to_prompt(given), n, fields)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ready.extend(done)
                while ready:
                    yield ready.popleft().result()
        finally:
            await _cancel_all([*running, *ready])

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
        outcomes = {rollout_id: self._outcomes.expect(rollout_id) for rollout_id in group_rollout_ids(name, n)}
        uids: Mapping[str, str] = {}
        try:
            uids = await transport.start(spec, name, n)
            return Group(group_id, prompt, await self._finish_group(transport, uids, outcomes))
        except BaseException as error:
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
        finished = verify_rollout(rollout, self._records.forget(uid))
        if finished.mismatch is not None and self._raises:
            raise RecordMismatch(finished)
        return finished

    async def _cancel_rollout(
        self, transport: Transport, rollout_id: str, uid: str | None, outcome: asyncio.Future[Rollout] | None
    ) -> None:
        """Ends a rollout on the server, and forgets it here. Goes on also where whoever waits for it does not."""

        async def end() -> None:
            with contextlib.suppress(RolloutError, RuntimeError):
                await transport.cancel(rollout_id)
            if outcome is not None:
                # So that its last turn is not asked of a trainer that is gone.
                done, _ = await asyncio.wait((outcome,), timeout=_FAREWELL_SECONDS)
                uid_found = next((each.result().uid for each in done if each.exception() is None), "")
                self._records.forget(uid or uid_found)
            self._outcomes.close(rollout_id)

        task = asyncio.create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        await asyncio.shield(task)

    def _open_transport(self) -> Transport:
        if self._transport is None:
            raise RuntimeError("the trainer has no server yet: use it within `async with`")
        return self._transport

    def _make_transport(self) -> Transport:
        server, serving = self._server, self._serving
        client = AsyncClient(server) if isinstance(server, str) else server
        own = client is not server
        if serving is None:
            return StreamTransport(
                client, TrainerSide(self._turns, self._records, self._outcomes, self._generating), own=own
            )
        listener = Listener(serving, self._turns, self._records, self._outcomes)
        return CallbackTransport(client, listener, serving.look, own=own)


def _model_from(fields: ModelFields) -> Model:
    for name in ("generate", "decode"):
        if not callable(fields.get(name)):
            raise TypeError(f"{name} must be given, and callable")
    unknown = set(fields) - set(ModelFields.__annotations__)
    if unknown:
        raise TypeError(f"unknown argument {sorted(unknown)[0]!r}; there are {', '.join(ModelFields.__annotations__)}")
    return Model(
        fields["generate"],
        fields["decode"],
        fields.get("parse", plain),
        fields.get("render"),
        frozenset(fields.get("end_ids", ())),
    )


def _check_fields(fields: Mapping[str, Any]) -> None:
    taken = [name for name in _PER_ROLLOUT if name in fields]
    if taken:
        raise TypeError(f"{taken[0]!r} is not for all rollouts: the trainer sets it, or it stands in a Prompt")
    if isinstance(fields.get("metadata"), str):
        raise TypeError("metadata must be a mapping here, so that a prompt's can be added")


def _positive_int(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more")
    return value


async def _cancel_all(tasks: Collection[asyncio.Task[_T]]) -> None:
    """Cancels tasks and waits until they are gone. Their errors have been raised already, or come too late."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
