"""Findings in training samples, and their collection with a bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How bad a finding is.

    FATAL: training on the file would train on wrong tokens, or crash. WARN: it may be intended; look at it.
    """

    FATAL = "FATAL"
    WARN = "WARN"


class FindingKind(Enum):
    """The kinds of findings: a stable code, the severity, and the meaning in a few words."""

    UNREADABLE = "unreadable", Severity.FATAL, "cannot be read"
    UNKNOWN_SHAPE = "unknown_shape", Severity.FATAL, "no training sample of a supported shape"
    MISSING_FIELD = "missing_field", Severity.FATAL, "a needed list is missing, or is not a list"
    LENGTHS = "lengths", Severity.FATAL, "lists that belong together differ in length"
    TOKEN_IDS = "token_ids", Severity.FATAL, "token ids that are no ids"
    MASK_VALUES = "mask_values", Severity.FATAL, "mask values other than 0 and 1"
    PROMPT_TRAINS = "prompt_trains", Severity.FATAL, "prompt tokens with mask 1"
    LOGPROBS = "logprobs", Severity.FATAL, "logprobs that are positive, infinite or no numbers"
    MISSING_LOGPROBS = "missing_logprobs", Severity.FATAL, "trained tokens without a logprob"
    MASK_SHIFTED = "mask_shifted", Severity.FATAL, "the mask is one token late or early"
    TRAINS_TWICE = "trains_twice", Severity.FATAL, "a sampled token trains in two rows"
    INCONSISTENT = "inconsistent", Severity.FATAL, "fields of a row contradict each other"
    REWARD = "reward", Severity.FATAL, "rewards that are no finite numbers"
    NOTHING_TRAINS = "nothing_trains", Severity.FATAL, "no token of the files trains"
    ROW_WITHOUT_TRAINING = (
        "row_without_training",
        Severity.WARN,
        "no token of the row trains, and the row gives no reason",
    )
    NO_MASK = "no_mask", Severity.WARN, "no mask, so that all tokens of the response train"
    ALL_ONES = "all_ones", Severity.WARN, "all tokens train, although the response has several turns"
    MASK_EDGE = "mask_edge", Severity.WARN, "the first sampled token or the final stop token does not train"
    ZERO_LOGPROBS = "zero_logprobs", Severity.WARN, "all trained tokens have logprob 0.0"
    TRAINED_MARKERS = "trained_markers", Severity.WARN, "the template's marker of a user or tool message trains"
    PROMPT_DIVERGES = "prompt_diverges", Severity.WARN, "a turn's prompt does not extend an earlier turn"
    DUPLICATE_ROW = "duplicate_row", Severity.WARN, "equal rows without a rollout id"
    GROUP_SIZES = "group_sizes", Severity.WARN, "groups of unequal size"
    CONSTANT_REWARD = "constant_reward", Severity.WARN, "groups in which all rewards are equal"

    def __init__(self, code: str, severity: Severity, meaning: str) -> None:
        self.code = code
        self.severity = severity
        self.meaning = meaning


@dataclass(frozen=True, slots=True)
class Location:
    """Where a row is.

    Args:
        file: the file as it was named.
        number: number of the line, or of the row of a Parquet file, from 1.
        path: the row within the line, such as "turns[2]."; empty if the line is the row.
    """

    file: str
    number: int
    path: str = ""


@dataclass(frozen=True, slots=True)
class SampleFinding:
    """One finding.

    Args:
        kind: what is wrong.
        location: the row; None: the finding is about all files.
        text: what is wrong there and what was expected. It may contain untrusted text of the file.
        field: name of the list or value within the row; empty: none.
        index: index into that list, from 0; None: the finding is about the whole list.
    """

    kind: FindingKind
    location: Location | None
    text: str
    field: str = ""
    index: int | None = None

    @property
    def field_path(self) -> str:
        """The list or value as a path within the line, such as `turns[2].loss_mask`; may be empty."""
        return (("" if self.location is None else self.location.path) + self.field).rstrip(".")


class FindingLog:
    """Count findings by kind and keep the first ones.

    Args:
        limit: most findings of each severity that are kept.
    """

    def __init__(self, limit: int) -> None:
        self.counts: Counter[FindingKind] = Counter()
        self._limit = limit
        self._first: dict[Severity, list[SampleFinding]] = {severity: [] for severity in Severity}

    def add(self, findings: Iterable[SampleFinding]) -> bool:
        """Add findings and return whether one of them is fatal."""
        fatal = False
        for finding in findings:
            severity = finding.kind.severity
            fatal = fatal or severity is Severity.FATAL
            self.counts[finding.kind] += 1
            if len(self._first[severity]) < self._limit:
                self._first[severity].append(finding)
        return fatal

    def number(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(count for kind, count in self.counts.items() if kind.severity is severity)

    def first(self) -> list[SampleFinding]:
        """Return at most `limit` findings: the fatal ones first, then in the order in which they were added."""
        return [finding for severity in Severity for finding in self._first[severity]][: self._limit]


def shown_value(value: object) -> str:
    """Return a short text for a value of a file. Containers may be large, so only their type is shown."""
    if value is None or isinstance(value, bool | float | str):
        return "null" if value is None else repr(value[:50] if isinstance(value, str) else value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**30 else "a huge integer"
    return f"a value of type {type(value).__name__}"
