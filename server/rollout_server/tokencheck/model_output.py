"""The completion that a model would write: the text that the template renders for the message, up to and including the stop token.

If a template shortens a completion (trims it, drops its thinking), the model wrote the full text. The full content of the
message then replaces what the template left of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rollout_server.edge.tokens.encoding import common_prefix
from rollout_server.edge.tokens.rendering_form import Fields, has_calls
from rollout_server.edge.tokens.template_probe import StopToken
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.tokencheck.conversation import CheckConversation, arguments_of
from rollout_server.tokencheck.template import RenderedConversation, Template

_OTHER: Fields = {"role": "assistant", "content": "Zq0AnotherAnswer"}


class Writing(Enum):
    """How the simulated model writes completions, compared with the template."""

    TEMPLATE = "as the template"
    SPELLING = "own spelling"
    TOKENS = "other tokens"


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """A simulated completion.

    Args:
        text: including the stop token, unless the completion was cut.
        stop: the text of the stop token at its end; empty if there is none.
        arguments: (start, end) of each call's arguments in `text`.
        found: True if all arguments occur in `text`, in some spelling.
    """

    text: str
    stop: str = ""
    arguments: tuple[tuple[int, int], ...] = ()
    found: bool = True


def write_output(
    template: Template,
    rendering: RenderedConversation,
    conversation: CheckConversation,
    position: int,
    writing: Writing,
) -> ModelOutput:
    """Return the completion at `position`. `rendering` must use the form in which arguments are spelled as models write them."""
    message, end = rendering.messages[position], conversation.end(position)
    stop = template.loaded.probed.stop(calls=has_calls(message))
    text, start = _closed_text(rendering, position, stop), _completion_start(template, rendering, position)
    body, closing = _split_stop(template, rendering.prompt(end), text, start, stop)
    body = _restore_content(body, message.get("content"))
    arguments = arguments_of(conversation.messages[position])
    body, spans, found = _spell_arguments(body, arguments, respell=writing is Writing.SPELLING)
    return ModelOutput(body + closing, closing, spans, found)


def _closed_text(rendering: RenderedConversation, position: int, stop: StopToken | None) -> str:
    """Return the conversation up to and including the completion, without a generation prompt.

    Some templates add a generation prompt even if none is requested; it is cut off.
    """
    text = rendering.history(position + 1)
    if stop is None or text != rendering.prompt(position + 1):
        return text
    body, stands, _ = text.rpartition(stop.text)
    return body + stands or text


def _completion_start(template: Template, rendering: RenderedConversation, position: int) -> int:
    """Return where the completion begins in its rendering: after its generation prompt, or after what the history keeps of it."""
    prompt, text = rendering.prompt(position), rendering.history(position + 1)
    shared = template.common_length(prompt, text)
    opening = prompt[common_prefix(prompt, rendering.history(position)) :]
    if shared >= len(prompt) - len(opening):
        return shared
    # Earlier messages were rewritten too. A different completion causes the same rewriting, so the common prefix with a
    # rendering that has another completion ends where this completion begins.
    try:
        other = rendering.render([*rendering.messages[:position], _OTHER], False)
    except RolloutFailed:
        return shared
    same = template.common_length(text, other)
    if not opening:
        return same
    at = text.rfind(opening, 0, same)
    return shared if at < 0 else at + len(opening)


def _split_stop(template: Template, full: str, text: str, start: int, stop: StopToken | None) -> tuple[str, str]:
    """Return the completion's body and its stop token."""
    if found := _stop_span(template, text, start, stop):
        return text[start : found[0]], text[found[0] : found[1]]
    if stop is None:
        return text[start:].rstrip(), ""
    # The first token of the next message closes the completion (GLM).
    at = full.find(stop.text, max(start, len(text.rstrip())))
    if full.startswith(text.rstrip()) and at >= 0 and not full[len(text.rstrip()) : at].strip():
        return full[start:at], stop.text
    return text[start:].rstrip(), stop.text


def _stop_span(template: Template, text: str, start: int, stop: StopToken | None) -> tuple[int, int] | None:
    """Return (start, end) of the stop token among the special tokens at the end; some templates write another one after it."""
    any_special = "|".join(re.escape(text) for text in sorted(template.special, key=len, reverse=True))
    if not any_special:
        return None
    run = re.search(rf"(?:\s*(?:{any_special}))+\s*\Z", text[start:])
    if run is None:
        return None
    tokens = [
        (start + m.start() + run.start(), start + m.end() + run.start()) for m in re.finditer(any_special, run[0])
    ]
    return next((offset for offset in tokens if stop and text[slice(*offset)] == stop.text), tokens[-1])


def _restore_content(body: str, content: object) -> str:
    """Return the body with the full content that the model wrote in place of what the template left of it."""
    if not isinstance(content, str) or not content.strip() or content in body:
        return body
    if content.strip() in body:
        return body.replace(content.strip(), content, 1)
    left = body.strip()
    return content if left and content.rstrip().endswith(left) else body


def _spell_arguments(
    body: str, arguments: Sequence[str], *, respell: bool
) -> tuple[str, tuple[tuple[int, int], ...], bool]:
    """Return the body, the spans of the arguments, and whether all were found. `respell` restores the model's own spelling."""
    spans: list[tuple[int, int]] = []
    at, found_all = 0, True
    for text in arguments:
        found = next(((offset, s) for s in _spellings(text) if (offset := body.find(s, at)) >= 0), None)
        if found is None:
            found_all = False
            continue
        offset, spelling = found
        stands = text if respell else spelling
        body = body[:offset] + stands + body[offset + len(spelling) :]
        at = offset + len(stands)
        spans.append((offset, at))
    return body, tuple(spans), found_all


def _spellings(arguments: str) -> list[str]:
    """Return the spellings that a template may have used."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return [arguments]
    styles = [
        json.dumps(value, ensure_ascii=ascii_only, separators=separators, sort_keys=in_order)
        for in_order in (False, True)
        for ascii_only in (False, True)
        for separators in ((", ", ": "), (",", ":"))
    ]
    return [arguments, *styles]
