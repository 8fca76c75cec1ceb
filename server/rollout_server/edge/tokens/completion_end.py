"""Join a completion and the environment: which tokens are still missing between the two (docs/design.md, R4)."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_server.core.ledger import Prediction, Tokens, pack_tokens
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.encoding import Encoded
from rollout_server.edge.tokens.template_probe import StopToken
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer


@dataclass(frozen=True, slots=True)
class EnvironmentText:
    """The text between two completions.

    Args:
        text: the text after the stop token.
        stop: the stop token before the text; None if the template writes none.
        ends_completion: whether the first token of the text is also the stop token of the completion.
    """

    text: str
    stop: StopToken | None
    ends_completion: bool = False


def predict_tokens(
    loaded: LoadedTokenizer, found: EnvironmentText, last: Answered, prompt: Encoded | None = None
) -> Prediction | None:
    """Return the environment's token ids, with the stop token in `closing` if the completion lacks it.

    The text is encoded after the stop token, because some added tokens strip the white space next to them (`rstrip` in
    Phi-3). If the encoding of `prompt` splits at the stop token, the ids are taken from its end. None if the text of the stop token
    is not encoded to it.
    """
    stop = found.stop
    if stop is None:
        ids = loaded.encode(found.text)
        # GLM: the completion may already end with the special token that begins the next message. Do not add it twice.
        # A completion without ids is taken to have its stop token, as in `_closing`.
        is_there = (
            found.ends_completion
            if last.token_ids is None
            else last.token_ids[-1:] == ids[:1] != pack_tokens() and loaded.is_special(ids[0])
        )
        return Prediction(pack_tokens(), ids[1:] if is_there else ids)
    start = 0 if prompt is None else len(prompt.text) - len(found.text) - len(stop.text)
    known = None if prompt is None else prompt.behind(stop.id, start)
    if known is not None:
        return Prediction(_closing(loaded, stop, last), known)
    ids = loaded.encode(stop.text + found.text)
    return Prediction(_closing(loaded, stop, last), ids[1:]) if ids[:1] == pack_tokens([stop.id]) else None


def _closing(loaded: LoadedTokenizer, stop: StopToken, last: Answered) -> Tokens:
    """Return the stop token if the completion lacks it: it was cut at `max_tokens`, or the engine strips stop tokens."""
    cut = last.finish_reason == "length"
    closed = last.token_ids is None or loaded.is_closed(last.token_ids, stop, cut=cut)
    return pack_tokens() if closed else pack_tokens([stop.id])
