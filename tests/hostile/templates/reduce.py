"""Reduce a difference to the fewest traits and messages that still cause it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tests.hostile.templates import grammar
from tests.hostile.templates.conversations import Conversation, Turn
from tests.hostile.templates.grammar import Traits
from tests.hostile.templates.run import Case, Difference, Opens, open_renderer, play


def kinds(differences: Sequence[Difference], most: int, opens: Opens = open_renderer) -> Iterator[Difference]:
    """A reduced example of each kind of difference, as they are found, at most `most`."""
    found: dict[str, set[str]] = {}
    for difference in differences:
        if len(found) >= most:
            return
        features = _needed(difference) | {difference.path}
        if any(needed <= features for needed in found.values()):
            continue
        small = reduced(difference, opens)
        if (name := signature(small)) not in found:
            found[name] = _needed(small) | {small.path}
            yield small


def signature(difference: Difference) -> str:
    """What a difference needs, as a short text."""
    return ", ".join((difference.path, *sorted(_needed(difference)), *_around(difference)))


def _needed(difference: Difference) -> set[str]:
    """The traits of a difference and the ending of the completion."""
    unusual = difference.case.template.traits.unusual()
    found = {difference.verdict.value, *(f"{name}={word}" for name, word in unusual.items())}
    if difference.case.template.traits.date != "none" and difference.case.template.date != grammar.DATES[0]:
        found.add(f"format={difference.case.template.date}")
    if difference.turn:
        ending = difference.case.conversation.turns[difference.turn - 1].ending
        found |= {f"ending={ending}"} - {"ending=stop"}
    return found


def _around(difference: Difference) -> Iterator[str]:
    """The position of a difference in its conversation."""
    if not difference.turn:
        yield "in the prompt"
        return
    turn = difference.case.conversation.turns[difference.turn - 1]
    yield "after calls" if turn.answer.get("tool_calls") else "after an answer"
    yield f"then {turn.environment[0]['role']}" if turn.environment else "then nothing"


def reduced(difference: Difference, opens: Opens = open_renderer) -> Difference:
    """The smallest case found with the same verdict on the same path."""
    smaller = True
    while smaller:
        smaller = False
        for case in _smaller(difference):
            found = _again(case, difference, opens)
            if found is not None:
                difference, smaller = found, True
                break
    return difference


def _again(case: Case, like: Difference, opens: Opens) -> Difference | None:
    try:
        differences = play([case], opens).differences
    except Exception:
        return None
    return next((each for each in differences if (each.path, each.verdict) == (like.path, like.verdict)), None)


def _smaller(difference: Difference) -> Iterator[Case]:
    """Cases that are smaller than that of a difference."""
    template, conversation = difference.case.template, difference.case.conversation
    if difference.turn < len(conversation.turns):
        yield Case(template, replace(conversation, turns=conversation.turns[: difference.turn]))
    if difference.turn > 1:
        yield Case(template, replace(conversation, turns=conversation.turns[difference.turn - 1 :]))
    for traits in _fewer(template.traits):
        if (settled := grammar.settle(traits)) != template.traits:
            yield Case(grammar.build(settled, template.date), conversation)
    if template.date != grammar.DATES[0]:
        yield Case(grammar.build(template.traits), conversation)
    for other in _shorter(conversation):
        yield Case(template, other)


def _fewer(traits: Traits) -> Iterator[Traits]:
    """Single unusual traits first, because most differences need only one; then all but one."""
    unusual = traits.unusual()
    if len(unusual) > 1:
        yield from (Traits(**{name: word}) for name, word in unusual.items())
    yield from (replace(traits, **{name: grammar.OPTIONS[name][0]}) for name in unusual)


def _shorter(whole: Conversation) -> Iterator[Conversation]:
    for place, turn in enumerate(whole.turns):
        yield replace(whole, turns=whole.turns[:place] + whole.turns[place + 1 :])
        for simpler in _simpler(turn):
            yield replace(whole, turns=(*whole.turns[:place], simpler, *whole.turns[place + 1 :]))
    for place, message in enumerate(whole.prompt):
        if len(whole.prompt) > 1:
            yield replace(whole, prompt=whole.prompt[:place] + whole.prompt[place + 1 :])
        for other in _plainer(message):
            yield replace(whole, prompt=(*whole.prompt[:place], other, *whole.prompt[place + 1 :]))
    if whole.spacing:
        yield replace(whole, spacing=0)
    if whole.tools:
        yield replace(whole, tools=False)


def _simpler(turn: Turn) -> Iterator[Turn]:
    for place, message in enumerate(turn.environment):
        rest = turn.environment[:place], turn.environment[place + 1 :]
        yield replace(turn, environment=(*rest[0], *rest[1]))
        for other in _plainer(message):
            yield replace(turn, environment=(*rest[0], other, *rest[1]))
    for other in _plainer(turn.answer):
        yield replace(turn, answer=other)
    if turn.ending != "stop":
        yield replace(turn, ending="stop")
    if turn.free:
        yield replace(turn, free=False)


def _plainer(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in message:
        if name not in ("role", "content", "tool_call_id"):
            yield {key: value for key, value in message.items() if key != name}
    calls = message.get("tool_calls", ())
    if len(calls) > 1:
        yield from ({**message, "tool_calls": [call]} for call in calls)
    content = message.get("content")
    if "content" in message and content not in ("x", ""):
        yield {**message, "content": "x"}
