"""The check: all conversations, in both forms of arguments, with answers written in three ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from rollout_server.core.ledger import pack_tokens
from rollout_server.core.message import JSON
from rollout_server.edge.tokens.renderer import Renderer
from rollout_server.edge.tokens.rendering_form import Arguments
from rollout_server.edge.tokens.template_probe import StopToken
from rollout_server.edge.tokens.tokenizer import ChatTokenizer, Frame, LoadedTokenizer
from rollout_server.tokencheck.advice import advice
from rollout_server.tokencheck.boundary import SimulatedConversation
from rollout_server.tokencheck.conversation import CheckConversation
from rollout_server.tokencheck.counts import among, partings, rows, short_form, tallies
from rollout_server.tokencheck.findings import cautions, conditions, faults
from rollout_server.tokencheck.hard_conversations import hard
from rollout_server.tokencheck.model_output import Writing
from rollout_server.tokencheck.simulate import Simulator
from rollout_server.tokencheck.template import Template
from rollout_server.tokencheck.template_traits import ArgumentsTrait, Traits, traits
from rollout_server.tokencheck.verdict import Example, Stops, TemplateReport

_SWITCHES = 6
"""How many variables of a template are tried: each plays everything twice."""
_CONTROLS = 12
"""How many special tokens somebody types, besides the stops."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at.

    Args:
        tokenizer: with the template that is looked at.
        name: of the tokenizer, for people.
        template: what the template is called, for people.
        ends: ids at which the model's generation config stops.
        template_kwargs: what the template is given besides, in every rendering.
    """

    tokenizer: ChatTokenizer
    name: str
    template: str
    template_kwargs: Mapping[str, JSON]
    ends: Sequence[int] = ()


def check(subject: Subject, more: Sequence[CheckConversation] = ()) -> TemplateReport:
    """Plays the hard conversations and then `more`, and judges what came of it. Takes seconds.

    Raises `RolloutFailed` (VALIDATION) for template arguments that are not the template's.
    """
    with ThreadPoolExecutor(1) as executor:
        loaded = LoadedTokenizer(subject.name, subject.tokenizer, executor, subject.ends)
        Renderer(loaded, (), subject.template_kwargs)  # refuses arguments with which a rollout would be refused
        frame = Frame(None, subject.template_kwargs)
        template = Template(loaded, subject.tokenizer.added_tokens_decoder, frame)
        return _verdict(subject, template, [*hard(_controls(template)), *more])


def _controls(template: Template) -> list[str]:
    """Control tokens that somebody may type: the stops and some others."""
    texts = [stop.text for stop in template.loaded.probed.stops]
    return list(dict.fromkeys((*texts, *sorted(template.special)[:_CONTROLS], *texts)))


def _verdict(subject: Subject, template: Template, conversations: Sequence[CheckConversation]) -> TemplateReport:
    probed, found = template.loaded.probed, traits(template, subject.tokenizer)
    played = list(_play(template, found, conversations, Writing))
    forms = sorted(_forms(found), key=lambda form: form is not found.natural)
    form = min(forms, key=lambda form: partings(among(played, form, Writing.TEMPLATE)))
    best = among(played, form, Writing.TEMPLATE)
    wrong = tuple(faults(best, probed, found))
    tried = _tried(template, found, conversations, best) if partings(best) else {}
    stops, counts = Stops(probed.final, probed.calls, _eos(subject.tokenizer)), tallies(played)
    usable = not probed.refusal and any(each.boundaries for each in best)
    short = short_form(best)
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
        conditions=tuple(conditions(found, form)),
        cautions=tuple(cautions(best, stops, found, short)),
        advice=tuple(advice(wrong, form, found, counts, tried)),
        tallies=counts,
        rows=rows(played, form),
        switches_tried=tried,
    )


def _forms(found: Traits) -> list[Arguments]:
    """The forms of arguments that the template takes; that of the wire comes first."""
    taken = [
        form for form in (Arguments.RECEIVED, Arguments.PARSED) if found.arguments[form] is not ArgumentsTrait.REFUSED
    ]
    return taken or [Arguments.RECEIVED]


def _play(
    template: Template, found: Traits, conversations: Iterable[CheckConversation], writings: Iterable[Writing]
) -> Iterator[SimulatedConversation]:
    player, forms, writings = Simulator(template, found.natural), _forms(found), list(writings)
    for conversation in conversations:
        if conversation.has_calls:
            yield from player.play(conversation, forms, writings)
            continue
        for played in player.play(conversation, forms[:1], writings):  # without calls the forms are the same
            yield from (replace(played, form=form) for form in forms)


def _tried(
    template: Template, found: Traits, conversations: Sequence[CheckConversation], best: Sequence[SimulatedConversation]
) -> dict[str, int]:
    """How many boundaries part when a variable that the template reads is set to true or false.

    Settings with which it refuses more than before do not count.
    """
    compared = sum(len(each.boundaries) for each in best)
    parted: dict[str, int] = {}
    for name in [name for name in found.switches if name not in template.frame.template_kwargs][:_SWITCHES]:
        for value in (True, False):
            played = list(_play(template.given({name: value}), found, conversations, [Writing.TEMPLATE]))
            same = among(played, best[0].form, Writing.TEMPLATE)
            if sum(len(each.boundaries) for each in same) >= compared:
                parted[f"{name}={str(value).lower()}"] = partings(same)
    return parted


def _eos(tokenizer: ChatTokenizer) -> StopToken | None:
    index = tokenizer.eos_token_id
    return None if index is None else StopToken(tokenizer.decode(list(pack_tokens([index]))), index)
