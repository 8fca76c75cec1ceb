"""What a model writes as a completion: the text that its template renders for it, up to and with the stop.

Where a template shortens an answer (trims it, takes its thinking away), the model wrote the whole. What stands in the
message is then put back in the place of what was left of it.
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
    """How a model's answers are written, as against how the template would write them."""

    TEMPLATE = "as the template"
    SPELLING = "own spelling"
    TOKENS = "other tokens"


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """An answer.

    Args:
        text: with its stop, unless it was cut.
        stop: the text at its end that closes it; empty: none does.
        arguments: from where to where in the text the arguments of calls stand.
        found: all arguments stand in the text, in some spelling of theirs.
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
    """The completion at `position`. `rendering` has the form in which arguments come out as models write them."""
    message, end = rendering.messages[position], conversation.end(position)
    stop = template.loaded.probed.stop(calls=has_calls(message))
    text, start = _closed_text(rendering, position, stop), _completion_start(template, rendering, position)
    body, closing = _split_stop(template, rendering.prompt(end), text, start, stop)
    body = _restore_content(body, message.get("content"))
    arguments = arguments_of(conversation.messages[position])
    body, spans, found = _spell_arguments(body, arguments, respell=writing is Writing.SPELLING)
    return ModelOutput(body + closing, closing, spans, found)


def _closed_text(rendering: RenderedConversation, position: int, stop: StopToken | None) -> str:
    """The conversation up to and with the answer, without a generation prompt, also where the template always writes one."""
    text = rendering.history(position + 1)
    if stop is None or text != rendering.prompt(position + 1):
        return text
    body, stands, _ = text.rpartition(stop.text)
    return body + stands or text


def _completion_start(template: Template, rendering: RenderedConversation, position: int) -> int:
    """Where the answer begins in its rendering: behind its generation prompt, or what is left of that."""
    prompt, text = rendering.prompt(position), rendering.history(position + 1)
    shared = template.common_length(prompt, text)
    opening = prompt[common_prefix(prompt, rendering.history(position)) :]
    if shared >= len(prompt) - len(opening):
        return shared
    # What came before was rewritten too. It is, behind another answer, in the same way.
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
    """The answer's body and its stop."""
    if found := _stop_span(template, text, start, stop):
        return text[start : found[0]], text[found[0] : found[1]]
    if stop is None:
        return text[start:].rstrip(), ""
    # The next message's first token closes it.
    at = full.find(stop.text, max(start, len(text.rstrip())))
    if full.startswith(text.rstrip()) and at >= 0 and not full[len(text.rstrip()) : at].strip():
        return full[start:at], stop.text
    return text[start:].rstrip(), stop.text


def _stop_span(template: Template, text: str, start: int, stop: StopToken | None) -> tuple[int, int] | None:
    """Where the stop stands among the special tokens at the end. Some templates put another behind the whole text."""
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
    """The body with the whole of what the model wrote in place of what the template left of it."""
    if not isinstance(content, str) or not content.strip() or content in body:
        return body
    if content.strip() in body:
        return body.replace(content.strip(), content, 1)
    left = body.strip()
    return content if left and content.rstrip().endswith(left) else body


def _spell_arguments(
    body: str, arguments: Sequence[str], *, respell: bool
) -> tuple[str, tuple[tuple[int, int], ...], bool]:
    """The body, if wanted with arguments as the model spelled them; the places where they stand; whether all were found."""
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
    """How a template may have spelled them."""
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
