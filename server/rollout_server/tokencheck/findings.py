"""What is wrong with a template, under which conditions it is right, and what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rollout_server.edge.tokens.rendering_form import Arguments
from rollout_server.edge.tokens.template_probe import TemplateTraits
from rollout_server.tokencheck.boundary import Cause, Mask, SimulatedConversation, TurnBoundary
from rollout_server.tokencheck.model_output import Writing
from rollout_server.tokencheck.report import Example, Finding, FormCounts, ShortForm, Stops, TemplateFault
from rollout_server.tokencheck.template_traits import ArgumentsTrait, DateTrait, Traits

_CAUSES = {
    Cause.THINKING: "the template drops the thinking of earlier answers",
    Cause.SPACE: "the template changes white space in what the model said",
    Cause.ARGUMENTS: "the template spells arguments of calls in another way than the model did",
    Cause.TWICE: "the template encodes arguments twice: they are text, and it makes a JSON string of it",
    Cause.SEPARATOR: "the template puts another stop, or another text after it, behind an answer that is no longer the last",
    Cause.PROMPT: "the generation prompt does not stay in front of the answer that was generated behind it",
    Cause.TOOLS: "the template puts the tools in another place when the conversation goes on",
    Cause.HISTORY: "the template writes what was there before in another way when the conversation goes on",
    Cause.RETOKENISED: "the same text is encoded in other tokens",
}
_NEEDED = ("answers", "content beside tool calls", "tool calls", "tool results", "user messages")


_TEMPLATE = (
    "use a template that only ever appends, and the same file on both sides: ROLLOUT_TEMPLATES=NAME=FILE here, the trainer's "
    "own setting there; try it first with --template FILE"
)
_UNREADABLE = (ArgumentsTrait.TWICE, ArgumentsTrait.REFUSED, ArgumentsTrait.LEFT_OUT)
_WRITING_TEXTS = {
    Writing.TEMPLATE: "as the template writes them",
    Writing.SPELLING: "with arguments in a spelling of the model's own",
    Writing.TOKENS: "in the same text but other tokens",
}


def find_faults(
    simulated: Sequence[SimulatedConversation], probed: TemplateTraits, traits: Traits
) -> Iterator[Finding]:
    """What is wrong with the template itself, the most frequent first. `simulated` are those written as the template writes."""
    diverged = [boundary for each in simulated for boundary in each.boundaries if boundary.divergence is not None]
    counted = Counter(boundary.divergence.cause for boundary in diverged if boundary.divergence is not None)
    for cause, number in counted.most_common():
        if cause is Cause.RETOKENISED:
            continue
        yield Finding(cause, _CAUSES[cause], number, _example(diverged, cause))
    if not probed.refusal and (probed.final is None or (not traits.closed and probed.final.text in traits.opening)):
        borrowed = (
            ""
            if probed.final is None
            else f"; the first that follows is {probed.final.text}, which begins all messages"
        )
        text = f"the template closes answers with no special token, so that a model cannot learn to end one{borrowed}"
        yield Finding(TemplateFault.NO_STOP, text, 0)
    uncut = [each for each in simulated if each.uncut]
    if uncut:
        text = f"no place shows where the environment begins behind an answer, so the server guesses and warns ({_kinds(uncut)})"
        yield Finding(TemplateFault.NO_PLACE, text, len(uncut))
    for word in _NEEDED:
        without = [each for each in simulated if word in each.left_out]
        if without:
            yield Finding(TemplateFault.LEFT_OUT, f"the template leaves out {word} ({_kinds(without)})", len(without))
    if traits.dated is DateTrait.TIME:
        yield Finding(TemplateFault.TIME, "the template prints the time of day, which is another in every turn", 0)


def stability_conditions(traits: Traits, form: Arguments) -> Iterator[str]:
    """What has to be so for the template to be stable."""
    other = next(each for each in Arguments if each is not form)
    if (
        traits.arguments[form] not in (ArgumentsTrait.REFUSED, ArgumentsTrait.LEFT_OUT)
        and traits.arguments[other] is not traits.arguments[form]
    ):
        form_text = (
            "objects, not as the text that came" if form is Arguments.PARSED else "the text that came, not as objects"
        )
        yield f"arguments of calls are given to the template as {form_text} ({traits.arguments[other].value} otherwise)"
    if traits.dated is DateTrait.DAY:
        yield "a rollout keeps one date: the template prints it, and its tokens change at midnight"
    if traits.empty_tools_differ:
        yield "no tools is said in one way on both sides: an empty list is not rendered as none is"
    if all(trait is ArgumentsTrait.REFUSED for trait in traits.arguments.values()):
        yield "no tools are called: the template refuses conversations with calls"


def find_cautions(
    simulated: Sequence[SimulatedConversation], stops: Stops, traits: Traits, short_form: ShortForm
) -> Iterator[str]:
    """What is no fault, but good to know."""
    thoughtless = [each for each in simulated if "reasoning_content" in each.left_out]
    if thoughtless:
        yield "reasoning_content is not rendered: thinking that a parser takes out of an answer is lost to later turns"
    if any("system messages" in each.left_out for each in simulated):
        yield "system messages are not rendered"
    if not traits.tools_shown and any(trait is not ArgumentsTrait.REFUSED for trait in traits.arguments.values()):
        yield "the template does not show the tools it is given: describe them in a message"
    again = [
        each for each in simulated for b in each.boundaries if b.divergence and b.divergence.cause is Cause.RETOKENISED
    ]
    if again:
        yield f"rendered text is encoded in other tokens than were generated even where it is the same ({_kinds(again)})"
    refused = [each for each in simulated if each.refused]
    if refused:
        yield f"the template refuses some conversations ({_kinds(refused)}); such rollouts end with its words"
    ends = [stop for stop in (stops.final, stops.calls) if stop is not None]
    if ends and (stops.eos is None or {stop.id for stop in ends} != {stops.eos.id}):
        eos = "there is no eos_token" if stops.eos is None else f"eos_token is {stops.eos.text}"
        trait = " and ".join(dict.fromkeys(stop.text for stop in ends))
        yield f"answers end with {trait}, but {eos}: an engine that stops at that alone goes on behind an answer"
    if not traits.closed and stops.final is not None:
        yield f"no token of its own closes an answer: the next message does ({stops.final.text}), and an engine has to stop there"
    if not short_form.holds:
        yield "what follows an answer depends on more of the history than is cheap to render: turns cost more as a rollout grows"


def _example(diverged: Sequence[TurnBoundary], cause: Cause) -> Example | None:
    """The first of those where lengths differ most."""
    found = [
        (boundary, each) for boundary in diverged if (each := boundary.divergence) is not None and each.cause is cause
    ]
    worst = max(found, key=lambda pair: abs(pair[0].counted - pair[0].added), default=None)
    if worst is None:
        return None
    boundary, divergence = worst
    return Example(boundary.kind, divergence.reference, divergence.rendered, divergence.index)


def _kinds(simulated: Sequence[SimulatedConversation]) -> str:
    kinds = list(dict.fromkeys(each.kind for each in simulated))
    return ", ".join(kinds[:4]) + (f" and {len(kinds) - 4} more" if len(kinds) > 4 else "")


def suggest_changes(
    faults: Sequence[Finding],
    form: Arguments,
    traits: Traits,
    counts: Sequence[FormCounts],
    switches: Mapping[str, int],
) -> Iterator[str]:
    """One sentence for each thing to do, in the order in which it helps most.

    Args:
        faults: of the template.
        form: of arguments, the one that is judged.
        traits: of the template.
        counts: the masks of trainers that count by lengths.
        switches: template arguments that were tried, and how many boundaries part with them.
    """
    kinds = {finding.fault for finding in faults}
    stable = [name for name, diverged in switches.items() if diverged == 0]
    if stable:
        yield f"give the template one of these arguments, with which nothing parted: {', '.join(stable)}"
    if kinds - {TemplateFault.TIME}:
        yield _TEMPLATE
    if TemplateFault.TIME in kinds:
        yield "take the time of day out of the template, or give it as a template argument"
    if kinds & set(Cause):
        yield (
            "have rollouts end where the history was rewritten rather than go on in another training sample: "
            "ROLLOUT_ON_DRIFT=fail, or on_drift in a request's metadata"
        )
    if form is Arguments.PARSED and traits.arguments[Arguments.RECEIVED] in _UNREADABLE:
        yield "have the trainer parse arguments before it renders them; the server learns from its prompts that it does"
    wrong = [count for count in counts if count.form is form and count.boundaries > count.masks[Mask.RIGHT]]
    if wrong:
        worst = max(wrong, key=lambda count: count.boundaries - count.masks[Mask.RIGHT])
        number = worst.boundaries - worst.masks[Mask.RIGHT]
        yield (
            "do not count by lengths: keep prompt ids + generated ids + environment ids, as the samples of this server do. "
            f"Answers written {_WRITING_TEXTS[worst.writing]} get {number} of {worst.boundaries} masks wrong"
        )
    if any(count.masks[Mask.NEGATIVE] for count in counts if count.form is form):
        yield (
            "where the length is negative no mask exists that a trainer of the synchronous HTTP dialect would take, and the "
            "rollout ends as token_drift; the asynchronous dialect (POST /v1/rollout/init) sends ids and needs no such mask"
        )
