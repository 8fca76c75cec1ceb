"""Completions over gRPC that are aborted by a script, and resumed part by part (`CompleteRequest.resumed`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import token_pb2

from rollout_server.testing.grpc.status import invalid

_KEPT: Final = 1000
# They change from one request of a turn to the next.
_OWN_FIELDS: Final = ("time_left", "policy_step")

_OF_THE_WHOLE: Final = ("message", "after", "prompt_checkpoint", "prompt_ids", "usage", "raw_text")


@dataclass(frozen=True, slots=True)
class _AbortedTurn:
    """The first request of a turn, and the responses to it and to the requests that resume it."""

    request: pb.CompleteRequest
    parts: Sequence[pb.CompleteResponse]

    def expected(self, part: int) -> pb.CompleteRequest:
        """Return the request that resumes the turn after the first `part` parts."""
        request = _comparable(self.request)
        earlier = self.parts[:part]
        request.turn_key += f"/{part}"
        if request.sampling.HasField("max_tokens"):
            request.sampling.max_tokens -= sum(len(each.token_ids) for each in earlier)
        request.resumed.extend(_span(each, request.turn) for each in earlier if each.token_ids)
        return request


class AbortedTurns:
    """The turns whose completion the script aborts; the oldest are dropped."""

    def __init__(self) -> None:
        self._turns: dict[str, _AbortedTurn] = {}

    def begin(
        self, request: pb.CompleteRequest, honest: pb.CompleteResponse, sizes: Sequence[int]
    ) -> pb.CompleteResponse:
        """Split a completion into parts of these numbers of tokens and the rest; return the first part."""
        self._turns[request.turn_key] = _AbortedTurn(request, _split(honest, sizes))
        while len(self._turns) > _KEPT:
            del self._turns[next(iter(self._turns))]
        return self._turns[request.turn_key].parts[0]

    def resume(self, request: pb.CompleteRequest, turn_key: str) -> pb.CompleteResponse:
        """Return the next part of a turn. Raises StatusError unless the request is the first one with the parts so far."""
        part = int(request.turn_key.removeprefix(f"{turn_key}/"))
        turn = self._turns.get(turn_key)
        if turn is None or not 0 < part < len(turn.parts):
            raise invalid("turn_key", f"is {request.turn_key!r}, but no completion was aborted there")
        expected, actual = turn.expected(part), _comparable(request)
        for field in pb.CompleteRequest.DESCRIPTOR.fields_by_name:
            if getattr(actual, field) != getattr(expected, field):
                raise invalid(field, "is not that of the first request of the turn, with the aborted parts")
        return turn.parts[part]


def _split(honest: pb.CompleteResponse, sizes: Sequence[int]) -> list[pb.CompleteResponse]:
    """Return the parts. Each is of a further policy. An aborted part with the last token shows all of the completion."""
    parts, start = list[pb.CompleteResponse](), 0
    for index, size in enumerate([*sizes, len(honest.token_ids)]):
        part = pb.CompleteResponse()
        part.CopyFrom(honest)
        stop = min(start + size, len(honest.token_ids))
        if index < len(sizes):
            part.finish_reason = "abort"
            for field in _OF_THE_WHOLE if stop < len(honest.token_ids) else ():
                part.ClearField(field)
        del part.token_ids[stop:], part.token_ids[:start]
        del part.logprobs.values[stop:], part.logprobs.values[:start]
        part.policy_version += f"+{index}" if index else ""
        if honest.HasField("policy_step"):
            part.policy_step += index
        parts.append(part)
        start = stop
    return parts


def _span(part: pb.CompleteResponse, turn: int) -> token_pb2.Span:
    span = token_pb2.Span(author=token_pb2.AUTHOR_MODEL, turn=turn, policy_version=part.policy_version)
    span.token_ids.extend(part.token_ids)
    if part.HasField("logprobs"):
        span.logprobs.CopyFrom(part.logprobs)
    if part.HasField("policy_step"):
        span.policy_step = part.policy_step
    return span


def _comparable(request: pb.CompleteRequest) -> pb.CompleteRequest:
    """Return a copy without the fields that differ between the requests of a turn."""
    copied = pb.CompleteRequest()
    copied.CopyFrom(request)
    for field in _OWN_FIELDS:
        copied.ClearField(field)
    return copied
