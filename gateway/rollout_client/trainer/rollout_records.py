"""State of a trainer's rollouts: ledgers and completions by the server's id, and pending outcomes by rollout id."""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from osmosis.rollout.v1.completion_service_pb2 import CompleteResponse, ReadLedgerRequest, ReadLedgerResponse
from osmosis.rollout.v1.rollout_service_pb2 import Rollout

from rollout_client.errors import RolloutError
from rollout_client.trainer.errors import ledger_mismatch
from rollout_client.trainer.generation import TurnImage
from rollout_client.trainer.ledger import LedgerCheckpoint, LedgerRun, SegmentLedger

JsonObject: TypeAlias = Mapping[str, Any]
_REMEMBERED_OUTCOMES: Final = 10_000


@dataclass(frozen=True, slots=True)
class StoredCompletion:
    """Response of a turn, kept so that a repeated request gets the same one.

    Args:
        request_digest: digest of the request.
        body: the serialized response, without the prompt ids.
        prompt: ledger whose first `tokens` ids are the prompt ids. None: the response has no prompt ids.
        tokens: number of prompt ids.
    """

    request_digest: bytes
    body: bytes = field(repr=False)
    prompt: SegmentLedger | None = None
    tokens: int = 0

    def response(self) -> CompleteResponse:
        """Return the response."""
        response = CompleteResponse.FromString(self.body)
        if self.prompt is not None:
            response.prompt_ids.values.extend(self.prompt.ids[: self.tokens])
        return response


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """Verified prompt of a turn: a ledger plus new tokens.

    Args:
        record: record of the rollout.
        segment_id: segment that the turn continues.
        ledger: ledger of the segment. A new ledger enters the record with its first completion.
        length: number of tokens in the ledger when the turn was requested.
        runs: new prompt tokens, none of them generated.
        checkpoint: checkpoint after the prompt.
        conversation: in message mode, all messages of the prompt.
        images: all images of the prompt, in its order.
    """

    record: Record
    segment_id: str
    ledger: SegmentLedger
    length: int
    runs: Sequence[LedgerRun]
    checkpoint: LedgerCheckpoint
    conversation: Sequence[JsonObject] | None = None
    images: Sequence[TurnImage] = ()

    def ids(self) -> list[int]:
        """Return all prompt ids."""
        ids = self.ledger.ids[: self.length]
        for run in self.runs:
            ids.extend(run.ids)
        return ids.tolist()


@dataclass(frozen=True, slots=True)
class PartialTurn:
    """A turn that is not complete.

    Args:
        prompt: its prompt.
        runs: what was generated before it was aborted, one run per part that has tokens.
    """

    prompt: TurnPrompt
    runs: Sequence[LedgerRun] = ()

    def ids(self) -> array[int]:
        """Return the ids that were generated."""
        ids = array("I")
        for run in self.runs:
            ids.extend(run.ids)
        return ids


@dataclass(slots=True)
class Record:
    """The trainer's record of one rollout.

    Args:
        segments: current ledgers by segment id.
        replaced: former ledgers of segments that were restarted, with their segment ids.
        completions: responses by turn key.
        aborted: turns whose completion was aborted, by segment id and turn, until it is complete.
        conversations: in message mode, the messages of each segment up to and including its last completion.
        tools: lists of tools by digest, as `apply_chat_template` takes them.
        latest_tools: digest in the last request that had tools.
        typed: True: the server sends typed messages. False: JSON messages. None: unknown before the first message.
    """

    segments: dict[str, SegmentLedger] = field(default_factory=dict)
    replaced: list[tuple[str, SegmentLedger]] = field(default_factory=list)
    completions: dict[str, StoredCompletion] = field(default_factory=dict)
    aborted: dict[tuple[str, int], PartialTurn] = field(default_factory=dict)
    conversations: dict[str, Sequence[JsonObject]] = field(default_factory=dict)
    tools: dict[bytes, Sequence[JsonObject]] = field(default_factory=dict)
    latest_tools: bytes = b""
    typed: bool | None = None

    def ledgers(self) -> Iterator[tuple[str, SegmentLedger]]:
        """Iterate over all ledgers with their segment ids, replaced ones included."""
        yield from self.segments.items()
        yield from self.replaced

    def add_turn(self, prompt: TurnPrompt, completion: Sequence[LedgerRun]) -> LedgerCheckpoint:
        """Append a turn's prompt and completion, at least one run, to its ledger and return the new checkpoint.

        Raises `RefusedCall` without any change if another turn of the segment was added while this one was generated.
        """
        known, ledger = self.segments.get(prompt.segment_id), prompt.ledger
        replaces = ledger.restarted and ledger.tokens == 0
        if ledger.tokens != prompt.length or (known is not None and known is not ledger and not replaces):
            raise ledger_mismatch(
                f"segment {prompt.segment_id!r} changed while turn {completion[0].turn} was generated; request one turn at a time",
                known.checkpoints if known is not None else (),
            )
        if known is not None and replaces:
            self.replaced.append((prompt.segment_id, known))
        self.segments[prompt.segment_id] = ledger
        ledger.append((*prompt.runs, *completion))
        ledger.images = list(prompt.images)
        checkpoint = ledger.checkpoint(prompt.checkpoint.messages + 1)
        ledger.checkpoints.append(checkpoint)
        self.aborted.pop((prompt.segment_id, completion[0].turn), None)
        return checkpoint


class Records:
    """Records of the `most` rollouts used last. If a dropped one is needed again, `BASE_UNKNOWN` makes the server resend it."""

    def __init__(self, most: int) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        return len(self._records)

    def find(self, uid: str) -> Record | None:
        """Return the record of a rollout, or None."""
        return self._records.get(uid)

    def ledger(self, request: ReadLedgerRequest) -> ReadLedgerResponse | None:
        """Return the trainer's ledger of a segment; None if it is unknown or was dropped."""
        record = self.find(request.uid)
        known = record.segments.get(request.segment_id) if record else None
        if known is None:
            return None
        return ReadLedgerResponse(
            spans=known.spans(request.offset), checkpoints=[checkpoint.to_proto() for checkpoint in known.checkpoints]
        )

    def open(self, uid: str) -> Record:
        """Return the record of a rollout, created if necessary, and drop the least recently used records above `most`."""
        record = self._records.setdefault(uid, Record())
        self._records.move_to_end(uid)
        while len(self._records) > self._most:
            self._records.popitem(last=False)
        return record

    def forget(self, uid: str) -> Record | None:
        """Remove and return the record of a finished rollout; None if there is none."""
        return self._records.pop(uid, None)


class Outcomes:
    """Pending outcomes by the rollout id that the trainer chose.

    Deliveries are at least once, so an outcome may arrive twice. It may also arrive before the response to the start request. The
    last 10,000 closed ids are remembered, so that late deliveries of their outcomes are acknowledged.
    """

    def __init__(self) -> None:
        self._awaited: dict[str, asyncio.Future[Rollout]] = {}
        self._members: dict[str, tuple[str, int]] = {}
        self._settled: OrderedDict[str, None] = OrderedDict()

    def expect(self, rollout_id: str, group_id: str = "", index: int = 0) -> asyncio.Future[Rollout]:
        """Return the future outcome of a rollout of a group. Call this before the rollout is started."""
        self._members[rollout_id] = (group_id, index)
        return self._awaited.setdefault(rollout_id, asyncio.get_running_loop().create_future())

    def member(self, rollout_id: str) -> tuple[str, int]:
        """Return the group id of an expected rollout and its index in the group; ("", 0) for any other."""
        return self._members.get(rollout_id, ("", 0))

    def awaits(self, rollout_id: str) -> bool:
        """Whether the outcome is still expected."""
        return rollout_id in self._awaited

    def is_over(self, rollout_id: str) -> bool:
        """Whether the outcome has arrived or failed, or is not expected any more."""
        future = self._awaited.get(rollout_id)
        return future is None or future.done()

    def settle(self, rollout: Rollout) -> bool:
        """Accept an outcome. Returns False if this trainer never expected it."""
        rollout_id = rollout.spec.rollout_id
        future = self._awaited.get(rollout_id)
        if future is not None and not future.done():
            future.set_result(rollout)
        return future is not None or rollout_id in self._settled

    def fail(self, rollout_id: str, error: RolloutError) -> None:
        """Fail a pending outcome: it will never arrive."""
        future = self._awaited.get(rollout_id)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # mark as retrieved: asyncio logs an exception that no waiter retrieves

    def close(self, rollout_id: str) -> None:
        """Stop expecting an outcome. Later deliveries are acknowledged and ignored."""
        self._awaited.pop(rollout_id, None)
        self._members.pop(rollout_id, None)
        self._settled[rollout_id] = None
        while len(self._settled) > _REMEMBERED_OUTCOMES:
            self._settled.popitem(last=False)
