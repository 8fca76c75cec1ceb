"""What a model writes when it gives an answer: the text that its template renders for it, up to and with the stop.

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


def written(
    template: Template, page: RenderedConversation, conversation: CheckConversation, answered: int, writing: Writing
) -> ModelOutput:
    """The answer at `answered`. `page` renders the conversation in the form in which arguments come out as models write them."""
    answer, end = page.messages[answered], conversation.end(answered)
    stop = template.loaded.probed.stop(calls=has_calls(answer))
    said, start = _ended(page, answered, stop), _start(template, page, answered)
    body, closing = _cut(template, page.asked(end), said, start, stop)
    body = _whole(body, answer.get("content"))
    arguments = arguments_of(conversation.messages[answered])
    body, places, found = _spelled(body, arguments, respell=writing is Writing.SPELLING)
    return ModelOutput(body + closing, closing, places, found)


def _ended(page: RenderedConversation, answered: int, stop: StopToken | None) -> str:
    """The conversation up to and with the answer, without a generation prompt, also where the template always writes one."""
    said = page.ended(answered + 1)
    if stop is None or said != page.asked(answered + 1):
        return said
    body, stands, _ = said.rpartition(stop.text)
    return body + stands or said


def _start(template: Template, page: RenderedConversation, answered: int) -> int:
    """Where the answer begins in its rendering: behind its generation prompt, or what is left of that."""
    prompt, said = page.asked(answered), page.ended(answered + 1)
    shared = template.joint(prompt, said)
    opening = prompt[common_prefix(prompt, page.ended(answered)) :]
    if shared >= len(prompt) - len(opening):
        return shared
    # What came before was rewritten too. It is, behind another answer, in the same way.
    try:
        other = page.render([*page.messages[:answered], _OTHER], False)
    except RolloutFailed:
        return shared
    same = template.joint(said, other)
    if not opening:
        return same
    at = said.rfind(opening, 0, same)
    return shared if at < 0 else at + len(opening)


def _cut(template: Template, full: str, said: str, start: int, stop: StopToken | None) -> tuple[str, str]:
    """The answer's body and its stop."""
    if found := _closing(template, said, start, stop):
        return said[start : found[0]], said[found[0] : found[1]]
    if stop is None:
        return said[start:].rstrip(), ""
    # The next message's first token closes it.
    at = full.find(stop.text, max(start, len(said.rstrip())))
    if full.startswith(said.rstrip()) and at >= 0 and not full[len(said.rstrip()) : at].strip():
        return full[start:at], stop.text
    return said[start:].rstrip(), stop.text


def _closing(template: Template, said: str, start: int, stop: StopToken | None) -> tuple[int, int] | None:
    """Where the stop stands among the special tokens at the end. Some templates put another behind the whole text."""
    any_special = "|".join(re.escape(text) for text in sorted(template.special, key=len, reverse=True))
    if not any_special:
        return None
    run = re.search(rf"(?:\s*(?:{any_special}))+\s*\Z", said[start:])
    if run is None:
        return None
    tokens = [
        (start + m.start() + run.start(), start + m.end() + run.start()) for m in re.finditer(any_special, run[0])
    ]
    return next((place for place in tokens if stop and said[slice(*place)] == stop.text), tokens[-1])


def _whole(body: str, content: object) -> str:
    """The body with the whole of what the model said in place of what the template left of it."""
    if not isinstance(content, str) or not content.strip() or content in body:
        return body
    if content.strip() in body:
        return body.replace(content.strip(), content, 1)
    left = body.strip()
    return content if left and content.rstrip().endswith(left) else body


def _spelled(body: str, arguments: Sequence[str], *, respell: bool) -> tuple[str, tuple[tuple[int, int], ...], bool]:
    """The body, if wanted with arguments as the model spelled them; the places where they stand; whether all were found."""
    places: list[tuple[int, int]] = []
    at, found_all = 0, True
    for text in arguments:
        found = next(((place, s) for s in _spellings(text) if (place := body.find(s, at)) >= 0), None)
        if found is None:
            found_all = False
            continue
        place, spelling = found
        stands = text if respell else spelling
        body = body[:place] + stands + body[place + len(spelling) :]
        at = place + len(stands)
        places.append((place, at))
    return body, tuple(places), found_all


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
