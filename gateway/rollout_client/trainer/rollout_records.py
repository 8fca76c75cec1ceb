"""The rollouts that a trainer knows: what was generated for each, by the server's id, and who waits for which outcome."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from osmosis.rollout.v1.completion_service_pb2 import CompleteResponse, ReadLedgerRequest, ReadLedgerResponse
from osmosis.rollout.v1.rollout_service_pb2 import Rollout

from rollout_client.errors import RolloutError
from rollout_client.trainer.errors import ledger_mismatch
from rollout_client.trainer.ledger import LedgerCheckpoint, LedgerRun, SegmentLedger

JsonObject: TypeAlias = Mapping[str, Any]
_REMEMBERED_OUTCOMES: Final = 10_000


@dataclass(frozen=True, slots=True)
class StoredCompletion:
    """A turn's answer, to be given again.

    Args:
        request_digest: of what was requested.
        body: the message that went out, without the prompt's ids.
        prompt: they are the first `tokens` of this ledger; None: they do not travel.
    """

    request_digest: bytes
    body: bytes = field(repr=False)
    prompt: SegmentLedger | None = None
    tokens: int = 0

    def response(self) -> CompleteResponse:
        """The message."""
        response = CompleteResponse.FromString(self.body)
        if self.prompt is not None:
            response.prompt_ids.values.extend(self.prompt.ids[: self.tokens])
        return response


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """What a turn is generated from, checked: a ledger, and what is new behind it.

    Args:
        record: the rollout.
        segment_id: the segment that is continued.
        ledger: as it stands; not in the record before its first answer is.
        length: its tokens when the turn was asked for.
        runs: what is new; all of others than the model.
        checkpoint: what both sides hold behind the prompt.
        conversation: the whole of it, in message mode.
    """

    record: Record
    segment_id: str
    ledger: SegmentLedger
    length: int
    runs: Sequence[LedgerRun]
    checkpoint: LedgerCheckpoint
    conversation: Sequence[JsonObject] | None = None

    def ids(self) -> list[int]:
        """All of it as the model is to see it."""
        ids = self.ledger.ids[: self.length]
        for run in self.runs:
            ids.extend(run.ids)
        return ids.tolist()


@dataclass(slots=True)
class Record:
    """A rollout.

    Args:
        segments: by their ids, as they stand.
        replaced: what a segment held before its prompt began anew, with the segment's id.
        completions: those that were given, by turn key.
        conversations: in message mode, each segment's messages up to and with its last answer.
        tools: by digest, in the shape that chat templates know.
        latest_tools: the digest that the last request with tools had.
        typed: the server writes messages in the typed form; None: not known before the first message.
    """

    segments: dict[str, SegmentLedger] = field(default_factory=dict)
    replaced: list[tuple[str, SegmentLedger]] = field(default_factory=list)
    completions: dict[str, StoredCompletion] = field(default_factory=dict)
    conversations: dict[str, Sequence[JsonObject]] = field(default_factory=dict)
    tools: dict[bytes, Sequence[JsonObject]] = field(default_factory=dict)
    latest_tools: bytes = b""
    typed: bool | None = None

    def ledgers(self) -> Iterator[tuple[str, SegmentLedger]]:
        """All that was kept, also what a segment held before its prompt began anew."""
        yield from self.segments.items()
        yield from self.replaced

    def add_turn(self, prompt: TurnPrompt, answer: LedgerRun) -> LedgerCheckpoint:
        """Adds a turn, or leaves everything as it is and raises `RefusedCall`: another one of the segment was first."""
        held, ledger = self.segments.get(prompt.segment_id), prompt.ledger
        replaces = ledger.restarted and ledger.tokens == 0
        if ledger.tokens != prompt.length or (held is not None and held is not ledger and not replaces):
            raise ledger_mismatch(
                f"segment {prompt.segment_id!r} went on while turn {answer.turn} was generated: one turn of a segment at a time",
                held.checkpoints if held is not None else (),
            )
        if held is not None and replaces:
            self.replaced.append((prompt.segment_id, held))
        self.segments[prompt.segment_id] = ledger
        ledger.append((*prompt.runs, answer))
        checkpoint = ledger.checkpoint(prompt.checkpoint.messages + 1)
        ledger.checkpoints.append(checkpoint)
        return checkpoint


class Records:
    """The `most` rollouts used last. What was forgotten is sent anew by the server, once it is told so."""

    def __init__(self, most: int) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        return len(self._records)

    def find(self, uid: str) -> Record | None:
        """A rollout that is known."""
        return self._records.get(uid)

    def ledger(self, request: ReadLedgerRequest) -> ReadLedgerResponse | None:
        """A segment as it is held here; None: it is not known, or not any more."""
        record = self.find(request.uid)
        held = record.segments.get(request.segment_id) if record else None
        if held is None:
            return None
        return ReadLedgerResponse(
            spans=held.spans(request.offset), checkpoints=[checkpoint.to_proto() for checkpoint in held.checkpoints]
        )

    def open(self, uid: str) -> Record:
        """A rollout, known or not."""
        record = self._records.setdefault(uid, Record())
        self._records.move_to_end(uid)
        while len(self._records) > self._most:
            self._records.popitem(last=False)
        return record

    def forget(self, uid: str) -> Record | None:
        """Lets go of a rollout that is over."""
        return self._records.pop(uid, None)


class Outcomes:
    """Outcomes by the rollout id that the trainer gave. Those that came are remembered for a while.

    An outcome may come more than once, and before the response that says a rollout has started.
    """

    def __init__(self) -> None:
        self._awaited: dict[str, asyncio.Future[Rollout]] = {}
        self._settled: OrderedDict[str, None] = OrderedDict()

    def expect(self, rollout_id: str) -> asyncio.Future[Rollout]:
        """The outcome of a rollout that is about to be started."""
        return self._awaited.setdefault(rollout_id, asyncio.get_running_loop().create_future())

    def awaits(self, rollout_id: str) -> bool:
        """Whether somebody still waits."""
        return rollout_id in self._awaited

    def settle(self, rollout: Rollout) -> bool:
        """Takes an outcome in. False: nobody here ever waited for it."""
        rollout_id = rollout.spec.rollout_id
        future = self._awaited.get(rollout_id)
        if future is not None and not future.done():
            future.set_result(rollout)
        return future is not None or rollout_id in self._settled

    def fail(self, rollout_id: str, error: RolloutError) -> None:
        """Nobody will ever tell the outcome."""
        future = self._awaited.get(rollout_id)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # looked at, also where nobody waits any more

    def close(self, rollout_id: str) -> None:
        """Nobody waits any more; what still comes is acknowledged."""
        self._awaited.pop(rollout_id, None)
        self._settled[rollout_id] = None
        while len(self._settled) > _REMEMBERED_OUTCOMES:
            self._settled.popitem(last=False)
