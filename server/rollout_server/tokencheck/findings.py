"""Faults of a template, the conditions under which it is stable, and advice."""

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
    Cause.THINKING: "the template drops the thinking of earlier completions",
    Cause.SPACE: "the template changes white space in completions",
    Cause.ARGUMENTS: "the template spells tool call arguments differently from the model",
    Cause.TWICE: "the template encodes arguments twice: it receives JSON text and writes it as a JSON string",
    Cause.SEPARATOR: "the template changes the stop token, or the text after it, when a completion is not the last message",
    Cause.PROMPT: "the template does not keep the generation prompt in front of the completion",
    Cause.TOOLS: "the template moves the tools when the conversation continues",
    Cause.HISTORY: "the template rewrites earlier messages when the conversation continues",
    Cause.RETOKENISED: "the same text is encoded to other tokens",
}
_NEEDED = ("completions", "content next to tool calls", "tool calls", "tool results", "user messages")


_TEMPLATE = (
    "use an append-only template, and the same file on both sides: ROLLOUT_TEMPLATES=NAME=FILE for this server, and the "
    "trainer's own setting; check the file first with --template FILE"
)
_UNREADABLE = (ArgumentsTrait.TWICE, ArgumentsTrait.REFUSED, ArgumentsTrait.LEFT_OUT)
_WRITING_TEXTS = {
    Writing.TEMPLATE: "as the template writes them",
    Writing.SPELLING: "with arguments in the model's own spelling",
    Writing.TOKENS: "with the same text in other tokens",
}


def find_faults(
    simulated: Sequence[SimulatedConversation], probed: TemplateTraits, traits: Traits
) -> Iterator[Finding]:
    """Yield the faults of the template, the most frequent first. `simulated` are the conversations in `Writing.TEMPLATE`."""
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
            else f"; the next special token is {probed.final.text}, which begins every message"
        )
        text = f"the template closes completions with no special token, so a model cannot learn to end them{borrowed}"
        yield Finding(TemplateFault.NO_STOP, text, 0)
    uncut = [each for each in simulated if each.uncut]
    if uncut:
        text = f"the turn boundary cannot be found, so the server guesses the environment and warns ({_kinds(uncut)})"
        yield Finding(TemplateFault.NO_PLACE, text, len(uncut))
    for word in _NEEDED:
        without = [each for each in simulated if word in each.left_out]
        if without:
            yield Finding(TemplateFault.LEFT_OUT, f"the template leaves out {word} ({_kinds(without)})", len(without))
    if traits.dated is DateTrait.TIME:
        yield Finding(TemplateFault.TIME, "the template prints the time of day, which changes between turns", 0)


def stability_conditions(traits: Traits, form: Arguments) -> Iterator[str]:
    """Yield the conditions under which the template is stable."""
    other = next(each for each in Arguments if each is not form)
    if (
        traits.arguments[form] not in (ArgumentsTrait.REFUSED, ArgumentsTrait.LEFT_OUT)
        and traits.arguments[other] is not traits.arguments[form]
    ):
        form_text = (
            "objects, not as the received text" if form is Arguments.PARSED else "the received text, not as objects"
        )
        yield f"tool call arguments are passed to the template as {form_text} ({traits.arguments[other].value} otherwise)"
    if traits.dated is DateTrait.DAY:
        yield "a rollout keeps one date: the template prints the date, so its tokens change at midnight"
    if traits.empty_tools_differ:
        yield "both sides pass the same value for no tools: the template renders an empty list differently from none"
    if all(trait is ArgumentsTrait.REFUSED for trait in traits.arguments.values()):
        yield "the agent calls no tools: the template refuses conversations with tool calls"


def find_cautions(
    simulated: Sequence[SimulatedConversation],
    stops: Stops,
    traits: Traits,
    short_form: ShortForm,
    *,
    needs_names: bool,
) -> Iterator[str]:
    """Yield facts that are not faults but matter for training. `needs_names`: see `TemplateTraits`."""
    if needs_names:
        yield (
            "tool results need the name of the tool, which results of this server's tools do not have: token mode adds it; a "
            "trainer or engine that gets messages must add it before it renders"
        )
    thoughtless = [each for each in simulated if "reasoning_content" in each.left_out]
    if thoughtless:
        yield "reasoning_content is not rendered: thinking that a parser removes from a completion is missing in later turns"
    if any("system messages" in each.left_out for each in simulated):
        yield "system messages are not rendered"
    if not traits.tools_shown and any(trait is not ArgumentsTrait.REFUSED for trait in traits.arguments.values()):
        yield "the template does not render the tools: describe them in a message"
    again = [
        each for each in simulated for b in each.boundaries if b.divergence and b.divergence.cause is Cause.RETOKENISED
    ]
    if again:
        yield f"the same text is encoded to other tokens than were generated ({_kinds(again)})"
    refused = [each for each in simulated if each.refused]
    if refused:
        yield f"the template refuses some conversations ({_kinds(refused)}); such rollouts fail with the template's message"
    ends = [stop for stop in (stops.final, stops.calls) if stop is not None]
    if ends and (stops.eos is None or {stop.id for stop in ends} != {stops.eos.id}):
        eos = "there is no eos_token" if stops.eos is None else f"eos_token is {stops.eos.text}"
        trait = " and ".join(dict.fromkeys(stop.text for stop in ends))
        yield f"completions end with {trait}, but {eos}: an engine that stops only at eos_token continues after a completion"
    if not traits.closed and stops.final is not None:
        yield f"a completion ends with the first token of the next message ({stops.final.text}): the engine must stop there"
    if not short_form.holds:
        yield "the environment depends on more of the history than the short form keeps: turns cost more as a rollout grows"


def _example(diverged: Sequence[TurnBoundary], cause: Cause) -> Example | None:
    """Return an example of the cause: the first one with the largest difference in length."""
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
    """Yield advice, the most effective first.

    Args:
        faults: of the template.
        form: the form of arguments that the verdict is about.
        traits: of the template.
        counts: the masks of trainers that count by lengths.
        switches: tried template variables, with the number of boundaries that diverge.
    """
    kinds = {finding.fault for finding in faults}
    stable = [name for name, diverged in switches.items() if diverged == 0]
    if stable:
        yield f"set one of these template variables, with which no boundary diverges: {', '.join(stable)}"
    if kinds - {TemplateFault.TIME}:
        yield _TEMPLATE
    if TemplateFault.TIME in kinds:
        yield "remove the time of day from the template, or pass it as a template variable"
    if kinds & set(Cause):
        yield (
            "set ROLLOUT_ON_DRIFT=fail, or on_drift in a request's metadata, to end rollouts whose history was rewritten; by "
            "default they continue in a new training sample"
        )
    if form is Arguments.PARSED and traits.arguments[Arguments.RECEIVED] in _UNREADABLE:
        yield "have the trainer parse arguments before rendering; the server detects this from the trainer's prompts"
    wrong = [count for count in counts if count.form is form and count.boundaries > count.masks[Mask.RIGHT]]
    if wrong:
        worst = max(wrong, key=lambda count: count.boundaries - count.masks[Mask.RIGHT])
        number = worst.boundaries - worst.masks[Mask.RIGHT]
        yield (
            "do not count by lengths: keep prompt ids + generated ids + environment ids, as the samples of this server do. "
            f"For completions {_WRITING_TEXTS[worst.writing]}, {number} of {worst.boundaries} masks are wrong"
        )
    if any(count.masks[Mask.NEGATIVE] for count in counts if count.form is form):
        yield (
            "if the length is negative, a trainer of the synchronous HTTP API accepts no mask, and the rollout ends as "
            "token_drift; the asynchronous HTTP API (POST /v1/rollout/init) sends ids and needs no mask"
        )
