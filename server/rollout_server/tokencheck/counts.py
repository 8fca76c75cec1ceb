"""Counts over all that was played."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rollout_server.edge.tokens.rendering_form import Arguments
from rollout_server.tokencheck.boundary import Cause, Mask, SimulatedConversation, TurnBoundary
from rollout_server.tokencheck.model_output import Writing
from rollout_server.tokencheck.verdict import FormCounts, ReportRow, ShortForm, Worst


def partings(played: Iterable[SimulatedConversation]) -> int:
    """At how many boundaries the template is at fault. What the tokenizer alone does is not its doing."""
    return sum(
        boundary.parting is not None and boundary.parting.cause is not Cause.RETOKENISED
        for each in played
        for boundary in each.boundaries
    )


def among(played: Iterable[SimulatedConversation], form: Arguments, *writings: Writing) -> list[SimulatedConversation]:
    """Those in a form and some way of writing."""
    return [each for each in played if each.form is form and each.writing in writings]


def short_form(played: Iterable[SimulatedConversation]) -> ShortForm:
    """How often the short form was compared with the full rendering, and how often it was the same."""
    seen = [b.short_form for each in played for b in each.boundaries if b.short_form is not None]
    return ShortForm(len(seen), sum(seen))


def tallies(played: Sequence[SimulatedConversation]) -> tuple[FormCounts, ...]:
    """By form and writing, where anything was compared."""
    found = []
    for form in Arguments:
        for writing in Writing:
            boundaries = [boundary for each in among(played, form, writing) for boundary in each.boundaries]
            if boundaries:
                found.append(FormCounts(form, writing, _masks(boundaries), _worst(boundaries)))
    return tuple(found)


def rows(played: Sequence[SimulatedConversation], form: Arguments) -> tuple[ReportRow, ...]:
    """By kind, in the order in which they were played."""
    kinds = dict.fromkeys(each.kind for each in played)
    return tuple(_row(kind, [each for each in played if each.kind == kind], form) for kind in kinds)


def _row(kind: str, played: Sequence[SimulatedConversation], form: Arguments) -> ReportRow:
    plain = among(played, form, Writing.TEMPLATE) or among(played, form, Writing.SPELLING)
    boundaries = [boundary for each in plain for boundary in each.boundaries]
    causes = Counter(boundary.parting.cause for boundary in boundaries if boundary.parting is not None)
    others = [b for each in played if each.form is form and each not in plain for b in each.boundaries]
    return ReportRow(
        kind=kind,
        boundaries=len(boundaries),
        kept=sum(boundary.parting is None for boundary in boundaries),
        causes=dict(causes),
        masks=_masks(boundaries),
        wrong_otherwise=(sum(boundary.mask is not Mask.RIGHT for boundary in others), len(others)),
        refused=tuple(dict.fromkeys(each.refused for each in plain if each.refused)),
        left_out=tuple(sorted({word for each in plain for word in each.left_out})),
        uncut=sum(bool(each.uncut) for each in plain),
    )


def _masks(boundaries: Iterable[TurnBoundary]) -> dict[Mask, int]:
    counted = Counter(boundary.mask for boundary in boundaries)
    return {mask: counted[mask] for mask in Mask}


def _worst(boundaries: Iterable[TurnBoundary]) -> Worst | None:
    wrong = [boundary for boundary in boundaries if boundary.mask is not Mask.RIGHT]
    if not wrong:
        return None
    worst = max(wrong, key=lambda b: (b.mask is Mask.NEGATIVE, abs(b.counted - b.added)))
    cause = worst.parting.cause if worst.parting is not None else None
    return Worst(worst.kind, worst.answer, worst.added, worst.counted, cause)
