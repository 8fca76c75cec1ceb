"""What the check comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum

from rollout_server.core.message import JSON
from rollout_server.edge.tokens.rendering_form import Arguments
from rollout_server.edge.tokens.template_probe import StopToken
from rollout_server.tokencheck.boundary import Cause, Mask
from rollout_server.tokencheck.model_output import Writing
from rollout_server.tokencheck.template_traits import Traits


class TemplateFault(Enum):
    """What makes a template unsafe, besides the causes for which a rendering diverges from the reference."""

    NO_STOP = "no stop"
    NO_PLACE = "no place to cut"
    LEFT_OUT = "left out"
    TIME = "prints the time"


@dataclass(frozen=True, slots=True)
class Example:
    """Where something was seen: what was there, and what a rendering makes of it; `index` is the token at which they diverge."""

    kind: str
    truth: str
    rendered: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, in words, at how many boundaries of how many, with an example of it."""

    fault: Cause | TemplateFault
    text: str
    boundaries: int
    example: Example | None = None


@dataclass(frozen=True, slots=True)
class Worst:
    """The worst count of a trainer that counts by lengths: at the boundary after message `answer`, in tokens."""

    kind: str
    answer: int
    added: int
    counted: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class FormCounts:
    """How a trainer counts that renders everything anew, with arguments in this form, when answers are written so."""

    form: Arguments
    writing: Writing
    masks: Mapping[Mask, int]
    worst: Worst | None

    @property
    def boundaries(self) -> int:
        """All that were compared."""
        return sum(self.masks.values())


@dataclass(frozen=True, slots=True)
class ReportRow:
    """A kind of conversation, in the form that suits the template best.

    Args:
        boundaries: that were compared.
        kept: at which the rendering is what was there.
        causes: why it is not at the others.
        masks: what counting by lengths comes to.
        wrong_otherwise: wrong masks when answers are spelled or tokenised in another way than the template's, and of how many.
        refused: the template's words, each once.
        left_out: what it does not render.
        uncut: conversations in which no place was found at which the environment begins.
    """

    kind: str
    boundaries: int
    kept: int
    causes: Mapping[Cause, int]
    masks: Mapping[Mask, int]
    wrong_otherwise: tuple[int, int]
    refused: tuple[str, ...]
    left_out: tuple[str, ...]
    uncut: int


@dataclass(frozen=True, slots=True)
class Stops:
    """What closes answers, without calls and with calls, and the tokenizer's own end token."""

    final: StopToken | None
    calls: StopToken | None
    eos: StopToken | None


@dataclass(frozen=True, slots=True)
class ShortForm:
    """At how many boundaries what follows an answer was rendered behind a short history too, and at how many it was the same."""

    compared: int
    equal: int

    @property
    def holds(self) -> bool:
        """No difference was seen."""
        return 0 < self.compared == self.equal


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Whether a tokenizer and its template are safe for training on token masks.

    Args:
        refusal: why the server would not take them; empty: it does.
        usable: it does, and conversations could be compared.
        stable: a conversation that goes on is rendered as it was, and then some, if the conditions hold.
        form: of arguments, the one in which least goes wrong.
        generation_prompt: an answer that is not rendered behind its own generation prompt; None: each is.
        short_form: the short form against the full rendering. Rollouts in which they differ render every turn in full.
        switches_tried: template arguments that were tried, and how many boundaries part with them; only for unstable templates.
    """

    tokenizer: str
    template: str
    refusal: str
    usable: bool
    stable: bool
    form: Arguments
    stops: Stops
    traits: Traits
    generation_prompt: Example | None
    short_form: ShortForm
    faults: tuple[Finding, ...]
    conditions: tuple[str, ...]
    cautions: tuple[str, ...]
    advice: tuple[str, ...]
    tallies: tuple[FormCounts, ...]
    rows: tuple[ReportRow, ...]
    switches_tried: Mapping[str, int]


def report_json(value: object) -> JSON:
    """A report as JSON. Halves of surrogate pairs, which UTF-8 does not have, become question marks."""
    if isinstance(value, Enum):
        return report_json(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: report_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(report_json(key)): report_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [report_json(each) for each in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value).encode("utf-8", "replace").decode("utf-8")
