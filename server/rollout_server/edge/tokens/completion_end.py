"""Join a completion and the environment: which tokens of the template are still missing between the two (docs/design.md, R4).

A completion may lack the stop token, and a cut one the text that the template writes before it. It may also contain more than
the stop token: an engine that stops at several tokens, or at a text, returns them all. What the template writes there and the
completion has already must not be written twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout_server.core.ledger import Prediction, Tokens, pack_tokens
from rollout_server.core.message import Message
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.encoding import Encoded
from rollout_server.edge.tokens.rendering_form import has_calls, strings
from rollout_server.edge.tokens.template_probe import StopToken
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.edge.tokens.turn_boundary import RenderedTurn, last_text

_MOST = 16
"""Maximum number of tokens behind a completion's own text, and of characters that are compared where no token can be."""

_LONGEST = 256
"""In characters. As much of what the template writes before the stop token is looked for behind other white space."""


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


@dataclass(frozen=True, slots=True)
class PredictedTokens:
    """The tokens between two completions.

    `exact`: False if the completion ends with a part of them, or may be closed already, but this cannot be shown. Also False if it
    is unknown what a cut completion lacks of the text that the template writes before the stop token.
    """

    tokens: Prediction
    exact: bool = True


def predict_tokens(
    loaded: LoadedTokenizer, found: EnvironmentText, last: Answered, turn: RenderedTurn, prompt: Encoded | None = None
) -> PredictedTokens | None:
    """Return the environment's token ids. `closing` has the stop token, and text before it, if the completion lacks them.

    `turn` is the rendering in which `found` was found.

    The text is encoded after the stop token, because some added tokens strip the white space next to them (`rstrip` in
    Phi-3). If the encoding of `prompt` splits at the stop token, the ids are taken from its end. None if the text of the stop token
    is not encoded to it.
    """
    stop = found.stop
    if stop is None:
        return _without_stop(loaded, found, last, turn)
    start = 0 if prompt is None else len(prompt.text) - len(found.text) - len(stop.text)
    ids = None if prompt is None else prompt.behind(stop.id, start)
    if ids is None:
        encoded = loaded.encode(stop.text + found.text)
        if encoded[:1] != pack_tokens([stop.id]):
            return None
        ids = encoded[1:]
    return _after_stop(loaded, found, stop, ids, last, turn)


def is_cut(loaded: LoadedTokenizer, last: Answered) -> bool:
    """Return whether the completion may lack text that the template writes before its end.

    A model that stops by itself has written that text, or has chosen not to. One that was cut could not, nor could one that ended
    with a special token in place of a stop token that begins the next message.
    """
    stop = loaded.probed.stop(calls=has_calls(last.message.fields()))
    written, length = last.token_ids, last.finish_reason == "length"
    if written is None or stop is None:
        return length
    if loaded.is_closed(written, stop, cut=length):
        return False
    return length or (stop.opens_next and _text_length(loaded, written) < len(written))


def _after_stop(
    loaded: LoadedTokenizer, found: EnvironmentText, stop: StopToken, ids: Tokens, last: Answered, turn: RenderedTurn
) -> PredictedTokens:
    """Return the tokens after a completion that the template closes with `stop`. `ids`: those of the text behind it.

    If only white space of the template follows the stop token in the completion, the environment continues there. If other white
    space follows it, or special tokens that end no completion, whether it closes the completion is unknown, and so it is if text
    follows it in a cut completion and the message does not have it. If the text of the message ends with them, they are a part of
    the message, which the template writes in front of its stop token.
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
    if loaded.is_closed(written, stop, cut=last.finish_reason == "length"):
        return PredictedTokens(Prediction(pack_tokens(), ids[_repeated(loaded, written, ids) :]))
    missing = _missing_text(loaded, last, turn, len(turn.full) - len(text) - len(stop.text))
    closing = _closing(loaded, stop, missing or "", turn.prompt + loaded.decode_exactly(tail))
    return PredictedTokens(
        Prediction(closing, ids), missing is not None and not is_syntax and not _goes_on(loaded, stop, last)
    )


def _goes_on(loaded: LoadedTokenizer, stop: StopToken, last: Answered) -> bool:
    """Return whether a cut completion has the stop token, but neither its message nor the template's completions do."""
    if last.finish_reason != "length" or stop.id not in (last.token_ids or ()) or stop.id in loaded.probed.inside:
        return False
    return not any(stop.text in text for text in strings(last.message.fields()))


def _missing_text(loaded: LoadedTokenizer, last: Answered, turn: RenderedTurn, stop_at: int) -> str | None:
    """Return the text that the template writes before the stop token and a cut completion lacks; None if it is unknown.

    If the rendering goes on with the completion's text behind the prompt, it shows what is missing. Otherwise the completion must
    end like the last text of its message, or with the beginning of what the template writes behind that text. If it does neither,
    the template may drop the reasoning in which it was cut. Then nothing is missing if the template writes only white space.
    """
    if not is_cut(loaded, last):
        return ""
    written = last.token_ids or pack_tokens()
    text = loaded.decode_exactly(written)
    rest = _rendered_behind(turn, text, stop_at)
    if rest is not None:
        return rest
    shown = last_text(turn, stop_at)
    behind = turn.full[shown.end : stop_at]
    ways = (text, loaded.decode_exactly(written[: _text_length(loaded, written)]))
    missing = next((more for each in ways if (more := _rest(shown.text, behind, each)) is not None), None)
    return "" if missing is None and shown.is_known and not behind.strip() else missing


def _rendered_behind(turn: RenderedTurn, text: str, end: int) -> str | None:
    """Return what the rendering up to `end` has behind the prompt and `text`; None if it does not begin with both."""
    start = len(turn.prompt)
    begins = turn.full.startswith(turn.prompt) and turn.full.startswith(text, start, end)
    return turn.full[start + len(text) : end] if begins else None


def _rest(own: str, behind: str, text: str) -> str | None:
    """Return the end of `behind` that does not end `text`, which ends like `own` before it; None if it does not.

    White space between the two may be other than in the rendering, because templates strip it.
    """
    end = own[-_MOST:]
    at = text.rfind(end) if end else -1
    while at >= 0 and len(part := text[at + len(end) :]) <= len(behind):
        if behind.startswith(part):
            return behind[len(part) :]
        at = text.rfind(end, 0, at + len(end) - 1)
    for length in range(min(len(behind), _LONGEST), -1, -1) if end else ():
        if text.endswith(behind[:length]) and text[: len(text) - length].rstrip().endswith(end):
            return behind[length:]
    return None


def _closing(loaded: LoadedTokenizer, stop: StopToken, missing: str, before: str) -> Tokens:
    """Return the ids of the missing text and the stop token, as they are behind the text `before`."""
    alone = pack_tokens([stop.id])
    if not missing:
        return alone
    # Some tokenizers put a space before the first word of a text, so it is encoded behind another one. A token may not span both.
    for start in (before[-_MOST:], "\n"):
        first, ids = loaded.encode(start), loaded.encode(start + missing + stop.text)
        if ids[: len(first)] == first and ids[-1:] == alone:
            return ids[len(first) :]
    ids = loaded.encode(missing + stop.text)
    return ids if ids[-1:] == alone else alone


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


def _without_stop(
    loaded: LoadedTokenizer, found: EnvironmentText, last: Answered, turn: RenderedTurn
) -> PredictedTokens:
    """Return the tokens after a completion that the template does not close with its stop token.

    GLM: the completion may already end with the special token that begins the next message. A completion without ids is taken to
    have it, as it is taken to have its stop token.

    Otherwise only text separates the completion from the environment. If the rendering goes on with the completion's text behind
    the prompt, the environment is the rest. The completion ends with a part of that text if its tokens have that much more text
    than its content. It may also do so if its last id is a special token that is in the environment.
    """
    ids, written = loaded.encode(found.text), last.token_ids
    if written is None:
        return PredictedTokens(Prediction(pack_tokens(), ids[1:] if found.ends_completion else ids))
    if ids and loaded.is_special(ids[0]):
        repeated = _repeated(loaded, written, ids)
        spaced = None if repeated else _behind_space(loaded, found.text, ids, written)
        return spaced or PredictedTokens(Prediction(pack_tokens(), ids[repeated:]))
    text, content = loaded.decode_exactly(written), last.message.fields().get("content")
    rest = _rendered_behind(turn, text, len(turn.full))
    if rest is not None:
        return PredictedTokens(Prediction(pack_tokens(), ids if rest == found.text else loaded.encode(rest)))
    if isinstance(content, str) and content and content in text:
        more = text.rpartition(content)[2]
        if found.text.startswith(more):
            return PredictedTokens(Prediction(pack_tokens(), loaded.encode(found.text[len(more) :]) if more else ids))
    overlaps = any(text.endswith(found.text[:length]) for length in range(1, min(_MOST, len(found.text)) + 1))
    overlaps = overlaps or (loaded.is_special(written[-1]) and written[-1] in ids if written else False)
    return PredictedTokens(Prediction(pack_tokens(), ids), not overlaps)


def _behind_space(loaded: LoadedTokenizer, text: str, ids: Tokens, written: Tokens) -> PredictedTokens | None:
    """Return the tokens of `text` behind a completion that ends with the first of its `ids` and white space; None if it does not.

    The template may write that white space too: the ids do not show it if the token after it strips it (`lstrip`).
    """
    end = next(
        (at for at in range(len(written), 0, -1) if not loaded.decode_exactly(written[at - 1 : at]).isspace()), 0
    )
    space, rest = loaded.decode_exactly(written[end:]), text.removeprefix(loaded.decode_exactly(ids[:1]))
    if not space or written[end - 1 : end] != ids[:1] or rest == text:
        return None
    if rest.startswith(space):
        return PredictedTokens(Prediction(pack_tokens(), loaded.encode(rest[len(space) :])))
    return PredictedTokens(Prediction(pack_tokens(), ids[1:]), exact=False)


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
