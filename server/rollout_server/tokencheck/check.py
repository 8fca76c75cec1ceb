"""Run the check: all conversations, both forms of arguments, three ways of writing completions, and the counts over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from rollout_server.core.ledger import pack_tokens
from rollout_server.core.message import JSON
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.edge.tokens.rendering_form import Arguments, with_names
from rollout_server.edge.tokens.template_probe import StopToken
from rollout_server.edge.tokens.tokenizer import ChatTokenizer, Frame, LoadedTokenizer
from rollout_server.tokencheck.boundary import Cause, Mask, SimulatedConversation, TurnBoundary
from rollout_server.tokencheck.conversation import CheckConversation
from rollout_server.tokencheck.findings import find_cautions, find_faults, stability_conditions, suggest_changes
from rollout_server.tokencheck.hard_conversations import hard_conversations
from rollout_server.tokencheck.model_output import Writing
from rollout_server.tokencheck.report import Example, FormCounts, ReportRow, ShortForm, Stops, TemplateReport, Worst
from rollout_server.tokencheck.simulate import Simulator
from rollout_server.tokencheck.template import Template
from rollout_server.tokencheck.template_traits import ArgumentsTrait, Traits, find_traits

_SWITCHES = 6
"""Maximum number of template variables to try. Each one runs all simulations twice more."""
_CONTROLS = 12
"""Number of special tokens in the text of messages, in addition to the stop tokens."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The tokenizer and template to check.

    Args:
        tokenizer: with the template to check.
        name: display name of the tokenizer.
        template: display name of the template.
        template_kwargs: template variables for every rendering.
        ends: stop ids of the model's generation config.
    """

    tokenizer: ChatTokenizer
    name: str
    template: str
    template_kwargs: Mapping[str, JSON]
    ends: Sequence[int] = ()


def check(subject: Subject, more: Sequence[CheckConversation] = ()) -> TemplateReport:
    """Simulate the built-in conversations and then `more`, and return the report. Takes seconds.

    Raises `RolloutFailed` (VALIDATION) for template variables that a rollout may not set.
    """
    with ThreadPoolExecutor(1) as executor:
        loaded = LoadedTokenizer(subject.name, subject.tokenizer, executor, subject.ends)
        Renderer(loaded, (), subject.template_kwargs)  # raises for the template variables that a rollout may not set
        frame = Frame(None, subject.template_kwargs)
        template = Template(loaded, subject.tokenizer.added_tokens_decoder, frame)
        return _report(subject, template, [*_conversations(template), *more])


def _conversations(template: Template) -> Iterator[CheckConversation]:
    """Yield the built-in conversations. Tool results have no name, as those of this server, unless the template needs one."""
    conversations = hard_conversations(_controls(template))
    if template.loaded.probed.needs_names:
        conversations = (replace(each, messages=tuple(with_names(each.messages))) for each in conversations)
    yield from conversations


def _controls(template: Template) -> list[str]:
    """Return control tokens to put into the text of messages: the stop tokens and some others."""
    texts = [stop.text for stop in template.loaded.probed.stops]
    return list(dict.fromkeys((*texts, *sorted(template.special)[:_CONTROLS], *texts)))


def _report(subject: Subject, template: Template, conversations: Sequence[CheckConversation]) -> TemplateReport:
    probed, found = template.loaded.probed, find_traits(template, subject.tokenizer)
    simulated = list(_simulate(template, found, conversations, Writing))
    forms = sorted(_forms(found), key=lambda form: form is not found.natural)
    form = min(forms, key=lambda form: count_divergences(select_simulated(simulated, form, Writing.TEMPLATE)))
    best = select_simulated(simulated, form, Writing.TEMPLATE)
    wrong = tuple(find_faults(best, probed, found))
    switches_tried = _try_switches(template, found, conversations, best) if count_divergences(best) else {}
    stops, counts = Stops(probed.final, probed.calls, _eos(subject.tokenizer)), form_counts(simulated)
    usable = not probed.refusal and any(each.boundaries for each in best)
    short = short_form_counts(best)
    unprompted = (Example(each.kind, *each.unprompted) for each in best if each.unprompted is not None)
    return TemplateReport(
        tokenizer=subject.name,
        template=subject.template,
        refusal=probed.refusal,
        usable=usable,
        stable=usable and not wrong,
        form=form,
        stops=stops,
        traits=found,
        generation_prompt=next(unprompted, None),
        short_form=short,
        faults=wrong,
        conditions=tuple(stability_conditions(found, form)),
        cautions=tuple(find_cautions(best, stops, found, short, needs_names=probed.needs_names)),
        advice=tuple(suggest_changes(wrong, form, found, counts, switches_tried)),
        tallies=counts,
        rows=report_rows(simulated, form),
        switches_tried=switches_tried,
    )


def _forms(found: Traits) -> list[Arguments]:
    """Return the forms of arguments that the template accepts. The form that the API carries comes first."""
    taken = [
        form for form in (Arguments.RECEIVED, Arguments.PARSED) if found.arguments[form] is not ArgumentsTrait.REFUSED
    ]
    return taken or [Arguments.RECEIVED]


def _simulate(
    template: Template, found: Traits, conversations: Iterable[CheckConversation], writings: Iterable[Writing]
) -> Iterator[SimulatedConversation]:
    simulator, forms, writings = Simulator(template, found.natural), _forms(found), list(writings)
    for conversation in conversations:
        if conversation.has_calls:
            yield from simulator.simulate(conversation, forms, writings)
            continue
        # Without calls both forms render the same.
        for simulated in simulator.simulate(conversation, forms[:1], writings):
            yield from (replace(simulated, form=form) for form in forms)


def _try_switches(
    template: Template, found: Traits, conversations: Sequence[CheckConversation], best: Sequence[SimulatedConversation]
) -> dict[str, int]:
    """Return the number of diverging boundaries for each template variable set to true or false.

    Settings with which the template refuses more conversations than before are skipped.
    """
    compared = sum(len(each.boundaries) for each in best)
    divergences: dict[str, int] = {}
    for name in [name for name in found.switches if name not in template.frame.template_kwargs][:_SWITCHES]:
        for value in (True, False):
            simulated = list(
                _simulate(template.with_arguments({name: value}), found, conversations, [Writing.TEMPLATE])
            )
            same = select_simulated(simulated, best[0].form, Writing.TEMPLATE)
            if sum(len(each.boundaries) for each in same) >= compared:
                divergences[f"{name}={str(value).lower()}"] = count_divergences(same)
    return divergences


def _eos(tokenizer: ChatTokenizer) -> StopToken | None:
    index = tokenizer.eos_token_id
    return None if index is None else StopToken(tokenizer.decode(list(pack_tokens([index]))), index)


def count_divergences(simulated: Iterable[SimulatedConversation]) -> int:
    """Return the number of boundaries at which the template causes a divergence. Retokenization is not caused by the template."""
    return sum(
        boundary.divergence is not None and boundary.divergence.cause is not Cause.RETOKENISED
        for each in simulated
        for boundary in each.boundaries
    )


def select_simulated(
    simulated: Iterable[SimulatedConversation], form: Arguments, *writings: Writing
) -> list[SimulatedConversation]:
    """Return the conversations with this form and one of these ways of writing."""
    return [each for each in simulated if each.form is form and each.writing in writings]


def short_form_counts(simulated: Iterable[SimulatedConversation]) -> ShortForm:
    """Return how often the short form was compared with the full rendering, and how often both were equal."""
    comparisons = [b.short_form for each in simulated for b in each.boundaries if b.short_form is not None]
    return ShortForm(len(comparisons), sum(comparisons))


def form_counts(simulated: Sequence[SimulatedConversation]) -> tuple[FormCounts, ...]:
    """Return the mask counts by form and writing, for combinations with at least one boundary."""
    found = []
    for form in Arguments:
        for writing in Writing:
            boundaries = [
                boundary for each in select_simulated(simulated, form, writing) for boundary in each.boundaries
            ]
            if boundaries:
                found.append(FormCounts(form, writing, _masks(boundaries), _worst(boundaries)))
    return tuple(found)


def report_rows(simulated: Sequence[SimulatedConversation], form: Arguments) -> tuple[ReportRow, ...]:
    """Return one row per kind of conversation, in the order of simulation."""
    kinds = dict.fromkeys(each.kind for each in simulated)
    return tuple(_row(kind, [each for each in simulated if each.kind == kind], form) for kind in kinds)


def _row(kind: str, simulated: Sequence[SimulatedConversation], form: Arguments) -> ReportRow:
    plain = select_simulated(simulated, form, Writing.TEMPLATE) or select_simulated(simulated, form, Writing.SPELLING)
    boundaries = [boundary for each in plain for boundary in each.boundaries]
    causes = Counter(boundary.divergence.cause for boundary in boundaries if boundary.divergence is not None)
    others = [b for each in simulated if each.form is form and each not in plain for b in each.boundaries]
    return ReportRow(
        kind=kind,
        boundaries=len(boundaries),
        kept=sum(boundary.divergence is None for boundary in boundaries),
        causes=dict(causes),
        masks=_masks(boundaries),
        wrong_otherwise=(sum(boundary.mask is not Mask.RIGHT for boundary in others), len(others)),
        refused=tuple(dict.fromkeys(each.refused for each in plain if each.refused)),
        left_out=tuple(sorted({name for each in plain for name in each.left_out})),
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
    cause = worst.divergence.cause if worst.divergence is not None else None
    return Worst(worst.kind, worst.message_index, worst.added, worst.counted, cause)
