"""The segments and tool sets of the rollouts that a gRPC trainer knows, to find the segment that a request continues."""

from dataclasses import dataclass, field

import grpc
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2, token_pb2

from rollout_server.testing.checks.judge import ROLLOUTS_KEPT
from rollout_server.testing.checks.renderer import Message, Tools
from rollout_server.testing.grpc.ledger import HeldSegment
from rollout_server.testing.grpc.status import StatusError, base_unknown, invalid, mismatch
from rollout_server.testing.grpc.wire import message_from_proto, tool_from_proto, tools_digest


@dataclass(slots=True)
class _RolloutSegments:
    segments: dict[str, HeldSegment] = field(default_factory=dict)
    tools: dict[bytes, Tools] = field(default_factory=dict)


class Segments:
    """The last `ROLLOUTS_KEPT` rollouts by uid. For the event loop's thread only."""

    def __init__(self) -> None:
        self._rollouts: dict[str, _RolloutSegments] = {}

    def is_new(self, uid: str) -> bool:
        """Return whether there was no request of this rollout yet."""
        return uid not in self._rollouts

    def segment(self, request: pb.CompleteRequest) -> HeldSegment:
        """Return the segment that the request continues, or a new one: empty, or a copy of another segment up to the base.

        Raises StatusError: BASE_UNKNOWN if no segment of this rollout ever had this base, LEDGER_MISMATCH if the segment is known
        but its last checkpoint differs from the base.
        """
        rollout = self._rollout(request)
        known = rollout.segments.get(request.segment_id)
        if known is not None:
            _check_mode(known, request)
        if not request.HasField("base"):
            return known or self._open(rollout, request)
        if known is not None:
            return _at_base(known, request.base)
        parents = (each for each in rollout.segments.values() if each.has(request.base.digest) and not each.forgotten)
        parent = next(parents, None)
        if parent is None:
            raise base_unknown(f"segment {request.segment_id!r} of rollout {request.uid!r} is unknown to this trainer")
        # In message mode a drifted prompt replaces the contents of the trainer's segment (`HeldSegment.add`), but the server opens
        # a new segment for it. The server's next base then continues the same conversation, under the same verdict.
        forked = request.origin.kind == token_pb2.SEGMENT_KIND_BRANCH
        continues = not forked and parent.drifted and parent.marks[-1].digest == request.base.digest
        branch = parent.branch(request.base.digest, parent.rollout_key if continues else _key(rollout, request))
        rollout.segments[request.segment_id] = _at_base(branch, request.base)
        return branch

    def parent(self, request: pb.CompleteRequest) -> HeldSegment | None:
        """Return the parent of the request's segment; None if there is none or it is unknown."""
        return self.find(request.uid, request.origin.parent_id) if request.origin.parent_id else None

    def step_back(self, request: pb.CompleteRequest) -> None:
        """Undo the segment's last completion if the request repeats its turn."""
        segment = self.find(request.uid, request.segment_id)
        if segment is not None and segment.before is not None and segment.last_turn == request.turn:
            segment.before.undone = request.turn
            self._rollouts[request.uid].segments[request.segment_id] = segment.before

    def forget(self, uid: str) -> None:
        """Make all bases and tools of a rollout unknown until its whole history is sent."""
        rollout = self._rollouts[uid]
        rollout.tools.clear()
        for segment in rollout.segments.values():
            segment.forgotten = True

    def find(self, uid: str, segment_id: str) -> HeldSegment | None:
        """Return a segment; None if it is unknown."""
        rollout = self._rollouts.get(uid)
        return rollout.segments.get(segment_id) if rollout else None

    def tools(self, request: pb.CompleteRequest) -> Tools | None:
        """Return the tools that the request names by digest; None if it has no tool set.

        Raises StatusError: TOOLS_UNKNOWN if the list of a digest was never sent, INVALID_ARGUMENT if a list has another digest.
        """
        if not request.HasField("tools"):
            return None
        rollout = self._rollout(request)
        named, listed = request.tools.digest, request.tools.tools
        if listed or named == tools_digest(()):
            tools = [_tool(index, tool) for index, tool in enumerate(listed)]
            if named != tools_digest(listed):
                raise invalid(
                    "tools.digest", f"is {named.hex()}, but the list has the digest {tools_digest(listed).hex()}"
                )
            rollout.tools[named] = tools
        if named not in rollout.tools:
            text = f"the list of tools with digest {named.hex()[:16]} was never sent in this rollout"
            raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, "TOOLS_UNKNOWN", text)
        return rollout.tools[named]

    def _rollout(self, request: pb.CompleteRequest) -> _RolloutSegments:
        known = self._rollouts.get(request.uid)
        if known is not None:
            return known
        rollout = self._rollouts[request.uid] = _RolloutSegments()
        while len(self._rollouts) > ROLLOUTS_KEPT:
            del self._rollouts[next(iter(self._rollouts))]
        return rollout

    def _open(self, rollout: _RolloutSegments, request: pb.CompleteRequest) -> HeldSegment:
        typed = bool(request.new_messages) and request.new_messages[0].WhichOneof("form") == "chat"
        ledger = HeldSegment(_key(rollout, request), typed=typed, in_tokens=request.HasField("new_tokens"))
        rollout.segments[request.segment_id] = ledger
        return ledger


def _key(rollout: _RolloutSegments, request: pb.CompleteRequest) -> str:
    """Return the judge's key for a new conversation: the rollout id for the first one, else with the segment id."""
    return f"{request.rollout_id}/{request.segment_id}" if rollout.segments else request.rollout_id


def messages_of(request: pb.CompleteRequest, ledger: HeldSegment) -> list[Message]:
    """Return the whole conversation: the base's messages and the new ones. Raises StatusError for an invalid message."""
    new = [_message(index, message) for index, message in enumerate(request.new_messages)]
    if not request.HasField("base"):
        return new
    if request.base.messages > len(ledger.messages):
        raise invalid(
            "base.messages", f"is {request.base.messages}, but the segment has {len(ledger.messages)} messages"
        )
    return [*ledger.messages[: request.base.messages], *new]


def _at_base(ledger: HeldSegment, base: token_pb2.Checkpoint) -> HeldSegment:
    if not ledger.marks or ledger.forgotten:
        raise base_unknown("the segment has no answered turn, or the trainer has forgotten it")
    mark = ledger.marks[-1]
    if (mark.tokens, mark.digest) != (base.tokens, base.digest):
        raise mismatch(
            f"the base has {base.tokens} tokens with digest {base.digest.hex()[:16]}, "
            f"but the last turn ended at {mark.tokens} tokens with {mark.digest.hex()[:16]}",
            ledger.marks,
        )
    return ledger


def _check_mode(ledger: HeldSegment, request: pb.CompleteRequest) -> None:
    if ledger.in_tokens != request.HasField("new_tokens"):
        text = "is missing, but the segment began in token mode"
        raise invalid("new_tokens", text if ledger.in_tokens else "is set, but the segment began without it")


def _message(index: int, message: message_pb2.Message) -> Message:
    try:
        parsed = message_from_proto(message)
    except ValueError as error:
        raise invalid(f"new_messages[{index}]", str(error)) from error
    if not isinstance(parsed.get("role"), str):
        raise invalid(f"new_messages[{index}]", "has no string under role")
    return parsed


def _tool(index: int, tool: message_pb2.Tool) -> dict[str, object]:
    try:
        return tool_from_proto(tool)
    except ValueError as error:
        raise invalid(f"tools.tools[{index}].parameters_json_schema", str(error)) from error
