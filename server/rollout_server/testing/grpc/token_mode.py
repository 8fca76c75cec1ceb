"""Token mode of a gRPC request: converts its spans to runs and compares them with the trainer's ledger.

This module verifies the authors of the tokens and the checkpoint `after`. `token_mode_check` verifies the environment tokens.

Only a request with the whole history may contain tokens of the model. They must equal the ledger's tokens and authors. The trainer
accepts them unverified only if it has neither the segment nor its parent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import token_pb2

from rollout_server.testing.checks.renderer import Message
from rollout_server.testing.checks.token_mode_check import PromptSpan, TokenPrompt
from rollout_server.testing.grpc.ledger import HeldSegment, LedgerRun, Mark, Reason, runs_within
from rollout_server.testing.grpc.status import invalid, mismatch

_REASONS: Final = {
    token_pb2.MASK_REASON_UNSPECIFIED: None,
    token_pb2.MASK_REASON_PROMPT: Reason.PROMPT,
    token_pb2.MASK_REASON_ENVIRONMENT: Reason.ENVIRONMENT,
    token_pb2.MASK_REASON_CLOSING: Reason.CLOSING,
    token_pb2.MASK_REASON_AUTHOR: Reason.AUTHOR,
}
_MODEL: Final = "the model"
_START: Final = "the start"
_BASE: Final = "the base"
# Which kinds of span may follow which.
_FOLLOWING: Final[Mapping[str, frozenset[str]]] = {
    _START: frozenset({Reason.PROMPT}),
    _BASE: frozenset({Reason.CLOSING, Reason.ENVIRONMENT}),
    Reason.PROMPT: frozenset({Reason.PROMPT, _MODEL}),
    _MODEL: frozenset({_MODEL, Reason.CLOSING, Reason.ENVIRONMENT}),
    Reason.CLOSING: frozenset({Reason.ENVIRONMENT}),
    Reason.ENVIRONMENT: frozenset({Reason.ENVIRONMENT, _MODEL}),
}
_LARGEST_ID: Final = (1 << 31) - 1


@dataclass(slots=True)
class _SentTurn:
    """The runs before a completion, and the completion. The last turn of a request has no completion yet."""

    before: list[LedgerRun] = field(default_factory=list)
    completion: list[LedgerRun] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.completion[0].turn

    @property
    def size(self) -> int:
        return sum(len(run.token_ids) for run in (*self.before, *self.completion))


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """The tokens that a request adds to its segment.

    Args:
        token_prompt: the ids to generate from, with the spans that are still to be verified.
        prompt: the checkpoint of base and spans together.
        turns: turns that were completed before this trainer knew the segment, and last the prompt of the current turn.
        message_counts: number of messages up to and including each of these completions.
    """

    token_prompt: TokenPrompt
    prompt: Mark
    turns: tuple[_SentTurn, ...]
    message_counts: tuple[int, ...]

    def enter(self, ledger: HeldSegment) -> None:
        """Append the tokens to the ledger, with a mark after each completion."""
        for turn, messages in zip(self.turns, (*self.message_counts, None), strict=True):
            for run in (*turn.before, *turn.completion):
                ledger.append(run)
            if messages is not None:
                ledger.mark(messages)


def continue_segment(
    request: pb.CompleteRequest, ledger: HeldSegment, parent: HeldSegment | None, messages: Sequence[Message]
) -> ContinuedPrompt:
    """Compare the request's tokens with the ledgers of its segment and of the parent segment, and return what they add.

    Raises StatusError: INVALID_ARGUMENT names the invalid field. LEDGER_MISMATCH (ABORTED) names the first token that differs from
    the ledger, or the checkpoint that differs from that of base and spans.
    """
    sent = _runs(request)
    _check_turns(_turns(sent), request)
    with_all = not request.HasField("base")
    proved = len(ledger.tagged_ids)
    if with_all:
        proved = _compare(sent, ledger, parent, request)
    fresh = list(runs_within(sent, len(ledger.tagged_ids) if with_all else 0))
    _check_origin(request, ledger, parent, model_tokens=any(run.by_model for run in sent))
    prompt = ledger.checkpoint_after(fresh, len(messages))
    _check_after(request.new_tokens.after, prompt, ledger)
    turns = _turns(fresh)
    completions = _completion_indices(len(turns) - 1, messages)
    spans = list(_prompt_spans(request.turn, ledger, turns, [*completions, len(messages)]))
    prompt_tokens = TokenPrompt(ledger.ids + [token_id for run in fresh for token_id in run.token_ids], ())
    # Tokens in the first `proved` positions were verified when they were received. The last span is the prompt of the current turn,
    # which is always verified, even if it is empty.
    unproven = tuple(span for span in spans if span.stop > proved or span is spans[-1])
    return ContinuedPrompt(
        replace(prompt_tokens, spans=unproven), prompt, tuple(turns), tuple(index + 1 for index in completions)
    )


def _runs(request: pb.CompleteRequest) -> list[LedgerRun]:
    if request.new_tokens.media:
        raise invalid("new_tokens.media", "this trainer's model reads text only")
    runs: list[LedgerRun] = []
    before = _BASE if request.HasField("base") else _START
    for index, span in enumerate(request.new_tokens.spans):
        runs.append(_run(f"new_tokens.spans[{index}]", span))
        kind = _MODEL if runs[-1].by_model else runs[-1].reason or ""
        if kind not in _FOLLOWING[before]:
            raise invalid(f"new_tokens.spans[{index}]", f"tokens of {kind} cannot follow {before}")
        before = kind
    if not runs and before is _START:
        raise invalid("new_tokens.spans", "is empty and there is no base, so there is no prompt to generate from")
    return runs


def _run(path: str, span: token_pb2.Span) -> LedgerRun:
    by_model = span.author == token_pb2.AUTHOR_MODEL
    if not by_model and span.author != token_pb2.AUTHOR_OTHER:
        raise invalid(f"{path}.author", f"is {span.author}: every token has an author")
    if span.mask_reason not in _REASONS:
        raise invalid(f"{path}.mask_reason", f"{span.mask_reason} is unknown")
    reason = _REASONS[span.mask_reason]
    if (reason in (None, Reason.AUTHOR)) is not by_model:
        raise invalid(f"{path}.mask_reason", f"{reason or 'none'} does not match the author")
    if not span.token_ids:
        raise invalid(f"{path}.token_ids", "is empty: a span is a run of tokens")
    if max(span.token_ids) > _LARGEST_ID:
        raise invalid(f"{path}.token_ids", f"contains {max(span.token_ids)}, but token ids are below 2^31")
    if not by_model and (span.HasField("logprobs") or span.policy_version or span.planes):
        raise invalid(path, "logprobs, policy_version and planes are allowed only in spans of the model")
    logprobs = span.logprobs.values
    if span.HasField("logprobs") and len(logprobs) != len(span.token_ids):
        raise invalid(f"{path}.logprobs", f"has {len(logprobs)} values for {len(span.token_ids)} tokens")
    return LedgerRun(span.turn, by_model, list(span.token_ids), list(logprobs), reason, span.policy_version)


def _turns(runs: Sequence[LedgerRun]) -> list[_SentTurn]:
    """Group the runs by turn. The last group is the prompt of the current turn, and may be empty."""
    turns = [_SentTurn()]
    for run in runs:
        last = turns[-1]
        if last.completion and not (run.by_model and run.turn == last.number):
            turns.append(last := _SentTurn())
        (last.completion if run.by_model else last.before).append(run)
    return [*turns, _SentTurn()] if turns[-1].completion else turns


def _check_turns(turns: Sequence[_SentTurn], request: pb.CompleteRequest) -> None:
    """Raise StatusError unless turn numbers increase and the tokens before a completion have its turn number."""
    numbers = [0, *(turn.number for turn in turns[:-1]), request.turn]
    for turn, last, number in zip(turns, numbers, numbers[1:], strict=False):
        if number <= last:
            raise invalid("new_tokens.spans", f"turn {number} follows turn {last}; turn numbers must increase")
        for run in turn.before:
            if run.turn != number:
                raise invalid(
                    "new_tokens.spans", f"{run.reason} tokens before completion {number} have turn {run.turn}"
                )


def _compare(
    sent: Sequence[LedgerRun], ledger: HeldSegment, parent: HeldSegment | None, request: pb.CompleteRequest
) -> int:
    """Return how many leading tokens of a whole history equal the ledger's. Raises StatusError if they differ from it."""
    tagged_ids = [tagged for run in sent for tagged in run.tagged_ids]
    stored = ledger.tagged_ids
    if stored:
        _check_same(tagged_ids, stored, sent, ledger)
        if any(run.by_model for run in runs_within(sent, len(stored))):
            raise invalid(
                "new_tokens.spans", f"tokens of the model follow the {len(stored)} tokens of this trainer's ledger"
            )
        return len(stored)
    if parent is None:
        return 0
    shared = parent.tagged_ids[: request.origin.parent_tokens]
    if ids_of(tagged_ids[: len(shared)]) != ids_of(shared):
        raise invalid("origin.parent_tokens", f"the first {len(shared)} tokens differ from those of the parent")
    of_model = [index for index, tagged in enumerate(tagged_ids) if tagged != ids_of([tagged])[0]]
    if any(index >= len(shared) or shared[index] != tagged_ids[index] for index in of_model):
        raise invalid("new_tokens.spans", "tokens of the model differ from those of the parent segment")
    return len(shared)


def _check_same(
    tagged_ids: Sequence[int], stored: Sequence[int], sent: Sequence[LedgerRun], ledger: HeldSegment
) -> None:
    pairs = enumerate(zip(stored, tagged_ids, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), len(tagged_ids))
    if index >= len(stored):
        return
    turn = next(ledger.runs(index)).turn
    here = f"the ledger has {ids_of(stored[index : index + 5])}"
    sent_ids = (
        f"the request {ids_of(tagged_ids[index : index + 5])}" if index < len(tagged_ids) else "the request ends there"
    )
    same_id = index < len(tagged_ids) and ids_of([tagged_ids[index]]) == ids_of([stored[index]])
    author = " in its author" if same_id else ""
    raise mismatch(f"turn {turn}: token {index} differs{author}: {here}, {sent_ids}", ledger.marks)


def _check_origin(
    request: pb.CompleteRequest, ledger: HeldSegment, parent: HeldSegment | None, *, model_tokens: bool
) -> None:
    origin, with_base = request.origin, request.HasField("base")
    if ledger.begun and request.turn <= ledger.last_turn:
        raise invalid("turn", f"is {request.turn}, but turn {ledger.last_turn} was already answered")
    if not request.HasField("origin"):
        if not ledger.begun and (with_base or not model_tokens):
            raise invalid("origin", "is missing: the first turn of a segment must have it")
        return
    if ledger.begun and with_base:
        raise invalid("origin", "is allowed only in the first turn of a segment")
    is_main = origin.kind == token_pb2.SEGMENT_KIND_MAIN
    if origin.kind == token_pb2.SEGMENT_KIND_UNSPECIFIED or is_main is bool(origin.parent_id):
        raise invalid("origin.kind", f"{token_pb2.SegmentKind.Name(origin.kind)} with parent {origin.parent_id!r}")
    if (is_main and origin.parent_tokens) or (parent and origin.parent_tokens > len(parent.tagged_ids)):
        most = len(parent.tagged_ids) if parent else 0
        raise invalid("origin.parent_tokens", f"is {origin.parent_tokens}, the parent has {most}")


def _check_after(after: token_pb2.Checkpoint, prompt: Mark, ledger: HeldSegment) -> None:
    if after.messages != prompt.messages:
        raise invalid("new_tokens.after.messages", f"is {after.messages}, the conversation has {prompt.messages}")
    if (after.tokens, after.digest) != (prompt.tokens, prompt.digest):
        raise mismatch(
            f"new_tokens.after has {after.tokens} tokens with digest {after.digest.hex()[:16]}, "
            f"base and spans give {prompt.tokens} with {prompt.digest.hex()[:16]}",
            ledger.marks,
        )


def _completion_indices(count: int, messages: Sequence[Message]) -> list[int]:
    """Return the indices of the last `count` assistant messages."""
    indices = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if count > len(indices):
        raise invalid("new_messages", f"have {len(indices)} completions, the spans have {count}")
    return indices[len(indices) - count :]


def _prompt_spans(
    now: int, ledger: HeldSegment, turns: Sequence[_SentTurn], messages: Sequence[int]
) -> Iterator[PromptSpan]:
    """Yield the span before each completion. `messages` is the number of messages before each completion."""
    start = len(ledger.tagged_ids)
    completion_index = ledger.marks[-1].messages - 1 if ledger.marks else None
    cut = ledger.last_was_cut
    for turn, before in zip(turns, messages, strict=True):
        stop = start + sum(len(run.token_ids) for run in turn.before)
        closing = sum(len(run.token_ids) for run in turn.before if run.reason is Reason.CLOSING)
        yield PromptSpan(turn.number if turn.completion else now, start, stop, before, completion_index, closing, cut)
        start, completion_index, cut = start + turn.size, before, False


def ids_of(tagged_ids: Sequence[int]) -> list[int]:
    """Return the token ids without the author bit."""
    return [tagged & _LARGEST_ID for tagged in tagged_ids]
