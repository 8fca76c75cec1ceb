"""Conversion of the items of a trainer's stream (trainer_service.proto)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import grpc
from osmosis.rollout.v1 import event_pb2, rollout_service_pb2
from osmosis.rollout.v1 import trainer_service_pb2 as pb

from rollout_server.core.error import InvalidRequest, RolloutError, Violation
from rollout_server.core.ledger import Author, Tokens
from rollout_server.core.record import Ended
from rollout_server.edge.rpc.status import code_of
from rollout_server.edge.trainer.grpc_client import Rejection
from rollout_server.edge.wire import request as wire
from rollout_server.edge.wire.completion import Request, Response, checkpoint_from_proto, held_tokens
from rollout_server.edge.wire.event import event
from rollout_server.edge.wire.rollout import rollout_to_proto, started
from rollout_server.edge.wire.spec import duration, seconds
from rollout_server.runtime.log import Entry
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Caller, StartRequest

Item: TypeAlias = pb.TrainResponse
TrainerItem: TypeAlias = pb.TrainRequest
Hello: TypeAlias = pb.TrainHello
Start: TypeAlias = pb.TrainStart
Ledger: TypeAlias = pb.TrainLedger

LARGEST_GROUP = 1024
_CODES = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}


def start_requests(start: Start, caller: Caller) -> Sequence[StartRequest]:
    """Return one start request per rollout of a group. Raises `InvalidRequest`."""
    count = start.count or 1
    if count > LARGEST_GROUP:
        raise InvalidRequest(Violation("start.count", f"is {count}, at most {LARGEST_GROUP} are allowed"))
    if not start.HasField("rollout"):
        raise InvalidRequest(Violation("start.rollout", "is missing; it holds request_id, spec and credentials"))
    request = wire.start_request(start.rollout, caller, wire.ON_STREAM)
    if count == 1:
        return [request]
    name, key = request.spec.rollout_id, request.request_id
    return [
        replace(
            request,
            spec=replace(request.spec, rollout_id=f"{name}/{k}", group_index=k),
            request_id=f"{key}/{k}" if key else "",
        )
        for k in range(count)
    ]


def completion_response(item: TrainerItem) -> tuple[str, Response | Rejection]:
    """Return the turn key of an `answer` or `reject` item, and its completion or rejection."""
    if item.HasField("answer"):
        return item.answer.turn_key, item.answer.response
    reject = item.reject
    after = seconds(reject.retry_after) if reject.HasField("retry_after") else None
    return reject.turn_key, Rejection(
        _CODES.get(reject.code, grpc.StatusCode.UNKNOWN),
        reject.message,
        reject.reason,
        None if after is None else max(0.0, after),
        [checkpoint_from_proto(each) for each in reject.mismatch.checkpoints] if reject.HasField("mismatch") else None,
    )


def ledger(item: Ledger) -> tuple[Tokens, Sequence[Author]] | None:
    """Return the token ids and authors of the trainer's copy of a segment; None if it did not send it."""
    return held_tokens(item.ledger) if item.HasField("ledger") else None


def welcome(stream_id: str, last_seen: int, grace: float) -> Item:
    """Return the server's first item. `grace` is in seconds."""
    return Item(welcome=pb.TrainWelcome(stream_id=stream_id, last_seen=last_seen, grace=duration(grace)))


def started_item(sequence: int, rollout: Rollout, *, attached: bool) -> Item:
    """Return the item for a rollout that was accepted or found."""
    return Item(sequence=sequence, started=started(rollout, attached=attached))


def refused_item(sequence: int, start_sequence: int, error: RolloutError) -> Item:
    """Return the item for a start, cancel or policy that was refused."""
    code: int = code_of(error).value[0]
    text = error.message.encode("utf-8", "replace").decode("utf-8")
    return Item(sequence=sequence, refused=pb.TrainRefusal(start_sequence=start_sequence, code=code, message=text))


def completion_item(sequence: int, request: Request | None) -> Item:
    """Return the item for a completion request. None: the request is obsolete, and only its sequence number is sent."""
    return Item(sequence=sequence, ask=request) if request is not None else Item(sequence=sequence)


def outcome_item(sequence: int, rollout: Rollout) -> Item:
    """Return the item with a rollout's outcome."""
    shown = rollout_to_proto(rollout, rollout_service_pb2.ROLLOUT_VIEW_SAMPLES)
    return Item(sequence=sequence, outcome=pb.DeliveredOutcome(rollout=shown))


def event_item(rollout: Rollout, entry: Entry, detail: int) -> Item | None:
    """Return the item for a log entry; None if `detail` excludes the event."""
    if not detail or (detail == event_pb2.EVENT_DETAIL_OUTCOME and not isinstance(entry.record, Ended)):
        return None
    return Item(event=pb.TrainEvent(uid=rollout.uid, event=event(rollout, entry, detail)))


def acknowledge_item(sequence: int) -> Item:
    """Return the item that acknowledges the trainer's items up to a sequence number."""
    return Item(acknowledge=pb.TrainAcknowledge(sequence=sequence))


def idle_item(last_completion: int) -> Item:
    """Return the item that says that no further completion is requested for now. It names the last request's number."""
    return Item(idle=pb.TrainIdle(last_ask=last_completion))


def ledger_item(uid: str, segment_id: str) -> Item:
    """Return the item that requests the trainer's copy of a segment."""
    item = Item()
    item.read_ledger.uid, item.read_ledger.segment_id = uid, segment_id
    return item


def detail(hello: Hello) -> int:
    """Return the EventDetail that a trainer requests; 0: no events. Raises `InvalidRequest`."""
    return wire.valid_enum_value(hello.detail, event_pb2.EventDetail, "hello.detail")
