"""The journal's encoding of how a rollout ended, and of its reward, without loss. A value that is not set differs from 0."""

from __future__ import annotations

from osmosis.journal.v1 import journal_pb2 as pb

from rollout_server.core.outcome import Cancellation, End, Failure, RewardResult, Stop
from rollout_server.edge.journal.values import decode_text, encode_text, read_numbers, write_numbers
from rollout_server.edge.wire import enums

_CATEGORIES = {value: category for category, value in enums.CATEGORIES.items()}


def write_end(end: End, proto: pb.Ended) -> None:
    """Write the stop, the failure or the cancellation."""
    match end:
        case Stop():
            proto.stop.reason = encode_text(end.reason)
            proto.stop.truncated = end.truncated
        case Failure():
            failure = proto.failure
            failure.category = enums.CATEGORIES[end.category]
            failure.message = encode_text(end.message)
            failure.turn = end.turn
            if end.http_status is not None:
                failure.http_status = end.http_status
            if end.source is not None:
                failure.source = enums.FAILURE_CLASSES[end.source]
        case Cancellation():
            proto.cancellation.reason = encode_text(end.reason)


def read_end(proto: pb.Ended) -> End:
    """Return the end. Raises ValueError if there is none."""
    match proto.WhichOneof("end"):
        case "stop":
            return Stop(decode_text(proto.stop.reason), proto.stop.truncated)
        case "failure":
            return _read_failure(proto.failure)
        case "cancellation":
            return Cancellation(decode_text(proto.cancellation.reason))
        case _:
            raise ValueError("the record of an end has no end")


def _read_failure(proto: pb.Failure) -> Failure:
    return Failure(
        category=_CATEGORIES[proto.category],
        message=decode_text(proto.message),
        turn=proto.turn,
        http_status=proto.http_status if proto.HasField("http_status") else None,
        source=enums.FAILURE_CLASSES_BY_NUMBER[proto.source] if proto.source else None,
    )


def write_reward(result: RewardResult, proto: pb.RewardResult) -> None:
    """Write the reward, the scores and the rewards of roles, as far as they are known."""
    if result.reward is not None:
        proto.reward = result.reward
    if result.scores is not None:
        write_numbers(result.scores, proto.scores)
    proto.extra_json = encode_text(result.extra_json)
    if result.roles is not None:
        write_numbers(result.roles, proto.roles)


def read_reward(proto: pb.RewardResult) -> RewardResult:
    """Return the result of the reward."""
    return RewardResult(
        reward=proto.reward if proto.HasField("reward") else None,
        scores=read_numbers(proto.scores) if proto.HasField("scores") else None,
        extra_json=decode_text(proto.extra_json),
        roles=read_numbers(proto.roles) if proto.HasField("roles") else None,
    )
