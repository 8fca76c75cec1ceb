"""What to switch on, here or at the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rollout_server.edge.tokens.rendering_form import Arguments
from rollout_server.tokencheck.boundary import Cause, Mask
from rollout_server.tokencheck.model_output import Writing
from rollout_server.tokencheck.template_traits import ArgumentsTrait, Traits
from rollout_server.tokencheck.verdict import Finding, FormCounts, TemplateFault

_TEMPLATE = (
    "use a template that only ever appends, and the same file on both sides: ROLLOUT_TEMPLATES=NAME=FILE here, the trainer's "
    "own setting there; try it first with --template FILE"
)
_UNREADABLE = (ArgumentsTrait.TWICE, ArgumentsTrait.REFUSED, ArgumentsTrait.LEFT_OUT)
_WRITTEN = {
    Writing.TEMPLATE: "as the template writes them",
    Writing.SPELLING: "with arguments in a spelling of the model's own",
    Writing.TOKENS: "in the same text but other tokens",
}


def advice(
    faults: Sequence[Finding],
    form: Arguments,
    traits: Traits,
    tallies: Sequence[FormCounts],
    switches: Mapping[str, int],
) -> Iterator[str]:
    """One sentence for each thing to do, in the order in which it helps most.

    Args:
        faults: of the template.
        form: of arguments, the one that is judged.
        traits: of the template.
        tallies: the masks of trainers that count by lengths.
        switches: template arguments that were tried, and how many boundaries part with them.
    """
    kinds = {finding.fault for finding in faults}
    stable = [name for name, parted in switches.items() if parted == 0]
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
    wrong = [tally for tally in tallies if tally.form is form and tally.boundaries > tally.masks[Mask.RIGHT]]
    if wrong:
        worst = max(wrong, key=lambda tally: tally.boundaries - tally.masks[Mask.RIGHT])
        number = worst.boundaries - worst.masks[Mask.RIGHT]
        yield (
            "do not count by lengths: keep prompt ids + generated ids + environment ids, as the samples of this server do. "
            f"Answers written {_WRITTEN[worst.writing]} get {number} of {worst.boundaries} masks wrong"
        )
    if any(tally.masks[Mask.NEGATIVE] for tally in tallies if tally.form is form):
        yield (
            "where the length is negative no mask exists that a trainer of the synchronous HTTP dialect would take, and the "
            "rollout ends as token_drift; the asynchronous dialect (POST /v1/rollout/init) sends ids and needs no such mask"
        )
