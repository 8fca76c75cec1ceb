"""Join a completion and the environment: which tokens of the template are still missing between the two (docs/design.md, R4).

A completion may lack the stop token. It may also contain more than that: an engine that stops at several tokens, or at a text,
returns them all. What the template writes there and the completion has already must not be written twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout_server.core.ledger import Prediction, Tokens, pack_tokens
from rollout_server.core.message import Message
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.encoding import Encoded
from rollout_server.edge.tokens.rendering_form import strings
from rollout_server.edge.tokens.template_probe import StopToken
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer

_MOST = 16
"""Maximum number of tokens behind a completion's own text, and of characters that are compared where no token can be."""
_SHOWN = 64
"""In characters: as much of the rendering before the stop token is compared with the completion."""


@dataclass(frozen=True, slots=True)
class EnvironmentText:
    """The text between two completions.

    Args:
        text: the text after the stop token.
        stop: the stop token before the text; None if the template writes none.
        ends_completion: whether the first token of the text is also the stop token of the completion.
        space: the white space before the stop token.
        shown: what the template writes before that white space, or the end of it: usually text of the completion.
    """

    text: str
    stop: StopToken | None
    ends_completion: bool = False
    space: str = ""
    shown: str = field(default="", compare=False)

    @classmethod
    def after(cls, rendered: str, stop: StopToken, text: str) -> EnvironmentText:
        """Return the environment whose `text` ends the rendered conversation, after `stop`."""
        end = len(rendered) - len(text) - len(stop.text)
        before = rendered[max(0, end - _SHOWN) : end]
        shown = before.rstrip()
        return cls(text, stop, space=before[len(shown) :], shown=shown)


@dataclass(frozen=True, slots=True)
class PredictedTokens:
    """The tokens between two completions.

    `exact`: False if the completion ends with a part of them, or may be closed already, but this cannot be shown.
    """

    tokens: Prediction
    exact: bool = True


def predict_tokens(
    loaded: LoadedTokenizer, found: EnvironmentText, last: Answered, prompt: Encoded | None = None
) -> PredictedTokens | None:
    """Return the environment's token ids. `closing` has the stop token, and white space before it, if the completion lacks them.

    The text is encoded after the stop token, because some added tokens strip the white space next to them (`rstrip` in
    Phi-3). If the encoding of `prompt` splits at the stop token, the ids are taken from its end. None if the text of the stop token
    is not encoded to it.
    """
    stop = found.stop
    if stop is None:
        return _without_stop(loaded, found, last)
    start = 0 if prompt is None else len(prompt.text) - len(found.text) - len(stop.text)
    ids = None if prompt is None else prompt.behind(stop.id, start)
    if ids is None:
        encoded = loaded.encode(stop.text + found.text)
        if encoded[:1] != pack_tokens([stop.id]):
            return None
        ids = encoded[1:]
    return _after_stop(loaded, found, stop, ids, last)


def _after_stop(
    loaded: LoadedTokenizer, found: EnvironmentText, stop: StopToken, ids: Tokens, last: Answered
) -> PredictedTokens:
    """Return the tokens after a completion that the template closes with `stop`. `ids`: those of the text behind it.

    If only white space of the template follows the stop token in the completion, the environment continues there. If other white
    space follows it, or special tokens that end no completion, whether it closes the completion is unknown. If the text of the
    message ends with them, they are a part of the message, which the template writes in front of its stop token.
    """
    written, text = last.token_ids, found.text
    if again := _closed_again(loaded, stop, ids, last):
        return PredictedTokens(Prediction(pack_tokens(), ids[again:]))
    if written is None or written[-1:] == pack_tokens([stop.id]):
        return PredictedTokens(Prediction(pack_tokens(), ids))
    tail = written[-_MOST:]
    more = next((tail[at + 1 :] for at in reversed(range(len(tail))) if tail[at] == stop.id), None)
    if more is not None and _is_text(last.message, stop.text + loaded.decode_exactly(more)):
        more = None
    is_syntax = more is not None and _are_syntax(loaded, more)
    if more is not None and is_syntax and more == ids[: len(more)]:
        return PredictedTokens(Prediction(pack_tokens(), ids[len(more) :]))
    space = "" if more is None else loaded.decode_exactly(more)
    if space.isspace() and text.startswith(space):
        return PredictedTokens(Prediction(pack_tokens(), loaded.encode(text[len(space) :])))
    if not loaded.is_closed(written, stop, cut=last.finish_reason == "length"):
        return PredictedTokens(Prediction(_closing(loaded, found, stop, last), ids), not is_syntax)
    return PredictedTokens(Prediction(pack_tokens(), ids[_repeated(loaded, written, ids) :]))


def _closing(loaded: LoadedTokenizer, found: EnvironmentText, stop: StopToken, last: Answered) -> Tokens:
    """Return the ids of the stop token, and of the white space that the template writes before it and the completion lacks.

    A model that stops by itself has written that white space, or has chosen not to. One that was cut could not, nor could one that
    ended with a special token in place of a stop token that begins the next message. If the completion's tokens do not end like the
    text that the template shows, as when it drops the reasoning in which they were cut, only the stop token closes it.
    """
    alone, written = pack_tokens([stop.id]), last.token_ids or pack_tokens()
    own = written[: _text_length(loaded, written)]
    was_cut = last.finish_reason == "length" or (stop.opens_next and len(own) < len(written))
    if not found.space or not was_cut:
        return alone
    # The first of these tokens may begin within a character.
    text = loaded.decode_exactly(own[-_MOST:]).lstrip("\ufffd")
    said = text.rstrip()
    if not said or not found.shown.endswith(said[-_MOST:]):
        return alone
    space = text[len(said) :]
    lengths = range(len(found.space), -1, -1)
    missing = next(found.space[length:] for length in lengths if space.endswith(found.space[:length]))
    closing = loaded.encode(missing + stop.text)
    return closing if closing[-1:] == alone else alone


def _text_length(loaded: LoadedTokenizer, ids: Tokens) -> int:
    """Return the number of ids without the special tokens at their end."""
    return next((at for at in range(len(ids), 0, -1) if not loaded.is_special(ids[at - 1])), 0)


def _closed_again(loaded: LoadedTokenizer, stop: StopToken, ids: Tokens, last: Answered) -> int:
    """Return the number of the first `ids` that a completion has if the template closes it with the same token twice.

    Apriel's template closes messages with `<|end|>`, a line break, and its `eos_token`, which is `<|end|>` too.
    """
    tail = (last.token_ids or pack_tokens())[-_MOST:]
    stops = [at for at, each in enumerate(tail) if each == stop.id]
    if len(stops) < 2 or any(stop.text in text for text in strings(last.message.fields())):
        return 0
    found = (tail[at + 1 :] for at in stops[:-1])
    return next((len(more) for more in found if more == ids[: len(more)] and _are_syntax(loaded, more)), 0)


def _without_stop(loaded: LoadedTokenizer, found: EnvironmentText, last: Answered) -> PredictedTokens:
    """Return the tokens after a completion that the template does not close with its stop token.

    GLM: the completion may already end with the special token that begins the next message. A completion without ids is taken to
    have it, as it is taken to have its stop token.

    Otherwise only text separates the completion from the environment. The completion ends with a part of that text if its tokens
    have that much more text than its content.
    """
    ids, written = loaded.encode(found.text), last.token_ids
    if written is None:
        return PredictedTokens(Prediction(pack_tokens(), ids[1:] if found.ends_completion else ids))
    if ids and loaded.is_special(ids[0]):
        return PredictedTokens(Prediction(pack_tokens(), ids[_repeated(loaded, written, ids) :]))
    text, content = loaded.decode_exactly(written), last.message.fields().get("content")
    if isinstance(content, str) and content and content in text:
        more = text.rpartition(content)[2]
        if found.text.startswith(more):
            return PredictedTokens(Prediction(pack_tokens(), loaded.encode(found.text[len(more) :]) if more else ids))
    overlaps = any(text.endswith(found.text[:length]) for length in range(1, min(_MOST, len(found.text)) + 1))
    return PredictedTokens(Prediction(pack_tokens(), ids), not overlaps)


def _repeated(loaded: LoadedTokenizer, written: Tokens, ids: Tokens) -> int:
    """Return the number of the first `ids` with which the completion ends; only syntax counts, which no message contains."""
    most = next((at for at, each in enumerate(ids[:_MOST]) if not _is_syntax(loaded, each)), min(_MOST, len(ids)))
    return next((length for length in range(most, 0, -1) if written[-length:] == ids[:length]), 0)


def _is_text(message: Message, end: str) -> bool:
    """Return whether a text of the message ends like this, apart from white space."""
    return any(text.rstrip().endswith(end.rstrip()) for text in strings(message.fields()))


def _are_syntax(loaded: LoadedTokenizer, ids: Tokens) -> bool:
    return all(_is_syntax(loaded, each) for each in ids)


def _is_syntax(loaded: LoadedTokenizer, token_id: int) -> bool:
    return loaded.is_special(token_id) or loaded.decode_exactly([token_id]).isspace()
