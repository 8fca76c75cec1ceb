"""Run all checks over files and return a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_server.verification.alignment import TurnTokens, check_alignment
from rollout_server.verification.earlier_rows import EqualRows, TracePrompts, TrainedTwice
from rollout_server.verification.findings import FindingKind, FindingLog, Location, SampleFinding, Severity
from rollout_server.verification.groups import GroupChecks
from rollout_server.verification.reader import FileEntry, read_entries
from rollout_server.verification.row_checks import check_fields, check_reward, check_row
from rollout_server.verification.row_lists import SampleRow, read_lists
from rollout_server.verification.shapes import RawRow, SampleShape, find_rows
from rollout_server.verification.token_rules import TokenRules


@dataclass(slots=True)
class VerifiedFiles:
    """The report about one or several files.

    Args:
        log: the findings.
        rows: number of rows by format, also of those with findings.
        response_tokens: tokens of the responses of all rows with valid lists.
        trained_tokens: those of them that train.
        completions: trained spans that were decoded and encoded again; 0 without a tokenizer.
        retokenized: how many of these gave other tokens. That is normal, and the reason to keep ids instead of texts.
    """

    log: FindingLog
    rows: Counter[SampleShape] = field(default_factory=Counter)
    response_tokens: int = 0
    trained_tokens: int = 0
    completions: int = 0
    retokenized: int = 0

    @property
    def ok(self) -> bool:
        """Whether no finding is fatal."""
        return self.log.number(Severity.FATAL) == 0


class SampleVerifier:
    """Check the rows of files.

    Args:
        limit: most findings that are kept; all are counted.
        shape: format of all rows; None: by the keys of each row.
        rules: the tokenizer of the samples; None: the checks that need one are left out.
    """

    def __init__(self, limit: int, shape: SampleShape | None = None, rules: TokenRules | None = None) -> None:
        self.report = VerifiedFiles(FindingLog(limit))
        self._shape, self._rules = shape, rules
        self._tokens = TurnTokens() if rules is None else rules.turn_tokens
        self._twice, self._equal, self._prompts, self._groups = (
            TrainedTwice(),
            EqualRows(),
            TracePrompts(),
            GroupChecks(),
        )

    def verify(self, files: Sequence[Path]) -> VerifiedFiles:
        """Check all rows of the files, which may belong together, and return the report.

        Raises OSError if a file cannot be opened, ValueError if it is Parquet and pyarrow is missing.
        """
        for path in files:
            for entry in read_entries(path):
                self._add_entry(str(path), entry)
        self.report.log.add(self._groups.finish())
        self.report.log.add(self._whole())
        return self.report

    def _add_entry(self, file: str, entry: FileEntry) -> None:
        location = Location(file, entry.number)
        if entry.fault:
            self.report.log.add([SampleFinding(FindingKind.UNREADABLE, location, entry.fault)])
            return
        for found in find_rows(entry.value, location, self._shape):
            if isinstance(found, SampleFinding):
                self.report.log.add([found])
            elif not self.report.log.add(self._check(found)):
                self.report.log.add(check_fields(found))  # which reports what was found before less exactly

    def _check(self, raw: RawRow) -> Iterator[SampleFinding]:
        self.report.rows[raw.shape] += 1
        row, found = read_lists(raw, 0 if self._rules is None else self._rules.loaded.vocabulary)
        yield from found
        yield from check_reward(raw)
        yield from self._groups.add(raw)
        if row is not None:
            self._count(row)
            yield from check_row(row)
            yield from check_alignment(row, self._tokens)
            yield from self._twice.check(row)
            yield from self._equal.check(row)
            yield from self._prompts.check(row)
            if self._rules is not None:
                yield from self._rules.check(row)

    def _count(self, row: SampleRow) -> None:
        report = self.report
        report.response_tokens += len(row.response)
        report.trained_tokens += sum(row.mask) if row.raw.trainable else 0
        if self._rules is not None:
            retokenized, completions = self._rules.retokenized(row)
            report.retokenized += retokenized
            report.completions += completions

    def _whole(self) -> Iterator[SampleFinding]:
        """Yield a finding if no token of the files trains."""
        if not self.report.trained_tokens and self.report.ok:
            rows = self.report.rows.total()
            text = (
                f"none of the {rows} rows has a token that trains" if rows else "the files contain no training samples"
            )
            yield SampleFinding(FindingKind.NOTHING_TRAINS, None, text)


def report_json(report: VerifiedFiles) -> Mapping[str, Any]:
    """Return the report as JSON values."""
    return {
        "ok": report.ok,
        "fatal": report.log.number(Severity.FATAL),
        "warnings": report.log.number(Severity.WARN),
        "rows": {shape.value: report.rows[shape] for shape in SampleShape if report.rows[shape]},
        "response_tokens": report.response_tokens,
        "trained_tokens": report.trained_tokens,
        "completions": report.completions,
        "retokenized": report.retokenized,
        "kinds": {kind.code: report.log.counts[kind] for kind in FindingKind if report.log.counts[kind]},
        "findings": [_finding_json(finding) for finding in report.log.first()],
    }


def _finding_json(finding: SampleFinding) -> Mapping[str, Any]:
    location = finding.location
    return {
        "severity": finding.kind.severity.value,
        "kind": finding.kind.code,
        "file": None if location is None else location.file,
        "row": None if location is None else location.number,
        "field": finding.field_path,
        "index": finding.index,
        "text": finding.text,
    }
