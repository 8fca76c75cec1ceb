"""`rollout eval`: evaluate an agent on a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.demo_output import plural
from rollout_server.cli.errors import Interrupted, quiet_transformers, report_errors
from rollout_server.cli.flags import CompletionFlags, accept_flags, pick_flags
from rollout_server.cli.json_output import open_output
from rollout_server.edge.grpc_loop import run_loop

if TYPE_CHECKING:
    from rich.console import Console

    from rollout_server.agent import Agent
    from rollout_server.authoring.rollout_result import Result
    from rollout_server.cli.local_server import LocalServer
    from rollout_server.evaluation.results_file import Job, ResultsFile
    from rollout_server.evaluation.summary import Summary


@dataclass(frozen=True, slots=True)
class EvalFlags:
    """Arguments and flags of `rollout eval`, without those of `CompletionFlags`."""

    target: Annotated[str, typer.Argument(metavar="TARGET", help="Agent: MODULE[:OBJECT] or FILE.py[:OBJECT].")]
    dataset: Annotated[
        Path,
        typer.Argument(
            metavar="DATASET", help="FILE.jsonl, .csv or .parquet with system_prompt, user_prompt, ground_truth."
        ),
    ]
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=NAME",
            help="Name of a column in the file, repeatable. Empty NAME: the file has no such column.",
        ),
    ] = None
    repeats: Annotated[int, typer.Option("-n", "--repeats", min=1, max=10_000, help="Rollouts per row.")] = 1
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N rows.")] = None
    concurrency: Annotated[int, typer.Option(min=1, max=10_000, help="Concurrent rollouts.")] = 8
    threshold: Annotated[float, typer.Option(help="Minimum reward of a rollout that passes.")] = 1.0
    min_pass_rate: Annotated[
        float | None, typer.Option(min=0, max=1, help="Exit with 1 if the pass rate is lower.")
    ] = None
    max_failures: Annotated[int | None, typer.Option(min=1, help="Stop after this many failed rollouts.")] = None
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Results, one line per rollout. Default: ./DATASET.results.jsonl.",
        ),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the results in the file; run missing, failed and changed rows.")
    ] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite the results file.")] = False
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="HTML report. Default: ./DATASET.report.html."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False

    @property
    def results_file(self) -> Path:
        """Path of the results file."""
        return self.results or Path(f"{self.dataset.stem}.results.jsonl")

    @property
    def report_file(self) -> Path:
        """Path of the HTML report."""
        return self.report or Path(f"{self.dataset.stem}.report.html")


@accept_flags(EvalFlags, CompletionFlags)
def evaluate(**values: Any) -> None:
    """Evaluate an agent on a dataset: pass rate, rewards, tokens, latency, HTML report.

    The dataset needs the columns system_prompt, user_prompt and ground_truth;
    --column maps other names. The agent reads all other columns from
    run.metadata. The command starts the server in its own process and writes
    each result as soon as its rollout ends. After an interruption, --resume
    continues.

    The exit code is 1 if a rollout failed or --min-pass-rate is not reached.

    With --json: {"summary": {"rollouts", "pass_rate", "mean_reward", "pass_at",
    "tokens", "seconds", "failures", ...}, "passed": bool,
    "files": {"results", "report"}}. The results themselves are in the file.
    """
    quiet_transformers()
    flags, completion = pick_flags(EvalFlags, values), pick_flags(CompletionFlags, values)
    with report_errors("eval"), open_output(as_json=flags.as_json) as output:
        from rich.console import Console

        from rollout_server.authoring.agent_loader import find_agents

        console = Console(highlight=False)
        jobs = _jobs(flags)
        [agent] = find_agents([flags.target])
        evaluation = _Evaluation(agent, flags, completion, console)
        try:
            run_loop(evaluation.run(jobs))
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; --resume continues {flags.results_file}") from None
        summary = evaluation.sum_up()
        unmet = _unmet(summary, flags, complete=evaluation.complete)
        files = {"results": str(flags.results_file), "report": str(flags.report_file)}
        output.write({"summary": asdict(summary), "passed": not unmet, "unmet": unmet, "files": files})
        _show(console, summary, unmet, files)
    raise typer.Exit(1 if unmet else 0)


class _Evaluation:
    """One evaluation: its flags, its results so far and its summary."""

    def __init__(self, agent: Agent, flags: EvalFlags, completion: CompletionFlags, console: Console) -> None:
        self._agent = agent
        self._flags = flags
        self._completion = completion
        self._console = console
        self._facts: Mapping[str, Any] = {}
        self._results: Sequence[Result] = ()
        self.complete = True

    async def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs that have no result yet."""
        from rollout_server.cli.local_server import print_server_log, serve_for_command

        with print_server_log(self._console):
            async with serve_for_command([self._agent], self._completion, self._flags.concurrency) as server:
                self._facts = self._evaluation_facts(server)
                file = self._open(jobs)
                left = [job for job in jobs if (job.row.number, job.repeat) not in file.results]
                self._flags.report_file.parent.mkdir(parents=True, exist_ok=True)
                self._flags.report_file.open("ab").close()  # fail before the rollouts if the report cannot be written
                self._print_start(server, jobs, left)
                with file.open(anew=not self._flags.resume):
                    try:
                        await self._evaluate(server, left, file)
                    finally:
                        self._results = sorted(file.results.values(), key=lambda each: (each.row, each.repeat))

    def sum_up(self) -> Summary:
        """Write the HTML report and return its figures."""
        from rollout_server.evaluation.report import report
        from rollout_server.evaluation.summary import summary_of

        summary = summary_of(self._results, self._flags.threshold)
        facts = {**self._facts, "dataset": str(self._flags.dataset), "rows": summary.rows}
        self._flags.report_file.write_text(report(facts, summary, self._results), encoding="utf-8")
        return summary

    async def _evaluate(self, server: LocalServer, left: Sequence[Job], file: ResultsFile) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from rollout_server.evaluation.runner import Plan, run_plan

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as bar:
            task = bar.add_task("rollouts", total=len(left))

            def on_result(result: Result) -> None:
                file.write(result)
                bar.advance(task)

            plan = Plan(left, self._agent.name, self._flags.concurrency, self._flags.max_failures)
            self.complete = await run_plan(server.client, server.endpoint, plan, on_result)

    def _open(self, jobs: Sequence[Job]) -> ResultsFile:
        from rollout_server.authoring.author_traceback import AuthorError
        from rollout_server.evaluation.results_file import ResultsFile

        path = self._flags.results_file
        if self._flags.resume and self._flags.overwrite:
            raise AuthorError("--resume and --overwrite exclude each other")
        file = ResultsFile(path, self._facts)
        if self._flags.resume:
            file.resume(jobs)
        elif path.exists() and not self._flags.overwrite:
            raise AuthorError(f"{path} already exists; use --resume to continue it or --overwrite to replace it")
        return file

    def _evaluation_facts(self, server: LocalServer) -> Mapping[str, Any]:
        return {"agent": self._agent.name, "version": self._agent.version, "endpoint": server.endpoint.description()}

    def _print_start(self, server: LocalServer, jobs: Sequence[Job], left: Sequence[Job]) -> None:
        from rollout_server.authoring.model_stubs import MOCK

        again = f", {len(jobs) - len(left)} of them already in the results file" if len(left) < len(jobs) else ""
        text = f"agent {self._agent.name}, {server.endpoint.title}: {plural(len(jobs), 'rollout')}{again}"
        self._console.print(text, markup=False, soft_wrap=True)
        if server.model_stub is not None and server.model_stub.name == MOCK:
            text = "a mock model completes; use --model-url URL for a real model or --script FILE for your own mock"
            self._console.print(text, markup=False, soft_wrap=True, style="yellow")


def _jobs(flags: EvalFlags) -> list[Job]:
    from rollout_server.authoring.dataset import column_names, read_rows
    from rollout_server.evaluation.results_file import jobs_of

    rows = read_rows(flags.dataset, column_names(flags.column or []))
    return jobs_of(rows[: flags.limit], flags.repeats)


def _unmet(summary: Summary, flags: EvalFlags, *, complete: bool) -> list[str]:
    """Return the reasons for exit code 1; empty if all is well."""
    failed = summary.rollouts - summary.finished
    unmet = [f"{failed} of {plural(summary.rollouts, 'rollout')} failed"] if failed else []
    if not complete:
        unmet.append(f"stopped early: --max-failures {flags.max_failures} is reached")
    if flags.min_pass_rate is not None and (summary.pass_rate is None or summary.pass_rate < flags.min_pass_rate):
        rate = (
            "unknown, because the agent returned no rewards"
            if summary.pass_rate is None
            else f"{summary.pass_rate:.4g}"
        )
        unmet.append(f"the pass rate is {rate}; --min-pass-rate requires {flags.min_pass_rate:g}")
    return unmet


def _show(console: Console, summary: Summary, unmet: Sequence[str], files: Mapping[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from rollout_server.inspection.escape import visible

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _figures(summary):
        table.add_row(Text(name, "dim"), Text(visible(value)))
    console.print(table)
    for text in unmet:
        console.print(Text(text, "red"), soft_wrap=True)
    for kind, text in summary.examples.items():
        console.print(Text(visible(f"  {kind}: {text}"), "red"), soft_wrap=True)
    console.print(
        f"next: open {files['report']}; each rollout is a line of {files['results']}", markup=False, soft_wrap=True
    )


def _figures(summary: Summary) -> list[tuple[str, str]]:
    rate = "no rewards" if summary.pass_rate is None else f"{summary.pass_rate:.1%} (reward >= {summary.threshold:g})"
    reward = "no rewards" if summary.mean_reward is None else f"{summary.mean_reward:.4g}"
    times = ", ".join(f"{name} {value:.3g} s" for name, value in summary.seconds.items())
    errors = ", ".join(f"{name} {count}" for name, count in summary.tool_errors.items())
    found = [
        (
            "rollouts",
            f"{summary.finished}/{summary.rollouts} completed, {plural(summary.rows, 'row')}",
        ),
        ("pass rate", rate),
        *((f"pass@{k}", f"{value:.1%}") for k, value in summary.pass_at.items()),
        ("mean reward", reward),
        ("tokens", f"{summary.tokens['generated']:.0f} generated, {summary.tokens['generated_mean']:.1f} per rollout"),
        ("time", times or "-"),
        ("tool calls", f"{summary.tool_calls}" + (f", errors: {errors}" if errors else ", no errors")),
    ]
    if summary.failures:
        found.append(("failures", ", ".join(f"{name} {count}" for name, count in summary.failures.items())))
    return found
