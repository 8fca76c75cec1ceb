"""A completion as the record of its turn, and the warnings about it, as (code, text)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rollout_server.core.ledger import Logprobs, Tokens
from rollout_server.core.record import Answered
from rollout_server.core.spec import Sampling
from rollout_server.edge.tokens.renderer import Rendered
from rollout_server.edge.trainer.chat_completion import ChatCompletion
from rollout_server.edge.wire.completion import Completion
from rollout_server.runtime.ports import CompletionRequest

_ROUNDING = 1e-3
"""How far above 0 rounding may carry the logarithm of a probability."""


def completion_record(
    request: CompletionRequest,
    completion: ChatCompletion | Completion,
    attempts: int,
    elapsed_ms: float,
    warnings: Iterable[tuple[str, str]] = (),
) -> Answered:
    """What a trainer or an engine returned, and nothing that this side knows better."""
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
    )


def completion_warnings(
    token_ids: Tokens | None,
    logprobs: Logprobs | None,
    sampling: Sampling,
    turn: int,
    vocabulary: int | None = None,
) -> Iterator[tuple[str, str]]:
    """Warnings about an answer: missing or impossible logprobs, more tokens than asked for, ids that the tokenizer does not have.

    `vocabulary` is the number of ids that the tokenizer has; None where the rollout has no tokenizer on this side.
    """
    if token_ids is None:
        return
    length, asked = len(token_ids), sampling.max_tokens
    if logprobs is None and sampling.logprobs is not False:
        text = f"turn {turn}: the trainer sent no logprobs, or not a finite one for each of its {length} tokens"
        yield "logprobs_missing", text
    if logprobs is not None and (highest := max(logprobs, default=0.0)) > _ROUNDING:
        index = list(logprobs).index(highest)
        text = f"turn {turn}: logprobs[{index}] is {highest:g}, above 0, so it is not the logarithm of a probability"
        yield "logprobs_positive", text
    if asked is not None and length > asked:
        text = f"turn {turn}: the answer has {length} tokens, {asked} were asked for; it is kept whole"
        yield "length_exceeded", text
    if vocabulary is not None and (largest := max(token_ids, default=0)) >= vocabulary:
        index = list(token_ids).index(largest)
        text = (
            f"turn {turn}: token_ids[{index}] is {largest}, but the tokenizer has ids below {vocabulary} only; "
            "the trainer may use another tokenizer than the rollout names"
        )
        yield "token_unknown", text


def rendering_warnings(rendered: Rendered, turn: int) -> Iterator[tuple[str, str]]:
    """Warnings about what our side rendered between the last answer and this turn's."""
    if not rendered.exact:
        text = f"turn {turn}: the chat template shows no place at which the last answer ends; environment tokens are a guess"
        yield "rendering_inexact", text
    if rendered.unseen:
        names = ", ".join(f"messages[{index}]" for index in rendered.unseen)
        text = (
            f"turn {turn}: the chat template leaves out the text of {names}, so the model does not see it; "
            "many templates render system messages only at the start of a conversation"
        )
        yield "environment_unseen", text
    if rendered.short_form_dropped:
        text = (
            f"turn {turn}: what the chat template writes behind an answer depends on more of the history than a short form keeps, "
            "so from here on each turn renders the whole conversation, which costs more as it grows"
        )
        yield "short_form_dropped", text
