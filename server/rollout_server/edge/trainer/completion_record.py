"""Convert a completion to the record of its turn, and derive the warnings about it as (code, text)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rollout_server.core.ledger import Logprobs, Tokens
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.renderer import Rendered, Renderer
from rollout_server.edge.trainer.chat_completion import ChatCompletion
from rollout_server.edge.wire.completion import Completion
from rollout_server.runtime.ports import CompletionRequest

_ROUNDING = 1e-3
"""Tolerance above 0 for logprobs: rounding in the trainer can make the log of a probability near 1 slightly positive."""


def completion_record(
    request: CompletionRequest,
    completion: ChatCompletion | Completion,
    attempts: int,
    elapsed_ms: float,
    warnings: Iterable[tuple[str, str]],
) -> Answered:
    """Return the record of a completion. It holds only what the trainer or the engine reported."""
    return Answered(
        turn=request.asked.turn,
        message=completion.message,
        finish_reason=completion.finish_reason,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        reported=completion.reported,
        attempts=attempts,
        elapsed_ms=elapsed_ms,
        usage=completion.usage,
        policy_version=completion.policy_version,
        notes=tuple(warnings),
        tool_calls=completion.tool_calls,
        planes=completion.planes,
        extra_json=completion.extra_json,
        policy_step=completion.policy_step,
        runs=completion.runs,
    )


def completion_warnings(
    request: CompletionRequest,
    completion: ChatCompletion | Completion,
    renderer: Renderer | None = None,
    rendered: Rendered | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield warnings about the tokens of a completion, and about the environment that the server rendered before it.

    `renderer` and `rendered` are None if the server has no tokenizer for the rollout, or rendered nothing.
    """
    if completion.token_ids is not None:
        vocabulary = None if renderer is None else renderer.loaded.vocabulary
        yield from _token_warnings(request, completion.token_ids, completion.logprobs, vocabulary)
    if rendered is not None:
        yield from _rendering_warnings(rendered, request.asked.turn)


def _token_warnings(
    request: CompletionRequest, token_ids: Tokens, logprobs: Logprobs | None, vocabulary: int | None
) -> Iterator[tuple[str, str]]:
    """Yield warnings about missing or positive logprobs, more tokens than requested, and ids outside the vocabulary."""
    turn, sampling = request.asked.turn, request.sampling
    length, limit = len(token_ids), sampling.max_tokens
    if logprobs is None and sampling.logprobs is not False:
        text = f"turn {turn}: the completion came without one finite logprob for each of its {length} tokens"
        yield "logprobs_missing", text
    if logprobs is not None and (highest := max(logprobs, default=0.0)) > _ROUNDING:
        index = list(logprobs).index(highest)
        text = f"turn {turn}: logprobs[{index}] is {highest:g}; the logarithm of a probability is at most 0"
        yield "logprobs_positive", text
    if limit is not None and length > limit:
        text = f"turn {turn}: the completion has {length} tokens, but max_tokens is {limit}; it is kept whole"
        yield "length_exceeded", text
    if vocabulary is not None and (largest := max(token_ids, default=0)) >= vocabulary:
        index = list(token_ids).index(largest)
        text = (
            f"turn {turn}: token_ids[{index}] is {largest}, but the tokenizer's ids are below {vocabulary}; "
            "the model may use a different tokenizer than the rollout names"
        )
        yield "token_unknown", text


def _rendering_warnings(rendered: Rendered, turn: int) -> Iterator[tuple[str, str]]:
    if not rendered.exact:
        text = f"turn {turn}: it cannot be told exactly where the last completion ends; environment tokens are a guess"
        yield "rendering_inexact", text
    if rendered.unseen:
        names = ", ".join(f"messages[{index}]" for index in rendered.unseen)
        text = (
            f"turn {turn}: the chat template leaves out the text of {names}, so the model does not see it; "
            "many templates render system messages only at the start of a conversation"
        )
        yield "environment_unseen", text
    if rendered.repeated:
        text = (
            f"turn {turn}: the chat template writes text of the last completion again behind its end, so the model sees it twice; "
            "the repetition has mask 0"
        )
        yield "completion_repeated", text
    if rendered.short_form_dropped:
        text = (
            f"turn {turn}: the environment depends on more of the history than the short form keeps, so each further turn "
            "renders the whole conversation, which costs more as it grows; turns since the last comparison may have other tokens "
            "than the whole conversation has"
        )
        yield "short_form_dropped", text
