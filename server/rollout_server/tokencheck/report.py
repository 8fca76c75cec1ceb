"""The report of the check."""

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
    """Faults that make a template unsafe, other than the causes of divergence."""

    NO_STOP = "no stop"
    NO_PLACE = "no place to cut"
    LEFT_OUT = "left out"
    TIME = "prints the time"


@dataclass(frozen=True, slots=True)
class Example:
    """An example: the expected text and the rendered text. `index` is the token at which they diverge."""

    kind: str
    truth: str
    rendered: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault with its description, the number of boundaries it affects, and an example."""

    fault: Cause | TemplateFault
    text: str
    boundaries: int
    example: Example | None = None


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest error of a trainer that counts by lengths, in tokens, at the boundary after message `answer`."""

    kind: str
    answer: int
    added: int
    counted: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class FormCounts:
    """The masks of a trainer that counts by lengths, for one form of arguments and one way of writing completions."""

    form: Arguments
    writing: Writing
    masks: Mapping[Mask, int]
    worst: Worst | None

    @property
    def boundaries(self) -> int:
        """Number of compared boundaries."""
        return sum(self.masks.values())


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One kind of conversation, in the form of arguments that suits the template best.

    Args:
        boundaries: number of compared boundaries.
        kept: number of boundaries at which the rendering equals the reference.
        causes: why it differs at the others.
        masks: the results of counting by lengths.
        wrong_otherwise: (wrong masks, boundaries) for completions that are spelled or tokenized differently from the template.
        refused: the template's error messages, each once.
        left_out: kinds of content that the template does not render.
        uncut: number of conversations in which a turn boundary was not found.
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
    """The stop tokens of completions without and with tool calls, and the tokenizer's `eos_token`."""

    final: StopToken | None
    calls: StopToken | None
    eos: StopToken | None


@dataclass(frozen=True, slots=True)
class ShortForm:
    """Number of boundaries at which the short form was compared with the full rendering, and at which both were equal."""

    compared: int
    equal: int

    @property
    def holds(self) -> bool:
        """True if boundaries were compared and none differed."""
        return 0 < self.compared == self.equal


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Whether a tokenizer and its template are safe for training with token masks.

    Args:
        refusal: why the server would refuse them; empty if it accepts them.
        usable: the server accepts them, and at least one boundary was compared.
        stable: if the conditions hold, each later rendering begins with the earlier tokens.
        form: the form of arguments with the fewest divergences.
        generation_prompt: a completion that is not rendered after its generation prompt; None if there is none.
        short_form: the short form compared with the full rendering. If they differ, rollouts render every turn in full.
        switches_tried: template variables that were tried, with the number of diverging boundaries; only for unstable
            templates.
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
    """Return a report as JSON. Unpaired surrogates, which UTF-8 cannot encode, become question marks."""
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
