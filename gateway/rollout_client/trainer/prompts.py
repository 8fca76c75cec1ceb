"""Prompts of completion requests. An invalid request, or one that contradicts the ledger, raises `RefusedCall`.

In token mode the prompt is the ledger plus the new tokens of the request. Its digest must match the server's before anything is
generated. In message mode `render` produces the prompt, and the ledger records it.
"""

from __future__ import annotations

import base64
import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import grpc
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import token_pb2
from osmosis.rollout.v1.message_pb2 import Tool

from rollout_client.chat_messages import messages
from rollout_client.trainer.errors import RefusedCall, base_unknown, invalid_field, ledger_mismatch, media_refused
from rollout_client.trainer.generation import MODEL_BIT, TurnImage, resolved, token_ids
from rollout_client.trainer.ledger import LedgerCheckpoint, LedgerRun, SegmentLedger, runs_from_spans
from rollout_client.trainer.rollout_records import JsonObject, PartialTurn, Record, TurnPrompt

Render: TypeAlias = Callable[[Sequence[JsonObject], Sequence[JsonObject]], Sequence[int]]
"""Function `render(messages, tools)`: dictionaries as `apply_chat_template` takes them, to prompt ids with generation prompt."""
_IMAGE_PARTS: Final = ("image_url", "input_image", "image")
_PART: Final = re.compile(r"[1-9][0-9]{0,5}")
_DATA_URL: Final = re.compile(r"data:(image/[^;,]+)(?:;[^,]*)?;base64,(.*)", re.DOTALL)


def check_request(request: pb.CompleteRequest, *, renders: bool) -> None:
    """Validate a request without looking at any ledger. Raises `RefusedCall`.

    Args:
        request: the request.
        renders: the trainer has a `render` function, so a request may contain messages without token ids.
    """
    for name in ("uid", "segment_id"):
        if not getattr(request, name):
            raise invalid_field(name, "is missing")
    if request.turn < 1:
        raise invalid_field("turn", "must be 1 or more")
    key = _first_key(request)
    part = request.turn_key.removeprefix(f"{key}/")
    if request.turn_key != key and not _PART.fullmatch(part):
        raise invalid_field(
            "turn_key", f"must be uid/segment/turn, here {key!r}, and the part from 1 if it was aborted"
        )
    if request.resumed:
        if request.turn_key == key:
            raise invalid_field("turn_key", f"must name the part if `resumed` has tokens, such as {key + '/1'!r}")
        _check_spans(request.resumed, "resumed", (token_pb2.AUTHOR_MODEL,))
    if request.HasField("base"):
        _check_checkpoint(request.base, "base")
    if request.HasField("new_tokens"):
        _check_tokens(request.new_tokens)
    elif not renders:
        text = "this trainer generates from token ids: set token_mode to TOKEN_MODE_TOKENS and name a tokenizer in the spec"
        raise RefusedCall(grpc.StatusCode.UNIMPLEMENTED, "MESSAGE_MODE", text)


async def build_prompt(record: Record, request: pb.CompleteRequest, render: Render | None) -> TurnPrompt:
    """Return the prompt of a validated request. Raises `RefusedCall` if the ledgers differ, and whatever `render` raises."""
    if record.typed is None and request.new_messages:
        record.typed = request.new_messages[0].WhichOneof("form") == "chat"
    if request.HasField("new_tokens") or render is None:
        return _from_tokens(record, request)
    return await _from_messages(record, request, render)


async def build_turn(record: Record, request: pb.CompleteRequest, render: Render | None) -> PartialTurn:
    """Return the prompt of a validated request, and what earlier requests of its turn generated. Raises as `build_prompt` does."""
    known, resumed = record.aborted.get((request.segment_id, request.turn)), runs_from_spans(request.resumed)
    if known is None or request.turn_key == _first_key(request):
        # The trainer has no record of the parts (after a restart, for example): take them over.
        return PartialTurn(await build_prompt(record, request, render), resumed)
    if known.ids() != PartialTurn(known.prompt, resumed).ids():
        raise ledger_mismatch(
            f"`resumed` differs from the {len(known.ids())} tokens that turn {request.turn} has here", ()
        )
    if request.HasField("new_tokens"):
        return PartialTurn(_from_tokens(record, request), known.runs)
    return known  # another rendering might differ from the prompt that the tokens were generated after


def _from_tokens(record: Record, request: pb.CompleteRequest) -> TurnPrompt:
    known, runs = record.segments.get(request.segment_id), runs_from_spans(request.new_tokens.spans)
    if request.HasField("base"):
        ledger = _ledger_at_base(record, request)
    elif known is None:
        ledger = SegmentLedger()
        # The trainer has no record (after a restart, for example): take over the history up to its last completion.
        history = max((index for index, run in enumerate(runs, start=1) if run.by_model), default=0)
        ledger.adopt(runs[:history])
        runs = runs[history:]
    else:
        ledger, rest = known, known.new_runs(runs)
        if rest is None:
            raise ledger_mismatch(_mismatch_text("the history in the request", known), known.checkpoints)
        runs = list(rest)
    if any(run.by_model for run in runs):
        raise ledger_mismatch("new_tokens has generated tokens that this trainer did not generate", ledger.checkpoints)
    after = request.new_tokens.after
    checkpoint = ledger.checkpoint(after.messages, runs)
    if not checkpoint.tokens:
        raise invalid_field("new_tokens.spans", "must contain a token: the prompt is empty")
    if not checkpoint.matches(_to_checkpoint(after)):
        raise ledger_mismatch(
            f"new_tokens.after has {_checkpoint_text(_to_checkpoint(after))}, "
            f"but base and spans give {_checkpoint_text(checkpoint)} in turn {request.turn}",
            ledger.checkpoints,
        )
    # Without a base the request has all images of the segment, otherwise those after the base.
    images = [*(ledger.images if request.HasField("base") else ()), *map(_image, request.new_tokens.media)]
    return TurnPrompt(record, request.segment_id, ledger, ledger.tokens, runs, checkpoint, images=images)


def _ledger_at_base(record: Record, request: pb.CompleteRequest) -> SegmentLedger:
    """Return the segment's ledger, or a branch of the ledger that has a checkpoint equal to the base."""
    base, known = _to_checkpoint(request.base), record.segments.get(request.segment_id)
    if known is not None:
        if not known.checkpoints[-1].matches(base):
            raise ledger_mismatch(_mismatch_text(f"the base with {_checkpoint_text(base)}", known), known.checkpoints)
        return known
    for segment_id, ledger in record.segments.items():
        if any(checkpoint.matches(base) for checkpoint in ledger.checkpoints):
            record.conversations[request.segment_id] = record.conversations.get(segment_id, ())
            forked = request.origin.kind == token_pb2.SEGMENT_KIND_BRANCH
            if not forked and ledger.restarted and ledger.checkpoints[-1].matches(base):
                # Message mode: the last prompt did not extend this segment, so its ledger was restarted under the old id. The
                # server opened a new segment for that prompt: move the ledger to the new id.
                record.segments[request.segment_id] = record.segments.pop(segment_id)
                return ledger
            return ledger.branch(base)
    raise base_unknown(
        f"no segment of rollout {request.uid!r} has a checkpoint equal to the base; send the whole history without a base"
    )


async def _from_messages(record: Record, request: pb.CompleteRequest, render: Render) -> TurnPrompt:
    conversation = _conversation(record, request)
    images = list(_message_images(conversation))
    rendered = token_ids(await resolved(render(conversation, _tools(record, request))), "the return value of render")
    if not rendered:
        raise ValueError("render returned no ids")
    known = record.segments.get(request.segment_id)
    ledger = _ledger_at_base(record, request) if request.HasField("base") else known or SegmentLedger()
    if rendered[: ledger.tokens] != ledger.ids:
        # The rendering rewrote history (drift). Generated tokens are never realigned: record the prompt in a new ledger.
        ledger = SegmentLedger()
        ledger.restarted = True
    runs = [LedgerRun(request.turn, False, array("I", rendered[ledger.tokens :]))]
    checkpoint = ledger.checkpoint(len(conversation), runs)
    return TurnPrompt(record, request.segment_id, ledger, ledger.tokens, runs, checkpoint, conversation, images)


def _conversation(record: Record, request: pb.CompleteRequest) -> list[JsonObject]:
    try:
        added = messages(request.new_messages)
    except ValueError:
        raise invalid_field("new_messages", "each item must be one JSON object or a typed message") from None
    if not request.HasField("base"):
        return list(added)
    _ledger_at_base(record, request)  # for a new segment, this also copies the conversation of its parent
    known = record.conversations.get(request.segment_id, ())
    if request.base.messages > len(known):
        raise base_unknown(
            f"the base has {request.base.messages} messages, the trainer {len(known)}; send all messages"
        )
    return [*known[: request.base.messages], *added]


def _tools(record: Record, request: pb.CompleteRequest) -> Sequence[JsonObject]:
    if request.HasField("tools"):
        digest = request.tools.digest
        if request.tools.tools or digest not in record.tools:
            record.tools[digest] = [_tool(tool, f"tools.tools[{i}]") for i, tool in enumerate(request.tools.tools)]
        record.latest_tools = digest
    return record.tools.get(record.latest_tools, ())


def _tool(tool: Tool, where: str) -> JsonObject:
    try:
        parameters = json.loads(tool.parameters_json_schema or "{}")
    except ValueError:
        raise invalid_field(f"{where}.parameters_json_schema", "must be JSON") from None
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def _first_key(request: pb.CompleteRequest) -> str:
    """Return the turn key of the first request of a turn."""
    return f"{request.uid}/{request.segment_id}/{request.turn}"


def _check_tokens(tokens: pb.NewTokens) -> None:
    if not tokens.HasField("after"):
        raise invalid_field("new_tokens.after", "is missing")
    _check_checkpoint(tokens.after, "new_tokens.after")
    _check_spans(tokens.spans, "new_tokens.spans", (token_pb2.AUTHOR_MODEL, token_pb2.AUTHOR_OTHER))
    for index, media in enumerate(tokens.media):
        where = f"new_tokens.media[{index}]"
        if not media.length or media.offset + media.length > tokens.after.tokens:
            raise invalid_field(where, f"must be one or more of the {tokens.after.tokens} tokens of the prompt")
        if not media.blob.media_type.startswith("image/") or not media.blob.inline:
            raise media_refused(f"{where} is not an image with its bytes; send images inline")


def _check_spans(spans: Sequence[token_pb2.Span], field: str, authors: Sequence[token_pb2.Author.ValueType]) -> None:
    for index, span in enumerate(spans):
        where = f"{field}[{index}]"
        if span.author not in authors:
            raise invalid_field(
                f"{where}.author", f"must be {' or '.join(token_pb2.Author.Name(each) for each in authors)}"
            )
        if span.token_ids and max(span.token_ids) >= MODEL_BIT:
            raise invalid_field(f"{where}.token_ids", "each id must be below 2^31")
        if span.HasField("logprobs") and len(span.logprobs.values) != len(span.token_ids):
            raise invalid_field(f"{where}.logprobs", "must be as long as token_ids")


def _image(media: pb.MediaSpan) -> TurnImage:
    return TurnImage(media.offset, media.length, media.blob.media_type, media.blob.inline)


def _message_images(conversation: Sequence[JsonObject]) -> Iterator[TurnImage]:
    """Yield the images of messages. Raises `RefusedCall` for an image that is not in its message as a data: URL."""
    for index, message in enumerate(conversation):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") in _IMAGE_PARTS:
                image = _part_image(part)
                if image is None:
                    where = f"messages[{index}].content[{place}]"
                    raise media_refused(f"{where} is an image that is not in the message; send it as a data: URL")
                yield image


def _part_image(part: JsonObject) -> TurnImage | None:
    source = part.get("image" if part["type"] == "image" else "image_url")
    url = source.get("url") if isinstance(source, dict) else source
    found = _DATA_URL.fullmatch(url) if isinstance(url, str) else None
    try:
        return TurnImage(None, None, found[1], base64.b64decode(found[2], validate=True)) if found else None
    except ValueError:
        return None


def _check_checkpoint(checkpoint: token_pb2.Checkpoint, where: str) -> None:
    if len(checkpoint.digest) != 32:
        raise invalid_field(f"{where}.digest", "must be 32 bytes")


def _to_checkpoint(checkpoint: token_pb2.Checkpoint) -> LedgerCheckpoint:
    return LedgerCheckpoint(checkpoint.messages, checkpoint.tokens, checkpoint.digest)


def _checkpoint_text(checkpoint: LedgerCheckpoint) -> str:
    return f"{checkpoint.tokens} tokens with digest {checkpoint.digest.hex()[:16]}"


def _mismatch_text(what: str, ledger: SegmentLedger) -> str:
    return (
        f"{what} differs: the trainer's turn {ledger.runs[-1].turn} ended at {_checkpoint_text(ledger.checkpoints[-1])}"
    )
