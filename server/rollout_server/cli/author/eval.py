"""`rollout eval`: evaluate an agent on a dataset."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.dataset_flags import DatasetFlags, load_rows
from rollout_server.cli.demo_output import plural
from rollout_server.cli.errors import Interrupted, quiet_transformers, report_errors
from rollout_server.cli.eval_output import show_progress, show_summary
from rollout_server.cli.flags import CompletionFlags, accept_flags, pick_flags
from rollout_server.cli.json_output import open_output
from rollout_server.edge.grpc_loop import run_loop

if TYPE_CHECKING:
    from rich.console import Console
    from rollout_client import TrainingSample

    from rollout_server.agent import Agent
    from rollout_server.authoring.dataset import DatasetRow
    from rollout_server.cli.local_server import LocalServer, ServerLog
    from rollout_server.evaluation.results_file import ResultsFile
    from rollout_server.evaluation.row_result import Job, RowResult
    from rollout_server.evaluation.samples_file import SamplesFile
    from rollout_server.evaluation.summary import Labels, Summary

_MOST_LISTED = 20
_FILES = "Files"


@dataclass(frozen=True, slots=True)
class EvalFlags:
    """Arguments and flags of `rollout eval`, without those of `DatasetFlags` and `CompletionFlags`."""

    target: Annotated[str, typer.Argument(metavar="TARGET", help="Agent: MODULE[:OBJECT] or FILE.py[:OBJECT].")]
    repeats: Annotated[int, typer.Option("-n", "--n", "--repeats", min=1, max=10_000, help="Rollouts per row.")] = 1
    concurrency: Annotated[int, typer.Option(min=1, max=10_000, help="Concurrent rollouts.")] = 8
    threshold: Annotated[float, typer.Option(help="Minimum reward of a rollout that passes.")] = 1.0
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="Also show figures by this metadata column, repeatable; info.level is nested."
        ),
    ] = None
    min_pass_rate: Annotated[
        float | None, typer.Option(min=0, max=1, help="Exit with 1 if the pass rate is lower.")
    ] = None
    max_failures: Annotated[int | None, typer.Option(min=1, help="Stop after this many failed rollouts.")] = None
    results: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_FILES,
            metavar="FILE",
            help="Results, one line per rollout. Default: ./DATASET.results.jsonl.",
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            rich_help_panel=_FILES,
            help="Keep the results in the file; run missing, failed and changed rows.",
        ),
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", rich_help_panel=_FILES, help="Overwrite the results file.")
    ] = False
    samples: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_FILES,
            metavar="FILE",
            help="Training samples, FILE.jsonl or .parquet: token ids, masks, logprobs.",
        ),
    ] = None
    report: Annotated[
        Path | None,
        typer.Option(rich_help_panel=_FILES, metavar="FILE", help="HTML report. Default: ./DATASET.report.html."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


@dataclass(frozen=True, slots=True)
class EvaluationFiles:
    """The dataset that an evaluation reads, and the files that it writes."""

    dataset: str
    results: Path
    report: Path
    samples: Path | None

    @property
    def written(self) -> dict[str, str]:
        """Paths of the files that are written, by kind."""
        named = {"results": self.results, "report": self.report, "samples": self.samples}
        return {kind: str(path) for kind, path in named.items() if path is not None}


@accept_flags(EvalFlags, DatasetFlags, CompletionFlags)
def evaluate(**values: Any) -> None:
    """Evaluate an agent on a dataset: rewards, pass@k, scores, tokens, HTML report.

    The prompt of a row is its column user_prompt, prompt, question or
    messages, a text or a list of messages; system_prompt and ground_truth or
    answer are optional. --column maps other names. The agent reads all other
    columns from run.metadata. Without DATASET, the agent provides its own.

    The command starts the server in its own process and writes each result as
    soon as its rollout ends. After an interruption, --resume continues.

    The exit code is 1 if a rollout failed or --min-pass-rate is not reached.

    With --json: {"summary": {"rollouts", "pass_rate", "reward", "scores",
    "pass_at", "pass_hat", "tokens", "seconds", "failures", "by", ...},
    "passed": bool, "files": {"results", "report", "samples"}, "resumed":
    {"results", "changed_rows", "code_changed"}}. The results themselves are in
    the file.
    """
    quiet_transformers()
    flags, data = pick_flags(EvalFlags, values), pick_flags(DatasetFlags, values)
    completion = pick_flags(CompletionFlags, values)
    with report_errors("eval"), open_output(as_json=flags.as_json) as output:
        from rich.console import Console

        from rollout_server.authoring.agent_loader import find_agents
        from rollout_server.evaluation.summary import labels_of

        console = Console(highlight=False)
        [agent] = find_agents([flags.target])
        rows = load_rows(data, agent)
        labels = labels_of(rows, flags.by or [])
        files = _files(flags, data, agent)
        evaluation = _Evaluation(agent, flags, completion, console, files)
        try:
            run_loop(evaluation.run(rows))
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; --resume continues {files.results}") from None
        summary = evaluation.sum_up(labels)
        unmet = _unmet(summary, flags, complete=evaluation.complete)
        document = {"summary": asdict(summary), "passed": not unmet, "unmet": unmet, "files": files.written}
        output.write({**document, "resumed": evaluation.resumed})
        show_summary(console, summary, unmet, files.written)
    raise typer.Exit(1 if unmet else 0)


class _Evaluation:
    """One evaluation: its flags, its results so far and its summary."""

    def __init__(
        self, agent: Agent, flags: EvalFlags, completion: CompletionFlags, console: Console, files: EvaluationFiles
    ) -> None:
        self._agent = agent
        self._flags = flags
        self._completion = completion
        self._console = console
        self._files = files
        self._facts: Mapping[str, Any] = {}
        self._results: Sequence[RowResult] = ()
        self._samples: SamplesFile | None = None
        self.complete = True
        self.resumed: Mapping[str, Any] | None = None

    async def run(self, rows: Sequence[DatasetRow]) -> None:
        """Run all rollouts that have no result yet."""
        from rollout_server.cli.local_server import print_server_log, serve_for_command
        from rollout_server.evaluation.row_result import jobs_of

        jobs = jobs_of(rows, self._flags.repeats)
        with print_server_log(self._console) as log:
            async with serve_for_command([self._agent], self._completion, self._flags.concurrency) as server:
                self._facts = self._evaluation_facts(server)
                file, samples = self._open()
                self._samples = samples
                with file.lock():
                    if self._flags.resume:
                        await asyncio.to_thread(self._resume, file, samples, jobs)
                    left = [job for job in jobs if (job.row.number, job.repeat) not in file.results]
                    self._check_report()
                    self._print_start(server, jobs, left)
                    anew = not self._flags.resume
                    with samples.open(anew=anew) if samples else nullcontext(), file.open(anew=anew):
                        try:
                            await self._evaluate(server, log, left, file)
                        finally:
                            self._results = list(file.results.values())

    def sum_up(self, labels: Labels) -> Summary:
        """Complete the samples file, write the HTML report and return its figures."""
        from rollout_server.evaluation.report import report
        from rollout_server.evaluation.summary import summary_of

        if self._samples is not None:
            self._samples.finish()
        summary = summary_of(self._results, self._flags.threshold, labels)
        facts = {**self._facts, "dataset": self._files.dataset, "rows": summary.rows}
        self._files.report.write_bytes(report(facts, summary, self._results))
        return summary

    async def _evaluate(self, server: LocalServer, log: ServerLog, left: Sequence[Job], file: ResultsFile) -> None:
        from rollout_server.evaluation.progress import RunningFigures
        from rollout_server.evaluation.runner import Plan, run_plan

        samples = self._samples
        total = len(left) + len(file.results)
        figures = RunningFigures(total, file.results.values(), time.monotonic)
        with show_progress(self._console, figures) as shown:

            def on_result(result: RowResult, found: Sequence[TrainingSample]) -> None:
                if samples is not None:  # before the result, so that the samples of each result are complete
                    samples.write(found)
                result = log.with_reason(result)
                file.write(result)
                figures.add(result)
                shown()

            flags = self._flags
            plan = Plan(left, self._agent.name, flags.concurrency, flags.max_failures, samples is not None)
            self.complete = await run_plan(server.client, server.endpoint, plan, on_result)

    def _open(self) -> tuple[ResultsFile, SamplesFile | None]:
        from rollout_server.authoring.agent_loader import code_digest
        from rollout_server.authoring.author_traceback import AuthorError
        from rollout_server.evaluation.results_file import ResultsFile
        from rollout_server.evaluation.samples_file import SamplesFile

        flags, files = self._flags, self._files
        if not math.isfinite(flags.threshold):
            raise AuthorError(f"--threshold must be a finite number, not {flags.threshold}")
        if flags.resume and flags.overwrite:
            raise AuthorError("--resume and --overwrite exclude each other")
        names = [*files.written.values(), files.dataset]
        if len({Path(each).resolve() for each in names}) < len(names):
            raise AuthorError("--results, --report, --samples and the dataset must be different files")
        file = ResultsFile(files.results, self._facts, code_digest(flags.target))
        samples = SamplesFile(files.samples) if files.samples else None
        if not flags.resume and not flags.overwrite and file.exists():
            raise AuthorError(f"{file.path} already exists; use --resume to continue it or --overwrite to replace it")
        if samples and samples.exists() and not flags.overwrite and not file.exists():
            raise AuthorError(f"{samples.path} already exists, without {file.path}; --overwrite replaces it")
        return file, samples

    def _resume(self, file: ResultsFile, samples: SamplesFile | None, jobs: Sequence[Job]) -> None:
        file.resume(jobs)
        if samples:
            file.results = samples.resume(file.results, file.other_uids)
        changed = {"changed_rows": file.changed_rows, "code_changed": file.code_changed}
        self.resumed = {"results": len(file.results), **changed}

    def _check_report(self) -> None:
        """Raise OSError if the report cannot be written, before rollouts run."""
        report = self._files.report
        report.parent.mkdir(parents=True, exist_ok=True)
        report.open("ab").close()
        if report.is_file() and report.stat().st_size == 0:
            report.unlink()  # an interruption leaves no empty page

    def _evaluation_facts(self, server: LocalServer) -> Mapping[str, Any]:
        facts = {"agent": self._agent.name, "version": self._agent.version, "endpoint": server.endpoint.description()}
        return {**facts, "samples": str(self._files.samples)} if self._files.samples else facts

    def _print_start(self, server: LocalServer, jobs: Sequence[Job], left: Sequence[Job]) -> None:
        from rollout_server.authoring.model_stubs import MOCK

        again = f", {len(jobs) - len(left)} of them already in the results file" if len(left) < len(jobs) else ""
        text = f"agent {self._agent.name}, {server.endpoint.title}: {plural(len(jobs), 'rollout')}{again}"
        self._console.print(text, markup=False, soft_wrap=True)
        notes = []
        if self.resumed and self.resumed["changed_rows"]:
            notes.append(
                f"changed since the earlier results, so they run again: rows {_listed(self.resumed['changed_rows'])}"
            )
        if self.resumed and self.resumed["code_changed"] and self.resumed["results"]:
            notes.append("the agent's code changed since the earlier results, which stay; --overwrite starts again")
        if server.model_stub is not None and server.model_stub.name == MOCK:
            notes.append(
                "a mock model completes; use --model-url URL for a real model or --script FILE for your own mock"
            )
        if self._agent.overrides("reward_group"):
            notes.append(
                "reward_group and the rubric's group functions are not called, because an evaluation starts rollouts one by one"
            )
        for note in notes:
            self._console.print(note, markup=False, soft_wrap=True, style="yellow")


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_LISTED]))
    return shown if len(numbers) <= _MOST_LISTED else f"{shown} and {len(numbers) - _MOST_LISTED} more"


def _files(flags: EvalFlags, data: DatasetFlags, agent: Agent) -> EvaluationFiles:
    stem = data.stem(agent.name)
    dataset = str(data.dataset or f"of agent {agent.name}")
    results, report = Path(f"{stem}.results.jsonl"), Path(f"{stem}.report.html")
    return EvaluationFiles(dataset, flags.results or results, flags.report or report, flags.samples)


def _unmet(summary: Summary, flags: EvalFlags, *, complete: bool) -> list[str]:
    """Return the reasons for exit code 1; empty if all is well."""
    failed = summary.rollouts - summary.finished
    unmet = [f"{failed} of {plural(summary.rollouts, 'rollout')} failed"] if failed else []
    if not complete:
        unmet.append(f"stopped early: --max-failures {flags.max_failures} is reached")
    if flags.min_pass_rate is not None and (summary.pass_rate is None or summary.pass_rate < flags.min_pass_rate):
        rate = "unknown, because no rollout has a reward" if summary.pass_rate is None else f"{summary.pass_rate:.4g}"
        unmet.append(f"the pass rate is {rate}; --min-pass-rate requires {flags.min_pass_rate:g}")
    return unmet
